"""A comparison's folder, read as it is: whole, half-written, damaged or from another version.

    compare.json                 what was compared
    costs.json                   milliseconds per update, each method timed alone, if trainings shared a machine; may be missing
    cells/NAME/                  one training: a method, a learning rate, a seed
      cell.json                  which ones
      points.jsonl               one line per evaluation
      log.jsonl                  the training's own log
      samples/step-00000500.png  grids of samples
      finished.json              there once the training is done
      failed.json                why it could not go on, if that was so when it last ran

`read` never raises because of the folder's content: it counts what is missing or malformed, names it in `problems`, and leaves it out. Its result is
clean: records are sorted by step, one per step, and a field of NUMBERS or WORDS has a value of its type or is absent. Numbers may be NaN or infinite.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from noiseclock.lab.errors import choose

VERSION = 1
METRICS = ("frechet", "kernel", "validation", "bits", "precision", "recall")
NUMBERS = (*METRICS, "images", "seconds", "samples", "solver_steps", "loss", "weighted", "norm", "lr", "skipped")
WORDS = ("solver", "frechet_name", "sampler")
# pairs of lists of equal length, both present or neither; the first two pairs are in validations, the last in evaluations
CURVES = (("time", "loss_by_time"), ("density_time", "density"), ("utility_time", "utility"))
OF_THE_CELL = ("sampler", "weighting", "correct", "lr", "seed")  # settings in which cells of one comparison may differ
THEN = ", then "  # between the machines of a training that changed them on the way
_NAMED = 3  # names that a message lists at most


@dataclass(frozen=True)
class Cell:
    """One training.

    points: evaluations. train, validations: the two kinds of records of its log. pictures: grids of samples by step. settings: its recipe.
    made_with: versions, machine and number of jobs. timed: its times come from costs.json, not from its own log. failed: why it could not go on, if
    that was so. Records are sorted by "step", an int.
    """

    method: str
    lr: float
    seed: int
    settings: dict[str, Any] = field(default_factory=dict)
    points: list[dict[str, Any]] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    pictures: dict[int, Path] = field(default_factory=dict)
    finished: bool = False
    folder: Path = Path()
    made_with: dict[str, Any] = field(default_factory=dict)
    timed: bool = False
    failed: str = ""

    @property
    def key(self) -> tuple[str, float, int]:
        """Which training it is."""
        return self.method, self.lr, self.seed

    @property
    def jobs(self) -> int:
        """How many trainings shared the machine, where that is known."""
        jobs: Any = self.made_with.get("jobs")
        return int(jobs) if _is_count(jobs) else 1


@dataclass(frozen=True)
class Results:
    """config: compare.json without malformed fields. cells: one for each method, learning rate and seed. problems: what was wrong, in words."""

    config: dict[str, Any]
    cells: list[Cell]
    problems: list[str]

    @property
    def recipe(self) -> str:
        """The name of the recipe, or of the data where that is not known."""
        data = [cell.settings["data"] for cell in self.cells if isinstance(cell.settings.get("data"), str)]
        return str(self.config.get("recipe") or (data[0] if data else "an unknown recipe"))

    @property
    def subject(self) -> str:
        """What was trained on, for a sentence: the recipe, or the data that took the place of the recipe's."""
        data = self.config.get("settings", {}).get("data")
        return str(data) if "data" in self.config.get("changed", []) and _is_text(data) else self.recipe

    @property
    def methods(self) -> list[str]:
        """All methods with a cell: the baseline, then those of compare.json in its order, then others."""
        there = dict.fromkeys(cell.method for cell in self.cells)
        order = [self.baseline, *self.config.get("methods", []), *there]
        return [method for method in dict.fromkeys(order) if method in there]

    @property
    def baseline(self) -> str:
        """What the others are compared with: as compare.json says, else "uniform"."""
        return str(self.config.get("baseline", "uniform"))

    @property
    def seeds(self) -> list[int]:
        """The seeds of all cells."""
        return sorted({cell.seed for cell in self.cells})

    @property
    def lrs(self) -> list[float]:
        """The learning rates of all cells."""
        return sorted({cell.lr for cell in self.cells})

    @property
    def lr(self) -> float | None:
        """The common learning rate: the recipe's own if it was run, else the first of compare.json that was run, else the smallest."""
        order = [self.config.get("settings", {}).get("lr"), *self.config.get("lrs", []), *self.lrs]
        return next((lr for lr in order if lr in self.lrs), None)

    @property
    def tuned(self) -> bool:
        """Was any method trained to its end at several learning rates?"""
        return any(len({cell.lr for cell in self.of(method) if cell.finished}) > 1 for method in self.methods)

    def of(self, method: str, lr: float | None = None) -> list[Cell]:
        """The cells of a method, at one learning rate or at all, by learning rate and seed."""
        found = [cell for cell in self.cells if cell.method == method and lr in (None, cell.lr)]
        return sorted(found, key=lambda cell: (cell.lr, cell.seed))


