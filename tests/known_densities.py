"""Problems with a known answer: two models so small that the best density of times can be found by direct search."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.policy import BetaCells

T, LOW = 20, 5
SCHEDULE = nc.schedule("linear", steps=T, beta_end=0.3)


class OwnParameters(nn.Module):
    """The paper's section 4: a parameter for every time. Those of the low times are wrong, each costing the bound as much, the others right.

    Three samples of one time nearly mend it and more are wasted, so the best density is spread over the low times.
    """

    objective, lr = "eps", 9.0

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(T, 4))
        self.reset()

    def reset(self) -> None:
        self.theta.data.zero_()
        self.theta.data[:LOW] = SCHEDULE.vlb(SCHEDULE.grid())[:LOW, None].rsqrt()

    def forward(self, x_t, t):
        return self.theta[t]


class SharedParameter(nn.Module):
    """Times that interfere: one parameter, wanted at +1 by the low times and at -1 by the others, whose terms of the bound are smaller."""

    objective, lr = "x0", 0.5

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(4))
        self.register_buffer("sign", torch.where(torch.arange(T) < LOW, 1.0, -1.0))

    def reset(self) -> None:
        self.theta.data.zero_()

    def forward(self, x_t, t):
        return self.theta * self.sign[t][:, None]


def best_density(problem, batch=16, trials=400) -> np.ndarray:
    """(T,) by direct search: of a grid of Beta distributions, the one whose batches lower the bound most in one update."""
    parameters = torch.cartesian_prod(*[torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)] * 2)
    pmfs = BetaCells(T).mass(parameters)
    model = problem()
    weight = nc.VLB()(SCHEDULE, SCHEDULE.grid(), nc.objective(model.objective))
    x0, noise = 1 + 0.3 * torch.randn(512, 4, generator=torch.Generator().manual_seed(0)), torch.randn(512, 4)
    probe = nc.Probe(model, SCHEDULE, nc.objective(model.objective), x0, noise=noise, modules=[model])
    worth = torch.zeros(len(pmfs))
    clock = nc.Clock(SCHEDULE, "uniform", objective=model.objective)
    for i, pmf in enumerate(pmfs):
        generator = torch.Generator().manual_seed(1)
        for _ in range(trials // len(pmfs) + 3):
            model.reset()
            step = torch.multinomial(pmf, batch, replacement=True, generator=generator)
            data = 1 + 0.3 * torch.randn(batch, 4, generator=generator)
            b = clock.at(data, SCHEDULE.time_of(step), generator=generator)
            loss = clock.loss(b, model(b.x_t, b.t)).mean()
            (gradient,) = torch.autograd.grad(loss, [model.theta])
            time = SCHEDULE.grid().repeat_interleave(len(x0) // 16)
            rows = torch.arange(len(x0) // 16).repeat(T)
            before = probe.losses(time, rows)
            model.theta.data -= model.lr * gradient
            fall = (before - probe.losses(time, rows)).view(T, -1).mean(1)
            worth[i] += (fall * weight).mean().item()
    return pmfs[worth.argmax()].numpy()


def distance(p, q) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum() / 2)
