"""Densities that are learned from prices.

A price is a number per sample, such as its utility or its squared gradient norm. A probe every `every` updates measures prices at times spread
evenly over [0, 1]. Prices are noisy, so each time bin keeps an exponentially decaying mean over probes. The error of this mean comes from the spread
between probes, because the samples of one probe share a direction and are not independent.

The first probes follow one another more quickly, the n-th after a pause of n - 1 updates until that is `every`: otherwise a training of a few hundred
updates, such as a fine-tuning, would be over before the density has left the base.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.batch import Batch
from noiseclock.core.checks import take_finite, take_whole
from noiseclock.core.later import Later
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.loss_based import ENOUGH, between_known
from noiseclock.core.optimizers import metric, stands_still, trained
from noiseclock.core.probes import Probe
from noiseclock.core.samplers import TINY, Setting
from noiseclock.core.table import cell, wide

GOLDEN = 0.6180339887498949  # its multiples modulo 1 fill the unit interval evenly, however many there are


def evenly(n: int, number: float, device: torch.device) -> Tensor:
    """(n,) times, one in each of n equal intervals of [0, 1], shifted from probe to probe."""
    return (torch.arange(n, device=device, dtype=wide(device)) + (number * GOLDEN) % 1) / n


class Priced(LearnedDensity):
    """Subclasses are dataclasses with these fields. A subclass measures prices in `_price` and computes the density from them in `_density`.

    every: optimiser updates between probes, fewer between the first. bins: number of time bins. decay: factor on old prices at each probe. warmup:
    probes before the density leaves the base.
    """

    every: int
    bins: int
    decay: float
    warmup: int

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "every", "warmup", least=1)
        take_whole(self, "bins", least=2)
        take_finite(self, "decay")
        if not 0 <= self.decay < 1:
            raise ValueError(f"{type(self).__name__}: decay must lie in [0, 1), got {self.decay}")
        self._setting: Setting | None = None
        self._begin()

    @abstractmethod
    def _price(self, probe: Probe, setting: Setting, number: int) -> tuple[Tensor, Tensor]:
        """Times (n,), and the price of a sample at each (n,), float64; `number` counts the probes."""

    @abstractmethod
    def _density(self, price: Tensor) -> Tensor:
        """(bins,) the density, not normalised, from the mean prices (bins,)."""

    @abstractmethod
    def _willing(self, price: Tensor) -> Tensor:
        """(0-d, bool) is the density of these mean prices (bins,) to be used?"""

    def _judge(self, price: Tensor, known: Tensor) -> None:
        """Look at the prices of a new probe, (bins,) means where `known` (bins,), before they are added to the means."""

    @property
    def cells(self) -> int:
        return self.bins

    @property
    def must_know(self) -> bool:
        return False  # a price depends on the current parameters only

    @property
    def pause(self) -> int:
        return min(self.every, max(1, self._asked))

    def bind(self, setting: Setting) -> Self:
        bound = super().bind(setting)
        bound._setting = setting
        return bound

    def _statistics(self) -> dict[str, Tensor]:
        # rows of `faded`, with the same decay: the number of probes that reached the bin, the sum of their means, the sum of the squared means
        self._any: Later | None = None  # has any probe of the warm-up seen a loss change? On its way to the host
        self._asked = 0  # number of probes, counted on the host too: reading it from the device would synchronise
        none = torch.zeros((), dtype=torch.int64, device="cpu")
        return {"faded": torch.zeros(3, self.bins, dtype=torch.float64, device="cpu"), "skipped": none, "probes": none.clone()}

    def _load_counters(self, counters: dict[str, int]) -> None:
        self._asked = self.probes

    def after(self, probe: Probe, batch: Batch) -> None:
        """Probe after the update, not before it: before its first update Adam has no metric."""
        if self._setting is None:
            raise ValueError(f"{type(self).__name__} learns from a Clock: use it as nc.Clock(schedule, nc.{type(self).__name__}(), ...)")
        self._move_(probe.x0.device)
        if stands_still(probe.optimizers):
            return
        self._fold(*self._price(probe, self._setting, self._asked))
        self._asked += 1

    def _metric(self, probe: Probe) -> list[Tensor | float]:
        """P for each trained parameter; the identity, with one warning, if the optimiser's metric is unknown."""
        power, unknown = metric(probe.optimizers, trained(probe.modules, probe.optimizers))
        if unknown:
            self._health.warn("metric", f"{type(self).__name__}: {unknown}, so gradients are measured without preconditioning")
        return power

    @torch.no_grad()
    def _fold(self, time: Tensor, price: Tensor) -> None:
        """Add one probe's prices (n,) at times (n,) on all ranks to the means, and set the density."""
        finite = price.isfinite()
        rows = torch.stack([finite.to(price.dtype), torch.where(finite, price, 0.0)])
        count, total = ranks.total(price.new_zeros(2, self.bins).index_add_(1, cell(time, self.bins), rows))
        self._buffers["skipped"].add_(ranks.total((~finite).sum()))
        self._buffers["probes"].add_(1)
        # if all prices are 0 the optimiser has moved no parameter, as when a GradScaler has skipped all steps of a fused optimiser so far
        count = count * (total != 0).any()
        mean, faded = total / count.clamp(min=1), self._buffers["faded"]
        self._judge(mean, count > 0)
        faded.copy_(torch.where(count > 0, faded * self.decay + torch.stack([torch.ones_like(mean), mean, mean.square()]), faded))
        known = (self._base_cells() * (faded[0] > 0)).sum() >= ENOUGH
        price = self._prices()
        self.set_density_(self._density(price), self._willing(price) & known & (self._buffers["probes"] >= self.warmup))
        self._check_health(self._buffers["skipped"])
        self._check_prices()

    def _check_prices(self) -> None:
        """Warn if no probe of the warm-up saw a loss change; late, because it does not wait for the device."""
        if self._any is None and self._asked + 1 == self.warmup and not self._buffers["faded"].is_meta:
            self._any = Later((self._buffers["faded"][0].max() > 0) | (self._buffers["skipped"] > 0))  # of losses that are not finite others warn
        elif self._any is not None and self._any.arrived and not bool(self._any.read()):
            self._health.warn(
                "prices",
                f"{type(self).__name__}: {self.warmup} probes moved the trained parameters and no loss changed, so nothing can be learned; pass the "
                "model that the optimiser trains as predict=, not a copy of it such as averaged weights",
            )

    def _prices(self) -> Tensor:
        """(bins,) mean prices; bins without a price are interpolated from their neighbours."""
        count, total, _ = self._buffers["faded"]
        return between_known(total / count.clamp(min=TINY), count > 0)

    def _scatter(self) -> Tensor:
        """(bins,) the variance of the prices between probes."""
        count, total, squares = self._buffers["faded"].unbind()
        known = count.clamp(min=TINY)
        return (squares / known - (total / known).square()).clamp(min=0)

    @property
    def probes(self) -> int:
        """The number of probes so far; reads the device."""
        return int(self._buffers["probes"])

    @property
    def skipped(self) -> int:
        """How many prices on all ranks were not finite; reads the device."""
        return int(self._buffers["skipped"])

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "probes": self.probes, "skipped": self.skipped}

    @property
    def curve(self) -> tuple[Tensor, Tensor]:
        """(bins,) mean prices and their standard errors, float64, on the CPU; 0 for a bin without a price.

        They are those of the weights before `normalize` divides these by their mean, which may change while the sampler learns.
        """
        count, total, _ = self._buffers["faded"]
        # the effective number of probes: (Σw)²/Σw² of the weights 1, decay, decay², ..., whose sum is `count`
        worth = count * (1 + self.decay) / (2 - count * (1 - self.decay))
        errors = self._scatter() / (worth - 1).clamp(min=TINY)
        return (total / count.clamp(min=TINY)).cpu().double(), errors.sqrt().cpu().double()
