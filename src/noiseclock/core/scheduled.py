"""Fixed densities that are defined over the noise level, so they need a schedule to become densities over time.

A Clock binds them to its schedule; without a Clock, pass `schedule=`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.batch import Draw
from noiseclock.core.checks import choose, take_finite, take_positive, take_whole
from noiseclock.core.normal import normal_log_prob, normal_mass
from noiseclock.core.samplers import TINY, Cells, Density, inside, take_uniforms, unit_time
from noiseclock.core.schedules import CONVERGED_SLOPE, Discrete, Schedule
from noiseclock.core.table import widen


class Scheduled(Density):
    """A density with a field `schedule`, which is None until it is bound."""

    schedule: Schedule | None

    @property
    def _schedule(self) -> Schedule:
        if self.schedule is None:
            raise ValueError(f"{type(self).__name__} needs a noise schedule: use it in a Clock, or pass schedule=nc.schedule(...)")
        return self.schedule


@dataclass(frozen=True)
class LogSNRNormal(Scheduled):
    """λ = ln SNR ~ N(mean, std), truncated to the range of the schedule; the defaults are those of style-friendly training.

    The probability of a discrete step is the normal's mass over all λ that are nearest to the λ of this step.
    """

    mean: float = -6.0
    std: float = 2.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        take_finite(self, "mean")
        take_positive(self, "std")

    @property
    def _moments(self) -> tuple[float, float]:
        """Mean and standard deviation of λ."""
        return self.mean, self.std

    def _z(self, time: Tensor) -> Tensor:
        """λ standardised, with its sign changed so that it rises with time."""
        mean, std = self._moments
        level = self._schedule.level(widen(time))
        return (mean - level.a2.log() + level.s2.log()) / std

    @cached_property
    def _ends(self) -> tuple[float, float, float]:
        """z at time 0 and at time 1, and the mass between them; Python numbers, so that no draw copies anything to its device."""
        lo, hi = self._z(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"))
        return lo.item(), hi.item(), self._reached(normal_mass(lo, hi).item())

    @cached_property
    def _cells(self) -> Cells | None:
        schedule = self._schedule
        if not isinstance(schedule, Discrete):
            return None
        z = self._z(schedule.grid())
        middle = (z[1:] + z[:-1]) / 2
        # The first and the last cell reach as far outwards as inwards. If the last step has no signal, no finite λ is nearest to it: it keeps TINY.
        last = 2 * z[-1:] - middle[-1:] if z[-1].isfinite() else z[-1:]
        borders = torch.cat([2 * z[:1] - middle[:1], middle, last])
        mass = normal_mass(borders[:-1], borders[1:])
        return Cells((mass / self._reached(mass.max().item())).clamp(min=TINY))

    def _reached(self, mass: float) -> float:
        if mass == 0:
            raise ValueError(f"{self} has no probability on the schedule, whose noise levels lie too many standard deviations from the mean")
        return mass

    def icdf(self, v: Tensor) -> Tensor:
        if self._cells is not None:
            return self._cells.icdf(widen(v))
        lo, hi, total = self._ends
        mean, std = self._moments
        upper = lo + hi > 0  # then mirror it to the lower tail, where Φ keeps its digits
        if upper:
            lo, hi, v = -hi, -lo, 1 - widen(v)
        below = math.erfc(-lo / math.sqrt(2)) / 2  # Φ(lo)
        z = torch.special.ndtri(below + widen(v) * total).clamp(lo, hi)
        return self._schedule.inverse(mean - std * (-z if upper else z))

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        if self._cells is not None:
            return self._cells.mass(widen(lo), widen(hi))
        return normal_mass(self._z(lo), self._z(hi)) / self._ends[2]

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        if self._cells is not None:
            return self._cells.log_prob(unit_time(time))
        u = inside(time)
        return normal_log_prob(self._z(u), self._moments[1]) + self._schedule.slope(u).log() - math.log(self._ends[2])


@dataclass(frozen=True)
class LogNormal(LogSNRNormal):
    """ln σ ~ N(mean, std) with σ = s/a, truncated to the range of the schedule: EDM's training density; use it to train EDM."""

    mean: float = -1.2
    std: float = 1.2

    @property
    def _moments(self) -> tuple[float, float]:
        return -2 * self.mean, 2 * self.std  # λ = -2 ln σ


@dataclass(frozen=True)
class SpeeD(Scheduled):
    """SpeeD (2405.17403): the convergence area, from step `tau` on, is drawn `k` times less often than the steps before it.

    variant "paper": P(t) ∝ k for t < tau, else 1.
    variant "released": as in the first public code. Half of the draws follow a density that falls from k to 1 softly, within a few steps; the
    other half are their duals, t' = m-t if t < m else t-m with m = tau+1. The marginal is exact. The adaptive paper compares with this variant.
    tau "auto": the first step where the slope of √(1-ᾱ) falls under 1e-4 (at T = 1000): 641 linear, 828 quadratic, 958 cosine. In continuous
    time a step is 1/1000 of the time range.
    """

    k: float = 5.0
    tau: int | str = "auto"
    variant: str = "paper"
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        take_positive(self, "k")
        choose("SpeeD variant", self.variant, ("paper", "released"))
        if isinstance(self.tau, str):
            choose("SpeeD tau", self.tau, ("auto",))
            return
        take_whole(self, "tau", least=1)
        if self.schedule is not None and self.tau > self._steps:
            raise ValueError(f"SpeeD: tau must be 'auto' or a step from 1 to {self._steps}, got {self.tau}")

    @property
    def _steps(self) -> int:
        return len(self._schedule.grid())

    @cached_property
    def boundary(self) -> int:
        """The first step of the convergence area."""
        return self._schedule.areas().converged if isinstance(self.tau, str) else self.tau

    @cached_property
    def _first(self) -> Cells:
        """The density before duals are taken."""
        # +1 before the boundary, -1 from it on
        side = np.where(np.arange(self._steps) < self.boundary, 1.0, -1.0)
        if self.variant == "released" and isinstance(self.tau, str):
            # the released code's tanh(1e6·(slope per step - 1e-4)) + 1.5, written per unit time so that it holds for any number of steps
            side = np.tanh(1e3 * (self._schedule.increments().speed * self._steps - CONVERGED_SLOPE))
        return Cells((self.k + 1) / 2 + (self.k - 1) / 2 * side)

    @cached_property
    def _marginal(self) -> Cells:
        if self.variant == "paper":
            return self._first
        dual = self._dual(torch.arange(self._steps, device="cpu"))
        return Cells(self._first.pmf.index_add(0, dual, self._first.pmf))

    def _dual(self, step: Tensor) -> Tensor:
        m = min(self.boundary + 1, self._steps - 1)
        return torch.where(step < m, m - step, step - m)

    def icdf(self, v: Tensor) -> Tensor:
        return self._marginal.icdf(widen(v))

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        if self.variant == "paper":
            return super().sample(n, x0=x0, uniforms=uniforms, generator=generator)
        # uniforms below ½ give draws, the others give duals; stratified uniforms stay stratified in both halves
        v = take_uniforms(n, x0, uniforms, generator)
        place = self._first.icdf(torch.where(v < 0.5, 2 * v, 2 * v - 1)) * self._steps
        step = place.floor()
        time = torch.where(v < 0.5, place, self._dual(step.long()) + (place - step)) / self._steps
        return Draw(time, self.log_prob(time))

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self._marginal.mass(widen(lo), widen(hi))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return self._marginal.log_prob(unit_time(time))
