"""Asynchronous copies to the host: the GPU keeps working during the transfer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Later:
    """A tensor that is copied to the host asynchronously. `read` waits for this copy only, not for work that was queued on the device later."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.detach().to("cpu", non_blocking=x.is_cuda)  # on Apple's GPUs nothing would tell when the copy is complete
        self._arrived = torch.cuda.Event() if x.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(x.device))

    @property
    def arrived(self) -> bool:
        """Is the copy complete, so that `read` does not wait?"""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """The values, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: wait for the values, because an event can be neither copied nor sent to another process."""
        return {"_copy": self.read(), "_arrived": None}
