"""Autoencoders of a few thousand random weights, as folders that diffusers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderTiny, VQModel

from noiseclock.lab.encode import encode

BLOCKS: dict[str, Any] = {
    "block_out_channels": (8, 8), "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 2,
}  # fmt: skip
TINY_BLOCKS: dict[str, Any] = {
    "encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
}  # fmt: skip
KINDS = ("AutoencoderKL", "VQModel", "AutoencoderTiny")


def made(kind: str = "AutoencoderKL", channels: int = 1, latent_channels: int = 2, seed: int = 0) -> Any:
    """One that halves pictures once."""
    torch.manual_seed(seed)
    both = {"in_channels": channels, "out_channels": channels, "latent_channels": latent_channels}
    if kind == "AutoencoderTiny":
        return AutoencoderTiny(**both, **TINY_BLOCKS).eval()
    if kind == "VQModel":
        return VQModel(**both, **BLOCKS, num_vq_embeddings=16).eval()
    return AutoencoderKL(**both, **BLOCKS).eval()


def saved(folder: Path, kind: str = "AutoencoderKL", **options: Any) -> Path:
    """Its folder."""
    made(kind, **options).save_pretrained(str(folder))
    return folder


def encoded(folder: Path, coder: Path, data: str = "digits", **options: Any) -> Path:
    """A folder of latents, in shards of 400."""
    for _ in encode(data, coder, folder, **{"batch": 100, "shard_size": 400, **options}):
        pass
    return folder
