"""Noise schedules: a schedule is a function of time.

    x_t = a(u)·x0 + s(u)·eps,   u in [0, 1],   SNR = a²/s²,   log-SNR λ = ln(a²/s²), falling in u.

A discrete schedule has T steps, betas β_t, α_t = 1-β_t and ᾱ_t = Π α; it is piecewise constant in time: u belongs to step floor(u·T)
(u = 1 to the last), and a = √ᾱ, s = √(1-ᾱ) are those of the step. The time of a step is the middle of its cell, (t+½)/T, because t/T does
not survive a round trip through floating point. A continuous schedule (EDM, Flow) has no steps.

Everything is computed in float64 and returned in the dtype of `time`, float32 at least. Tensors of any shape and device are accepted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noiseclock.core.checks import brief, choose, take_positive, take_whole
from noiseclock.core.table import Table, cell, widen

Array = NDArray[np.float64]
VARIANCES = ("fixed-large", "fixed-small")
# SpeeD's convergence area is the tail where √(1-ᾱ) hardly rises: by less than 1e-4 per step at T = 1000, that is 0.1 per unit time.
CONVERGED_SLOPE = 0.1


def as_time(time: Tensor | float) -> Tensor:
    """`time` as a floating tensor. Values are checked on the CPU only: reading them from another device would synchronise."""
    if not isinstance(time, Tensor):
        time = torch.as_tensor(time, dtype=torch.float64, device="cpu")
    if not time.is_floating_point():
        raise TypeError(f"time must be floating point in [0, 1], got {time.dtype}; for integer steps use schedule.time_of(step)")
    if time.device.type == "cpu" and not bool(((time >= 0) & (time <= 1)).all()):
        hint = "; for integer steps use schedule.time_of(step)" if time.max() > 1 else ""
        raise ValueError(f"time must lie in [0, 1], got values from {time.min().item():g} to {time.max().item():g}{hint}")
    return time


class Level(NamedTuple):
    """The noise level at some times: a², s² (float64, the shape of `time`), with the time and the schedule."""

    a2: Tensor
    s2: Tensor
    time: Tensor
    schedule: Schedule

    @property
    def snr(self) -> Tensor:
        return self.a2 / self.s2

    @property
    def nsr(self) -> Tensor:
        """1/SNR, which stays finite where the SNR is infinite."""
        return self.s2 / self.a2


class Posterior(NamedTuple):
    """q(x_prev | x_t, x0) = N(x0·`x0` + x_t·`x_t`, `variance`); `large` is the variance of the forward step x_prev -> x_t (β_t in DDPM)."""

    x0: Tensor
    x_t: Tensor
    variance: Tensor
    large: Tensor


class Increments(NamedTuple):
    """SpeeD's view of the process, one value per step: how much x_{t+1} - x_t varies and how fast that changes.

    variance: Ψ_t = 2 - ᾱ_t - ᾱ_{t+1}, as the paper defines it (the last step uses its own ᾱ twice).
    change: the slope of 1-ᾱ per step. It is half the slope of Ψ, centred on the step itself; SpeeD's weight follows it.
    speed: the slope of √(1-ᾱ) per step, which tells where the process has converged.
    """

    variance: Array
    change: Array
    speed: Array


class Areas(NamedTuple):
    """SpeeD's three areas: acceleration [0, peak), deceleration [peak, converged), convergence [converged, T)."""

    peak: int
    converged: int


