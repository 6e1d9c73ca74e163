"""How informative each measure of "which times are worth training" is, on one partly trained model.

    python benchmarks/signals.py --updates 300 --probes 60 --out signals.json                 # digits, minutes on 2 cores
    python benchmarks/signals.py --run runs/cifar10-sprint --device cuda --out signals.json   # a training's averaged weights

Signals of single draws, in ten bins of time: F and R² of an analysis of variance, and Spearman's rank correlation of the bins' means with the truth.
The truth is the real decrease of the target (the plain loss over all times, on other images) by one step along the gradient of a single bin, in the
optimiser's metric and so short that the decrease is linear. It is measured twice, from different samples: no signal can correlate with the truth
better than these two measurements with each other.

    released      the authors' reward: decrease of three losses by a batch's update, with fresh noise after it
    paper         the same with the same noise before and after
    utility       first-order, on samples that had no part in the target's gradient (nc.Lookahead)

Prices of bins, compared with E‖g‖² in the optimiser's metric from a backward pass for each sample:

    directions    squared derivatives along random directions (nc.VarianceOptimal), and √ of their mean
    losses        √E[loss²], which costs nothing (nc.LossSecondMoment)

(The file's name is a plural because benchmarks/signal.py would hide Python's module signal.)
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor, nn

import noiseclock as nc
from noiseclock.core.batch import noised
from noiseclock.core.lookahead import TARGETS, utility
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import metric, trained
from noiseclock.lab.data import batches, load
from noiseclock.lab.models import build
from noiseclock.lab.trained import opened

BINS = 10


class Bench:
    """A model trained for a short time with Adam, or loaded from a training's folder, and its data."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.batch, self.device = args.batch, torch.device(args.device)
        schedule: str | nc.Schedule = "linear"
        objective: str | nc.Objective = "eps"
        if args.run:
            run = opened(args.run, device=self.device)
            data, self.model, self.optimizer, schedule, objective = run.data, run.net, run.optimizer(), run.clock.schedule, run.clock.objective
            self.name = f"{args.run.name} after {run.step:,} updates"
        else:
            data = load("digits")
            self.model = build("unet", data.shape, channels=args.channels, multipliers=(1, 2), blocks=1, attention=(4,)).to(self.device)
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
            self.name = f"digits after {args.updates:,} updates"
        self.clock = nc.Clock(schedule, "uniform", objective=objective, seed=args.seed).attach(self.optimizer, model=self.model)
        self._images = batches(data, args.batch, seed=args.seed, device=self.device)
        self.generator = torch.Generator(self.device).manual_seed(args.seed)
        for _ in range(0 if args.run else args.updates):
            self.update(self.images(), None)

    def images(self) -> Tensor:
        """(B, C, H, W) the next batch."""
        return next(self._images)[0]

    def update(self, x0: Tensor, time: Tensor | None) -> None:
        """One update, at the given times or at times that the clock draws."""
        b = self.clock.draw(x0) if time is None else self.clock.at(x0, time, generator=self.generator)
        squared_error(self.model(b.x_t, b.t), b.target).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self, x0: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """(N,) the plain losses."""
        x_t, target = noised(self.clock.schedule, self.clock.objective, x0, noise, time)
        return squared_error(self.model(x_t, self.clock.schedule.condition(time)), target)

    def noise(self, x0: Tensor) -> Tensor:
        """Standard normal noise in the shape of x0."""
        return torch.randn(x0.shape, generator=self.generator, device=self.device)

    def evenly(self, n: int, first: float = 0.0, last: float = 1.0) -> Tensor:
        """n times in the middles of equal parts."""
        return first + (last - first) * (torch.arange(n, dtype=torch.float64, device=self.device) + 0.5) / n

    def gradient(self, time: Tensor) -> list[Tensor]:
        """The gradient of the mean loss of fresh samples at times (n,)."""
        total = [torch.zeros_like(p) for p in self.model.parameters()]
        for part in time.split(self.batch):
            x0 = self.images()[: len(part)]
            loss = self.losses(x0, part, self.noise(x0)).sum() / len(time)
            for sum_, g in zip(total, torch.autograd.grad(loss, list(self.model.parameters())), strict=True):
                sum_ += g
        return total

    def probe(self) -> Any:
        """A probe of the next batch."""
        self.clock._updates += 1  # a probe's noise depends on it
        self.clock.probe(self.images(), self.model)
        probe, self.clock._probe = self.clock._probe, None
        return probe


def bin_of(time: Tensor) -> Any:
    """The bin of each time, 0 to BINS-1."""
    return (time * BINS).long().clamp(max=BINS - 1).cpu().numpy()


