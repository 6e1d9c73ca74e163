"""Tensors that FSDP2 has spread over ranks, as if they were whole. Ordinary ones pass through all of this unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(x: Any) -> Any:
    """The full tensor, on every rank; all ranks must ask. What is no tensor is passed on."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def spread(value: Tensor, like: Tensor) -> Tensor:
    """A full tensor on the device of `like`, spread and in the order of memory as that is, where it has its shape."""
    if value.shape != like.shape:
        return value
    if isinstance(like, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
    return torch.empty_like(like, dtype=value.dtype).copy_(value)  # a fused optimiser wants its moments like its parameters


@torch.no_grad()
def fill_(target: Tensor, value: Tensor) -> None:
    """Write a full tensor into one that may be spread."""
    target.copy_(spread(value, target))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a network that are gathered one at a time when it is sharded: what its outermost lists hold."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
