"""Comparisons that are made up of the values of their trainings, in memory alone, and what is said of them."""

from __future__ import annotations

from noiseclock.lab.results import Cell, Results
from noiseclock.lab.statistics import table

EVERY, BATCH = 100, 64


def training(method: str, seed: int, values, *, lr=1e-3, metric="frechet", pace=0.01, finished=True, machine="one", samples=1000, failed="") -> Cell:
    """A cell with these values, one every 100 updates; None where the metric was not taken."""
    points = []
    for i, value in enumerate(values):
        step = EVERY * (i + 1)
        point = {"step": step, "images": step * BATCH, "seconds": step * pace, "samples": samples}
        points.append(point if value is None else {**point, metric: value})
    return Cell(method, lr, seed, points=points, finished=finished, made_with={"machine": machine}, failed=failed)


def compared(cells: list[Cell], **config) -> Results:
    """Results of these cells, held against uniform."""
    return Results({"recipe": "made up", "baseline": "uniform", **config}, cells, [])


def finals(values: dict[str, list[float]], **options) -> Results:
    """Results of one evaluation each, by method and seed."""
    return compared([training(method, seed, [value], **options) for method, row in values.items() for seed, value in enumerate(row)])


def verdicts(results: Results, metric="frechet", **options) -> dict[str, str]:
    """What the table says of each method."""
    return {row.method: row.verdict for row in table(results, metric, **options).rows}


def row_of(results: Results, method: str, metric="frechet", **options):
    """The row of a method in the table."""
    return next(row for row in table(results, metric, **options).rows if row.method == method)
