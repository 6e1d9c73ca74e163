"""Tensors in safetensors files, which stay there until somebody asks for them, or for some of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class Stored:
    """One tensor. files: that hold it, or its rows one after the other, as FSDP2 deals them out to ranks."""

    def __init__(self, files: Sequence[Any], name: str) -> None:
        self._files, self._name = files, name

    @property
    def shape(self) -> torch.Size:
        """Of the whole."""
        shapes = [file.get_slice(self._name).get_shape() for file in self._files]
        return torch.Size(shapes[0] if len(shapes) == 1 else [sum(shape[0] for shape in shapes), *shapes[0][1:]])

    def whole(self) -> Tensor:
        """All of it, in memory of its own: what safetensors gives is a window on the file, which could not be deleted on a network file system."""
        found = [file.get_tensor(self._name) for file in self._files]
        return torch.cat(found) if len(found) > 1 else found[0].clone()

    def rows(self, start: int, stop: int) -> Tensor:
        """Some rows, at least one; no others are read."""
        found, first = [], 0
        for file in self._files:
            part = file.get_slice(self._name)
            last = first + part.get_shape()[0]
            if max(start, first) < min(stop, last):
                found.append(part[max(start, first) - first : min(stop, last) - first])
            first = last
        return torch.cat(found) if len(found) > 1 else found[0].clone()


class Files:
    """Open files: one of whole tensors, and one for each rank that had parts of others."""

    def __init__(self, whole: Path, parts: Sequence[Path]) -> None:
        with ExitStack() as stack:
            self._whole = stack.enter_context(safe_open(whole, "pt"))
            self._parts = [stack.enter_context(safe_open(part, "pt")) for part in parts]
            self._open = stack.pop_all()

    def whole(self, name: str) -> Stored:
        """A tensor of the first."""
        return Stored([self._whole], name)

    def spread(self, name: str) -> Stored:
        """A tensor of which every rank had some rows."""
        return Stored(self._parts, name)

    def close(self) -> None:
        """No more reading."""
        self._open.close()
        self._whole, self._parts = None, []
