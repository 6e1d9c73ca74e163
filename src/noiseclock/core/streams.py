"""Random numbers as a pure function of (seed, draw, position), so that every rank can compute every other rank's share.

A counter-based generator (the splitmix64 finaliser over a Weyl sequence) instead of a stateful one: ranks cannot drift apart, a checkpoint
needs one integer and resumes on any number of ranks, the CPU and the GPU give the same numbers, and a captured CUDA graph advances by adding
one to a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noiseclock.core.table import wide

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15
MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# Positions of one draw are counted in the lower 32 bits, draws above them: no two draws share a position.
PER_DRAW = 2**32


def in_unit(x: Tensor) -> Tensor:
    """`x` clamped to [0, 1), the end excluded: rounding can turn (n-1 + 0.999...)/n into 1, one step too far."""
    return x.clamp(0, 1 - torch.finfo(x.dtype).eps / 2)


def signed(word: int) -> int:
    """A 64-bit word as torch's int64 holds it."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def finalize(word: int) -> int:
    """splitmix64's mixing of one word."""
    word %= WORD
    word = (word ^ (word >> 30)) * MIX[0] % WORD
    word = (word ^ (word >> 27)) * MIX[1] % WORD
    return word ^ (word >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's int64 has the arithmetic one only."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _finalize(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(MIX[0])
    x = (x ^ _shift(x, 27)) * signed(MIX[1])
    return x ^ _shift(x, 31)


def uniform(start: Tensor, draw: Tensor) -> Tensor:
    """Uniforms on [0, 1) at the places whose Weyl words are `start`, in draw number `draw`; float64, or 24-bit float32 without float64."""
    word = _finalize(start + draw * signed(PER_DRAW * GOLDEN))
    bits = 53 if wide(start.device) is torch.float64 else 24
    return _shift(word, 64 - bits).to(wide(start.device)) * 2.0**-bits


def places(seed: int, n: int, *, part: int = 0, parts: int = 1) -> Tensor:
    """The Weyl words that one part needs: n·parts jitters (one per stratum) and n turns, shared by all parts, and n of its own for the order."""
    strata = n * parts
    shared, own = torch.arange(strata + n, device="cpu"), torch.arange(n, device="cpu") + (strata + n * (1 + part))
    index = torch.cat([shared, own])
    return (index + 1) * signed(GOLDEN) + signed(finalize(seed))


def stratified(start: Tensor, draw: Tensor, n: int, *, part: int = 0, parts: int = 1) -> Tensor:
    """(n,) uniforms: part `part` of a global batch of n·parts values, one in each of its n·parts strata.

    start: `places(seed, n, part=part, parts=parts)`, on the device of `draw`, a 0-d int64 tensor.

    The value in a stratum depends on (seed, draw) and the stratum alone, so the union over all parts is the draw of a single part of size
    n·parts. Each part holds one stratum from each of n equal intervals, so it is itself stratified. The stratum within an interval and the
    order are random, so that no rank and no position in the batch sees only the low end of its interval.
    """
    strata = n * parts
    random = uniform(start, draw)
    jitter, turn, order = random[:strata], random[strata:-n], random[-n:]
    stratum = order.argsort()
    if parts > 1:
        stratum = stratum * parts + (part + (turn[stratum] * parts).long()) % parts
    return in_unit((stratum + jitter[stratum]) / strata)


def independent(start: Tensor, draw: Tensor, n: int) -> Tensor:
    """(n,) independent uniforms; start: `places(seed, n)`, with a seed for each part, on the device of `draw`."""
    return uniform(start[-n:], draw)
