"""The tables of docs/results.md, from the files in benchmarks/results; a test holds the page to them.

python docs/results.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from noiseclock.lab.curves import curve
from noiseclock.lab.results import Cell, Results, read
from noiseclock.lab.statistics import table

PAGE = Path(__file__).with_name("results.md")
RAW = PAGE.parent.parent / "benchmarks" / "results"
STEPS = (5_000, 10_000, 20_000)
LR = 0.0004


def ruler() -> list[str]:
    """FID of real images, in each precision of the network."""
    found = json.loads((RAW / "fid-ruler-h200.json").read_text())["scores"]
    rows = [(s["precision_of_features"], f"{s['frechet']:.3f}", f"{s['train_itself']:.1e}" if s["train_itself"] else "0") for s in found]
    return lines(("features in", "50,000 training against 10,000 test images", "training against themselves"), rows)


def sprint(folder: str) -> list[str]:
    """A schedule: FID through training, and the other measures at its end, the best of each in bold."""
    results = read(RAW / folder)
    rows = [row(results, folder, method) for method in results.methods]
    fids = [f"FID, {step // 1000}k" for step in STEPS]
    return lines(["", *fids, "at uniform's time", "against uniform", "bits/dim", "held-out loss", "KID·10³", "seeds"], rows)


def row(results: Results, folder: str, method: str) -> list[str]:
    """A method: FID at the steps, at the time in which the baseline was done, and so on."""
    cells = results.of(method, LR)
    fids = [spread([value(cell, "frechet", step) for cell in cells]) for step in STEPS]
    there = [cell for cell in cells if value(cell, "frechet", STEPS[-1]) is not None]
    end = max((curve(cell, "frechet").seconds[-1] for cell in results.of(results.baseline, LR)), default=0)
    in_time = [float(np.interp(end, curve(cell, "frechet").seconds, curve(cell, "frechet").value)) for cell in there]
    last = [spread([value(cell, name, STEPS[-1]) for cell in there], scale) for name, scale in (("bits", 1), ("validation", 1), ("kernel", 1000))]
    changes = {line[0]: line[4] for line in table(read(RAW / folder, at=STEPS[-1]), "frechet").lines}
    compared = changes[method] if there and method != results.baseline else ""
    return [f"`{method}`", *fids, spread(in_time), compared, *last, str(len(there) or "")]


def value(cell: Cell, metric: str, step: int) -> float | None:
    """Of the evaluation at a step, if there was one."""
    return next((point[metric] for point in cell.points if point["step"] == step and metric in point), None)


def spread(values: list[float | None], scale: float = 1) -> str:
    """Mean, and standard deviation of several, in three digits or what the spread allows."""
    known = [scale * v for v in values if v is not None]
    if not known:
        return ""
    digits = max(0, 2 - int(np.floor(np.log10(abs(mean(known)))))) if mean(known) else 0
    digits += mean(known) < 10  # of losses and bits, in which methods differ by less
    return f"{mean(known):.{digits}f}" + (f" ± {stdev(known):.{digits}f}" if len(known) > 1 else "")


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


TABLES = {"ruler": ruler, "linear": partial(sprint, "cifar10-sprint-20k")}


def page(text: str) -> str:
    """The page with its tables made anew."""
    for name, make in TABLES.items():
        begin = f"<!-- table: {name} -->\n"
        before, found, after = text.partition(begin)
        if not found:
            raise SystemExit(f"{PAGE.name} has no place for the table {name}")
        text = before + begin + "\n".join(make()) + "\n" + after[after.index("<!-- end -->") :]
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
