"""Layers of diffusers' U-Net for torch.compile: all activations stay in channels-last memory, the format of the GPU's convolutions.

Inductor writes the result of torch's group norm in channels-first memory, and diffusers' upsampling and residual blocks ask for that format too. So
each convolution around them needed copies from one format to the other, forward and backward, and dropout between them read memory with large
strides: a third of the time of an update of DDPM's U-Net on one H200 (docs/performance.md). Here these layers are written in plain operations that
keep the format. Without torch.compile diffusers' own layers are faster, and are used.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
from diffusers import UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import TimestepEmbedding
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn


class Normalised(torch.autograd.Function):
    """The group norm of x + offset, with the gradient written out.

    x: (B, N, C) pixels. offset: (B, G, C/G), added to every pixel of a channel; x + offset is never written to memory. weight, bias: (G, C/G). One
    pass over the pixels sums each channel, with channels contiguous in memory; the other statistics are (B, C) numbers. With u = x + offset - centre,
    r = 1/σ and y = u·r·weight + bias, the gradient is dx = dy·r·weight + u·q + p, with one q and one p per group. So the offset's gradient, which is
    the sum of dx over pixels, follows from known sums without a third pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        variance, mean = (part.view(offset.shape) for part in torch.var_mean(x.to(weight.dtype), 1, correction=0))
        centre = (mean + offset).mean(2, keepdim=True)
        away = mean + offset - centre
        r = torch.rsqrt((variance + away.square()).mean(2, keepdim=True) + eps)
        scale, moved = r * weight, offset - centre
        ctx.save_for_backward(x, weight, r, moved, away)
        return x.to(weight.dtype) * scale.flatten(1)[:, None] + (moved * scale + bias).flatten(1)[:, None]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, weight, r, moved, away = ctx.saved_tensors
        pixels, members = x.shape[1], weight.shape[1]
        dy = dy.to(weight.dtype)
        with_x, alone = (total.view(moved.shape) for total in ((dy * x.to(weight.dtype)).sum(1), dy.sum(1)))
        with_u = with_x + moved * alone
        q = -(r**3) * (with_u * weight).sum(2, keepdim=True) / (pixels * members)
        p = -r * (alone * weight).sum(2, keepdim=True) / (pixels * members)
        dx = dy * (r * weight).flatten(1)[:, None] + x.to(weight.dtype) * q.expand_as(moved).flatten(1)[:, None] + (moved * q + p).flatten(1)[:, None]
        d_offset = r * weight * alone + pixels * (away * q + p)
        return dx.to(x.dtype), d_offset, _over_batch(with_u * r), _over_batch(alone), None


# Unless told so, torch keeps no traced and differentiated graph with such a function for the next process, which then spends nearly half of its
# compiling on doing that again. Both bodies of the function are part of the key under which the graph is kept.
with suppress(AttributeError):  # a setting of torch's own, which a later version may not have
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def _over_batch(x: Tensor) -> Tensor:
    """The sum of (B, ...) over B, in two stages if 16 divides B: a single stage occupies only a few of the GPU's multiprocessors."""
    stage = 16
    return x.view(-1, stage, *x.shape[1:]).sum(1).sum(0) if len(x) % stage == 0 else x.sum(0)


