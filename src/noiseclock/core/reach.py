"""What a user's callable refers to: the modules that it runs, and labels of the batch that it should be given as arguments instead."""

from __future__ import annotations

import dis
import functools
import inspect
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import OutOfMemoryError, Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noiseclock.core.conditioning import has_rows

MOST = 100  # items of a sequence or mapping that are looked at
LIMIT = 10_000  # values that are looked at
Parts = Iterator[tuple[str, Any, frozenset[str]]]  # a name, a value, and the attributes that the code which refers to it names


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
        before, self._seen = self._seen, {name: (_state(value), value) for name, value in rows_held(predict, batch).items()}
        return [name for name, (state, _) in self._seen.items() if before.get(name, (state,))[0] != state]


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

    Modules are not looked into, but for the attributes that their own code names.
    """
    found: dict[int, tuple[str, Any]] = {}  # by id; it holds the values, so that no id is used twice
    done: set[tuple[int, frozenset[str]]] = set()
    left: deque[tuple[str, Any, frozenset[str]]] = deque([("it", predict, frozenset())])
    while left and len(done) < LIMIT:
        name, thing, named = left.popleft()
        if thing is not None and (id(thing), named) not in done and not isinstance(thing, (type, ModuleType)):
            done.add((id(thing), named))
            found.setdefault(id(thing), (name, thing))
            left.extend(_parts(name, thing, named))
    return list(found.values())


def _parts(name: str, thing: Any, named: frozenset[str]) -> Parts:
    if isinstance(thing, FunctionType):
        yield from _of_function(inspect.unwrap(thing))
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
        for key in (named | _names(_method(inner, "forward"))) & vars(inner).keys():
            yield f"{name}.{key}", vars(inner)[key], frozenset()
    elif isinstance(thing, Mapping):
        for key, value in islice(thing.items(), MOST):
            yield f"{name}[{key!r}]", value, named
    elif isinstance(thing, (list, tuple)):
        for i, value in enumerate(thing[:MOST]):
            yield f"{name}[{i}]", value, named
    elif hasattr(thing, "__dict__") and not isinstance(thing, Tensor):
        called = _method(thing, "__call__")
        named |= _names(called)
        yield name, called, named
        for key in sorted(named):
            if key in vars(thing):
                yield f"{name}.{key}", vars(thing)[key], named
            elif (method := _method(thing, key)) is not None:
                yield "self", thing, _names(method)
                yield f"{name}.{key}", method, named


def _of_function(function: Any) -> Parts:
    """What the code of a function names: variables of functions around it, globals, and defaults of arguments."""
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # nothing is assigned to it yet
            continue
    found |= {name: function.__globals__[name] for name in sorted(_named(function.__code__, "LOAD_GLOBAL") & function.__globals__.keys())}
    found |= {name: p.default for name, p in inspect.signature(function, follow_wrapped=False).parameters.items() if p.default is not p.empty}
    named = _names(function)
    for name, value in found.items():
        if not _of_a_library(value):
            yield name, value, named


def _of_a_library(value: Any) -> bool:
    """Is it a function of an installed package? Its globals are no business of the user's loop."""
    return isinstance(value, FunctionType) and "site-packages" in inspect.unwrap(value).__code__.co_filename


def _method(thing: Any, name: str) -> Any:
    """The function behind a method that is written in Python, None if there is none."""
    found = inspect.getattr_static(type(thing), name, None)
    return found if isinstance(found, FunctionType) and not _of_a_library(found) else None


def _names(function: Any) -> frozenset[str]:
    """The attributes that a function names."""
    return frozenset() if function is None else _named(inspect.unwrap(function).__code__, "LOAD_ATTR", "LOAD_METHOD")


@functools.cache
def _named(code: CodeType, *instructions: str) -> frozenset[str]:
    """What these instructions of the code name, and those of the functions defined in it."""
    inner = (_named(constant, *instructions) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(step.argval for step in dis.get_instructions(code) if step.opname in instructions).union(*inner)


def _labels(value: Any, batch: int) -> bool:
    captions = isinstance(value, (list, tuple)) and len(value) == batch and any(isinstance(item, str) for item in value)
    return captions or has_rows(value, batch)


def _state(value: Any) -> Any:
    """What changes when the value does."""
    if isinstance(value, (list, tuple)):
        return [item if isinstance(item, str) else None for item in value]
    return id(value), value._version if isinstance(value, Tensor) and not value.is_inference() else None
