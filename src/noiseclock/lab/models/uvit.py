"""U-ViT (Bao et al., 2209.12152, "All are Worth Words"), for pixels or latents.

Time, class or caption, and the patches of the picture are all tokens, and long skip connections lead from the first half of the blocks to the second,
as in a U-Net. Written from the paper, with its defaults: no bias in queries, keys and values, no MLP on the sinusoidal time embedding, and a 3×3
convolution at the end. (diffusers' `UVit2DModel` is another network, of a text-to-image model.)
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import Timesteps
from torch import Tensor, nn
from torch.nn import functional

from noiseclock.lab.errors import Mistake
from noiseclock.lab.models.patches import assembled, grid, heads
from noiseclock.lab.models.recompute import way_through


class UViT(nn.Module):
    """x (B, C, H, W), t (B,), labels (B,) or captions (B, L, D) -> (B, C, H, W).

    blocks: the depth, half of it on either side of one middle block. H has depth 28 in the released code, which gives the 29 layers of the paper's
    Table 1; 29 builds the same network.

    empty: (L, D), the empty caption, for a model of captions. A linear layer turns captions into tokens, which come before those of the picture, as
    in the paper for MS-COCO. A token of zeros is padding: nothing attends to it. (The paper's model attends to the encoder's output for padding.)
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        classes: int | None,
        channels: int,
        blocks: int,
        head_channels: int,
        patch: int,
        dropout: float,
        time_scale: float,
        checkpointing: bool = False,
        empty: Tensor | None = None,
    ) -> None:
        super().__init__()
        if channels < 2 or channels % 2:
            raise Mistake(f"channels must be an even number, for sines and cosines of the time, got {channels}")
        colours, half = shape[0], blocks // 2
        rows, columns = grid(shape, patch)
        size = channels, heads(channels, head_channels), dropout
        self.null: Any = classes if empty is None else nn.Buffer(empty)
        self.time_scale = time_scale
        self.patch = patch
        self.through = way_through(checkpointing, dropout)
        self.tokens = nn.Conv2d(colours, channels, patch, patch)
        self.time = Timesteps(channels, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.label = None if classes is None else nn.Embedding(classes + 1, channels)
        self.text = None if empty is None else nn.Linear(empty.shape[1], channels)
        self.before = 1 + (classes is not None) + (0 if empty is None else len(empty))  # tokens before those of the picture
        self.positions = nn.Parameter(torch.empty(self.before + rows * columns, channels))
        self.first = nn.ModuleList(Block(*size) for _ in range(half))
        self.middle = nn.ModuleList([Block(*size)])  # a list, so that `shards.blocks` finds it
        self.second = nn.ModuleList(Block(*size, joins=True) for _ in range(half))
        self.norm = nn.LayerNorm(channels)
        self.out = nn.Linear(channels, patch * patch * colours)
        self.smooth = nn.Conv2d(colours, colours, 3, padding=1)
        self._start_as_in_the_paper()

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The prediction; without labels, for "no class", or for the empty caption."""
        if self.null is None and labels is not None:
            raise Mistake("this U-ViT knows no classes: leave the labels out, or build it with classes=...")
        if self.null is not None and labels is None:
            labels = torch.full((len(x),), self.null, device=x.device) if self.text is None else self.null.expand(len(x), -1, -1)
        patches = self.tokens(x)  # (B, D, H/p, W/p)
        tokens = [self.time(t * self.time_scale).to(x.dtype)[:, None], patches.flatten(2).mT]
        if self.label is not None:
            tokens.insert(1, self.label(labels)[:, None])
        seen = None
        if self.text is not None and labels is not None:
            tokens.insert(1, self.text(labels.to(x.dtype)))
            words = labels.any(2)  # (B, L)
            seen = torch.cat([words.new_ones(len(x), 1), words, words.new_ones(len(x), tokens[2].shape[1])], 1)[:, None, None]
        h = torch.cat(tokens, 1) + self.positions  # (B, before + N, D)
        kept = []
        for block in self.first:
            h = self.through(block, h, seen)
            kept.append(h)
        for block in self.middle:
            h = self.through(block, h, seen)
        for block in self.second:
            h = self.through(block, h, seen, kept.pop())
        h = self.out(self.norm(h)[:, self.before :])
        out: Tensor = self.smooth(assembled(h, patches.shape[2:], self.patch))
        return out

    def _start_as_in_the_paper(self) -> None:
        # nothing is initialised to zero, unlike in DiT and DDPM; convolutions keep torch's defaults
        nn.init.trunc_normal_(self.positions, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class Block(nn.Module):
    """A pre-norm transformer block: h (B, N, D) -> (B, N, D). joins: it also takes the output of an earlier block.

    seen: bool (B, 1, 1, N), the attention mask; by default all tokens are attended to.
    """

    def __init__(self, channels: int, heads: int, dropout: float, joins: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.join = nn.Linear(2 * channels, channels) if joins else None
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels, bias=False)
        self.mix = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * channels, channels))
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, seen: Tensor | None = None, earlier: Tensor | None = None) -> Tensor:
        """The block's output."""
        if self.join is not None and earlier is not None:
            h = self.join(torch.cat([h, earlier], 2))
        q, k, v = self.qkv(self.norm1(h)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, D/heads)
        h = h + self.dropout(self.mix(functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)))
        out: Tensor = h + self.mlp(self.norm2(h))
        return out
