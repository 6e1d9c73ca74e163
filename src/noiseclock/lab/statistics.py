"""What a comparison shows, one metric at a time, and how certain that is.

Every method is compared with the baseline, seed by seed: trainings of one seed share the initial weights and the order of the data, and this common
randomness cancels in the differences d_i = method_i - baseline_i, i = 1..n.

    interval    mean(d) ± t(n-1, 97.5 %)·std(d)/√n: it holds the true difference in 95 of 100 comparisons
    p           of Student's paired t test, corrected by Holm for the number of methods: at most 5 of 100 comparisons call any method better or
                worse that is neither. Every metric, and every choice of learning rates, is a family of its own
    relative    mean(d) and interval in units of the baseline's mean, whose own error is ignored
    ratios      speed-up, area and overhead, seed by seed (see `lab/curves.py`); their mean is the geometric one

A training that was started and has no finite value is never silently left out: a method that fails on one of its seeds gets no verdict, whatever
its other seeds show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import stdtr, stdtrit

from noiseclock.lab.curves import HIGHER_IS_BETTER, Ratio, area, curve, overhead, speed_up
from noiseclock.lab.errors import choose
from noiseclock.lab.results import METRICS, Cell, Results

CONFIDENCE = 0.95
OF_SAMPLES = ("frechet", "kernel", "precision", "recall")  # metrics that depend on the number of samples and on the solver
NAMES = {
    "frechet": "Fréchet distance", "kernel": "kernel distance", "validation": "validation loss", "bits": "bits/dim", "precision": "precision",
    "recall": "recall",
}  # fmt: skip

BASELINE, BETTER, WORSE, SAME, ONE_SEED = "baseline", "better", "worse", "no significant difference", "cannot tell (one seed)"
NAMED = 4  # methods without a verdict that the answer names; it counts more
UNKNOWN = "cannot tell"  # begins every text that stands in place of a verdict


# --- one method ---------------------------------------------------------------------------------------------------------------------------


class Summary(NamedTuple):
    """Values over seeds: how many, their mean, standard deviation and standard error; None where there are too few."""

    n: int
    mean: float | None
    std: float | None
    error: float | None

    def __str__(self) -> str:
        return _with_spread(self.mean, self.std)


def summary(values: Iterable[float]) -> Summary:
    """The summary of finite values.

    >>> print(summary([11.5, 12.3, 11.9]))
    11.90 ± 0.40
    """
    x = np.array(list(values), dtype=float)
    n = len(x)
    std = float(x.std(ddof=1)) if n > 1 else None
    return Summary(n, float(x.mean()) if n else None, std, std / math.sqrt(n) if std is not None else None)


class Final(NamedTuple):
    """Values at one step, by cell: (method, lr, seed).

    step: the last at which all finished cells have the metric, or all cells if none is finished. values: at that step; best: up to it; both of the
    cells that reached it, and perhaps not finite. lost: unfinished cells that did not reach it.
    """

    step: int | None
    values: dict[tuple[str, float, int], float]
    best: dict[tuple[str, float, int], float]
    lost: set[tuple[str, float, int]]


def final(cells: Sequence[Cell], metric: str) -> Final:
    """The values at the last step that can be compared. A finished cell without the metric is left out: it was never measured."""
    curves = {cell.key: curve(cell, metric) for cell in cells}
    done = [curves[cell.key] for cell in cells if cell.finished]
    counted = [c for c in done if len(c.step)] or [c for c in curves.values() if len(c.step)]
    common = set.intersection(*(set(c.step.tolist()) for c in counted)) if counted else set()
    step = max(common) if common else None
    there = {key: int(np.flatnonzero(c.step == step)[0]) for key, c in curves.items() if step in c.step.tolist()}
    lost = {cell.key for cell in cells if not cell.finished} - set(there)
    values = {key: float(curves[key].value[i]) for key, i in there.items()}
    return Final(step, values, {key: float(curves[key].best[i]) for key, i in there.items()}, lost if step is not None else set())


# --- two methods --------------------------------------------------------------------------------------------------------------------------


Interval = tuple[float, float]


@dataclass(frozen=True)
class Difference:
    """The difference of a method to the baseline, over the seeds that both have.

    interval: of 95 %. p: of the paired t test. corrected: p after Holm. All three are None with one seed, and if all seeds give the same difference
    other than 0, because then they count as one. method, baseline: the values of both over these seeds.
    """

    seeds: tuple[int, ...]
    mean: float
    interval: Interval | None
    p: float | None
    method: Summary
    baseline: Summary
    corrected: float | None = None

    @property
    def unit(self) -> float:
        """The baseline's mean."""
        return self.baseline.mean or 0.0

    @property
    def relative(self) -> float | None:
        """The mean in units of the baseline's mean; None if that is not positive."""
        return self.mean / self.unit if self.unit > 0 else None

    @property
    def relative_interval(self) -> Interval | None:
        """The interval in the same units."""
        return (self.interval[0] / self.unit, self.interval[1] / self.unit) if self.interval and self.unit > 0 else None


