"""The cost of an update of the trainer: plain, captured as one CUDA graph, and compiled and captured; and what samplers add to it.

    python benchmarks/step.py                                                      # seconds on a CPU, at toy size
    python benchmarks/step.py --channels 128 64 --batch 128 512 --out step.json    # on a GPU
    python benchmarks/step.py --channels 128 --how compiled --samplers uniform speed loss-second-moment adaptive adaptive:every=160,stride=10

Trains `cifar10-sprint` on random images, in rounds: a block of updates of every variant in turn, each with its own network. The median over rounds
is reported, so a machine that slows down does so for all. A block is at least as long as a sampler's interval between probes, so that it has its
share of probes, and begins half-way between two of them: at the ends of a block the script waits for the device, which a training does only where
it logs. "First" is the time of the first four updates: compiling, choosing kernels, capturing. With --kernels, the JSON also lists the kernels of an
update with their times.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import noiseclock as nc
import noiseclock.lab.train as trainer
from noiseclock.lab.captured import WARMUP
from noiseclock.lab.data import Images
from noiseclock.lab.interrupt import Wish
from noiseclock.lab.processes import joined
from noiseclock.lab.recipes import Recipe, recipe
from noiseclock.lab.train import Record, Run, why_not_captured

HOW = ("plain", "captured", "compiled")


@dataclass(frozen=True)
class Cost:
    """One variant: milliseconds an update (median of rounds, and their spread), images a second, seconds of the first updates, peak memory in GiB."""

    channels: int
    batch: int
    how: str
    sampler: str
    milliseconds: float
    spread: tuple[float, float]
    images_a_second: float
    first: float
    memory: float | None
    kernels: list[tuple[float, float, str]] | None = None  # milliseconds and launches in an update, and the name


class Variant:
    """One training that can be taken a block further."""

    def __init__(self, settings: Recipe, how: str, folder: Path, device: str, block: int) -> None:
        self.settings, self.how = replace(settings, compile=how == "compiled"), how
        reason = {"return_value": "it is measured without"} if how == "plain" else {"side_effect": why_not_captured}
        with patch.object(trainer, "why_not_captured", **reason):
            run = Run(self.settings, folder, joined(folder, device, ()), shard=False)
        run.save = lambda log: None  # type: ignore[method-assign]  # no checkpoint, which is a gigabyte
        self._cuda = run.device.type == "cuda"
        self._updates: Iterator[Record] = run.updates(Wish())
        self.block = max(block, run.clock.sampler.every)
        self.rounds: list[float] = []
        self.kernels: list[tuple[float, float, str]] | None = None
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        self.first = self._take(WARMUP + 1)
        self._take(self.block + self.block // 2 - WARMUP - 1)  # probes are made at multiples of a block
        self.memory = torch.cuda.max_memory_allocated() / 2**30 if self._cuda else None

    def _take(self, updates: int) -> float:
        start = time.perf_counter()
        for _ in range(updates):
            next(self._updates)
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def round(self) -> None:
        """One block."""
        self.rounds.append(self._take(self.block) / self.block * 1000)

    def profile(self, updates: int = 5) -> None:
        """Which kernels run in an update."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            self._take(updates)
        found = [(e.self_device_time_total / 1000 / updates, e.count / updates, e.key) for e in seen.key_averages()]
        self.kernels = sorted(found, reverse=True)

    def cost(self) -> Cost:
        """What was measured."""
        middle, settings = statistics.median(self.rounds), self.settings
        return Cost(
            settings.channels, settings.batch, self.how, settings.sampler, middle, (min(self.rounds), max(self.rounds)),
            1000 * settings.batch / middle, self.first, self.memory, self.kernels,
        )  # fmt: skip


def measure(settings: list[tuple[Recipe, str]], rounds: int, device: str, *, block: int, kernels: bool) -> Iterator[list[Cost]]:
    """The costs of all variants, after each round."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on random images a policy learns nothing, and may warn
        variants = []
        for i, (one, how) in enumerate(settings):
            (Path(folder) / str(i)).mkdir()
            variants.append(Variant(one, how, Path(folder) / str(i), device, block))
            print(f"{one.channels} channels, batch {one.batch}, {how}, {one.sampler}: first {variants[-1].first:.1f} s", flush=True)
        for _ in range(rounds):
            for variant in variants:
                variant.round()
            yield [variant.cost() for variant in variants]
        if kernels:
            for variant in variants:
                variant.profile()
            yield [variant.cost() for variant in variants]


def table(costs: list[Cost]) -> str:
    """One line per variant, with its ratio to the plain variant of its size and to the uniform sampler."""
    lines = ["channels  batch  how       sampler                             ms  images/s  plain/this  this/uniform  first s  GiB"]
    for c in costs:
        same = [other for other in costs if (other.channels, other.batch) == (c.channels, c.batch)]
        plain = [o.milliseconds for o in same if o.how == "plain" and o.sampler == c.sampler]
        uniform = [o.milliseconds for o in same if o.how == c.how and o.sampler == "uniform"]
        ratios = [f"{plain[0] / c.milliseconds:.2f}" if plain else "", f"{c.milliseconds / uniform[0]:.3f}" if uniform else ""]
        memory = "" if c.memory is None else f"{c.memory:.1f}"
        lines.append(
            f"{c.channels:>8}  {c.batch:>5}  {c.how:<8}  {c.sampler:<30}  {c.milliseconds:>7.2f}  {c.images_a_second:>8,.0f}  {ratios[0]:>10}  "
            f"{ratios[1]:>12}  {c.first:>7.1f}  {memory:>3}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, nargs="+", default=[8])
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--how", nargs="+", choices=HOW)
    parser.add_argument("--samplers", nargs="+", default=["uniform"])
    parser.add_argument("--size", type=int, default=32, help="width of the images")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--block", type=int, default=40, help="updates per round, unless a sampler needs more")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    how = args.how or (HOW if args.device == "cuda" else HOW[:1])
    images = Images("random", torch.randint(0, 256, (2000, 3, args.size, args.size), dtype=torch.uint8))
    base = replace(
        recipe("cifar10-sprint"), updates=10**9, save_every=0, validate_every=0, sample_every=0, track=(),
        attention=(args.size // 2,), precision="bf16" if args.device == "cuda" else "fp32",
    )  # fmt: skip
    variants = [
        (replace(base, channels=channels, batch=batch, sampler=sampler), one)
        for channels, batch, one, sampler in product(args.channels, args.batch, how, args.samplers)
    ]
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    setup: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "noiseclock": nc.__version__,
        "device": device, "rounds": args.rounds, "block": args.block, "size": args.size,
    }  # fmt: skip
    costs: list[Cost] = []
    with patch.object(trainer, "loaded", return_value=[images, images]):
        for costs in measure(variants, args.rounds, args.device, block=args.block, kernels=args.kernels):
            if args.out:  # after every round, so that an interrupted run keeps its results
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"setup": setup, "costs": [asdict(cost) for cost in costs]}, indent=1) + "\n")
    print(f"\nAn update on {device}, torch {torch.__version__}, {args.size}x{args.size} images; medians of {args.rounds} rounds")
    print(table(costs))


if __name__ == "__main__":
    main()
