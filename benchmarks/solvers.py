"""Does the way of training change what a fast solver can do? Every solver on the trained models of a comparison.

    python benchmarks/solvers.py runs/cifar10/cifar10-sprint-20k --methods uniform variance-optimal --out solvers.json
    python benchmarks/solvers.py results/digits --solvers ddim:5 ddim:20:500

A solver is its name, its steps, and how many pictures unless --samples: fewer for the slow ones, whose FID is to be read against that of others with
as few. What the JSON holds already is not measured again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import noiseclock as nc
from noiseclock.lab.built import sampled
from noiseclock.lab.data import pictured
from noiseclock.lab.evaluate import compare_images
from noiseclock.lab.results import read
from noiseclock.lab.trained import opened

SOLVERS = ["ddim:10", "ddim:50", "ddim:200", "dpm++:10", "dpm++:20", "ddpm:1000:2000", "ddim:50:2000"]


def measured(cell: Any, solver: str, steps: int, samples: int, device: torch.device) -> dict[str, Any]:
    """What the averaged weights of a finished training are worth under a solver."""
    run = opened(cell.folder, device=device)
    images = sampled(run.net, replace(run.recipe, solver=solver, solver_steps=steps), run.clock, run.data, samples, device=device)
    found = compare_images(images, pictured(run.data), solver=solver, steps=steps, device=device)
    return {"frechet": found.frechet, "kernel": found.kernel.mean, "precision": found.precision, "recall": found.recall}


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each training, a column for each solver."""
    columns = list(dict.fromkeys((row["solver"], row["steps"], row["samples"]) for row in rows))
    trainings = list(dict.fromkeys((row["method"], row["lr"], row["seed"]) for row in rows))
    found = {tuple(row[name] for name in ("method", "lr", "seed", "solver", "steps", "samples")): row["frechet"] for row in rows}
    lines = [f"{'method':<30}  {'lr':>7}  {'seed':>4}" + "".join(f"  {f'{solver} {steps} ({n:,})':>18}" for solver, steps, n in columns)]
    for method, lr, seed in trainings:
        values = [found.get((method, lr, seed, *column)) for column in columns]
        lines.append(f"{method:<30}  {lr:>7g}  {seed:>4}" + "".join(f"  {'' if v is None else f'{v:.2f}':>18}" for v in values))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, write the JSON after each, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of a comparison, with its checkpoints")
    parser.add_argument("--methods", nargs="+", help="all of the comparison unless given")
    parser.add_argument("--solvers", nargs="+", default=SOLVERS)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    results = read(args.folder)
    rows: list[dict[str, Any]] = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    setup = {"torch": torch.__version__, "noiseclock": nc.__version__, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    for cell in (cell for method in args.methods or results.methods for cell in results.of(method) if cell.finished):
        for text in args.solvers:
            solver, steps, samples = (*text.split(":"), str(args.samples))[:3]
            key = {"method": cell.method, "lr": cell.lr, "seed": cell.seed, "solver": solver, "steps": int(steps), "samples": int(samples)}
            if any(key.items() <= row.items() for row in rows):
                continue
            rows.append({**key, **measured(cell, solver, int(steps), int(samples), device)})
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"setup": setup, "rows": rows}, indent=1) + "\n")
    print("Fréchet distances (FID on pictures), pictures in brackets")
    print(table(rows))


if __name__ == "__main__":
    main()
