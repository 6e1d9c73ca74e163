"""Tables that are computed on the host and read on any device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def wide(device: torch.device) -> torch.dtype:
    """float64, or float32 on a device that has no float64 (Apple's MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(x: Tensor) -> Tensor:
    """`x` in float64, if its device supports it."""
    return x.to(wide(x.device))


def cell(time: Tensor, n: int) -> Tensor:
    """floor(u·n) as int64, with u = 1 in the last of the n cells."""
    return (widen(time) * n).long().clamp(0, n - 1)


def lasting() -> AbstractContextManager[Any]:
    """For tensors that persist between steps: if made inside a user's `torch.inference_mode()`, they could not be written later."""
    return torch.inference_mode(False)


class Table:
    """A tensor with one copy on each device that asked for it.

    A copy is made at first use, because a transfer inside a captured graph would be an error. It is kept and written in place, because a graph
    keeps reading the memory that it was captured with.
    """

    def __init__(self, values: Any) -> None:
        with lasting():
            # a Python number would become float32
            values = torch.as_tensor(values, dtype=torch.float64 if isinstance(values, float) else None, device="cpu")
            self.values: Tensor = values.to(torch.float64, copy=True) if values.is_floating_point() else values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The values on `device`."""
        if device not in self._copies:
            dtype = wide(device) if self.values.is_floating_point() else self.values.dtype
            with lasting():
                self._copies[device] = self.values.to(device, dtype, copy=True)
        return self._copies[device]

    def set_(self, values: Any) -> None:
        """New values of the same shape, on every device."""
        self.values.copy_(torch.as_tensor(values, dtype=self.values.dtype, device="cpu"))
        for copy in self._copies.values():
            if self.values.ndim == 0:
                copy.fill_(self.values.item())  # passed as a kernel argument; a copy from the host would wait for the device
            else:
                copy.copy_(self.values)
