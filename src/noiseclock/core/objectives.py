"""What the model predicts: one denoiser, five targets.

With x_t = a·x0 + s·eps and e the error of the implied x0, the squared errors of the targets are multiples of ‖e‖²:

    x0    x0                                    ‖e‖²
    eps   eps                                   (a/s)²·‖e‖² = SNR·‖e‖²
    v     a·eps - s·x0                          ((a²+s²)/s)²·‖e‖²   (SNR+1 when a²+s² = 1, and only then)
    flow  eps - x0                              ((a+s)/s)²·‖e‖²     (1/u² on rectified flow)
    edm   (x0 - c_skip·x)/c_out, x = x_t/a      ‖e‖²/c_out²

so a weight W on the x0 error equals the weight W·s²/`scale` on the target's error, with `scale` = s²·(the factor above): s², a², (a²+s²)², (a+s)²
and a² + (s/σ_data)². All of these except a² and s² are positive at every noise level, which is why the weightings work with W·s².
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseclock.core.checks import resolve, take_positive
from noiseclock.core.schedules import Level


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """(B,) the mean squared error of each sample over its own dimensions, float32 at least.

    >>> squared_error(torch.ones(2, 3), torch.zeros(2, 3))
    tensor([1., 1.])
    """
    if not isinstance(prediction, Tensor):
        hint = "; a diffusers model keeps it in .sample" if hasattr(prediction, "sample") else ""
        raise TypeError(f"the prediction must be a tensor, got {type(prediction).__name__}{hint}")
    if prediction.shape != target.shape:
        reduced = prediction.shape in ((), target.shape[:1]) and prediction.numel() < target.numel()
        hint = "; give what the model predicts, not a loss" if reduced else ""
        raise ValueError(f"the prediction has shape {tuple(prediction.shape)}, the target {tuple(target.shape)}{hint}")
    kind = torch.promote_types(torch.promote_types(prediction.dtype, target.dtype), torch.float32)
    return (prediction.to(kind) - target.to(kind)).square().flatten(1).mean(1)


class Objective(ABC):
    """A prediction target. `a` and `s` are broadcastable to the data: (B, 1, ...). `x_t` is always the model's input."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @abstractmethod
    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """What the model should predict, the shape of `x0`."""

    @abstractmethod
    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """The x0 that a prediction implies."""

    @abstractmethod
    def scale(self, level: Level) -> Tensor:
        """s²·(squared error of this target)/(squared error of x0), see the module's table."""

    def model_input(self, noised: Tensor, a: Tensor, s: Tensor) -> Tensor:
        """The model's input for noised data a·x0 + s·eps: the same, except under EDM's preconditioning."""
        return noised


@dataclass(frozen=True)
class Eps(Objective):
    """The noise (DDPM). At a = 0 a prediction of the noise says nothing about x0, and `to_x0` is not finite."""

    name = "eps"

    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return noise

    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return (x_t - s * prediction) / a

    def scale(self, level: Level) -> Tensor:
        return level.a2


@dataclass(frozen=True)
class X0(Objective):
    """The clean data."""

    name = "x0"

    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return x0

    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return prediction

    def scale(self, level: Level) -> Tensor:
        return level.s2


@dataclass(frozen=True)
class V(Objective):
    """v = a·eps - s·x0 (Salimans & Ho, 2202.00512); x0 is recovered for any a and s, variance preserving or not."""

    name = "v"

    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return a * noise - s * x0

    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return (a * x_t - s * prediction) / (a**2 + s**2)

    def scale(self, level: Level) -> Tensor:
        return (level.a2 + level.s2) ** 2


@dataclass(frozen=True)
class FlowVelocity(Objective):
    """eps - x0, the velocity of rectified flow, for any a and s."""

    name = "flow"

    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return noise - x0

    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return (x_t - s * prediction) / (a + s)

    def scale(self, level: Level) -> Tensor:
        return (level.a2.sqrt() + level.s2.sqrt()) ** 2


@dataclass(frozen=True)
class Preconditioned(Objective):
    """EDM's preconditioning (2206.00364, Table 1): D(x; σ) = c_skip·x + c_out·F(c_in·x), σ = s/a, x = x_t/a; the model is F.

    The coefficients are written in terms of a and s, so that they hold on any schedule and at every noise level.
    """

    sigma_data: float = 0.5
    name = "edm"

    def __post_init__(self) -> None:
        take_positive(self, "sigma_data")

    def _norm(self, a: Tensor, s: Tensor) -> Tensor:
        return (s**2 + (a * self.sigma_data) ** 2).sqrt()

    def model_input(self, noised: Tensor, a: Tensor, s: Tensor) -> Tensor:
        return noised / self._norm(a, s)

    def target(self, x0: Tensor, noise: Tensor, a: Tensor, s: Tensor) -> Tensor:
        # (x0 - c_skip·x)/c_out with x = x0 + σ·noise, with the fractions cleared so that nothing is divided by s
        return (s * x0 - a * self.sigma_data**2 * noise) / (self.sigma_data * self._norm(a, s))

    def to_x0(self, prediction: Tensor, x_t: Tensor, a: Tensor, s: Tensor) -> Tensor:
        # c_skip·x = a·σ_d²·(model input)/norm and c_out = s·σ_d/norm
        return self.sigma_data * (a * self.sigma_data * x_t + s * prediction) / self._norm(a, s)

    def scale(self, level: Level) -> Tensor:
        return level.a2 + level.s2 / self.sigma_data**2


OBJECTIVES: dict[str, Callable[..., Objective]] = {"eps": Eps, "x0": X0, "v": V, "flow": FlowVelocity, "edm": Preconditioned}


def objective(name: str | Objective, **options: Any) -> Objective:
    """The objective called `name`: eps, x0, v, flow or edm (which takes `sigma_data`)."""
    return resolve("objective", name, Objective, OBJECTIVES, options)