def paired(method: dict[int, float], baseline: dict[int, float]) -> Difference | None:
    """The difference between finite values by seed, not corrected yet; None without a common seed.

    >>> d = paired({0: 9.0, 1: 11.0, 2: 10.0}, {0: 10.0, 1: 12.5, 2: 12.0})
    >>> print(f"{d.mean:.2f} [{d.interval[0]:.2f}, {d.interval[1]:.2f}], p = {d.p:.3f}, {d.relative:.0%}")
    -1.50 [-2.74, -0.26], p = 0.035, -13%
    """
    seeds = tuple(sorted(set(method) & set(baseline)))
    if not seeds:
        return None
    mine, theirs = (np.array([values[seed] for seed in seeds]) for values in (method, baseline))
    d, n = mine - theirs, len(seeds)
    mean, both = float(d.mean()), (summary(mine), summary(theirs))
    error = float(d.std(ddof=1)) / math.sqrt(n) if n > 1 else 0.0
    rounding = 1e-12 * float(np.abs([mine, theirs]).max())
    if error <= rounding:
        same = n > 1 and abs(mean) <= rounding  # the same method twice
        return Difference(seeds, mean, (mean, mean) if same else None, 1.0 if same else None, *both)
    width = float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * error
    return Difference(seeds, mean, (mean - width, mean + width), 2 * float(stdtr(n - 1, -abs(mean) / error)), *both)


def holm(p: Sequence[float]) -> list[float]:
    """p values corrected for their number, so that the chance of any false positive at 0.05 is at most 0.05, however the tests depend on each other.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(np.argsort(p, kind="stable").tolist()):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = least
    return corrected


# --- all methods --------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One method at one learning rate.

    final: at the table's step, over the seeds with a finite value there. best: the best so far, over the same seeds. lrs: the number of learning
    rates from which this one was chosen as the best, 1 if it was not chosen. difference: None for the baseline, and without a common seed. verdict:
    in plain words. `lab/curves.py` defines the ratios.
    """

    method: str
    lr: float | None
    lrs: int
    seeds: tuple[int, ...]
    final: Summary
    best: Summary
    difference: Difference | None
    verdict: str
    speed_up_images: Ratio
    speed_up_seconds: Ratio
    area: Ratio
    overhead: Ratio


