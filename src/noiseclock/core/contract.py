"""What every sampler promises, and a check of these promises.

A sampler states one density in three ways: by its draws, by `log_prob` in time and by `log_pmf` on steps. The importance weight of a draw is
computed from `log_prob` or `log_pmf`. If these disagree with the draws, a corrected loss is silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.samplers import TINY, Sampler
from noiseclock.core.schedules import Array
from noiseclock.core.wrappers import Mixture

DRAWS = 100_000
BELOW_ONE = math.nextafter(1, 0)


def check_sampler(sampler: Sampler, *, steps: int = 1000) -> None:
    """Raise a ValueError that names the first promise this sampler breaks; takes under a second.

    If a sampler needs a schedule or learns, check the one that a clock has bound: `check_sampler(clock.sampler)`. steps: number of equal steps of
    time. The density is integrated over each step, so it may jump at the borders of steps only.

    >>> from noiseclock.core.samplers import Uniform
    >>> check_sampler(Uniform())
    """
    for promise in PROMISES:
        promise(sampler, steps)


def _log_pmf(sampler: Sampler, steps: int) -> Tensor:
    return sampler.log_pmf(torch.arange(steps, device="cpu"), steps)


def _shares(time: Tensor, steps: int) -> Tensor:
    """(steps,) the share of the times in each step."""
    return torch.bincount((time * steps).floor().long(), minlength=steps) / len(time)


def _middles(n: int) -> Tensor:
    """(n,) the midpoints of n equal intervals of [0, 1)."""
    return (torch.arange(n, dtype=torch.float64, device="cpu") + 0.5) / n


def probabilities_sum_to_one(sampler: Sampler, steps: int) -> None:
    """`log_pmf` is a distribution, for any number of steps."""
    for n in (2, 37, steps):
        total = _log_pmf(sampler, n).exp().sum().item()
        if not abs(total - 1) < 1e-12:  # the sum of a thousand of them in float64 is exact to 1e-13
            raise ValueError(f"{sampler}: the probabilities of {n} steps add up to {total:.15g} and not to 1; log_pmf must be exact, in float64")


def density_has_the_probabilities(sampler: Sampler, steps: int) -> None:
    """The integral of `log_prob` over a step is its probability."""
    # Quadrature is exact up to rounding, except in the end cells of a density that diverges like 1/√u: 1-u⁸ loses digits near 1.
    difference = np.abs(_integrals(sampler, steps) - _log_pmf(sampler, steps).exp().numpy())
    if not difference.max() < 1e-9:
        step = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
        raise ValueError(
            f"{sampler}: log_prob integrated over step {step} of {steps} differs from log_pmf by {difference[step]:.2g}; "
            "if the density jumps within a step, as in bins, choose `steps` of check_sampler(sampler, steps=...) so that it jumps only between steps"
        )


def _integrals(sampler: Sampler, steps: int) -> Array:
    """(steps,) the integral of the density over each step: 24 Gauss-Legendre nodes, with u = w⁸ in the two end steps, where it may be infinite."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    nodes, weights = (nodes + 1) / 2, weights / 2

    def density(u: Array) -> Array:
        return np.asarray(sampler.log_prob(torch.as_tensor(u, device="cpu")).exp().numpy())

    total = np.empty(steps)
    total[1:-1] = (density((np.arange(1, steps - 1)[:, None] + nodes) / steps) * weights).sum(1) / steps
    powers, jacobian = nodes**8, 8 * nodes**7
    total[0] = (density(powers / steps) * weights * jacobian).sum() / steps
    total[-1] = (density(1 - powers / steps) * weights * jacobian).sum() / steps
    return total


def draws_follow_the_density(sampler: Sampler, steps: int) -> None:
    """Independent draws are distributed as `log_pmf` says."""
    time = sampler.sample(DRAWS, generator=torch.Generator("cpu").manual_seed(1)).time
    if time.shape != (DRAWS,) or time.dtype != torch.float64:
        raise ValueError(f"{sampler}: sample({DRAWS}) must give float64 times of shape ({DRAWS},), got {time.dtype} of {tuple(time.shape)}")
    distance = (_shares(time, steps).cumsum(0) - _log_pmf(sampler, steps).exp().cumsum(0)).abs().max().item()
    if not distance * math.sqrt(DRAWS) < 1.95:  # Kolmogorov-Smirnov test: a correct sampler fails once in 1000 times
        raise ValueError(f"{sampler}: {DRAWS:,} draws deviate from log_pmf by {distance:.3g} (Kolmogorov-Smirnov distance), more than by chance")


def even_uniforms_give_quantiles(sampler: Sampler, steps: int) -> None:
    """`sample` maps the given uniforms to quantiles, so that stratified uniforms give a stratified batch."""
    share = _shares(sampler.sample(DRAWS, uniforms=_middles(DRAWS)).time, steps)
    difference = (share - _log_pmf(sampler, steps).exp()).abs().max().item()
    # In each component the uniforms of a step form one interval, whose two ends change its count by less than one draw. A blend of blends has
    # three components, a step and its dual are two.
    if not difference < 4 / DRAWS:
        raise ValueError(f"{sampler}: with evenly spaced uniforms a step's share of draws is {difference:.2g} off; sample must use `uniforms`")