class GroupNorm(nn.GroupNorm):
    """torch's group norm, of (B, C, ...)."""

    def forward(self, x: Tensor, offset: Tensor | None = None) -> Tensor:
        """The norm of x + offset, with offset (B, C), in the memory format of x. Only compiled code may pass an offset."""
        if not torch.compiler.is_compiling():
            return super().forward(x)
        size, channels = x.shape[:2]
        last = x.movedim(1, -1)
        grouped = (size, self.num_groups, channels // self.num_groups)
        offset = self.weight.new_zeros(size, channels) if offset is None else offset
        given = last.flatten(1, -2), offset.to(self.weight.dtype).view(grouped)  # float32, as under torch.autocast
        y: Tensor = Normalised.apply(*given, self.weight.view(grouped[1:]), self.bias.view(grouped[1:]), self.eps)  # type: ignore[no-untyped-call]
        return y.view(last.shape).movedim(-1, 1)


class Dropout(nn.Dropout):
    """torch's dropout of pictures (B, C, H, W), with a hash of each value's index instead of a random number for each.

    Inductor spends forty integer multiplications on four random numbers and uses one of them: two thirds of the layer's time. Four are enough.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x with a share p of its values at 0 and the others scaled up; every call draws a new mask."""
        if not torch.compiler.is_compiling() or not self.training or self.p == 0 or x.ndim != 4:
            return super().forward(x)
        size, channels, height, width = x.shape
        place = torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(size, height, width, channels).permute(0, 3, 1, 2)
        seed = torch.randint(2**31 - 1, (), dtype=torch.int32, device=x.device)
        kept = (mixed(mixed(place) ^ seed) & 0x7FFFFFFF) >= int(self.p * 2**31)
        return torch.where(kept, x / (1 - self.p), 0)


def mixed(x: Tensor) -> Tensor:
    """A permutation of the int32 numbers in which every bit of x changes every bit of the result half of the time (Wellons' lowbias32)."""
    x = (x ^ (x >> 16 & 0xFFFF)) * 0x7FEB352D
    x = (x ^ (x >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return x ^ (x >> 16 & 0xFFFF)


class Times(TimestepEmbedding):  # type: ignore[misc]
    """diffusers' time embedding, with the projections of all residual blocks in one matrix product instead of one in each block."""

    def forward(self, sample: Tensor, condition: Tensor | None = None) -> Tensor:
        """(B, E), or when compiled (B, sum of all blocks' C)."""
        embedded: Tensor = super().forward(sample, condition)
        weights = [block.time_emb_proj.weight for block in self.blocks]
        if not torch.compiler.is_compiling() or any(hasattr(weight, "device_mesh") for weight in weights):  # each block gathers its own shards
            return embedded
        # the norm adds everything that is the same for all pixels, so the convolution's bias too
        biases = [block.time_emb_proj.bias + block.conv1.bias for block in self.blocks]
        return F.linear(F.silu(embedded), torch.cat(weights), torch.cat(biases))


class Residual(ResnetBlock2D):  # type: ignore[misc]
    """diffusers' residual block, of the kind that adds the time embedding and keeps the size. place: its channels in the output of `Times`."""

    place = slice(0)

    def forward(self, input_tensor: Tensor, temb: Tensor, *args: object, **kwargs: object) -> Tensor:
        """(B, C', H, W) from (B, C, H, W) and the embedded time (B, E)."""
        if not torch.compiler.is_compiling():
            out: Tensor = super().forward(input_tensor, temb)
            return out
        x, first = self.nonlinearity(self.norm1(input_tensor)), self.conv1
        embedded = temb.shape[1] == self.time_emb_proj.in_features  # the output of `Times` is always wider
        offset = self.time_emb_proj(self.nonlinearity(temb)) + first.bias if embedded else temb[:, self.place]
        x = self.norm2(F.conv2d(x, first.weight, stride=first.stride, padding=first.padding), offset)
        x = self.conv2(self.dropout(self.nonlinearity(x)))
        kept = input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor)
        out = (kept + x) / self.output_scale_factor
        return out


class SelfAttention(Attention):  # type: ignore[misc]
    """diffusers' attention between the pixels of a picture, with queries, keys and values from one matrix product."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
        """(B, C, H, W) from (B, C, H, W)."""
        if not torch.compiler.is_compiling() or encoder_hidden_states is not None or hidden_states.ndim != 4:
            out: Tensor = super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)
            return out
        last = self.group_norm(hidden_states).movedim(1, -1)
        asked = self.to_q, self.to_k, self.to_v
        together = F.linear(last.flatten(1, 2), torch.cat([layer.weight for layer in asked]), torch.cat([layer.bias for layer in asked]))
        q, k, v = together.view(*together.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = self.to_out[1](self.to_out[0](seen)).view(last.shape).movedim(-1, 1)
        out = (out + hidden_states if self.residual_connection else out) / self.rescale_output_factor
        return out


class Upsample(Upsample2D):  # type: ignore[misc]
    """diffusers' upsampling: nearest neighbour by 2, then a convolution."""

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


def keep_channels_last(net: UNet2DModel) -> None:
    """Replace every such layer of a U-Net by one of these, in place. Parameters and their names stay."""
    for module in net.modules():
        if type(module) is nn.GroupNorm:
            module.__class__ = GroupNorm
        elif type(module) is nn.Dropout:
            module.__class__ = Dropout
        elif type(module) is Upsample2D and module.use_conv and module.norm is None:
            module.__class__ = Upsample
        elif type(module) is ResnetBlock2D and module.time_embedding_norm == "default" and module.upsample is None and module.downsample is None:
            module.__class__ = Residual
        elif type(module) is Attention and module.group_norm is not None:  # otherwise all attention in `UNet2DModel` is alike
            module.__class__ = SelfAttention
    blocks = [module for module in net.modules() if isinstance(module, ResnetBlock2D)]
    # not with classes: their embedding is added to that of the time later
    if net.class_embedding is None and all(type(block) is Residual and type(block.nonlinearity) is nn.SiLU for block in blocks):
        net.time_embedding.__class__, net.time_embedding.blocks = Times, blocks
        start = 0
        for block in blocks:
            block.place = slice(start, start := start + block.out_channels)
