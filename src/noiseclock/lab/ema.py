"""The exponential moving average of the weights, which is sampled and evaluated."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noiseclock.core.ranks import local
from noiseclock.lab.moments import by_size
from noiseclock.lab.shards import fill_
from noiseclock.lab.stored import Stored


def _descend(means: list[Tensor], parameters: list[Tensor], weight: Tensor) -> None:
    """means += weight·(parameters - means) in one pass, as gradient descent on ½|means - parameters|²: its learning rate may be a tensor."""
    torch._fused_sgd_(
        means, parameters, [], weight_decay=1.0, momentum=0.0, lr=weight, dampening=0.0, nesterov=False, maximize=True, is_first_step=False
    )


class EMA:
    """The EMA of a network's parameters: w ← d·w + (1-d)·p with d = min(decay, (1+n)/(10+n)) at update n, so the initial weights soon fade."""

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.decay = decay
        named = by_size(net)
        self._names = list(named)
        self._parameters = list(named.values())  # kept, because a sharded network may have gathered ones in their place (lab/train.py)
        self._means = [p.detach().clone() for p in self._parameters]

    def weight(self, updates: int) -> float:
        """1 - d, the weight of the new parameters, at update number `updates`, counted from 1."""
        return 1 - min(self.decay, (1 + updates) / (10 + updates))

    @torch.no_grad()
    def towards(self, weight: float | Tensor) -> None:
        """One step of the average. weight: a 0-d tensor can change between the replays of a CUDA graph."""
        means, parameters = [local(mean) for mean in self._means], [local(p.detach()) for p in self._parameters]
        if isinstance(weight, float):
            torch._foreach_lerp_(means, parameters, weight)
        else:
            _descend(means, parameters, weight)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights by name, sharded as the network is."""
        return dict(zip(self._names, self._means, strict=True))

    def load_state_dict(self, state: Mapping[str, Tensor | Stored]) -> None:
        """Restore them."""
        for name, mean in zip(self._names, self._means, strict=True):
            fill_(mean, state[name])
