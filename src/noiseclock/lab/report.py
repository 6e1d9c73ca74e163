"""A comparison's answer, for people: a page, Markdown, or figures for a paper.

    write("results/digits")                      # results/digits/report.html
    write("results/digits", format="markdown")   # results/digits/report.md
    write("results/digits", format="png")        # results/digits/figures/
    write("results/digits", "min-snr.html", methods=("min-snr", "variance-optimal+min-snr"))

It reads result files and nothing else. A report names what is missing or damaged in them, and shows the rest.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from noiseclock.lab.errors import Failure, Mistake, choose
from noiseclock.lab.report_figures import figures
from noiseclock.lab.report_markdown import markdown
from noiseclock.lab.report_page import page
from noiseclock.lab.results import read

__all__ = ["figures", "markdown", "page", "write"]

FORMATS = {"html": "report.html", "markdown": "report.md", "png": "figures"}


def write(
    folder: str | Path,
    out: str | Path | None = None,
    *,
    format: str = "html",
    at: int | None = None,
    methods: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> Path:
    """Write the report on a folder of results, into that folder unless `out` is given, and return its path.

    at: results as of that update. methods: of these methods alone, compared with the first; `out` must be given. seeds: likewise of these alone.
    """
    folder = Path(folder)
    choose("format", format, FORMATS)
    if not folder.is_dir():
        raise Mistake(f"there is no folder {folder}; give the one that `noiseclock compare` has written")
    if not any((folder / name).exists() for name in ("compare.json", "cells")):
        raise Mistake(
            f"{folder} holds no comparison; give the folder that `noiseclock compare` has written, and look at a single training with "
            "`noiseclock evaluate` or `noiseclock watch`"
        )
    if (methods or seeds) and not out:
        raise Mistake("a report on some methods or seeds must not replace the one on all; say with --out where to write it")
    results = read(folder, at=at, methods=methods, seeds=seeds)
    if at is not None and not any(cell.finished for cell in results.cells):
        raise Mistake(f"no training in {folder} was evaluated at update {at:,}")
    path = Path(out) if out else folder / FORMATS[format]
    if at is not None and not out:
        path = path.with_name(f"{path.stem}-{at}{path.suffix}")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if format == "png":
            figures(results, path)
            return path
        text = page(results) if format == "html" else markdown(results)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Failure(f"{path} could not be written: {error.strerror or error}") from error
    return path
