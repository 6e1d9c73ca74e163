"""Tensors that are costly to make, kept in files from one run to the next."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor


def remembered(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in the file `path`; if it is missing or unreadable, the result of `make`, which is then written to it."""
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError):
        tensors = make()
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # a name of its own: two runs may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, unfinished)
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:  # a full or read-only disk is no reason to lose what was computed
        with suppress(OSError):
            unfinished.unlink()
        warnings.warn(f"cannot keep {path} for the next run ({error})", stacklevel=2)
    return tensors


def digest(tensors: Iterable[Tensor]) -> str:
    """A hash of dtypes, shapes and values, 16 hexadecimal digits."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()[:16]
