"""What a user's callable refers to: the modules that it runs, and labels of the batch that it should be given as arguments instead."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import OutOfMemoryError, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noiseclock.core.conditioning import has_rows

MOST = 100  # items of a sequence or mapping that are looked at
LIMIT = 10_000  # values that are looked at
READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
Named = tuple[tuple[str, bool], ...]  # the attributes that code names, in its order: the name, and is it read first, not stored?
Parts = Iterator[tuple[str, Any, Named]]  # a name, a value, and what the code names that refers to it


def modules_of(predict: Any) -> list[nn.Module]:
    """The modules that a callable runs, as far as its code tells: itself, the owner of a method, or those that it or its helpers refer to."""
    return [value for _, value in reached(predict) if isinstance(value, nn.Module)]


def rows_held(predict: Any, batch: int) -> dict[str, Any]:
    """Tensors, arrays and captions, by name, that a callable refers to and that have one row for each of `batch` samples; no parameters."""
    return {name: value for name, value in reached(predict) if batch > 1 and not isinstance(value, nn.Parameter) and _labels(value, batch)}


class Labels:
    """Watches for labels of the batch in a callable: what has a row for each sample, and changes. What stays as it is only looks like them."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Any, Any]] = {}

    def look(self, predict: Any, batch: int) -> list[str]:
        """The names of those that have changed since the last look, at another batch."""
        before, self._seen = self._seen, {name: (value, _state(value)) for name, value in rows_held(predict, batch).items()}
        return [name for name, now in self._seen.items() if name in before and _changed(before[name], now)]


@contextmanager
def telling(predict: Any, batch: int) -> Iterator[None]:
    """If the model raises an error within, because it is called with other samples than those of the labels in predict, tell of these."""
    try:
        yield
    except OutOfMemoryError:
        raise
    except (RuntimeError, IndexError) as error:
        if held := rows_held(predict, batch):
            raise ValueError(told(list(held))) from error
        raise


def told(names: list[str]) -> str:
    """A sentence about such labels."""
    return (
        f"predict holds {', '.join(names)}, with a row for each sample of the batch, but probes call it with other samples and batch sizes; "
        "pass per-sample inputs as cond, and let predict(x_t, t, cond) take them"
    )


def reached(predict: Any) -> list[tuple[str, Any]]:
    """The names and values that a callable refers to: in closures, globals, defaults, partials and attributes, and through helpers; each value once.

    Modules are not looked into, but for the attributes that their own code names. What code stores before it reads it is left out.
    """
    own = _package(predict)
    found: dict[int, tuple[str, Any]] = {}  # by id; it holds the values, so that no id is used twice
    done: set[tuple[int, Named]] = set()
    left: deque[tuple[str, Any, Named]] = deque([("it", predict, ())])
    while left and len(done) < LIMIT:
        name, thing, named = left.popleft()
        if thing is not None and (id(thing), named) not in done and not isinstance(thing, (type, ModuleType)):
            done.add((id(thing), named))
            found.setdefault(id(thing), (name, thing))
            with suppress(Exception):  # of a mapping or attribute of the user's that cannot be read
                left.extend(_parts(name, thing, named, own))
    return list(found.values())


def _package(predict: Any) -> str:
    """The package of the user's callable: it may be installed too, and is looked into all the same."""
    code = predict.func if isinstance(predict, functools.partial) else predict
    of = code if isinstance(code, (FunctionType, MethodType)) else type(code)
    return "" if isinstance(code, nn.Module) else str(getattr(of, "__module__", "")).partition(".")[0]


def _parts(name: str, thing: Any, named: Named, own: str) -> Parts:
    if isinstance(thing, FunctionType):
        yield from _of_function(inspect.unwrap(thing), own)
    elif isinstance(thing, MethodType):
        yield "self", thing.__self__, _names(thing.__func__)
        yield name, thing.__func__, named
    elif isinstance(thing, functools.partial):
        yield name, thing.func, named
        for key, value in {**{f"argument {i}": value for i, value in enumerate(thing.args)}, **thing.keywords}.items():
            yield key, value, named
    elif isinstance(thing, nn.Module):
        inner = thing.module if isinstance(thing, DistributedDataParallel) else thing
        inner = getattr(inner, "_orig_mod", inner)  # of a compiled module
        for key, reads in _with_methods(inner, named, "forward", own)[0]:
            if reads and key in vars(inner):
                yield f"{name}.{key}", vars(inner)[key], ()
    elif isinstance(thing, Mapping):
        for key, value in islice(thing.items(), MOST):
            yield f"{name}[{key!r}]", value, named
    elif isinstance(thing, (list, tuple)):
        for i, value in enumerate(thing[:MOST]):
            yield f"{name}[{i}]", value, named
    elif not isinstance(thing, (Tensor, np.ndarray)) and (slots := _slots(thing)) is not None:
        named, methods = _with_methods(thing, named, "__call__", own)
        for key, reads in named:
            if reads and (key in getattr(thing, "__dict__", ()) or (key in slots and hasattr(thing, key))):
                yield f"{name}.{key}", getattr(thing, key), named
        for key, method in methods:
            yield f"{name}.{key}", method, named


