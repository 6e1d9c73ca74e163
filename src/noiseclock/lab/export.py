"""A trained U-Net as a folder that diffusers loads: `DiffusionPipeline.from_pretrained(folder)`."""

from __future__ import annotations

from pathlib import Path

from diffusers import DDPMPipeline, DDPMScheduler
from torch import nn

from noiseclock.core.objectives import X0, Eps, Objective, V
from noiseclock.core.schedules import VARIANCES, Discrete, Schedule
from noiseclock.lab.errors import Mistake, choose
from noiseclock.lab.models.unet import UNet
from noiseclock.lab.pictures import whole

PREDICTION: dict[type[Objective], str] = {Eps: "epsilon", X0: "sample", V: "v_prediction"}


def export(model: nn.Module, schedule: Schedule, objective: Objective, folder: str | Path, variance: str = "fixed-large") -> None:
    """Write a DDPMPipeline into a new or empty folder; `DDIMPipeline.from_pretrained` loads it as well.

    For the same noise, the DDPMPipeline with T steps gives the pictures of `generate(solver="ddpm")`. The DDIMPipeline, called with
    use_clipped_model_output=True and any number of steps that divides T, gives those of "ddim". (With fewer than T ancestral steps and the variance
    fixed-large, diffusers leaves noise in the final picture.)
    """
    if not isinstance(model, UNet):
        raise Mistake(f"diffusers has no pipeline for a {type(model).__name__} without a VAE; only U-Nets can be exported, so use its checkpoint")
    if model.null is not None:
        raise Mistake("diffusers' pipelines for U-Nets take no labels; save the network alone with model.net.save_pretrained(folder)")
    if not isinstance(schedule, Discrete) or type(objective) not in PREDICTION:
        raise Mistake(
            "diffusers' pipelines for U-Nets know discrete steps and the objectives eps, x0 and v only, not "
            f"{type(schedule).__name__} with {objective.name}; save the network alone with model.net.save_pretrained(folder)"
        )
    choose("variance", variance, VARIANCES)
    scheduler = DDPMScheduler(
        num_train_timesteps=schedule.steps,
        trained_betas=schedule.betas.tolist(),
        variance_type=variance.replace("-", "_"),
        prediction_type=PREDICTION[type(objective)],
        clip_sample=True,
        timestep_spacing="trailing",
    )
    whole(Path(folder), DDPMPipeline(unet=model.net, scheduler=scheduler).save_pretrained)
