"""Every sampler by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from noiseclock.core.checks import resolve
from noiseclock.core.samplers import Beta, CosMap, LogitNormal, Mode, Sampler, Uniform
from noiseclock.core.scheduled import LogNormal, LogSNRNormal, SpeeD
from noiseclock.core.wrappers import Annealed, Mixture, Shifted, Truncated

SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "logit-normal": LogitNormal,
    "mode": Mode,
    "cosmap": CosMap,
    "beta": Beta,
    "log-normal": LogNormal,
    "log-snr-normal": LogSNRNormal,
    "speed": SpeeD,
    "shifted": Shifted,
    "truncated": Truncated,
    "mixture": Mixture,
    "annealed": Annealed,
}


def sampler(name: str | Sampler, **options: Any) -> Sampler:
    """The sampler called `name`, with its options.

    >>> sampler("speed", k=3.0)
    SpeeD(k=3.0, tau='auto', variant='paper', schedule=None)
    """
    return resolve("sampler", name, Sampler, SAMPLERS, options)
