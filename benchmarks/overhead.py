"""The cost of a sampler: time and peak memory of one training step, as a multiple of the same loop with the uniform sampler.

    python benchmarks/overhead.py                                    # a minute on a CPU, at toy size, without the fixed samplers
    python benchmarks/overhead.py --full --out results/overhead.json # on a GPU: T, batch and image size varied one at a time

All samplers train the same model in turn, in rounds. The time of each block of steps is divided by that of a uniform block just before it, and the
median over rounds is reported, so a machine that slows down does so for both. A round of one sampler is one step with a probe, if it probes, and a
block of steps without; with a probe every f updates a step costs ((f-1)·plain + probe)/f. The uniform sampler's own row shows the noise.

Noise of a few per cent hides the cost of the cheap samplers. So each clock is also timed alone, drawing and taking losses without a model. `added` is
that time minus the uniform clock's, in uniform steps: the whole cost if kernel launches limit a step, and an upper bound otherwise.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import noiseclock as nc
from noiseclock.core.trained import Trained

Make = Callable[[], nc.Sampler]


SAMPLERS: dict[str, Make] = {
    "uniform": nc.Uniform,
    "logit-normal": nc.LogitNormal,
    "mode": nc.Mode,
    "cosmap": nc.CosMap,
    "beta": nc.Beta,
    "log-normal": nc.LogNormal,
    "log-snr-normal": nc.LogSNRNormal,
    "speed": nc.SpeeD,
    "speed, released": lambda: nc.SpeeD(variant="released"),
    "shifted uniform": lambda: nc.Shifted(nc.Uniform()),
    "truncated uniform": lambda: nc.Truncated(nc.Uniform(), 0.0, 0.8),
    "logit-normal + floor": lambda: nc.Mixture(nc.LogitNormal()),
    "logit-normal, annealed": lambda: nc.Annealed(nc.LogitNormal()),
    "loss second moment": nc.LossSecondMoment,
    "loss second moment, published": nc.LossSecondMoment.published,
    "loss EMA": nc.LossEMA,
    "gradient variance": nc.GradientVariance,
    "variance optimal": nc.VarianceOptimal,
    "lookahead": nc.Lookahead,
    "adaptive": nc.Adaptive,
    "adaptive, scaled": nc.Adaptive.scaled,
    "adaptive, released": nc.Adaptive.released,
    "adaptive, cheap": nc.Adaptive.cheap,
}
FIXED = list(SAMPLERS)[1:13]


@dataclass(frozen=True)
class Case:
    """One loop: T steps of the schedule, the batch, and the width of the square RGB images."""

    steps: int
    batch: int
    size: int

    def __str__(self) -> str:
        return f"T = {self.steps}, batch {self.batch}, {self.size}x{self.size}"


@dataclass(frozen=True)
class Cost:
    """What one sampler cost in one case, in units of a step with the uniform sampler.

    ratio: a step, on average. spread: the lowest and the highest round. plain: a step without a probe. probe: a step with one. every: updates
    between probes. memory: peak of the CUDA allocator over all steps, relative to the uniform's; None on other devices. added: the time of the clock
    alone in a step without a probe, minus that of the uniform's clock.
    """

    ratio: float
    spread: tuple[float, float]
    plain: float
    probe: float | None
    every: int
    memory: float | None
    added: float


# What --full measures: a CIFAR-10 training, with one thing varied at a time.
FULL = [Case(1000, 128, 32), Case(100, 128, 32), Case(4000, 128, 32), Case(1000, 32, 32), Case(1000, 512, 32), Case(1000, 128, 64)]


class SmallUNet(nn.Module):
    """For machines without diffusers: two resolutions, a skip connection and the step as one more channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, channels, 3, padding=1)
        self.down = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, padding=1),
            nn.SiLU(),
            nn.Conv2d(2 * channels, channels, 3, padding=1),
        )
        self.out = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        """(B, 3, H, W) from images of that shape and steps (B,)."""
        told = (t.to(x_t) / 1000).reshape(-1, 1, 1, 1).expand(-1, 1, *x_t.shape[2:])
        x = self.into(torch.cat([x_t, told], 1))
        out: Tensor = self.out(x + nn.functional.interpolate(self.down(x), x.shape[2:]))
        return out


