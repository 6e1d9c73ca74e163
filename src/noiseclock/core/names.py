"""Schedules and samplers by name, and the schedule and objective of a diffusers scheduler object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from noiseclock.core.adaptive import Adaptive
from noiseclock.core.checks import choose, resolve
from noiseclock.core.gradient_variance import GradientVariance
from noiseclock.core.lookahead import Lookahead
from noiseclock.core.loss_based import LossEMA, LossHistory, LossSecondMoment
from noiseclock.core.objectives import OBJECTIVES, Objective, Preconditioned, objective as make_objective
from noiseclock.core.samplers import Beta, CosMap, LogitNormal, Mode, Sampler, Uniform
from noiseclock.core.scheduled import LogNormal, LogSNRNormal, SpeeD
from noiseclock.core.schedules import EDM, Betas, Cosine, Flow, Linear, Quadratic, ScaledLinear, Schedule
from noiseclock.core.variance_optimal import VarianceOptimal
from noiseclock.core.wrappers import Annealed, Independent, Mixture, Shifted, Truncated

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "linear": Linear,
    "quadratic": Quadratic,
    "cosine": Cosine,
    "scaled-linear": ScaledLinear,
    "betas": Betas,
    "edm": EDM,
    "flow": Flow,
}


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "uniform": Uniform,
    "adaptive": Adaptive,
    "loss-second-moment": LossSecondMoment,
    "loss-history": LossHistory,
    "loss-ema": LossEMA,
    "gradient-variance": GradientVariance,
    "variance-optimal": VarianceOptimal,
    "lookahead": Lookahead,
    "logit-normal": LogitNormal,
    "mode": Mode,
    "cosmap": CosMap,
    "beta": Beta,
    "log-normal": LogNormal,
    "log-snr-normal": LogSNRNormal,
    "speed": SpeeD,
    "shifted": Shifted,
    "truncated": Truncated,
    "independent": Independent,
    "mixture": Mixture,
    "annealed": Annealed,
}

# short names, as results have them: a name of SAMPLERS, and options that others given with it replace
SHORT: dict[str, tuple[str, dict[str, Any]]] = {
    "lsm": ("loss-second-moment", {}),
    "adaptive.paper": ("adaptive", {"variant": "paper"}),
    "adaptive.scaled": ("adaptive", {"variant": "scaled", "floor": 0.05}),
    "adaptive.released": ("adaptive", {"variant": "released"}),
    "adaptive.cheap": ("adaptive", {"every": 160, "stride": 10}),
}


def sampler(name: str | Sampler, **options: Any) -> Sampler:
    """The sampler called `name`, with its options. Short names: lsm for loss-second-moment; adaptive.scaled and others for variants of Adaptive.

    >>> sampler("speed", k=3.0)
    SpeeD(k=3.0, tau='auto', variant='paper', schedule=None)
    """
    if isinstance(name, str) and choose("sampler", name, [*SAMPLERS, *SHORT]) in SHORT:
        name, usual = SHORT[name]
        options = {**usual, **options}
    return resolve("sampler", name, Sampler, SAMPLERS, options)


def schedule(name: str | Schedule | Any, steps: int | None = None, **options: Any) -> Schedule:
    """The schedule called `name`, or the one behind a diffusers scheduler object.

    steps: T of a discrete schedule, 1000 unless given; an error for a continuous one.
    options: what the class takes, e.g. `beta_end=0.03`, `zero_terminal_snr=True`.

    >>> schedule("linear", steps=4).betas.round(4).tolist()
    [0.0001, 0.0067, 0.0134, 0.02]
    >>> schedule("linaer")
    Traceback (most recent call last):
    ...
    ValueError: unknown schedule 'linaer'; known: betas, cosine, edm, flow, linear, quadratic, scaled-linear
    """
    given = options if steps is None else {"steps": steps, **options}
    if not isinstance(name, (str, Schedule)):
        name = schedule_of_diffusers(name)
    return resolve("schedule", name, Schedule, SCHEDULES, given)


def schedule_of_diffusers(scheduler: Any) -> Schedule:
    """The schedule of a diffusers scheduler, read from its attributes, so that diffusers need not be installed.

    DDPM, DDIM and similar schedulers have `betas` and `alphas_cumprod`; EDM schedulers have `sigma_data`; flow-matching schedulers have `shift` and
    no betas, or `use_flow_sigmas`. A flow scheduler's shift is a choice of sampling density, not of schedule: to train with it, use
    `Shifted(Uniform(), k=shift)`.
    """
    config: Any = getattr(scheduler, "config", None)
    betas, alpha_bar = (getattr(scheduler, name, None) for name in ("betas", "alphas_cumprod"))
    if getattr(config, "use_flow_sigmas", False) or (betas is None and hasattr(config, "shift") and hasattr(config, "num_train_timesteps")):
        return Flow(condition_scale=float(config.num_train_timesteps))
    if hasattr(config, "sigma_data") and hasattr(config, "sigma_min"):
        return EDM(sigma_min=float(config.sigma_min), sigma_max=float(config.sigma_max))
    if isinstance(betas, Tensor) and isinstance(alpha_bar, Tensor):
        betas, alpha_bar = betas.double().cpu().numpy(), alpha_bar.double().cpu().numpy()
        # Betas in float32 keep more digits than ratios of ᾱ do, but some schedulers rescale ᾱ alone.
        if np.abs(np.cumprod(1 - betas) - alpha_bar).max() > 1e-5:
            betas = 1 - alpha_bar / np.append(1.0, alpha_bar[:-1])
        return Betas(betas)
    raise TypeError(
        f"a schedule is a name, a Schedule or a diffusers scheduler with betas, sigma_data or shift; got {type(scheduler).__name__} "
        '(betas of your own: nc.schedule("betas", betas=...))'
    )


def objective_of_diffusers(scheduler: Any) -> Objective | None:
    """The objective that a diffusers scheduler is configured for; None if its config names none."""
    config: Any = getattr(scheduler, "config", None)
    said = getattr(config, "prediction_type", "flow_prediction" if hasattr(config, "shift") else None)
    if hasattr(config, "sigma_data"):
        if said not in ("epsilon", None):
            kind = type(scheduler).__name__
            raise ValueError(f"{kind} with prediction_type={said!r} expects the negative of EDM's network; train with prediction_type='epsilon'")
        return Preconditioned(float(config.sigma_data))
    names = {"epsilon": "eps", "sample": "x0", "v_prediction": "v", "flow_prediction": "flow"}
    return None if said is None else OBJECTIVES[names[choose("prediction_type", said, names)]]()


def objective(given: str | Objective | None, source: Any, schedule: Schedule) -> Objective:
    """The objective that is given; if none is, the one that the schedule's source, a diffusers scheduler, is configured for, or the usual one."""
    told = objective_of_diffusers(source)
    if given is None:
        return told or make_objective("flow" if isinstance(schedule, Flow) else "edm" if isinstance(schedule, EDM) else "eps")
    if told is not None and given == told.name:
        return told  # with the scheduler's settings, such as its sigma_data
    chosen = make_objective(given)
    if told is not None and (chosen.name != told.name or (type(chosen) is type(told) and chosen != told)):
        mine, its = (repr(chosen.name), repr(told.name)) if chosen.name != told.name else (chosen, told)
        raise ValueError(f"objective={mine}, but the {type(source).__name__} is set to predict {its}; change one of them")
    return chosen