def draws_know_their_density(sampler: Sampler, steps: int) -> None:
    """`Draw.log_prob` is `log_prob` at the time drawn."""
    draw = sampler.sample(1000, generator=torch.Generator("cpu").manual_seed(0))
    difference = (draw.log_prob - sampler.log_prob(draw.time)).abs().max().item()
    if not difference < 1e-9:  # a sampler that inverts its map numerically loses a bit or two
        raise ValueError(f"{sampler}: the log_prob that comes with a draw differs from log_prob at its time by {difference:.2g}")


def ends_are_handled(sampler: Sampler, steps: int) -> None:
    """The smallest and the largest uniform give times inside the support, and the density there is a number."""
    ends = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64, device="cpu")
    drawn, (lo, hi) = sampler.sample(2, uniforms=ends).time, sampler.support
    if not bool(((drawn >= max(lo - 1e-12, 0)) & (drawn < 1) & (drawn <= hi)).all()):
        raise ValueError(f"{sampler}: uniforms of 0 and just below 1 give times {drawn.tolist()}, which must lie in [{lo:g}, {hi:g}] and below 1")
    log_prob = sampler.log_prob(torch.cat([ends, ends.clamp(max=1 - 2**-24)]))
    if bool(log_prob.isnan().any()) or ((lo, hi) == (0.0, 1.0) and not bool(log_prob.isfinite().all())):
        raise ValueError(f"{sampler}: log_prob must be finite at both ends of time, got {log_prob.tolist()}; clamp before a log")


def support_can_be_drawn(sampler: Sampler, steps: int) -> None:
    """Every step inside the declared support has a positive probability."""
    (lo, hi), borders = sampler.support, torch.arange(steps + 1, dtype=torch.float64, device="cpu") / steps
    inside = (borders[:-1] >= lo - 1e-9) & (borders[1:] <= hi + 1e-9)
    log_pmf, log_prob = _log_pmf(sampler, steps)[inside], sampler.log_prob(_middles(steps)[inside])
    if not bool((log_pmf > math.log(TINY) - 1e-6).all() & log_prob.isfinite().all()):
        raise ValueError(f"{sampler}: its support is [{lo:g}, {hi:g}], but some steps in it have no probability; narrow `support`, or add a floor")


def correction_has_mean_one(sampler: Sampler, steps: int) -> None:
    """E_p[base/p] = 1 by quadrature over the uniform; with a floor of 5 % the ratio is at most 20."""
    n = 2 * DRAWS
    mean = (-Mixture(sampler, floor=0.05).sample(n, uniforms=_middles(n)).log_prob).exp().mean().item()
    # the midpoint rule errs by at most (total variation of the ratio)/n; this allows ten rises and falls of 20
    if not abs(mean - 1) < 10 * 20 / n:
        raise ValueError(f"{sampler}: the mean importance weight is {mean:.4f} and not 1, so a corrected loss would be biased")


def chance_is_the_generators(sampler: Sampler, steps: int) -> None:
    """The same generator seed gives the same draws, another seed gives other draws."""
    first, second, other = (sampler.sample(50, generator=torch.Generator("cpu").manual_seed(seed)).time for seed in (3, 3, 4))
    if not torch.equal(first, second) or torch.equal(first, other):
        raise ValueError(f"{sampler}: draws must depend on the generator that is given, and on nothing else")


def state_comes_back(sampler: Sampler, steps: int) -> None:
    """A sampler loads its own state, and refuses a state that does not fit."""
    before = sampler.sample(20, uniforms=_middles(20)).time
    sampler.load_state_dict(sampler.state_dict())
    if not torch.equal(sampler.sample(20, uniforms=_middles(20)).time, before):
        raise ValueError(f"{sampler}: loading its own state changes what it draws")
    try:
        sampler.load_state_dict({"nonsense": 1})
    except ValueError:
        return
    raise ValueError(f"{sampler}: load_state_dict takes {{'nonsense': 1}} without an error; raise a ValueError for a state that does not fit")


def times_stay_on_their_device(sampler: Sampler, steps: int) -> None:
    """Times and their log_prob are on the device of the uniforms."""
    draw = sampler.sample(4, uniforms=torch.empty(4, device="meta", dtype=torch.float64))
    if not draw.time.device.type == draw.log_prob.device.type == "meta":
        raise ValueError(f"{sampler}: uniforms on a device must give times and log_prob on that device, got them on {draw.time.device}")


PROMISES: tuple[Callable[[Sampler, int], None], ...] = (
    probabilities_sum_to_one,
    density_has_the_probabilities,
    draws_follow_the_density,
    even_uniforms_give_quantiles,
    draws_know_their_density,
    ends_are_handled,
    support_can_be_drawn,
    correction_has_mean_one,
    chance_is_the_generators,
    state_comes_back,
    times_stay_on_their_device,
)
