"""The numbers behind a report's charts, as plain lists: the page draws them with JavaScript, the figures for papers with matplotlib.

Lists by method are in the order of `Results.methods`, with None for a method without data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from noiseclock.lab import statistics
from noiseclock.lab.curves import HIGHER_IS_BETTER, curve, reached, seconds_per_update
from noiseclock.lab.results import Cell, Results

# Okabe and Ito's colours, which the colour-blind can tell apart, (on light, on dark); the first is the baseline's. Yellow is left out: it is hard to
# see on white. If there are more methods than colours, dashes distinguish them.
COLOURS = [
    ("#3f3f46", "#d4d4d8"), ("#0072b2", "#5aa9e6"), ("#d55e00", "#ff8a4c"), ("#008f68", "#35c79b"), ("#b0568a", "#e59ac6"), ("#b98300", "#f0bb45"),
    ("#2f9fd6", "#8fd3ff"), ("#6a4fb3", "#b39df0"),
]  # fmt: skip
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "triangle-down", "star")
MOST_LINES = 12  # in one chart; of more, the eye cannot follow one
LOG_FROM = 4.0  # the ratio of the largest to the smallest value from which an axis is logarithmic


def charts(results: Results) -> dict[str, Any]:
    """The data of all charts."""
    return {
        "methods": looks(results),
        "metrics": {metric: quality(results, metric) for metric in statistics.measured(results)},
        "loss": loss(results),
        "utility": utility(results),
        "density": density(results),
        "sweeps": sweeps(results.methods, results.config.get("options", {})),
        "overhead": overhead(results),
    }


def looks(results: Results) -> list[dict[str, Any]]:
    """How each method is drawn; no other method has the baseline's colour.

    early: it has no final value, and there are more than MOST_LINES methods, so its lines are left out at first.
    """
    found, others = [], 0
    common = [cell for cell in results.cells if cell.lr == results.lr]
    final = {key[0] for metric in statistics.measured(results) for key in statistics.final(common, metric).values}
    for method in results.methods:
        if method == results.baseline:
            colour, turn = 0, 0
        else:
            colour, turn = 1 + others % (len(COLOURS) - 1), others // (len(COLOURS) - 1)
            others += 1
        dash = DASHES[turn % len(DASHES)]
        look = {"name": method, "baseline": method == results.baseline, "colour": colour, "dash": dash, "symbol": SYMBOLS[colour]}
        found.append({**look, "early": len(results.methods) > MOST_LINES and bool(final) and method not in final})
    return found


def quality(results: Results, metric: str) -> dict[str, Any]:
    """A metric through training at the common learning rate, and its final values at every learning rate.

    curves: see `through_training`. target: the baseline's best, mean over seeds. day: the seconds that the baseline needed for it, the paper's 1D.
    sweeps: see `at_the_end_of`. lrs: final values by learning rate, for methods that were trained with several.
    """
    common = [cell for cell in results.cells if cell.lr == results.lr]
    end, ends = statistics.final(common, metric), statistics.final(results.cells, metric)
    curves = [through_training(results.of(method, results.lr), metric) for method in results.methods]
    higher = metric in HIGHER_IS_BETTER
    level, seconds = [], []
    for cell in results.of(results.baseline, results.lr):
        best, evaluations = end.best.get(cell.key, math.nan), curve(cell, metric)
        if math.isfinite(best):
            level.append(best)
            seconds.append(reached(evaluations, evaluations.seconds, best, higher=higher))
    day = _mean(seconds)
    values = [value for line in curves if line for value in (*line["low"], *line["high"]) if value is not None]
    return {
        "name": statistics.title(results, metric), "higher": higher, "step": end.step, "curves": curves, "target": _mean(level),
        "day": day if day is not None and math.isfinite(day) and day > 0 else None,
        "log": not higher and bool(values) and min(values) > 0 and max(values) > LOG_FROM * min(values),
        "sweeps": [at_the_end_of(sweep, results, metric) for sweep in sweeps(results.methods, results.config.get("options", {}))],
        "lrs": [_by_lr(method, ends) for method in results.methods],
    }  # fmt: skip


def through_training(cells: Sequence[Cell], metric: str) -> dict[str, list[Any]] | None:
    """Mean and range over the cells at each update at which any was evaluated, and the number n of cells with a finite value there."""
    curves = [curve(cell, metric) for cell in cells]
    found: dict[str, list[Any]] = {name: [] for name in ("step", "images", "seconds", "mean", "low", "high", "n")}
    for step in sorted({int(step) for one in curves for step in one.step}):
        at = [(one, int(i)) for one in curves for i in np.flatnonzero((one.step == step) & np.isfinite(one.value))]
        values = _over_seeds([float(one.value[i]) for one, i in at]) or {"mean": None, "low": None, "high": None, "n": 0}
        images, seconds = (_mean([float(getattr(one, name)[i]) for one, i in at]) for name in ("images", "seconds"))
        for name, value in {"step": step, "images": images, "seconds": seconds, **values}.items():
            found[name].append(value)
    return found if any(found["n"]) else None


def loss(results: Results) -> dict[str, Any] | None:
    """Held-out loss by noise level at the last update that the methods share, and its ratio to the baseline's."""
    step, found = _by_time(results, "validations", "time", "loss_by_time")
    if step is None:
        return None
    base = found[results.methods.index(results.baseline)] if results.baseline in results.methods else None
    for entry in found:
        if entry is not None and base is not None and base["time"] == entry["time"] and min(base["mean"]) > 0:
            entry["ratio"] = (np.array(entry["mean"]) / np.array(base["mean"])).tolist()
    return {"step": step, "methods": found}