def read(folder: str | Path, *, at: int | None = None, methods: Sequence[str] = (), seeds: Sequence[int] = ()) -> Results:
    """What a comparison has written so far.

    at: as if it had ended at that update; a training that was evaluated there counts as finished. methods: as if it had been of these alone, the
    first of which is the baseline; a Mistake if it has none of that name. seeds: as if it had been of these alone.
    """
    folder = Path(folder)
    problems: list[str] = []
    config = _config(folder / "compare.json", problems)
    cells = [cell for path in _inside(folder / "cells") if (cell := _cell(path, problems))]
    cells = _once_each(cells, problems)
    if methods:
        there = Results(config, cells, problems).methods
        config = {**config, "methods": [choose("method", method, there) for method in methods], "baseline": methods[0]}
        cells = [cell for cell in cells if cell.method in methods]
    if seeds:
        there = [str(seed) for seed in Results(config, cells, problems).seeds]
        config = {**config, "seeds": [int(choose("seed", str(seed), there)) for seed in seeds]}
        cells = [cell for cell in cells if cell.seed in seeds]
    if (folder / "costs.json").exists():
        costs = _costs(folder / "costs.json", cells, problems)
        cells = [_timed(cell, costs.get(cell.method)) for cell in cells]
        config = {**config, "timed": True}
    if at is not None:
        cells = [_up_to(cell, at) for cell in cells]
        config = {**config, "until": at}
    if not cells:
        problems.append("there is no cell that can be read, so there is nothing to compare")
    return Results(config, cells, problems + _not_there(config, cells) + _not_alike(cells))


# --- the parts ----------------------------------------------------------------------------------------------------------------------------


def _config(path: Path, problems: list[str]) -> dict[str, Any]:
    """compare.json without fields of a wrong type."""
    config = _object(path, problems)
    if config is None:
        return {}
    if config.get("version") != VERSION:
        problems.append(f"{path.name} has version {_shown(config.get('version'))}, and this reads version {VERSION}; what is alike is shown")
    kinds: dict[str, Callable[[Any], bool]] = {
        "recipe": _is_text, "baseline": _is_text, "settings": _is_object, "made with": _is_object, "every": _is_count, "samples": _is_count,
        "methods": _list_of(_is_text), "changed": _list_of(_is_text), "seeds": _list_of(_is_count), "lrs": _list_of(_is_rate),
        "options": lambda value: _is_object(value) and all(map(_is_object, value.values())),
    }  # fmt: skip
    return _fitting(config, kinds, path, problems)


def _costs(path: Path, cells: Sequence[Cell], problems: list[str]) -> dict[str, float]:
    """Milliseconds per update by method."""
    costs = _fitting(_object(path, problems) or {}, {"milliseconds": _is_object}, path, problems).get("milliseconds", {})
    known = _fitting(costs, dict.fromkeys(costs, _is_rate), path, problems)
    if unknown := sorted({cell.method for cell in cells} - known.keys()):
        problems.append(f"{path.name} has no milliseconds for {_some(unknown)}; their times are left out")
    return known


def _timed(cell: Cell, milliseconds: float | None) -> Cell:
    """The cell with the times of costs.json, or without times if `milliseconds` is None."""

    def timed(record: dict[str, Any]) -> dict[str, Any]:
        time = {} if milliseconds is None else {"seconds": int(record["step"]) * milliseconds / 1000}
        return {name: value for name, value in record.items() if name != "seconds"} | time

    points, train, validations = ([timed(record) for record in records] for records in (cell.points, cell.train, cell.validations))
    return replace(cell, points=points, train=train, validations=validations, timed=True)


