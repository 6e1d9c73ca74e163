"""A metric over one training, and comparisons of two trainings: speed-up, ratio of their curves, ratio of their time per update.

Functions of two cells, a method's and the baseline's, return one number, or NaN if it is not defined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from noiseclock.lab.results import THEN, Cell

Values = npt.NDArray[np.float64]

HIGHER_IS_BETTER = ("precision", "recall")


@dataclass(frozen=True)
class Curve:
    """Evaluations as arrays of equal length. images, seconds: NaN if not recorded. best: best finite value so far; NaN before the first."""

    step: npt.NDArray[np.int64]
    images: Values
    seconds: Values
    value: Values
    best: Values


def curve(cell: Cell, metric: str) -> Curve:
    """The evaluations of a cell that have this metric."""
    points = [point for point in cell.points if metric in point]
    step = np.array([point["step"] for point in points], dtype=np.int64)
    value, images, seconds = (np.array([point.get(name, math.nan) for point in points], dtype=float) for name in (metric, "images", "seconds"))
    finite, images, seconds = (np.where(np.isfinite(x), x, math.nan) for x in (value, images, seconds))
    better = np.fmax if metric in HIGHER_IS_BETTER else np.fmin
    return Curve(step, images, seconds, value, better.accumulate(finite))


def reached(curve: Curve, along: Values, target: float, *, higher: bool = False) -> float:
    """Images or seconds at which the metric first equals the target, interpolated linearly between evaluations; infinite if never.

    Quality improves fast at first and slowly later, so straight lines lie on its worse side: the result is too late rather than too early. The line
    starts at the evaluation before, not at the best so far, which after a setback would be nearer to the target than the training was.
    """
    sign = -1 if higher else 1
    value, goal = sign * curve.value, sign * target
    there = np.flatnonzero(np.isfinite(value) & (value <= goal))
    if not len(there):
        return math.inf
    i = int(there[0])
    if i == 0 or not np.isfinite(value[i - 1]):
        return float(along[i])
    return float(along[i - 1] + (value[i - 1] - goal) / (value[i - 1] - value[i]) * (along[i] - along[i - 1]))


def speed_up(method: Cell, baseline: Cell, metric: str, step: int, axis: str) -> float:
    """Images or seconds (`axis`) that the baseline needed for its best value up to `step`, over those of the method; 0 if the method never got there.

    The goal is the baseline's best at the same seed, not the mean over seeds, which half of the baseline's own trainings would never reach. If the
    baseline was at its best at the first evaluation, nobody knows when either got there. Times are compared on one machine only.
    """
    mine, theirs, higher = curve(method, metric), curve(baseline, metric), metric in HIGHER_IS_BETTER
    goal = theirs.best[theirs.step <= step]
    if not len(mine.step) or not len(goal) or not math.isfinite(goal[-1]) or (axis == "seconds" and not same_machine(method, baseline)):
        return math.nan
    first, second = (reached(c, getattr(c, axis), float(goal[-1]), higher=higher) for c in (theirs, mine))
    if math.isfinite(second) and theirs.value[0] == goal[-1] and method is not baseline:
        return math.nan
    return first / second if first > 0 and second > 0 else math.nan


def area(method: Cell, baseline: Cell, metric: str, step: int) -> float:
    """exp of the mean, over images up to `step`, of log(method / baseline): the mean ratio of the curves, with equal weight early and late.

    The first evaluations, where distances are ten times larger, would dominate a ratio of plain areas. NaN unless all values are positive.
    """
    mine, theirs = curve(method, metric), curve(baseline, metric)
    _, i, j = np.intersect1d(mine.step[mine.step <= step], theirs.step, return_indices=True)
    images, values = mine.images[i], np.stack([mine.value[i], theirs.value[j]])
    if not len(i) or not (np.isfinite(values) & (values > 1e-100)).all():
        return math.nan
    logs = np.log(values[0] / values[1])
    if len(i) == 1:
        return math.exp(logs[0])
    weights = np.diff(images, prepend=images[0]) + np.diff(images, append=images[-1])  # of the trapezoid rule
    return math.exp(weights @ logs / weights.sum()) if weights.sum() > 0 else math.nan


def overhead(method: Cell, baseline: Cell) -> float:
    """Training seconds per update, divided by the baseline's on the same machine."""
    mine, theirs = seconds_per_update(method), seconds_per_update(baseline)
    return mine / theirs if same_machine(method, baseline) and theirs > 0 else math.nan


def seconds_per_update(cell: Cell) -> float:
    """The mean over the training, from the last record that has the time."""
    timed = [record for record in (*cell.points[-1:], *cell.train[-1:]) if "seconds" in record and record["step"] > 0]
    last = max(timed, key=lambda record: int(record["step"]), default={"seconds": math.nan, "step": 1})
    return float(last["seconds"]) / int(last["step"])


def same_machine(a: Cell, b: Cell) -> bool:
    """Can their times be compared? If both are from costs.json, or from one machine throughout: the log does not say when a training moved."""
    machine = a.made_with.get("machine")
    return (a.timed and b.timed) or (bool(machine == b.made_with.get("machine")) and THEN not in str(machine))


@dataclass(frozen=True)
class Ratio:
    """Ratios between a method and the baseline, by seed; None for a seed at which the method never reached the baseline."""

    by_seed: dict[int, float | None] = field(default_factory=dict)

    @property
    def known(self) -> list[float]:
        """The ratios that are not None."""
        return [ratio for ratio in self.by_seed.values() if ratio is not None]

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless every seed has a ratio: leaving out the seeds that fell behind would flatter the method."""
        return math.exp(sum(map(math.log, self.known)) / len(self.known)) if self.known and len(self.known) == len(self.by_seed) else None

    def __str__(self) -> str:
        known, n = self.known, len(self.by_seed)
        if len(known) < n:
            return f"not reached in {n - len(known)} of {n} seeds" if known else "not reached"
        if not known:
            return "-"
        least, most = f"{min(known):.2f}", f"{max(known):.2f}"
        return f"{self.mean:.2f} ({least}–{most})" if least != most else least
