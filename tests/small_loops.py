"""A loop of a few updates around a clock: its data, a model, a sampler that probes it, and every sampler that learns nothing."""

from __future__ import annotations

import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.names import SAMPLERS

INNER = {"shifted", "truncated", "mixture", "annealed"}
LEARNED = {"adaptive", "loss-second-moment", "loss-history", "loss-ema", "gradient-variance", "variance-optimal", "lookahead"}
FIXED = [nc.sampler(name, **({"sampler": nc.LogitNormal()} if name in INNER else {})) for name in SAMPLERS if name not in LEARNED]


class Denoiser(nn.Module):
    """A small model with everything that a probe could disturb: dropout and batch norm."""

    def __init__(self, dim: int = 2, conditions: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim + 1 + conditions, 16), nn.SiLU(), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, dim))

    def forward(self, x_t, t, *conditions, label=None):
        parts = [x_t, t[:, None].to(x_t) / 1000, *conditions, *([] if label is None else [label])]
        return self.net(torch.cat(parts, 1))


class Probing(nc.Sampler):
    """A sampler that asks for a probe every third update and notes what it saw; also the least that a user must write."""

    every = 3

    def __init__(self) -> None:
        self.seen: list[tuple] = []

    def sample(self, n, *, x0=None, uniforms=None, generator=None):
        return nc.Uniform().sample(n, x0=x0, uniforms=uniforms, generator=generator)

    def log_prob(self, time, *, x0=None):
        return nc.Uniform().log_prob(time)

    def log_pmf(self, step, steps, *, x0=None):
        return nc.Uniform().log_pmf(step, steps)

    def before(self, probe):
        time = torch.full((len(probe.x0),), 0.5)
        self.seen.append(("before", probe.losses(time), probe.losses(time)))

    def after(self, probe, batch):
        self.seen.append(("after", probe.losses(torch.full((len(probe.x0),), 0.5)), batch))


def data(n: int = 16) -> torch.Tensor:
    """(n, 2) the same points every time."""
    return torch.randn(n, 2, generator=torch.Generator().manual_seed(0))


def train(clock, model, optimizer, steps, accumulate=1, scaler=None):
    """So many updates, each of as many micro-batches as are accumulated."""
    for _ in range(steps):
        for micro in range(accumulate):
            b = clock.draw(data(), predict=model, micro=(micro, accumulate))
            loss = clock.loss(b, model(b.x_t, b.t)).mean() / accumulate
            (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
