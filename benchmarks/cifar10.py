"""The trainings of docs/results.md, as one queue that can be interrupted and resumed at any time.

    python benchmarks/cifar10.py runs/cifar10 --jobs 4 --minutes 9 --left 27    # on a GPU; run it again to continue
    python benchmarks/cifar10.py runs/cifar10 --list                            # what is left, in its order
    python benchmarks/cifar10.py runs/cifar10 --merge                           # add the measurements to the other results

Each job takes the first training that no other job has, from any comparison, so that no job waits for the end of a comparison. Trainings in the
folder are resumed. Trainings that `benchmarks/results` already has are skipped, because results move between machines more easily than weights: a
training that this machine cannot end (--left) has to be made anew on the next, so it is not begun, and a shorter one fills the time.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import solvers  # beside this file
import torch

from noiseclock.lab import compare
from noiseclock.lab.errors import Failure
from noiseclock.lab.folder import Busy, lock
from noiseclock.lab.interrupt import listening
from noiseclock.lab.recipes import recipe

RESULTS = Path(__file__).with_name("results")
TRAINED = ("checkpoints", "samples", "locks", ".lock", "config.json")  # what --merge does not copy
OURS = ("uniform", "variance-optimal", "min-snr", "variance-optimal+min-snr")
PAPERS = ("p2", "log-normal", "speed+change-aware", "adaptive.paper")
SOLVED = ("adaptive.paper", "variance-optimal", "uniform", "speed+change-aware")


@dataclass(frozen=True)
class Part:
    """Some trainings of a comparison, up to update `until`. solvers: with which finished trainings are evaluated too (solvers.py)."""

    name: str
    methods: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    lrs: tuple[float, ...] = (0.0004,)
    until: int = 20_000
    recipe: str = "cifar10-sprint"
    changes: dict[str, Any] = field(default_factory=dict)
    every: int = 5_000
    samples: int = 10_000
    solvers: tuple[str, ...] = ()

    def plan(self) -> compare.Plan:
        """The comparison that the trainings belong to."""
        base = replace(recipe(self.recipe), **self.changes)
        return compare.Plan(self.recipe, base, self.methods, self.seeds, self.lrs, self.every, self.samples)


LINEAR, COSINE, QUADRATIC = "cifar10-sprint-20k", "cifar10-sprint-cosine", "cifar10-sprint-quadratic"
AGAIN = "cifar10-sprint-again"  # linear; apart, because results that are complete are not replaced
BRIEF = {"updates": 20_000, "warmup": 500, "ema": 0.999}
SMALL = {**BRIEF, "channels": 64, "batch": 128}
OTHERS = ("gradient-variance", "loss-history", "adaptive.paper+min-snr", "speed", "change-aware")
CONTINUOUS = (
    Part("cifar10-edm", ("log-normal", "uniform", "variance-optimal", "adaptive.paper"), until=10_000, recipe="cifar10-edm", changes=SMALL),
    Part("cifar10-flow", ("uniform", "logit-normal", "variance-optimal", "adaptive.paper"), until=10_000, recipe="cifar10-flow", changes=SMALL),
)
PROBED = ("adaptive.scaled", "adaptive.scaled+min-snr", "lookahead", "lookahead:target=min-snr+min-snr")

QUEUE = [  # in the order of what they decide
    # each method at its best of three learning rates
    Part("cifar10-sprint-5k", (*PROBED, "variance-optimal+min-snr"), lrs=(0.0002,), until=5_000, changes={"updates": 5_000}),
    Part(LINEAR, PROBED, lrs=(0.0008,), until=5_000),
    # a third seed of the leaders
    Part(LINEAR, OURS[:2], seeds=(2,)),
    # three schedules; the longest trainings first, so that all jobs end together
    Part(COSINE, OURS + PAPERS, changes={"schedule": "cosine"}),
    Part(QUADRATIC, SOLVED, changes={"schedule": "quadratic"}),
    # other solvers on these four, before anything else, because their models are lost with the machine
    Part(QUADRATIC, SOLVED, changes={"schedule": "quadratic"}, solvers=solvers.SOLVERS),
    Part(QUADRATIC, (*OURS[2:], *PAPERS[:2]), changes={"schedule": "quadratic"}),
    # the paper's own network
    Part("cifar10-headline", OURS[:2], lrs=(0.0002,), recipe="cifar10-linear", changes={**BRIEF, "solver": "ddim", "solver_steps": 50}),
    # continuous time, briefly
    *(replace(part, until=5_000) for part in CONTINUOUS),
    # ablations: how many losses a reward is made of, and how they are chosen; SpeeD's three settings
    Part(LINEAR, tuple(f"adaptive.paper:{option}" for option in ("count=1", "count=10", "select=greedy", "select=all,stride=25")), until=5_000),
    Part(LINEAR, tuple(f"speed:k={k}+change-aware" for k in (1, 10, 25)), until=5_000),
    Part(LINEAR, tuple(f"speed+change-aware:lam={lam}" for lam in (0.5, 0.8, 1.0)), until=5_000),
    Part(LINEAR, tuple(f"speed:tau={tau}+change-aware" for tau in (500, 800)), until=5_000),
    # what else was proposed
    Part(LINEAR, PAPERS),
    Part(LINEAR, OTHERS),
    # VarianceOptimal again, the step of whose probes was too small for TF32 (docs/log.md, 2026-11-19), with other solvers on the linear schedule
    Part(AGAIN, ("variance-optimal",), every=10_000, solvers=solvers.SOLVERS),
    Part(AGAIN, ("variance-optimal",), seeds=(1, 2), every=10_000),
    # the adaptive sampler again, longer: its policy could not move back from its bounds (there too)
    Part(LINEAR, ("adaptive.released",)),
    Part(AGAIN, ("uniform", "adaptive.paper", "speed+change-aware"), every=10_000, solvers=solvers.SOLVERS),
    *(replace(part, methods=("adaptive.paper",)) for part in CONTINUOUS),
    # SpeeD as the adaptive paper compares with it
    Part(LINEAR, ("speed:variant=released+p2",)),
    Part(LINEAR, ("adaptive.scaled",), until=10_000),
    # longer, if there is time, and a third seed under min-SNR
    *(replace(part, methods=tuple(method for method in part.methods if method != "adaptive.paper")) for part in CONTINUOUS),
    Part(LINEAR, OURS[2:], seeds=(2,)),
]


def left(queue: list[Part], folder: Path, results: Path) -> Iterator[tuple[Part, compare.Plan, compare.Cell]]:
    """The trainings that are done neither here nor in the results."""
    for part in queue:
        plan = part.plan()
        for cell in plan.cells():
            if not any(done(part, root / part.name / "cells" / cell.slug) for root in (folder, results)):
                yield part, plan, cell


def done(part: Part, cell: Path) -> bool:
    """Is the training complete, with its solvers?"""
    return reached(cell) >= part.until and not solvers.missing(cell, part.solvers)


def reached(cell: Path) -> int:
    """The last update at which a training was evaluated."""
    path = cell / "points.jsonl"
    return max((json.loads(line)["step"] for line in path.read_text().splitlines()), default=0) if path.exists() else 0


def work(
    queue: list[Part], folder: Path, results: Path, threads: int, device: str | None = None, end: float = math.inf, pace: float = 0.0, jobs: int = 1
) -> None:
    """One of so many jobs: take the first free training that ends in time, until none is left.

    end: of the machine, in time.time(). pace: seconds an update.
    """
    torch.set_num_threads(threads)
    failed: set[str] = set()
    while take(queue, folder, results, failed, device, (end - time.time()) / pace if pace else math.inf, jobs):
        pass


def take(queue: list[Part], folder: Path, results: Path, failed: set[str], device: str | None, within: float = math.inf, jobs: int = 1) -> bool:
    """Run the first free training that needs no more updates than this; False if there is none."""
    for part, plan, cell in left(queue, folder, results):
        here = folder / part.name
        if f"{part.name} {cell.slug}" in failed or part.until - reached(here / "cells" / cell.slug) > within:
            continue
        try:
            with lock(here / "locks" / cell.slug):
                if done(part, here / "cells" / cell.slug):  # by another job, a moment ago
                    continue
                compare.begin(plan, here, device)
                told(part, cell, "begins")
                with listening() as wish:
                    for event in compare.run(plan, cell, here / "cells" / cell.slug, device, part.until, jobs):
                        if event.point is not None:
                            numbers = [name for name in ("step", "validation", "bits", "frechet") if name in event.point]
                            told(part, cell, *(f"{name} {event.point[name]:.5g}" for name in numbers))
                    wish.grant()  # a finished training no longer stops for a signal
                solvers.measure(here / "cells" / cell.slug, part.solvers, device=device)  # now, while the network is compiled
        except Busy:
            continue
        except Failure as error:  # a method that diverges is a result
            failed.add(f"{part.name} {cell.slug}")
            told(part, cell, str(error))
        return True
    return False


def collect(queue: list[Part], folder: Path, results: Path) -> None:
    """Add this folder's evaluations and logs to the results; if both have a training, the one that got further stays, with the other's solvers."""
    begun = {part.name: part for part in queue if any(map(reached, (folder / part.name / "cells").glob("*")))}
    for name, part in begun.items():
        with tempfile.TemporaryDirectory() as measured:
            shutil.copytree(folder / name, measured, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*TRAINED))
            copied = compare.merge(part.plan(), results / name, [measured])
        print(f"{copied} trainings copied into {results / name}, and the solvers of {solved(folder / name, results / name)} that it had")


def solved(here: Path, results: Path) -> int:
    """Copy what was measured with other solvers to trainings of the results that got as far and lack it, which merging leaves as they are."""
    found = 0
    for path in (here / "cells").glob("*/solvers.jsonl"):
        target = results / "cells" / path.parent.name
        if reached(target) == reached(path.parent) and not (target / path.name).exists():
            shutil.copy(path, target)
            found += 1
    return found


def told(part: Part, cell: compare.Cell, *words: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), part.name, *cell, *words, flush=True)


def main(argv: list[str] | None = None) -> None:
    """Train, list what is left, or merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder in which every comparison gets a folder of results")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results measured so far")
    parser.add_argument("--jobs", type=int, default=1, help="trainings in parallel; on one GPU, under NVIDIA's multi-process service")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="save and stop after so many minutes")
    parser.add_argument("--left", type=float, default=float("inf"), help="minutes that this machine is still there; longer trainings are not begun")
    parser.add_argument("--pace", type=float, default=0.04, help="seconds an update beside the other jobs, with evaluations; 0.04 for 4 on an H200")
    parser.add_argument("--list", action="store_true", help="only list what is left")
    parser.add_argument("--merge", action="store_true", help="only copy the measurements, without the trained models, into --results")
    args = parser.parse_args(argv)
    if args.list:
        for part, _, cell in left(QUEUE, args.folder, args.results):
            print(part.name, *cell, f"to {part.until:,}" + ", other solvers" * bool(part.solvers))
        return
    if args.merge:
        collect(QUEUE, args.folder, args.results)
        return
    end, machine = time.monotonic() + 60 * args.minutes, time.time() + 60 * args.left
    context = multiprocessing.get_context("spawn")
    threads = max((os.cpu_count() or 1) // args.jobs, 1)
    job = (QUEUE, args.folder, args.results, threads, None, machine, args.pace, args.jobs)
    jobs = [context.Process(target=work, args=job) for _ in range(args.jobs)]
    for process in jobs:
        process.start()
    while any(process.is_alive() for process in jobs) and time.monotonic() < end:
        time.sleep(1)
    for process in jobs:
        process.terminate()  # it saves, and stops
    for process in jobs:
        process.join()


if __name__ == "__main__":
    main()
