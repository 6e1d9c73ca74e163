"""Which image stands at which place of an endless stream, as a pure function of (seed, place).

Places are counted over all batches and ranks. Epoch e holds the places e·N to (e+1)·N - 1 and shows each of N images once, in an order of its
own. So a stream can start at any place at no cost, and the images that all ranks see together do not depend on the number of ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from noiseclock.core.streams import GOLDEN, finalize, signed, uniform


def uniforms(seed: int, purpose: str, first: int, count: int) -> Tensor:
    """(count,) uniforms on [0, 1) for the counters from `first` on; each purpose has a stream of its own."""
    return _uniforms(seed, purpose, first, count, "cpu")


def normals(seed: int, purpose: str, first: int, count: int, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
    """(count, *shape) standard normals, float32 on `device`, for the counters from `first` on; the same on every device, up to rounding."""
    each = math.prod(shape)
    return normal(_uniforms(seed, purpose, first * each, count * each, device)).reshape(count, *shape)


def normal(u: Tensor) -> Tensor:
    """Uniforms on [0, 1) as standard normals, float32."""
    signed_unit = (2 * u - 1).clamp(min=torch.finfo(u.dtype).eps - 1)  # u = 0 would give -∞
    return (math.sqrt(2) * torch.erfinv(signed_unit)).float()


def _uniforms(seed: int, purpose: str, first: int, count: int, device: torch.device | str) -> Tensor:
    start = finalize(finalize(seed) ^ int.from_bytes(purpose.encode()))
    counter = torch.arange(first, first + count, device=device)
    return uniform((counter + 1) * signed(GOLDEN) + signed(start), torch.zeros((), dtype=torch.int64, device=device))


def flips(seed: int, first: int, count: int) -> Tensor:
    """(count,) True where a place, from `first` on, shows its image mirrored, each with probability 1/2."""
    return uniforms(seed, "flips", first, count) < 0.5


class Order:
    """The endless order of n images.

    >>> order = Order(3, seed=0)
    >>> [order(first, 3).tolist() for first in (0, 3, 6)]
    [[1, 2, 0], [0, 2, 1], [2, 1, 0]]
    >>> order(2, 5).tolist()
    [0, 0, 2, 1, 2]
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._epoch, self._permutation = -1, torch.empty(0)

    def __call__(self, first: int, count: int) -> Tensor:
        """(count,) the images at the places from `first` on, as indices."""
        pieces = []
        while count > 0:
            epoch, offset = divmod(first, self.n)
            piece = self._of(epoch)[offset : offset + count]
            pieces.append(piece)
            first, count = first + len(piece), count - len(piece)
        return torch.cat(pieces)

    def _of(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            # sorting counter-based numbers, unlike randperm, gives the same order under every version of torch
            self._epoch, self._permutation = epoch, uniforms(self.seed, "order", epoch * self.n, self.n).argsort(stable=True)
        return self._permutation
