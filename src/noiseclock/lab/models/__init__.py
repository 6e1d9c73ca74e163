"""The networks: `build` makes a U-Net, a DiT or a U-ViT, called as model(x, t, labels) -> (B, C, H, W).

All have one class embedding more than classes: label `model.null` stands for "no class", for classifier-free guidance. A U-ViT can take captions
(B, L, D) instead of labels; `model.null` is then the empty caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from noiseclock.core.schedules import Discrete, Schedule
from noiseclock.lab.errors import Mistake
from noiseclock.lab.models.dit import DiT
from noiseclock.lab.models.uvit import UViT

if TYPE_CHECKING:
    from noiseclock.lab.models.unet import UNet

# The sizes of the DiT paper (2212.09748, Table 1); the name S/2 means size S with patches of 2×2.
DIT: dict[str, dict[str, int]] = {
    "S": {"channels": 384, "blocks": 12, "head_channels": 64},
    "B": {"channels": 768, "blocks": 12, "head_channels": 64},
    "L": {"channels": 1024, "blocks": 24, "head_channels": 64},
    "XL": {"channels": 1152, "blocks": 28, "head_channels": 72},
}

# The sizes of U-ViT (2209.12152, Table 1), with the depth as its released code has it, one less than the layers in that table.
UVIT: dict[str, dict[str, int]] = {
    "S": {"channels": 512, "blocks": 12, "head_channels": 64},
    "S-deep": {"channels": 512, "blocks": 16, "head_channels": 64},
    "M": {"channels": 768, "blocks": 16, "head_channels": 64},
    "L": {"channels": 1024, "blocks": 20, "head_channels": 64},
    "H": {"channels": 1152, "blocks": 28, "head_channels": 72},
}


def build(
    kind: str,
    shape: tuple[int, int, int],
    *,
    classes: int | None = None,
    channels: int = 128,
    multipliers: Sequence[int] = (1, 2, 2, 2),
    blocks: int = 2,
    attention: Sequence[int] = (16,),
    head_channels: int = 0,
    patch: int = 2,
    dropout: float = 0.0,
    time_scale: float = 1.0,
    checkpointing: bool = False,
    empty: Tensor | None = None,
) -> UNet | DiT | UViT:
    """A network for data of `shape` (C, H, W).

    kind: "unet" (DDPM's), "adm" (ADM's U-Net), "dit" or "uvit". classes: how many, None for none. channels: the width; of a U-Net, that of its first
    level. blocks: residual blocks per level of a U-Net, or the depth of a DiT or U-ViT. head_channels: of one attention head; 0 makes a single head.
    dropout: its probability. time_scale: the factor on t before its embedding; take `time_scale(schedule)`. Only U-Nets read `multipliers`, the width
    of each level relative to the first, and `attention`, the heights with self-attention; only the others read `patch`, the side of their patches.
    checkpointing: gradient checkpointing of the blocks. empty: the embedded empty caption (L, D), for a DiT or U-ViT with captions.

    >>> model = build("unet", (1, 8, 8), channels=32, multipliers=(1, 2), blocks=1, attention=(4,))
    >>> model(torch.zeros(5, 1, 8, 8), torch.arange(5)).shape
    torch.Size([5, 1, 8, 8])
    """
    if len(shape) != 3 or min(shape) < 1:
        raise Mistake(f"a model needs the shape (channels, height, width) of its data, got {shape}")
    if classes is not None and classes < 1:
        raise Mistake(f"classes must be at least 1, or None for data without labels, got {classes}")
    if blocks < 1 or not 0 <= dropout < 1:
        raise Mistake(f"a model needs at least one block and a dropout in [0, 1), got {blocks=} and {dropout=}")
    if empty is not None and (kind not in ("dit", "uvit") or classes is not None):
        raise Mistake(f"captions are read by a DiT or U-ViT without classes alone, got {kind!r} and {classes=}; take model dit or uvit")
    if kind in ("unet", "adm"):
        from noiseclock.lab.models.unet import UNet  # only when needed: diffusers takes seconds to import

        levels = tuple(multipliers), blocks, tuple(attention)
        return UNet(shape, classes, channels, *levels, head_channels, dropout, time_scale, adm=kind == "adm", checkpointing=checkpointing)
    if kind == "dit":
        return DiT(shape, classes, channels, blocks, head_channels, patch, dropout, time_scale, checkpointing, empty)
    if kind == "uvit":
        return UViT(shape, classes, channels, blocks, head_channels, patch, dropout, time_scale, checkpointing, empty)
    raise Mistake(f"unknown kind of model {kind!r}; known: adm, dit, unet, uvit")


def time_scale(schedule: Schedule) -> float:
    """The factor by which t spans the 1000 units that sinusoidal embeddings are made for.

    Steps are passed on as they are, as every published model expects them. A continuous t (ln σ/4 of EDM, u of flow) spans one or two units,
    over which the embedding hardly changes, so it is stretched to the span of DDPM's 1000 steps.
    """
    if isinstance(schedule, Discrete):
        return 1.0
    ends = schedule.condition(torch.tensor([0.0, 1.0], dtype=torch.float64, device="cpu"))
    return 1000 / float(ends[1] - ends[0])


def count(model: nn.Module) -> int:
    """How many parameters the model has."""
    return sum(parameter.numel() for parameter in model.parameters())
