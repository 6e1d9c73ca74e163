"""The density that minimises the variance of a corrected gradient, in the optimiser's metric.

With importance correction the mean update does not depend on p. Its variance does, and is minimal at

    p* ∝ base·√s(t),    s(t) = E‖w·∇ℓ_t‖²_P,    P the optimiser's diagonal preconditioner (Adam: 1/(√v̂+ε)).

s is estimated without a backward pass: the squared derivative of w·ℓ along P^½ξ, ξ ~ N(0, I), is an unbiased estimate of it, for every sample of a
batch at once (`core/directions.py`). The gain can be predicted: the variance at p* is ρ = (∫base·√s)²/∫base·s times the variance at the base. It
can also be tested: with the prices s of a new probe, ∫base²·s/p is the variance at the density p that was learned before it, and ∫base·s at the base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.checks import take_finite, take_whole
from noiseclock.core.directions import ACROSS, CHECKED, derivative, normal
from noiseclock.core.optimizers import trained
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
    while the densities learned so far have gained nothing at the probes after them (`held_out_rho`).
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
        rows = probe.shuffled()[: -(-self.samples // ranks.count())]
        exact.rows = min(exact.rows, len(rows))  # otherwise each pass would be filled up to a whole batch
        time = evenly(len(rows) * ranks.count(), number, device)[ranks.mine() :: ranks.count()]
        parameters = trained(probe.modules, probe.optimizers)
        power = self._metric(probe)
        direction = normal(parameters, power, probe.seed)
        slope = derivative(probe.modules, parameters, power, direction, lambda: exact.losses(time, rows), step=ACROSS, checked=number == CHECKED)
        weight = setting.weighting(setting.schedule, time, setting.objective)
        return time, (slope.to(weight.dtype) * weight).square()

    def _statistics(self) -> dict[str, Tensor]:
        # decaying sums over probes: the variance that a probe found at the density of the probes before it, and at the base
        return {**super()._statistics(), "judged": torch.zeros(2, dtype=torch.float64, device="cpu")}

    def _density(self, price: Tensor) -> Tensor:
        return self._base_cells() * price.sqrt()

    def _judge(self, price: Tensor, known: Tensor) -> None:
        base, probes, judged = self._base_cells(), self._buffers["faded"][0].mean(), self._buffers["judged"]
        correction = base / self._mixed(self._density(self._prices())).clamp(min=TINY)
        found = torch.stack([base * correction * price, base * price]).where(known, 0.0).sum(1)
        # weighted by the probes behind the density: one made of the first few says little about that of today. Not finite if there is no density yet
        judged.copy_(judged * self.decay + torch.where(found.isfinite().all(), probes * found, 0.0))

    def _willing(self, price: Tensor) -> Tensor:
        return (self._rho(price) <= self.gain) & (self._held_out_rho() < 1)

    def _rho(self, s: Tensor) -> Tensor:
        base = self._base_cells()
        return _ratio((base * s.sqrt()).sum() ** 2, (base * s).sum())

    def _held_out_rho(self) -> Tensor:
        return _ratio(*self._buffers["judged"])

    @property
    def rho(self) -> float:
        """The predicted variance of the gradient at p*, relative to the variance at the base; 1 while nothing is known. Reads the device."""
        return float(self._rho(self._prices()))

    @property
    def held_out_rho(self) -> float:
        """The variance of the gradient relative to that at the base, of each probe at the density of the probes before it; 1 while nothing is known.

        Above `rho`, because a density fits the noise of its own probes too, and the floor costs a little. Reads the device.
        """
        return float(self._held_out_rho())

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "rho": self.rho, "held_out_rho": self.held_out_rho}


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > TINY, part / whole.clamp(min=TINY), 1.0)
