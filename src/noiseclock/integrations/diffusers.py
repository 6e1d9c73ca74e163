"""A Clock from a diffusers scheduler, and three of diffusers' training utilities with their traps taken out.

    clock = clock_from(noise_scheduler, sampler="loss-second-moment", weighting=nc.MinSNR(5))

What the model is told is what diffusers' own scripts tell it: the integer timestep (DDPM, DDIM), 1000·σ (flow matching), ln σ/4 (EDM). So a model
trained by the clock is sampled by the same scheduler in any pipeline.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor

from noiseclock.core import names
from noiseclock.core.checks import choose
from noiseclock.core.clock import Clock
from noiseclock.core.samplers import Density, LogitNormal, Mode, Sampler, Uniform
from noiseclock.core.streams import in_unit
from noiseclock.core.weightings import Constant, MinSNR, Weighting
from noiseclock.core.wrappers import Shifted

STEPS = (DDPMScheduler, DDIMScheduler)
EDM = (EDMEulerScheduler, EDMDPMSolverMultistepScheduler)
FLOW = (FlowMatchEulerDiscreteScheduler,)
KNOWN = ", ".join(kind.__name__ for kind in (*STEPS, *EDM, *FLOW))

DENSITIES = ("logit_normal", "mode", "none")
WEIGHTS = ("sigma_sqrt", "cosmap", "none")


def clock_from(scheduler: Any, sampler: str | Sampler = "uniform", weighting: str | Weighting = Constant(), **options: Any) -> Clock:
    """A Clock with the noise levels and the target of a diffusers scheduler.

    scheduler: DDPM, DDIM, EDM (Euler or DPM-Solver) or FlowMatchEulerDiscrete; its config is read, so `set_timesteps` does not matter. The target
    is its `prediction_type`, EDM's preconditioned network, or the velocity eps - x0 of flow matching. options: what a Clock takes besides, `correct`,
    `base`, `seed`, ...

    A flow scheduler's `shift` moves times towards noise, as in diffusers: a fixed sampler and the base mean unshifted times. A learned sampler
    chooses its own times, so there it moves the base, to which the loss is corrected.
    """
    if not isinstance(scheduler, (*STEPS, *EDM, *FLOW)):
        raise TypeError(f"clock_from reads {KNOWN}, got {type(scheduler).__name__}; train with one of these and sample with any other")
    config = scheduler.config
    if isinstance(scheduler, FLOW):
        _check_flow(config)
        if config.shift != 1:
            sampler, options = _shifted(names.sampler(sampler), float(config.shift), options)
    elif isinstance(scheduler, STEPS):
        choose("prediction_type", config.prediction_type, ("epsilon", "sample", "v_prediction"))
        if config.rescale_betas_zero_snr and config.prediction_type == "epsilon":
            raise ValueError(
                "with rescale_betas_zero_snr the last step has no signal, where a prediction of the noise says nothing of the sample; "
                "set prediction_type='v_prediction' or 'sample'"
            )
    return Clock(scheduler, sampler, weighting, **options)


def _check_flow(config: Any) -> None:
    if config.use_dynamic_shifting:
        raise ValueError(
            "use_dynamic_shifting makes the noise levels depend on the size of the image; train with use_dynamic_shifting=False and "
            "the shift of your size: exp(mu) for time_shift_type='exponential', mu for 'linear'"
        )
    if config.invert_sigmas:
        raise ValueError("invert_sigmas turns noise and data around; train with invert_sigmas=False")


def _shifted(sampler: Sampler, shift: float, options: dict[str, Any]) -> tuple[Sampler, dict[str, Any]]:
    """The sampler, and what a Clock takes besides, for times that a scheduler shifts."""
    correct = options.get("correct", "auto")
    corrected = sampler.corrects if correct == "auto" else correct == "importance"
    if isinstance(sampler, Density):
        sampler = Shifted(sampler, shift)
    elif not corrected:
        raise ValueError(
            f"{type(sampler).__name__} chooses its own times and its loss is not corrected, so shift={shift:g} would have no effect; "
            "train with shift=1.0, or pass correct='importance' to keep the shifted objective"
        )
    if not corrected:
        return sampler, options
    base = names.sampler(options.get("base", Uniform()))
    return sampler, {**options, "base": Shifted(base, shift)}  # type: ignore[arg-type]  # Shifted says so where it is no density


# --- in place of diffusers.training_utils -------------------------------------------------------------------------------------------------


def compute_density_for_timestep_sampling(
    weighting_scheme: str,
    batch_size: int,
    logit_mean: float | None = None,
    logit_std: float | None = None,
    mode_scale: float | None = None,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Tensor:
    """(batch_size,) u in [0, 1), float32, for `scheduler.timesteps[(u * num_train_timesteps).long()]`. Arguments as in diffusers.

    weighting_scheme: "logit_normal" (with logit_mean, logit_std), "mode" (mode_scale) or "none" for uniform.

    What diffusers does otherwise:
    - `timesteps` falls, so its u = sigmoid(z) picks *low* noise for logit_mean > 0, where SD3 means high noise; this is sigmoid(-z), from the same z.
      A logit_mean of 0, "mode" and "none" are symmetric, and their densities the same in both.
    - Loss weights ("sigma_sqrt", "cosmap") and names that nobody knows draw uniformly there, in silence; here they are errors.
    - u can be 1, a step too many, there ("mode" at a uniform of 0); and below 0 for mode_scale < -1, which indexes from the other end.
    """
    _check_scheme("density of times", weighting_scheme, DENSITIES, WEIGHTS)
    if weighting_scheme == "logit_normal":
        density = LogitNormal(logit_mean, logit_std)  # type: ignore[arg-type]  # which says what it needs
        z = torch.randn(batch_size, device=device, generator=generator)
        return in_unit(torch.sigmoid(-(density.mean + density.std * z)))
    v = torch.rand(batch_size, device=device, generator=generator)
    return v if weighting_scheme == "none" else in_unit(Mode(mode_scale).icdf(1 - v).float())  # type: ignore[arg-type]


def compute_loss_weighting_for_sd3(weighting_scheme: str, sigmas: Tensor) -> Tensor:
    """The weight of the velocity's error at each σ, in the shape of `sigmas`, float32 at least. Arguments as in diffusers.

    weighting_scheme: "sigma_sqrt" (σ⁻²), "cosmap" (2/(π(1 - 2σ + 2σ²))) or "none" for 1.

    What diffusers does otherwise:
    - Its scripts pass one `weighting_scheme` to both functions, so that choosing a density sets the weight to 1, and choosing a weight draws
      uniformly. Here they are two choices, any two of which go together.
    - Densities ("logit_normal", "mode") and names that nobody knows weigh 1 there, in silence; here they are errors.
    """
    _check_scheme("loss weight", weighting_scheme, WEIGHTS, DENSITIES)
    sigmas = sigmas.to(torch.promote_types(sigmas.dtype, torch.float32))
    if weighting_scheme == "sigma_sqrt":
        return sigmas**-2.0
    if weighting_scheme == "cosmap":
        return 2 / (torch.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def compute_min_snr_weights(noise_scheduler: Any, timesteps: Tensor, snr_gamma: float = 5.0) -> Tensor:
    """(B,) the weights that diffusers' scripts make of `compute_snr`, for the scheduler's `prediction_type`; float32.

    min(SNR, γ) of the sample, over SNR for epsilon and over SNR+1 for v_prediction: the same as a Clock's MinSNR. What the scripts do otherwise: at
    a zero terminal SNR they divide 0 by 0 for epsilon, and the loss is NaN; here the weight is its limit, 1.
    """
    if not isinstance(getattr(noise_scheduler, "alphas_cumprod", None), Tensor):
        raise TypeError(
            f"{type(noise_scheduler).__name__} has no alphas_cumprod to take an SNR from; "
            f"use clock_from(scheduler, weighting=nc.MinSNR({snr_gamma:g}))"
        )
    said = choose("prediction_type", noise_scheduler.config.prediction_type, ("epsilon", "sample", "v_prediction"))
    gamma = MinSNR(snr_gamma).gamma
    a2: Tensor = noise_scheduler.alphas_cumprod.to(timesteps.device)[timesteps].to(torch.float32)
    s2 = 1 - a2
    if said == "epsilon":
        return (gamma * s2 / a2).clamp(max=1)
    return (a2 / s2).clamp(max=gamma) if said == "sample" else torch.minimum(a2, gamma * s2)


def _check_scheme(kind: str, name: str, known: tuple[str, ...], others: tuple[str, ...]) -> None:
    if name in others and name not in known:
        raise ValueError(f"{name!r} is no {kind}; pass 'none' for a constant one, or one of: {', '.join(known[:-1])}")
    choose(kind, name, known)
