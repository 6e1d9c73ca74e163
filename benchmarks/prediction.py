"""Does VarianceOptimal know what it gains? Its ρ, predicted and held out, beside the true ratio of variances at the density that it has learned.

    python benchmarks/prediction.py                          # four minutes on one core
    python benchmarks/prediction.py --cases linear --seeds 1 --updates 60 --samples 32

A small network learns digits with draws from the base while VarianceOptimal prices times without using what it learns, so that all that is compared
is of the same parameters. After some probes the truth is computed from the gradients of single samples in each time bin. "Scatter" is the rule that
VarianceOptimal followed before it judged by held-out probes: do the bins differ by more than their prices scatter?
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import noiseclock as nc
from noiseclock.core.batch import noised
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import metric

CASES = {  # schedule, weighting, objective, base
    "linear": ("linear", "constant", "eps", nc.Uniform()),
    "linear, min-SNR": ("linear", "min-snr", "eps", nc.Uniform()),
    "linear, VLB": ("linear", "vlb", "eps", nc.Uniform()),
    "cosine": ("cosine", "constant", "eps", nc.Uniform()),
    "cosine, VLB": ("cosine", "vlb", "eps", nc.Uniform()),
    "flow": ("flow", "constant", "flow", nc.Uniform()),
    "flow, VLB": ("flow", "vlb", "flow", nc.Uniform()),
    "EDM": ("edm", "constant", "edm", nc.LogNormal()),
    "EDM, eps": ("edm", "constant", "eps", nc.Uniform()),
}
PROBES = (10, 14, 20, 28)


@dataclass(frozen=True)
class Row:
    """After so many probes: ρ as predicted, held out and true, the least possible, whether bins differ by more than scatter, and whether it moves."""

    case: str
    seed: int
    probes: int
    rho: float
    held_out_rho: float
    true: float
    best: float
    scatter: bool
    moves: bool


class Net(nn.Module):
    """x (B, 64), t (B,) -> (B, 64)."""

    def __init__(self, scale: float, width: int = 128) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(torch.linspace(0, math.log(300), 16)) / scale)
        layers = nn.Linear(64 + 32, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64)
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The prediction."""
        waves = t.float()[:, None] * self.frequencies
        out: Tensor = self.layers(torch.cat([x, waves.sin(), waves.cos()], 1))
        return out


def exact(model: nn.Module, clock: nc.Clock, data: Tensor, bins: int, samples: int) -> Tensor:
    """(bins,) E‖w·∇ℓ‖²_P in each time bin, from the gradient of each of so many samples."""
    generator = torch.Generator().manual_seed(99)
    named = dict(model.named_parameters())
    power, _ = metric(clock.optimizers, list(named.values()))

    def loss(parameters: dict[str, Tensor], x_t: Tensor, t: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return squared_error(functional_call(model, parameters, (x_t[None], t[None])), target[None])[0] * weight

    gradients = vmap(grad(loss), (None, 0, 0, 0, 0))
    found = torch.zeros(bins, dtype=torch.float64)
    for b in range(bins):
        time = (b + torch.rand(samples, generator=generator, dtype=torch.float64)) / bins
        x0 = data[torch.randint(len(data), (samples,), generator=generator)]
        x_t, target = noised(clock.schedule, clock.objective, x0, torch.randn(x0.shape, generator=generator), time)
        weight = clock.weighting(clock.schedule, time, clock.objective).float()
        each = gradients({name: p.detach() for name, p in named.items()}, x_t, clock.schedule.condition(time), target, weight)
        found[b] = sum(float((p * g.square()).sum(dtype=torch.float64)) for p, g in zip(power, each.values(), strict=True)) / samples
    return found


def measure(case: str, seed: int, updates: int, samples: int) -> Iterator[Row]:
    """Train one network, and compare what the sampler knows with the truth."""
    schedule, weighting, objective, base = CASES[case]
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    torch.manual_seed(seed)
    levels = nc.schedule(schedule)
    model = Net(scale=levels.steps or 1)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    watching = nc.VarianceOptimal(gain=1e-9)  # it never moves
    clock = nc.Clock(levels, watching, weighting, objective, base=base, seed=seed).attach(optimizer, model=model)
    sampler, order, seen = clock.sampler, torch.Generator().manual_seed(seed), 0
    for _ in range(updates):
        b = clock.draw(data[torch.randint(len(data), (64,), generator=order)], predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if sampler.probes > seen and sampler.probes in PROBES:
            price, mean = sampler._prices(), sampler._base_cells()
            s, p = exact(model, clock, data, sampler.bins, samples), sampler._mixed(sampler._density(price))
            whole = float((mean * s).sum())
            yield Row(
                case, seed, sampler.probes, sampler.rho, sampler.held_out_rho,
                true=float((mean**2 / p * s).sum()) / whole, best=float((mean * s.sqrt()).sum()) ** 2 / whole,
                scatter=bool(price.var() > (sampler._scatter() / sampler._buffers["faded"][0].clamp(min=1)).mean()),
                moves=sampler.rho <= nc.VarianceOptimal().gain and sampler.held_out_rho < 1,
            )  # fmt: skip
        seen = sampler.probes


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--samples", type=int, default=256, help="per time bin, for the truth")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{'':<16}  seed  probes  predicted  held out   true  least  moves  scatter")
    rows = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small effective sample sizes
        for case in args.cases:
            for seed in range(args.seeds):
                for r in measure(case, seed, args.updates, args.samples):
                    rows.append(r)
                    moves, scatter = ("yes" if yes else "no" for yes in (r.moves, r.scatter))
                    numbers = f"{r.rho:>9.3f}  {r.held_out_rho:>8.3f}  {r.true:>5.3f}  {r.best:>5.3f}"
                    print(f"{r.case:<16}  {r.seed:>4}  {r.probes:>6}  {numbers}  {moves:>5}  {scatter:>7}", flush=True)
    if args.out:
        setup = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "noiseclock": nc.__version__}
        setup |= {"updates": args.updates, "samples": args.samples, "device": "cpu"}
        args.out.write_text(json.dumps({"setup": setup, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
