"""Methods of which no training got as far as the others: their last evaluation, beside the baseline's at the same update.

They have no value in a table of final values, and their trainings may have been stopped because they lagged: what is known of them should be shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from noiseclock.lab.curves import curve
from noiseclock.lab.results import Cell, Results
from noiseclock.lab.statistics import Difference, Table, change_in_words, paired, summary


class Early(NamedTuple):
    """A method at one learning rate: its values by seed at `step`, its last evaluation, and the difference to the baseline's there."""

    method: str
    lr: float
    step: int
    values: dict[int, float]
    difference: Difference | None

    @property
    def line(self) -> list[str]:
        """What a table says of it: learning rate, update, value, the baseline's, the difference, seeds."""
        theirs = str(self.difference.baseline) if self.difference else "-"
        value = str(summary(self.values.values()))
        return [f"{self.lr:g}", f"{self.step:,}", value, theirs, change_in_words(self.difference), str(len(self.values))]


def ended_early(results: Results, table: Table) -> list[Early]:
    """All that have an evaluation, but none at the table's step: those that got furthest first, and by learning rate."""
    if table.step is None:
        return []
    found = [_last(results, cells, table.metric, table.step) for cells in _trainings(results)]
    return sorted((early for early in found if early), key=lambda early: (-early.step, early.lr))


def _trainings(results: Results) -> list[list[Cell]]:
    return [results.of(method, lr) for method in results.methods for lr in results.lrs if results.of(method, lr)]


def _last(results: Results, cells: Sequence[Cell], metric: str, end: int) -> Early | None:
    steps = {int(step) for cell in cells for step in curve(cell, metric).step}
    if not steps or end in steps:
        return None
    step, (method, lr, _) = max(steps), cells[0].key
    mine, theirs = (_at(step, found, metric) for found in (cells, results.of(results.baseline, lr)))
    return Early(method, lr, step, mine, paired(mine, theirs) if method != results.baseline else None)


def _at(step: int, cells: Sequence[Cell], metric: str) -> dict[int, float]:
    """The finite values at a step, by seed."""
    found = {cell.seed: point[metric] for cell in cells for point in cell.points if point["step"] == step and metric in point}
    return {seed: value for seed, value in found.items() if math.isfinite(value)}
