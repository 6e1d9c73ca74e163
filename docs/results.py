"""The tables of docs/results.md, from the files in benchmarks/results; a test holds the page to them.

python docs/results.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from noiseclock.lab.curves import curve
from noiseclock.lab.results import Results, read
from noiseclock.lab.statistics import Row, Summary, summary, table

PAGE = Path(__file__).with_name("results.md")
RAW = PAGE.parent.parent / "benchmarks" / "results"
STEPS = (5_000, 10_000, 20_000)
EVALUATED = (5_000, 10_000, 15_000, 20_000)
MEASURES = {"bits": "bits/dim", "validation": "held-out loss", "kernel": "KID", "precision": "precision", "recall": "recall"}
USUAL = ("bits", "validation", "kernel")
SCHEDULES = {"linear": "cifar10-sprint-20k", "quadratic": "cifar10-sprint-quadratic", "cosine": "cifar10-sprint-cosine"}
ABLATION = re.compile("(k|lam|tau|count|select)=")  # in a method's name


def ruler() -> list[str]:
    """FID of real images, in each precision of the network."""
    found = json.loads((RAW / "fid-ruler-h200.json").read_text())["scores"]
    rows = [(s["precision_of_features"], f"{s['frechet']:.3f}", f"{s['train_itself']:.1e}" if s["train_itself"] else "0") for s in found]
    return lines(("features in", "50,000 training against 10,000 test images", "training against themselves"), rows)


def sprint(folder: str) -> list[str]:
    """What was trained to the end: FID through training, and the other measures there."""
    through = [table(read(RAW / folder, at=step), "frechet") for step in STEPS]
    end = read(RAW / folder, at=STEPS[-1])
    measures = [table(end, metric) for metric in USUAL]
    rows = []
    for i, last in enumerate(through[-1].rows):
        if last.final.n:
            compared = ["", ""] if last.method == end.baseline else [through[-1].lines[i][4], str(last.speed_up_seconds)]
            fids = [str(t.rows[i].final) for t in through]
            rows.append([f"`{last.method}`", *fids, str(in_time(end, last)), *compared, *(str(t.rows[i].final) for t in measures), str(last.final.n)])
    fids = [f"FID, {step // 1000}k" for step in STEPS]
    return lines(["", *fids, "at equal time", "against uniform", "speed-up", *(MEASURES[metric] for metric in USUAL), "seeds"], rows)


def schedules() -> list[str]:
    """FID of the methods that all three schedules have, at the last update and at equal time."""
    ends = [read(RAW / folder, at=STEPS[-1]) for folder in SCHEDULES.values()]
    found = [{row.method: row for row in table(end, "frechet").rows if row.final.n} for end in ends]
    shown = [method for method in found[0] if all(method in rows for rows in found)]
    both = [[(of[method].final, in_time(end, of[method])) for end, of in zip(ends, found, strict=True)] for method in shown]
    rows = [[f"`{method}`", *(str(value) for pair in pairs for value in pair)] for method, pairs in zip(shown, both, strict=True)]
    return lines(["", *(heading for name in SCHEDULES for heading in (f"{name}, {STEPS[-1] // 1000}k", "at equal time"))], rows)


def fidelity() -> list[str]:
    """Precision and recall of the methods that all three schedules have, at the last update."""
    ends = [read(RAW / folder, at=STEPS[-1]) for folder in SCHEDULES.values()]
    found = [{row.method: row.final for row in table(end, metric).rows if row.final.n} for end in ends for metric in ("precision", "recall")]
    shown = [method for method in found[0] if all(method in rows for rows in found)]
    headings = ["", *(f"{name}: {metric}" if metric == "precision" else metric for name in SCHEDULES for metric in ("precision", "recall"))]
    return lines(headings, ([f"`{method}`", *(str(rows[method]) for rows in found)] for method in shown))


def stopped(folder: str, *steps: int) -> list[str]:
    """What was not, but for ablations: FID through training, and the other measures at the last of these steps."""
    finished = {row.method for row in table(read(RAW / folder, at=STEPS[-1]), "frechet").rows if row.final.n}
    return early(folder, steps, lambda method: method not in finished and not ABLATION.search(method))


def ablation(folder: str, method: str) -> list[str]:
    """A method with each of its settings that was tried, in the order of their names, at the first evaluation."""
    kind = method.partition("+")[0]
    heading, rule, *rows = early(folder, STEPS[:1], lambda other: other == method or (other.startswith(kind) and bool(ABLATION.search(other))))
    return [heading, rule, *sorted(rows, key=lambda row: row.split("`")[1])]


def rates(*folders: str) -> list[str]:
    """FID at the first evaluation of every method that was trained at each learning rate, seed 0."""
    compared = [read(RAW / folder, at=STEPS[0]) for folder in folders]
    cells = [cell for results in compared for cell in results.cells if cell.seed == 0]
    found = {(cell.method, cell.lr): point["frechet"] for cell in cells for point in cell.points if point["step"] == STEPS[0]}
    at = sorted({lr for _, lr in found})
    methods = [method for method in compared[0].methods if all((method, lr) in found for lr in at)]
    return lines(["FID, 5k", *map(str, at)], ([f"`{method}`", *(f"{found[method, lr]:.1f}" for lr in at)] for method in methods))


def early(folder: str, steps: Sequence[int], wanted: Callable[[str], bool], metrics: Sequence[str] = USUAL) -> list[str]:
    """FID at these steps, and the other measures at the last of them."""
    through = [table(read(RAW / folder, at=step), "frechet") for step in steps]
    end = read(RAW / folder, at=steps[-1])
    measures = [table(end, metric) for metric in metrics]
    rows = [
        [f"`{row.method}`", *(str(t.rows[i].final) for t in through), through[-1].lines[i][4], *(str(t.rows[i].final) for t in measures)]
        for i, row in enumerate(through[-1].rows)
        if wanted(row.method) and row.final.n
    ]
    return lines(["", *(f"FID, {step // 1000}k" for step in steps), f"against {end.baseline}", *(MEASURES[metric] for metric in metrics)], rows)


def continuous(folder: str) -> list[str]:
    """Every method at the first evaluation; continuous time has no bound in bits."""
    return early(folder, STEPS[:1], lambda method: True, ("validation", "kernel", "precision", "recall"))


def solvers(folder: str) -> list[str]:
    """FID of the trained models by each solver; the number of samples is given where it is not 10,000."""
    names = {"ddim": "DDIM", "dpm++": "DPM++", "ddpm": "DDPM"}
    results, found = read(RAW / folder), {}
    for method in results.methods:
        for cell in results.of(method)[:1]:  # the first seed
            if (path := cell.folder / "solvers.jsonl").exists():
                end = cell.points[-1]
                rows = [{**end, "steps": end["solver_steps"]}, *map(json.loads, path.read_text().splitlines())]
                found[method] = {(row["solver"], row["steps"], row["samples"]): row["frechet"] for row in rows}
    columns = sorted({column for row in found.values() for column in row}, key=lambda column: (-column[2], column))
    headings = []
    for solver, steps, n in columns:
        name, _, option = solver.partition(":sigma_max=")
        headings.append(f"{names[name]} {steps}" + f", σ ≤ {option}" * bool(option) + f" ({n:,})" * (n != 10_000))
    return lines(["", *headings], ([f"`{method}`", *(f"{row[c]:.1f}" if c in row else "" for c in columns)] for method, row in found.items()))


def starts(folder: str) -> list[str]:
    """FID, KID and the share of black and white values by DDIM 50 from the last step and from lower noise; FID of 2,000 samples by DDPM too."""
    results, rows = read(RAW / folder), []
    for method in results.methods:
        for cell in results.of(method):
            if (path := cell.folder / "starts.jsonl").exists():
                found = {
                    (r["solver"], r["steps"], r["sigma"], r["variance"], r["samples"]): r for r in map(json.loads, path.read_text().splitlines())
                }
                last, few = 1e9, ("fixed-large", 2_000)
                end = cell.points[-1] | {"saturated": found["ddim", 50, last, *few]["saturated"]}  # a share does not depend on the number of samples
                ddim = [end, *(found["ddim", 50, sigma, "fixed-large", 10_000] for sigma in (80.0, 30.0))]
                ancestral = [found["ddim", 50, last, *few], found["ddpm", 100, last, "fixed-small", 2_000]]
                shown = [f"{r['frechet']:.1f}, {1000 * r['kernel']:.1f}, {100 * r['saturated']:.1f} %" for r in ddim]
                rows.append([f"`{method}`", *shown, *(f"{r['frechet']:.1f}" for r in ancestral)])
    return lines(["FID, KID·10³, share", "from the last step", "from σ ≤ 80", "from σ ≤ 30", "DDIM 50 (2,000)", "DDPM 100 (2,000)"], rows)


def independent() -> list[str]:
    """Uniform, uniform with independent draws, and the printed adaptive algorithm: FID, held-out loss, and the loss at the noisiest tenth of time."""
    rows = []
    for schedule, folder in ((name, SCHEDULES[name]) for name in ("linear", "cosine")):
        for method in ("uniform", "independent", "adaptive.paper"):
            (cell,) = (cell for cell in read(RAW / folder).of(method) if cell.seed == 0 and cell.lr == 0.0004)
            points = {point["step"]: point for point in cell.points}
            noisiest = next(np.mean(v["loss_by_time"][-5:]) for v in cell.validations if v["step"] == EVALUATED[2])
            fids = [f"{points[step]['frechet']:.1f}" for step in EVALUATED[:3]]
            rows.append([schedule, f"`{method}`", *fids, f"{points[EVALUATED[2]]['validation']:.5f}", f"{noisiest:.6f}"])
    return lines(["schedule", "", *(f"FID, {step // 1000}k" for step in EVALUATED[:3]), "loss, 15k", "of the noisiest tenth of time"], rows)


def followed(folder: str) -> list[str]:
    """Rank correlation over all trainings, at each evaluation, of FID with the held-out loss at three noise levels and with bits per dimension."""
    times, rows = (0.11, 0.51, 0.99), []
    for step in EVALUATED:
        found = []
        for cell in read(RAW / folder).cells:
            points, curves = ({point["step"]: point for point in among} for among in (cell.points, cell.validations))
            if "frechet" in points.get(step, {}):
                by_time = dict(zip(np.round(curves[step]["time"], 2), curves[step]["loss_by_time"], strict=True))
                found.append([points[step]["frechet"], *(by_time[time] for time in times), points[step]["bits"]])
        ranks = np.argsort(np.argsort(np.array(found), 0), 0)
        rows.append([f"{step:,}", str(len(found)), *(f"{r:+.2f}" for r in np.corrcoef(ranks.T)[0, 1:])])
    return lines(["updates", "trainings", *(f"loss at time {time}" for time in times), "bits/dim"], rows)


def in_time(results: Results, row: Row) -> Summary:
    """The FID of a method when the baseline is done, on straight lines between evaluations, of the trainings that were; none if it was not timed."""
    done = [curve(cell, "frechet") for cell in results.of(results.baseline, row.lr) if cell.finished]
    mine = [curve(cell, "frechet") for cell in results.of(row.method, row.lr) if cell.finished]
    return summary(float(np.interp(done[0].seconds[-1], c.seconds, c.value)) for c in mine if np.isfinite(c.seconds[-1]))


def lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]


TABLES = {
    "ruler": ruler,
    "headline": partial(sprint, "cifar10-headline"),
    "schedules": schedules,
    "precision and recall": fidelity,
    "linear": partial(sprint, "cifar10-sprint-20k"),
    "linear, stopped": partial(stopped, "cifar10-sprint-20k", *STEPS[:1]),
    "learning rates": partial(rates, "cifar10-sprint-5k", "cifar10-sprint-20k"),
    "settings of SpeeD": partial(ablation, "cifar10-sprint-20k", "speed+change-aware"),
    "settings of adaptive": partial(ablation, "cifar10-sprint-20k", "adaptive.paper"),
    "cosine": partial(sprint, "cifar10-sprint-cosine"),
    "cosine, stopped": partial(stopped, "cifar10-sprint-cosine", *EVALUATED[:3]),
    "starts": partial(starts, "cifar10-sprint-cosine"),
    "solvers": partial(solvers, "cifar10-sprint-cosine"),
    "quadratic": partial(sprint, "cifar10-sprint-quadratic"),
    "solvers, quadratic": partial(solvers, "cifar10-sprint-quadratic"),
    "independent": independent,
    "EDM": partial(continuous, "cifar10-edm"),
    "flow": partial(continuous, "cifar10-flow"),
    "what FID follows": partial(followed, "cifar10-sprint-20k"),
}


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
