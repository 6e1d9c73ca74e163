"""Derivatives of many losses along one direction of the parameters, from forward passes alone.

A central difference along d costs two passes without gradients for a whole batch, where the gradient of each sample would cost a backward pass
each. Forward-mode differentiation would be exact, but fails on fused attention and group norm. The error of the difference is of the order h²
and, from rounding, 1/h: with ‖h·d‖ a thousandth of the parameters' norm it is about 2e-4 in float32. In bfloat16 there is no good h.

The metric: an optimiser's update is -P·gradient, P diagonal. With ξ ~ N(0, I) the squared derivative along P^½ξ has the mean ‖gradient‖²_P.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.table import wide

STEP = 1e-3  # of the norm of the parameters


def trained(modules: list[nn.Module]) -> list[nn.Parameter]:
    """The parameters that are trained, each once."""
    parameters = list({id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values())
    if not parameters:
        raise ValueError("the model has no parameter that is trained")
    return parameters


def metric(optimizer: Any, parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor | float], str]:
    """P for each parameter, and why it is the identity where it is, or nothing.

    Adam and AdamW: lr/(√v̂+ε) as of their last update. SGD: lr, whatever its momentum, which delays a step and does not turn it.
    """
    unit: list[Tensor | float] = [1.0] * len(parameters)
    if isinstance(optimizer, torch.optim.SGD):
        rates = {id(p): float(group["lr"]) for group in optimizer.param_groups for p in group["params"]}
        found = [rates.get(id(p), 0.0) for p in parameters]
        return (list(found) if any(found) else unit), ""
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        known = "no optimiser is known; attach one to the clock" if optimizer is None else f"the metric of {type(optimizer).__name__} is not known"
        return unit, known
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    scales = [_adam(groups.get(id(p)), optimizer.state.get(p, {})) for p in parameters]
    return (scales, "") if any(isinstance(scale, Tensor) for scale in scales) else (unit, "")


def _adam(group: Any, state: Any) -> Tensor | float:
    if group is None or "exp_avg_sq" not in state:
        return 0.0  # it does not move
    square = local(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
    seen = 1 - group["betas"][1] ** state["step"].to(square.device, torch.float32)
    lr = group["lr"].to(square.device) if isinstance(group["lr"], Tensor) else group["lr"]
    power: Tensor = lr / ((square / seen).sqrt() + group["eps"])
    return power


def normal(parameters: Sequence[nn.Parameter], power: Sequence[Tensor | float], seed: int) -> list[Tensor]:
    """P^½ξ for each parameter, or for this rank's part of it: the same on all ranks where they hold the same."""
    device = parameters[0].device
    rank = torch.distributed.get_rank() if sharded(parameters) else 0
    generator = torch.Generator(device).manual_seed((seed + rank) % 2**63)
    parts = [torch.randn(local(p).shape, generator=generator, device=p.device, dtype=p.dtype) for p in parameters]
    return [part * (scale.sqrt().to(part.dtype) if isinstance(scale, Tensor) else scale**0.5) for part, scale in zip(parts, power, strict=True)]


@torch.no_grad()
def derivative(modules: list[nn.Module], direction: Sequence[Tensor], losses: Callable[[], Tensor]) -> Tensor:
    """(N,) the derivative of `losses()` (N,) along a direction of the trained parameters, which are afterwards what they were, bit for bit."""
    parameters = trained(modules)
    for p in parameters:
        if p.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"a step of a thousandth is lost in parameters of {p.dtype}; keep them in float32 and use autocast")
    mine = [local(p) for p in parameters]
    spread = sharded(parameters)
    length, size = (_norm(part, spread) for part in (direction, mine))
    h = STEP * size / length.clamp(min=torch.finfo(length.dtype).tiny)
    step = [h.to(d.dtype) * d for d in direction]
    kept = [p.clone() for p in mine]
    try:
        torch._foreach_add_(mine, step)
        _forget_gathered(modules)
        above = losses()
        torch._foreach_copy_(mine, kept)
        torch._foreach_sub_(mine, step)
        _forget_gathered(modules)
        return (above - losses()) / (2 * h).to(above.dtype)
    finally:
        torch._foreach_copy_(mine, kept)
        _forget_gathered(modules)


def _forget_gathered(modules: list[nn.Module]) -> None:
    """FSDP2 may keep whole parameters between two forward passes, as they were at the first."""
    for root in modules:
        for module in root.modules():
            if isinstance(reshard := getattr(module, "reshard", None), MethodType):
                reshard()


def local(x: Tensor) -> Tensor:
    """This rank's part of a tensor that FSDP2 has sharded, sharing its memory; other tensors as they are."""
    return x.to_local() if hasattr(x, "to_local") else x


def sharded(parameters: Sequence[Tensor]) -> bool:
    """Does each rank hold a part?"""
    return any(hasattr(p, "device_mesh") for p in parameters)


def _norm(tensors: Sequence[Tensor], spread: bool) -> Tensor:
    squares = torch.stack([t.detach().square().sum(dtype=wide(t.device)) for t in tensors]).sum()
    return (ranks.total(squares) if spread else squares).sqrt()
