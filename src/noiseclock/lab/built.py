"""Build what a recipe describes: its data, network and optimiser, and samples from the network."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from noiseclock.core.clock import Clock
from noiseclock.lab.captured import CapturedForward
from noiseclock.lab.data import Data, load
from noiseclock.lab.errors import Mistake
from noiseclock.lab.generate import generate
from noiseclock.lab.latents import Latents
from noiseclock.lab.models import build, time_scale
from noiseclock.lab.processes import all_or_none
from noiseclock.lab.recipes import Recipe

WORTH_COMPILING = 200_000  # pictures times solver steps from which compiling pays
AT_ONCE = 2**20  # pixels of a batch of samples on a GPU: a thousand pictures of 32x32, so that what the host does between forward passes costs little


def loaded(recipe: Recipe, accelerator: Accelerator) -> list[Data]:
    """The training images and the held-out images. Rank 0 loads first, because it may have to download them."""
    found: list[Data] = []
    for main_process in (True, False):
        with all_or_none(accelerator):
            if accelerator.is_main_process == main_process:
                found = [load(recipe.data, split=split, size=recipe.size) for split in ("train", "test")]
    return found


def network(recipe: Recipe, data: Data, clock: Clock) -> Any:
    """The network of a recipe, with input shape and conditioning for its data."""
    if recipe.conditional and data.classes is None and data.texts is None:
        raise Mistake(f"{data.name} has no classes, so the model cannot be conditional; use --no-conditional")
    empty = data.texts.empty if recipe.conditional and data.texts is not None else None
    return build(
        recipe.model, data.shape, classes=data.classes if recipe.conditional else None, channels=recipe.channels, multipliers=recipe.multipliers,
        blocks=recipe.blocks, attention=recipe.attention, head_channels=recipe.head_channels, patch=recipe.patch, dropout=recipe.dropout,
        time_scale=time_scale(clock.schedule), checkpointing=recipe.checkpointing, empty=empty,
    )  # fmt: skip


def told_held_out(recipe: Recipe, held_out: Data, *, warn: bool = True) -> bool:
    """Does the model get the labels or captions of held-out images? If they have none, a conditional model gets the null class, with a warning."""
    if recipe.conditional and held_out.labels is None and warn:
        untrained = "" if recipe.drop_labels else ", which it was not trained with: drop_labels is 0"
        warnings.warn(f"{held_out.name} has no labels, so the model is evaluated there with the null class{untrained}", stacklevel=2)
    return recipe.conditional and held_out.labels is not None


def sampled(
    net: Any, recipe: Recipe, clock: Clock, data: Data, n: int, *, seed: int = 0, guidance: float = 1.0,
    solver: str | None = None, steps: int | None = None, batch: int | None = None, device: torch.device | str = "cpu", progress: Any = None,
    asked: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """n samples of a network, uint8 (n, C, H, W), by the recipe's solver unless `solver` and `steps` say otherwise; latents are decoded.

    batch: samples per forward pass, by default as many as suit the device; halved, with a warning, for as long as memory runs out. On a GPU every
    batch has the same size, at most `batch`, because a CUDA graph has fixed shapes. asked: classes (m,) or embedded captions (m, L, D) for a
    conditional network, used in turn; if None, all classes in turn or the captions of held-out images. The network is compiled if the recipe says
    so and there are enough solver steps to pay for the minute of compiling.
    """
    solver, steps = solver or recipe.solver, recipe.solver_steps if steps is None else steps
    device, wanted = torch.device(device), n
    if batch is None:
        batch = min(1000, max(1, AT_ONCE // math.prod(data.shape[1:]))) if device.type == "cuda" else 256
    predict = net
    if device.type == "cuda" and min(n, batch) > 0:
        count = -(-n // batch)
        batch = -(-n // count)
        n = count * batch
        predict = CapturedForward(torch.compile(net, dynamic=False) if recipe.compile and n * steps >= WORTH_COMPILING else net)  # type: ignore[arg-type]
    if guidance != 1 and not recipe.conditional:
        raise Mistake("guidance needs a model of classes or captions, and this one was trained without; leave guidance out")
    if guidance != 1 and not recipe.drop_labels:
        raise Mistake("guidance needs a model that was also trained without labels; this one was trained with drop_labels 0")
    labels = None
    if recipe.conditional and asked is not None:
        labels = asked[torch.arange(n) % len(asked)]
    elif recipe.conditional:
        labels = data.texts.held_out(n) if data.texts is not None else torch.arange(n) % data.classes if data.classes else None
    null = net.null if labels is not None else None
    try:
        # without autocast's cache: a captured graph would read cached casts that have been freed
        with torch.autocast(device.type, torch.bfloat16, enabled=recipe.precision == "bf16", cache_enabled=False):
            return generate(
                predict, clock.schedule, clock.objective, data.shape, n, solver=solver, steps=steps, seed=seed, batch=batch, labels=labels,
                guidance=guidance, null=null, device=device, variance=recipe.variance, progress=progress,
                decode=data.decoded if isinstance(data, Latents) else None,
            )[:wanted]  # fmt: skip
    except torch.OutOfMemoryError:
        if min(n, batch) == 1:
            raise
    fewer = -(-min(n, batch) // 2)
    warnings.warn(f"memory ran out while sampling; it starts again with {fewer} samples at a time", stacklevel=2)
    return sampled(
        net, recipe, clock, data, wanted, seed=seed, guidance=guidance, solver=solver, steps=steps, batch=fewer, device=device, progress=progress,
        asked=asked,
    )  # fmt: skip


def optimizer_for(recipe: Recipe, *groups: list[nn.Parameter], **how: Any) -> torch.optim.Optimizer:
    """The recipe's optimiser for some groups of parameters. how: options that depend on the machine, such as `fused`."""
    make = torch.optim.Adam if recipe.optimizer == "adam" else torch.optim.AdamW
    options: dict[str, Any] = {"lr": recipe.lr, "betas": recipe.betas, "weight_decay": recipe.weight_decay, **how}
    return make([{"params": group} for group in groups], **options)


def placed(net: Any, device: torch.device | str) -> Any:
    """The network on a device, on a GPU in the memory format channels_last, in which convolutions are faster."""
    device = torch.device(device)
    return net.to(device, memory_format=torch.channels_last) if device.type == "cuda" else net.to(device)
