"""Gradient checkpointing, less memory for more time: a block keeps only its input, and is computed again in the backward pass.

That is a second forward pass of the blocks, a third of an update's arithmetic. Losses and gradients stay the same, bit for bit if the device is
deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Through = Callable[..., Any]


def straight(block: nn.Module, *given: Any) -> Any:
    """block(*given)."""
    return block(*given)


def recomputed(block: nn.Module, *given: Any) -> Any:
    """block(*given), computed again in the backward pass. Only in training mode: probes may take gradients with weights that are not the module's own
    (`functional_call`), and the second computation would no longer see these."""
    return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False) if block.training else block(*given)


def recomputed_alike(block: nn.Module, *given: Any) -> Any:
    """As `recomputed`, for blocks with dropout: the second computation has the random numbers of the first."""
    return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=True) if block.training else block(*given)


def way_through(checkpointing: bool, dropout: float) -> Through:
    """How a network calls its blocks: through(block, *given). Random states are saved only for dropout, because a CUDA graph cannot read them."""
    if not checkpointing:
        return straight
    return recomputed_alike if dropout else recomputed
