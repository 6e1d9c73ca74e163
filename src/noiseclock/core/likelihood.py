"""The variational bound of a discrete diffusion model, term by term (Ho et al., 2006.11239, Eq. 5).

    bound = KL(q(x_T|x0) ‖ N(0, I))  +  Σ_{t≥1} KL(q(x_{t-1}|x_t, x0) ‖ p(x_{t-1}|x_t))  -  log p(x0|x_1)
            prior                       kl, steps 1..T-1                                     decoder, step 0

Each term is in nats per dimension, one value per sample (B,); `bits` turns nats into bits. Step t here is the paper's t+1.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiseclock.core.batch import Predict, call, column, noised
from noiseclock.core.checks import choose
from noiseclock.core.normal import normal_mass
from noiseclock.core.objectives import Objective, objective as make_objective
from noiseclock.core.schedules import VARIANCES, Discrete


def bits(nats: Tensor) -> Tensor:
    """Nats as bits.

    >>> bits(torch.tensor(math.log(2)))
    tensor(1.)
    """
    return nats / math.log(2)


def _model_variance(schedule: Discrete, step: Tensor, variance: str) -> Tensor:
    choose("variance", variance, VARIANCES)
    if variance == "fixed-large":
        return schedule.posterior(schedule.time_of(step)).large
    # the posterior variance of step 0 is 0, so step 0 uses the variance of step 1
    return schedule.posterior(schedule.time_of(step.clamp(min=1))).variance


def prior_term(schedule: Discrete, x0: Tensor) -> Tensor:
    """(B,) KL of q(x_T|x0) and N(0, I): the information on x0 that is left at the end of the forward process."""
    time = schedule.time_of(torch.full((len(x0),), schedule.steps - 1, device=x0.device))
    a, s = schedule(time)
    signal = (column(a, x0) * x0).square().flatten(1).mean(1)
    return (signal + s**2 - 1) / 2 - s.log()


def kl_term(schedule: Discrete, step: Tensor, x0: Tensor, x0_predicted: Tensor, *, variance: str = "fixed-large") -> Tensor:
    """(B,) KL of the true and the predicted reverse step, for steps (B,) from 1 on."""
    if step.device.type == "cpu" and bool((step < 1).any()):
        raise ValueError("KL terms exist for steps from 1 on; the term of step 0 is the decoder's")
    posterior = schedule.posterior(schedule.time_of(step))
    sigma2 = _model_variance(schedule, step, variance)
    error = (x0.double() - x0_predicted.double()).square().flatten(1).mean(1)
    ratio = posterior.variance / sigma2
    return (ratio - 1 - ratio.log() + posterior.x0**2 * error / sigma2) / 2


def decoder_term(schedule: Discrete, x0: Tensor, x0_predicted: Tensor, *, variance: str = "fixed-large", levels: int = 256) -> Tensor:
    """(B,) -log p(x0|x_1) for data with `levels` equally spaced values from -1 to 1: the Gaussian's mass in the cell of x0; end cells reach to ±∞."""
    if levels < 2:
        raise ValueError(f"levels must be at least 2, got {levels}")
    if x0_predicted.shape != x0.shape:
        raise ValueError(f"the prediction has shape {tuple(x0_predicted.shape)}, x0 {tuple(x0.shape)}")
    if bool((x0.abs() > 1 + 1e-3).any()):
        raise ValueError(f"the likelihood of images needs them scaled to [-1, 1], but x0 reaches {float(x0.abs().max()):.3g}")
    sigma2 = _model_variance(schedule, torch.zeros(1, dtype=torch.long, device=x0.device), variance)
    half = 1 / (levels - 1)
    # at step 0 the posterior mean is the predicted x0 itself
    distance, sigma = (x0 - x0_predicted).double(), sigma2.sqrt()
    upper = torch.where(x0 > 1 - half, math.inf, (distance + half) / sigma)
    lower = torch.where(x0 < half - 1, -math.inf, (distance - half) / sigma)
    return -normal_mass(lower, upper).clamp(min=1e-300).log().flatten(1).mean(1)


class Bound(NamedTuple):
    """The bound in nats per dimension: prior (B,), kl (B, T-1) for steps 1..T-1, decoder (B,)."""

    prior: Tensor
    kl: Tensor
    decoder: Tensor

    @property
    def bits_per_dim(self) -> Tensor:
        """(B,)"""
        return bits(self.prior + self.kl.sum(1) + self.decoder)


@torch.no_grad()
def bound(
    schedule: Discrete,
    objective: str | Objective,
    predict: Predict,
    x0: Tensor,
    *,
    cond: Any = None,
    variance: str = "fixed-large",
    levels: int = 256,
    generator: torch.Generator | None = None,
) -> Bound:
    """The whole bound for a batch: one forward pass of `predict(x_t, t)` with fresh noise per step; the caller sets train or eval mode.

    x0: (B, ...) in [-1, 1]. cond: as in `Clock.draw`. The generator, if any, is on the device of x0.
    """
    if not isinstance(schedule, Discrete):
        raise TypeError(f"the variational bound needs discrete steps; {type(schedule).__name__} has none")
    objective = make_objective(objective)
    terms = []
    for t in range(schedule.steps):
        step = torch.full((len(x0),), t, device=x0.device)
        time = schedule.time_of(step)
        noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=torch.promote_types(x0.dtype, torch.float32))
        x_t, _ = noised(schedule, objective, x0, noise, time)
        a, s = (column(c, x0) for c in schedule(time))
        x0_predicted = objective.to_x0(call(predict, x_t, step, cond), x_t, a, s)
        if t == 0:
            terms.append(decoder_term(schedule, x0, x0_predicted, variance=variance, levels=levels))
        else:
            terms.append(kl_term(schedule, step, x0, x0_predicted, variance=variance))
    return Bound(prior_term(schedule, x0), torch.stack(terms[1:], 1), terms[0])
