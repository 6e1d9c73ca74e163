"""A Clock from a diffusers scheduler, and three of diffusers' training utilities with their pitfalls removed.

    clock = clock_from(noise_scheduler, sampler="loss-second-moment", weighting=nc.MinSNR(5))

The model receives the noise level as in diffusers' own scripts: the integer timestep (DDPM, DDIM), 1000·σ (flow matching), ln σ/4 (EDM). So the
same scheduler can sample from a model trained with the clock, in any pipeline.
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
    is its `prediction_type`, EDM's preconditioned network, or the velocity eps - x0 of flow matching. options: other arguments of
    Clock, `correct`, `base`, `seed`, ...

    A flow scheduler's `shift` moves times towards noise, as in diffusers: give a fixed sampler and the base for unshifted times. A learned sampler
    chooses its own times, so there `shift` moves the base, which defines the objective of the corrected loss.
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
    """The sampler and the other arguments of Clock, with a scheduler's shift applied."""
    correct = options.get("correct", "auto")
    corrected = sampler.corrects if correct == "auto" else correct == "importance"
    if isinstance(sampler, Density):
        sampler = Shifted(sampler, shift)
    elif not corrected and not sampler.learns:
        raise ValueError(
            f"shift={shift:g} cannot be applied to {type(sampler).__name__} as a whole; shift what it is made of, for example "
            f"nc.Mixture(nc.Shifted(nc.LogitNormal(), {shift:g})), and train with shift=1.0"
        )
    elif not corrected:
        raise ValueError(
            f"{type(sampler).__name__} chooses its own times and its loss is not corrected, so shift={shift:g} would have no effect; "
            "train with shift=1.0, or pass correct='importance' to keep the shifted objective"
        )
    if not corrected:
        return sampler, options
    base = names.sampler(options.get("base", Uniform()))
    return sampler, {**options, "base": Shifted(base, shift)}  # type: ignore[arg-type]  # Shifted raises if it is no density


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

    Differences from diffusers:
    - `timesteps` falls, so diffusers' u = sigmoid(z) picks *low* noise for logit_mean > 0, where SD3 means high noise; here u = sigmoid(-z), from the
      same z. The densities of logit_mean = 0, "mode" and "none" are symmetric, and therefore the same in both.
    - For loss weights ("sigma_sqrt", "cosmap") and unknown names diffusers silently draws uniform times; here they are errors.
    - diffusers' u can be 1, one step too many ("mode" at a uniform of 0), and below 0 for mode_scale < -1, which indexes from the other end.
    """
    _check_scheme("density of times", weighting_scheme, DENSITIES, WEIGHTS)
    if weighting_scheme == "logit_normal":
        density = LogitNormal(logit_mean, logit_std)  # type: ignore[arg-type]  # LogitNormal raises if one is None
        z = torch.randn(batch_size, device=device, generator=generator)
        return in_unit(torch.sigmoid(-(density.mean + density.std * z)))
    v = torch.rand(batch_size, device=device, generator=generator)
    return v if weighting_scheme == "none" else in_unit(Mode(mode_scale).icdf(1 - v).float())  # type: ignore[arg-type]


def compute_loss_weighting_for_sd3(weighting_scheme: str, sigmas: Tensor) -> Tensor:
    """The weight of the velocity error at each σ, in the shape of `sigmas`, float32 at least. Arguments as in diffusers.

    weighting_scheme: "sigma_sqrt" (σ⁻²), "cosmap" (2/(π(1 - 2σ + 2σ²))) or "none" for 1.

    Differences from diffusers:
    - diffusers' scripts pass one `weighting_scheme` to both functions, so that choosing a density sets the weight to 1, and choosing a weight draws
      uniform times. Here density and weight are two independent choices.
    - For densities ("logit_normal", "mode") and unknown names diffusers silently returns a weight of 1; here they are errors.
    """
    _check_scheme("loss weight", weighting_scheme, WEIGHTS, DENSITIES)
    sigmas = sigmas.to(torch.promote_types(sigmas.dtype, torch.float32))
    if weighting_scheme == "sigma_sqrt":
        return sigmas**-2.0
    if weighting_scheme == "cosmap":
        return 2 / (torch.pi * (1 - 2 * sigmas + 2 * sigmas**2))
    return torch.ones_like(sigmas)


def compute_min_snr_weights(noise_scheduler: Any, timesteps: Tensor, snr_gamma: float = 5.0) -> Tensor:
    """(B,) the weights that diffusers' scripts compute from `compute_snr`, for the scheduler's `prediction_type`; float32.

    min(SNR, γ) for sample, divided by SNR for epsilon and by SNR+1 for v_prediction: the same as a Clock's MinSNR. Difference from the scripts: at
    zero terminal SNR they divide 0 by 0 for epsilon, so the loss is NaN; here the weight is its limit, 1.
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