@dataclass(frozen=True)
class Table:
    """A metric of all methods, the baseline first. step: of the values; None if there are none. own_lr: each at its own best learning rate."""

    metric: str
    title: str
    baseline: str
    step: int | None
    own_lr: bool
    rows: list[Row]
    notes: list[str]

    @property
    def higher_is_better(self) -> bool:
        """Is more of it better?"""
        return self.metric in HIGHER_IS_BETTER

    def of(self, verdict: str) -> list[Row]:
        """The rows with this verdict, the best mean first."""
        sign = -1 if self.higher_is_better else 1
        return sorted((row for row in self.rows if row.verdict == verdict), key=lambda row: sign * (row.final.mean or 0))

    @property
    def headings(self) -> list[str]:
        """The headings of the columns of `lines`."""
        first = ["method", "learning rate", f"{self.title}, {'higher' if self.higher_is_better else 'lower'} is better", "best so far"]
        compared = [f"against {self.baseline} (95 % interval)", "p (Holm)", "verdict", "speed-up in images", "speed-up in time"]
        return [*first, *compared, "factor between curves", "time per update, ratio", "seeds"]

    @property
    def lines(self) -> list[list[str]]:
        """The rows as text."""
        return [
            [
                row.method, f"{row.lr:g}" if row.lr is not None else "-", str(row.final), str(row.best), change_in_words(row.difference),
                f"{row.difference.corrected:.2g}" if row.difference and row.difference.corrected is not None else "-", row.verdict,
                str(row.speed_up_images), str(row.speed_up_seconds), str(row.area), str(row.overhead), str(row.final.n),
            ]
            for row in self.rows
        ]  # fmt: skip


def measured(results: Results) -> list[str]:
    """The metrics that any cell has."""
    return [metric for metric in METRICS if any(metric in point for cell in results.cells for point in cell.points)]


def title(results: Results, metric: str) -> str:
    """A metric's name, as its evaluations call it: distances are FID and KID only for the Inception network."""
    said = next((str(point["frechet_name"]) for cell in results.cells for point in cell.points if "frechet_name" in point), "")
    return said if metric == "frechet" and said else "KID" if metric == "kernel" and said == "FID" else NAMES[metric]


def table(results: Results, metric: str, *, own_lr: bool = False) -> Table:
    """All methods at the common learning rate; own_lr: each method, the baseline too, at the learning rate with its best mean."""
    choose("metric", metric, METRICS)
    comparison = _Comparison(results, metric, own_lr)
    rows = [comparison.row(method) for method in results.methods]
    return Table(metric, title(results, metric), results.baseline, comparison.final.step, own_lr, rows, comparison.notes())