def _cell(folder: Path, problems: list[str]) -> Cell | None:
    path = folder / "cell.json"
    about = _object(path, problems)
    if about is None:
        return None
    about = _fitting(about, {"method": _is_text, "lr": _is_rate, "seed": _is_count, "settings": _is_object, "made with": _is_object}, path, problems)
    if missing := [name for name in ("method", "lr", "seed") if name not in about]:
        problems.append(f"{_place(path)}: without {' and '.join(missing)} the cell is left out")
        return None
    log = _records(folder / "log.jsonl", problems)
    return Cell(
        about["method"], float(about["lr"]), about["seed"], about.get("settings", {}),
        points=_records(folder / "points.jsonl", problems),
        train=[record for record in log if record.get("kind") == "train"],
        validations=[record for record in log if record.get("kind") == "validation"],
        pictures=_pictures(folder / "samples"), finished=(folder / "finished.json").is_file(), folder=folder, made_with=about.get("made with", {}),
        failed=_failed(folder / "failed.json", problems),
    )  # fmt: skip


def _failed(path: Path, problems: list[str]) -> str:
    if not path.is_file():
        return ""
    about = _fitting(_object(path, problems) or {}, {"why": _is_text}, path, problems)
    return about.get("why") or "for an unknown reason"


def _pictures(folder: Path) -> dict[int, Path]:
    """Sample grids by step, without symbolic links, which may lead out of the folder."""
    named = [(re.fullmatch(r"step-([0-9]{1,15})\.png", path.name), path) for path in _inside(folder)]
    return {int(name[1]): path for name, path in named if name and path.is_file() and not path.is_symlink()}


def _inside(folder: Path) -> list[Path]:
    """What is in a folder, in order; without hidden names, which are locks and unfinished files."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


# --- what is wrong with the whole ---------------------------------------------------------------------------------------------------------


def _once_each(cells: list[Cell], problems: list[str]) -> list[Cell]:
    """Of duplicate cells, as after a careless merge, keep the one that got further."""
    best: dict[tuple[str, float, int], Cell] = {}
    for cell in cells:
        first = best.setdefault(cell.key, cell)
        if first is not cell:
            problems.append(f"{_place(first.folder)} and {_place(cell.folder)} are the same training; the one that got further counts")
            best[cell.key] = max(first, cell, key=lambda c: (c.finished, _step(c)))
    return [best[key] for key in sorted(best)]


def _not_there(config: dict[str, Any], cells: list[Cell]) -> list[str]:
    """Problems: cells that compare.json lists and the folder lacks, and cells that are not finished or not evaluated."""
    wanted = {_name(key): None for key in product(*(config.get(part, []) for part in ("methods", "lrs", "seeds")))}
    there = {_name(cell.key): cell for cell in cells}
    named = {
        # a comparison that is extended by methods and by seeds need not have every seed of every method
        "not begun": [name for name in wanted if name not in there],
        "failed": [f"{name} (at update {_step(cell):,}: {cell.failed})" for name, cell in there.items() if cell.failed],
        "not finished": [f"{name} (at update {_step(cell):,})" for name, cell in there.items() if not (cell.finished or cell.failed)],
        "without an evaluation": [name for name, cell in there.items() if not cell.points],
    }
    return [f"{len(names)} of {len({**wanted, **there})} trainings {what}: {_some(names)}" for what, names in named.items() if names]


def _not_alike(cells: list[Cell]) -> list[str]:
    """Problems: settings that differ between cells and should not."""
    seen: dict[str, Counter[str]] = {}
    for cell in cells:
        for name, value in cell.settings.items():
            if name not in OF_THE_CELL:
                seen.setdefault(name, Counter())[_shown(value)] += 1
    different = {name: [f"{value} in {n}" for value, n in values.items()] for name, values in seen.items() if len(values) > 1}
    return [f"the trainings have different settings, {_shown(name)} is {_some(values)}" for name, values in different.items()]


def _up_to(cell: Cell, at: int) -> Cell:
    """The cell as it was after update `at`."""
    points, train, validations = ([record for record in records if record["step"] <= at] for records in (cell.points, cell.train, cell.validations))
    pictures = {step: path for step, path in cell.pictures.items() if step <= at}
    finished = any(point["step"] == at for point in points)
    failed = "" if finished else cell.failed  # what happened later is not asked
    return replace(cell, points=points, train=train, validations=validations, pictures=pictures, finished=finished, failed=failed)


def _name(key: Sequence[Any]) -> str:
    return f"{key[0]}, lr {key[1]:g}, seed {key[2]}"


def _step(cell: Cell) -> int:
    """How far a cell got."""
    return max([0, *(int(record["step"]) for record in [*cell.points[-1:], *cell.train[-1:]])])


def _some(names: list[str]) -> str:
    return "; ".join(names[:_NAMED]) + (f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _shown(value: Any) -> str:
    """A value that may be anything, kept short."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _place(path: Path) -> str:
    """A path as messages show it: without the folder that was asked for, and without control characters."""
    name = path.name if path.name in ("compare.json", "costs.json") else "/".join(path.parts[-2:])
    return name if name.isprintable() else ascii(name)


