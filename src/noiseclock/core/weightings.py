"""Loss weights: how much an error at each noise level counts.

A weighting is one function W(noise level) on the squared error of x0, written out for every target so that each form is finite at SNR 0 and
SNR ∞, where dividing one form by the other would be 0/0 or ∞/∞:

    x0(z)      W                 the weight of the x0 error
    eps(z)     W/SNR             the weight of the eps error
    shared(z)  W·s² = eps·a²     divided by the objective's `scale`: the weight of the v, flow and EDM errors

`z` is a Level: a², s², SNR = a²/s² and NSR = s²/a². Weights that are truly infinite somewhere (the x0 form of most as SNR -> ∞; debiased,
truncated SNR, EDM and the VLB on eps as SNR -> 0) stop at `CAP`. No weight is negative or NaN.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.batch import Batch
from noiseclock.core.checks import choose, resolve, take_finite, take_positive
from noiseclock.core.objectives import OBJECTIVES, Objective
from noiseclock.core.schedules import VARIANCES, Level, Schedule
from noiseclock.core.table import Table, cell, wide, widen

# Low enough for a float32 loss, and above most finite weights of the usual schedules: EDM's weight reaches 2.5e5 at σ = 0.002. It does cut weights
# of eps in the last two steps of the cosine schedule, where the SNR is nearly 0, and the VLB's weight of x0 where EDM's σ is below 0.0033.
CAP = 1e6


@dataclass(frozen=True)
class Weighting(ABC):
    """A loss weight. `normalize`: the Clock divides it by its mean under the sampler in use, so that it does not rescale the learning rate."""

    _: KW_ONLY
    normalize: bool = False

    @abstractmethod
    def __call__(self, schedule: Schedule, time: Tensor, objective: Objective) -> Tensor:
        """The weight of the objective's squared error at each time, float64, from 0 to CAP. Not normalised: the Clock does that."""

    def apply(self, error: Tensor, batch: Batch, schedule: Schedule, objective: Objective) -> Tensor:
        """(B,) the training loss, from the errors (B,) of a batch drawn with this weighting."""
        return error * (batch.weight * batch.correction).to(error.dtype)

    def updated(self, updates: int) -> None:
        """Called after each optimiser update with their number so far."""

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs; empty unless the weight is learned."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, or raise a ValueError and change nothing."""
        if state:
            raise ValueError(f"{self} has no state, got {sorted(state)}")


class ClosedForm(Weighting):
    """A weight that has the three forms of the table."""

    @abstractmethod
    def x0(self, z: Level) -> Tensor: ...
    @abstractmethod
    def eps(self, z: Level) -> Tensor: ...
    @abstractmethod
    def shared(self, z: Level) -> Tensor: ...

    def __call__(self, schedule: Schedule, time: Tensor, objective: Objective) -> Tensor:
        z = schedule.level(time)
        if objective.name == "x0":
            weight = self.x0(z)
        elif objective.name == "eps":
            weight = self.eps(z)
        else:
            weight = self.shared(z) / objective.scale(z)
        return weight.clamp(max=CAP)


class OnTarget(Weighting):
    """Weight 1 on the error of one target."""

    @abstractmethod
    def _target(self, objective: Objective) -> Objective: ...

    def __call__(self, schedule: Schedule, time: Tensor, objective: Objective) -> Tensor:
        target = self._target(objective)
        if target is objective:  # their quotient would be 0/0 for eps at SNR 0 and for x0 at SNR ∞
            return torch.ones_like(time, dtype=wide(time.device))
        z = schedule.level(time)
        return (target.scale(z) / objective.scale(z)).clamp(max=CAP)


@dataclass(frozen=True)
class Constant(OnTarget):
    """Weight 1 on the error of one target: the trained target, unless `on` names another.

    `Constant(on="eps")` is DDPM's simple loss whatever the model predicts.
    """

    on: str | None = None

    def __post_init__(self) -> None:
        if self.on is not None:
            choose("target", self.on, OBJECTIVES)

    def _target(self, objective: Objective) -> Objective:
        return objective if self.on is None or self.on == objective.name else OBJECTIVES[self.on]()


