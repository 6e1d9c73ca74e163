"""Averaged weights: what is sampled and evaluated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noiseclock.lab.shards import fill_, local, whole


class EMA:
    """A running mean of a network's parameters: w ← d·w + (1-d)·p, with d = min(decay, (1+n)/(10+n)) at update n, which soon forgets its start."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        self._names = [name for name, _ in net.named_parameters()]
        # kept, because a sharded network that was just looked at has whole ones in their place until the next update
        self._parameters = list(net.parameters())
        self._means = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self, updates: int) -> None:
        """After update number `updates`, counted from 1."""
        decay = min(self.decay, (1 + updates) / (10 + updates))
        torch._foreach_lerp_([local(mean) for mean in self._means], [local(p.detach()) for p in self._parameters], 1 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole weights by name; all ranks must ask."""
        return {name: whole(mean) for name, mean in zip(self._names, self._means, strict=True)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore them."""
        for name, mean in zip(self._names, self._means, strict=True):
            fill_(mean, state[name])