class Schedule(ABC):
    """x_t = a·x0 + s·eps as a function of time. `steps` is the number of discrete steps, None in continuous time."""

    steps: int | None = None

    def __str__(self) -> str:
        return brief(repr(self))

    @abstractmethod
    def level(self, time: Tensor) -> Level:
        """a² and s² in float64 at `time`. `time` is not checked, because every training step calls this."""

    @abstractmethod
    def inverse(self, log_snr: Tensor) -> Tensor:
        """The time at which the log-SNR is `log_snr`, clamped to the schedule's range."""

    @abstractmethod
    def slope(self, time: Tensor) -> Tensor:
        """|dλ/du|, how fast the log-SNR falls with time."""

    @abstractmethod
    def condition(self, time: Tensor) -> Tensor:
        """The noise level as the model receives it: the integer step, ln σ/4 (EDM) or the time itself (flow)."""

    @abstractmethod
    def posterior(self, time: Tensor, previous: Tensor | None = None) -> Posterior:
        """q(x_prev | x_t, x0) from `time` down to `previous` (in discrete time by default the step before)."""

    @abstractmethod
    def vlb(self, time: Tensor, *, target: str = "eps", variance: str = "fixed-large") -> Tensor:
        """c_t, the coefficient of the squared error in the variational bound, in nats; for the error of `eps` or of `x0`.

        Discrete: the coefficient of one step, β²/(2σ²α(1-ᾱ)) for eps, with σ² = β (fixed-large) or the posterior variance (fixed-small; step 0,
        whose posterior variance is 0, uses that of step 1). Continuous: ½|dλ/du| per unit time, for either variance.
        """

    def __call__(self, time: Tensor | float) -> tuple[Tensor, Tensor]:
        """(a, s) at `time`.

        >>> a, s = Flow()(torch.tensor([0.25, 1.0]))
        >>> a.tolist(), s.tolist()
        ([0.75, 0.0], [0.25, 1.0])
        """
        time = as_time(time)
        level = self.level(time)
        return _like(level.a2.sqrt(), time), _like(level.s2.sqrt(), time)

    def snr(self, time: Tensor | float) -> Tensor:
        """a²/s²: infinite where s = 0."""
        time = as_time(time)
        return _like(self.level(time).snr, time)

    def log_snr(self, time: Tensor | float) -> Tensor:
        """ln(a²/s²), from +∞ (no noise) to -∞ (no signal)."""
        time = as_time(time)
        level = self.level(time)
        return _like(level.a2.log() - level.s2.log(), time)

    def grid(self, points: int = 1000) -> Tensor:
        """(n,) times that cover the schedule evenly, float64: its steps, or `points` midpoints in continuous time."""
        n = self.steps or points
        return (torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) / n

    def increments(self) -> Increments:
        """SpeeD's quantities on `grid()`; if the schedule is not variance preserving, ᾱ = a²/(a²+s²)."""
        level = self.level(self.grid())
        alpha_bar = (level.a2 / (level.a2 + level.s2)).numpy()
        following = np.append(alpha_bar[1:], alpha_bar[-1])
        return Increments(2 - alpha_bar - following, np.gradient(1 - alpha_bar), np.gradient(np.sqrt(1 - alpha_bar)))

    def areas(self) -> Areas:
        """Where acceleration and deceleration end, as indices into `grid()`.

        >>> Linear().areas()
        Areas(peak=219, converged=641)
        """
        increments = self.increments()
        peak = int(increments.change.argmax())
        slow = np.flatnonzero(increments.speed[peak:] * len(increments.speed) < CONVERGED_SLOPE)
        return Areas(peak, peak + int(slow[0]) if len(slow) else len(increments.speed))


def _check_order(time: Tensor, previous: Tensor | None) -> None:
    as_time(time)
    if previous is not None and as_time(previous).device.type == "cpu" and not bool((previous <= time).all()):
        raise ValueError("the posterior goes back in time: `previous` must not lie after `time`")


def _like(value: Tensor, time: Tensor) -> Tensor:
    return value.to(torch.promote_types(time.dtype, torch.float32))


