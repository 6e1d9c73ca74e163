"""The density that makes a corrected gradient least noisy, in the metric in which the optimiser steps.

With importance correction the mean update does not depend on p. Its variance does, and is least at

    p* ∝ base·√s(t),    s(t) = E‖w·∇ℓ_t‖²_P,    P the optimiser's diagonal preconditioner (Adam: 1/(√v̂+ε)).

s is priced without a backward pass: the squared derivative of w·ℓ along P^½ξ, ξ ~ N(0, I), is an unbiased estimate of it, for every sample of a
batch at once (`core/directions.py`). What there is to gain is known beforehand: the variance at p* is ρ = (∫base·√s)²/∫base·s of that at the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.checks import take_finite, take_whole
from noiseclock.core.directions import derivative, normal, trained
from noiseclock.core.priced import Priced, evenly
from noiseclock.core.probes import Probe
from noiseclock.core.samplers import TINY, Setting
from noiseclock.core.streams import finalize


@dataclass
class VarianceOptimal(Priced):
    """p = (1-floor)·p* + floor·base in bins of time, with p* ∝ base·√E‖w·∇ℓ‖²_P: the least noisy gradient of the same objective.

    The one to start with where 4 % of the time may be spent (docs/choose.md). The model's parameters must be float32; autocast may be on.

    every: optimiser updates between probes, each of two forward passes in float32. samples: that a probe prices, on all ranks together; those of
    a rank share a direction, which is most of the noise, so more of them add little. bins: of time. decay: of old estimates with each probe.
    warmup: probes before it moves. gain: it stays at the base while the predicted ρ is above this, because little is to be had; and while the bins
    differ by less than their standard errors.
    """

    every: int = 40
    samples: int = 64
    bins: int = 32
    decay: float = 0.95
    floor: float = 0.1
    warmup: int = 10
    gain: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "samples", least=1)
        take_finite(self, "gain")
        if not 0 < self.gain <= 1:
            raise ValueError(f"VarianceOptimal: gain must lie in (0, 1], got {self.gain}")

    def _price(self, probe: Probe, setting: Setting, number: int) -> tuple[Tensor, Tensor]:
        exact = probe.first(-(-self.samples // ranks.count())).exact()
        time = evenly(len(exact.x0) * ranks.count(), number, exact.x0.device)[ranks.mine() :: ranks.count()]
        parameters = trained(probe.modules, probe.optimizer)
        direction = normal(parameters, self._metric(probe), finalize(number) // 2)
        slope = derivative(probe.modules, parameters, direction, lambda: exact.losses(time))
        weight = setting.weighting(setting.schedule, time, setting.objective)
        return time, (slope.to(weight.dtype) * weight).square()

    def _density(self, price: Tensor) -> tuple[Tensor, Tensor]:
        return self._base_cells() * price.sqrt(), (self._rho(price) <= self.gain) & self._clear(price)

    def _rho(self, s: Tensor) -> Tensor:
        base = self._base_cells()
        whole = (base * s).sum()
        return torch.where(whole > TINY, (base * s.sqrt()).sum() ** 2 / whole.clamp(min=TINY), 1.0)

    @property
    def rho(self) -> float:
        """The variance of the gradient at p*, predicted, in units of that at the base; 1 while nothing is known. Reads the device."""
        return float(self._rho(self._prices()))

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "rho": self.rho}
