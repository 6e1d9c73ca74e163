"""Sampling densities over time: which noise level to train on next.

A `Sampler` draws times in [0, 1) and knows their log-probability. The ones here are fixed densities, each an inverse CDF of a uniform, so that
any of them can be stratified, shifted, truncated and mixed. `log_prob` is the log density in time (uniform: 0); on T discrete steps the
probability of step t is the mass of its cell [t/T, (t+1)/T), which `pmf` and `log_pmf` give exactly.

All values are float64: bfloat16 would reach only half of 1000 steps, and float32 rounds the largest uniforms to 1.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.batch import Batch, Draw
from noiseclock.core.checks import brief, take_finite, take_positive
from noiseclock.core.normal import normal_log_prob, normal_mass
from noiseclock.core.objectives import Objective
from noiseclock.core.probes import Probe
from noiseclock.core.schedules import Array, Schedule, as_time
from noiseclock.core.streams import in_unit
from noiseclock.core.table import Table, cell, wide, widen
from noiseclock.core.weightings import Weighting

TINY = 1e-30  # the smallest probability: its logarithm is finite, in float32 too


@dataclass(frozen=True)
class Setting:
    """What a Clock passes to its sampler, once. corrected: is the loss multiplied by base/p?"""

    schedule: Schedule
    objective: Objective
    weighting: Weighting
    base: Sampler
    corrected: bool = False


class Sampler(ABC):
    """A density over time. To write one, define `sample`, `log_prob` and `log_pmf`; the rest is for samplers that learn.

    A sampler may depend on x0 (B, ...), with one density per sample; without x0 its methods use the mean density over the data.
    """

    every: int = 0  # optimiser updates between probes of the model; 0 for no probes
    least_batch: int = 1  # samples that a probe needs; smaller batches, such as the last of an epoch, are not probed
    stratified: bool = True  # may the uniforms of a batch be stratified? Not if the sampler learns from the differences between batches

    def __str__(self) -> str:
        return brief(repr(self))

    @property
    def corrects(self) -> bool:
        """Is the loss multiplied by base/p by default?"""
        return False

    @property
    def support(self) -> tuple[float, float]:
        """The interval of time in which every time can be drawn."""
        return (0.0, 1.0)

    @property
    def reach(self) -> tuple[float, float]:
        """The interval outside of which nothing is ever drawn; wider than `support` where some times inside are not drawn, or not always."""
        return self.support

    @property
    def counts_updates(self) -> bool:
        """Does the density depend on the number of optimiser updates?"""
        return False

    @property
    def must_know(self) -> bool:
        """Must the clock know before `after` whether the update was skipped? This synchronises; otherwise `after` finds it in `probe.lost`."""
        return True

    @property
    def pause(self) -> int:
        """Optimiser updates from this probe to the next one."""
        return self.every

    @property
    def needs_updates(self) -> bool:
        """Does the density stay fixed unless a Clock counts the optimiser's updates?"""
        return self.every > 0 or self.counts_updates

    @property
    def learns(self) -> bool:
        """Does the density follow the training, and not the number of updates alone?"""
        return self.needs_updates and not self.counts_updates

    @property
    def info(self) -> dict[str, Any]:
        """Values for a log: numbers or lists of numbers, by name; reads the device."""
        return {}

    def bind(self, setting: Setting) -> Sampler:
        """The sampler for this setting; a Clock calls it once."""
        return self

    @abstractmethod
    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        """n independent times, or the quantiles at `uniforms` (n,) in [0, 1). Without uniforms and generator, the device is that of x0."""

    @abstractmethod
    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        """Log density at `time`, float64, -inf off the support."""

    @abstractmethod
    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        """(B,) the log probability of each step (B,), int64, out of `steps`; at least ln 1e-30."""

    def update(self, batch: Batch, losses: Tensor) -> None:
        """Learn from a batch and its unweighted, detached losses (B,); called for every micro-batch, and may be captured in a graph."""

    def before(self, probe: Probe) -> None:
        """Probe the model before an update."""

    def after(self, probe: Probe, batch: Batch) -> None:
        """Probe the model after the update that was made with `batch`."""

    def advance(self, updates: int) -> bool:
        """Called when the optimiser has made `updates` updates in total; returns True if that changed the density."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if state:
            raise ValueError(f"{self} has no state, got {sorted(state)}")


def mean_under(density: Sampler, schedule: Schedule, value: Callable[[Tensor], Tensor]) -> Tensor:
    """E[value(time)] under a density: the sum over a schedule's steps, or an integral over continuous time."""
    if schedule.steps is not None:
        step = torch.arange(schedule.steps, device="cpu")
        return (density.log_pmf(step, schedule.steps).exp() * value(schedule.grid())).sum()
    # a grid evenly spaced in logit(u), because weights may be steep at both ends of time
    x = torch.linspace(-35, 35, 2**16, dtype=torch.float64, device="cpu")
    time = torch.sigmoid(x)
    share = density.log_prob(time).exp() * time * torch.sigmoid(-x)
    if share.sum() == 0:
        raise ValueError(f"normalize=True cannot compute the mean weight under {density}, which is too narrow; leave normalize out")
    return (share * value(time)).sum() / share.sum()


