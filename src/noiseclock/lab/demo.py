"""A first look: a small denoiser on a ring of Gaussians, trained with every fixed sampler and weighting.

The best possible loss at every noise level is known here, so the table shows what each method leaves on the table, and where.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import noiseclock as nc
from noiseclock.core.objectives import squared_error
from noiseclock.core.weightings import WEIGHTINGS
from noiseclock.lab.toy import GaussianMixture, ring

BANDS = 5
SAMPLERS: dict[str, nc.Sampler] = {
    "logit-normal": nc.LogitNormal(),
    "mode": nc.Mode(),
    "cosmap": nc.CosMap(),
    "beta": nc.Beta(),
    "log-normal": nc.LogNormal(),
    "log-snr-normal": nc.LogSNRNormal(),
    "speed": nc.SpeeD(),
    "speed, released": nc.SpeeD(variant="released"),
    "shifted uniform": nc.Shifted(nc.Uniform(), k=3.0),
    "truncated uniform": nc.Truncated(nc.Uniform(), 0.0, 0.8),
    "logit-normal + floor": nc.Mixture(nc.LogitNormal()),
    "logit-normal, annealed": nc.Annealed(nc.LogitNormal(), start=250, stop=550),
}


@dataclass(frozen=True)
class Result:
    """What one run reached: mean squared distance from the best prediction, by band of time, and the seconds its training took."""

    excess: list[float]
    seconds: float

    @property
    def mean(self) -> float:
        """Over all noise levels alike."""
        return sum(self.excess) / len(self.excess)


class Denoiser(nn.Module):
    """Predicts the noise in a point of the plane, from the point and Fourier features of the step."""

    def __init__(self, width: int = 128, frequencies: int = 8) -> None:
        super().__init__()
        self.frequencies = nn.Buffer(math.pi * 2.0 ** torch.arange(frequencies))
        self.net = nn.Sequential(
            nn.Linear(2 + 2 * frequencies, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 2),
        )

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        """(B, 2) noise from points (B, 2) and steps (B,)."""
        angle = (t[:, None] / 1000) * self.frequencies
        out: Tensor = self.net(torch.cat([x_t, angle.sin(), angle.cos()], 1))
        return out


def train(data: GaussianMixture, sampler: nc.Sampler, weighting: nc.Weighting, *, steps: int, seed: int) -> tuple[Denoiser, float]:
    """A trained model and the seconds it took; the same seed gives the same initial weights, data and noise whatever the method."""
    torch.manual_seed(seed)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    warm_down = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    clock = nc.Clock("linear", sampler, weighting, seed=seed).attach(optimizer)
    points = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(steps):
        b = clock.draw(data.sample(256, points))
        torch.autograd.backward(clock.loss(b, model(b.x_t, b.t)).mean())
        optimizer.step()
        optimizer.zero_grad()
        warm_down.step()
    return model, time.perf_counter() - start


@torch.no_grad()
def excess(data: GaussianMixture, model: Denoiser, *, samples: int = 400, stride: int = 10) -> list[float]:
    """By band of time: E‖prediction - best prediction‖²/D on fresh points. It is what the loss exceeds its optimum by, without its noise."""
    schedule = nc.schedule("linear")
    generator = torch.Generator().manual_seed(12345)
    exact = GaussianMixture(data.means.double(), data.std)
    losses = []
    for t in range(stride // 2, 1000, stride):
        a, s = (c.reshape(1, 1) for c in schedule((t + 0.5) / 1000))
        x0 = data.sample(samples, generator).double()
        x_t = a * x0 + s * torch.randn(x0.shape, generator=generator, dtype=torch.float64)
        best = exact.eps(x_t, a.expand(samples, 1), s.expand(samples, 1))
        losses.append(squared_error(model(x_t.float(), torch.full((samples,), t)), best).mean())
    return [band.mean().item() for band in torch.stack(losses).chunk(BANDS)]


def least(data: GaussianMixture) -> list[float]:
    """The least possible loss in each band, by integration at ten levels of it."""
    schedule = nc.schedule("linear")
    levels = [schedule((i + 0.5) / (10 * BANDS)) for i in range(10 * BANDS)]
    losses = torch.tensor([data.least_loss(a.item(), s.item()) for a, s in levels])
    return [band.mean().item() for band in losses.chunk(BANDS)]


def table(title: str, bottom: list[float], uniform: Result, rows: dict[str, Result]) -> Table:
    """Excess loss by band of steps for every method, in thousandths, the best of each column in bold."""
    out = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    out.add_column("step", no_wrap=True)
    for i in range(BANDS):
        out.add_column(f"< {1000 * (i + 1) // BANDS}", justify="right", no_wrap=True)
    out.add_column("mean", justify="right", no_wrap=True)
    out.add_column("time", justify="right", no_wrap=True)
    best = [min(values) for values in zip(*([*r.excess, r.mean] for r in (uniform, *rows.values())), strict=True)]
    out.add_row("least possible loss", *(f"{1000 * v:.3g}" for v in [*bottom, sum(bottom) / BANDS]), "", style="dim", end_section=True)
    for name, result in {"uniform": uniform, **rows}.items():
        values = [*result.excess, result.mean]
        cells = [f"[bold]{1000 * v:.3g}[/]" if v == least else f"{1000 * v:.3g}" for v, least in zip(values, best, strict=True)]
        out.add_row(name, *cells, f"{result.seconds / uniform.seconds:.2f}")
    return out


def main(steps: int = 800) -> None:
    """Train every method and print two tables: samplers, and weightings."""
    console = Console()
    data = ring()
    weightings = {name: make(normalize=True) for name, make in WEIGHTINGS.items() if name != "constant"}
    jobs: list[tuple[str, nc.Sampler, nc.Weighting, int]] = [(f"uniform, seed {seed}", nc.Uniform(), nc.Constant(), seed) for seed in range(3)]
    jobs += [(name, sampler, nc.Constant(), 0) for name, sampler in SAMPLERS.items()]
    jobs += [(name, nc.Uniform(), weighting, 0) for name, weighting in weightings.items()]
    console.print(
        f"Noiseclock {nc.__version__}: a small denoiser on a ring of eight Gaussians, linear schedule, eps loss, {len(jobs)} runs of {steps} steps "
        "with batch 256."
    )
    results: dict[str, Result] = {}
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=len(jobs))
        train(data, nc.Uniform(), nc.Constant(), steps=50, seed=0)  # so that the first run is timed like the others
        for name, sampler, weighting, seed in jobs:
            progress.update(task, description=name)
            model, seconds = train(data, sampler, weighting, steps=steps, seed=seed)
            results[name] = Result(excess(data, model), seconds)
            progress.advance(task)
    bottom, uniform = least(data), [results[f"uniform, seed {seed}"] for seed in range(3)]
    console.print(
        "Excess of the learned loss over the exact optimum, in thousandths, by noise level in five bands of 200 steps; time as a multiple of "
        "uniform's.\n"
    )
    console.print(table("Samplers, as published: no importance correction", bottom, uniform[0], {name: results[name] for name in SAMPLERS}))
    console.print(table("Weightings under the uniform sampler, mean weight 1", bottom, uniform[0], {name: results[name] for name in weightings}))
    means = [1000 * r.mean for r in uniform]
    console.print(
        f"One seed each. Uniform alone spreads from {min(means):.1f} to {max(means):.1f} over three seeds, so smaller differences are chance. "
        "A method that gains in one band pays in another: read along the rows."
    )


if __name__ == "__main__":
    main()
