"""Derivatives of many losses along one direction of the parameters, from forward passes alone.

A central difference along d costs two forward passes for a whole batch; per-sample gradients would cost one backward pass per sample.
Forward-mode differentiation would be exact, but fails on fused attention and group norm. The truncation error of the difference is of order h², its
rounding error of order 1/h.

With ξ ~ N(0, I) the squared derivative along P^½ξ has the mean ‖gradient‖²_P, P the metric of the optimisers (`core/optimizers.py`).

Lengths of a step and of the parameters are measured by ‖x‖² = Σ x²/P. A parameter without any influence, such as a bias before a group norm, has a
gradient of rounding errors and so a huge P; a few of these can make up nearly all of the plain norm of a random direction, and hide how far the other
parameters are moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MethodType

import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.health import warn
from noiseclock.core.ranks import local, sharded
from noiseclock.core.samplers import TINY
from noiseclock.core.table import wide

ALONG, ACROSS = 1e-3, 5e-3  # ‖h·d‖ as a fraction of the length of the parameters, for d along a gradient and for a random d
LEAST = 0.01  # root mean square of the parameters that is assumed at least: adapters and biases start at 0. Networks as a whole have 0.015 to 0.05
CHECKED = 9  # the number of the probe that compares two steps: the first see large gradients, which rounding hardly disturbs
UNLIKE = 0.3  # by which the two may differ


@torch.no_grad()
def normal(parameters: Sequence[nn.Parameter], power: Sequence[Tensor | float], seed: int) -> list[Tensor]:
    """P^½ξ for each parameter, or for this rank's shard of it. Every rank draws its own numbers: with a sharded model they are the parts of one ξ,
    with replicas each rank has a ξ of its own, and the mean over ranks is less noisy."""
    mine = [local(p) for p in parameters]
    generator = torch.Generator(mine[0].device).manual_seed((seed + ranks.mine()) % 2**63)
    flat = torch.randn(sum(p.numel() for p in mine), generator=generator, device=mine[0].device)
    tensors = [scale for scale in power if isinstance(scale, Tensor)]
    roots = iter(torch._foreach_sqrt(tensors) if tensors else ())
    return scaled(_shaped(flat, mine), [next(roots) if isinstance(scale, Tensor) else scale**0.5 for scale in power])


@torch.no_grad()
def scaled(parts: list[Tensor], power: Sequence[Tensor | float]) -> list[Tensor]:
    """Every part times its scale, in place."""
    tensors = [(part, scale) for part, scale in zip(parts, power, strict=True) if isinstance(scale, Tensor)]
    numbers = [(part, scale) for part, scale in zip(parts, power, strict=True) if not isinstance(scale, Tensor)]
    for some in (tensors, numbers):
        if some:
            torch._foreach_mul_([part for part, _ in some], [scale for _, scale in some])  # type: ignore[misc]
    return parts


@torch.no_grad()
def derivative(
    modules: list[nn.Module],
    parameters: Sequence[nn.Parameter],
    power: Sequence[Tensor | float],
    direction: Sequence[Tensor],
    losses: Callable[[], Tensor],
    *,
    step: float,
    checked: bool = False,
) -> Tensor:
    """(N,) the derivative of `losses()` (N,) along a direction of the modules' trained parameters, which are restored bit for bit.

    power: the metric P. step: ALONG or ACROSS. checked: compare the derivative with that of twice the step, and warn if they differ.
    """
    spread = sharded(parameters)
    if half := next((p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)), None):
        raise ValueError(
            f"a probe moves each parameter by a small part of its size, which {half} rounds away; keep the parameters in float32 and use autocast"
        )
    mine = [local(p) for p in parameters]
    h = _multiple(step, power, direction, mine, spread)
    kept = _shaped(torch.empty(sum(p.numel() for p in mine), device=mine[0].device), mine)
    torch._foreach_copy_(kept, mine)

    def along(h: Tensor) -> Tensor:
        change = torch._foreach_mul(list(direction), h.to(direction[0].dtype))
        torch._foreach_add_(mine, change)
        forget_gathered(modules, spread)
        ahead = losses()
        torch._foreach_copy_(mine, kept)
        torch._foreach_sub_(mine, change)
        forget_gathered(modules, spread)
        behind = losses()
        return (ahead - behind) / (2 * h).to(ahead.dtype)

    try:
        slope = along(h)
        if checked:
            torch._foreach_copy_(mine, kept)
            _compare(slope, along(2 * h))
        return slope
    finally:
        torch._foreach_copy_(mine, kept)
        forget_gathered(modules, spread)


def _multiple(step: float, power: Sequence[Tensor | float], direction: Sequence[Tensor], parameters: Sequence[Tensor], spread: bool) -> Tensor:
    """(0-d) h, for which h·d has this fraction of the parameters' length; 1 if d is zero."""
    units = _units(power, parameters)
    # each product is as large as the model, and is gone before the next is made
    norms = [torch._foreach_norm(torch._foreach_mul(list(x), units)) for x in (direction, parameters)]
    moved, length, least = _together([*norms, torch._foreach_norm(units)], spread)
    return torch.where(moved > 0, step * torch.maximum(length, LEAST * least) / moved, 1.0)


