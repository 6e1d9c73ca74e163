"""DiT with adaLN-Zero (Peebles & Xie, 2212.09748), for pixels or latents.

Written here because diffusers' `DiTTransformer2DModel` is made for inference: every block has its own label and time embeddings (750 M parameters
in XL/2, 675 M in the paper) and drops labels independently in training, and no layer is initialised to zero. With the same weights both networks
agree, which a test checks.

With captions every block has a cross-attention between its self-attention and its MLP, as in PixArt-α (2310.00426): without norm or gate, and with an
output that starts at zero, so that a new model ignores its captions.
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

FREQUENCIES = 256


class DiT(nn.Module):
    """x (B, C, H, W), t (B,), labels (B,) or captions (B, L, D) -> (B, C, H, W).

    The paper's networks predict a variance too, 2·C channels; this one predicts C.

    empty: (L, D), the empty caption, for a model of captions. A token of zeros is padding: nothing attends to it.
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
        colours = shape[0]
        rows, columns = grid(shape, patch)
        if channels < 4 or channels % 4:
            raise Mistake(f"channels must be a multiple of 4, for sines and cosines of two coordinates, got {channels}")
        self.null: Any = classes if empty is None else nn.Buffer(empty)
        self.time_scale = time_scale
        self.patch = patch
        self.through = way_through(checkpointing, dropout)
        self.tokens = nn.Conv2d(colours, channels, patch, patch)
        self.positions = nn.Buffer(_positions(rows, columns, channels), persistent=False)
        self.frequencies = Timesteps(FREQUENCIES, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.time = nn.Sequential(nn.Linear(FREQUENCIES, channels), nn.SiLU(), nn.Linear(channels, channels))
        self.label = None if classes is None else nn.Embedding(classes + 1, channels)
        self.text = None
        if empty is not None:
            self.text = nn.Sequential(nn.Linear(empty.shape[1], channels), nn.GELU("tanh"), nn.Linear(channels, channels))
        size = channels, heads(channels, head_channels), dropout
        self.blocks = nn.ModuleList(Block(*size, reads=empty is not None) for _ in range(blocks))
        self.norm = _norm(channels)
        self.modulation = nn.Linear(channels, 2 * channels)
        self.out = nn.Linear(channels, patch * patch * colours)
        self._start_as_in_the_paper()

    def forward(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The prediction; without labels, for "no class", or for the empty caption."""
        if self.null is None and labels is not None:
            raise Mistake("this DiT knows no classes: leave the labels out, or build it with classes=...")
        if self.null is not None and labels is None:
            labels = torch.full((len(x),), self.null, device=x.device) if self.text is None else self.null.expand(len(x), -1, -1)
        words = seen = None
        if self.text is not None and labels is not None:
            words, seen = self.text(labels.to(x.dtype)), labels.any(2)  # (B, L, D) and (B, L)
            seen = (seen | ~seen.any(1, keepdim=True))[:, None, None]  # attention to no token at all would be NaN
        cond = self.time(self.frequencies(t * self.time_scale).to(x.dtype))  # (B, D)
        if self.label is not None:
            cond = cond + self.label(labels)
        cond = functional.silu(cond)
        tokens = self.tokens(x)  # (B, D, H/p, W/p)
        h = tokens.flatten(2).mT + self.positions  # (B, N, D)
        for block in self.blocks:
            h = self.through(block, h, cond, words, seen)
        shift, scale = self.modulation(cond)[:, None].chunk(2, -1)
        h = self.out(self.norm(h) * (1 + scale) + shift)
        return assembled(h, tokens.shape[2:], self.patch)

    def _start_as_in_the_paper(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.tokens.weight.flatten(1))
        if self.tokens.bias is not None:
            nn.init.zeros_(self.tokens.bias)
        for module in (*self.time, self.label, *(self.text or ())):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        # every block starts as the identity, and the network predicts zero
        blocks = [block for block in self.modules() if isinstance(block, Block)]
        read = [block.read.mix for block in blocks if block.read is not None]
        for layer in (*(block.modulation for block in blocks), *read, self.modulation, self.out):
            nn.init.zeros_(layer.weight)


class Block(nn.Module):
    """A transformer block whose norms and branches are shifted, scaled and gated by the condition: h (B, N, D), cond (B, D) -> (B, N, D).

    reads: it attends to the words (B, L, D) of a caption too, where `seen`, bool (B, 1, 1, L), allows it.
    """

    def __init__(self, channels: int, heads: int, dropout: float, reads: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = _norm(channels), _norm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)
        self.mix = nn.Linear(channels, channels)
        self.mlp = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU("tanh"), nn.Dropout(dropout), nn.Linear(4 * channels, channels))
        self.dropout = nn.Dropout(dropout)
        self.modulation = nn.Linear(channels, 6 * channels)
        self.read = CrossAttention(channels, heads, dropout) if reads else None

    def forward(self, h: Tensor, cond: Tensor, words: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """The block's output."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(cond)[:, None].chunk(6, -1)
        qkv = self.qkv(self.norm1(h) * (1 + scale1) + shift1)
        q, k, v = qkv.unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, N, D/heads)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + gate1 * self.dropout(self.mix(attended))
        if self.read is not None and words is not None:
            h = h + self.read(h, words, seen)
        out: Tensor = h + gate2 * self.mlp(self.norm2(h) * (1 + scale2) + shift2)
        return out


class CrossAttention(nn.Module):
    """What tokens h (B, N, D) read in the words (B, L, D) that are `seen`, bool (B, 1, 1, L): (B, N, D)."""

    def __init__(self, channels: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.mix = nn.Linear(channels, channels), nn.Linear(channels, 2 * channels), nn.Linear(channels, channels)
        self.dropout = nn.Dropout(dropout)

    def forward(self, h: Tensor, words: Tensor, seen: Tensor | None) -> Tensor:
        """The output."""
        q = self.q(h).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, N, D/heads)
        k, v = self.kv(words).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each (B, heads, L, D/heads)
        out: Tensor = self.dropout(self.mix(functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)))
        return out


def _norm(channels: int) -> nn.LayerNorm:
    return nn.LayerNorm(channels, eps=1e-6, elementwise_affine=False)


def _positions(rows: int, columns: int, channels: int) -> Tensor:
    """(rows·columns, channels): sines and cosines of the column, then of the row."""
    omega = 10000.0 ** -(torch.arange(channels // 4, dtype=torch.float64) / (channels // 4))
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    angles = [coordinate.flatten()[:, None] * omega for coordinate in (column, row)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], 1).float()
