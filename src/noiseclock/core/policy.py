"""A policy over time for each sample: a small network reads x0 and gives the two parameters of a Beta distribution.

On n equal cells of time (the steps, or a fine grid in continuous time) the policy *is* the table of the Beta's cell masses, normalised. So
draws by inverse CDF can be stratified, their log-probabilities are exact, and both are differentiable tensor expressions that can be captured
in a CUDA graph. None of this holds for torch's own Beta.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from noiseclock.core.learned import running_sum
from noiseclock.core.samplers import TINY
from noiseclock.core.table import Table, widen

LOW, HIGH = 0.1, 100.0  # bounds of the Beta's parameters: beyond them a policy has collapsed
RAW = math.log(math.expm1(LOW)), HIGH  # softplus of these are the bounds; at 100 it is the identity to the last digit
CHANNELS = (32, 64, 128)


class Bounded(torch.autograd.Function):
    """x clamped to [lo, hi]; backward, as for x itself, but beyond a bound a gradient whose descent leads farther out is dropped.

    A plain clamp has no gradient beyond its bounds: a policy that got there for every x0 could never come back, whatever the rewards and the entropy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lo: float, hi: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.bounds = lo, hi
        return x.clamp(lo, hi)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ((x,), (lo, hi)) = ctx.saved_tensors, ctx.bounds
        outward = ((x < lo) & (gradient > 0)) | ((x > hi) & (gradient < 0))  # descent moves x against its gradient
        return gradient.masked_fill(outward, 0.0), None, None


class Policy(nn.Module):
    """π(x0) -> (a, b): three convolutions with pooling and two hidden layers for grids of any dimension, two hidden layers for vectors.

    shape: of one sample, (C, ...). It starts at a = b = 1 for every x0, the uniform distribution.
    """

    def __init__(self, shape: tuple[int, ...], hidden: int = 128) -> None:
        super().__init__()
        dims = len(shape) - 1
        if dims > 3:
            raise ValueError(f"a policy reads vectors, signals, images or volumes; a sample of shape {shape} has too many dimensions")
        layers: list[nn.Module] = []
        if dims > 0:
            conv: type[nn.Module] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
            extents = shape[1:]
            for before, after, stage in zip((shape[0], *CHANNELS), CHANNELS, (1, 2, 3), strict=False):
                size = tuple(max(extent >> stage, 1) for extent in shape[1:]) if stage < 3 else (1,) * dims
                layers += [conv(before, after, 3, padding=1), nn.SiLU(), _pooling(extents, size)]
                extents = size
        features = CHANNELS[-1] if dims > 0 else shape[0]
        last = nn.Linear(hidden, 2)
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, math.log(math.e - 1))  # softplus of it is 1
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(features, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), last)

    def forward(self, x0: Tensor) -> Tensor:
        """(B, 2) parameters a and b."""
        with torch.autocast(x0.device.type, enabled=False):
            # a NaN in one sample shows in its own loss; here it would spoil the mean density of the batch
            out = self.net(x0.float().nan_to_num(0.0, 0.0, 0.0))
            # bounded before softplus, whose own gradient is gone at -100: Adam's momentum can carry a policy as far as that
            return functional.softplus(Bounded.apply(out, *RAW))  # type: ignore[no-untyped-call]


def _pooling(before: tuple[int, ...], after: tuple[int, ...]) -> nn.Module:
    """The mean over blocks of a grid; over equal ones without adaptive pooling, whose gradient CUDA refuses to compute deterministically.

    So it does for any pooling of volumes. Down to a single number, adaptive pooling is a plain mean.
    """
    dims, both = len(after), list(zip(before, after, strict=True))
    fixed = dims < 3 and max(after) > 1 and all(b % a == 0 for b, a in both)
    adaptive: tuple[type[nn.Module], ...] = nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d
    pools: tuple[type[nn.Module], ...] = (nn.AvgPool1d, nn.AvgPool2d) if fixed else adaptive
    return pools[dims - 1](tuple(b // a for b, a in both) if fixed else after)


class BetaCells:
    """The masses of Beta distributions on n equal cells, to about 1e-6 of each mass (tested against scipy).

    Inner cells use four Gauss-Legendre nodes. In the end cells a density with a < 1 or b < 1 is infinite; there the substitution u = h·w^(1/a)
    removes the singularity: ∫_0^h u^(a-1)(1-u)^(b-1) du = h^a/a · ∫_0^1 (1 - h·w^(1/a))^(b-1) dw.
    """

    def __init__(self, cells: int) -> None:
        self.cells = cells
        x, share = np.polynomial.legendre.leggauss(4)
        nodes = ((np.arange(1, cells - 1)[:, None] + (x + 1) / 2) / cells).ravel()
        self._log_nodes, self._share = Table(np.stack([np.log(nodes), np.log1p(-nodes)])), Table(share / 2)
        w, weight = np.polynomial.legendre.leggauss(12)
        self._log_w, self._weight = Table(np.log((w + 1) / 2)), Table(weight / 2)

    def mass(self, parameters: Tensor) -> Tensor:
        """(B, n) probabilities of the cells from parameters (B, 2), float64. Every training step calls this, so it uses few, wide kernels."""
        ab = widen(parameters)
        powers, device = ab - 1, ab.device
        inner = powers @ self._log_nodes.on(device)  # the log density at the nodes, up to a constant
        top = inner.detach().amax(1, keepdim=True)
        inner = (inner - top).exp().view(len(ab), -1, 4) @ self._share.on(device)
        # both end cells at once, in units of h·e^top like the inner cells; `bend` is the log of the other factor, (1-u)^(b-1) in the first cell
        h = 1 / self.cells
        bend = powers.flip(1)[:, :, None] * torch.log1p(-h * (self._log_w.on(device) / ab[:, :, None]).exp())
        ends = (powers * math.log(h) - ab.log() - top).exp() * (bend.exp() @ self._weight.on(device))
        mass = torch.cat([ends[:, :1], inner, ends[:, 1:]], 1)
        return mass / mass.sum(1, keepdim=True)


def draw_cells(pmf: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Times (B,) at uniforms v (B,), each by the inverse CDF of its own row of pmf (B, n), and the probability (B,) of each time's cell."""
    n = pmf.shape[1]
    # CUDA refuses to compute a cumsum deterministically; the other sum takes some thirty kernels in place of one
    borders = running_sum(pmf.T).T.contiguous() if torch.are_deterministic_algorithms_enabled() else pmf.cumsum(1)
    # rounding may leave the last border below 1
    cell = torch.searchsorted(borders, v[:, None].to(pmf.dtype), right=True).clamp(max=n - 1)
    mass = pmf.gather(1, cell)
    part = ((v[:, None] - (borders.gather(1, cell) - mass)) / mass.clamp(min=TINY)).clamp(1e-9, 1 - 1e-9)
    return ((cell + part) / n)[:, 0], mass[:, 0]
