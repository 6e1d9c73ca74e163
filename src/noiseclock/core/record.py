"""Counts of the drawn times and unweighted losses by time bin, kept on the device and read only on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.schedules import Array
from noiseclock.core.table import cell, lasting, wide

# Recent losses are averaged over about this many batches.
WINDOW = 1000


class ByTime(NamedTuple):
    """A record by time bin, as numpy arrays (bins,).

    time: the middle of each bin. drawn: number of times drawn from the bin, counted with their losses. density: the realised density (1 everywhere
    for a uniform sampler). loss: mean unweighted loss over about the last 1000 batches, NaN in a bin that none of them reached.
    """

    time: Array
    drawn: Array
    density: Array
    loss: Array


def take_losses(losses: Tensor, time: Tensor) -> Tensor:
    """Losses (B,), detached, or a ValueError unless there is one loss for each time (B,)."""
    if losses.shape != time.shape:
        raise ValueError(f"losses must be of shape {tuple(time.shape)}, one for each sample and not their mean, got {tuple(losses.shape)}")
    return losses.detach()


class Record:
    """Running counts and losses in `bins` equal bins of time, of this rank. Adding to it never synchronises with the device."""

    def __init__(self, bins: int = 50) -> None:
        self.bins = bins
        # rows: number of all times; decaying number of recent times; decaying sum of recent losses
        with lasting():
            self._sums = torch.zeros(3, bins, dtype=torch.float64, device="cpu")

    def add(self, time: Tensor, losses: Tensor) -> None:
        """Note times (B,) and their unweighted losses (B,). Losses that are not finite count as drawn and are otherwise left out."""
        device = time.device
        if self._sums.device != device:
            with lasting():
                self._sums = self._sums.to(device, wide(device))
        losses = take_losses(losses, time).to(self._sums.dtype)
        finite = losses.isfinite()
        rows = torch.stack([torch.ones_like(losses), finite.to(losses.dtype), torch.where(finite, losses, 0.0)])
        self._sums[1:] *= 1 - 1 / WINDOW
        self._sums.index_add_(1, cell(time, self.bins), rows)

    def by_time(self) -> ByTime:
        """The record so far; this reads the device."""
        count, recent, loss = self._sums.cpu().double().numpy()
        time = (np.arange(self.bins) + 0.5) / self.bins
        mean = np.divide(loss, recent, out=np.full(self.bins, np.nan), where=recent > 0)
        return ByTime(time, count.copy(), count / max(count.sum(), 1.0) * self.bins, mean)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self._sums.clone()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state fits."""
        sums = state.get("sums")
        if not isinstance(sums, Tensor) or sums.shape != self._sums.shape:
            raise ValueError(f"the record of losses in the state must have {self.bins} bins")
        if sums.device.type != "meta" and not bool(sums.isfinite().all()):
            raise ValueError("the record of losses in the state holds values that are not finite")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        self._sums.copy_(state["sums"])
