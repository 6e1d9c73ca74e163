"""Derivatives of many losses along one direction of the parameters, from forward passes alone.

A central difference along d costs two forward passes for a whole batch; per-sample gradients would cost one backward pass per sample.
Forward-mode differentiation would be exact, but fails on fused attention and group norm. The truncation error of the difference is of order h², its
rounding error of order 1/h: with ‖h·d‖ = 1/1000 of the parameters' norm the error is about 2e-4 in float32. In bfloat16 there is no good h.

The metric: an optimiser's update is -P·gradient, P diagonal. With ξ ~ N(0, I) the squared derivative along P^½ξ has the mean ‖gradient‖²_P.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.table import wide

STEP = 1e-3  # ‖h·d‖ as a fraction of the norm of the parameters


def trained(modules: list[nn.Module], optimizer: Any = None) -> list[nn.Parameter]:
    """The trained parameters, each once: they require a gradient and, if the optimiser is known, belong to it.

    Frozen parameters, as in fine-tuning with adapters, are neither perturbed nor copied, and their gradients do not count.
    """
    given = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = (p for module in modules for p in module.parameters() if p.requires_grad and (given is None or id(p) in given))
    parameters = list({id(p): p for p in found}.values())
    if not parameters:
        raise ValueError("the model has no trained parameter: none requires a gradient and belongs to the optimiser")
    return parameters


def unwrapped(optimizer: Any) -> Any:
    """The torch optimiser inside a wrapper of accelerate or others; anything else is returned unchanged."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def stands_still(optimizer: Any) -> bool:
    """Is the learning rate 0, as at the start of a warm-up, so that there is no metric?"""
    return optimizer is not None and all(not isinstance(lr := group.get("lr"), Tensor) and lr == 0 for group in optimizer.param_groups)


def no_gradients(optimizer: Any, device: torch.device) -> bool:
    """Has the optimiser nothing to make a step of: no gradients, only zeros, or some that are not finite?

    Waits for the device. All ranks must ask, and get the same answer: a rank that probed the model alone would wait for the others forever.
    """
    grads = [local(p.grad.detach()) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    sizes = [grad.abs().sum(dtype=torch.float32).to(device) for grad in grads]  # float16 would overflow
    return not 0 < float(ranks.total(sum(sizes, torch.zeros((), dtype=torch.float32, device=device)))) < math.inf


def metric(optimizer: Any, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor | float], str]:
    """P for each parameter, and a reason if P is the identity because the optimiser's metric is unknown, else "".

    Adam and AdamW: lr/(√v̂+ε) as of their last update, 0 where no gradient was ever seen. SGD: lr, with any momentum, because momentum delays a step
    but does not change its direction.
    """
    unit: list[Tensor | float] = [1.0] * len(parameters)
    if isinstance(optimizer, torch.optim.SGD):
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        found = [rates.get(id(p), 0.0) for p in parameters]
        return (list(found) if any(found) else unit), ""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        known = "no optimiser is known (attach one to the clock)" if optimizer is None else f"the metric of {type(optimizer).__name__} is not known"
        return unit, known
    scales: list[Tensor | float] = [0.0] * len(parameters)  # parameters without optimiser state have not moved
    place = {id(p): i for i, p in enumerate(parameters)}
    for group in optimizer.param_groups:
        moved = [p for p in group["params"] if id(p) in place and "exp_avg_sq" in optimizer.state.get(p, {})]
        for p, scale in zip(moved, _adam(group, [optimizer.state[p] for p in moved]), strict=True):
            scales[place[id(p)]] = scale
    return (scales, "") if any(isinstance(scale, Tensor) for scale in scales) else (unit, "")


@torch.no_grad()
def _adam(group: Any, states: list[Any]) -> list[Tensor]:
    """lr/(√v̂+ε) of the parameters of a group. Each parameter has its own step count: a parameter that was frozen at first has fewer steps."""
    if not states:
        return []
    squares = [local(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]) for state in states]
    steps = torch.stack([local(state["step"]) for state in states])
    # a fused Adam has a state from its first step on, even if a GradScaler has skipped every step so far
    seen = 1 - group["betas"][1] ** steps.to(squares[0].device, torch.float32).clamp(min=1)
    power = list(torch._foreach_div(squares, list(seen.unbind())))
    torch._foreach_sqrt_(power)
    torch._foreach_add_(power, group["eps"])
    torch._foreach_reciprocal_(power)
    # Parameters without any gradient so far, such as those before a zero-initialised layer (adapters have one), have not moved: 1/ε would dominate.
    torch._foreach_mul_(power, torch._foreach_sign(squares))
    lr = group["lr"]
    torch._foreach_mul_(power, lr.to(squares[0].device) if isinstance(lr, Tensor) else lr)
    return power


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
def derivative(modules: list[nn.Module], parameters: Sequence[nn.Parameter], direction: Sequence[Tensor], losses: Callable[[], Tensor]) -> Tensor:
    """(N,) the derivative of `losses()` (N,) along a direction of the modules' trained parameters, which are restored bit for bit."""
    spread = sharded(parameters)
    for p in (p for module in modules for p in module.parameters()):
        if p.dtype in (torch.bfloat16, torch.float16):  # frozen ones too: their outputs are rounded to three digits
            raise ValueError(
                f"a probe steps by 1/1000 of the parameters' norm, which {p.dtype} rounds away; keep the parameters in float32 and use autocast"
            )
    mine = [local(p) for p in parameters]
    length, size = (_norm(part, spread) for part in (direction, mine))
    h = torch.where(length > 0, STEP * size / length, 1.0)
    step = torch._foreach_mul(list(direction), h.to(direction[0].dtype))
    kept = _shaped(torch.empty(sum(p.numel() for p in mine), device=mine[0].device), mine)
    torch._foreach_copy_(kept, mine)
    try:
        torch._foreach_add_(mine, step)
        _forget_gathered(modules, spread)
        above = losses()
        torch._foreach_copy_(mine, kept)
        torch._foreach_sub_(mine, step)
        _forget_gathered(modules, spread)
        return (above - losses()) / (2 * h).to(above.dtype)
    finally:
        torch._foreach_copy_(mine, kept)
        _forget_gathered(modules, spread)


def _forget_gathered(modules: list[nn.Module], spread: bool) -> None:
    """Make FSDP2 gather the parameters again: it may keep the full parameters of the previous forward pass."""
    for root in modules if spread else ():
        for module in root.modules():
            if isinstance(reshard := getattr(module, "reshard", None), MethodType):
                reshard()


def local(x: Tensor) -> Tensor:
    """This rank's shard of a tensor that FSDP2 has sharded, in the same memory; other tensors unchanged."""
    return x.to_local() if hasattr(x, "to_local") else x


def sharded(parameters: Sequence[Tensor]) -> bool:
    """Does each rank hold only a shard of the parameters?"""
    return any(hasattr(p, "device_mesh") for p in parameters)


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The gradient of a loss for each parameter, zeros for parameters that the loss does not use; `.grad` is left unchanged.

    With a model that FSDP2 has sharded: the shards of the gradient of the mean loss over ranks.
    """
    if not sharded(parameters):
        return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
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
