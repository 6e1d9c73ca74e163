"""Densities made from others: shifted, truncated, drawn independently, mixed, annealed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from noiseclock.core.batch import Batch, Draw
from noiseclock.core.checks import take_finite, take_positive, take_whole
from noiseclock.core.probes import Probe
from noiseclock.core.samplers import TINY, Density, Sampler, Setting, Uniform, take_uniforms, unit_time
from noiseclock.core.streams import in_unit
from noiseclock.core.table import Table, widen

Number = TypeVar("Number", float, Tensor)


class Around(Density):
    """A density made from another fixed one, its `sampler`."""

    sampler: Density

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Density):
            raise TypeError(f"{type(self).__name__} needs a fixed density with an inverse CDF, got {self.sampler}")

    @property
    def stratified(self) -> bool:  # type: ignore[override]
        return self.sampler.stratified

    @property
    def corrects(self) -> bool:
        return self.sampler.corrects

    @property
    def support(self) -> tuple[float, float]:
        return self.sampler.support


@dataclass(frozen=True)
class Shifted(Around):
    """Another density with its times moved by u' = k·u/(1+(k-1)·u): towards noise for k > 1 (resolution shift of SD3).

    >>> Shifted(Uniform(), k=3.0).icdf(torch.tensor(0.5))
    tensor(0.7500, dtype=torch.float64)
    """

    sampler: Density
    k: float = 3.0

    def __post_init__(self) -> None:
        super().__post_init__()
        take_positive(self, "k")

    @property
    def support(self) -> tuple[float, float]:
        lo, hi = self.sampler.support
        return self._shift(lo), self._shift(hi)

    def _shift(self, u: Number) -> Number:
        return self.k * u / (1 + (self.k - 1) * u)

    def _unshift(self, u: Tensor) -> Tensor:
        return (u / (self.k - (self.k - 1) * u)).clamp(0, 1)  # rounding may leave [0, 1]

    def icdf(self, v: Tensor) -> Tensor:
        return self._shift(self.sampler.icdf(v))

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.sampler.mass(self._unshift(widen(lo)), self._unshift(widen(hi)))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        u = unit_time(time)
        return self.sampler.log_prob(self._unshift(u)) + math.log(self.k) - 2 * (self.k - (self.k - 1) * u).log()


@dataclass(frozen=True)
class Truncated(Around):
    """Another density restricted to [lo, hi) by its inverse CDF, never by rejection."""

    sampler: Density
    lo: float = 0.0
    hi: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        take_finite(self, "lo", "hi")
        if not 0 <= self.lo < self.hi <= 1:
            raise ValueError(f"Truncated: needs 0 <= lo < hi <= 1, got lo = {self.lo}, hi = {self.hi}")
        lo, hi = self.sampler.support
        if self.lo >= hi or self.hi <= lo:
            raise ValueError(f"Truncated: [{self.lo}, {self.hi}] does not overlap {self.sampler}, which draws from [{lo:g}, {hi:g}]")

    @property
    def support(self) -> tuple[float, float]:
        lo, hi = self.sampler.support
        return max(lo, self.lo), min(hi, self.hi)

    @cached_property
    def _shares(self) -> tuple[float, float]:
        """The probability of the inner density below lo, and between lo and hi."""
        ends = torch.tensor([0.0, self.lo, self.hi], dtype=torch.float64, device="cpu")
        below, between = self.sampler.mass(ends[:-1], ends[1:]).tolist()
        if between < 1e-9:  # too few of a uniform's 16 digits would be left to tell times apart
            raise ValueError(f"Truncated: {self.sampler} has hardly any probability ({between:.0e}) in [{self.lo}, {self.hi}]")
        return below, between

    def icdf(self, v: Tensor) -> Tensor:
        below, between = self._shares
        inner = self.sampler.icdf(in_unit(below + widen(v) * between))
        return inner.clamp(self.lo, math.nextafter(self.hi, 0.0))  # rounding must not carry a time out of the interval

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.sampler.mass(widen(lo).clamp(self.lo, self.hi), widen(hi).clamp(self.lo, self.hi)) / self._shares[1]

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        u = unit_time(time)
        allowed = (u >= self.lo) & (u < self.hi)
        return torch.where(allowed, self.sampler.log_prob(u) - math.log(self._shares[1]), -math.inf)


@dataclass(frozen=True)
class Independent(Around):
    """Another density whose times are drawn independently, as in the papers' own code. Other fixed densities are stratified over the batch.

    The objective is the same and its gradient has more variance: for comparisons with the papers, not for training.
    """

    sampler: Density = Uniform()
    stratified = False

    def icdf(self, v: Tensor) -> Tensor:
        return self.sampler.icdf(v)

    def mass(self, lo: Tensor, hi: Tensor) -> Tensor:
        return self.sampler.mass(lo, hi)

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return self.sampler.log_prob(time)


class Blend(Sampler):
    """p = (1-f)·sampler + f·other, drawn by splitting the uniform at f: both parts stay stratified and nothing is inverted numerically.

    Learned samplers can be blended too: only the methods of `Sampler` are used.
    """

    sampler: Sampler
    other: Sampler
    _share: Table  # f, 0-d

    @property
    def _parts(self) -> tuple[Sampler, ...]:
        return self.sampler, self.other

    @property
    def corrects(self) -> bool:
        # either: a density that is optimal for a corrected loss would change the objective without correction, whichever part it is
        return any(part.corrects for part in self._parts)

    @property
    def every(self) -> int:  # type: ignore[override]  # a plain number in other samplers
        return max(part.every for part in self._parts)

    @property
    def pause(self) -> int:
        return max(part.pause for part in self._parts if part.every)

    @property
    def least_batch(self) -> int:  # type: ignore[override]
        return max(part.least_batch for part in self._parts)

    @property
    def stratified(self) -> bool:  # type: ignore[override]
        return all(part.stratified for part in self._parts)

    @property
    def support(self) -> tuple[float, float]:
        (a, b), (c, d) = self.sampler.support, self.other.support
        if max(a, c) > min(b, d):  # nothing is drawn in the gap between them
            return (a, b) if b - a > d - c else (c, d)
        return min(a, c), max(b, d)

    @property
    def reach(self) -> tuple[float, float]:
        (a, b), (c, d) = self.sampler.reach, self.other.reach
        return min(a, c), max(b, d)

    @property
    def counts_updates(self) -> bool:
        return any(part.counts_updates for part in self._parts)

    @property
    def needs_updates(self) -> bool:
        return self.counts_updates or any(part.needs_updates for part in self._parts)

    @property
    def learns(self) -> bool:
        return any(part.learns for part in self._parts)

    @property
    def info(self) -> dict[str, Any]:
        return {**self.sampler.info, **{f"other_{name}": value for name, value in self.other.info.items()}}

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        v = take_uniforms(n, x0, uniforms, generator)
        f = self._share.on(v.device)
        other = self.other.sample(n, x0=x0, uniforms=in_unit(v / f.clamp(min=TINY)))
        main = self.sampler.sample(n, x0=x0, uniforms=in_unit((v - f) / (1 - f).clamp(min=TINY)))
        time = torch.where(v < f, other.time, main.time)
        return Draw(time, self.log_prob(time, x0=x0))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        return self._mix(lambda part: part.log_prob(time, x0=x0))

    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        return self._mix(lambda part: part.log_pmf(step, steps, x0=x0))

    def _mix(self, log_p: Callable[[Sampler], Tensor]) -> Tensor:
        main, other = log_p(self.sampler), log_p(self.other)
        f = self._share.on(main.device)
        return torch.logaddexp((-f).log1p() + main, f.log() + other)

    def bind(self, setting: Setting) -> Self:
        return replace(self, sampler=self.sampler.bind(setting), other=self.other.bind(setting))  # type: ignore[type-var]  # both are dataclasses

    def update(self, batch: Batch, losses: Tensor) -> None:
        for part in self._parts:
            part.update(batch, losses)

    def before(self, probe: Probe) -> None:
        for part in self._parts:
            part.before(probe)

    def after(self, probe: Probe, batch: Batch) -> None:
        for part in self._parts:
            part.after(probe, batch)

    def advance(self, updates: int) -> bool:
        moved = [part.advance(updates) for part in self._parts]
        return any(moved)

    def state_dict(self) -> dict[str, Any]:
        return {"sampler": self.sampler.state_dict(), "other": self.other.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"sampler", "other"}:
            raise ValueError(f"{type(self).__name__}: its state must hold 'sampler' and 'other', got {sorted(state)}")
        self.sampler.load_state_dict(state["sampler"])
        self.other.load_state_dict(state["other"])


def _check_parts(owner: Blend) -> None:
    for part in owner._parts:
        if not isinstance(part, Sampler):
            raise TypeError(f"{type(owner).__name__} blends samplers, got {part!r}; make one by its name with nc.sampler(name)")
    looks = {part.every for part in owner._parts if part.every > 0}
    if len(looks) > 1:
        raise ValueError(
            f"{type(owner).__name__}: one sampler probes every {min(looks)} updates, the other every {max(looks)}; give both the same `every`"
        )


@dataclass(frozen=True)
class Mixture(Blend):
    """(1-floor)·sampler + floor·other: with the uniform as `other`, the density is at least `floor` at every time.

    >>> Mixture(Truncated(Uniform(), 0.5, 1.0), floor=0.2).log_prob(torch.tensor([0.1, 0.9])).exp()
    tensor([0.2000, 1.8000], dtype=torch.float64)
    """

    sampler: Sampler
    other: Sampler = Uniform()
    floor: float = 0.1

    def __post_init__(self) -> None:
        _check_parts(self)
        take_finite(self, "floor")
        if not 0 < self.floor < 1:
            raise ValueError(f"Mixture: floor must lie between 0 and 1, got {self.floor}")
        object.__setattr__(self, "_share", Table(self.floor))


@dataclass
class Annealed(Blend):
    """One sampler until optimiser update `start`, another from `stop` on, and a linear transition between them.

    A Clock counts the updates; without one, call `advance(updates)`. The clock saves this count; it is not part of the sampler's state.
    Before `start` the other learns already, at the cost of its probes. From `stop` on it alone is drawn from, stratified if it may be, and it alone
    learns. A captured graph keeps what it was captured with, the share aside: before `stop` both parts and how the uniforms were drawn, after it the
    other alone. So capture again at `stop`, and after loading an earlier state.
    """

    sampler: Sampler
    other: Sampler = Uniform()
    start: int = 0
    stop: int = 1000
    _share: Table = field(init=False, repr=False, compare=False, default_factory=lambda: Table(0.0))

    def __post_init__(self) -> None:
        _check_parts(self)
        take_whole(self, "start", "stop", least=0)
        if self.start >= self.stop:
            raise ValueError(f"Annealed: start must come before stop, got start = {self.start}, stop = {self.stop}")

    @property
    def _parts(self) -> tuple[Sampler, ...]:
        # before `start` both: the other has to know something when it takes over; what is no longer drawn from need not learn
        return (self.other,) if self._over else super()._parts

    @property
    def corrects(self) -> bool:
        return self.sampler.corrects or self.other.corrects  # the objective is the same before and after

    @property
    def support(self) -> tuple[float, float]:
        """The times that can be drawn during the whole transition: the intersection of both supports."""
        (a, b), (c, d) = self.sampler.support, self.other.support
        return max(a, c), min(b, d)

    @property
    def counts_updates(self) -> bool:
        return True

    @property
    def _over(self) -> bool:
        return self.share == 1

    @property
    def share(self) -> float:
        """The current share of `other`."""
        return float(self._share.values)

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "share": self.share}

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        if self._over:
            return self.other.sample(n, x0=x0, uniforms=uniforms, generator=generator)
        return super().sample(n, x0=x0, uniforms=uniforms, generator=generator)

    def _mix(self, log_p: Callable[[Sampler], Tensor]) -> Tensor:
        return log_p(self.other) if self._over else super()._mix(log_p)

    def advance(self, updates: int) -> bool:
        share = min(max((updates - self.start) / (self.stop - self.start), 0.0), 1.0)
        moved = share != self.share
        if moved:
            self._share.set_(share)
        return super().advance(updates) or moved
