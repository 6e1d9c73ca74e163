"""States to be saved, and whether what comes back is the same to the last bit."""

from __future__ import annotations

import math
import struct

import torch


def same(a, b) -> bool:
    """Equal in type, structure and every bit; NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(a, torch.Tensor):
        if not (isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape):
            return False
        if a.dtype == torch.bool:
            return torch.equal(a, b)
        return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
    if isinstance(a, float):
        return isinstance(b, float) and (struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(map(repr, a)) == list(map(repr, b)) and all(map(same, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


def state_of(step: int) -> dict:
    """What a run might save: another at every step."""
    values = torch.arange(1000, dtype=torch.float64) * (step + 1) / 7
    return {"model": {"weight": values, "half": values.bfloat16()}, "optimizer": {"state": {0: {"step": torch.tensor(float(step))}}}, "step": step}
