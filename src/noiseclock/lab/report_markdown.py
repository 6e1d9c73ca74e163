"""A comparison's answer in Markdown, and the text that it shares with the HTML page."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from noiseclock.lab import statistics
from noiseclock.lab.ended_early import Early, ended_early
from noiseclock.lab.results import Results
from noiseclock.lab.statistics import BETTER, SAME, WORSE, Table


def markdown(results: Results) -> str:
    """The answer, the tables, what is needed to repeat it, and what is missing."""
    parts = [f"# {_text(heading(results))}", _text(statistics.answer(results)), _text(" · ".join(facts(results)))]
    for own_lr in (False, True) if results.tuned else (False,):
        for metric in statistics.measured(results):
            t = statistics.table(results, metric, own_lr=own_lr)
            early = [] if own_lr else ended_early(results, t)
            parts += [f"## {_text(capital(t.title))}{', each at its own best learning rate' if own_lr else ''}", _rows(t, early)]
            parts += [_text(" ".join(t.notes)), _rows_of_early(t, early) if early else ""]
    settings = {**results.config.get("settings", {}), **results.config.get("made with", {})}
    parts += ["## To repeat it", _block(command(results))]
    parts += [_grid(["setting", "value"], ([_text(name), _code(shown(value))] for name, value in settings.items()))] if settings else []
    parts += ["## What is missing or damaged", "\n".join(f"- {_text(problem)}" for problem in results.problems)] if results.problems else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _rows(t: Table, elsewhere: Sequence[Early]) -> str:
    """The table, without methods that have no value in it and have one in another table."""
    left_out = {early.method for early in elsewhere} & {row.method for row in t.rows if not row.final.n}
    lines = [
        [_code(method), *(f"**{text}**" if text in (BETTER, WORSE, SAME) else _text(text) for text in rest)]
        for method, *rest in t.lines
        if method not in left_out
    ]
    return _grid([_text(head) for head in t.headings], lines)


def _rows_of_early(t: Table, found: Sequence[Early]) -> str:
    heads = ["ended early", "learning rate", "updates", t.title, f"{t.baseline} there", f"against {t.baseline}", "seeds"]
    return _grid([_text(head) for head in heads], ([_code(early.method), *map(_text, early.line)] for early in found))


def _grid(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def _code(text: str) -> str:
    """A code span in a table, where only backquotes and bars are special characters."""
    fence, space = _fence(text, 1), " " if "`" in text else ""
    return f"{fence}{space}{_one_line(text).replace('|', chr(92) + '|')}{space}{fence}"


def _block(text: str) -> str:
    fence = _fence(text, 3)
    return f"{fence}\n{text}\n{fence}"


def _fence(text: str, least: int) -> str:
    """More backquotes than the text has in a row."""
    return "`" * max(least, 1 + max((len(run) for run in re.findall("`+", text)), default=0))


def _text(text: str) -> str:
    """Text in which all special characters of Markdown and HTML are escaped.

    >>> print(_text("a_b <img> | **c**"))
    a\\_b \\<img\\> \\| \\*\\*c\\*\\*
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~!&])", r"\\\1", _one_line(text))


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- words for both -----------------------------------------------------------------------------------------------------------------------


def heading(results: Results) -> str:
    """What was compared."""
    seeds = statistics.seeds_in_words(len({cell.seed for cell in results.of(method)}) for method in results.methods)
    return f"{results.recipe}: {many(len(results.methods), 'method')}, {seeds}"


def facts(results: Results) -> list[str]:
    """How it was compared, as far as is known."""
    settings, config = results.config.get("settings", {}), results.config
    point = next((cell.points[-1] for cell in results.cells if cell.points), {})
    batch = f" of {settings['batch']} images" if isinstance(settings.get("batch"), int) else ""
    solver = f" by {point['solver']} in {point.get('solver_steps', '?')} steps" if "solver" in point else ""
    until = f"{config['until']:,} of " if config.get("until", settings.get("updates")) != settings.get("updates") else ""
    there = ("updates", "batch", "solver", "solver_steps")  # said already
    changed = [f"{name.replace('_', ' ')} {shown(settings[name])}" for name in config.get("changed", []) if name in settings and name not in there]
    known = [
        f"with {', '.join(changed)}" if changed else "",
        f"{until}{settings['updates']:,} updates{batch}" if isinstance(settings.get("updates"), int) else "",
        f"learning rate {results.lr:g}" if results.lr is not None else "",
        f"evaluated every {config['every']:,} updates" if "every" in config else "",
        f"{point['samples']:,} samples{solver}" if "samples" in point else "",
        "time per update measured for each method alone" if "timed" in config else "",
        *sorted({str(cell.made_with["machine"]) for cell in results.cells if "machine" in cell.made_with}),
    ]
    return [fact for fact in known if fact]


def command(results: Results) -> str:
    """The command line, rebuilt from compare.json."""
    config = results.config
    settings, changed = config.get("settings", {}), config.get("changed", [])
    seeds = config.get("seeds", results.seeds)
    options: dict[str, Sequence[Any]] = {
        "--samplers": config.get("methods", results.methods),
        "--seeds": [max(seeds) + 1] if seeds else [],  # their number, which is all that the option takes
        "--lr": config.get("lrs", results.lrs),
        **{
            f"--{name.replace('_', '-')}": [config[name]] for name in ("every", "samples", "vlb_images", "until") if isinstance(config.get(name), int)
        },
    }
    options = {name: values for name, values in options.items() if values}
    options |= {_option(name, settings[name]): _values(settings[name]) for name in changed if name in settings}
    words = [shlex.quote(str(word)) for name, values in options.items() for word in (name, *values)]
    return " ".join(["noiseclock compare", shlex.quote(results.recipe), *words])


def _option(name: str, value: Any) -> str:
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def _values(value: Any) -> Sequence[Any]:
    """The words after an option."""
    return [] if isinstance(value, bool) else value if isinstance(value, list) else [value]


def many(n: int, what: str) -> str:
    """A number of things."""
    return f"{n} {what}{'' if n == 1 else 's'}"


def capital(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


def shown(value: Any) -> str:
    """A setting as text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
