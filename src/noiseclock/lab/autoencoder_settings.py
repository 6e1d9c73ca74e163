"""The settings of `noiseclock train-autoencoder`, in a module of their own so that --help does not import diffusers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noiseclock.lab.errors import Mistake, choose
from noiseclock.lab.recipes import LARGEST_SEED, PRECISIONS


@dataclass(frozen=True)
class Settings:
    """The training of one autoencoder. data: as in a recipe, without latents."""

    data: str
    size: int | None = None
    """side to which folder, hf and captions pictures are cropped and resized"""
    flip: bool = False
    """mirror each picture with probability 1/2"""
    channels: int = 32
    """channels at full resolution; at lower resolutions up to four times as many"""
    latent_channels: int = 4
    """channels of the latents"""
    factor: int = 8
    """downsampling factor from pictures to latents: 2, 4, 8 ..."""
    updates: int = 20_000
    """total number of optimiser updates"""
    batch: int = 32
    """pictures per update"""
    lr: float = 3e-4
    """Adam's learning rate"""
    kl: float = 1e-6
    """weight of the KL divergence"""
    seed: int = 0
    """seed of the initial weights, the order of the pictures and the noise"""
    precision: str = "fp32"
    """fp32 or bf16 (autocast)"""
    save_every: int = 500
    """updates between checkpoints; each measures the PSNR on held-out pictures"""

    def __post_init__(self) -> None:
        for name in ("latent_channels", "batch", "updates", "save_every"):
            if getattr(self, name) < 1:
                raise Mistake(f"{name.replace('_', ' ')} must be at least 1, got {getattr(self, name)}")
        if self.factor < 2 or self.factor & (self.factor - 1):
            raise Mistake(f"factor must be 2, 4, 8 or another power of 2, got {self.factor}")
        if self.channels < 4 or self.channels % 4:
            raise Mistake(f"channels must be a multiple of 4, got {self.channels}")
        if not 0 < self.lr < math.inf or not 0 <= self.kl < math.inf or not 0 <= self.seed < LARGEST_SEED:
            wanted = "lr must be positive, kl not negative, both finite, and seed in [0, 2**32)"
            raise Mistake(f"{wanted}, got lr={self.lr:g}, kl={self.kl:g}, seed={self.seed}")
        choose("precision", self.precision, PRECISIONS)

    def network(self, shape: tuple[int, int, int]) -> Any:
        """The autoencoder for pictures (C, H, W): each halving of the side doubles the channels, up to four times `channels`."""
        from diffusers import AutoencoderKL

        halvings = self.factor.bit_length() - 1
        if shape[1] % self.factor or shape[2] % self.factor:
            raise Mistake(
                f"pictures of {shape[1]}x{shape[2]} cannot be halved {halvings} times; give a smaller factor, or a size that is a multiple of it"
            )
        widths = tuple(self.channels * min(2**level, 4) for level in range(halvings + 1))
        return AutoencoderKL(
            in_channels=shape[0], out_channels=shape[0], latent_channels=self.latent_channels, block_out_channels=widths, layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths),
            norm_num_groups=self.channels // 4, sample_size=shape[1], scaling_factor=1.0,
        )  # fmt: skip


def refuse_autoencoder(settings: Mapping[str, Any], where: str) -> None:
    """Raise a Mistake if these settings of a checkpoint are those of an autoencoder. where: the folder, as the sentence begins."""
    if "latent_channels" in settings:
        raise Mistake(f"{where} holds an autoencoder; give the folder of a diffusion training")
