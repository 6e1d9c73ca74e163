"""A method is a sampler, a weighting, or both, with an optional correction, written as one word.

    uniform                  min-snr                  speed:k=5,tau=641
    adaptive+min-snr         speed+change-aware       lsm@importance

Samplers may have short names (`core/names.py`). log-normal means what the papers mean by it: EDM's density on the edm schedule, and the adaptive
paper's, which is `logit-normal`, on all others. (`noiseclock train --sampler log-normal` is EDM's density on every schedule.)
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from noiseclock.core.names import SAMPLERS, SHORT
from noiseclock.core.weightings import WEIGHTINGS
from noiseclock.lab import wording
from noiseclock.lab.errors import Mistake, choose
from noiseclock.lab.recipes import Recipe

CORRECTIONS = ("auto", "none", "importance")


def applied(text: str, recipe: Recipe) -> Recipe:
    """The recipe with a method in place of its own sampler, weighting and correction.

    >>> found = applied("speed:k=3+min-snr@importance", Recipe())
    >>> found.sampler, found.weighting, found.correct
    ('speed:k=3', 'min-snr', 'importance')
    """
    body, at, correct = text.partition("@")
    chosen = {"sampler": "uniform", "weighting": "constant"}
    named: set[str] = set()
    for part in body.split("+"):
        words = wording.written_out(part)
        name, colon, given = words.partition(":")
        choose("method", name, [*SAMPLERS, *WEIGHTINGS, *SHORT])
        kind = "sampler" if name in SAMPLERS else "weighting"
        if kind in named:
            raise Mistake(f"the method {text!r} names two {kind}s; one of each at most")
        named.add(kind)
        if name == "log-normal" and recipe.schedule.partition(":")[0] != "edm":
            words = "logit-normal" + colon + given
        chosen[kind] = words
    if at:
        choose("correction", correct, CORRECTIONS)
    return replace(recipe, sampler=chosen["sampler"], weighting=chosen["weighting"], correct=correct if at else "auto")


def values(text: str, recipe: Recipe) -> dict[str, Any]:
    """The numbers and words that a method's options have, also those that it leaves at their defaults, by the name that the method has for the part.

    >>> values("speed:k=3+min-snr", Recipe())
    {'speed:k': 3.0, 'speed:tau': 'auto', 'speed:variant': 'paper', 'min-snr:gamma': 5.0}
    """
    clock = applied(text, recipe).clock()
    found: dict[str, Any] = {}
    for part in text.partition("@")[0].split("+"):
        name = part.partition(":")[0]
        thing = clock.sampler if name in SAMPLERS or name in SHORT else clock.weighting
        options = ((option, getattr(thing, option, None)) for option in inspect.signature(type(thing)).parameters)
        found |= {f"{name}:{option}": value for option, value in options if isinstance(value, (int, float, str)) and not isinstance(value, bool)}
    return found