class Denoiser(nn.Module):
    """diffusers' U-Net at the paper's proportions (multipliers 1, 2, 2, 2; attention at 16x16), or the small one."""

    def __init__(self, size: int, channels: int) -> None:
        super().__init__()
        try:
            from diffusers import UNet2DModel
        except ImportError:
            self.net: Any = SmallUNet(channels)
            return
        at_16 = [size >> level == 16 for level in range(4)]
        self.net = UNet2DModel(
            sample_size=size,
            in_channels=3,
            out_channels=3,
            layers_per_block=2,
            block_out_channels=[channels * m for m in (1, 2, 2, 2)],
            down_block_types=["AttnDownBlock2D" if here else "DownBlock2D" for here in at_16],
            up_block_types=["AttnUpBlock2D" if here else "UpBlock2D" for here in reversed(at_16)],
            norm_num_groups=min(32, channels),
            attention_head_dim=min(64, channels),
        )

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        """(B, 3, H, W) the predicted noise."""
        found = self.net(x_t, t)
        out: Tensor = found if isinstance(found, Tensor) else found.sample
        return out


class Loop:
    """One model and optimiser, trained by any clock."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.device = torch.device(args.device)
        self.case, self.bf16 = case, args.bf16
        model = Denoiser(case.size, args.channels).to(self.device)
        self.model = torch.compile(model) if args.compile else model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")
        self.x0 = torch.randn(case.batch, 3, case.size, case.size, device=self.device)

    def step(self, clock: nc.Clock) -> None:
        """The README's loop; `updated` is called by hand, because only one of the clocks may count this update."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            b = clock.draw(self.x0, predict=self.model)
            loss = clock.loss(b, self.model(b.x_t, b.t)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        clock.updated()

    def timed(self, clock: nc.Clock, steps: int, *, probe: bool) -> tuple[float, int]:
        """Seconds per step, and the peak of allocated memory in bytes."""
        clock._next_probe = clock._updates if probe else clock._updates + steps
        clock._trained = Trained((self.optimizer,))  # some probes measure in its metric
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        for _ in range(steps):
            self.step(clock)
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps, torch.cuda.max_memory_allocated() if cuda else 0

    def alone(self, clock: nc.Clock, steps: int) -> float:
        """Seconds per step of the clock's own work."""
        clock._next_probe = clock._updates + steps + 1
        start = time.perf_counter()
        for _ in range(steps):
            clock.loss(clock.draw(self.x0, predict=self.model), self.x0)
            clock.updated()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / steps


def measure(case: Case, names: list[str], args: argparse.Namespace) -> dict[str, Cost]:
    """Every sampler's cost in one case."""
    loop = Loop(case, args)
    clocks = {name: nc.Clock(nc.schedule("linear", steps=case.steps), SAMPLERS[name](), seed=args.seed) for name in names}
    reference = nc.Clock(nc.schedule("linear", steps=case.steps), nc.Uniform(), seed=args.seed)
    for clock in (reference, *clocks.values()):
        # a sampler that selects times does its full work only after three probes
        for _ in range(3 if isinstance(clock.sampler, nc.Adaptive) else 0):
            loop.timed(clock, 1, probe=True)
        loop.timed(clock, 2, probe=False)
    plain, probe, uniform = ({name: list[float]() for name in clocks} for _ in range(3))
    alone = {name: list[float]() for name in clocks}
    for _ in range(4 * args.rounds):
        for name, clock in clocks.items():
            without = loop.alone(reference, 2 * args.block)
            alone[name].append(loop.alone(clock, 2 * args.block) - without)
    peak, usual = dict.fromkeys(clocks, 0), 0
    for _ in range(args.rounds):
        for name, clock in clocks.items():
            seconds, memory = loop.timed(reference, args.block, probe=False)
            uniform[name].append(seconds)
            usual = max(usual, memory)
            if clock.sampler.every:
                seconds, memory = loop.timed(clock, 1, probe=True)
                probe[name].append(seconds)
                peak[name] = max(peak[name], memory)
            seconds, memory = loop.timed(clock, args.block, probe=False)
            plain[name].append(seconds)
            peak[name] = max(peak[name], memory)
    return {
        name: cost(clock.sampler.every, plain[name], probe[name], uniform[name], alone[name], peak[name] / usual if usual else None)
        for name, clock in clocks.items()
    }


def cost(every: int, plain: list[float], probe: list[float], uniform: list[float], alone: list[float], memory: float | None) -> Cost:
    """From seconds per round to multiples of the uniform sampler."""
    steps = [p / u for p, u in zip(plain, uniform, strict=True)]
    probes = [p / u for p, u in zip(probe, uniform, strict=True)] if every else steps
    f = every or 1
    rounds = [((f - 1) * step + probe) / f for step, probe in zip(steps, probes, strict=True)]
    middle, middle_probe = statistics.median(steps), statistics.median(probes)
    ratio = ((f - 1) * middle + middle_probe) / f
    added = statistics.median(alone) / statistics.median(uniform)
    return Cost(ratio, (min(rounds), max(rounds)), middle, middle_probe if every else None, every, memory, added)


def table(results: dict[str, dict[str, Cost]]) -> str:
    """Samplers down, cases across: the ratio, in brackets what the clock alone adds, and after a slash the ratio of memory, if known."""

    def entry(c: Cost | None) -> str:
        if c is None:
            return ""
        return f"{c.ratio:.3f} ({c.added:+.3f})" + ("" if c.memory is None else f" / {c.memory:.2f}")

    names = list(next(iter(results.values())))
    first = max(map(len, names))
    lines = [" " * first + "".join(f"  {case:>27}" for case in results)]
    lines += [f"{name:<{first}}" + "".join(f"  {entry(costs.get(name)):>27}" for costs in results.values()) for name in names]
    return "\n".join(lines)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; defaults are toy size, or those of --full."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="run the cases for a GPU, with 64 channels")
    parser.add_argument("--steps", type=int, nargs="+", help="T of the schedule; give one or more, as for the next two; all combinations are run")
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--size", type=int, nargs="+", help="width of the images")
    parser.add_argument("--channels", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--block", type=int, help="steps without a probe per round")
    parser.add_argument("--samplers", nargs="+", choices=[*SAMPLERS, "fixed"], metavar="NAME", help=f"some of: fixed, {', '.join(SAMPLERS)}")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    args.channels = args.channels or (64 if args.full else 8)
    args.rounds = args.rounds or (5 if args.full else 2)
    args.block = args.block or 20  # enough for one refresh of the samplers that learn from losses
    if args.full and not (args.steps or args.batch or args.size):
        args.cases = FULL
    else:
        wanted = args.steps or [1000 if args.full else 100], args.batch or [128 if args.full else 32], args.size or [32 if args.full else 8]
        args.cases = [Case(steps, batch, size) for steps in wanted[0] for batch in wanted[1] for size in wanted[2]]
    given = args.samplers or [name for name in SAMPLERS if args.full or name not in FIXED]
    chosen = {"uniform", *given, *(FIXED if "fixed" in given else [])}
    args.samplers = [name for name in SAMPLERS if name in chosen]
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON; the file is rewritten after every case, so that an interrupted run keeps its results."""
    args = arguments(argv)
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    setup = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "noiseclock": nc.__version__,
        "device": name,
        "model": type(Denoiser(16, args.channels).net).__name__,
        "seed": args.seed,
        **{key: getattr(args, key) for key in ("channels", "rounds", "block", "compile", "bf16")},
    }
    results: dict[str, dict[str, Cost]] = {}
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # probes in quick succession may make the policy warn
        for case in args.cases:
            # fixed samplers are timed in the first case only: their cost depends neither on T nor on the size of the images
            names = [name for name in args.samplers if case == args.cases[0] or name not in FIXED]
            costs = results[str(case)] = measure(case, names, args)
            print(f"measured {case}", flush=True)
            found.append({**asdict(case), "samplers": {n: asdict(c) for n, c in costs.items()}})
            if args.out:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps({"setup": setup, "cases": found}, indent=1) + "\n")
    what = "Time / peak memory" if args.device.startswith("cuda") else "Time"
    print(f"\n{what} of a training step, in those of the uniform sampler; {name}, torch {torch.__version__}")
    print(table(results))


if __name__ == "__main__":
    main()
