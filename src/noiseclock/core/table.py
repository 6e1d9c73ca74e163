"""Numbers that are made once on the host and read on any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no float64 (Apple's MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(x: Tensor) -> Tensor:
    """`x` in float64, where its device has that."""
    return x.to(wide(x.device))


def cell(time: Tensor, n: int) -> Tensor:
    """floor(u·n) as int64, with u = 1 in the last of the n cells."""
    return (widen(time) * n).floor().clamp(0, n - 1).long()


class Table:
    """A tensor with one copy on each device that asked for it.

    Copies are made at first use, because a transfer inside a captured graph would be an error, and are kept and written in place, because a
    graph goes on reading the memory that it was captured with.
    """

    def __init__(self, values: Any) -> None:
        # a Python number would become float32
        values = torch.as_tensor(values, dtype=torch.float64) if isinstance(values, float) else torch.as_tensor(values)
        self.values = widen(values) if values.is_floating_point() else values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The values on `device`."""
        if device not in self._copies:
            dtype = wide(device) if self.values.is_floating_point() else self.values.dtype
            self._copies[device] = self.values.to(device, dtype, copy=True)
        return self._copies[device]

    def set_(self, values: Any) -> None:
        """New values of the same shape, on every device."""
        self.values.copy_(torch.as_tensor(values, dtype=self.values.dtype))
        for copy in self._copies.values():
            copy.copy_(self.values)