# --- signals of single draws --------------------------------------------------------------------------------------------------------------


def rewards(bench: Bench, probes: int) -> dict[str, tuple[Any, Any]]:
    """Bins (N,) of draws and their rewards (N,), by both definitions. The model is restored after each update."""
    bits = nc.VLB()(bench.clock.schedule, times := bench.evenly(3), bench.clock.objective)
    found: dict[str, list[Any]] = {"released": [], "paper": []}
    bins = []
    state, moments = copy.deepcopy(bench.model.state_dict()), copy.deepcopy(bench.optimizer.state_dict())
    for _ in range(probes):
        x0 = bench.images()
        time = torch.rand(len(x0), generator=bench.generator, dtype=torch.float64, device=bench.device)
        noise, fresh = bench.noise(x0), bench.noise(x0)
        with torch.no_grad():
            before = [bench.losses(x0, t.expand(len(x0)), noise) for t in times]
        bench.update(x0, time)
        with torch.no_grad():
            after = {name: [bench.losses(x0, t.expand(len(x0)), n) for t in times] for name, n in (("released", fresh), ("paper", noise))}
        for name, losses in after.items():
            found[name].append(sum(c * (b - a) for c, b, a in zip(bits, before, losses, strict=True)).cpu().numpy())  # type: ignore[union-attr]
        bins.append(bin_of(time))
        bench.model.load_state_dict(state)
        bench.optimizer.load_state_dict(copy.deepcopy(moments))  # a copy, because the optimiser would write into these tensors
    return {name: (np.concatenate(bins), np.concatenate(values)) for name, values in found.items()}


def utilities(bench: Bench, probes: int) -> tuple[Any, Any]:
    """Bins (N,) and first-order utilities (N,)."""
    power, _ = metric([bench.optimizer], list(bench.model.parameters()))
    found = [utility(bench.probe(), nc.Constant(), TARGETS["simple"](), power, number=number) for number in range(probes)]
    return np.concatenate([bin_of(time) for time, _ in found]), np.concatenate([u.cpu().numpy() for _, u in found])


def in_the_linear_range(slope: Callable[[float], float]) -> float:
    """The slope for ever shorter steps, until two agree to 2 %; on a trained model, a step of 1/1000 of the weights' norm is too long."""
    length, found = 1e-4, slope(1e-4)
    while length > 1e-6:  # shorter steps are lost in float32's rounding
        length, before = length / 4, found
        found = slope(length)
        if abs(found - before) <= 0.02 * abs(found):
            break
    return found


