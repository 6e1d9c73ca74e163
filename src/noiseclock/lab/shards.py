"""Tensors that FSDP2 has spread over ranks, as if they were whole. Ordinary ones pass through all of this unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from noiseclock.lab.stored import Stored


def whole(x: Any) -> Any:
    """The full tensor, on every rank; all ranks must ask. What is no tensor is passed on."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def my_rows(x: Tensor) -> Tensor | None:
    """This rank's part of a tensor whose rows are spread over ranks; None of any other."""
    return x.to_local() if isinstance(x, DTensor) and x.placements == (Shard(0),) else None


def spread(value: Tensor | Stored, like: Tensor) -> Tensor:
    """A full tensor on the device of `like`, spread and in the order of memory as that is, where it has its shape. One that is stored in files is
    read from there: no more of it than this rank will hold."""
    if value.shape != like.shape:
        return value.whole() if isinstance(value, Stored) else value
    if isinstance(like, DTensor):
        return _dealt(value, like)
    value = value.whole() if isinstance(value, Stored) else value
    return torch.empty_like(like, dtype=value.dtype).copy_(value)  # a fused optimiser wants its moments like its parameters


def _dealt(value: Tensor | Stored, like: DTensor) -> DTensor:
    """The rows that belong to this rank: FSDP2 gives each the same number, rounded up, as long as there are any."""
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
    """Write a full tensor into one that may be spread."""
    target.copy_(spread(value, target))


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The parts of a network that are gathered one at a time when it is sharded: what its outermost lists hold."""
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else blocks(child)
