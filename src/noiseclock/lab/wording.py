"""Samplers, weightings, schedules and objectives as text on the command line, `name` or `name:option=value,option=value`; and a short text on what
a sampler has learned.

speed:k=5,tau=641      adaptive:every=160,stride=10      shifted:sampler=logit-normal,k=3      scaled-linear:beta_end=0.0195

Samplers have short names too (`core/names.py`): lsm, adaptive.scaled and others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from noiseclock.core.adaptive import Adaptive
from noiseclock.core.checks import resolve
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.names import SAMPLERS, SCHEDULES, SHORT
from noiseclock.core.objectives import OBJECTIVES, Objective
from noiseclock.core.samplers import Sampler
from noiseclock.core.schedules import Schedule
from noiseclock.core.uncertainty import Uncertainty
from noiseclock.core.variance_optimal import VarianceOptimal
from noiseclock.core.weightings import WEIGHTINGS, Weighting
from noiseclock.lab.errors import Mistake, choose

Made = TypeVar("Made")

# a list of betas cannot be written here; Uncertainty can, because the trainer, unlike a Clock, optimises its parameters
_SCHEDULES = {name: make for name, make in SCHEDULES.items() if name != "betas"}
_WEIGHTINGS: dict[str, Callable[..., Weighting]] = {**WEIGHTINGS, "uncertainty": Uncertainty}


def sampler(text: str) -> Sampler:
    """The sampler of this text.

    >>> sampler("speed:k=3,tau=641")
    SpeeD(k=3.0, tau=641, variant='paper', schedule=None)
    """
    choose("sampler", text.partition(":")[0], [*SAMPLERS, *SHORT])
    return _made("sampler", written_out(text), Sampler, SAMPLERS)


def written_out(text: str) -> str:
    """The text of a sampler with a short name written out; options given with a short name replace its own.

    >>> written_out("adaptive.paper:floor=0.01,count=5")
    'adaptive:variant=paper,floor=0.01,count=5'
    """
    name, colon, given = text.partition(":")
    if name not in SHORT:
        return text
    name, usual = SHORT[name]
    asked = split(text)[1]
    options = [f"{option}={value}" for option, value in usual.items() if option not in asked] + [given] * bool(colon)
    return name + ":" * bool(options) + ",".join(options)


def weighting(text: str) -> Weighting:
    """The weighting of this text.

    >>> weighting("min-snr:gamma=4,normalize=true")
    MinSNR(normalize=True, gamma=4.0)
    """
    return _made("weighting", text, Weighting, _WEIGHTINGS)


def objective(text: str) -> Objective:
    """The objective of this text.

    >>> objective("edm:sigma_data=1")
    Preconditioned(sigma_data=1.0)
    """
    return _made("objective", text, Objective, OBJECTIVES)


def schedule(text: str, steps: int | None) -> Schedule:
    """The schedule of this text. steps: T of a discrete schedule, 1000 if None; must be None for a continuous schedule."""
    name, options = split(text)
    make: Any = _SCHEDULES[choose("schedule", name, _SCHEDULES)]
    if "steps" in options:
        raise Mistake(f"schedule {text!r}: steps is a setting of its own; leave it out here")
    if steps is not None and "steps" not in {f.name for f in fields(make)}:
        raise Mistake(f"the schedule {name!r} is continuous and has no steps; set steps to None")
    return _made("schedule", text, Schedule, _SCHEDULES, {} if steps is None else {"steps": steps})


def _made(kind: str, text: str, wanted: type[Made], known: Mapping[str, Callable[..., Made]], given: Mapping[str, Any] = {}) -> Made:
    name, options = split(text)
    choose(kind, name, known)
    for inner in {"sampler", "other"} & set(options):  # options of a wrapper that are samplers themselves
        options[inner] = sampler(str(options[inner]))
    if isinstance(options.get("weighting"), str):
        options["weighting"] = weighting(options["weighting"])
    try:
        return resolve(kind, name, wanted, known, {**options, **given})
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
        if key in options:
            raise Mistake(f"{text!r}: {key} is given twice")
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


def state_of(sampler: Sampler) -> str:
    """A short text on what a sampler has learned; synchronises with the device."""
    if isinstance(sampler, Adaptive):
        info = sampler.info
        quality = "" if math.isnan(info["r_squared"]) else f", R² {info['r_squared']:.2f}"
        return f"{info['probes']} probes{quality}, entropy {round(info['entropy'], 2) + 0.0:.2f}"
    if isinstance(sampler, VarianceOptimal):
        return f"{sampler.probes} probes, ρ {sampler.rho:.2f} (held out {sampler.held_out_rho:.2f}), effective sample size {sampler.ess():.0%}"
    return f"effective sample size {sampler.ess():.0%}" if isinstance(sampler, LearnedDensity) and sampler.corrects else ""
