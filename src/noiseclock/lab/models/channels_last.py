"""Three layers of diffusers' U-Net as a compiler likes them: everything stays in channels-last memory, where the GPU's convolutions work.

Inductor writes the result of torch's group norm with the channels first, and diffusers' upsampling and residual blocks ask for that order too. So
each convolution around them had its pictures copied from one order to the other, in both directions of the pass, and dropout between them read
memory with large strides: a third of the time of an update of DDPM's U-Net on one H200 (docs/performance.md). Here they are written in plain
operations that keep the order. Without a compiler torch's own group norm and upsampling are faster, and are used.
"""

from __future__ import annotations

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn


class GroupNorm(nn.GroupNorm):
    """torch's group norm, of (B, C, ...)."""

    def forward(self, x: Tensor) -> Tensor:
        """The same values in the same order of memory as x."""
        if not torch.compiler.is_compiling():
            return super().forward(x)
        last = x.movedim(1, -1).float()  # torch.autocast too takes it to float32
        # Sums over pixels for each channel, which lie side by side, then over the few channels of a group: the gradient has the same form.
        variance, mean = (part.view(len(x), self.num_groups, -1) for part in torch.var_mean(last.flatten(1, -2), 1, correction=0))
        centre = mean.mean(2, keepdim=True)
        spread = variance.mean(2, keepdim=True) + (mean - centre).square().mean(2, keepdim=True)
        scale = torch.rsqrt(spread + self.eps) * self.weight.view(self.num_groups, -1)
        shift = self.bias.view(self.num_groups, -1) - centre * scale
        wide = (len(x), *[1] * (x.ndim - 2), x.shape[1])
        return (last * scale.view(wide) + shift.view(wide)).movedim(-1, 1)


class Residual(ResnetBlock2D):  # type: ignore[misc]
    """diffusers' residual block, of the kind that adds the embedded time and keeps the size."""

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: object, **kwargs: object) -> Tensor:
        """(B, C', H, W) from (B, C, H, W) and the embedded time (B, E)."""
        x = self.conv1(self.nonlinearity(self.norm1(input_tensor)))
        x = x + self.time_emb_proj(self.nonlinearity(temb))[:, :, None, None]
        x = self.conv2(self.dropout(self.nonlinearity(self.norm2(x))))
        kept = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
        out: Tensor = (kept + x) / self.output_scale_factor
        return out


class Upsample(Upsample2D):  # type: ignore[misc]
    """diffusers' upsampling: every pixel four times, then a convolution."""

    def forward(self, hidden_states: Tensor, output_size: int | None = None, *args: object, **kwargs: object) -> Tensor:
        """(B, C, 2H, 2W) from (B, C, H, W)."""
        if not torch.compiler.is_compiling() or output_size is not None:
            out: Tensor = super().forward(hidden_states, output_size)
            return out
        size, channels, height, width = hidden_states.shape
        last = hidden_states.permute(0, 2, 3, 1)[:, :, None, :, None]
        doubled = last.expand(size, height, 2, width, 2, channels).reshape(size, 2 * height, 2 * width, channels)
        out = self.conv(doubled.permute(0, 3, 1, 2))
        return out


def keep_channels_last(net: nn.Module) -> None:
    """Let every such layer of a network be one of these. Parameters and their names stay."""
    for module in net.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = GroupNorm
        elif type(module) is Upsample2D and module.use_conv and module.norm is None:
            module.__class__ = Upsample
        elif type(module) is ResnetBlock2D and module.time_embedding_norm == "default" and module.upsample is None and module.downsample is None:
            module.__class__ = Residual
