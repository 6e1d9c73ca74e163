"""Tensors in safetensors files, which are read on demand, whole or by rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


class Stored:
    """One tensor. files: the one that holds it, or one per rank, with its rows in order, as FSDP2 shards them."""

    def __init__(self, files: Sequence[Any], name: str) -> None:
        self._files, self._name = files, name

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        shapes = [file.get_slice(self._name).get_shape() for file in self._files]
        return torch.Size(shapes[0] if len(shapes) == 1 else [sum(shape[0] for shape in shapes), *shapes[0][1:]])

    def whole(self) -> Tensor:
        """The whole tensor, as a copy: safetensors maps the file into memory, and a network file system cannot delete a mapped file."""
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
    """Open files: one with whole tensors, and one for each rank with its rows of sharded tensors."""

    def __init__(self, whole: Path, parts: Sequence[Path]) -> None:
        with ExitStack() as stack:
            self._whole = stack.enter_context(safe_open(whole, "pt"))
            self._parts = [stack.enter_context(safe_open(part, "pt")) for part in parts]
            self._open = stack.pop_all()

    def whole(self, name: str) -> Stored:
        """A tensor that was saved whole."""
        return Stored([self._whole], name)

    def spread(self, name: str) -> Stored:
        """A tensor that was saved sharded by rows."""
        return Stored(self._parts, name)

    def close(self) -> None:
        """No more reading."""
        self._open.close()
        self._whole, self._parts = None, []