def _compare(slope: Tensor, other: Tensor) -> None:
    """Warn if derivatives with two steps are not the same.

    At the tenth probe of VarianceOptimal on digits they agreed to 0.6 % in float32 and differed by 1 to 14 % with convolutions in TF32, by 25 to
    150 % in bfloat16 (two U-Nets and a transformer, Adam and SGD, three seeds). Along a gradient, as Lookahead takes it, they differed by 12 % at
    the most.
    """
    differ, size = ranks.total(torch.stack([(slope - other).square().sum(), other.square().sum()])).tolist()
    if differ > UNLIKE**2 * size:
        warn(
            f"the derivatives of this probe change by {100 * math.sqrt(differ / max(size, TINY)):.0f} % with twice the step, so they cannot be "
            "relied on, and neither can what is learned from them. If the model computes in half precision, use autocast around its call and not "
            "inside, nor FSDP2's param_dtype, and keep frozen weights behind trained ones in float32; if it draws random numbers, let it take "
            "torch's default generator; and give layers before a batch norm no bias"
        )


def forget_gathered(modules: list[nn.Module], spread: bool = True) -> None:
    """Make FSDP2 gather the parameters again: after a forward pass alone it may keep the full ones, which are not those that the optimiser has."""
    for root in modules if spread else ():
        for module in root.modules():
            if isinstance(reshard := getattr(module, "reshard", None), MethodType):
                reshard()


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of a loss for each parameter, zeros for parameters that the loss does not use; `.grad` is left unchanged.

    With a model that FSDP2 has sharded: the shards of the gradient of the mean loss over ranks.
    """
    if not sharded(parameters):
        try:
            found = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if "checkpoint" not in str(error).lower():
                raise
            raise ValueError(
                "this sampler takes gradients without .backward(), which reentrant checkpoints refuse; use use_reentrant=False"
            ) from error
        return tuple(part.to_dense() if part.is_sparse else part for part in found)
    # FSDP2 computes with gathered copies; only a full backward pass, which adds to `.grad`, reduces their gradients to the shards
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        return tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    finally:
        for p, gradient in zip(parameters, kept, strict=True):
            p.grad = gradient


def _units(power: Sequence[Tensor | float], like: Sequence[Tensor]) -> list[Tensor]:
    """P^-½ in the shapes of the parameters, 0 where P is 0."""
    whole = [p if isinstance(p, Tensor) and p.shape == x.shape else torch.ones_like(x) * p for p, x in zip(power, like, strict=True)]
    units = list(torch._foreach_add(whole, TINY))
    torch._foreach_rsqrt_(units)
    torch._foreach_mul_(units, torch._foreach_sign(whole))
    return units


def _together(norms: Sequence[Sequence[Tensor]], spread: bool) -> Tensor:
    """The norms of lists of as many tensors, from those of their tensors."""
    flat = torch.stack([n.to(norms[0][0]) for some in norms for n in some])
    squares = flat.to(wide(flat.device)).square().view(len(norms), -1).sum(1)
    return (ranks.total(squares) if spread else squares).sqrt()


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive numbers in the shapes and memory formats of other tensors: only then do foreach operations on both lists fuse on a GPU."""
    parts = flat.split([t.numel() for t in like])  # type: ignore[no-untyped-call]
    return [_of_shape(part, t).to(t) for part, t in zip(parts, like, strict=True)]


def _of_shape(part: Tensor, like: Tensor) -> Tensor:
    last = like.ndim == 4 and like.is_contiguous(memory_format=torch.channels_last)
    return part.as_strided(like.shape, like.stride()) if last else part.view(like.shape)
