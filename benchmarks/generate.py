"""The cost of sampling: a network in a plain loop, captured as one CUDA graph, and compiled and captured.

    python benchmarks/generate.py                                                         # seconds on a CPU, at toy size
    python benchmarks/generate.py --channels 64 --samples 10000 --batch 256 1000 --out generate.json    # on a GPU

DDIM with a U-Net of the proportions of `cifar10-sprint` and untrained weights, in bf16 on a GPU. Every variant first makes one batch, which
compiles, chooses kernels and captures; its time is reported separately.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

import noiseclock as nc
from noiseclock.core.objectives import OBJECTIVES
from noiseclock.lab.built import placed
from noiseclock.lab.captured import CapturedForward
from noiseclock.lab.generate import generate
from noiseclock.lab.models import build

HOW = ("plain", "captured", "compiled")


@dataclass(frozen=True)
class Cost:
    """One variant: seconds for all samples, samples a second, seconds of the first batch, peak memory in GiB."""

    batch: int
    how: str
    seconds: float
    samples_a_second: float
    first: float
    memory: float | None


def measure(how: str, batch: int, args: argparse.Namespace) -> Cost:
    """One variant."""
    cuda = args.device == "cuda"
    torch.manual_seed(0)
    shape = (3, args.size, args.size)
    net: Any = placed(build("unet", shape, channels=args.channels, attention=(args.size // 2,)), args.device).eval()
    net = torch.compile(net, dynamic=False) if how == "compiled" else net
    predict = net if how == "plain" else CapturedForward(net)
    schedule, objective = nc.schedule("linear"), OBJECTIVES["eps"]()

    def make(samples: int) -> float:
        start = time.perf_counter()
        with torch.autocast(args.device, torch.bfloat16, enabled=cuda, cache_enabled=how == "plain"):
            generate(predict, schedule, objective, shape, samples, steps=args.steps, batch=batch, device=args.device)
        return time.perf_counter() - start

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = make(batch)
    seconds = make(args.samples)
    return Cost(batch, how, seconds, args.samples / seconds, first, torch.cuda.max_memory_allocated() / 2**30 if cuda else None)


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--batch", type=int, nargs="+", default=[4])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--size", type=int, default=32, help="width of the images")
    parser.add_argument("--how", nargs="+", choices=HOW)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or platform.machine()
    setup = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "noiseclock": nc.__version__,
        "device": device, "channels": args.channels, "samples": args.samples, "steps": args.steps, "size": args.size,
    }  # fmt: skip
    costs: list[Cost] = []
    for batch, how in product(args.batch, args.how or (HOW if args.device == "cuda" else HOW[:1])):
        costs.append(measure(how, batch, args))
        print(f"batch {batch}, {how}: {costs[-1].seconds:.1f} s", flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"setup": setup, "costs": [asdict(cost) for cost in costs]}, indent=1) + "\n")
    print(f"\n{args.samples:,} samples in {args.steps} DDIM steps on {device}, torch {torch.__version__}, {args.channels} channels")
    print("batch  how       seconds  samples/s  ratio  first s   GiB")
    for c in costs:
        memory, ratio = "" if c.memory is None else f"{c.memory:.1f}", costs[0].seconds / c.seconds
        print(f"{c.batch:>5}  {c.how:<8}  {c.seconds:>7.1f}  {c.samples_a_second:>9,.0f}  {ratio:>5.2f}  {c.first:>7.1f}  {memory:>4}")


if __name__ == "__main__":
    main()
