"""The density that minimises the variance of a corrected gradient, in the optimiser's metric.

With importance correction the mean update does not depend on p. Its variance does, and is minimal at

    p* ∝ base·√s(t),    s(t) = E‖w·∇ℓ_t‖²_P,    P the optimiser's diagonal preconditioner (Adam: 1/(√v̂+ε)).

s is estimated without a backward pass: the squared derivative of w·ℓ along P^½ξ, ξ ~ N(0, I), is an unbiased estimate of it, for every sample of a
batch at once (`core/directions.py`). The gain can be predicted: the variance at p* is ρ = (∫base·√s)²/∫base·s times the variance at the base.
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


@dataclass
class VarianceOptimal(Priced):
    """p = (1-floor)·p* + floor·base in bins of time, with p* ∝ base·√E‖w·∇ℓ‖²_P: it minimises the variance of the gradient of the same objective.

    Start with this one if it may cost 4 to 5 % of the training time (docs/choose.md). The model's parameters must be float32; autocast may be on.

    every: optimiser updates between probes, of which each takes two forward passes in float32; the first ones follow one another after 1, 2, 3, ...
    updates. samples: samples per probe, over all ranks; the samples of a rank share a direction, which causes most of the noise, so more samples
    help little. bins: number of time bins. decay: factor on old estimates at each probe. warmup: probes before the density leaves the base; the tenth
    is after 46 updates. gain: the density stays at the base while the predicted ρ is above this, because little could be gained; it also stays there
    while the bins differ by less than their standard errors.
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
        exact, device = probe.exact(), probe.x0.device
        rows = torch.arange(len(probe.x0), device=device)[: -(-self.samples // ranks.count())]
        exact.rows = min(exact.rows, len(rows))  # otherwise each pass would be filled up to a whole batch
        time = evenly(len(rows) * ranks.count(), number, device)[ranks.mine() :: ranks.count()]
        parameters = trained(probe.modules, probe.optimizer)
        direction = normal(parameters, self._metric(probe), probe.seed)
        slope = derivative(probe.modules, parameters, direction, lambda: exact.losses(time, rows))
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
        """The predicted variance of the gradient at p*, relative to the variance at the base; 1 while nothing is known. Reads the device."""
        return float(self._rho(self._prices()))

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "rho": self.rho}
