"""Objects by name, and checks whose messages say what was given and what is allowed."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any, TypeVar

Thing = TypeVar("Thing")


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """`name` if it is known, or a ValueError that lists the known names.

    >>> choose("colour", "blue", ["red", "green"])
    Traceback (most recent call last):
    ...
    ValueError: unknown colour 'blue'; known: green, red
    """
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
    return name


def resolve(kind: str, thing: Any, wanted: type[Thing], known: Mapping[str, Callable[..., Thing]], options: Mapping[str, Any]) -> Thing:
    """The object that is meant: `thing` itself, or the known one of that name made with `options`."""
    if isinstance(thing, wanted):
        if options:
            raise TypeError(f"options go with the name of a {kind}, not with an object: {', '.join(options)} beside {thing!r}")
        return thing
    if not isinstance(thing, str):
        raise TypeError(f"a {kind} is a name or a {wanted.__name__}, got {type(thing).__name__}")
    make = known[choose(kind, thing, known)]
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise TypeError(f"{kind} {thing!r} takes no option {option!r}; allowed: {', '.join(parameters)}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise TypeError(f"{kind} {thing!r} needs {', '.join(missing)}")
    return make(**options)


def check_finite(owner: object, **values: Any) -> None:
    """Raise unless every value is a finite number."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{type(owner).__name__}: {name} must be finite, got {value}")


def check_positive(owner: object, **values: Any) -> None:
    """Raise unless every value is a finite number above zero."""
    check_finite(owner, **values)
    for name, value in values.items():
        if value <= 0:
            raise ValueError(f"{type(owner).__name__}: {name} must be positive, got {value}")


def check_whole(owner: object, *, least: int, **values: Any) -> None:
    """Raise unless every value is a whole number of at least `least`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{type(owner).__name__}: {name} must be a whole number of at least {least}, got {value!r}")
