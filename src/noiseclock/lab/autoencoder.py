"""Autoencoders of diffusers, from a folder on this machine: pictures to latents, and back.

    coder = autoencoder.load("autoencoders/faces", device="cuda")
    latents = coder.encode(pictures)              # uint8 (N, C, H, W) -> mean and std (N, c, h, w)
    pictures = coder.decode(latents.mean)         # -> uint8 (N, C, H, W)

Three classes are supported: AutoencoderKL, whose latents are a normal distribution for each picture; VQModel, whose latents are taken before
quantisation, because its decoder quantises them; and AutoencoderTiny. diffusers computes everything, in float32; latents are not scaled here.
"""

from __future__ import annotations

import json
import math
import os
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiseclock.lab.cache import digest
from noiseclock.lab.errors import Mistake, choose

CLASSES = ("AutoencoderKL", "VQModel", "AutoencoderTiny")
AT_A_TIME = 2**20  # pixels in one pass of the network: 16 pictures of 256x256, 64 of 128x128


class Encoded(NamedTuple):
    """Latents (N, c, h, w), float32 on the CPU. std: the posterior's standard deviation, None for an autoencoder without a posterior."""

    mean: Tensor
    std: Tensor | None


class Autoencoder:
    """Pictures to latents and back. net: diffusers' module. name: its class."""

    def __init__(self, net: Any) -> None:
        self.net, self.name = net, type(net).__name__
        self.channels: int = net.config.in_channels

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        found: torch.device = next(self.net.parameters()).device
        return found

    @property
    def digest(self) -> str:
        """A hash of its weights, 16 hexadecimal digits."""
        return digest(self.net.state_dict().values())

    def latent_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """(c, h, w) of the latents of pictures (C, H, W); a Mistake if decoding does not restore the pictures' size."""
        if shape[0] != self.channels:
            raise Mistake(f"the pictures have {shape[0]} channels, but the {self.name} takes {self.channels}; train an autoencoder for them")
        mean, _ = self.encode(torch.zeros((1, *shape), dtype=torch.uint8))
        back = tuple(self.decode(mean).shape[1:])
        if back != shape:
            before, after = ("x".join(map(str, size)) for size in (shape, back))
            raise Mistake(f"the {self.name} returns pictures of {before} as {after}; give a size that it can halve often enough")
        _, c, h, w = mean.shape
        return c, h, w

    @torch.no_grad()
    def encode(self, pictures: Tensor, *, batch: int | None = None) -> Encoded:
        """The latents of pictures, uint8 (N, C, H, W). batch: pictures per pass, by default as many as `AT_A_TIME` allows."""
        means, stds = [], []
        for some in torch.split(pictures, batch or _at_a_time(pictures.shape)):
            with torch.autocast(self.device.type, enabled=False):
                found = self.net.encode(some.to(self.device).float() / 127.5 - 1)
            if hasattr(found, "latent_dist"):
                means.append(found.latent_dist.mean.cpu())
                stds.append(found.latent_dist.std.cpu())
            else:
                means.append(found.latents.cpu())
        return Encoded(torch.cat(means), torch.cat(stds) if stds else None)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """The pictures of latents (N, c, h, w), uint8 (N, C, H, W) on the CPU."""
        batch, pictures = _at_a_time((*latents.shape[:2], *(8 * side for side in latents.shape[2:]))), []  # upsampling by more than 8 is rare
        for some in torch.split(latents, batch):
            with torch.autocast(self.device.type, enabled=False):
                x = self.net.decode(some.to(self.device).float()).sample
            pictures.append(((x + 1) * 127.5).round().clamp(0, 255).byte().cpu())
        return torch.cat(pictures)


def psnr(coder: Autoencoder, pictures: Tensor) -> float:
    """The PSNR of pictures, uint8 (N, C, H, W), decoded from the means of their latents: 10·log10(255²/mean squared error), in decibels."""
    back = coder.decode(coder.encode(pictures).mean)
    error = float((back.double() - pictures.cpu().double()).square().mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


def _at_a_time(shape: tuple[int, ...]) -> int:
    return max(1, AT_A_TIME // (shape[-1] * shape[-2]))


def load(folder: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Autoencoder:
    """The autoencoder that diffusers' save_pretrained wrote into `folder`. Nothing is ever downloaded."""
    folder = Path(folder).expanduser()
    config = folder / "config.json"
    if not config.is_file():
        inner = next((folder / name for name in ("vae", "vqvae") if (folder / name / "config.json").is_file()), None)
        hint = f"; give {inner}" if inner else "; give the folder that diffusers' save_pretrained or noiseclock train-autoencoder wrote"
        raise Mistake(f"there is no autoencoder in {folder}: it has no config.json{hint}")
    try:
        name = json.loads(config.read_bytes())["_class_name"]
    except (ValueError, KeyError, TypeError):
        raise Mistake(f"{config} does not name a class of diffusers; give the folder of an autoencoder") from None
    choose(f"class of autoencoder in {config}", str(name), CLASSES)
    import diffusers

    try:
        with torch.random.fork_rng(devices=[]):  # a running training must not notice that weights are initialised before loading
            make = getattr(diffusers, name).from_pretrained
            net, info = make(str(folder), local_files_only=True, low_cpu_mem_usage=False, output_loading_info=True)
    except Exception as error:  # from the file system, safetensors or torch: anything may be wrong with the files
        raise Mistake(f"cannot load the {name} in {folder} ({str(error).strip().partition(chr(10))[0]}); save it again") from error
    if absent := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):  # diffusers initialises these at random
        raise Mistake(f"the {name} in {folder} lacks {len(absent)} of its weights, the first is {absent[0]}; save it again")
    net = deepcopy(net).float().to(device)  # a copy, because the weights are mapped from a file that may be replaced
    return Autoencoder(net.eval().requires_grad_(False))
