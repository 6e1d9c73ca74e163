"""From times to a batch that is ready for the model, and how a model is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseclock.core.objectives import Objective
from noiseclock.core.schedules import Schedule

Predict = Callable[..., Tensor]


@dataclass(frozen=True)
class Draw:
    """Drawn times and their log-probabilities.

    time: (B,) in [0, 1). log_prob: (B,) log density in time. log_pmf: (B,) log probability of the discrete step, if the schedule is discrete and
    the sampler has computed it already.
    """

    time: Tensor
    log_prob: Tensor
    log_pmf: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One batch, ready for the model.

    x0 (B, ...): the data. x_t (B, ...): the model's input, in the dtype of x0. t (B,): the noise level as the model receives it.
    target (B, ...): what the model should predict. noise (B, ...). time (B,): in [0, 1). weight (B,): the loss weight. correction (B,): base/p,
    1 if the loss is not corrected. cond: passed through. draw: the sampler's Draw, None if the caller chose the times.
    """

    x0: Tensor
    x_t: Tensor
    t: Tensor
    target: Tensor
    noise: Tensor
    time: Tensor
    weight: Tensor
    correction: Tensor
    cond: Any = None
    draw: Draw | None = None


def column(value: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, ...), to broadcast against `like` (B, ...), in the dtype of `like` but float32 at least."""
    return value.to(at_least_float32(like)).reshape(-1, *[1] * (like.ndim - 1))


def noised(schedule: Schedule, objective: Objective, x0: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """The model's input for x0 (B, ...) at times (B,), in the dtype of x0, and its target, float32 at least."""
    level = schedule.level(time)
    a, s = column(level.a2.sqrt(), x0), column(level.s2.sqrt(), x0)
    return objective.model_input(a * x0 + s * noise, a, s).to(x0.dtype), objective.target(x0, noise, a, s).to(a.dtype)


def call(predict: Predict, x_t: Tensor, t: Tensor, cond: Any) -> Tensor:
    """`predict(x_t, t)`; conditioning is passed as keywords if it is a mapping, else as a third argument."""
    if cond is None:
        return predict(x_t, t)
    return predict(x_t, t, **cond) if isinstance(cond, Mapping) else predict(x_t, t, cond)


def at_least_float32(x0: Tensor) -> torch.dtype:
    """The dtype of noise and targets for x0: that of x0, float32 at least."""
    return torch.promote_types(x0.dtype, torch.float32)


def check_batch(x0: Tensor, noise: Tensor | None) -> None:
    """Raise unless x0 is a batch of floating-point data and the noise, if given, is floating point of the same shape."""
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        kind = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
        hint = "; take the data out of it" if isinstance(x0, (list, tuple, Mapping)) else ""
        raise TypeError(f"x0 must be a floating-point tensor (images scaled to [-1, 1]), got {kind}{hint}")
    if x0.ndim < 2 or len(x0) == 0:
        raise ValueError(f"x0 must be a batch (B, ...) of at least one sample, got shape {tuple(x0.shape)}")
    if noise is not None and not isinstance(noise, Tensor):
        raise TypeError(f"noise must be a tensor like x0, got {type(noise).__name__}")
    if noise is not None and (noise.shape != x0.shape or not noise.is_floating_point()):
        raise ValueError(f"noise must be like x0, {x0.dtype} of shape {tuple(x0.shape)}, got {noise.dtype} of shape {tuple(noise.shape)}")
