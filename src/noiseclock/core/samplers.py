"""Sampling densities over time: which noise level to train on next.

A `Sampler` draws times in [0, 1) and knows their log-probability. The ones here are fixed densities, each an inverse CDF of a uniform, so that
any of them can be stratified, shifted, truncated and mixed. `log_prob` is the log density in time (uniform: 0); on T discrete steps the
probability of step t is the mass of its cell [t/T, (t+1)/T), which `pmf` and `log_pmf` give exactly.

All values are float64: bfloat16 would reach only half of 1000 steps, and float32 rounds the largest uniforms to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.checks import check_positive
from noiseclock.core.normal import normal_log_prob, normal_mass
from noiseclock.core.schedules import Array, Schedule, wide
from noiseclock.core.streams import in_unit

TINY = 1e-30  # the smallest probability: its logarithm is finite, in float32 too


@dataclass(frozen=True)
class Draw:
    """Times and how likely they were.

    time: (B,) in [0, 1). log_prob: (B,) log density in time. log_pmf: (B,) log probability of the step, where the schedule is discrete and the
    sampler knows it already.
    """

    time: Tensor
    log_prob: Tensor
    log_pmf: Tensor | None = None


@runtime_checkable
class Sampler(Protocol):
    """What a Clock needs of a sampler, fixed or learned.

    corrects: does its loss carry base/p unless the user says otherwise?
    support: the interval of time that it can draw.
    every: a probe is due every so many optimiser updates; 0 for never.
    """

    @property
    def corrects(self) -> bool: ...
    @property
    def support(self) -> tuple[float, float]: ...
    @property
    def every(self) -> int: ...

    def bind(self, schedule: Schedule) -> Sampler:
        """The sampler for this schedule; a Clock calls it once."""

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw: ...
    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor: ...
    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor: ...
    def update(self, draw: Draw, losses: Tensor) -> None:
        """Learn from unweighted, detached losses (B,); nothing to do for a fixed density."""

    def advance(self, updates: int) -> bool:
        """The optimiser has made `updates` updates so far; True when that changed the density."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Density:
    """A fixed density given by its inverse CDF `icdf`, the mass of an interval `mass`, and `log_prob`. Subclasses are frozen dataclasses."""

    every = 0

    @property
    def corrects(self) -> bool:
        return False

    @property
    def support(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def icdf(self, v: Tensor) -> Tensor:
        """The time below which a fraction v of the probability lies."""
        raise NotImplementedError(f"{type(self).__name__} must define icdf")

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        """P(lo <= time < hi), accurate in both tails."""
        raise NotImplementedError(f"{type(self).__name__} must define mass")

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        """Log density at `time`, float64, finite on the support and -inf off it."""
        raise NotImplementedError(f"{type(self).__name__} must define log_prob")

    def cdf(self, time: Tensor) -> Tensor:
        """P(time' < time)."""
        time = widen(time)
        return self.mass(torch.zeros_like(time), time)

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        """n independent times, or those at the given `uniforms` (n,) in [0, 1); `x0` only tells the device."""
        v = take_uniforms(n, x0, uniforms, generator)
        time = in_unit(self.icdf(v))
        return Draw(time, self.log_prob(time))

    def pmf(self, steps: int) -> Tensor:
        """(steps,) the probability of each discrete step, float64, on the CPU."""
        borders = torch.arange(steps + 1, dtype=torch.float64) / steps
        return self.mass(borders[:-1], borders[1:])

    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        """(B,) the log probability of each given step, an int64 tensor."""
        key = (steps, step.device)
        if key not in self._log_pmf:
            self._log_pmf[key] = self.pmf(steps).clamp(min=TINY).log().to(step.device, wide(step.device))
        return self._log_pmf[key][step]

    @cached_property
    def _log_pmf(self) -> dict[tuple[int, torch.device], Tensor]:
        return {}

    def bind(self, schedule: Schedule) -> Self:
        """This density for a schedule: samplers inside it are bound, and a `schedule` field that is None is filled in."""
        assert is_dataclass(self)
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = {name: value.bind(schedule) for name, value in values.items() if isinstance(value, Sampler)}
        if "schedule" in values:
            if values["schedule"] not in (None, schedule):
                raise ValueError(f"{type(self).__name__} was made for {values['schedule']}, the clock runs on {schedule}")
            changed["schedule"] = schedule
        return replace(self, **changed) if changed else self

    def update(self, draw: Draw, losses: Tensor) -> None:
        pass

    def advance(self, updates: int) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{self} is a fixed density and has no state, but was given {sorted(state)}")


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


def widen(time: Tensor) -> Tensor:
    """`time` in float64, where the device has it."""
    return time.to(wide(time.device))


def inside(time: Tensor) -> Tensor:
    """Times strictly inside (0, 1), so that logarithms of densities that vanish at the ends stay finite."""
    return in_unit(widen(time)).clamp(min=1e-18)  # whose square is a number in float32 too


class Cells:
    """A density that is constant on n equal cells of time; the table behind every discrete or learned density.

    pmf: (n,) probabilities, normalised here.
    """

    def __init__(self, pmf: Tensor | Array) -> None:
        pmf = torch.as_tensor(pmf, dtype=torch.float64)
        self.pmf = pmf / pmf.sum()
        self._copies: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._copies:
            borders = torch.cat([torch.zeros(1, dtype=torch.float64), self.pmf.cumsum(0)])
            borders[-1] = 1.0
            self._copies[device] = (self.pmf.to(device, wide(device)), borders.to(device, wide(device)))
        return self._copies[device]

    def _cell(self, time: Tensor) -> Tensor:
        return (time * len(self.pmf)).floor().clamp(0, len(self.pmf) - 1).long()

    def icdf(self, v: Tensor) -> Tensor:
        pmf, borders = self._on(v.device)
        cell = torch.searchsorted(borders, v.contiguous(), right=True).sub(1).clamp(0, len(pmf) - 1)
        # a hair's breadth from the borders, so that floor(u·n) gives back this very cell
        part = ((v - borders[cell]) / pmf[cell].clamp(min=TINY)).clamp(1e-9, 1 - 1e-9)
        return (cell + part) / len(pmf)

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        pmf, borders = self._on(lo.device)
        n = len(pmf)
        first, last = self._cell(lo), self._cell(hi)
        # whole cells between the borders, less the part before lo, plus the part before hi
        return (borders[last] - borders[first]) - pmf[first] * (lo * n - first) + pmf[last] * (hi * n - last)

    def log_prob(self, time: Tensor) -> Tensor:
        pmf, _ = self._on(time.device)
        return (pmf[self._cell(time)] * len(pmf)).clamp(min=TINY).log()


@dataclass(frozen=True)
class Uniform(Density):
    """Every time alike (DDPM).

    >>> Uniform().sample(3, uniforms=torch.tensor([0.0, 0.5, 0.75])).time
    tensor([0.0000, 0.5000, 0.7500], dtype=torch.float64)
    """

    @property
    def corrects(self) -> bool:
        return True  # under another base it estimates that base, and under the uniform one the correction is 1

    def icdf(self, v: Tensor) -> Tensor:
        return widen(v)

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return hi - lo

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return torch.zeros_like(widen(time))


@dataclass(frozen=True)
class LogitNormal(Density):
    """u = sigmoid(mean + std·z) (SD3; the adaptive paper calls it Log-Normal).

    >>> LogitNormal().icdf(torch.tensor(0.5))
    tensor(0.5000, dtype=torch.float64)
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, std=self.std)

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

    This is the published 1-v-c(cos²(πv/2)-1+v) read from the other end, so that it rises with v; the density is the same.
    """

    scale: float = 1.29

    def __post_init__(self) -> None:
        if not -1 < self.scale < 2 / (math.pi - 2):
            raise ValueError(f"Mode: scale must lie between -1 and 2/(pi-2) = 1.7519, where the map is one to one, got {self.scale}")

    def icdf(self, v: Tensor) -> Tensor:
        v = widen(v)
        return v - self.scale * ((1 - torch.cos(math.pi * v)) / 2 - v)

    def _slope(self, v: Tensor) -> Tensor:
        return 1 + self.scale - self.scale * math.pi / 2 * torch.sin(math.pi * v)

    def cdf(self, time: Tensor) -> Tensor:
        time = widen(time)
        lo, hi = torch.zeros_like(time), torch.ones_like(time)
        for _ in range(54):  # bisection: one bit of float64 each
            middle = (lo + hi) / 2
            below = self.icdf(middle) < time
            lo, hi = torch.where(below, middle, lo), torch.where(below, hi, middle)
        return hi

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.cdf(hi) - self.cdf(lo)

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return -self._slope(self.cdf(time)).log()

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        v = take_uniforms(n, x0, uniforms, generator)
        return Draw(in_unit(self.icdf(v)), -self._slope(v).log())  # v is at hand, so nothing needs to be inverted


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
        u = widen(time)
        return -(math.pi * (0.5 - u + u**2)).log()


@dataclass(frozen=True)
class Beta(Density):
    """u ~ Beta(a, b); the defaults are those of B-TTDM.

    The inverse CDF reads a table of 32,768 cells, crowded at both ends, and is within 1e-7 of the exact one for a, b from 0.5 to 20 (tested
    against scipy); `mass` and `log_prob` are exact.
    """

    a: float = 0.8
    b: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, a=self.a, b=self.b)

    @cached_property
    def _log_norm(self) -> float:
        return math.lgamma(self.a) + math.lgamma(self.b) - math.lgamma(self.a + self.b)

    @cached_property
    def _knots(self) -> Array:
        return np.asarray(np.sin(np.linspace(0, np.pi / 2, 2**15 + 1)) ** 2)

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def _on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._copies:
            table = np.maximum.accumulate(_beta_cdf(self._knots, self.a, self.b))
            self._copies[device] = (
                torch.as_tensor(self._knots, device=device, dtype=wide(device)),
                torch.as_tensor(table, device=device, dtype=wide(device)),
            )
        return self._copies[device]

    def icdf(self, v: Tensor) -> Tensor:
        v = widen(v).contiguous()
        knots, table = self._on(v.device)
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
