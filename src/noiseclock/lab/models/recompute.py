"""Memory for time: a block that keeps its input alone, and computes what its gradient needs again in the backward pass.

That is a second forward pass of the blocks, a third of an update's arithmetic. Losses and gradients stay what they were, to the bit where the
device repeats itself.
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
    """Likewise, but what happens in the block is forgotten, and done again for its gradient. Only in training: probes may take gradients with
    weights that are not the module's own (`functional_call`), and would find others in their place by then."""
    return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False) if block.training else block(*given)


def recomputed_alike(block: nn.Module, *given: Any) -> Any:
    """Likewise, for blocks with dropout: the second time has the random numbers of the first."""
    return checkpoint(block, *given, use_reentrant=False, preserve_rng_state=True) if block.training else block(*given)


def way_through(checkpointing: bool, dropout: float) -> Through:
    """How a network calls its blocks: through(block, *given). Random states are kept only where they matter: a CUDA graph cannot read them."""
    if not checkpointing:
        return straight
    return recomputed_alike if dropout else recomputed