# --- files --------------------------------------------------------------------------------------------------------------------------------


def _bytes(path: Path, problems: list[str]) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        problems.append(f"{_place(path)} is missing")
    except OSError as error:
        problems.append(f"{_place(path)} cannot be read ({error.strerror})")
    return None


def _object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file; None, and an entry in `problems`, if there is none."""
    text = _bytes(path, problems)
    if text is None:
        return None
    value = _parsed(text)
    if not isinstance(value, dict):
        problems.append(f"{_place(path)} does not hold a JSON object")
        return None
    return value


def _records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """The cleaned records of a JSON-lines file, by step; of two with the same kind and step the later one, which a resumed run has written."""
    *lines, torn = (_bytes(path, problems) or b"").split(b"\n")
    found: dict[tuple[str, int], dict[str, Any]] = {}
    wrong = Counter({"malformed lines": int(bool(torn))})
    for line in lines:
        record = _parsed(line)
        if not isinstance(record, dict) or not _is_count(record.get("step")):
            wrong["malformed lines"] += 1
            continue
        wrong["malformed fields"] += _cleaned(record)
        key = str(record.get("kind")), int(record["step"])
        wrong["lines for a step that comes again"] += key in found
        found[key] = record
    if named := [f"{count} {what}" for what, count in wrong.items() if count]:
        problems.append(f"{_place(path)}: {', '.join(named)}; left out")
    return sorted(found.values(), key=lambda record: int(record["step"]))


def _parsed(text: bytes) -> Any:
    """The value of JSON text; None if it is invalid. Lone surrogates, which JSON can spell but UTF-8 cannot encode, become question marks."""
    try:
        value = json.loads(text)
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace")) if b"\\u" in text else value
    except (ValueError, RecursionError):
        return None


def _cleaned(record: dict[str, Any]) -> int:
    """Remove the fields of a wrong type from a record, and return how many; null means that there is no value, and is not counted."""
    wrong = 0
    for name in [name for name in record if name in NUMBERS or name in WORDS]:
        value = record.pop(name)
        if name in WORDS and _is_text(value):
            record[name] = value
        elif name in NUMBERS and (number := _number(value)) is not None:
            record[name] = number
        else:
            wrong += value is not None
    for names in CURVES:
        values = [record.pop(name, None) for name in names]
        curves = [[_number(value) for value in curve] if isinstance(curve, list) else [None] for curve in values]
        if len(curves[0]) == len(curves[1]) and None not in curves[0] + curves[1]:
            record.update(zip(names, curves, strict=True))
        else:
            wrong += values != [None, None]
    return wrong


def _fitting(given: dict[str, Any], kinds: Mapping[str, Callable[[Any], bool]], path: Path, problems: list[str]) -> dict[str, Any]:
    """`given` without fields of a wrong type."""
    wrong = [name for name, fits in kinds.items() if name in given and not fits(given[name])]
    if wrong:
        problems.append(f"{_place(path)}: malformed {', '.join(wrong)}; left out")
    return {name: value for name, value in given.items() if name not in wrong}


# --- kinds of values ----------------------------------------------------------------------------------------------------------------------


def _number(value: Any) -> float | None:
    """A number, finite or not, as lab.folder writes it; an int stays an int."""
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int):
        return value if abs(value) < 2**63 else None
    return value if not abs(value) > 1e100 else math.copysign(math.inf, value)  # so that sums of squares stay finite


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_rate(value: Any) -> bool:
    number = _number(value)
    return number is not None and 0 < number < math.inf


def _is_text(value: Any) -> bool:
    """A string without control characters, which could control a terminal."""
    return isinstance(value, str) and value.isprintable()


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(fits(inner) for inner in value)
