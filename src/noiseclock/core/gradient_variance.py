"""Sampling in proportion to the variance of the gradient (the adaptive paper's Table 4), and the estimator of this variance.

With separate parameters for every time, SGD needs a number of updates in proportion to Tr Var[g_t], the variance over (x0, eps) of the gradient
g_t = ∇_θ ℓ_t of the plain loss (2411.09998, Theorem 1); sampling in that proportion would then be right. Real models share their parameters between
times, and the paper shows that the method fails there (FID 11.3, against 3.19 with the uniform sampler). It is here as a baseline.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from noiseclock.core import ranks
from noiseclock.core.batch import Batch, Predict, at_least_float32, call
from noiseclock.core.checks import take_whole
from noiseclock.core.directions import gradients
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.loss_based import between_known
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import trained
from noiseclock.core.probes import Probe, uncached
from noiseclock.core.table import wide


@dataclass
class GradientVariance(LearnedDensity):
    """p* ∝ base·Tr Var[g_t] of the unweighted loss, in bins of time; without a square root and without importance correction, as in the paper.

    bins: number of time bins. samples: number of (x0, eps) in each bin, half of them in each half of the pairs. pairs: pairs of backward passes in
    each bin, see `gradient_moments`. every: optimiser updates between estimates; a new estimate replaces the old one. floor: the share of the base
    in p.

    An estimate takes 2·bins·pairs backward passes of samples/(2·pairs) rows: by default 2048 samples, as many as 16 training steps at batch 128.
    With a smaller `probe_rows`, or if memory runs out, there are more pairs of fewer rows.
    Estimates that are not finite are left out and counted in `skipped`; a bin with no finite estimate keeps its old value.
    """

    bins: int = 32
    samples: int = 64
    pairs: int = 2
    every: int = 1000
    floor: float = 0.01

    least_batch = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "bins", "samples", least=2)
        take_whole(self, "pairs", "every", least=1)
        split(self.samples, self.pairs, self.samples)
        self._begin()

    @property
    def corrects(self) -> bool:
        return False

    @property
    def cells(self) -> int:
        return self.bins

    def _statistics(self) -> dict[str, Tensor]:
        variance = torch.zeros(self.bins, dtype=torch.float64, device="cpu")
        return {"variance": variance, "estimates": variance.long(), "skipped": torch.zeros((), dtype=torch.int64, device="cpu")}

    @property
    def variance(self) -> Tensor:
        """(bins,) the current estimate, float64, on the CPU; 0 for a bin without an estimate."""
        return self._buffers["variance"].cpu().double()

    @property
    def skipped(self) -> int:
        """How many estimates on all ranks were not finite; reads the device."""
        return int(self._buffers["skipped"])

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "skipped": self.skipped}

    def after(self, probe: Probe, batch: Batch) -> None:
        """Make a new estimate. This happens after the update, because a clock expects the density to change then."""
        self._move_(probe.x0.device)
        # the last batch of an epoch may differ in size between ranks, but all ranks must make the same number of passes
        size = ranks.least(len(probe.x0), probe.x0.device)
        few = copy(probe)
        few.rows = min(probe.rows, split(self.samples, self.pairs, size)[0])  # if memory runs out, half of what it takes

        def measure() -> Tensor:
            half, pairs = split(self.samples, self.pairs, min(size, 2 * few.rows))
            time = (torch.arange(self.bins * pairs, dtype=torch.float64, device="cpu") + 0.5) / (self.bins * pairs)
            return gradient_moments(few, time, half)[0].reshape(self.bins, pairs)

        found = few.within_memory(measure)
        if not bool(found.any()):  # waits for the device, which an estimate of so many passes can afford
            self._health.warn(
                "prices",
                "GradientVariance: no loss depends on the trained parameters, so nothing can be learned; pass the model that the optimiser trains as "
                "predict=, not a copy of it such as averaged weights",
            )
        finite = found.isfinite()
        count, total, lost = ranks.total(torch.stack([finite.to(found.dtype), torch.where(finite, found, 0.0), (~finite).to(found.dtype)]).sum(2))
        variance, estimates = self._buffers["variance"], self._buffers["estimates"]
        variance.copy_(torch.where(count > 0, total / count.clamp(min=1), variance))
        estimates.add_(count.long())
        self._buffers["skipped"].add_(lost.sum().long())
        known = estimates > 0
        self.set_density_(self._base_cells() * between_known(variance, known), known.any())
        if self.skipped:
            self._health.warn(
                "skipped", f"GradientVariance: {self.skipped} gradients were not finite and were skipped; check the model and its precision"
            )


def split(samples: int, pairs: int, rows: int) -> tuple[int, int]:
    """How to divide `samples`: the rows in a half, and the number of pairs, which is above `pairs` if a pair would need more than `rows` rows.

    >>> split(64, 4, 128), split(64, 4, 10)
    ((8, 4), (5, 7))
    """
    if rows < 2:
        raise ValueError("the variance of the gradient needs a batch of at least two samples")
    if pairs < 1 or samples < 2 * pairs:
        raise ValueError(f"a pair takes at least two samples, got samples = {samples} for pairs = {pairs}")
    half = min(samples // (2 * pairs), rows // 2)
    return half, max(pairs, math.ceil(samples / (2 * half)))


def gradient_moments(probe: Probe, time: Tensor, half: int) -> Tensor:
    """(2, n): Tr Var[g_t] and E‖g_t‖² at times (n,), float64 where the device has it.

    Two halves of m samples each share no sample and no noise. Their mean gradients G and H both have the mean E g and the variance Tr Var g/m. So

        m·‖G-H‖²/2              estimates Tr Var g, and
        m·‖G-H‖²/2 + G·H        estimates E‖g‖², as G·H does ‖E g‖²,

    both unbiased and never negative; at m = 1 the second is (‖G‖²+‖H‖²)/2. Over k independent pairs the relative error of the variance is about
    √(2/(k·D) + κ/(2mk)): D = (Tr Σ)²/Tr Σ² is the effective number of dimensions of Σ = Var g, κ is the squared relative spread of ‖g-E g‖² over
    samples. Per-sample gradients (vmap) would avoid the first term, but the model must support vmap and every sample's gradient must fit into
    memory; this function takes any callable, m rows at a time.

    Parameters that require no gradient do not count, and `.grad` is left unchanged. The gradient of a sharded model (FSDP2) is the mean over its
    ranks, so m counts the samples of all ranks.
    """
    parameters = trained(probe.modules, probe.optimizers)
    rows, m = probe.shuffled(), half * _shards(parameters)
    # a compiled model would recompile for m rows
    predict: Predict = getattr(probe.predict, "_orig_mod", probe.predict)
    # without a loss scale float16 gradients underflow, bfloat16 gradients do not
    autocast = probe.autocast if probe.autocast is torch.bfloat16 else None
    found = []
    with ExitStack() as stack:
        for module in probe.modules:
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        stack.enter_context(probe.at_rest())
        stack.enter_context(uncached(probe.x0.device, autocast))
        for i, t in enumerate(time.to(probe.x0.device, wide(probe.x0.device))):
            # every time gets other samples and, shifted by i, other noises for them; no half holds a sample or a noise twice
            chosen = rows[(torch.arange(2 * half, device=t.device) + 2 * half * i) % len(rows)]
            halves = ((part, (part + i) % len(probe.noise)) for part in chosen.chunk(2))
            g, h = (_gradient(predict, parameters, *probe.inputs(t.expand(half), *of, autocast)) for of in halves)
            apart = sum((_whole((a - b).square().sum(dtype=wide(t.device))) for a, b in zip(g, h, strict=True)), torch.zeros_like(t))
            along = sum((_whole((a * b).sum(dtype=wide(t.device))) for a, b in zip(g, h, strict=True)), torch.zeros_like(t))
            found.append(torch.stack([m * apart / 2, m * apart / 2 + along]))
    return torch.stack(found, 1)


def _gradient(predict: Predict, parameters: list[nn.Parameter], x_t: Tensor, t: Tensor, cond: Any, target: Tensor) -> list[Tensor]:
    """The gradient of the mean loss of some samples, float32 at least."""
    with torch.enable_grad():
        loss = squared_error(call(predict, x_t, t, cond), target).mean()
        if not loss.requires_grad:
            raise ValueError("the loss depends on no trained parameter; predict must not disable gradients")
        found = (torch.view_as_real(g) if g.is_complex() else g for g in gradients(loss, parameters))
        return [g.to(at_least_float32(g)) for g in found]


def _shards(parameters: list[nn.Parameter]) -> int:
    """The number of ranks over which the parameters are sharded, 1 for a model that is not sharded."""
    return max((int(p.device_mesh.size()) if hasattr(p, "device_mesh") else 1 for p in parameters), default=1)


def _whole(x: Tensor) -> Tensor:
    """A sum over shards, on every rank."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
