"""The state of torch's own random numbers, by which dropout goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Of this process, for training on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on from there, on a device of either kind."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
