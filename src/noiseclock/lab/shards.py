"""Tensors that FSDP2 has sharded over ranks, used as if they were whole. Ordinary tensors pass through all functions unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from noiseclock.lab.stored import Stored


def whole(x: Any) -> Any:
    """The full tensor, on every rank; all ranks must call this. Anything else is returned as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def my_rows(x: Tensor) -> Tensor | None:
    """This rank's part of a tensor that is sharded by rows; None for any other tensor."""
    return x.to_local() if isinstance(x, DTensor) and x.placements == (Shard(0),) else None


def spread(value: Tensor | Stored, like: Tensor) -> Tensor:
    """A full tensor with the device, sharding and memory format of `like`, if the shapes are equal, else as it is. Of a `Stored` tensor with that
    shape only this rank's rows are read."""
    if value.shape != like.shape:
        return value.whole() if isinstance(value, Stored) else value
    if isinstance(like, DTensor):
        return _dealt(value, like)
    value = value.whole() if isinstance(value, Stored) else value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)  # a fused optimiser needs moments in the memory format of its parameters


def _dealt(value: Tensor | Stored, like: DTensor) -> DTensor:
    """The rows of this rank: FSDP2 gives each rank rows / ranks of them, rounded up, until none are left."""
    mine = like.to_local()
    assert my_rows(like) is not None, like.placements
    share = -(-len(like) // like.device_mesh.size())
    start = min(like.device_mesh.get_local_rank() * share, len(like))
    if len(mine):
        rows = value.rows(start, start + len(mine)) if isinstance(value, Stored) else value[start : start + len(mine)]
        mine = torch.empty_like(mine, dtype=rows.dtype).copy_(rows)
    else:
        mine = mine.clone()
    return DTensor.from_local(mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())


@torch.no_grad()
def fill_(target: Tensor, value: Tensor | Stored) -> None:
    """Write a full tensor into one that may be sharded."""
    target.copy_(spread(value, target))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a sharded network that are gathered one at a time: the members of its outermost ModuleLists."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
