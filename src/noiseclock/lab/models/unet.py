"""U-Nets, as diffusers' `UNet2DModel`: DDPM's, which at other sizes is LDM's or a small one for digits, and ADM's."""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor, nn

from noiseclock.lab.errors import Mistake
from noiseclock.lab.models.channels_last import keep_channels_last
from noiseclock.lab.models.recompute import way_through

DDPM: dict[str, Any] = {"norm_eps": 1e-6, "downsample_padding": 0, "flip_sin_to_cos": False, "freq_shift": 1}
ADM: dict[str, Any] = {
    "norm_eps": 1e-5, "flip_sin_to_cos": True, "freq_shift": 0,
    "resnet_time_scale_shift": "scale_shift", "downsample_type": "resnet", "upsample_type": "resnet",
}  # fmt: skip


class UNet(nn.Module):
    """x (B, C, H, W), t (B,), labels (B,) -> (B, C, H, W).

    `net` is the diffusers model, which can be saved and loaded by itself. The settings are those of google/ddpm-cifar10-32: attention on the
    chosen levels and always in the middle, convolutions for down- and upsampling, group norm. LDM's U-Nets do not differ in anything that matters.

    adm: as in ADM (Dhariwal & Nichol, 2105.05233): time and class scale and shift the output of a residual block's second norm, and residual blocks
    do the down- and upsampling. ADM's heads have 64 channels.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int | None,
        channels: int,
        multipliers: tuple[int, ...],
        blocks: int,
        attention: tuple[int, ...],
        head_channels: int,
        dropout: float,
        time_scale: float,
        adm: bool = False,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        _check(shape, channels, multipliers, attention, head_channels)
        colours, height, width = shape
        widths = [channels * multiplier for multiplier in multipliers]
        attends = [height >> level in attention for level in range(len(widths))]
        down, up = ("ResnetDownsampleBlock2D", "ResnetUpsampleBlock2D") if adm else ("DownBlock2D", "UpBlock2D")
        groups = max(groups for groups in range(1, 33) if math.gcd(*widths) % groups == 0)
        self.null = classes
        self.time_scale = time_scale
        self.net = UNet2DModel(
            sample_size=height if height == width else (height, width),
            in_channels=colours,
            out_channels=colours,
            block_out_channels=tuple(widths),
            layers_per_block=blocks,
            down_block_types=tuple("AttnDownBlock2D" if yes else down for yes in attends),
            up_block_types=tuple("AttnUpBlock2D" if yes else up for yes in reversed(attends)),
            attention_head_dim=head_channels or None,
            norm_num_groups=groups,
            attn_norm_num_groups=groups,  # or diffusers would omit the norm of ADM's middle attention
            dropout=dropout,
            num_class_embeds=None if classes is None else classes + 1,
            **(ADM if adm else DDPM),
        )
        keep_channels_last(self.net)
        if checkpointing:
            self.net.enable_gradient_checkpointing(way_through(True, dropout))
        self._start_as_ddpm()

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The prediction; without labels, for "no class"."""
        if self.null is None and labels is not None:
            raise Mistake("this U-Net knows no classes: leave the labels out, or build it with classes=...")
        if self.null is not None and labels is None:
            labels = torch.full((len(x),), self.null, device=x.device)
        out: Tensor = self.net(x, t * self.time_scale, labels, return_dict=False)[0]
        return out

    def _start_as_ddpm(self) -> None:
        # DDPM initialises the last layer of every residual branch, and the output layer, to zero; diffusers keeps torch's defaults
        last = [self.net.conv_out]
        for module in self.net.modules():
            if isinstance(module, ResnetBlock2D):
                last.append(module.conv2)
            elif isinstance(module, Attention):
                last.append(module.to_out[0])
        for layer in last:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)


def _check(shape: tuple[int, int, int], channels: int, multipliers: tuple[int, ...], attention: tuple[int, ...], head_channels: int) -> None:
    """Raise where diffusers would silently build something else, or fail at the first batch."""
    _, height, width = shape
    if channels < 4 or channels % 2:
        raise Mistake(f"channels must be an even number of at least 4, for the embedding of t, got {channels}")
    if not multipliers or min(multipliers) < 1:
        raise Mistake(f"multipliers must be whole numbers of at least 1, one for each level, got {multipliers}")
    halvings = len(multipliers) - 1
    if height % 2**halvings or width % 2**halvings:
        raise Mistake(
            f"{len(multipliers)} levels halve the picture {halvings} times, so its sides must be multiples of {2**halvings}, got {height}×{width}; "
            "give fewer multipliers or another size"
        )
    heights = [height >> level for level in range(len(multipliers))]
    for side in attention:
        if side not in heights:
            raise Mistake(f"attention at height {side} never happens; this U-Net works at heights {', '.join(map(str, heights))}")
    # the middle block, as wide as the last level, always has attention
    attended = {channels * m for m, side in zip(multipliers, heights, strict=True) if side in attention} | {channels * multipliers[-1]}
    uneven = sorted(wide for wide in attended if head_channels and wide % head_channels)
    if head_channels < 0 or uneven:
        raise Mistake(f"head_channels={head_channels} must divide the width of every level that attends, here {sorted(attended)}; 0 makes one head")
