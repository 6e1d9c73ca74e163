"""Pictures on disk: one grid to look at, a folder of PNGs, or the npz file that ADM's evaluator reads."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor

from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import making

LEGIBLE = 64  # pixels on the longer side, below which pictures are magnified
BORDER = 2
BACKGROUND = 128
OTHERS = (".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".npy", ".pdf", ".svg")  # hardly meant as folders


def grid(images: Tensor) -> Image.Image:
    """One picture of all images, uint8 (N, 1 or 3, H, W), row by row on grey; small ones magnified by a whole number, without smoothing."""
    _check(images)
    n, _, height, width = images.shape
    columns = math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    factor = max(1, LEGIBLE // max(height, width))
    cell_height, cell_width = factor * height + BORDER, factor * width + BORDER
    canvas = torch.full((images.shape[1], rows * cell_height + BORDER, columns * cell_width + BORDER), BACKGROUND, dtype=torch.uint8)
    for i, image in enumerate(images.cpu().repeat_interleave(factor, 2).repeat_interleave(factor, 3)):
        top, left = BORDER + i // columns * cell_height, BORDER + i % columns * cell_width
        canvas[:, top : top + factor * height, left : left + factor * width] = image
    return _picture(canvas)


def save(images: Tensor, path: str | Path) -> None:
    """Write images, uint8 (N, C, H, W), in the format of the name: x.png a grid, x.npz arrays, anything else a new folder of numbered PNGs.

    npz: `arr_0` is uint8 (N, H, W, C). `path` never holds a half-written result. An existing file is replaced, a folder that is not empty is not.
    """
    path, form = Path(path), form_of(path)
    _check(images, written=form != ".npz")
    if form == ".png":
        whole(path, lambda new: grid(images).save(new, format="PNG"))
    elif form == ".npz":
        whole(path, lambda new: _write_npz(new, images.permute(0, 2, 3, 1).cpu().numpy()))
    else:
        whole(path, lambda new: _write_folder(new, images))


def form_of(path: str | Path) -> str:
    """The format by the name: ".png", ".npz", or "" for a folder; a Mistake for other formats, and for a folder's name that an existing file has."""
    path = Path(path)
    form = path.suffix.lower()
    if form in OTHERS:
        raise Mistake(f"pictures are written as .png, .npz or a folder of PNG files, not as {path.suffix}; give {path} another name")
    if form not in (".png", ".npz") and path.is_file():
        raise Mistake(f"{path} is a file, but a name without .png or .npz means a folder; choose another name")
    return form if form in (".png", ".npz") else ""


def check_place(path: Path) -> None:
    """A Mistake if pictures cannot be saved to `path`; makes the folder around it."""
    form_of(path)
    refuse_full(path)
    with making(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()


def refuse_full(path: Path) -> None:
    """A Mistake if `path` is a folder that is not empty, which is never replaced."""
    if path.is_dir() and any(path.iterdir()):
        raise Mistake(f"{path} is a folder that is not empty; choose another name, or empty it first")


def whole(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make a file or a folder under a temporary name beside `path`, then rename it to `path`."""
    refuse_full(path)
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(new)
        os.replace(new, path)
    except (OSError, SafetensorError) as error:  # SafetensorError: from diffusers' folders
        raise Failure(f"{path} could not be written: {getattr(error, 'strerror', None) or error}") from error
    finally:
        with suppress(OSError):  # there is nothing to remove unless something went wrong
            shutil.rmtree(new) if new.is_dir() else new.unlink()


def _write_npz(path: Path, array: np.ndarray) -> None:
    with path.open("wb") as file:  # given a name, numpy would add a suffix to it
        np.savez(file, array)


def _write_folder(path: Path, images: Tensor) -> None:
    path.mkdir()
    digits = len(str(len(images) - 1))
    for i, image in enumerate(images.cpu()):
        _picture(image).save(path / f"{i:0{digits}}.png")


def _picture(image: Tensor) -> Image.Image:
    """(1 or 3, H, W) as grey or RGB."""
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).contiguous().numpy())


def _check(images: Tensor, *, written: bool = True) -> None:
    if images.dtype != torch.uint8 or images.ndim != 4 or len(images) == 0:
        raise Mistake(f"pictures are a uint8 tensor (N, C, H, W) with at least one in it, got {images.dtype} of shape {tuple(images.shape)}")
    if written and images.shape[1] not in (1, 3):
        raise Mistake(f"a picture has 1 or 3 channels, got {images.shape[1]}; save to a name ending in .npz instead")
