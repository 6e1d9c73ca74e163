"""Densities that change during training, kept on the device where times are drawn.

A `LearnedDensity` is constant on n equal cells of time. Its probabilities are one tensor that is written in place, so a draw never waits for
the host, and a captured graph that reads them sees every change.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from noiseclock.core.batch import Batch, Draw
from noiseclock.core.checks import take_finite
from noiseclock.core.health import LEAST_ESS, Health
from noiseclock.core.later import Later
from noiseclock.core.samplers import TINY, Sampler, Setting, Uniform, cells_icdf, cells_lines, cells_log_prob, cells_mass, take_uniforms, unit_time
from noiseclock.core.table import lasting, wide


def running_sum(x: Tensor) -> Tensor:
    """(n,) cumulative sums, by doubling: bit-identical on every rank, which CUDA's cumsum does not guarantee."""
    shift = 1
    while shift < len(x):
        x = torch.cat([x[:shift], x[shift:] + x[:-shift]])
        shift *= 2
    return x


class Buffers:
    """Named tensors that persist between steps, share one device and are written in place."""

    def __init__(self, **tensors: Tensor) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    @property
    def device(self) -> torch.device:
        return next(iter(self._tensors.values())).device

    def move_(self, device: torch.device) -> None:
        """Move to another device; floats are float64 if the device supports it."""
        if device != self.device:
            with lasting():
                self._tensors = {name: t.to(device, wide(device) if t.is_floating_point() else None) for name, t in self._tensors.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self._tensors.items()}

    def check(self, state: Mapping[str, Any], owner: str) -> None:
        """Raise a ValueError unless every tensor is there, of the right shape and kind, and finite."""
        for name, mine in self._tensors.items():
            theirs = state[name]
            if not isinstance(theirs, Tensor) or theirs.shape != mine.shape or theirs.is_floating_point() != mine.is_floating_point():
                found = f"{theirs.dtype} of shape {tuple(theirs.shape)}" if isinstance(theirs, Tensor) else repr(theirs)
                raise ValueError(f"{owner}: {name!r} of the state must be {mine.dtype} of shape {tuple(mine.shape)}, got {found}")
            if theirs.device.type != "meta" and not bool(theirs.isfinite().all()):
                raise ValueError(f"{owner}: {name!r} of the state holds values that are not finite")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, mine in self._tensors.items():
            mine.copy_(state[name])


