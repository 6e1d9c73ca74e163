"""A metric through one training, and how two trainings compare: when each got how far, the factor between them, and what an update cost.

Functions of two cells, a method's and the baseline's, give one number; NaN says that there is none.
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
    """Evaluations as arrays of one length. images, seconds: NaN where not written down. best: so far, of finite values; NaN before the first."""

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
    """Where along images or seconds the best so far first is as good as the target, on straight lines between evaluations; infinite if nowhere.

    Quality bends: it improves fast, then slowly, and then straight lines are on the worse side of it. So this is rather late than early.
    """
    sign = -1 if higher else 1
    best, goal = sign * curve.best, sign * target
    there = np.flatnonzero(best <= goal)
    if not len(there):
        return math.inf
    i = int(there[0])
    if i == 0 or not np.isfinite(best[i - 1]):
        return float(along[i])
    return float(along[i - 1] + (best[i - 1] - goal) / (best[i - 1] - best[i]) * (along[i] - along[i - 1]))


def speed_up(method: Cell, baseline: Cell, metric: str, step: int, axis: str) -> float:
    """Images or seconds (`axis`) in which the baseline first reached the best it had by `step`, over those of the method; 0 if it never got there.

    The goal is that of the same seed, not the mean of all, which half of the baseline's own trainings would never reach. Time is compared on one
    machine only.
    """
    mine, theirs, higher = curve(method, metric), curve(baseline, metric), metric in HIGHER_IS_BETTER
    goal = theirs.best[theirs.step <= step]
    if not len(mine.step) or not len(goal) or not math.isfinite(goal[-1]) or (axis == "seconds" and not same_machine(method, baseline)):
        return math.nan
    first, second = (reached(c, getattr(c, axis), float(goal[-1]), higher=higher) for c in (theirs, mine))
    return first / second if first > 0 and second > 0 else math.nan


def area(method: Cell, baseline: Cell, metric: str, step: int) -> float:
    """exp of the mean, over images up to `step`, of log(method / baseline): the factor between the curves, late and early alike.

    The ratio of plain areas would be that of the first evaluations, where distances are ten times larger. NaN unless all values are positive.
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
    """Seconds of training an update, over the baseline's, on one machine."""
    mine, theirs = seconds_per_update(method), seconds_per_update(baseline)
    return mine / theirs if same_machine(method, baseline) and theirs > 0 else math.nan


def seconds_per_update(cell: Cell) -> float:
    """As of the last record that has the time."""
    timed = [record for record in (*cell.points[-1:], *cell.train[-1:]) if "seconds" in record and record["step"] > 0]
    last = max(timed, key=lambda record: int(record["step"]), default={"seconds": math.nan, "step": 1})
    return float(last["seconds"]) / int(last["step"])


def same_machine(a: Cell, b: Cell) -> bool:
    """Can their times be compared? Not those of a training that changed machines, whatever the other did: nobody knows where."""
    machine = a.made_with.get("machine")
    return (a.timed and b.timed) or (bool(machine == b.made_with.get("machine")) and THEN not in str(machine))


@dataclass(frozen=True)
class Ratio:
    """Between a method and the baseline, by seed; None for a seed at which the method never got as far as the baseline."""

    by_seed: dict[int, float | None] = field(default_factory=dict)

    @property
    def known(self) -> list[float]:
        """Those of the seeds that have one."""
        return [ratio for ratio in self.by_seed.values() if ratio is not None]

    @property
    def mean(self) -> float | None:
        """The geometric mean; None unless every seed has a ratio: without the seeds that fell behind it would flatter."""
        return math.exp(sum(map(math.log, self.known)) / len(self.known)) if self.known and len(self.known) == len(self.by_seed) else None

    def __str__(self) -> str:
        known, n = self.known, len(self.by_seed)
        if len(known) < n:
            return f"not reached in {n - len(known)} of {n} seeds" if known else "not reached"
        if not known:
            return "-"
        least, most = f"{min(known):.2f}", f"{max(known):.2f}"
        return f"{self.mean:.2f} ({least}–{most})" if least != most else least
