"""Does the way of training change what a fast solver can do? Every solver on the trained models of a comparison.

    python benchmarks/solvers.py runs/cifar10/cifar10-sprint-cosine --methods uniform variance-optimal
    python benchmarks/solvers.py results/digits --solvers ddim:5 ddim:20:500

A solver is given as name:steps or name:steps:pictures, where pictures replaces --samples; its options come first, as in ddim:sigma_max=80:50.
Slow solvers make fewer pictures; compare their FID only with that of others at the same number. Results are kept in each training's solvers.jsonl,
and are not measured again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import noiseclock as nc
from noiseclock.lab.built import sampled
from noiseclock.lab.data import pictured
from noiseclock.lab.evaluate import compare_images
from noiseclock.lab.folder import records
from noiseclock.lab.results import Cell, read
from noiseclock.lab.trained import opened

SOLVERS = ("ddpm:1000:2000", "ddim:50:2000", "ddim:200:2000", "ddim:10", "ddim:50", "dpm++:10", "dpm++:20")
SAMPLES = 10_000


def named(text: str, samples: int) -> dict[str, Any]:
    """A solver, parsed from the command line's text."""
    found = re.fullmatch(r"(.+?):(\d+)(?::(\d+))?", text)
    if found is None:
        raise SystemExit(f"{text!r} is not name:steps or name:steps:pictures")
    solver, steps, count = found.groups()
    return {"solver": solver, "steps": int(steps), "samples": int(count or samples)}


def known(folder: Path) -> list[dict[str, Any]]:
    """The solvers that were measured on a training, with their results. The first is that of its last evaluation, if that made pictures."""
    points, rows = (list(records(folder / name)) for name in ("points.jsonl", "solvers.jsonl"))
    return [{**point, "steps": point["solver_steps"]} for point in points[-1:] if "frechet" in point] + rows


def missing(folder: Path, solvers: Sequence[str] = SOLVERS, samples: int = SAMPLES) -> list[dict[str, Any]]:
    """The solvers that were not measured on it yet."""
    rows = known(folder)
    return [wanted for wanted in (named(text, samples) for text in solvers) if not any(wanted.items() <= row.items() for row in rows)]


def measure(folder: Path, solvers: Sequence[str] = SOLVERS, samples: int = SAMPLES, device: str | torch.device | None = None) -> None:
    """Evaluate the averaged weights of a finished training with each solver that is missing."""
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    for wanted in missing(folder, solvers, samples):
        run = opened(folder, device=device)
        recipe = replace(run.recipe, solver=wanted["solver"], solver_steps=wanted["steps"])
        images = sampled(run.net, recipe, run.clock, run.data, wanted["samples"], device=device)
        found = compare_images(images, pictured(run.data), solver=recipe.solver, steps=recipe.solver_steps, device=device)
        row = {**wanted, "frechet": found.frechet, "kernel": found.kernel.mean, "precision": found.precision, "recall": found.recall}
        row |= {
            "torch": torch.__version__,
            "noiseclock": nc.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        }
        with (folder / "solvers.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def table(cells: Sequence[Cell]) -> str:
    """A line for each training, a column for each solver."""
    found = [{(row["solver"], row["steps"], row["samples"]): row["frechet"] for row in known(cell.folder)} for cell in cells]
    columns = list(dict.fromkeys(column for row in found for column in row))
    lines = [f"{'method':<30}  {'lr':>7}  {'seed':>4}" + "".join(f"  {f'{solver} {steps} ({n:,})':>18}" for solver, steps, n in columns)]
    for cell, row in zip(cells, found, strict=True):
        values = "".join(f"  {f'{row[column]:.2f}' if column in row else '':>18}" for column in columns)
        lines.append(f"{cell.method:<30}  {cell.lr:>7g}  {cell.seed:>4}{values}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a comparison, with its checkpoints")
    parser.add_argument("--methods", nargs="+", help="all methods of the comparison unless given")
    parser.add_argument("--solvers", nargs="+", default=SOLVERS)
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--device", help="cuda if available, unless given")
    args = parser.parse_args(argv)
    results = read(args.folder)
    cells = [cell for method in args.methods or results.methods for cell in results.of(method) if cell.finished]
    for cell in cells:
        measure(cell.folder, args.solvers, args.samples, args.device)
    print("Fréchet distances (FID on pictures), pictures in brackets")
    print(table(cells))


if __name__ == "__main__":
    main()
