"""The density that makes a corrected gradient least noisy, in the metric in which the optimiser steps.

With importance correction the mean update does not depend on p. Its variance does, and is least at

    p* ∝ base·√s(t),    s(t) = E‖w·∇ℓ_t‖²_P,    P the optimiser's diagonal preconditioner (Adam: 1/(√v̂+ε)).

s is priced without a backward pass: the squared derivative of w·ℓ along P^½ξ, ξ ~ N(0, I), is an unbiased estimate of it, for every sample of a
batch at once (`core/directions.py`). What there is to gain is known beforehand: the variance at p* is ρ = (∫base·√s)²/∫base·s of that at the base.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.batch import Batch
from noiseclock.core.checks import take_finite, take_whole
from noiseclock.core.directions import derivative, metric, normal, trained
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.loss_based import ENOUGH, between_known
from noiseclock.core.probes import Probe
from noiseclock.core.samplers import TINY, Setting
from noiseclock.core.streams import finalize
from noiseclock.core.table import cell, wide

GOLDEN = 0.6180339887498949  # steps of which fill the unit interval evenly, however many there are


@dataclass
class VarianceOptimal(LearnedDensity):
    """p = (1-floor)·p* + floor·base in bins of time, with p* ∝ base·√E‖w·∇ℓ‖²_P.

    every: optimiser updates between probes, each of two forward passes of the batch in float32. bins: of time. decay: of old estimates with each
    probe. warmup: probes before it moves. gain: it stays at the base while the predicted ρ is above this, because little is to be had; and while
    the bins differ by less than their standard errors.
    """

    every: int = 40
    bins: int = 32
    decay: float = 0.95
    floor: float = 0.1
    warmup: int = 10
    gain: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "every", "warmup", least=1)
        take_whole(self, "bins", least=2)
        take_finite(self, "decay", "gain")
        if not (0 <= self.decay < 1 and 0 < self.gain <= 1):
            raise ValueError(f"VarianceOptimal: decay must lie in [0, 1) and gain in (0, 1], got {self.decay} and {self.gain}")
        self._setting: Setting | None = None
        self._begin()

    @property
    def cells(self) -> int:
        return self.bins

    def bind(self, setting: Setting) -> Self:
        bound = replace(self)
        bound._setting = setting
        bound._begin(setting.base, setting.schedule.steps or 0)
        return bound

    def _statistics(self) -> dict[str, Tensor]:
        # rows of `faded`: probes that reached the bin, the sum of their means, and of the squares of these; all fade together
        none = torch.zeros((), dtype=torch.int64, device="cpu")
        return {"faded": torch.zeros(3, self.bins, dtype=torch.float64, device="cpu"), "skipped": none, "probes": none.clone()}

    def update(self, batch: Batch, losses: Tensor) -> None:
        # nothing to learn here, but a resumed run would copy its density to the device at every draw until the next probe
        self._move_(losses.device)

    # --- what is known ------------------------------------------------------------------------------------------------------------------

    @property
    def probes(self) -> int:
        """How many there were; reads the device."""
        return int(self._buffers["probes"])

    @property
    def skipped(self) -> int:
        """How many estimates on all ranks were not finite; reads the device."""
        return int(self._buffers["skipped"])

    @property
    def squared_norm(self) -> Tensor:
        """(bins,) the estimate of s, up to a factor, float64, on the CPU; 0 where there is none yet."""
        return (self._buffers["faded"][1] / self._buffers["faded"][0].clamp(min=TINY)).cpu().double()

    @property
    def rho(self) -> float:
        """The variance of the gradient at p*, predicted, in units of that at the base; 1 while nothing is known. Reads the device."""
        return float(self._rho(*self._known()))

    def _known(self) -> tuple[Tensor, Tensor]:
        """(bins,) s, with what is missing filled in from the neighbours, and which bins have been seen."""
        count, total, _ = self._buffers["faded"]
        known = count > 0
        return between_known(total / count.clamp(min=TINY), known), known

    def _rho(self, s: Tensor, known: Tensor) -> Tensor:
        base = self._base_cells()
        whole = (base * s).sum()
        return torch.where(known.any() & (whole > TINY), (base * s.sqrt()).sum() ** 2 / whole.clamp(min=TINY), 1.0)

    def _clear(self, s: Tensor) -> Tensor:
        """Do the bins differ by more than the probes scatter? The squared standard error of each, against the variance between them."""
        count, total, squares = self._buffers["faded"]
        count = count.clamp(min=TINY)
        scatter = (squares / count - (total / count).square()).clamp(min=0) / count.clamp(min=1)
        clear: Tensor = s.var() > scatter.mean()
        return clear

    # --- learning -----------------------------------------------------------------------------------------------------------------------

    def after(self, probe: Probe, batch: Batch) -> None:
        """Price the losses of a batch, spread evenly over time. After the update and not before it: a first Adam has no metric yet then."""
        self._move_(probe.x0.device)
        number = self.probes
        device, size = probe.x0.device, len(probe.x0)
        place = (torch.arange(size, device=device, dtype=wide(device)) + (number * GOLDEN) % 1) / size
        parameters = trained(probe.modules)
        power, unknown = metric(probe.optimizer, parameters)
        if unknown:
            self._health.warn("metric", f"VarianceOptimal: {unknown}, so gradients are measured as they are")
        slope = derivative(probe.modules, normal(parameters, power, finalize(number) // 2), lambda: probe.exact().losses(place))
        square = (slope.to(wide(device)) * self._weight(place)).square()
        self._fold(place, square)

    def _weight(self, time: Tensor) -> Tensor:
        assert self._setting is not None
        return self._setting.weighting(self._setting.schedule, time, self._setting.objective)

    @torch.no_grad()
    def _fold(self, time: Tensor, square: Tensor) -> None:
        """One probe's estimates (B,) at times (B,), of all ranks."""
        finite = square.isfinite()
        rows = torch.stack([finite.to(square.dtype), torch.where(finite, square, 0.0)])
        sums = ranks.total(square.new_zeros(2, self.bins).index_add_(1, cell(time, self.bins), rows))
        self._buffers["skipped"].add_(ranks.total((~finite).sum()))
        self._buffers["probes"].add_(1)
        reached = sums[0] > 0
        mean = sums[1] / sums[0].clamp(min=1)
        faded = self._buffers["faded"]
        faded.copy_(torch.where(reached, faded * self.decay + torch.stack([torch.ones_like(mean), mean, mean.square()]), faded))
        s, known = self._known()
        base = self._base_cells()
        enough = (self._buffers["probes"] >= self.warmup) & ((base * known).sum() >= ENOUGH)
        self.set_density_(base * s.sqrt(), enough & (self._rho(s, known) <= self.gain) & self._clear(s))
        self._check_health(self._buffers["skipped"])

    @property
    def info(self) -> dict[str, Any]:
        """What a log should show."""
        return {"probes": self.probes, "rho": self.rho, "ess": self.ess(), "skipped": self.skipped}