@dataclass(frozen=True)
class MinSNR(ClosedForm):
    """min(SNR, γ) on x0 (Hang et al., 2303.09556): good pictures early, at the price of the likelihood."""

    gamma: float = 5.0

    def __post_init__(self) -> None:
        take_positive(self, "gamma")

    def x0(self, z: Level) -> Tensor:
        return z.snr.clamp(max=self.gamma)

    def eps(self, z: Level) -> Tensor:
        return (self.gamma * z.nsr).clamp(max=1)

    def shared(self, z: Level) -> Tensor:
        return torch.minimum(z.a2, self.gamma * z.s2)


@dataclass(frozen=True)
class SoftMinSNR(ClosedForm):
    """γ·SNR/(SNR+γ) on x0: min-SNR without the corner."""

    gamma: float = 4.0

    def __post_init__(self) -> None:
        take_positive(self, "gamma")

    def x0(self, z: Level) -> Tensor:
        return self.gamma * z.a2 / (z.a2 + self.gamma * z.s2)

    def eps(self, z: Level) -> Tensor:
        return self.gamma * z.s2 / (z.a2 + self.gamma * z.s2)

    def shared(self, z: Level) -> Tensor:
        return self.gamma * z.a2 * z.s2 / (z.a2 + self.gamma * z.s2)


@dataclass(frozen=True)
class P2(ClosedForm):
    """1/(k+SNR)^γ on eps (Choi et al., 2204.00227)."""

    k: float = 1.0
    gamma: float = 1.0

    def __post_init__(self) -> None:
        take_positive(self, "k", "gamma")

    def x0(self, z: Level) -> Tensor:
        # SNR/(k+SNR)^γ with numerator and denominator multiplied by s^2γ; 0⁰ = 1 makes it right at s = 0, γ = 1
        return z.a2 * z.s2 ** (self.gamma - 1) / (self.k * z.s2 + z.a2) ** self.gamma

    def eps(self, z: Level) -> Tensor:
        return (z.s2 / (self.k * z.s2 + z.a2)) ** self.gamma

    def shared(self, z: Level) -> Tensor:
        return z.a2 * self.eps(z)


@dataclass(frozen=True)
class Debiased(ClosedForm):
    """1/√min(SNR, 1000) on eps (Yu et al., 2310.08442)."""

    limit: float = 1000.0

    def __post_init__(self) -> None:
        take_positive(self, "limit")

    def x0(self, z: Level) -> Tensor:
        return torch.maximum(z.snr.sqrt(), z.snr / self.limit**0.5)

    def eps(self, z: Level) -> Tensor:
        return z.nsr.sqrt().clamp(min=self.limit**-0.5)

    def shared(self, z: Level) -> Tensor:
        return torch.maximum((z.a2 * z.s2).sqrt(), z.a2 / self.limit**0.5)


@dataclass(frozen=True)
class TruncatedSNR(ClosedForm):
    """max(SNR, 1) on x0 (Salimans & Ho, 2202.00512)."""

    def x0(self, z: Level) -> Tensor:
        return z.snr.clamp(min=1)

    def eps(self, z: Level) -> Tensor:
        return z.nsr.clamp(min=1)

    def shared(self, z: Level) -> Tensor:
        return torch.maximum(z.a2, z.s2)


@dataclass(frozen=True)
class Sigmoid(ClosedForm):
    """sigmoid(bias-λ) on eps (Kingma & Gao, 2303.00848; Simpler Diffusion, 2410.19324).

    Its authors define it per unit of λ, so per unit of time it has the factor |dλ/du|; `per="time"` leaves this factor out, as many trainers do.
    """

    bias: float = 2.0
    per: str = "log-snr"

    def __post_init__(self) -> None:
        take_finite(self, "bias")
        choose("measure of the sigmoid weighting", self.per, ("log-snr", "time"))

    def _slope(self, z: Level) -> Tensor | float:
        return z.schedule.slope(widen(z.time)).clamp(max=CAP) if self.per == "log-snr" else 1.0

    def _soft(self, z: Level) -> Tensor:
        return z.s2 + math.exp(-self.bias) * z.a2

    def x0(self, z: Level) -> Tensor:
        return self._slope(z) * z.a2 / self._soft(z)

    def eps(self, z: Level) -> Tensor:
        return self._slope(z) * z.s2 / self._soft(z)

    def shared(self, z: Level) -> Tensor:
        return self._slope(z) * z.a2 * z.s2 / self._soft(z)


