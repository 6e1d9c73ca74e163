"""The few collective operations that learned samplers need; without a process group each is the identity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noiseclock.core.conditioning import map_tensors


def active() -> bool:
    """Is there a process group with more than one process?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mine() -> int:
    """The rank of this process."""
    return dist.get_rank() if active() else 0


def count() -> int:
    """The number of processes."""
    return dist.get_world_size() if active() else 1


def local(x: Tensor) -> Tensor:
    """This rank's shard of a tensor that FSDP2 has sharded, in the same memory; other tensors unchanged, but for complex ones as pairs of reals."""
    mine: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return torch.view_as_real(mine) if mine.is_complex() else mine


def sharded(parameters: Sequence[Tensor]) -> bool:
    """Does each rank hold only a shard of the parameters?"""
    return any(hasattr(p, "device_mesh") for p in parameters)


def total(x: Tensor) -> Tensor:
    """The sum over ranks."""
    if active():
        x = x.clone()
        dist.all_reduce(x)
    return x


def average_(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, with one all-reduce."""
    if active() and tensors:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= count()
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):  # type: ignore[no-untyped-call]
            t.copy_(mean.view_as(t))


def least(value: int, device: torch.device) -> int:
    """The smallest value over ranks."""
    if not active():
        return value
    x = torch.tensor(value, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return int(x)


def gathered(x: Tensor) -> list[Tensor]:
    """The tensors of all ranks, which must have the same shape."""
    if not active():
        return [x]
    found = [torch.empty_like(x) for _ in range(count())]
    dist.all_gather(found, x.contiguous())
    return found


def from_first(x: Tensor) -> Tensor:
    """Rank 0's tensor on every rank; its shape must be the same everywhere."""
    if active():
        x = x.clone().contiguous()
        dist.broadcast(x, 0)
    return x


def anything_from_first(thing: Any, device: torch.device) -> Any:
    """Rank 0's object on every rank, such as captions or tensors whose shape differs by rank; tensors that are not on the host go to `device`."""
    if not active():
        return thing
    on_host: list[bool] = []

    def sent(x: Tensor) -> Tensor:
        on_host.append(x.device.type == "cpu")
        return x.detach().cpu()

    parcel = [(map_tensors(sent, thing), on_host)]
    dist.broadcast_object_list(parcel, 0, device=device)
    found, stays = parcel[0][0], iter(parcel[0][1])
    return map_tensors(lambda x: x if next(stays) else x.to(device), found)
