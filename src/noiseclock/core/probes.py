"""Probes: the model's current loss at chosen times, measured without changing the model."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from noiseclock.core.batch import Predict, call, noised
from noiseclock.core.health import warn
from noiseclock.core.objectives import Objective, squared_error
from noiseclock.core.schedules import Schedule
from noiseclock.core.table import lasting

Measured = TypeVar("Measured")
HALF = (torch.bfloat16, torch.float16)
MOST = 100  # items of a sequence that are searched for labels


def modules_of(predict: Any) -> list[nn.Module]:
    """The modules that a callable runs: itself, the owner of a method, or those that a partial or a function refers to, decorated or not."""
    if isinstance(predict, nn.Module):
        return [predict]
    if isinstance(predict, functools.partial):
        candidates = [predict.func, *predict.args, *predict.keywords.values()]
        return [module for candidate in candidates for module in modules_of(candidate)]
    if inspect.ismethod(predict):
        return modules_of(predict.__self__)
    if inspect.isfunction(predict):
        seen = inspect.getclosurevars(inspect.unwrap(predict))
        return [value for value in (*seen.nonlocals.values(), *seen.globals.values()) if isinstance(value, nn.Module)]
    return []


def rows_held(predict: Any, batch: int) -> list[str]:
    """The names of values that a function, partial or module brings along and that have one row for each of `batch` samples: tensors and captions.

    Also in mappings and sequences, in defaults of arguments, and in those attributes of an object that the function's own code names.
    """
    held: dict[str, Any] = {}
    named: set[str] = set()
    if isinstance(predict, functools.partial):
        held = {**{f"argument {i}": value for i, value in enumerate(predict.args)}, **predict.keywords}
    elif inspect.isfunction(predict):
        predict = inspect.unwrap(predict)
        seen = inspect.getclosurevars(predict)
        # getclosurevars counts attribute names as globals, but `unet(x, t).sample` has nothing to do with a global `sample`
        names = {instruction.argval for instruction in dis.get_instructions(predict) if instruction.opname == "LOAD_GLOBAL"}
        given = {name: p.default for name, p in inspect.signature(predict).parameters.items() if p.default is not p.empty}
        held = {**{name: value for name, value in seen.globals.items() if name in names}, **seen.nonlocals, **given}
        named = set(predict.__code__.co_names)
    elif isinstance(predict, nn.Module) and inspect.isfunction(forward := inspect.getattr_static(type(predict), "forward", None)):
        held, named = {"it": predict}, set(forward.__code__.co_names)
    return [name for value_name, value in held.items() for name in _rows_in(value_name, value, batch, named)] if batch > 1 else []


def _rows_in(name: str, value: Any, batch: int, named: set[str], depth: int = 3) -> Iterator[str]:
    """The names of the parts of a value that have one row for each sample. named: the attributes of objects to look at."""
    if _has_rows(value, batch) or _captions(value, batch):
        yield name
    elif depth and isinstance(value, Mapping):
        for key, part in value.items():
            yield from _rows_in(f"{name}[{key!r}]", part, batch, named, depth - 1)
    elif depth and isinstance(value, (list, tuple)):
        for i, part in enumerate(value[:MOST]):
            yield from _rows_in(f"{name}[{i}]", part, batch, named, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        for key in sorted(named & vars(value).keys()):
            yield from _rows_in(f"{name}.{key}", vars(value)[key], batch, named, 0)


@contextmanager
def undisturbed(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Evaluation mode without gradients; training flags and random states are restored afterwards."""
    flags = {module: module.training for root in modules for module in root.modules()}
    with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for module in flags:
                module.training = False
            yield
        finally:
            for module, flag in flags.items():
                module.training = flag