class _Comparison:
    """The cells behind a table: by method and seed, at one learning rate each."""

    def __init__(self, results: Results, metric: str, own_lr: bool) -> None:
        self.results, self.metric, self.own_lr = results, metric, own_lr
        self.sign = -1 if metric in HIGHER_IS_BETTER else 1
        self.final = final(results.cells if own_lr else [cell for cell in results.cells if cell.lr == results.lr], metric)
        self.lr = {method: self._best_lr(method) if own_lr else results.lr for method in results.methods}
        self.cells = {method: {cell.seed: cell for cell in results.of(method, lr)} for method, lr in self.lr.items()}
        self.baseline = self.cells.get(results.baseline, {})
        self.values = {method: self._finite(cells.values()) for method, cells in self.cells.items()}
        self.differences = self._differences()
        self.alike = self._alike()

    def _finite(self, cells: Iterable[Cell]) -> dict[int, float]:
        """Final values by seed."""
        values = {cell.seed: self.final.values.get(cell.key, math.nan) for cell in cells}
        return {seed: value for seed, value in values.items() if math.isfinite(value)}

    def _best_lr(self, method: str) -> float:
        """The learning rate with the best mean, among those with the most seeds of finite value."""
        values = {cell.lr: self._finite(self.results.of(method, cell.lr)).values() for cell in self.results.of(method)}
        return min(values, key=lambda lr: (-len(values[lr]), self.sign * (summary(values[lr]).mean or 0.0)))

    def _differences(self) -> dict[str, Difference]:
        """Of all methods to the baseline, corrected for their number."""
        reference = self.values.get(self.results.baseline, {})
        compared = {method: paired(values, reference) for method, values in self.values.items() if method != self.results.baseline}
        found = {method: difference for method, difference in compared.items() if difference is not None}
        tested = {method: difference.p for method, difference in found.items() if difference.p is not None}
        corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
        return {method: replace(difference, corrected=corrected.get(method)) for method, difference in found.items()}

    def row(self, method: str) -> Row:
        cells, values, step = self.cells[method], self.values[method], self.final.step or 0
        return Row(
            method, self.lr[method], len(self._rates(method)) if self.own_lr else 1, tuple(sorted(values)),
            summary(values.values()), summary(self.final.best[cells[seed].key] for seed in values),
            self.differences.get(method), BASELINE if method == self.results.baseline else self._verdict(method),
            speed_up_images=self._ratio(method, lambda mine, theirs: speed_up(mine, theirs, self.metric, step, "images")),
            speed_up_seconds=self._ratio(method, lambda mine, theirs: speed_up(mine, theirs, self.metric, step, "seconds")),
            area=self._ratio(method, lambda mine, theirs: area(mine, theirs, self.metric, step), all_or_none=True),
            overhead=self._ratio(method, overhead, unfinished=True),
        )  # fmt: skip

    def _ratio(self, method: str, of: Callable[[Cell, Cell], float], all_or_none: bool = False, unfinished: bool = False) -> Ratio:
        """By seed. all_or_none: no ratio at all unless every seed has one. unfinished: of trainings, too, that may still catch up."""
        pairs = [(cell, self.baseline[seed]) for seed, cell in self.cells[method].items() if seed in self.baseline]
        pairs = [pair for pair in pairs if unfinished or not {cell.key for cell in pair} & self.final.lost]
        ratios = {mine.seed: of(mine, theirs) for mine, theirs in pairs}
        known = {seed: value or None for seed, value in ratios.items() if math.isfinite(value)}
        return Ratio() if all_or_none and len(known) < len(pairs) else Ratio(known)

    def _verdict(self, method: str) -> str:
        """The verdict in plain words; "cannot tell", with the reason, if the numbers support none."""
        cells, difference = self.cells[method], self.differences.get(method)
        involved = [*cells.values(), *(self.baseline[seed] for seed in cells if seed in self.baseline)]
        failed, lost = ({cell.seed for cell in involved if cell.key in self.final.lost and bool(cell.failed) == had} for had in (True, False))
        infinite = {cell.seed for cell in involved if not math.isfinite(self.final.values.get(cell.key, 0.0))}
        reasons = [
            what if len(seeds) == len(cells) else f"{what} in {len(seeds)} of {len(cells)} seeds"
            for what, seeds in (("failed", failed), ("not finished", lost), ("not finite", infinite)) if seeds
        ]  # fmt: skip
        if not self.alike:
            reasons = ["samples of different number or kind"]
        elif self.own_lr and self._rates(method) != self._rates(self.results.baseline):
            reasons = ["different learning rates were tried"]
        elif difference is None and not reasons:
            reasons = ["not measured" if set(cells) & set(self.baseline) else f"no seed in common with {self.results.baseline}"]
        if reasons or difference is None:
            return f"{UNKNOWN} ({', '.join(reasons)})"
        if difference.corrected is None:
            return ONE_SEED if len(difference.seeds) == 1 else f"{UNKNOWN} (seeds make no difference)"
        if difference.corrected > 1 - CONFIDENCE:
            return SAME
        return BETTER if self.sign * difference.mean < 0 else WORSE

    def _rates(self, method: str) -> set[float]:
        """The learning rates among which a method's best was chosen: those that were stopped early had no chance, those that failed had one."""
        return {cell.lr for cell in self.results.of(method) if cell.key in self.final.values or cell.failed}

    def _alike(self) -> bool:
        """Were all samples at the final step made and measured in the same way?"""
        points = [point for cells in self.cells.values() for cell in cells.values() for point in cell.points if point["step"] == self.final.step]
        names = ("frechet_name", "samples", "solver", "solver_steps")
        ways = {tuple(point.get(name) for name in names) for point in points if self.metric in point}
        return self.metric not in OF_SAMPLES or len(ways) <= 1

    def notes(self) -> list[str]:
        tested = sum(difference.p is not None for difference in self.differences.values())
        machines = {str(cell.made_with.get("machine")) for cells in self.cells.values() for cell in cells.values()}
        notes = ["Values are of the last update at which all finished trainings were evaluated; ± is the standard deviation over seeds."]
        if tested:
            notes.append("Differences are taken seed by seed, 95 % intervals and p by Student's t.")
        if tested > 1:
            notes.append(
                f"The verdict is by p, corrected for {tested} comparisons by Holm's method, so it may see no difference where an interval by itself "
                "excludes 0."
            )
        if self.differences:
            notes.append(
                f"A speed-up is the time, or the number of images, that {self.results.baseline} took to its best value, divided by what the method "
                "took to get as far with the same seed; ranges are over seeds. A method that would need more updates than it had reads “not reached”."
            )
        if self.own_lr:
            notes.append(f"Each method is at the best of {len(self.results.lrs)} learning rates, which flatters every method alike.")
        if len(machines) > 1 and "timed" not in self.results.config:
            notes.append(f"Trainings ran on {len(machines)} machines; times are compared only within the same machine.")
        jobs = max((cell.jobs for cells in self.cells.values() for cell in cells.values()), default=1)
        if jobs > 1 and "timed" not in self.results.config:
            notes.append(f"Up to {jobs} trainings ran beside each other, so times are those of a shared machine.")
        return notes