class Discrete(Schedule):
    """T steps with betas; subclasses say how the betas are made.

    Public arrays, float64, (T,): `betas`, `alphas`, `alpha_bar`.
    """

    steps: int
    zero_terminal_snr: bool = False

    @abstractmethod
    def _make_betas(self) -> Array: ...

    @cached_property
    def betas(self) -> Array:
        betas = self._make_betas()
        return _zero_terminal(betas) if self.zero_terminal_snr else betas

    @cached_property
    def alphas(self) -> Array:
        return 1 - self.betas

    @cached_property
    def alpha_bar(self) -> Array:
        return np.asarray(np.cumprod(self.alphas), dtype=np.float64)

    def __post_init__(self) -> None:
        take_whole(self, "steps", least=2)
        self._check_betas()

    def _check_betas(self) -> None:
        betas = self._make_betas()
        # ᾱ must fall too: a beta below 1e-16 is lost in rounding
        bad = ~((betas > 0) & (betas < 1) & (np.diff(np.cumprod(1 - betas), prepend=1.0) < 0))
        bad[-1] &= betas[-1] != 1  # only the last step may destroy the signal entirely
        if bad.any():
            t = int(bad.argmax())
            raise ValueError(f"{type(self).__name__}: noise must increase at every step, so 0 < beta < 1; step {t} has beta = {betas[t]:g}")

    def step(self, time: Tensor) -> Tensor:
        """floor(u·T) as int64, with u = 1 in the last step."""
        return cell(time, self.steps)

    def time_of(self, step: Tensor | int) -> Tensor:
        """The middle of the step's cell, (t+½)/T, float64."""
        if not isinstance(step, Tensor):
            step = torch.as_tensor(step, device="cpu")
        if step.is_floating_point():
            raise TypeError(f"step must be an integer tensor, got {step.dtype}")
        if step.device.type == "cpu" and not bool(((step >= 0) & (step < self.steps)).all()):
            raise ValueError(f"step must lie in 0..{self.steps - 1}, got values from {step.min().item()} to {step.max().item()}")
        return (widen(step) + 0.5) / self.steps

    def condition(self, time: Tensor) -> Tensor:
        return self.step(as_time(time))

    def level(self, time: Tensor) -> Level:
        alpha_bar = self._look_up("alpha_bar", time)
        return Level(alpha_bar, 1 - alpha_bar, time, self)

    def inverse(self, log_snr: Tensor) -> Tensor:
        """The time of the step whose log-SNR is nearest."""
        borders = self._tables["borders"].on(log_snr.device)
        # λ falls with the step and searchsorted wants rising values, so both are negated
        step = torch.searchsorted(-borders, -log_snr.to(borders.dtype).contiguous(), right=True)
        return _like(self.time_of(step), log_snr)

    def slope(self, time: Tensor) -> Tensor:
        return _like(self._look_up("slope", as_time(time)), time)

    def posterior(self, time: Tensor, previous: Tensor | None = None) -> Posterior:
        _check_order(time, previous)
        alpha_bar = self._look_up("alpha_bar", time)
        if previous is None:
            before, alpha = self._look_up("alpha_bar_before", time), self._look_up("alphas", time)
        else:
            before = self._look_up("alpha_bar", previous)
            alpha = alpha_bar / before
        noise, beta = 1 - alpha_bar, 1 - alpha
        parts = before.sqrt() * beta / noise, alpha.sqrt() * (1 - before) / noise, beta * (1 - before) / noise, beta
        return Posterior(*(_like(part, time) for part in parts))

    def vlb(self, time: Tensor, *, target: str = "eps", variance: str = "fixed-large") -> Tensor:
        choose("variance", variance, VARIANCES)
        choose("target of the VLB coefficient", target, ("eps", "x0"))
        return _like(self._look_up(f"vlb {target} {variance}", as_time(time)), time)

    def _look_up(self, name: str, time: Tensor) -> Tensor:
        return self._tables[name].on(time.device)[self.step(time)]

    @cached_property
    def _tables(self) -> dict[str, Table]:
        beta, alpha, alpha_bar = self.betas, self.alphas, self.alpha_bar
        before = np.append(1.0, alpha_bar[:-1])
        with np.errstate(divide="ignore"):  # zero terminal SNR: ln 0 = -∞ is correct
            log_snr = np.log(alpha_bar) - np.log1p(-alpha_bar)
        # at zero terminal SNR the last finite difference replaces the infinite one; with two steps there is none, and 1 is used
        fall = log_snr[-3] - log_snr[-2] if self.steps > 2 else 1.0
        finite = np.where(np.isfinite(log_snr), log_snr, log_snr[-2] - fall)
        tables = {
            "alpha_bar": alpha_bar,
            "alpha_bar_before": before,
            "alphas": alpha,
            "borders": (log_snr[1:] + log_snr[:-1]) / 2,
            "slope": np.abs(np.gradient(finite)) * self.steps,
        }
        small = beta * (1 - before) / (1 - alpha_bar)
        small[0] = small[1]
        for name, sigma2 in zip(VARIANCES, (beta, small), strict=True):
            tables[f"vlb x0 {name}"] = before * beta**2 / (2 * sigma2 * (1 - alpha_bar) ** 2)
            with np.errstate(divide="ignore"):  # at SNR 0 the coefficient for eps is infinite
                tables[f"vlb eps {name}"] = beta**2 / (2 * sigma2 * alpha * (1 - alpha_bar))
        return {name: Table(values) for name, values in tables.items()}