@contextmanager
def full_precision(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Disable autocast, also that of accelerate, which wraps the model's forward in autocast and keeps the plain one as `_original_forward`."""
    # a model that was compiled first forwards this attribute, but not its `forward`, to the module inside
    both = [(module.__dict__, getattr(module, "_orig_mod", module).__dict__) for root in modules for module in root.modules()]
    wrapped = [(own, own["forward"], inner["_original_forward"]) for own, inner in both if "forward" in own and "_original_forward" in inner]
    try:
        for own, _, plain in wrapped:
            own["forward"] = plain
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for own, forward, _ in wrapped:
            own["forward"] = forward


def _parts(f: Callable[[Any], Any], thing: Any) -> Any:
    """`thing` with f applied to each part of a mapping, sequence or dataclass; anything else is returned unchanged."""
    if isinstance(thing, Mapping):
        return {name: f(value) for name, value in thing.items()}
    if isinstance(thing, (list, tuple)):
        parts = [f(value) for value in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    if is_dataclass(thing) and not isinstance(thing, type):
        other = copy(thing)
        for field in fields(thing):
            object.__setattr__(other, field.name, f(getattr(thing, field.name)))
        return other
    return thing


def map_tensors(f: Callable[[Tensor], Tensor], thing: Any) -> Any:
    """`thing` with f applied to every tensor in it, through mappings, sequences and dataclasses."""
    return f(thing) if isinstance(thing, Tensor) else _parts(lambda part: map_tensors(f, part), thing)


def tensors_in(thing: Any) -> list[Tensor]:
    """All tensors in it, found as by `map_tensors`."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_tensors(keep, thing)
    return found


def take_rows(cond: Any, rows: Tensor, batch: int) -> Any:
    """Conditioning for some rows of a batch, taken from every tensor or array with `batch` rows and every list with one item per sample."""
    if isinstance(cond, (Tensor, np.ndarray)):
        if not _has_rows(cond, batch):
            return cond
        return cond[rows] if isinstance(cond, Tensor) else cond[rows.cpu().numpy()]
    if isinstance(cond, (list, tuple)) and not hasattr(cond, "_fields") and len(cond) == batch and _one_for_each(cond):
        return type(cond)(cond[i] for i in rows.tolist())
    return _parts(lambda part: take_rows(part, rows, batch), cond)


def _has_rows(thing: Any, batch: int) -> bool:
    return isinstance(thing, (Tensor, np.ndarray)) and thing.ndim > 0 and len(thing) == batch


def _captions(thing: Any, batch: int) -> bool:
    return isinstance(thing, (list, tuple)) and len(thing) == batch and any(isinstance(item, str) for item in thing)


def _one_for_each(items: Sequence[Any]) -> bool:
    """Is there one item per sample: captions, labels, or embeddings of different lengths, None where guidance drops the condition?

    If n tensors have n rows each, every one of them is a whole batch. A tuple of numbers is a single value, such as a size.
    """
    if tensors := [item for item in items if isinstance(item, (Tensor, np.ndarray))]:
        return not all(_has_rows(tensor, len(items)) for tensor in tensors)
    allowed = (str, type(None)) if isinstance(items, tuple) else (str, type(None), int, float, Mapping, list, tuple)
    return all(isinstance(item, allowed) for item in items) and not any(_holds_rows(item, len(items)) for item in items)


def _holds_rows(thing: Any, batch: int) -> bool:
    """Is there a tensor inside with one row for each sample? Then `thing` is not of one sample."""
    return any(_has_rows(x, batch) for x in tensors_in(thing))


class Probe:
    """One model, measured before and after an optimiser update with the same data, noise and conditioning.

    x0 (B, ...), noise (N, ...): the probe's own, so that a replayed graph cannot change them in between. The model runs as in training, with raw
    weights and the same autocast (a dtype or None), but with `modules` in evaluation mode. All forward passes have one size, so that nothing
    recompiles: the batch size, which needs no more memory than a training step, or equal parts of at most `rows` samples. If memory still runs
    out, `rows` is halved until it suffices. optimizers: the model's, if known. seed: of the random numbers that a sampler needs besides
    the noise, another one for each probe, rank and seed of the clock. lost: was the update skipped? (0-d, bool) on the device, if only the device
    knows; None if the update was made.
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
        autocast: torch.dtype | None = None,
        rows: int | None = None,
        optimizers: Sequence[Any] = (),
        seed: int = 0,
    ) -> None:
        # DDP's forward would broadcast its buffers, and a probe has no gradients to reduce
        self.predict = predict.module if isinstance(predict, DistributedDataParallel) else predict
        self.schedule, self.objective = schedule, objective
        with lasting():
            self.x0 = x0.detach().clone()
        self.noise, self.cond = noise, cond
        self.modules, self.autocast, self.rows, self._filled_up = modules, autocast, rows or len(noise), rows is None
        self.lowered: list[int] = []  # `rows` each time that memory ran out; copies of a probe share this list
        self.optimizers, self.seed = optimizers, seed
        self.lost: Tensor | None = None
        self._exact = self._watched = False
        self._wide = not any(p.dtype in HALF for module in modules for p in module.parameters())
        if held := rows_held(predict, len(x0)):
            warn(
                f"predict holds {', '.join(held)}, with a row for each sample of the batch, but probes call it with other samples and batch sizes; "
                "pass per-sample inputs as cond, and let predict(x_t, t, cond) take them"
            )

    def exact(self, *, watched: bool = False) -> Probe:
        """This probe without autocast, for differences that bfloat16 would round away. watched: warn if the model uses half precision still."""
        other = copy(self)
        other._exact, other._watched = True, watched
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

    def within_memory(self, measure: Callable[[], Measured]) -> Measured:
        """What `measure()` returns; if memory runs out, it is called again with half as many `rows`, which it must respect."""
        while True:
            try:
                return measure()
            except torch.OutOfMemoryError:
                # the ranks of a sharded model must make the same number of passes, so one rank alone cannot change its chunk size
                if self.rows == 1 or any(hasattr(p, "device_mesh") for module in self.modules for p in module.parameters()):
                    raise
            self.rows = -(-self.rows // 2)
            self.lowered.append(self.rows)
            warn(f"a probe of the model ran out of memory; it continues with {self.rows} samples at a time")

    def _losses(self, time: Tensor, rows: Tensor, noise_rows: Tensor) -> Tensor:
        found = []
        parts = -(-len(time) // self.rows)
        size = self.rows if self._filled_up else -(-len(time) // parts)
        with undisturbed(self.modules, self.x0.device), self._as_in_training():
            for part in range(parts):
                # the last chunk is filled up with the first rows, so that every forward pass has the same shape
                chosen = torch.arange(part * size, (part + 1) * size, device=time.device) % len(time)
                found.append(self._chunk(time[chosen], rows[chosen], noise_rows[chosen]))
        return torch.cat(found)[: len(time)]

    def _chunk(self, time: Tensor, rows: Tensor, noise_rows: Tensor) -> Tensor:
        x_t, t, cond, target = self.inputs(time, rows, noise_rows, None if self._exact else self.autocast)
        noting = _NotingHalf()
        with noting if self._watched and _is_eager(self.predict) else nullcontext():
            prediction = call(self.predict, x_t, t, cond)
        halves = [*noting.found, *(x.dtype for x in tensors_in(prediction) if x.dtype in HALF)]
        if self._watched and halves:
            warn(
                f"the model computes in {halves[0]} with autocast switched off, so the small differences that this probe measures are mostly "
                "rounding errors; use autocast around the call of the model, not inside its forward, or let predict switch off the model's own half "
                "precision"
            )
        self._watched = False  # one pass is enough
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

    def _as_in_training(self) -> Any:
        if self._exact:
            return full_precision(self.modules, self.x0.device)
        return uncached(self.x0.device, self.autocast)


class _NotingHalf(TorchFunctionMode):
    """Notes the half-precision dtypes that torch's functions return."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.found.update(x.dtype for x in tensors_in(output) if x.dtype in HALF)
        return output


def _is_eager(predict: Predict) -> bool:
    """Are its modules known, and not compiled? Compiled code would be compiled once more under a function mode."""
    modules = {module for root in modules_of(predict) for module in root.modules()}
    compiled = any(hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None for module in modules)
    return bool(modules) and not compiled and not hasattr(predict, "_torchdynamo_orig_callable")


def uncached(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast to a dtype, or none for None, without its weight cache, which would hold the weights from before an update."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of the active autocast on this device, None if autocast is off."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
