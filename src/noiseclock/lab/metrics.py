"""Distances between two sets of feature vectors, each an (N, D) tensor with one row per image.

    frechet             |μ1 - μ2|² + tr(S1 + S2 - 2·√(S1·S2)): the distance between two Gaussians with these means and covariances
    kid                 the unbiased squared MMD with the kernel (x·y/D + 1)³, averaged over random subsets
    precision_recall    the share of the fakes near a real one, and of the reals near a fake (Kynkäänniemi et al., 1904.06991)
    inception_score     exp E[KL(p(y|x) ‖ p(y))], from the logits of a classifier

Everything is computed in float64, on the device of the features (the algebra of `frechet` on the CPU).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Spread(NamedTuple):
    """A mean over subsets, and the standard deviation between them (which overlap, so it is no standard error)."""

    mean: float
    std: float


class PrecisionRecall(NamedTuple):
    """Both in [0, 1]: precision falls with bad pictures, recall with missing variety."""

    precision: float
    recall: float


@dataclass(frozen=True)
class Moments:
    """The mean (D,) of `count` feature vectors and their scatter Σ(x-mean)(x-mean)ᵀ (D, D), float64.

    The moments of two sets add up to those of their union, so any split into batches gives the same result, up to float64 rounding: 1e-12 of the
    largest entry.

    >>> x = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 6.0]])
    >>> together = Moments.of(x[:1]) + Moments.of(x[1:])
    >>> together.mean.tolist(), together.covariance.tolist()
    ([3.0, 2.0], [[4.0, 6.0], [6.0, 12.0]])
    """

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, features: Tensor, *, batch: int = 8192) -> Moments:
        """The moments of (N, D) features of any floating dtype, `batch` rows at a time."""
        _check(features)
        first, *others = torch.split(features, batch)
        total = cls._of_batch(first)
        for part in others:
            total = total + cls._of_batch(part)
        return total

    @classmethod
    def _of_batch(cls, features: Tensor) -> Moments:
        x = features.double()
        mean = x.mean(0)
        away = x - mean
        return cls(len(x), mean, away.T @ away)

    def __add__(self, other: Moments) -> Moments:
        # around the means, never Σxxᵀ - N·μμᵀ: that would cancel nearly everything where the means are large
        count = self.count + other.count
        shift = other.mean - self.mean
        between = torch.outer(shift, shift) * (self.count * other.count / count)
        return Moments(count, self.mean + shift * (other.count / count), self.scatter + other.scatter + between)

    @property
    def covariance(self) -> Tensor:
        """(D, D), unbiased."""
        if self.count < 2:
            raise ValueError("a covariance needs at least two samples, got one")
        return self.scatter / (self.count - 1)


def frechet(a: Moments, b: Moments) -> float:
    """The squared Fréchet distance of two Gaussians, accurate to about 1e-12 of the covariances' traces, also for singular covariances.

    With any F such that S = F·Fᵀ, tr √(S1·S2) is the sum of the singular values of F1ᵀ·F2. Small singular values are accurate, whereas the roots of
    small eigenvalues of S1·S2 have errors of √ε, so here a set has distance 0 to itself.
    """
    if a.mean.shape != b.mean.shape:
        raise ValueError(f"features of {len(a.mean)} and of {len(b.mean)} dimensions cannot be compared")
    apart = (a.mean.cpu() - b.mean.cpu()).square().sum()
    one, other = a.covariance.cpu(), b.covariance.cpu()
    overlap = torch.linalg.svdvals(_factor(one).T @ _factor(other)).sum()
    distance: float = (apart + one.trace() + other.trace() - 2 * overlap).item()
    return max(distance, 0.0)  # rounding must not make it negative


def _factor(covariance: Tensor) -> Tensor:
    """F (D, D) with F·Fᵀ = covariance. Any F will do: that of Cholesky is much faster, but needs a covariance that is far from singular."""
    factor: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    pivots = factor.diagonal()
    if failed or pivots.min() <= 1e-5 * pivots.max():  # the squares of the pivots lie between the smallest and the largest eigenvalue
        values, vectors = torch.linalg.eigh(covariance)
        factor = vectors * values.clamp(min=0).sqrt()
    return factor


def squared_mmd(x: Tensor, y: Tensor) -> float:
    """The unbiased squared maximum mean discrepancy of (n, D) and (m, D) features with the kernel (x·y/D + 1)³; it can be negative."""
    _check(x, y, least=2)
    n, m = len(x), len(y)
    among_x, among_y, across = _kernel(x, x), _kernel(y, y), _kernel(x, y)
    within_x = (among_x.sum() - among_x.trace()) / (n * (n - 1))
    within_y = (among_y.sum() - among_y.trace()) / (m * (m - 1))
    return (within_x + within_y - 2 * across.mean()).item()


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() @ y.double().T / x.shape[1] + 1) ** 3


def kid(x: Tensor, y: Tensor, *, subsets: int = 100, size: int = 1000, seed: int = 0) -> Spread:
    """The squared MMD between `size` random rows of x (N, D) and as many of y (M, D), repeated for `subsets` random subsets.

    If a set has fewer than `size` rows, subsets have as many as the smaller set.
    """
    _check(x, y, least=2)
    size = min(size, len(x), len(y))
    generator = torch.Generator().manual_seed(seed)
    values = torch.tensor([squared_mmd(_some(x, size, generator), _some(y, size, generator)) for _ in range(subsets)], dtype=torch.float64)
    return Spread(values.mean().item(), values.std(correction=0).item())


def _some(x: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """(size, D) different rows."""
    return x[torch.randperm(len(x), generator=generator)[:size].to(x.device)]


def precision_recall(real: Tensor, fake: Tensor, *, k: int = 3, chunk: int = 2**26) -> PrecisionRecall:
    """The share of fakes (M, D) inside the manifold of the reals (N, D), and the reverse.

    A manifold is the union of balls around the points of a set, each as large as the distance to the point's k-th neighbour. Both figures depend
    on the sizes of the sets, so compare like with like. chunk: how many distances are held at a time (2²⁶ are 512 MiB).
    """
    _check(real, fake, least=k + 1)
    reach_real, reach_fake = _reach(real, k, chunk), _reach(fake, k, chunk)
    covered = torch.zeros(len(real), dtype=torch.bool, device=real.device)
    inside = 0
    for start, distances in _distances(fake, real, chunk):
        inside += int((distances <= reach_real).any(1).sum())
        covered |= (distances <= reach_fake[start : start + len(distances), None]).any(0)
    return PrecisionRecall(inside / len(fake), covered.double().mean().item())


def _reach(x: Tensor, k: int, chunk: int) -> Tensor:
    """(N,) the squared distance of every point to its k-th neighbour."""
    found = []
    for start, distances in _distances(x, x, chunk):
        distances.diagonal(start).fill_(math.inf)  # a point is no neighbour of itself
        found.append(distances.kthvalue(k, 1).values)
    return torch.cat(found)


def _distances(x: Tensor, y: Tensor, chunk: int) -> Iterator[tuple[int, Tensor]]:
    """The squared distances between x (N, D) and y (M, D) in chunks: the index of the first row, and the distances (rows, M)."""
    y = y.double()
    lengths = y.square().sum(1)
    rows = max(1, chunk // len(y))
    for start in range(0, len(x), rows):
        part = x[start : start + rows].double()
        own = part.square().sum(1, keepdim=True)
        distances = (own + lengths).addmm_(part, y.T, alpha=-2)
        # rounding is below D·2⁻⁵² of the squared lengths, 5e-13 at 2048 dimensions; copies of a point must be at its very place, or balls of radius
        # 0 around them would miss them
        yield start, distances.masked_fill_(distances <= 1e-12 * (own + lengths.max()), 0.0)


def inception_score(logits: Tensor, *, splits: int = 10) -> Spread:
    """exp E[KL(p(y|x) ‖ p(y))] of (N, K) logits, over `splits` consecutive parts of equal size (a remainder is left out)."""
    _check(logits, least=splits)
    each = len(logits) // splits
    log_p = logits[: each * splits].double().log_softmax(1).reshape(splits, each, -1)
    marginal = log_p.logsumexp(1, keepdim=True) - math.log(each)
    scores = (log_p.exp() * (log_p - marginal)).sum(2).mean(1).exp()
    return Spread(scores.mean().item(), scores.std(correction=0).item())


def _check(*sets: Tensor, least: int = 1) -> None:
    for x in sets:
        if x.ndim != 2 or not x.is_floating_point():
            raise ValueError(f"features must be floating-point rows (N, D), got {x.dtype} of shape {tuple(x.shape)}")
        if len(x) < least:
            raise ValueError(f"at least {least} samples are needed here, got {len(x)}")
        if x.shape[1] != sets[0].shape[1]:
            raise ValueError(f"features of {sets[0].shape[1]} and of {x.shape[1]} dimensions cannot be compared")
        if not bool(x.isfinite().all()):
            raise ValueError("features must be finite; the images that they were made from are not")