@torch.backends.cudnn.flags(enabled=True, allow_tf32=False)  # TF32 rounds the weights by more than a step
def truth(bench: Bench, samples: int) -> Any:
    """(BINS,) the decrease of the target by a step along each bin's own gradient, per length of step."""
    parameters = list(bench.model.parameters())
    power, _ = metric([bench.optimizer], parameters)
    x0 = torch.cat([bench.images() for _ in range(samples // bench.batch)])
    noise, time = bench.noise(x0), bench.evenly(len(x0))[torch.randperm(len(x0), generator=bench.generator, device=bench.device)]
    kept = [p.detach().clone() for p in parameters]
    size = float(nn.utils.get_total_norm(kept))

    @torch.no_grad()
    def target() -> float:
        parts = zip(*(t.split(bench.batch) for t in (x0, time, noise)), strict=True)
        return float(torch.cat([bench.losses(*part) for part in parts]).double().mean())

    def slope(step: list[Tensor], length: float) -> float:
        eta = length * size / float(nn.utils.get_total_norm(step))
        ends = []
        for sign in (1, -1):  # a central difference, in which the curvature of the target cancels
            with torch.no_grad():
                for p, k, s in zip(parameters, kept, step, strict=True):
                    p.copy_(k - sign * eta * s)
            ends.append(target())
        return (ends[1] - ends[0]) / (2 * eta)

    found = []
    for b in range(BINS):
        gradient = bench.gradient(bench.evenly(samples, b / BINS, (b + 1) / BINS))
        found.append(in_the_linear_range(partial(slope, [g * p for g, p in zip(gradient, power, strict=True)])))
        with torch.no_grad():
            for p, k in zip(parameters, kept, strict=True):
                p.copy_(k)
    return np.array(found)


def described(bins: Any, values: Any, wanted: Any) -> dict[str, Any]:
    """F and R² of the bins, and the rank correlation of their means with the truth."""
    groups = [values[bins == b] for b in range(BINS)]
    means = np.array([group.mean() for group in groups])
    between = sum(len(group) * (mean - values.mean()) ** 2 for group, mean in zip(groups, means, strict=True))
    return {
        "F": float(scipy.stats.f_oneway(*groups).statistic),
        "R2": float(between / ((values - values.mean()) ** 2).sum()),
        "rank": float(scipy.stats.spearmanr(means, wanted).statistic),
        "means": means.tolist(),
        "draws": len(values),
    }


# --- prices of bins -----------------------------------------------------------------------------------------------------------------------


def exact(bench: Bench, samples: int) -> tuple[Any, Any]:
    """(BINS,) √E‖g‖²_P and √E[loss²] of samples of each bin, by a backward pass for each."""
    parameters = trained([bench.model])
    power, _ = metric([bench.optimizer], parameters)
    norms, losses = np.zeros(BINS), np.zeros(BINS)
    for b in range(BINS):
        for part in bench.evenly(samples, b / BINS, (b + 1) / BINS).split(bench.batch):
            x0 = bench.images()[: len(part)]
            found = bench.losses(x0, part, bench.noise(x0))
            losses[b] += float(found.detach().double().square().sum()) / samples
            for loss in found:
                gradient = torch.autograd.grad(loss, parameters, retain_graph=True)
                norms[b] += float(sum((p * g.square()).sum() for p, g in zip(power, gradient, strict=True))) / samples
    return np.sqrt(norms), np.sqrt(losses)


def priced(bench: Bench, probes: int) -> Any:
    """(BINS,) √s from random directions."""
    clock = nc.Clock("linear", nc.VarianceOptimal(bins=BINS, decay=0.9999)).attach(bench.optimizer, model=bench.model)
    for _ in range(probes):
        clock.sampler.after(bench.probe(), None)  # type: ignore[arg-type]
    bench.clock.attach(bench.optimizer, model=bench.model)
    return clock.sampler.curve[0].sqrt().numpy()  # type: ignore[attr-defined]


def against(found: Any, wanted: Any) -> dict[str, Any]:
    """A price compared with the exact one: rank correlation, largest relative error after both are normalised, and how many times as large it is."""
    shape, other = found / found.mean(), wanted / wanted.mean()
    worst, times = float(np.abs(shape / other - 1).max()), float(np.median((found / wanted) ** 2))
    return {"rank": float(scipy.stats.spearmanr(found, wanted).statistic), "worst": worst, "times": times, "means": found.tolist()}


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a training to take the model from; a small one of digits is trained unless given")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--updates", type=int, default=20, help="updates of the digits model before the measurement")
    parser.add_argument("--probes", type=int, default=6)
    parser.add_argument("--samples", type=int, default=128, help="samples per bin, for exact norms")
    parser.add_argument(
        "--truth", type=int, default=512, help="samples of the target and of each bin's gradient; thousands on a model that has been trained for long"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    bench = Bench(args)
    truths = [truth(bench, args.truth) for _ in range(2)]
    wanted, itself = np.mean(truths, axis=0), float(scipy.stats.spearmanr(*truths).statistic)
    signals = {name: described(bins, values, wanted) for name, (bins, values) in rewards(bench, args.probes).items()}
    signals["utility"] = described(*utilities(bench, args.probes), wanted)
    norms, losses = exact(bench, args.samples)
    prices = {"directions": against(priced(bench, args.probes), norms), "losses": against(losses, norms)}
    setup = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "noiseclock": nc.__version__,
        "machine": torch.cuda.get_device_name() if bench.device.type == "cuda" else platform.machine(), "model": bench.name,
        **{name: value for name, value in vars(args).items() if name not in ("out", "run")},
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "setup": setup,
            "truths": [t.tolist() for t in truths],
            "rank of truths": itself,
            "signals": signals,
            "exact": norms.tolist(),
            "prices": prices,
        }
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{bench.name}, {args.probes} probes of {args.batch}, {BINS} bins of time")
    print(f"signal of a draw        F      R²  rank with the truth, which follows itself at {itself:.2f}")
    for name, row in signals.items():
        print(f"{name:<16}  {row['F']:>7.1f}  {row['R2']:>6.4f}  {row['rank']:>6.2f}")
    print("price of a bin   rank with exact norms  largest error of its shape  its square, over the exact one")
    for name, row in prices.items():
        times = f"{row['times']:.2f}" if name == "directions" else "another unit"
        print(f"{name:<16}  {row['rank']:>19.2f}  {row['worst']:>25.0%}  {times:>30}")


if __name__ == "__main__":
    main()
