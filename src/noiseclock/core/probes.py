"""Probes: the model's current loss at chosen times, measured without changing the model."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noiseclock.core import ranks
from noiseclock.core.batch import Predict, call, noised
from noiseclock.core.conditioning import map_tensors, take_rows
from noiseclock.core.health import warn
from noiseclock.core.objectives import Objective, squared_error
from noiseclock.core.ranks import sharded
from noiseclock.core.schedules import Schedule
from noiseclock.core.streams import GOLDEN, finalize
from noiseclock.core.table import lasting, wide

Measured = TypeVar("Measured")
HALF = (torch.bfloat16, torch.float16)
FEW = 2  # samples that show which parameters a loss depends on
MIXED = re.compile(r"\bd?type\b.*([Ff]loat|[Hh]alf)", re.DOTALL)  # in torch's errors about tensors of different precision


@contextmanager
def undisturbed(modules: list[nn.Module], device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Evaluation mode without gradients; training flags and random states, also those of Python and numpy, are restored afterwards.

    seed: of the generators meanwhile; None to go on from where they are.
    """
    flags = {module: module.training for root in modules for module in root.modules()}
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that a user's model may draw from
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for module in flags:
                module.training = False
            if seed is not None:
                _seed(seed, device)
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that `undisturbed` restores; torch.manual_seed would seed those of all GPUs."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


