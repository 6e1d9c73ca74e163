"""Objects by name: one place that turns a name and options into an object, or into a helpful error."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Thing = TypeVar("Thing")


def choose(kind: str, name: str, known: Mapping[str, Thing]) -> Thing:
    """`known[name]`, or a ValueError that lists the known names.

    >>> choose("colour", "blue", {"red": 1, "green": 2})
    Traceback (most recent call last):
    ...
    ValueError: unknown colour 'blue'; known: green, red
    """
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(sorted(known))}")
    return known[name]


def build(kind: str, name: str, known: Mapping[str, Callable[..., Thing]], options: Mapping[str, Any]) -> Thing:
    """`known[name](**options)`, with a TypeError that lists the allowed options when one is not known."""
    make = choose(kind, name, known)
    allowed = [p for p in inspect.signature(make).parameters]
    for option in options:
        if option not in allowed:
            raise TypeError(f"{kind} {name!r} takes no option {option!r}; allowed: {', '.join(allowed)}")
    return make(**options)


def check_positive(owner: object, **values: float) -> None:
    """Raise a ValueError unless every value is a finite number above zero."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ValueError(f"{type(owner).__name__}: {name} must be positive and finite, got {value}")