class LearnedDensity(Sampler):
    """A density that is constant on n equal cells of time and changes during training. Subclasses are dataclasses with a `floor`.

    p = (1-floor)·p* + floor·base on the cells, where p* is the density passed to `set_density_`. So no importance weight base/p exceeds
    1/floor if the base is constant within each cell. Until something is learned, p is the base on the cells. A Clock binds its own copy, which
    starts from the base; without a Clock the base is uniform.

    To write a subclass: define the number of `cells`, return the tensors to keep from `_statistics`, call `_begin` at the end of
    `__post_init__`, and call `set_density_` whenever there is a new estimate.
    """

    floor: float

    @property
    def corrects(self) -> bool:
        return True

    @property
    def learns(self) -> bool:
        return True

    @property
    @abstractmethod
    def cells(self) -> int:
        """The number n of cells."""

    def _statistics(self) -> dict[str, Tensor]:
        """The tensors that the sampler learns with, on the CPU; they are moved and saved together with the density."""
        return {}

    def __post_init__(self) -> None:
        take_finite(self, "floor")
        if not 0 < self.floor < 1:
            raise ValueError(f"{type(self).__name__}: floor must lie between 0 and 1, got {self.floor}")

    def _begin(self, base: Sampler | None = None, steps: int = 0) -> None:
        """Start from the base, with empty statistics. steps: the number of steps of the schedule, 0 in continuous time."""
        self.base = Uniform() if base is None else base
        self._health = Health()
        self._told: Later | None = None  # numbers for the next health check, on their way to the host
        with lasting():
            pmf = torch.zeros(self.cells, dtype=torch.float64, device="cpu")
            self._buffers = Buffers(pmf=pmf, **self._statistics())
            # derived from pmf: written together with it, not saved
            self._tables = Buffers(borders=pmf.new_zeros(self.cells + 1), lines=pmf.new_zeros(5, self.cells), log_pmf=pmf.new_zeros(steps))
            self._write(self._base_cells())

    def bind(self, setting: Setting) -> Self:
        bound: Self = replace(self)  # type: ignore[type-var]  # every subclass is a dataclass
        bound._begin(setting.base, setting.schedule.steps or 0)
        return bound

    # --- the density --------------------------------------------------------------------------------------------------------------------

    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        v = take_uniforms(n, x0, uniforms, generator)
        return Draw(*cells_icdf(self._on(v.device, "borders"), self._on(v.device, "lines"), v))

    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        time = unit_time(time)
        return cells_log_prob(self._on(time.device, "pmf"), time)

    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        log_pmf = self._on(step.device, "log_pmf")
        if len(log_pmf) == steps:
            return log_pmf[step]
        return self._log_pmf(step, steps, self._on(step.device, "pmf"), self._on(step.device, "borders"))

    @staticmethod
    def _log_pmf(step: Tensor, steps: int, pmf: Tensor, borders: Tensor) -> Tensor:
        n = len(pmf)
        if n == steps:
            mass = pmf[step]
        else:
            # the ends t/T and (t+1)/T of a step in units of cells, as quotient and remainder: integers have no rounding errors
            start, stop = step * n, (step + 1) * n
            first, last = start // steps, (stop // steps).clamp(max=n - 1)
            before, after = ((place - i * steps).to(pmf.dtype) / steps for place, i in ((start, first), (stop, last)))
            mass = cells_mass(pmf, borders, first, before, last, after)
        return mass.clamp(min=TINY).log()

    def _on(self, device: torch.device, name: str) -> Tensor:
        """A table of the density. For another device each call makes a new copy: only plots and the first step need that."""
        table = self._buffers["pmf"] if name == "pmf" else self._tables[name]
        return table if table.device == device else table.to(device, wide(device))

    def update(self, batch: Batch, losses: Tensor) -> None:
        # a sampler that does not learn from losses must move too: after a resume every draw would copy it to the device until its next probe
        self._move_(losses.device)

    def _move_(self, device: torch.device) -> None:
        self._buffers.move_(device)
        self._tables.move_(device)

    def _base_cells(self) -> Tensor:
        """(n,) the probabilities of the cells under the base; recomputed at each call, because the base may be annealed."""
        index = torch.arange(self.cells, device=self._buffers.device)
        base = self.base.log_pmf(index, self.cells).exp()
        return base / base.sum()

    @torch.no_grad()
    def set_density_(self, wanted: Tensor, known: Tensor) -> None:
        """Set p to (1-floor)·p* + floor·base, p* ∝ wanted (n,) >= 0; to the base unless `known` (0-d, bool) and wanted can be normalised."""
        mixed = self._mixed(wanted)
        self._write(torch.where(known & mixed.isfinite().all(), mixed, self._base_cells()))

    def _mixed(self, wanted: Tensor) -> Tensor:
        """(n,) (1-floor)·p* + floor·base with p* ∝ max(wanted, 0), not finite if wanted cannot be normalised."""
        wanted = wanted.clamp(min=0)  # errors of the user's own may be negative
        total = wanted.sum()
        return (1 - self.floor) * wanted / torch.where(total > TINY, total, 0.0) + self.floor * self._base_cells()

    def _write(self, pmf: Tensor) -> None:
        self._buffers["pmf"].copy_(pmf / pmf.sum())
        self._tabulate()

    def _tabulate(self) -> None:
        """Recompute the tables that every draw reads, from the current probabilities."""
        pmf, borders, log_pmf = self._buffers["pmf"], self._tables["borders"], self._tables["log_pmf"]
        borders[1:].copy_(running_sum(pmf).clamp(max=1))
        borders[-1:].fill_(1.0)
        self._tables["lines"].copy_(cells_lines(pmf, borders))
        if steps := len(log_pmf):
            log_pmf.copy_(self._log_pmf(torch.arange(steps, device=pmf.device), steps, pmf, borders))

    # --- health -------------------------------------------------------------------------------------------------------------------------

    def ess(self) -> float:
        """The effective sample size of the importance weights as a share of the batch, 1/E_p[(base/p)²] over the cells; reads the device.

        1 if p is the base, and never below `floor`.
        """
        return float(self._ess())

    def _ess(self) -> Tensor:
        return 1 / (self._base_cells().square() / self._buffers["pmf"].clamp(min=TINY)).sum()

    @property
    def info(self) -> dict[str, Any]:
        return {"ess": self.ess()}

    def _check_health(self, skipped: Tensor) -> None:
        """Warn of a small effective sample size and of `skipped` losses (0-d, their number); late, because it does not wait for the device."""
        if self._health.said >= {"ess", "skipped"}:
            return
        if self._told is None and skipped.device.type != "meta":
            self._told = Later(torch.stack([self._ess(), skipped.to(self._buffers["pmf"].dtype)]))
        if self._told is None or not self._told.arrived:
            return
        (ess, lost), self._told = self._told.read().tolist(), None
        if ess < LEAST_ESS:
            self._health.warn(
                "ess",
                f"{type(self).__name__}: the importance weights leave an effective sample size of {ess:.1%} of the batch, so a few samples decide "
                f"each gradient; raise floor (now {self.floor:g}: the effective size is never below it)",
            )
        if lost > 0:
            self._health.warn(
                "skipped", f"{type(self).__name__}: {lost:.0f} losses were not finite and were skipped; check the model and its precision"
            )

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {**self._buffers.state_dict(), **self._counters()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; a state that does not fit is refused before anything is changed."""
        mine, name = self.state_dict(), type(self).__name__
        if set(state) != set(mine):
            raise ValueError(f"{name}: its state must hold {', '.join(sorted(mine))}, got {', '.join(sorted(map(str, state))) or 'nothing'}")
        self._buffers.check(state, name)
        pmf = state["pmf"]
        if pmf.device.type != "meta" and not (bool((pmf >= 0).all()) and abs(float(pmf.sum()) - 1) < 1e-6):  # float32 on some devices
            raise ValueError(f"{name}: the state is damaged: its probabilities add up to {float(pmf.sum()):g}")
        counters = {key: state[key] for key in self._counters()}
        for key, value in counters.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}: {key!r} of the state must be a whole number, got {value!r}")
        self._buffers.load_state_dict(state)
        self._tabulate()
        self._load_counters(counters)

    def _counters(self) -> dict[str, int]:
        """Integers on the host that belong to the state."""
        return {}

    def _load_counters(self, counters: dict[str, int]) -> None: ...