@contextmanager
def full_precision(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Disable autocast, also that of accelerate, which wraps the model's forward in autocast and keeps the plain one as `_original_forward`.

    A model with parts in half precision may need autocast to run; then a sentence says what to do.
    """
    # a model that was compiled first forwards this attribute, but not its `forward`, to the module inside
    both = [(module.__dict__, getattr(module, "_orig_mod", module).__dict__) for root in modules for module in root.modules()]
    wrapped = [(own, own["forward"], inner["_original_forward"]) for own, inner in both if "forward" in own and "_original_forward" in inner]
    try:
        for own, _, plain in wrapped:
            own["forward"] = plain
        with torch.autocast(device.type, enabled=False):
            yield
    except RuntimeError as error:
        if not MIXED.search(str(error)):
            raise
        raise ValueError(
            f"a probe runs the model without autocast, which would round away what it measures, and there it fails: {error}. Let its frozen parts in "
            "half precision return float32, or pass what they compute as cond; if predict is a larger module, name the network that is trained: "
            "clock.attach(optimizer, model=model); or use a sampler that measures no derivatives, such as LossSecondMoment"
        ) from error
    finally:
        for own, forward, _ in wrapped:
            own["forward"] = forward


class Probe:
    """One model, measured before and after an optimiser update with the same data, noise and conditioning.

    x0 (B, ...), noise (N, ...): the probe's own, so that a replayed graph cannot change them in between. The model runs as in training, with raw
    weights and the same autocast (a dtype or None), but in evaluation mode: `modules`, the trained ones, and `others` that run beside them. All
    forward passes have one size, so that nothing recompiles: the batch size, which needs no more memory than a training step, or equal parts of at
    most `rows` samples. If memory still runs out, `rows` is halved until it suffices. optimizers: the model's, if known. seed: of the random numbers
    that a sampler needs besides the noise, and of the model's own, which are the same before and after; another one for each probe, rank and seed of
    the clock. lost: was the update skipped? (0-d, bool) on the device, if only the device knows; None if the update was made.
    """

    def __init__(
        self,
        predict: Predict,
        schedule: Schedule,
        objective: Objective,
        x0: Tensor,
        cond: Any = None,
        *,
        noise: Tensor,
        modules: list[nn.Module],
        others: Sequence[nn.Module] = (),
        autocast: torch.dtype | None = None,
        rows: int | None = None,
        optimizers: Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        # DDP's forward would broadcast its buffers, and a probe has no gradients to reduce
        self.predict = predict.module if isinstance(predict, DistributedDataParallel) else predict
        self.schedule, self.objective = schedule, objective
        with lasting():
            # the caller may change them before the probe is over, as a loop with fixed buffers does, or a model that drops labels in place
            self.x0, self.cond = x0.detach().clone(), map_tensors(lambda x: x.detach().clone(), cond)
        self.noise = noise
        self.modules, self.others, self.resting = modules, others, [*modules, *others]
        self.autocast, self.rows, self._filled_up = autocast, rows or len(noise), rows is None
        self.lowered: list[int] = []  # `rows` each time that memory ran out; copies of a probe share this list
        self.optimizers, self.seed = optimizers, seed
        self._chance = finalize(seed + GOLDEN) // 2  # hashed: the sampler draws with the plain seed
        if self._sharded:  # a model that skips a block by chance must skip it on all ranks, because they gather its parameters together
            self._chance = int(ranks.from_first(torch.tensor(self._chance, device=x0.device)))
        self.lost: Tensor | None = None
        self._exact = False
        self._wide = not any(p.dtype in HALF for module in modules for p in module.parameters())

    def exact(self) -> Probe:
        """This probe without autocast, for differences that bfloat16 would round away."""
        other = copy(self)
        other._exact = True
        return other

    def shuffled(self) -> Tensor:
        """(B,) the rows of the batch in a random order, another one for each probe.

        A batch may be sorted, by class for example. Times are spread over the rows in this order, because a class that always met the same times
        would be mistaken for an effect of time.
        """
        return torch.randperm(len(self.x0), generator=torch.Generator(self.x0.device).manual_seed(self.seed % 2**63), device=self.x0.device)

    def losses(self, time: Tensor, rows: Tensor | None = None, noise_rows: Tensor | None = None) -> Tensor:
        """(N,) the unweighted loss at times (N,) of the samples `rows` (N,) with the noises `noise_rows` (N,).

        rows: by default sample i at time i. noise_rows: by default equal to `rows`. Each loss is one row of a forward pass, in chunks.
        """
        rows = torch.arange(len(self.x0), device=time.device) if rows is None else rows
        noise_rows = rows if noise_rows is None else noise_rows
        if not len(time) == len(rows) == len(noise_rows):
            raise ValueError(f"times, rows and noise rows must have the same length, got {len(time)}, {len(rows)} and {len(noise_rows)}")
        return self.within_memory(lambda: self._losses(time, rows, noise_rows))

    def used(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter] | None:
        """Those parameters that the model's loss depends on; None if it cannot be seen, as of a replayed graph or a sharded model.

        The graph of the loss tells, so few rows suffice. They must be few: a gradient in evaluation mode keeps all activations, because most models
        recompute them in training mode only. Two, because some models cannot take one. They may not reach every expert of a mixture, but the experts
        that they reach have the same optimiser.
        """
        if sharded(parameters):
            return None
        few = copy(self)
        few.rows = min(FEW, self.rows, len(self.x0))
        few.lowered = []  # passes without gradients have memory for more
        few.predict = getattr(self.predict, "_orig_mod", self.predict)
        return few.within_memory(lambda: few._used(parameters))

    def _used(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter] | None:
        rows = torch.arange(self.rows, device=self.x0.device)
        time = (rows.to(wide(rows.device)) + 0.5) / self.rows  # not one for all: there may be experts for noise levels
        # a compiled model would recompile for this size, and then for changing sizes
        with self.at_rest(), self._as_in_training(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            try:
                loss = self._chunk(time, rows, rows).sum()
                if not loss.requires_grad:
                    return None
                found = torch.autograd.grad(loss, parameters, allow_unused=True)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError:  # as of reentrant checkpoints, or of a model that takes a whole batch only
                return None
        return [p for p, gradient in zip(parameters, found, strict=True) if gradient is not None]

    def within_memory(self, measure: Callable[[], Measured]) -> Measured:
        """What `measure()` returns; if memory runs out, it is called again with half as many `rows`, which it must respect."""
        while True:
            try:
                return measure()
            except torch.OutOfMemoryError:
                # the ranks of a sharded model must make the same number of passes, so one rank alone cannot change its chunk size
                if self.rows == 1 or self._sharded:
                    raise
            self.rows = -(-self.rows // 2)
            self.lowered.append(self.rows)
            warn(f"a probe of the model ran out of memory; it continues with {self.rows} samples at a time")

    def _losses(self, time: Tensor, rows: Tensor, noise_rows: Tensor) -> Tensor:
        found = []
        parts = -(-len(time) // self.rows)
        size = self.rows if self._filled_up else -(-len(time) // parts)
        with self.at_rest(), self._as_in_training():
            for part in range(parts):
                # the last chunk is filled up with the first rows, so that every forward pass has the same shape
                chosen = torch.arange(part * size, (part + 1) * size, device=time.device) % len(time)
                found.append(self._chunk(time[chosen], rows[chosen], noise_rows[chosen]))
        return torch.cat(found)[: len(time)]

    def _chunk(self, time: Tensor, rows: Tensor, noise_rows: Tensor) -> Tensor:
        x_t, t, cond, target = self.inputs(time, rows, noise_rows, None if self._exact else self.autocast)
        prediction = call(self.predict, x_t, t, cond)
        return squared_error(prediction, target)

    def inputs(self, time: Tensor, rows: Tensor, noise_rows: Tensor, autocast: torch.dtype | None) -> tuple[Tensor, Tensor, Any, Tensor]:
        """x_t, t and cond for the model, and its target, at times (N,), for a forward pass with this autocast or without any.

        Autocast lets float32 layers take half-precision latents and embeddings; without it they refuse them, so these are converted.
        """
        x_t, target = noised(self.schedule, self.objective, self.x0[rows], self.noise[noise_rows], time)
        given = x_t, take_rows(self.cond, rows, len(self.x0))
        if autocast is None and self._wide:
            given = map_tensors(lambda x: x.float() if x.dtype in HALF else x, given)
        return given[0], self.schedule.condition(time), given[1], target

    def at_rest(self) -> AbstractContextManager[None]:
        """`undisturbed`, with the same random numbers each time: a difference between two passes is then one of the model."""
        return undisturbed(self.resting, self.x0.device, self._chance)

    @property
    def _sharded(self) -> bool:
        return any(sharded(list(module.parameters())) for module in self.modules)

    def _as_in_training(self) -> Any:
        if self._exact:
            return full_precision(self.resting, self.x0.device)
        return uncached(self.x0.device, self.autocast)


def uncached(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype, or none for None, without its weight cache, which would hold the weights from before an update."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the active autocast on this device, None if autocast is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