class Density(Sampler):
    """A fixed density given by its inverse CDF `icdf`, the mass of an interval `mass`, and `log_prob`. Subclasses are frozen dataclasses."""

    @abstractmethod
    def icdf(self, v: Tensor) -> Tensor:
        """The time below which a fraction v of the probability lies."""

    @abstractmethod
    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        """P(lo <= time < hi), accurate in both tails."""

    def cdf(self, time: Tensor) -> Tensor:
        """P(time' < time)."""
        time = widen(time)
        return self.mass(torch.zeros_like(time), time)

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        time = in_unit(self.icdf(take_uniforms(n, x0, uniforms, generator)))
        return Draw(time, self.log_prob(time))

    def pmf(self, steps: int) -> Tensor:
        """(steps,) the probability of each discrete step, float64, on the CPU."""
        borders = torch.arange(steps + 1, dtype=torch.float64, device="cpu") / steps
        return self.mass(borders[:-1], borders[1:])

    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        if steps not in self._log_pmf:
            self._log_pmf[steps] = Table(self.pmf(steps).clamp(min=TINY).log())
        return self._log_pmf[steps].on(step.device)[step]

    @cached_property
    def _log_pmf(self) -> dict[int, Table]:
        return {}

    def bind(self, setting: Setting) -> Self:
        """This density for a setting: samplers inside it are bound, and a `schedule` field that is None is filled in."""
        if not is_dataclass(self):
            return self
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed: dict[str, Any] = {name: value.bind(setting) for name, value in values.items() if isinstance(value, Sampler)}
        if "schedule" in values:
            if values["schedule"] not in (None, setting.schedule):
                raise ValueError(f"{type(self).__name__} was made for {values['schedule']}, the clock runs on {setting.schedule}")
            changed["schedule"] = setting.schedule
        return replace(self, **changed) if changed else self


