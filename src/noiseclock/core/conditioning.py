"""Conditioning of a batch, in whatever structure the model takes it: its tensors, and the parts of some samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import isroutine
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

MOST_NUMBERS = 6  # in a tuple that describes the whole batch, such as a size and a crop
Met = dict[int, tuple[Any, Any]]  # by id: a thing, which is held so that no id is used twice, and what became of it


def _rebuilt(thing: Any, f: Callable[[Any], Any], wanted: Callable[[Any], bool], met: Met) -> Any:
    """`thing` with f applied to each part of a mapping, a sequence, a dataclass, or an object with something wanted in it; else unchanged.

    met: what has been met before, and what became of it; so a circle of references ends, and stays a circle if it goes through an object.
    """
    if id(thing) not in met:
        met[id(thing)] = thing, thing
        met[id(thing)] = thing, _parts(thing, f, wanted, met)
    return met[id(thing)][1]


def _parts(thing: Any, f: Callable[[Any], Any], wanted: Callable[[Any], bool], met: Met) -> Any:
    if isinstance(thing, Mapping):
        items = {name: f(value) for name, value in thing.items()}
        try:
            return type(thing)(items)  # type: ignore[call-arg]  # its items may be attributes too
        except TypeError:
            return items
    if isinstance(thing, (list, tuple)):
        parts = [f(value) for value in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    if isinstance(thing, (nn.Module, type)) or not (is_dataclass(thing) or _holds(thing, wanted, {})):
        return thing
    other = copy(thing)
    met[id(thing)] = thing, other
    if is_dataclass(thing):
        for field in fields(thing):
            object.__setattr__(other, field.name, f(getattr(thing, field.name)))
    else:
        vars(other).update({name: f(value) for name, value in vars(thing).items()})
    return other


def _holds(thing: Any, wanted: Callable[[Any], bool], seen: dict[int, Any]) -> bool:
    """Is it or anything in it wanted? Modules, functions and the like are not looked into: they are no data."""
    if id(thing) in seen:
        return False
    seen[id(thing)] = thing  # held, so that no id is used twice
    if wanted(thing):
        return True
    if isinstance(thing, Mapping):
        inside: Iterable[Any] = thing.values()
    elif isinstance(thing, (list, tuple)):
        inside = thing
    elif isinstance(thing, (Tensor, nn.Module, type, ModuleType)) or isroutine(thing):
        inside = ()
    else:
        inside = getattr(thing, "__dict__", {}).values()
    return any(_holds(part, wanted, seen) for part in inside)


def map_tensors(f: Callable[[Tensor], Tensor], thing: Any) -> Any:
    """`thing` with f applied to every tensor in it, through mappings, sequences, dataclasses and objects that hold tensors."""
    met: Met = {}

    def mapped(part: Any) -> Any:
        return f(part) if isinstance(part, Tensor) else _rebuilt(part, mapped, lambda inner: isinstance(inner, Tensor), met)

    return mapped(thing)


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
    met: Met = {}

    def of_samples(part: Any) -> bool:
        return has_rows(part, batch) or _listed(part, batch)

    def taken(part: Any) -> Any:
        if not of_samples(part):
            return part if isinstance(part, Tensor) else _rebuilt(part, taken, of_samples, met)
        if isinstance(part, Tensor):
            return part[rows.to(part.device)]  # rows on a GPU cannot index a tensor on the host
        return part[rows.cpu().numpy()] if isinstance(part, np.ndarray) else type(part)(part[i] for i in rows.tolist())

    return taken(cond)


def has_rows(thing: Any, batch: int) -> bool:
    """Is it a tensor or array with one row for each sample?"""
    return isinstance(thing, (Tensor, np.ndarray)) and thing.ndim > 0 and len(thing) == batch


def _listed(thing: Any, batch: int) -> bool:
    return isinstance(thing, (list, tuple)) and not hasattr(thing, "_fields") and len(thing) == batch and _one_for_each(thing)


def _one_for_each(items: Sequence[Any]) -> bool:
    """Is there one item per sample: captions, labels, or embeddings of different lengths, None where guidance drops the condition?

    If n tensors have n rows each, every one of them is a whole batch. A short tuple of numbers is a single value, such as a size.
    """
    if tensors := [item for item in items if isinstance(item, (Tensor, np.ndarray))]:
        return not all(has_rows(tensor, len(items)) for tensor in tensors)
    value = isinstance(items, tuple) and len(items) <= MOST_NUMBERS
    allowed = (str, type(None)) if value else (str, type(None), int, float, Mapping, list, tuple)
    return all(isinstance(item, allowed) for item in items) and not any(_holds_rows(item, len(items)) for item in items)


def _holds_rows(thing: Any, batch: int) -> bool:
    """Is there a tensor inside with one row for each sample? Then `thing` is not of one sample."""
    return any(has_rows(x, batch) for x in tensors_in(thing))
