"""Random numbers as a pure function of (seed, draw, position), so that every rank can know every other rank's share.

A counter-based generator (the splitmix64 finaliser over a Weyl sequence) instead of a stateful one: ranks cannot drift apart, a checkpoint
needs one integer and resumes on any number of ranks, the CPU and the GPU give the same numbers, and a captured CUDA graph advances by adding
one to a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noiseclock.core.schedules import wide


def in_unit(x: Tensor) -> Tensor:
    """`x` clamped to [0, 1), the end excluded: rounding takes (n-1 + 0.999...)/n to 1, which would be one step too far."""
    return x.clamp(0, 1 - torch.finfo(x.dtype).eps / 2)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


GOLDEN = _signed(0x9E3779B97F4A7C15)
MIX = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's int64 has the arithmetic one only."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(key: Tensor, index: Tensor | int) -> Tensor:
    """64 well-mixed bits for each (key, index), int64."""
    x = key + ((index + 1) * GOLDEN if isinstance(index, Tensor) else _signed((index + 1) * GOLDEN % 2**64))
    x = (x ^ _shift(x, 30)) * MIX[0]
    x = (x ^ _shift(x, 27)) * MIX[1]
    return x ^ _shift(x, 31)


def uniform(key: Tensor, index: Tensor) -> Tensor:
    """Uniform on [0, 1) for each index, float64 (24 random bits where the device has float32 only)."""
    bits = 53 if wide(index.device) is torch.float64 else 24
    return _shift(mix(key, index), 64 - bits).to(wide(index.device)) * 2.0**-bits


def stratified(key: Tensor, n: int, *, part: int = 0, parts: int = 1) -> Tensor:
    """(n,) uniforms: part `part` of a global batch of n·parts values, one in each of its n·parts strata.

    The value in a stratum depends on the key and the stratum alone, so the union over all parts is the draw of a single part of size n·parts.
    Each part holds one stratum out of every n-th of the range, so it is itself stratified; which one, and in which order, is random, so that
    no rank and no place in the batch sees the low end of its cell only.
    """
    place = torch.arange(n, device=key.device)
    cell = torch.argsort(uniform(mix(key, 1 + part), place))
    turn = (uniform(mix(key, 0), cell) * parts).floor().long()
    stratum = cell * parts + (part + turn) % parts
    jitter = uniform(mix(key, -1), stratum)
    return in_unit((stratum + jitter) / (n * parts))
