"""What the transformers share: pictures cut into square patches, and put together again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from noiseclock.lab.errors import Mistake


def grid(shape: tuple[int, int, int], patch: int) -> tuple[int, int]:
    """How many rows and columns of patches a picture of this shape (C, H, W) has."""
    _, height, width = shape
    if patch < 1 or height % patch or width % patch:
        raise Mistake(f"patches of {patch}×{patch} do not tile a picture of {height}×{width}; choose a patch that divides both sides")
    return height // patch, width // patch


def heads(channels: int, head_channels: int) -> int:
    """The number of attention heads of `head_channels` channels each; 0 makes a single head."""
    if head_channels < 0 or (head_channels and channels % head_channels):
        raise Mistake(f"head_channels={head_channels} must divide channels={channels}; 0 makes one head")
    return channels // (head_channels or channels)


def assembled(patches: Tensor, cut: Sequence[int], side: int) -> Tensor:
    """(B, C, rows·side, columns·side) from (B, rows·columns, side·side·C), where `cut` is (rows, columns)."""
    rows, columns = cut
    placed = patches.view(len(patches), rows, columns, side, side, -1)
    return placed.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)
