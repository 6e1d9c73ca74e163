"""Looking at a model without touching it: its loss at chosen times, as it is now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from noiseclock.core.objectives import Objective, squared_error
from noiseclock.core.samplers import Sampler
from noiseclock.core.schedules import Schedule

Predict = Callable[..., Tensor]


def column(value: Tensor, like: Tensor) -> Tensor:
    """(B,) as (B, 1, ...), to be multiplied with `like` (B, ...), in its dtype but float32 at least."""
    return value.to(torch.promote_types(like.dtype, torch.float32)).reshape(-1, *[1] * (like.ndim - 1))


def call(predict: Predict, x_t: Tensor, t: Tensor, cond: Any) -> Tensor:
    """`predict(x_t, t)`, with conditioning: keywords if it is a mapping, else a third argument."""
    if cond is None:
        return predict(x_t, t)
    return predict(x_t, t, **cond) if isinstance(cond, Mapping) else predict(x_t, t, cond)


@contextmanager
def undisturbed(predict: Predict) -> Iterator[None]:
    """Evaluation mode without gradients; training flags and random states are afterwards what they were."""
    owner = predict if isinstance(predict, nn.Module) else getattr(predict, "__self__", None)
    modules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    flags = [module.training for module in modules]
    devices = {p.device for m in modules for p in m.parameters(recurse=False) if p.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=[d.index for d in devices]):
        try:
            for module in modules:
                module.training = False
            yield
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag


class Probe:
    """One model, seen before and after an optimiser update with the same data, noise and conditioning."""

    def __init__(self, predict: Predict, schedule: Schedule, objective: Objective, x0: Tensor, noise: Tensor, cond: Any) -> None:
        self.predict, self.schedule, self.objective = predict, schedule, objective
        self.x0, self.noise, self.cond = x0.detach(), noise.detach(), cond

    def losses(self, time: Tensor) -> Tensor:
        """(B,) the unweighted loss of each sample at its time (B,), by one forward of the model as it is now."""
        x_t, target = noised(self.schedule, self.objective, self.x0, self.noise, time)
        with undisturbed(self.predict):
            return squared_error(call(self.predict, x_t, self.schedule.condition(time), self.cond), target)


def noised(schedule: Schedule, objective: Objective, x0: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """What the model sees of x0 (B, ...) at times (B,), in the dtype of x0, and what it should predict, float32 at least."""
    level = schedule.level(time)
    a, s = column(level.a2.sqrt(), x0), column(level.s2.sqrt(), x0)
    return objective.model_input(a * x0 + s * noise, a, s).to(x0.dtype), objective.target(x0, noise, a, s)


@runtime_checkable
class Probing(Sampler, Protocol):
    """A sampler that looks at the model: every `every` updates it is shown a Probe before the update and again after it."""

    def before(self, probe: Probe) -> None: ...
    def after(self, probe: Probe) -> None: ...
