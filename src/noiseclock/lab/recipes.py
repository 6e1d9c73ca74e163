"""Recipes by name: all settings of a training run, as one frozen table.

`noiseclock train NAME` runs a recipe; every field can be changed on the command line. Recipes from papers have the settings that these print:
"adaptive paper" is arXiv 2411.09998 (its Tables 7 to 9), "SpeeD" 2405.17403. Our own recipes (digits, mnist, cifar10-sprint) use the sampler that
was best in our measurements (docs/choose.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from noiseclock.core.clock import Clock
from noiseclock.core.objectives import Eps
from noiseclock.core.schedules import VARIANCES, Array
from noiseclock.lab import wording
from noiseclock.lab.errors import Mistake, choose
from noiseclock.lab.generate import most_steps

OPTIMIZERS = ("adam", "adamw")
PRECISIONS = ("fp32", "bf16")
MODELS = ("unet", "adm", "dit", "uvit")
LARGEST_SEED = 2**32  # excluded; torch's generators still accept 1000 times this number plus a rank


@dataclass(frozen=True)
class Recipe:
    """One training run. A sampler, weighting, schedule, objective or solver is written `name` or `name:option=value,option=value`."""

    # --- the data ---
    data: str = "digits"
    """digits, mnist, cifar10, folder:PATH, hf:NAME_OR_PATH, latents:PATH or captions:PATH"""
    size: int | None = None
    """side to which folder, hf and captions images are cropped and resized"""
    flip: bool = False
    """mirror each image with probability 1/2"""
    conditional: bool = False
    """condition the model on the class or the caption"""
    drop_labels: float = 0.1
    """probability of dropping the label or caption, for classifier-free guidance"""
    # --- the network ---
    model: str = "unet"
    """unet, adm, dit or uvit"""
    channels: int = 128
    """hidden width; of a U-Net, that of its first level"""
    multipliers: tuple[int, ...] = (1, 2, 2, 2)
    """width of each U-Net level, as a multiple of channels"""
    blocks: int = 2
    """residual blocks per U-Net level, or the depth of a DiT or U-ViT"""
    attention: tuple[int, ...] = (16,)
    """resolutions (heights) at which a U-Net has attention"""
    head_channels: int = 0
    """channels per attention head; 0 for a single head"""
    patch: int = 2
    """patch size of a DiT or U-ViT"""
    dropout: float = 0.0
    """dropout probability"""
    pretrained: str = ""
    """folder of another training whose averaged weights initialise this one; none unless given"""
    # --- the diffusion ---
    schedule: str = "linear"
    """linear, quadratic, cosine, scaled-linear, edm or flow"""
    steps: int | None = 1000
    """number of steps T of a discrete schedule; None for edm and flow"""
    objective: str = "eps"
    """eps, x0, v, flow or edm; for edm on latents, edm:sigma_data=1"""
    sampler: str = "uniform"
    """the density from which noise levels are drawn, e.g. variance-optimal or speed:k=5"""
    weighting: str = "constant"
    """weight of the loss at each noise level, e.g. min-snr:gamma=5"""
    correct: str = "auto"
    """importance correction: auto, none or importance"""
    base: str = "uniform"
    """the objective's density over time, which importance correction restores, e.g. log-normal for edm"""
    variance: str = "fixed-large"
    """variance of the reverse process, in ancestral sampling and the likelihood: fixed-large or fixed-small"""
    # --- the optimiser ---
    optimizer: str = "adam"
    """adam or adamw"""
    lr: float = 2e-4
    """learning rate"""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's beta1 and beta2"""
    weight_decay: float = 0.0
    """decoupled weight decay with adamw, an L2 penalty with adam"""
    batch: int = 128
    """images per update, over all processes and micro-batches"""
    accumulate: int = 1
    """micro-batches per update (gradient accumulation)"""
    updates: int = 100_000
    """total number of optimiser updates"""
    warmup: int = 0
    """updates of linear learning-rate warm-up"""
    clip: float = 1.0
    """maximum gradient norm; 0 for no clipping"""
    ema: float = 0.9999
    """decay of the averaged weights (EMA), which are used for sampling"""
    precision: str = "fp32"
    """fp32 or bf16 (autocast)"""
    compile: bool = False
    """torch.compile the model, on a GPU; compiling once takes about two minutes"""
    checkpointing: bool = False
    """recompute activations in the backward pass: less memory, a third more time"""
    seed: int = 0
    """seed of the initial weights, the order of the images, times and noise"""
    patience: int = 10
    """stop after so many consecutive updates whose loss or gradient was not finite"""
    # --- logs, checkpoints and samples ---
    log_every: int = 10
    """updates between lines of log.jsonl; 0 for never, also in the next three"""
    save_every: int = 1000
    """updates between checkpoints; the last two are kept"""
    validate_every: int = 1000
    """updates between validations: the loss by noise level on held-out images, with fixed noise"""
    sample_every: int = 5000
    """updates between grids of samples"""
    solver: str = "ddim"
    """solver for sampling: ddpm, ddim (or euler), heun or dpm++; e.g. euler:shift=3 on flow, ddim:sigma_max=80 on cosine"""
    solver_steps: int = 50
    """steps of the solver"""
    track: tuple[str, ...] = ("tensorboard",)
    """accelerate's trackers, e.g. tensorboard wandb"""

    def __post_init__(self) -> None:
        for name, least in {"channels": 1, "batch": 1, "accumulate": 1, "updates": 1, "solver_steps": 1, "patience": 1}.items():
            if getattr(self, name) < least:
                raise Mistake(f"{name} must be at least {least}, got {getattr(self, name)}")
        for name in ("warmup", "clip", "log_every", "save_every", "validate_every", "sample_every", "weight_decay", "seed"):
            if getattr(self, name) < 0:
                raise Mistake(f"{name} must not be negative, got {getattr(self, name)}")
        for name in ("ema", "drop_labels", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise Mistake(f"{name} must lie in [0, 1), got {getattr(self, name)}")
        for name in ("lr", "clip", "weight_decay"):
            if not math.isfinite(getattr(self, name)):
                raise Mistake(f"{name} must be finite, got {getattr(self, name)}")
        if not self.lr > 0:
            raise Mistake(f"lr must be positive, got {self.lr}")
        if self.seed >= LARGEST_SEED:
            raise Mistake(f"seed must be less than 2**32, got {self.seed}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise Mistake(f"betas must lie in [0, 1), got {self.betas}")
        if self.batch % self.accumulate:
            raise Mistake(f"a batch of {self.batch} cannot be split into {self.accumulate} equal micro-batches")
        known = {"optimizer": OPTIMIZERS, "precision": PRECISIONS, "variance": VARIANCES, "model": MODELS}
        for name, allowed in known.items():
            choose(name, getattr(self, name), allowed)
        clock = self.clock()  # raises a Mistake if schedule, sampler, weighting and objective do not fit
        schedule = clock.schedule
        most = most_steps(self.solver, schedule)
        if most is not None and self.solver_steps > most:
            raise Mistake(f"solver_steps can be at most {most}, the steps that there are, got {self.solver_steps}")
        if isinstance(clock.objective, Eps) and float(schedule(1.0)[0]) == 0:
            raise Mistake(
                "this schedule ends in pure noise, where predicting the noise says nothing about the picture; take the objective v, x0 or flow"
            )

    def clock(self, **place: Any) -> Clock:
        """The clock that this recipe trains with. place: rank and world_size, by default those of torch.distributed."""
        schedule, sampler = wording.schedule(self.schedule, self.steps), wording.sampler(self.sampler)
        weighting, base, objective = wording.weighting(self.weighting), wording.sampler(self.base), wording.objective(self.objective)
        corrected = sampler.corrects if self.correct == "auto" else self.correct == "importance"
        try:
            # without correction, the sampler's density takes the place of `base` in the objective
            meant: dict[str, Any] = {"base": base} if corrected else {}
            return Clock(schedule, sampler, weighting, objective, correct=self.correct, seed=self.seed, **meant, **place)
        except (TypeError, ValueError) as error:
            raise Mistake(str(error)) from error

    def meant(self, time: Array) -> Array:
        """The density of `base` at times (n,), even if an uncorrected sampler trains on another density."""
        density = replace(self, sampler=self.base, weighting="constant", correct="none").clock().sampler.log_prob(torch.as_tensor(time)).exp()
        return np.asarray(density.double().numpy())

    def autocast(self, device: str | torch.device) -> torch.autocast:
        """The context in which this recipe's network runs."""
        return torch.autocast(torch.device(device).type, torch.bfloat16, enabled=self.precision == "bf16")

    def settings(self) -> dict[str, Any]:
        """The fields as plain values, in order."""
        return asdict(self)


RENAMED = {"start": "pretrained"}  # torchrun rejects --start, as an ambiguous abbreviation of its own options
# These settings may change when a training is resumed: its length, logs and samples, and `checkpointing`, which saves memory. `checkpointing` and
# the number of processes change gradients only by rounding, and leave the random numbers as they are.
FREE = ("updates", "patience", "checkpointing", "log_every", "save_every", "validate_every", "sample_every", "solver", "solver_steps", "track")


def completed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that an earlier version wrote, under their present names, with defaults for newer settings."""
    renamed = {RENAMED.get(name, name): value for name, value in dict(settings).items()}  # a TypeError if a damaged file has no settings
    return {**{f.name: f.default for f in fields(Recipe)}, **renamed}


class Entry(NamedTuple):
    """A recipe with its description, what it needs, and its approximate cost."""

    recipe: Recipe
    about: str
    needs: str
    cost: str


_CIFAR10 = Recipe(
    data="cifar10", flip=True, dropout=0.1, warmup=5000, updates=796_875, precision="bf16", compile=True, log_every=100, save_every=5000,
    validate_every=5000, sample_every=20_000, solver="ddpm", solver_steps=1000,
)  # fmt: skip


def _cifar10(schedule: str) -> Entry:
    recipe = replace(_CIFAR10, schedule=schedule)
    return Entry(recipe, f"DDPM on CIFAR-10, {schedule} schedule (adaptive paper, Table 7)", "CIFAR-10, a GPU", "35.7 M parameters, 2040 epochs")


_HOW = "(noiseclock encode: docs/latents.md)"
_FLIPPED = _HOW.replace("encode", "encode --flip")
# Settings that a paper does not print are those of its code: EDM, LDM, DiT and U-ViT do not clip; LDM has torch's default weight decay; U-ViT has a
# weight decay of its own, and a warm-up.
_DIT = Recipe(
    data="latents:PATH", flip=True, model="dit", channels=1152, blocks=28, head_channels=72, patch=2, optimizer="adamw", lr=1e-4, batch=256,
    updates=50_000, clip=0.0, precision="bf16", solver="ddpm", solver_steps=250,
)  # fmt: skip

RECIPES: dict[str, Entry] = {
    "digits": Entry(
        Recipe(
            data="digits", sampler="variance-optimal", channels=32, multipliers=(1, 2), blocks=1, attention=(4,), batch=64, lr=1e-3, warmup=100,
            ema=0.995, updates=2000, save_every=500, validate_every=500, sample_every=500,
        ),
        "8x8 digits, which come with scikit-learn", "nothing", "0.7 M parameters, minutes on 2 cores",
    ),
    "mnist": Entry(
        Recipe(
            data="mnist", sampler="variance-optimal", channels=32, multipliers=(1, 2, 2), blocks=2, attention=(7,), batch=128, lr=5e-4,
            warmup=200, ema=0.999, updates=10_000, sample_every=1000,
        ),
        "28x28 handwritten digits", "MNIST", "1.6 M parameters, hours on a CPU, minutes on a GPU",
    ),
    "cifar10-linear": _cifar10("linear"),
    "cifar10-cosine": _cifar10("cosine"),
    "cifar10-quadratic": _cifar10("quadratic"),
    "cifar10-sprint": Entry(
        Recipe(
            data="cifar10", flip=True, sampler="variance-optimal", channels=64, dropout=0.1, lr=4e-4, warmup=500, updates=20_000, ema=0.999,
            precision="bf16", compile=True, log_every=100, save_every=2000, validate_every=2000, sample_every=4000,
        ),
        "a CIFAR-10 model in minutes on one large GPU, for comparisons", "CIFAR-10, a GPU", "9.0 M parameters, 20k updates",
    ),
    "cifar10-edm": Entry(
        replace(
            _CIFAR10, dropout=0.13, schedule="edm", steps=None, objective="edm", sampler="log-normal", base="log-normal", lr=1e-3, batch=512,
            warmup=20_000, updates=390_625, clip=0.0, ema=0.9993, solver="heun", solver_steps=18,
        ),
        "score-based: EDM's preconditioning, density and solver (2206.00364) with DDPM's U-Net", "CIFAR-10, a GPU",
        "35.7 M parameters, 200 M images",
    ),
    "cifar10-flow": Entry(
        replace(
            _CIFAR10, schedule="flow", steps=None, objective="flow", sampler="logit-normal", updates=400_000, solver="heun", solver_steps=25,
        ),
        "rectified flow with SD3's logit-normal density (2403.03206) and DDPM's U-Net", "CIFAR-10, a GPU", "35.7 M parameters, 51 M images",
    ),
    "ffhq-dit": Entry(
        replace(_DIT, data="latents:data/ffhq-latents"),
        "DiT-XL/2 on FFHQ 256 as in SpeeD", f"latents 32x32x4 in data/ffhq-latents {_FLIPPED}, GPUs", "674 M parameters, 50k updates",
    ),
    "metfaces-dit": Entry(
        replace(_DIT, data="latents:data/metfaces-latents"),
        "DiT-XL/2 on MetFaces 256 as in SpeeD", f"latents 32x32x4 in data/metfaces-latents {_FLIPPED}, GPUs", "674 M parameters, 50k updates",
    ),
    "celebahq-ldm": Entry(
        Recipe(
            data="latents:data/celebahq-latents", channels=224, multipliers=(1, 2, 3, 4), attention=(32, 16, 8), head_channels=32,
            schedule="scaled-linear:beta_start=0.0015,beta_end=0.0195", optimizer="adamw", lr=1.92e-4, weight_decay=0.01, batch=24, updates=375_000,
            clip=0.0, solver="ddim", solver_steps=200,
        ),
        "latent diffusion on CelebA-HQ 256 (adaptive paper, Table 8): latents 64x64x3, 300 epochs",
        f"latents 64x64x3 in data/celebahq-latents {_HOW}, GPUs",
        "274 M parameters, 375k updates of 24",
    ),
    "imagenet-uvit": Entry(
        Recipe(
            data="latents:data/imagenet-latents", flip=True, conditional=True, model="uvit", channels=1152, blocks=28, head_channels=72,
            schedule="cosine", weighting="min-snr", optimizer="adamw", lr=2e-4, betas=(0.99, 0.99), weight_decay=0.03, batch=256,
            updates=2_100_000, warmup=5000, clip=0.0, precision="bf16", solver="heun", solver_steps=50,
        ),
        "U-ViT-H on ImageNet 256 (adaptive paper, Table 9, which prints depth 12 where U-ViT-H has 28): latents 32x32x4, hidden 1152, 16 heads",
        f"latents 32x32x4 in data/imagenet-latents {_FLIPPED}, GPUs", "501 M parameters, 2.1 M updates of 256",
    ),
    "imagenet-dit": Entry(
        replace(_DIT, data="latents:data/imagenet-latents", conditional=True, updates=400_000),
        "DiT-XL/2 on ImageNet 256 as in SpeeD and DiT", f"latents 32x32x4 in data/imagenet-latents {_FLIPPED}, GPUs",
        "675 M parameters, 400k updates of 256",
    ),
    "coco-t2i": Entry(
        Recipe(
            data="latents:data/coco-latents", conditional=True, model="uvit", channels=512, blocks=12, head_channels=64, patch=2,
            schedule="scaled-linear", optimizer="adamw", lr=2e-4, betas=(0.9, 0.9), weight_decay=0.03, batch=256, warmup=5000, updates=1_000_000,
            clip=0.0, precision="bf16", solver="dpm++", solver_steps=50,
        ),
        "text to image on MS-COCO 256 as in SpeeD: U-ViT-S/2 as released (2209.12152), 77 tokens of CLIP ViT-L/14",
        "latents 32x32x4 of embedded captions in data/coco-latents (noiseclock embed, then encode: docs/text.md), a GPU",
        "45 M parameters, 1 M updates of 256",
    ),
}  # fmt: skip


def recipe(name: str) -> Recipe:
    """The recipe called `name`."""
    return entry_of(name).recipe


def entry_of(name: str) -> Entry:
    """The entry called `name`."""
    return RECIPES[choose("recipe", name, RECIPES)]
