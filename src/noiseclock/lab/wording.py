"""Samplers, weightings and schedules as one word on a command line: `name` or `name:option=value,option=value`.

speed:k=5,tau=641      adaptive:every=160,stride=10      shifted:sampler=logit-normal,k=3      scaled-linear:beta_end=0.0195
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from noiseclock.core import names
from noiseclock.core.samplers import Sampler
from noiseclock.core.schedules import Schedule
from noiseclock.core.weightings import WEIGHTINGS, Weighting, weighting as make_weighting
from noiseclock.lab.errors import Mistake, choose

Made = TypeVar("Made")


def sampler(text: str) -> Sampler:
    """The sampler of these words.

    >>> sampler("speed:k=3,tau=641")
    SpeeD(k=3.0, tau=641, variant='paper', schedule=None)
    """
    return _made("sampler", text, names.SAMPLERS, names.sampler)


def weighting(text: str) -> Weighting:
    """The weighting of these words.

    >>> weighting("min-snr:gamma=4,normalize=true")
    MinSNR(normalize=True, gamma=4.0)
    """
    return _made("weighting", text, WEIGHTINGS, make_weighting)


def schedule(text: str, steps: int | None) -> Schedule:
    """The schedule of these words; steps: of a discrete one, None for a continuous one."""
    return _made("schedule", text, names.SCHEDULES, lambda name, **options: names.schedule(name, steps, **options))


def _made(kind: str, text: str, known: dict[str, Any], make: Callable[..., Made]) -> Made:
    name, options = split(text)
    choose(kind, name, known)
    for inner in {"sampler", "other"} & set(options):  # of a wrapper
        options[inner] = sampler(str(options[inner]))
    if isinstance(options.get("weighting"), str):
        options["weighting"] = weighting(options["weighting"])
    try:
        return make(name, **options)
    except (TypeError, ValueError) as error:
        raise Mistake(f"{kind} {text!r}: {error}") from error


def split(text: str) -> tuple[str, dict[str, Any]]:
    """A name and its options.

    >>> split("speed:k=5,variant=released")
    ('speed', {'k': 5, 'variant': 'released'})
    """
    name, colon, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in rest.split(",") if colon else []:
        key, equals, value = part.partition("=")
        if not (key and equals and value):
            raise Mistake(f"{text!r}: {part!r} is not option=value")
        options[key] = _value(value)
    return name, options


def _value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