# --- in words -----------------------------------------------------------------------------------------------------------------------------


def answer(results: Results) -> str:
    """The conclusion in words: from the first metric by which methods can be compared, and no stronger than its statistics."""
    tables = [table(results, metric) for metric in measured(results)]
    if not tables:
        return "There is nothing to compare: no training has been evaluated."
    t = next((t for t in tables if any(row.difference for row in t.rows)), tables[0])
    if len(t.rows) < 2:
        so_far = " trained so far" if len(results.config.get("methods", [])) > 1 else ""  # the others may be trained elsewhere
        return f"There is nothing to compare: {results.methods[0]} is the only method{so_far}."
    said = f"On {results.subject}, after {t.step or 0:,} updates, {_said(t)}"
    if results.tuned:
        said += f" With each at its own best of {len(results.lrs)} learning rates, {_said(table(results, t.metric, own_lr=True))}"
    return said


def _said(t: Table) -> str:
    baseline = next((row for row in t.rows if row.method == t.baseline), None)
    base = str(baseline.final) if baseline else "nothing"
    better, worse, same, one = (t.of(verdict) for verdict in (BETTER, WORSE, SAME, ONE_SEED))
    tested = better + worse + same
    reasons = dict.fromkeys(row.verdict for row in t.rows if row.verdict.startswith(UNKNOWN))
    unknown = [f"{_some([row.method for row in t.rows if row.verdict == reason])}{reason.removeprefix(UNKNOWN)}" for reason in reasons]
    yardstick = f"{t.baseline}, at {base} in {t.title}, over {seeds_in_words(len(row.difference.seeds) for row in tested if row.difference)}"
    if better and (d := better[0].difference):
        text = f"{better[0].method} reached {d.method} in {t.title}, {t.baseline} {d.baseline}, over {len(d.seeds)} seeds: better by {_by(better[0])}"
        text += _time(better[0], t.baseline)
    elif worse:
        text = f"no method was significantly better than {yardstick}"
    elif same:
        text = f"{same[0].method + ' did not differ' if len(same) == 1 else 'no method differed'} significantly from {yardstick}{_room(t)}"
    elif one:
        values = ", ".join(f"{row.method} {row.final}" for row in one[:NAMED]) + (f" and {len(one) - NAMED} more" if len(one) > NAMED else "")
        text = f"one seed cannot tell whether a method is better than {t.baseline} in {t.title}: {t.baseline} {base}, {values}; run more seeds"
    else:
        text = f"nothing can be told: {'; '.join(unknown)}"
    more = {
        "Also better": [f"{row.method}, by {_by(row)}" for row in better[1:]],
        "Worse": [f"{row.method}, by {_by(row)}" for row in worse],
        "No significant difference": [row.method for row in same] if better or worse else [],
        "Cannot tell": unknown if tested else [],
    }
    return ". ".join([text, *(f"{what}: {'; '.join(said)}" for what, said in more.items() if said)]) + "."