def take_uniforms(n: int, x0: Tensor | None, uniforms: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """(n,) uniforms in [0, 1): those given, or fresh ones on the device of `x0` or of the generator."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"the number of times to draw must be a whole number of at least 1, got {n!r}")
    if uniforms is None:
        device = generator.device if generator is not None else x0.device if x0 is not None else torch.device("cpu")
        return torch.rand(n, generator=generator, device=device, dtype=wide(device))
    if uniforms.shape != (n,):
        raise ValueError(f"uniforms must have shape ({n},), got {tuple(uniforms.shape)}")
    if uniforms.device.type == "cpu" and not bool(((uniforms >= 0) & (uniforms < 1)).all()):
        raise ValueError(f"uniforms must lie in [0, 1), got values from {uniforms.min().item():g} to {uniforms.max().item():g}")
    return widen(uniforms)


def unit_time(time: Tensor) -> Tensor:
    """`time` in float64, checked to lie in [0, 1]."""
    return widen(as_time(time))


def inside(time: Tensor) -> Tensor:
    """Times strictly inside (0, 1), so that logarithms of densities that vanish at the ends stay finite."""
    return in_unit(unit_time(time)).clamp(min=1e-18)  # the square of this bound does not underflow in float32


def cells_lines(pmf: Tensor, borders: Tensor) -> Tensor:
    """(5, n) the inverse CDF of a density with probabilities pmf (n,) on n equal cells of time, as one linear function per cell.

    borders (n+1,) are the running sums of pmf from 0 to 1. Rows: slope, offset, the smallest and the largest time in the cell, the log density.
    """
    n = len(pmf)
    i = torch.arange(n, dtype=pmf.dtype, device=pmf.device)
    slope = 1 / (pmf.clamp(min=TINY) * n)
    # slightly inside the borders, so that floor(u·n) returns this cell
    lo, hi = (i + 1e-9) / n, in_unit((i + (1 - 1e-9)) / n)
    return torch.stack([slope, i / n - borders[:-1] * slope, lo, hi, (pmf * n).clamp(min=TINY).log()])


def cells_icdf(borders: Tensor, lines: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Times at uniforms v, of any shape, and their log density. Every training step calls this, so it uses only four kernels."""
    i = torch.searchsorted(borders[1:-1], v.contiguous(), right=True)
    slope, offset, lo, hi, log_density = lines[:, i].unbind(0)
    return torch.addcmul(offset, v, slope).clamp(lo, hi), log_density


def cells_mass(pmf: Tensor, borders: Tensor, first: Tensor, before: Tensor, last: Tensor, after: Tensor) -> Tensor:
    """The probability from the place `before` (0 to 1) in cell `first` to the place `after` in cell `last`."""
    # borders are subtracted only if whole cells lie between: a small difference of two borders has lost digits
    apart = pmf[first] * (1 - before) + (borders[last] - borders[first + 1]) + pmf[last] * after
    return torch.where(first == last, pmf[first] * (after - before), apart)


def cells_log_prob(pmf: Tensor, time: Tensor) -> Tensor:
    """The log density at `time`."""
    return (pmf[cell(time, len(pmf))] * len(pmf)).clamp(min=TINY).log()


class Cells:
    """A fixed density that is constant on n equal cells of time: the table of densities on discrete steps.

    pmf: (n,) probabilities, normalised here.
    """

    def __init__(self, pmf: Tensor | Array) -> None:
        pmf = torch.as_tensor(pmf, dtype=torch.float64, device="cpu")
        pmf = pmf / pmf.sum()
        borders = torch.cat([torch.zeros_like(pmf[:1]), pmf.cumsum(0)])
        borders[-1] = 1.0
        self._pmf, self._borders, self._lines = Table(pmf), Table(borders), Table(cells_lines(pmf, borders))

    @property
    def pmf(self) -> Tensor:
        """(n,) the probability of each cell, float64, on the CPU."""
        return self._pmf.values

    def icdf(self, v: Tensor) -> Tensor:
        return cells_icdf(self._borders.on(v.device), self._lines.on(v.device), widen(v))[0]

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        pmf, borders = self._pmf.on(lo.device), self._borders.on(lo.device)
        n = len(pmf)
        first, last = cell(lo, n), cell(hi, n)
        return cells_mass(pmf, borders, first, lo * n - first, last, hi * n - last)

    def log_prob(self, time: Tensor) -> Tensor:
        return cells_log_prob(self._pmf.on(time.device), time)


@dataclass(frozen=True)
class Uniform(Density):
    """The uniform density (DDPM): the baseline for all others.

    >>> Uniform().sample(3, uniforms=torch.tensor([0.0, 0.5, 0.75])).time
    tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """

    def icdf(self, v: Tensor) -> Tensor:
        return widen(v)

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return hi - lo

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return torch.zeros_like(unit_time(time))


@dataclass(frozen=True)
class LogitNormal(Density):
    """u = sigmoid(mean + std·z), concentrated in the middle: the usual choice for flow matching (SD3; the adaptive paper calls it Log-Normal).

    >>> LogitNormal().icdf(torch.tensor(0.5))
    tensor(0.5000, dtype=torch.float64)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        take_finite(self, "mean")
        take_positive(self, "std")

    def icdf(self, v: Tensor) -> Tensor:
        return torch.sigmoid(self.mean + self.std * torch.special.ndtri(inside(v)))

    def _z(self, time: Tensor) -> Tensor:
        return (torch.logit(time) - self.mean) / self.std

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return normal_mass(self._z(lo), self._z(hi))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        u = inside(time)
        return normal_log_prob(self._z(u), self.std) - u.log() - (-u).log1p()


@dataclass(frozen=True)
class Mode(Density):
    """SD3's mode sampling: u = v - c·(½(1 - cos πv) - v), heavy in the middle for c > 0 and at the ends for c < 0.

    This is the published 1-v-c(cos²(πv/2)-1+v) with 1-v in place of v, so that it rises with v; the density is the same.
    """

    scale: float = 1.29

    def __post_init__(self) -> None:
        take_finite(self, "scale")
        if not -1 < self.scale < 2 / (math.pi - 2):
            raise ValueError(f"Mode: scale must lie between -1 and 2/(pi-2) = 1.7519, where the map is one to one, got {self.scale}")

    def icdf(self, v: Tensor) -> Tensor:
        v = widen(v)
        return v - self.scale * ((1 - torch.cos(math.pi * v)) / 2 - v)

    def _slope(self, v: Tensor) -> Tensor:
        return 1 + self.scale - self.scale * math.pi / 2 * torch.sin(math.pi * v)

    @cached_property
    def _knots(self) -> Table:
        return Table(self.icdf(torch.linspace(0, 1, 2**12 + 1, dtype=torch.float64, device="cpu")))

    def cdf(self, time: Tensor) -> Tensor:
        u = widen(time)
        knots = self._knots.on(u.device)
        i = torch.searchsorted(knots, u.contiguous()).clamp(1, len(knots) - 1)
        v = (i - (knots[i] - u) / (knots[i] - knots[i - 1])) / (len(knots) - 1)
        for _ in range(3):  # Newton's method from within a cell of the table doubles the correct digits each time
            v = (v - (self.icdf(v) - u) / self._slope(v)).clamp(0, 1)
        return v

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.cdf(hi) - self.cdf(lo)

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return -self._slope(self.cdf(unit_time(time))).log()


@dataclass(frozen=True)
class CosMap(Density):
    """Density 2/(π - 2πu + 2πu²): the cosine schedule's levels in flow time (SD3)."""

    def icdf(self, v: Tensor) -> Tensor:
        half = widen(v) * (math.pi / 2)
        return half.sin() / (half.sin() + half.cos())

    def cdf(self, time: Tensor) -> Tensor:
        u = widen(time)
        return torch.atan2(u, 1 - u) * (2 / math.pi)

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.cdf(hi) - self.cdf(lo)

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        u = unit_time(time)
        return -(math.pi * (0.5 - u + u**2)).log()


@dataclass(frozen=True)
class Beta(Density):
    """u ~ Beta(a, b); the defaults are those of B-TTDM (Zheng et al., ECCV 2024).

    The inverse CDF reads a table of 32,768 cells, finer at both ends. For a, b from 0.5 to 20 it is within 1e-7 of the exact one between the
    quantiles 0.0005 and 0.9995 (tested against scipy) and within 1e-6 beyond them; `mass` and `log_prob` are exact.
    """

    a: float = 0.8
    b: float = 1.0

    def __post_init__(self) -> None:
        take_positive(self, "a", "b")

    @cached_property
    def _log_norm(self) -> float:
        return math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)

    @cached_property
    def _tables(self) -> tuple[Table, Table]:
        knots = np.sin(np.linspace(0, np.pi / 2, 2**15 + 1)) ** 2
        return Table(knots), Table(np.maximum.accumulate(_beta_cdf(knots, self.a, self.b)))

    def icdf(self, v: Tensor) -> Tensor:
        v = widen(v).contiguous()
        knots, table = (t.on(v.device) for t in self._tables)
        i = torch.searchsorted(table, v, right=True).clamp(1, len(table) - 1)
        part = (v - table[i - 1]) / (table[i] - table[i - 1]).clamp(min=TINY)
        return knots[i - 1] + part.clamp(0, 1) * (knots[i] - knots[i - 1])

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        u, w = (widen(end).cpu().numpy() for end in (lo, hi))
        below = _beta_cdf(w, self.a, self.b) - _beta_cdf(u, self.a, self.b)
        above = _beta_cdf(1 - u, self.b, self.a) - _beta_cdf(1 - w, self.b, self.a)
        mass = np.where(u < 0.5, below, above)  # each difference keeps its digits in its own tail
        return torch.as_tensor(mass, device=lo.device, dtype=wide(lo.device))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        u = inside(time)
        return (self.a - 1) * u.log() + (self.b - 1) * (-u).log1p() - self._log_norm


def _beta_cdf(u: Array, a: float, b: float) -> Array:
    """The regularised incomplete beta function I_u(a, b), by its continued fraction (DLMF 8.17.22), to about 1e-14."""
    u = np.asarray(u, dtype=np.float64)
    swap = u > (a + 1) / (a + b + 2)  # the fraction converges fast on one side of the mean only
    x, p, q = np.where(swap, 1 - u, u), np.where(swap, b, a), np.where(swap, a, b)
    log_norm = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    with np.errstate(divide="ignore"):
        front = np.exp(p * np.log(x) + q * np.log1p(-x) - log_norm) / p
    c, d = np.ones_like(x), 1 / (1 - (p + q) * x / (p + 1))
    value = d.copy()
    for m in range(1, 400):
        for numerator in (m * (q - m) * x / ((p + 2 * m - 1) * (p + 2 * m)), -(p + m) * (p + q + m) * x / ((p + 2 * m) * (p + 2 * m + 1))):
            d, c = 1 / (1 + numerator * d), 1 + numerator / c
            value = value * d * c
        if np.all(np.abs(d * c - 1) < 1e-15):
            break
    lower = front * value
    return np.asarray(np.where(swap, 1 - lower, lower))
