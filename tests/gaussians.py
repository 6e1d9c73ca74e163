"""A problem with a known answer: for a mixture of Gaussians the best denoiser and its loss at every noise level are exact; with a training loop."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import noiseclock as nc


@dataclass(frozen=True)
class GaussianMixture:
    """Equal parts of isotropic Gaussians in D dimensions.

    means: (K, D). std: of every part.
    """

    means: Tensor
    std: float

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """(n, D) independent points."""
        part = torch.randint(len(self.means), (n,), generator=generator)
        return self.means[part] + self.std * torch.randn(n, self.means.shape[1], generator=generator, dtype=self.means.dtype)

    def posterior(self, x_t: Tensor, a: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (n, D) and total variance (n,) of x0 given x_t = a·x0 + s·eps (n, D); a and s are (n, 1)."""
        spread = (a * self.std) ** 2 + s**2
        away = x_t[:, None] - a[:, None] * self.means  # (n, K, D)
        share = torch.softmax(-away.square().sum(2) / (2 * spread), 1)[..., None]
        centre = self.means + (a * self.std**2 / spread)[:, None] * away
        mean = (share * centre).sum(1)
        within = len(self.means[0]) * (self.std**2 * s**2 / spread)[:, 0]
        return mean, within + (share * (centre - mean[:, None]).square()).sum((1, 2))

    def eps(self, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """(n, D) the best prediction of the noise, E[eps | x_t]."""
        return (x_t - a * self.posterior(x_t, a, s)[0]) / s

    def least_loss(self, a: float, s: float, points: int = 81) -> float:
        """The least possible eps loss, E‖eps - E[eps|x_t]‖²/D, at one noise level; two dimensions, by the trapezoidal rule.

        The rule converges exponentially for such integrands: at five points per standard deviation of x_t it is exact to rounding. So each
        Gaussian gets a grid of its own, eight standard deviations wide on each side.
        """
        if self.means.shape[1] != 2:
            raise ValueError(f"the integral is written for two dimensions, got {self.means.shape[1]}")
        spread = math.sqrt((a * self.std) ** 2 + s**2)
        line = torch.linspace(-8, 8, points, dtype=torch.float64)
        grid = torch.cartesian_prod(line, line)
        weight = torch.exp(-grid.square().sum(1) / 2) / (2 * math.pi) * (line[1] - line[0]) ** 2
        levels = (torch.full((len(grid), 1), value, dtype=torch.float64) for value in (a, s))
        a_column, s_column = levels
        exact = GaussianMixture(self.means.double(), self.std)
        variance = [exact.posterior(a * mean + spread * grid, a_column, s_column)[1] for mean in exact.means]
        return float((weight * torch.stack(variance).mean(0)).sum()) * (a / s) ** 2 / 2


def ring(parts: int = 8, radius: float = 1.0, std: float = 0.08) -> GaussianMixture:
    """Gaussians on a circle, a classic two-dimensional test."""
    angle = torch.arange(parts) * (2 * math.pi / parts)
    return GaussianMixture(radius * torch.stack([angle.cos(), angle.sin()], 1), std)


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


def train(clock, model, optimizer, steps, batch=16, seed=0, accumulate=1):
    """So many updates on the ring; gives back the loss of every micro-batch."""
    data = ring()
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            x0 = data.sample(batch, torch.Generator().manual_seed(1000 * (seed + step) + micro))
            b = clock.draw(x0, predict=model, micro=(micro, accumulate))
            loss = clock.loss(b, model(b.x_t, b.t)).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def started(sampler, schedule="linear", steps=8, make=torch.optim.Adam, objective="eps", **options):
    """A clock with a copy of the sampler, a model and its optimiser, after so many updates."""
    torch.manual_seed(0)
    model = Denoiser(width=32)
    optimizer = make(model.parameters(), lr=1e-3)
    schedule = nc.schedule(schedule, **({"steps": 100} if schedule == "linear" else {}))
    clock = nc.Clock(schedule, copy.deepcopy(sampler), objective=objective, **options).attach(optimizer)
    train(clock, model, optimizer, steps)
    return clock, model, optimizer