def utility(results: Results) -> dict[str, Any] | None:
    """The relative decrease of the plain loss, to first order, by an update at one noise level alone, at the last evaluation."""
    step, found = _by_time(results, "points", "utility_time", "utility", over="validation")
    return None if step is None or not any(found) else {"step": step, "methods": found}


def _by_time(results: Results, kind: str, axis: str, name: str, *, over: str | None = None) -> tuple[int | None, list[dict[str, Any] | None]]:
    """A curve of every method at the last step that finished methods share, over seeds.

    kind: the cells' list of records. over: the field to divide the curve by.
    """
    cells = {method: results.of(method, results.lr) for method in results.methods}
    having = {method: [record for cell in of for record in getattr(cell, kind) if name in record] for method, of in cells.items()}
    steps = {method: {record["step"] for record in records} for method, records in having.items()}
    # a training that was stopped early must not hold all others back
    finished = _last_in_common(steps[method] for method, of in cells.items() if any(cell.finished for cell in of))
    step = _last_in_common(steps.values()) if finished is None else finished
    found: list[dict[str, Any] | None] = []
    for records in having.values():
        there = [record for record in records if record["step"] == step]
        if over is not None:
            there = [{**record, name: [value / record[over] for value in record[name]]} for record in there if record.get(over, 0) > 0]
        time, rows = _stacked(there, axis, name)
        ends = {"mean": rows.mean(0).tolist(), "low": rows.min(0).tolist(), "high": rows.max(0).tolist()} if len(rows) else {}
        found.append({"time": time, **ends, "n": len(rows)} if ends else None)
    return step, found


def density(results: Results) -> dict[str, Any] | None:
    """The sampler's density by time (rows) through training (columns), the mean over seeds; most: the upper end of a colour scale for all methods."""
    found: list[dict[str, Any] | None] = []
    for method in results.methods:
        by_step: dict[int, list[dict[str, Any]]] = {}
        for cell in results.of(method, results.lr):
            for record in cell.validations:
                if "density" in record:
                    by_step.setdefault(record["step"], []).append(record)
        columns = {step: _stacked(records, "density_time", "density") for step, records in sorted(by_step.items())}
        time = next((time for time, _ in columns.values()), [])
        steps = [step for step, (own, rows) in columns.items() if own == time and len(rows)]
        grid = np.array([columns[step][1].mean(0) for step in steps]).T
        found.append({"step": steps, "time": time, "density": grid.tolist()} if grid.size else None)
    values = np.concatenate([np.ravel(entry["density"]) for entry in found if entry]) if any(found) else np.array([])
    # a scale up to a narrow peak would leave most of its colours unused
    return {"methods": found, "most": float(max(2.0, np.quantile(values, 0.995)))} if len(values) else None


def overhead(results: Results) -> list[dict[str, Any] | None]:
    """Seconds per update over the baseline's, the geometric mean over seeds."""
    metrics = statistics.measured(results)
    rows = statistics.table(results, metrics[0]).rows if metrics else []  # in the order of methods; the overhead is in every metric's table
    found: list[dict[str, Any] | None] = []
    for row in rows:
        ratio, seconds = row.overhead.mean, _mean([seconds_per_update(cell) for cell in results.of(row.method, row.lr)])
        said = f"{1000 * seconds:,.3g} ms per update" if seconds is not None else ""
        found.append({"ratio": ratio, "label": f"{ratio:.2f}×", "text": said} if ratio is not None else None)
    return found


# --- sweeps -------------------------------------------------------------------------------------------------------------------------------