@dataclass(frozen=True)
class VLB(ClosedForm):
    """c_t, the weight of the variational bound, which serves the likelihood only; in nats per dimension (see `Schedule.vlb`)."""

    variance: str = "fixed-large"

    def __post_init__(self) -> None:
        choose("variance", self.variance, VARIANCES)

    def _coefficient(self, z: Level, target: str) -> Tensor:
        return z.schedule.vlb(widen(z.time), target=target, variance=self.variance).clamp(max=CAP)

    def x0(self, z: Level) -> Tensor:
        return self._coefficient(z, "x0")

    def eps(self, z: Level) -> Tensor:
        return self._coefficient(z, "eps")

    def shared(self, z: Level) -> Tensor:
        # the form that is finite: x0's at the noisy end, eps's at the clean end
        return torch.where(z.a2 < z.s2, self.x0(z) * z.s2, self.eps(z) * z.a2)


@dataclass(frozen=True)
class EDMWeight(OnTarget):
    """SNR + 1/σ_data² on x0: weight 1 on EDM's own target. σ_data is by default the objective's, or 0.5 if the objective has none."""

    sigma_data: float | None = None

    def __post_init__(self) -> None:
        if self.sigma_data is not None:
            take_positive(self, "sigma_data")

    def _target(self, objective: Objective) -> Objective:
        return objective if self.sigma_data is None and objective.name == "edm" else OBJECTIVES["edm"](self.sigma_data or 0.5)


@dataclass(frozen=True)
class ChangeAware(ClosedForm):
    """SpeeD's weight on eps: how fast the process changes at each step (the slope of 1-ᾱ), rescaled to [1-λ, λ]."""

    lam: float = 0.6

    def __post_init__(self) -> None:
        take_finite(self, "lam")
        if not 0.5 <= self.lam <= 1:
            raise ValueError(f"ChangeAware: lam must lie in [0.5, 1], got {self.lam}")

    def eps(self, z: Level) -> Tensor:
        if z.schedule not in self._tables:
            change = z.schedule.increments().change
            spread = change.max() - change.min()
            share = (change - change.min()) / spread if spread > 0 else np.ones_like(change)  # with two steps both change equally
            self._tables[z.schedule] = Table((1 - self.lam) + (2 * self.lam - 1) * share)
        table = self._tables[z.schedule].on(z.a2.device)
        return table[cell(z.time, len(table))]

    @cached_property
    def _tables(self) -> dict[Schedule, Table]:
        return {}

    def x0(self, z: Level) -> Tensor:
        return z.snr.clamp(max=CAP) * self.eps(z)  # at lam = 1 the slowest step has weight 0, and ∞·0 would be NaN

    def shared(self, z: Level) -> Tensor:
        return z.a2 * self.eps(z)


WEIGHTINGS: dict[str, Callable[..., Weighting]] = {
    "constant": Constant,
    "min-snr": MinSNR,
    "soft-min-snr": SoftMinSNR,
    "p2": P2,
    "debiased": Debiased,
    "truncated-snr": TruncatedSNR,
    "sigmoid": Sigmoid,
    "vlb": VLB,
    "edm": EDMWeight,
    "change-aware": ChangeAware,
}


def weighting(name: str | Weighting, **options: Any) -> Weighting:
    """The weighting called `name`, with its options.

    >>> weighting("min-snr", gamma=4.0)
    MinSNR(normalize=False, gamma=4.0)
    """
    return resolve("weighting", name, Weighting, WEIGHTINGS, options)
