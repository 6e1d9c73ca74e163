"""The few collective operations that learned samplers need; without a process group each is the identity."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from noiseclock.core.probes import map_tensors


def active() -> bool:
    """Is there more than one process to talk to?"""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def mine() -> int:
    """The number of this process."""
    return dist.get_rank() if active() else 0


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if active() else 1


def total(x: Tensor) -> Tensor:
    """The sum over ranks."""
    if active():
        x = x.clone()
        dist.all_reduce(x)
    return x


def average_(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, in one message."""
    if active() and tensors:
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        flat /= count()
        for t, mean in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):  # type: ignore[no-untyped-call]
            t.copy_(mean.view_as(t))


def least(value: int, device: torch.device) -> int:
    """The smallest of the ranks' numbers."""
    if not active():
        return value
    x = torch.tensor(value, device=device)
    dist.all_reduce(x, op=dist.ReduceOp.MIN)
    return int(x)


def gathered(x: Tensor) -> list[Tensor]:
    """Every rank's tensor, all of one shape."""
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
    """What rank 0 has, on every rank, be it captions or tensors of other shapes than there; tensors that are not on the host go to `device`."""
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
