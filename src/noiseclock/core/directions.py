"""Derivatives of many losses along one direction of the parameters, from forward passes alone.

A central difference along d costs two forward passes for a whole batch; per-sample gradients would cost one backward pass per sample.
Forward-mode differentiation would be exact, but fails on fused attention and group norm. The truncation error of the difference is of order h², its
rounding error of order 1/h. Along a gradient the loss changes most, so a small step suffices. Along a random direction of many parameters it changes
so little that the step must be larger. `benchmarks/derivative.py`: for the 9 M U-Net after 46 updates, with convolutions in TF32 as is usual on a
GPU, a step of 0.001 of the parameters' norm has an error of 120 %, one of 0.05 has 11 %.

With ξ ~ N(0, I) the squared derivative along P^½ξ has the mean ‖gradient‖²_P, P the metric of the optimisers (`core/optimizers.py`).
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

ALONG, ACROSS = 1e-3, 0.05  # ‖h·d‖ as a fraction of the norm of the parameters, for d along a gradient and for a random d
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
    direction: Sequence[Tensor],
    losses: Callable[[], Tensor],
    *,
    step: float,
    checked: bool = False,
) -> Tensor:
    """(N,) the derivative of `losses()` (N,) along a direction of the modules' trained parameters, which are restored bit for bit.

    step: ALONG or ACROSS. checked: compare the derivative with that of twice the step, and warn if they differ.
    """
    spread = sharded(parameters)
    if half := next((p.dtype for p in parameters if p.dtype in (torch.bfloat16, torch.float16)), None):
        raise ValueError(
            f"a probe moves each parameter by a small part of its size, which {half} rounds away; keep the parameters in float32 and use autocast"
        )
    mine = [local(p) for p in parameters]
    length, size = (_norm(part, spread) for part in (direction, mine))
    size = size.clamp(min=LEAST * math.sqrt(sum(p.numel() for p in parameters)))
    h = torch.where(length > 0, step * size / length, 1.0)
    kept = _shaped(torch.empty(sum(p.numel() for p in mine), device=mine[0].device), mine)
    torch._foreach_copy_(kept, mine)

    def along(h: Tensor) -> Tensor:
        found = []
        for signed in (h, -h):
            torch._foreach_copy_(mine, kept)
            torch._foreach_add_(mine, torch._foreach_mul(list(direction), signed.to(direction[0].dtype)))
            forget_gathered(modules, spread)
            found.append(losses())
        return (found[0] - found[1]) / (2 * h).to(found[0].dtype)

    try:
        slope = along(h)
        if checked:
            _compare(slope, along(2 * h))
        return slope
    finally:
        torch._foreach_copy_(mine, kept)
        forget_gathered(modules, spread)


def _compare(slope: Tensor, other: Tensor) -> None:
    """Warn if derivatives with two steps are not the same.

    At the tenth probe of VarianceOptimal on digits they agreed to 0.1 % in float32 and differed by 2 to 19 % with convolutions in TF32, by 22 to 97 %
    in bfloat16 (two U-Nets and a transformer, three seeds). Along a gradient, as Lookahead takes it, they differed by 4 to 14 % in bfloat16.
    """
    differ, size = ranks.total(torch.stack([(slope - other).square().sum(), other.square().sum()])).tolist()
    if differ > UNLIKE**2 * size:
        warn(
            f"the derivatives of this probe change by {100 * math.sqrt(differ / max(size, TINY)):.0f} % with twice the step, so they are rounding "
            "errors or chance, and so is what is learned from them. If the model computes in half precision, use autocast around its call and not "
            "inside, and keep frozen weights behind trained ones in float32; if it draws random numbers, let it take torch's default generator"
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


def _norm(tensors: Sequence[Tensor], spread: bool) -> Tensor:
    norms = torch._foreach_norm([t.detach() for t in tensors])
    squares = torch.stack([n.to(norms[0]) for n in norms]).to(wide(norms[0].device)).square().sum()
    return (ranks.total(squares) if spread else squares).sqrt()


def _shaped(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Consecutive numbers in the shapes and memory formats of other tensors: only then do foreach operations on both lists fuse on a GPU."""
    parts: list[Tensor] = []
    start = 0
    for t in like:
        part = flat[start : start + t.numel()]
        last = t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)
        part = part.as_strided(t.shape, t.stride()) if last else part.view(t.shape)
        parts.append(part.to(t))
        start += t.numel()
    return parts
