"""Losses by time as no model makes them, and what samplers that learn from them are looked at with."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

import noiseclock as nc

T = 1000
LINEAR, COSINE, FLOW = (nc.schedule(name) for name in ("linear", "cosine", "flow"))
SMALL = nc.schedule("linear", steps=20)


def error_level(time: torch.Tensor) -> torch.Tensor:
    """A loss that falls over three orders of magnitude."""
    return 1e-3 + torch.exp(-7 * time)


def log_pmf(sampler: nc.Sampler, steps: int = T) -> torch.Tensor:
    """(steps,) of all steps."""
    return sampler.log_pmf(torch.arange(steps), steps)


def caught(action: Callable[[], object]) -> list[str]:
    """The warnings that an action gives."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in seen]
