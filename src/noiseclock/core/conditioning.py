"""Conditioning of a batch, in whatever structure the model takes it: its tensors, and the parts of some samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

MOST_NUMBERS = 6  # in a tuple that describes the whole batch, such as a size and a crop


def _parts(f: Callable[[Any], Any], thing: Any) -> Any:
    """`thing` with f applied to each part of a mapping, a sequence, a dataclass or a plain holder of data; anything else is returned unchanged."""
    if isinstance(thing, Mapping):
        items = {name: f(value) for name, value in thing.items()}
        try:
            return type(thing)(items)  # type: ignore[call-arg]  # its items may be attributes too
        except TypeError:
            return items
    if isinstance(thing, (list, tuple)):
        parts = [f(value) for value in thing]
        return type(thing)(*parts) if hasattr(thing, "_fields") else type(thing)(parts)
    if is_dataclass(thing) and not isinstance(thing, type):
        other = copy(thing)
        for field in fields(thing):
            object.__setattr__(other, field.name, f(getattr(thing, field.name)))
        return other
    if not callable(thing) and any(isinstance(value, (Tensor, np.ndarray)) for value in getattr(thing, "__dict__", {}).values()):
        other = copy(thing)
        vars(other).update({name: f(value) for name, value in vars(thing).items()})
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
        if not has_rows(cond, batch):
            return cond
        return cond[rows] if isinstance(cond, Tensor) else cond[rows.cpu().numpy()]
    if isinstance(cond, (list, tuple)) and not hasattr(cond, "_fields") and len(cond) == batch and _one_for_each(cond):
        return type(cond)(cond[i] for i in rows.tolist())
    return _parts(lambda part: take_rows(part, rows, batch), cond)


def has_rows(thing: Any, batch: int) -> bool:
    """Is it a tensor or array with one row for each sample?"""
    return isinstance(thing, (Tensor, np.ndarray)) and thing.ndim > 0 and len(thing) == batch


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