def _with_methods(thing: Any, named: Named, called: str, own: str) -> tuple[Named, list[tuple[str, FunctionType]]]:
    """What some code names that calls `thing`, together with the methods that run then, of which `called` is one; and these methods, by name.

    In the order in which they run: an activation, which a model stores in an attribute before it reads it there, is no label of the user's.
    """
    first: dict[str, bool] = {name: reads for name, reads in named if not reads}  # before it calls `called`
    methods: dict[FunctionType, str] = {}

    def run(key: str) -> None:
        for method in _methods(thing, key, own):
            if method not in methods:
                methods[method] = key
                follow(_names(method))

    def follow(names: Named) -> None:
        for name, reads in names:
            if reads:
                run(name)
            first.setdefault(name, reads)

    run(called)
    follow(named)
    return tuple(first.items()), [(key, method) for method, key in methods.items()]


def _slots(thing: Any) -> set[str] | None:
    """The names of its slots; None if it has no attributes at all."""
    slots = {slot for kind in type(thing).__mro__ for slot in vars(kind).get("__slots__", ())}
    return slots if slots or hasattr(thing, "__dict__") else None


def _of_function(function: Any, own: str) -> Parts:
    """What the code of a function names: variables of functions around it, globals, and defaults of arguments."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing is assigned to it yet
            continue
    found |= {name: function.__globals__[name] for name in sorted(_globals(function.__code__) & function.__globals__.keys())}
    found |= {name: p.default for name, p in inspect.signature(function, follow_wrapped=False).parameters.items() if p.default is not p.empty}
    named = _names(function)
    for name, value in found.items():
        if not _of_a_library(value, own):
            yield name, value, named


def _of_a_library(value: Any, own: str) -> bool:
    """Is it a function of an installed package that is not the user's? Its globals are no business of the user's loop."""
    if not isinstance(value, FunctionType) or (own and value.__module__.partition(".")[0] == own):
        return False
    return any(folder in inspect.unwrap(value).__code__.co_filename for folder in ("site-packages", "dist-packages"))


def _methods(thing: Any, name: str, own: str) -> list[FunctionType]:
    """The functions behind a method or property that is written in Python, those of parent classes too."""
    found = [vars(kind).get(name) for kind in type(thing).__mro__]
    functions = (getattr(value, "fget", None) or getattr(value, "func", None) or getattr(value, "__func__", value) for value in found)
    return [function for function in functions if isinstance(function, FunctionType) and not _of_a_library(function, own)]


def _names(function: Any) -> Named:
    return _attributes(inspect.unwrap(function).__code__)


@functools.cache
def _attributes(code: CodeType) -> Named:
    """The attributes that this code names, and the functions defined in it."""
    first: dict[str, bool] = {}
    for step in dis.get_instructions(code):
        if isinstance(step.argval, CodeType):
            first |= {name: reads for name, reads in _attributes(step.argval) if name not in first}
        elif step.opname in (*READS, "STORE_ATTR"):
            first.setdefault(step.argval, step.opname in READS)
    return tuple(first.items())


@functools.cache
def _globals(code: CodeType) -> frozenset[str]:
    """The globals that this code names, and those of the functions defined in it."""
    inner = (_globals(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL").union(*inner)


def _labels(value: Any, batch: int) -> bool:
    listed = isinstance(value, (list, tuple)) and len(value) == batch and any(isinstance(item, (str, int, float)) for item in value)
    return listed or has_rows(value, batch)


def _state(value: Any) -> Any:
    """What changes when the value is changed in place."""
    if isinstance(value, (list, tuple)):
        return [item if isinstance(item, (str, int, float)) else None for item in value]
    if isinstance(value, np.ndarray):
        return hash(value.tobytes())
    return None if value.is_inference() else value._version


def _changed(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    """Is the value, of the same name, another one than before? A tensor that is made anew each time may hold the same numbers."""
    (old, then), (new, state) = before, now
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old is not new:
        return (not old.is_inference() and old._version != then) or not _same(old, new)
    return type(old) is not type(new) or then != state


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