def _zero_terminal(betas: Array) -> Array:
    """Shift and scale √ᾱ so that it ends at 0 and keeps its first value (Lin et al., 2305.08891, Algorithm 1)."""
    root = np.sqrt(np.cumprod(1 - betas))
    root = (root - root[-1]) * root[0] / (root[0] - root[-1])
    alpha_bar = root**2
    return np.asarray(1 - alpha_bar / np.append(1.0, alpha_bar[:-1]))


@dataclass(frozen=True)
class _Spaced(Discrete):
    """β^(1/power) equally spaced."""

    steps: int = 1000
    beta_start: float = 1e-4
    beta_end: float = 0.02
    zero_terminal_snr: bool = False
    power: ClassVar[int]

    def __post_init__(self) -> None:
        take_positive(self, "beta_start", "beta_end")
        super().__post_init__()

    def _make_betas(self) -> Array:
        start, end = self.beta_start ** (1 / self.power), self.beta_end ** (1 / self.power)
        return np.asarray(np.linspace(start, end, self.steps, dtype=np.float64) ** self.power)


@dataclass(frozen=True)
class Linear(_Spaced):
    """β equally spaced (DDPM)."""

    power = 1


@dataclass(frozen=True)
class Quadratic(_Spaced):
    """√β equally spaced, with DDPM's ends."""

    power = 2


@dataclass(frozen=True)
class ScaledLinear(Quadratic):
    """√β equally spaced, with Stable Diffusion's ends; LDM's CelebA-HQ uses 0.0015 and 0.0195."""

    beta_start: float = 0.00085
    beta_end: float = 0.012


@dataclass(frozen=True)
class Cosine(Discrete):
    """ᾱ(u) = cos²((u+0.008)/1.008·π/2), β capped at 0.999 (Nichol & Dhariwal, 2102.09672)."""

    steps: int = 1000
    zero_terminal_snr: bool = False

    def _make_betas(self) -> Array:
        alpha_bar = np.cos((np.arange(self.steps + 1) / self.steps + 0.008) / 1.008 * np.pi / 2) ** 2
        return np.asarray(np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999))


@dataclass(frozen=True)
class Betas(Discrete):
    """Your own betas: a sequence, array or tensor of T values."""

    betas_given: Sequence[float]
    zero_terminal_snr: bool = False

    def __init__(self, betas: Sequence[float] | Array | Tensor, zero_terminal_snr: bool = False) -> None:
        values = np.asarray(betas.detach().cpu() if isinstance(betas, Tensor) else betas, dtype=np.float64)
        if values.ndim != 1:
            raise ValueError(f"Betas: betas must be one-dimensional, got shape {values.shape}")
        object.__setattr__(self, "betas_given", tuple(values.tolist()))
        object.__setattr__(self, "zero_terminal_snr", zero_terminal_snr)
        if len(values) < 2:
            raise ValueError(f"Betas: at least 2 steps are needed, got {len(values)}")
        self._check_betas()

    def __repr__(self) -> str:
        return f"Betas({list(self.betas_given)}, zero_terminal_snr={self.zero_terminal_snr})"

    @property
    def steps(self) -> int:  # type: ignore[override]  # a property here, a field in the other schedules
        return len(self.betas_given)

    def _make_betas(self) -> Array:
        return np.asarray(self.betas_given, dtype=np.float64)


