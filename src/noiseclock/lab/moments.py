"""The order in which an optimiser gets its parameters, and its state by name, so that order and number of ranks may change between checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from noiseclock.lab.shards import spread

Named = Sequence[tuple[str, nn.Parameter]]


def by_size(net: nn.Module) -> dict[str, nn.Parameter]:
    """Its parameters, small ones first: a GPU works on a list of tensors in chunks, and each chunk takes as long as its largest tensor."""
    return dict(sorted(net.named_parameters(), key=lambda pair: pair[1].numel()))


def moments(optimizer: torch.optim.Optimizer, named: Named) -> dict[str, dict[str, Any]]:
    """The optimiser's state by name: numbers, and tensors that are sharded as the network is."""
    return {name: dict(optimizer.state[p]) for name, p in named if p in optimizer.state}


def load_moments(optimizer: torch.optim.Optimizer, named: Named, kept: Mapping[Any, Mapping[str, Any]]) -> None:
    """Restore the state. kept: by name, or by index in `named`, as in old checkpoints. Settings stay: they depend on recipe and device."""
    place = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    state = {}
    for i, (name, p) in enumerate(named):
        moment = kept.get(name, kept.get(i))
        if moment is not None:
            state[place[id(p)]] = {key: spread(value, p) for key, value in moment.items()}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
