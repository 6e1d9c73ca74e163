"""Objects by name, and checks whose messages say what was given and what is allowed."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
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
    """`thing` itself if it is a `wanted` object, or the known object of that name, made with `options`."""
    if isinstance(thing, wanted):
        if options:
            raise TypeError(f"options go with the name of a {kind}, not with an object; set {', '.join(options)} when you make {thing}")
        return thing
    allowed = f"{kind} must be a name or an object of {wanted.__name__}"
    if isinstance(thing, type) and issubclass(thing, wanted):
        raise TypeError(f"{allowed}, got the class {thing.__name__} itself: write {thing.__name__}()")
    if not isinstance(thing, str):
        raise TypeError(f"{allowed}, got {type(thing).__name__}")
    make = known[choose(kind, thing, known)]
    parameters = inspect.signature(make).parameters
    for option in options:
        if option not in parameters:
            raise TypeError(f"{kind} {thing!r} takes no option {option!r}; allowed: {', '.join(parameters) or 'none'}")
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in options]
    if missing:
        raise TypeError(f"{kind} {thing!r} needs {', '.join(missing)}")
    return make(**options)


def brief(text: str) -> str:
    """A repr made short enough for a sentence: its first line, with long lists of numbers, such as a schedule's betas, abbreviated.

    >>> brief("Betas([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], zero_terminal_snr=False)")
    'Betas([0.1, 0.2, ..., 0.6: 6 numbers], zero_terminal_snr=False)'
    """

    def ends(found: re.Match[str]) -> str:
        numbers = found[1].split(", ")
        return f"[{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}: {len(numbers)} numbers]"

    first, *rest = text.splitlines()
    return re.sub(r"\[((?:[-+.\de]+, ){5,}[-+.\de]+)\]", ends, first.removesuffix("(") + "(...)" if rest else first)


def without_address(text: str) -> str:
    """A repr without the memory address in Python's default repr, which differs in every run."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def alike(one: str, other: str) -> bool:
    """Are two descriptions the same, but for the last digits of their fractions?

    A diffusers scheduler computes its betas in float32, of which the last digits depend on the processor.

    >>> alike("Betas([0.1, 0.25])", "Betas([0.1, 0.2500001])"), alike("MinSNR(5.0)", "MinSNR(6.0)"), alike("seed 123456", "seed 123457")
    (True, False, False)
    """
    fraction = re.compile(r"\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)")
    if fraction.sub("#", one) != fraction.sub("#", other):
        return False
    return all(math.isclose(float(x), float(y), rel_tol=1e-5) for x, y in zip(fraction.findall(one), fraction.findall(other), strict=True))


def told_apart(one: str, other: str) -> tuple[str, str]:
    """Shorten two different descriptions so that they fit into a sentence and still differ."""
    short = brief(one)[:300], brief(other)[:300]
    if short[0] != short[1]:
        return short
    alike = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    start = max(alike - 30, 0)
    return f"...{one[start : start + 60]}...", f"...{other[start : start + 60]}..."


def take_finite(owner: Any, *names: str) -> None:
    """Convert these attributes of a (frozen) dataclass to float, or raise unless they are finite numbers.

    With floats, MinSNR(5) equals MinSNR(5.0) and prints the same.
    """
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {value!r}")
        if not math.isfinite(value):
            raise ValueError(f"{type(owner).__name__}: {name} must be finite, got {value}")
        object.__setattr__(owner, name, float(value))


def take_positive(owner: Any, *names: str) -> None:
    """Like `take_finite`, for numbers above zero."""
    take_finite(owner, *names)
    for name in names:
        if getattr(owner, name) <= 0:
            raise ValueError(f"{type(owner).__name__}: {name} must be positive, got {getattr(owner, name)}")


def take_whole(owner: Any, *names: str, least: int) -> None:
    """Like `take_finite`, for whole numbers of at least `least`, converted to int."""
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{type(owner).__name__}: {name} must be a whole number of at least {least}, got {value!r}")
        object.__setattr__(owner, name, int(value))
