"""Numbers on their way to the host: a GPU goes on working while they travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Later:
    """A tensor that is copied to the host when the device has come so far. `read` waits for that, and for nothing that was asked of it since."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.detach().to("cpu", non_blocking=x.is_cuda)  # on Apple's GPUs nothing would tell when it has arrived
        self._arrived = torch.cuda.Event() if x.is_cuda else None  # type: ignore[no-untyped-call]
        if self._arrived is not None:
            self._arrived.record(torch.cuda.current_stream(x.device))

    @property
    def arrived(self) -> bool:
        """Is there nothing to be waited for?"""
        return self._arrived is None or bool(self._arrived.query())  # type: ignore[no-untyped-call]

    def read(self) -> Tensor:
        """Its numbers, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: the numbers, waited for, because an event can be neither copied nor sent to another process."""
        return {"_copy": self.read(), "_arrived": None}