def sweeps(methods: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of methods that differ in the value of one option, ordered by that value. options: those of each method, as compare.json has them.

    >>> [found] = sweeps(["uniform", "speed:k=10,tau=700", "speed:tau=700", "speed:k=5"], {"speed:tau=700": {"speed:k": 5.0, "speed:tau": 700}})
    >>> found["title"], found["points"]
    ('speed:k=…,tau=700', [(2, 5.0), (1, 10.0)])
    """
    groups: dict[tuple[Any, ...], list[tuple[int, str]]] = {}
    for m, method in enumerate(methods):
        for match in re.finditer(r"(?<=[:,])([^:,+@=]+)=([^:,+@=]+)", method):
            name = method[: match.start()].rpartition("+")[2].partition(":")[0]
            key = (method[: match.start(2)], method[match.end(2) :], name, match[1])
            groups.setdefault(key, []).append((m, match[2]))
    found = []
    for (before, after, name, option), points in groups.items():
        numeric = all(_float(value) is not None for _, value in points)
        begin = before.removesuffix(f"{option}=")  # ends with the ":" or "," before the option
        default = begin[:-1] + (begin[-1] + after[1:] if after.startswith(",") else after)  # the method that leaves the option as it is
        usual = str(options.get(default, {}).get(f"{name}:{option}", ""))
        if default in methods and usual and (_float(usual) is not None or not numeric):
            points = [*points, (methods.index(default), usual)]
        if len(points) < 2:
            continue
        known = [number for _, value in points if (number := _float(value)) is not None]
        ordered: list[tuple[int, Any]] = sorted(zip((m for m, _ in points), known, strict=True), key=lambda p: p[1]) if numeric else [*points]
        log = numeric and min(known) > 0 and max(known) >= 8 * min(known)
        label = "|S|, times that a probe measures" if (name.partition(".")[0], option) == ("adaptive", "count") else f"{option} of {name}"
        found.append({"title": f"{before}…{after}", "option": option, "label": label, "points": ordered, "numeric": numeric, "log": log})
    return found


def at_the_end_of(sweep: dict[str, Any], results: Results, metric: str) -> dict[str, Any]:
    """The values of a sweep's methods, and of the baseline, at the last update that all of these reached; step: None if there is none.

    Over the seeds that all have there, if there are any: with other seeds, the baseline's level would be no measure of them. curves: their way there,
    over the same seeds. by: what these are drawn against, images where some have no times.
    """
    wanted = {results.methods[m] for m, _ in sweep["points"]} | {results.baseline}
    cells = [cell for cell in results.cells if cell.method in wanted and cell.lr == results.lr]
    by_step: dict[str, dict[int, dict[int, float]]] = {}
    for cell in cells:
        for point in cell.points:
            if math.isfinite(point.get(metric, math.nan)):
                by_step.setdefault(cell.method, {}).setdefault(point["step"], {})[cell.seed] = point[metric]
    step = _last_in_common(set(steps) for steps in by_step.values())
    there = {method: steps[step] for method, steps in by_step.items() if step in steps}
    seeds = set.intersection(*map(set, there.values())) if there else set()
    values = [_over_seeds([v for seed, v in there.get(method, {}).items() if seed in seeds or not seeds]) for method in results.methods]
    same = [cell for cell in cells if cell.seed in seeds or not seeds]
    curves = [through_training([cell for cell in same if cell.method == method], metric) for method in results.methods]
    timed = all("seconds" in point for cell in cells for point in cell.points)
    return {"step": step, "values": values, "curves": curves, "by": "seconds" if timed else "images"}


# --- over seeds ---------------------------------------------------------------------------------------------------------------------------


def _over_seeds(values: Sequence[float]) -> dict[str, Any] | None:
    """Mean, range and number of the finite values."""
    finite = [value for value in values if math.isfinite(value)]
    return {"mean": sum(finite) / len(finite), "low": min(finite), "high": max(finite), "n": len(finite)} if finite else None


def _by_lr(method: str, ends: statistics.Final) -> dict[str, list[Any]] | None:
    lrs = sorted({lr for name, lr, _ in ends.values if name == method})
    there = [(lr, _over_seeds([value for key, value in ends.values.items() if key[:2] == (method, lr)])) for lr in lrs]
    rows = [{"lr": lr, **values} for lr, values in there if values]
    return {name: [row[name] for row in rows] for name in ("lr", "mean", "low", "high", "n")} if len(rows) > 1 else None


def _stacked(records: Sequence[dict[str, Any]], axis: str, name: str) -> tuple[list[float], np.ndarray]:
    """The first record's axis, and the curves (seeds, points) of all records with that axis; records with a value that is not finite are left out."""
    records = [record for record in records if np.isfinite([*record[axis], *record[name]]).all() and record[axis]]
    alike = [record for record in records if record[axis] == records[0][axis]]
    return (alike[0][axis], np.array([record[name] for record in alike], dtype=float)) if alike else ([], np.zeros((0, 0)))


def _last_in_common(steps: Iterable[set[int]]) -> int | None:
    """The last step that all have; if there is none, the last of any."""
    there = [some for some in steps if some]
    return max(set.intersection(*there) or set.union(*there)) if there else None


def _mean(values: Iterable[float]) -> float | None:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else None


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
