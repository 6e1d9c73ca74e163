"""The commands about latents: `noiseclock train-autoencoder | encode`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from noiseclock.cli import _bar as bar, _check_device as check_device, _parsed as parsed, already, console
from noiseclock.lab.autoencoder_settings import Settings

PICTURES = "digits, mnist, cifar10, folder:PATH, hf:NAME_OR_PATH or captions:PATH"
Data = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA", help=f"pictures: {PICTURES}")]
LINES = 20  # lines of progress if the output is not a terminal


@dataclass(frozen=True, kw_only=True)
class TrainAutoencoder(Settings):
    """Train a small AutoencoderKL with an L1 loss and a small KL term; run it again to resume. diffusers can load the folder."""

    data: Data
    out: str
    """folder of the autoencoder"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""

    def __post_init__(self) -> None:
        """No checks within the parser, which would wrap their messages in its own; the Settings made from these options are checked instead."""


@dataclass(frozen=True)
class Encode:
    """Write the latents of pictures into a folder, to train on with --data latents:FOLDER. Run it again to resume, or to replace damaged files."""

    data: Data
    autoencoder: str
    """folder of an AutoencoderKL, VQModel or AutoencoderTiny that diffusers or noiseclock train-autoencoder wrote"""
    out: str
    """folder of the latents"""
    size: int | None = None
    """side to which folder, hf and captions pictures are cropped and resized"""
    flip: bool = False
    """encode the mirrored pictures too; a training with flip needs them"""
    batch: int = 32
    """pictures per forward pass"""
    shard_size: int = 4096
    """pictures per file"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


def train_autoencoder(argv: list[str]) -> int:
    """`noiseclock train-autoencoder`."""
    options = parsed(TrainAutoencoder, argv, "noiseclock train-autoencoder")
    from noiseclock.lab.train_autoencoder import train_autoencoder as train

    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    folder, last, found = Path(options.out), None, math.nan
    lines = max(options.updates // LINES, 1)
    with bar("training", options.updates) as progress:
        for last in train(settings, folder, device=check_device(options.device)):
            progress(last.step)
            if last.psnr is not None:
                found = last.psnr
                console.print(f"update {last.step:,} of {options.updates:,}: L1 {last.l1:.4f}, KL {last.kl:.3g}, held-out PSNR {found:.2f} dB")
            elif not console.is_terminal and last.step % lines == 0:
                console.print(f"update {last.step:,} of {options.updates:,}: L1 {last.l1:.4f}, KL {last.kl:.3g}")
    if last is None:
        console.print(already(folder))
    else:
        console.print(f"{folder}: an AutoencoderKL after {last.step:,} updates in {last.seconds / 60:.1f} minutes, held-out PSNR {found:.2f} dB")
    same = ("" if options.size is None else f" --size {options.size}") + (" --flip" if options.flip else "")  # as in training
    console.print(f"next: noiseclock encode {options.data}{same} --autoencoder {folder} --out LATENTS")
    return 0


def encode(argv: list[str]) -> int:
    """`noiseclock encode`."""
    options = parsed(Encode, argv, "noiseclock encode")
    from noiseclock.lab.data import load
    from noiseclock.lab.encode import encode as write

    settings = {name: getattr(options, name) for name in ("size", "flip", "batch", "shard_size")}
    with bar("encoding", 1) as progress:
        for done, of in write(options.data, options.autoencoder, options.out, device=check_device(options.device), **settings):
            progress(done, of)
            if not console.is_terminal:
                console.print(f"{done:,} of {of:,} pictures")
    data = load(f"latents:{options.out}")
    shape = "x".join(map(str, data.shape))
    console.print(f"{options.out}: latents of {shape} of {len(data):,} training pictures{', and of their mirror images' if options.flip else ''}")
    console.print(f"next: noiseclock train RECIPE --data latents:{options.out}")
    return 0