def seeds_in_words(counts: Iterable[int]) -> str:
    """How many seeds there are, if methods have different numbers of them.

    >>> seeds_in_words([1, 3, 1]), seeds_in_words([1])
    ('1 to 3 seeds', '1 seed')
    """
    known = sorted(counts) or [0]
    least = f"{known[0]} to " if known[0] < known[-1] else ""
    return f"{least}{known[-1]} seed{'' if known[-1] == 1 else 's'}"


def _some(methods: Sequence[str]) -> str:
    """Methods by name, or their number where a sentence could not hold the names."""
    return ", ".join(methods) if len(methods) <= NAMED else f"{len(methods)} methods"


def _by(row: Row) -> str:
    """The size of a significant difference, whichever its direction."""
    d = row.difference
    if d is None or d.interval is None:
        return "an unknown amount"
    if d.relative is None or d.relative_interval is None:
        low, high = sorted(map(abs, d.interval))
        return f"{abs(d.mean):.2g} (95 % interval {low:.2g}–{high:.2g})"
    low, high = sorted(map(abs, d.relative_interval))
    return f"{_percent(abs(d.relative))} % (95 % interval {_percent(low)}–{_percent(high)} %)"


def _time(row: Row, baseline: str) -> str:
    """The training time needed to reach the baseline, relative to the baseline's, if all seeds agree on more or less."""
    needed = Ratio({seed: 1 / ratio if ratio else None for seed, ratio in row.speed_up_seconds.by_seed.items()})
    if needed.mean is None or min(needed.known) <= 1 <= max(needed.known):
        return ""
    return f", {'and' if needed.mean < 1 else 'but'} it needed {needed} times {baseline}'s training time to get as far"


def _room(t: Table) -> str:
    """How large the undetected differences may be."""
    ends = [end for row in t.of(SAME) if row.difference for end in row.difference.relative_interval or ()]
    if not ends:
        return ""
    good = sorted(end if t.higher_is_better else -end for end in ends)
    best, worst = (f"{_percent(abs(end))} % {'better' if end > 0 else 'worse'}" for end in (good[-1], good[0]))
    return f"; 95 % intervals reach from {best} to {worst}" if good[0] != good[-1] else ""


def change_in_words(d: Difference | None) -> str:
    """A difference as text for a table."""
    if d is None:
        return "-"
    if d.relative is None:
        return f"{d.mean:+.2g}" + (f" ({d.interval[0]:+.2g} to {d.interval[1]:+.2g})" if d.interval else "")
    interval = f" ({' to '.join(_percent(end, '+') for end in d.relative_interval)})" if d.relative_interval else ""
    return f"{_percent(d.relative, '+')} %{interval}"


def _percent(x: float, sign: str = "") -> str:
    """A share in per cent, with one decimal below 10.

    >>> _percent(0.1234), _percent(-0.01234, "+")
    ('12', '-1.2')
    """
    value = 100 * x
    return f"{value:{sign}.0f}" if abs(value) >= 9.95 else f"{round(value, 1) + 0.0:{sign}.1f}"


def _with_spread(mean: float | None, std: float | None) -> str:
    """Two digits of the standard deviation, and as many decimal places of the mean."""
    if mean is None:
        return "-"
    if not std or std < 1e-9 * abs(mean):
        return f"{mean:.4g}"
    places = max(0, 1 - math.floor(math.log10(std)))
    return f"{mean:.{places}f} ± {std:.{places}f}" if places < 8 else f"{mean:.3g} ± {std:.2g}"