class Continuous(Schedule):
    """A schedule without steps; subclasses give a, s, λ⁻¹ and |dλ/du| in closed form."""

    def posterior(self, time: Tensor, previous: Tensor | None = None) -> Posterior:
        if previous is None:
            raise ValueError(f"{type(self).__name__} has no steps: pass the earlier time to posterior as `previous`")
        _check_order(time, previous)
        now, then = self.level(time), self.level(previous)
        alpha2 = now.a2 / then.a2
        large = now.s2 - alpha2 * then.s2  # the noise that the forward process adds between the two times
        parts = then.a2.sqrt() * large / now.s2, alpha2.sqrt() * then.s2 / now.s2, large * then.s2 / now.s2, large
        return Posterior(*(_like(part, time) for part in parts))

    def vlb(self, time: Tensor, *, target: str = "eps", variance: str = "fixed-large") -> Tensor:
        choose("variance", variance, VARIANCES)
        choose("target of the VLB coefficient", target, ("eps", "x0"))
        half = self.slope(as_time(time)) / 2
        if target == "eps":
            return half
        return half.clamp(max=1e30) * _like(self.level(time).snr, time)  # at the noisy end of a flow the slope is infinite and the SNR is 0


@dataclass(frozen=True)
class EDM(Continuous):
    """Variance exploding, x_t = x0 + σ·eps, with ln σ linear in time (Karras et al., 2206.00364). The model receives ln σ/4.

    >>> EDM().log_snr(torch.tensor([0.0, 1.0])).exp().rsqrt()
    tensor([2.0000e-03, 8.0000e+01])
    """

    sigma_min: float = 0.002
    sigma_max: float = 80.0

    def __post_init__(self) -> None:
        take_positive(self, "sigma_min", "sigma_max")
        if self.sigma_min >= self.sigma_max:
            raise ValueError(f"EDM: noise must increase, but sigma_min = {self.sigma_min} is not below sigma_max = {self.sigma_max}")

    @property
    def _range(self) -> float:
        return math.log(self.sigma_max / self.sigma_min)

    def log_sigma(self, time: Tensor) -> Tensor:
        """ln σ, float64."""
        return math.log(self.sigma_min) + self._range * widen(time)

    def level(self, time: Tensor) -> Level:
        log_sigma = self.log_sigma(time)
        return Level(torch.ones_like(log_sigma), (2 * log_sigma).exp(), time, self)

    def inverse(self, log_snr: Tensor) -> Tensor:
        log_sigma = -widen(log_snr) / 2
        return _like(((log_sigma - math.log(self.sigma_min)) / self._range).clamp(0, 1), log_snr)

    def slope(self, time: Tensor) -> Tensor:
        return _like(torch.full_like(widen(as_time(time)), 2 * self._range), time)

    def condition(self, time: Tensor) -> Tensor:
        return (self.log_sigma(as_time(time)) / 4).float()


@dataclass(frozen=True)
class Flow(Continuous):
    """Rectified flow, x_t = (1-u)·x0 + u·eps. The model receives `condition_scale`·u (1000 in many released checkpoints)."""

    condition_scale: float = 1.0

    def __post_init__(self) -> None:
        take_positive(self, "condition_scale")

    def level(self, time: Tensor) -> Level:
        u = widen(time)
        return Level((1 - u) ** 2, u**2, time, self)

    def inverse(self, log_snr: Tensor) -> Tensor:
        return _like(torch.sigmoid(-widen(log_snr) / 2), log_snr)

    def slope(self, time: Tensor) -> Tensor:
        u = widen(as_time(time))
        return _like(2 / (u * (1 - u)), time)

    def condition(self, time: Tensor) -> Tensor:
        return (widen(as_time(time)) * self.condition_scale).float()
