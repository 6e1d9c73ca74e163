"""The user's optimisers: which parameters they train, and the metric of their updates.

An update is -P·gradient, P diagonal. A model may have several optimisers, such as Muon for its matrices and AdamW for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.ranks import local, sharded


def trained(modules: list[nn.Module], optimizers: Sequence[Any] = ()) -> list[nn.Parameter]:
    """The trained parameters, each once: they require a gradient and, if optimisers are known, belong to one of them.

    Frozen parameters, as in fine-tuning with adapters, are neither perturbed nor copied, and their gradients do not count.
    """
    mine = given(optimizers)
    found = (p for module in modules for p in module.parameters() if p.requires_grad and (not optimizers or id(p) in mine))
    parameters = list({id(p): p for p in found}.values())
    if not parameters:
        raise ValueError("the model has no trained parameter: none requires a gradient and belongs to the optimiser")
    return parameters


def groups(optimizers: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimisers."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


def given(optimizers: Sequence[Any]) -> set[int]:
    """The ids of the parameters of all optimisers."""
    return {id(p) for group in groups(optimizers) for p in group["params"]}


def unwrapped(optimizer: Any) -> Any:
    """The torch optimiser inside a wrapper of accelerate or others; anything else is returned unchanged."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def attachable(optimizer: Any) -> Any:
    """The torch optimiser inside; an error if there is none."""
    inner = unwrapped(optimizer)
    if hasattr(inner, "_optimizer_step_post_hooks"):
        return inner
    advice = "without one, call clock.updated() after each update"
    if isinstance(inner, (list, tuple)):
        advice = "name several one after the other: clock.attach(first, second)"
    elif isinstance(inner, nn.Module):
        advice = "the model is named by model="
    raise TypeError(f"attach needs a torch optimiser, got {type(inner).__name__}; {advice}")


def stands_still(optimizers: Sequence[Any]) -> bool:
    """Is every learning rate 0, as at the start of a warm-up, so that there is no metric?"""
    rates = [group.get("lr") for group in groups(optimizers)]
    return bool(rates) and all((not isinstance(lr, Tensor) or lr.device.type == "cpu") and lr == 0 for lr in rates)  # a device is not waited for


def no_gradients(optimizers: Sequence[Any], device: torch.device) -> bool:
    """Have the optimisers nothing to make a step of: no gradients, only zeros, or some that are not finite?

    Waits for the device. All ranks must ask, and get the same answer: a rank that probed the model alone would wait for the others forever.
    """
    grads = [local(p.grad.detach()) for group in groups(optimizers) for p in group["params"] if p.grad is not None]
    sizes = [grad.abs().sum(dtype=torch.float32).to(device) for grad in grads]  # float16 would overflow
    return not 0 < float(ranks.total(sum(sizes, torch.zeros((), dtype=torch.float32, device=device)))) < math.inf


def metric(optimizers: Sequence[Any], parameters: Sequence[nn.Parameter]) -> tuple[list[Tensor | float], str]:
    """P for each parameter, and a reason if P is the identity because the metric of an optimiser is unknown, else "".

    Adam and AdamW: lr/(√v̂+ε) as of their last update, 0 where no gradient was ever seen. SGD: lr/(1-momentum). Muon: a number for
    each matrix, see `_muon`.
    """
    unit: list[Tensor | float] = [1.0] * len(parameters)
    if not optimizers:
        return unit, "no optimiser is known (attach one to the clock)"
    if unknown := [type(optimizer).__name__ for optimizer in optimizers if not _is_known(optimizer)]:
        return unit, f"the metric of {' and '.join(unknown)} is not known"  # and its scale beside the others neither
    scales: list[Tensor | float] = [0.0] * len(parameters)  # parameters without optimiser state have not moved
    place = {id(p): i for i, p in enumerate(parameters)}
    for optimizer in optimizers:
        needed, of = next(METRICS[kind] for kind in METRICS if isinstance(optimizer, kind))
        for group in optimizer.param_groups:
            moved = [p for p in group["params"] if id(p) in place and (not needed or needed in optimizer.state.get(p, {}))]
            for p, scale in zip(moved, of(group, [optimizer.state.get(p, {}) for p in moved]), strict=True):
                scales[place[id(p)]] = scale
    return (scales if any(isinstance(scale, Tensor) or scale for scale in scales) else unit), ""


def _is_known(optimizer: Any) -> bool:
    """Is it one of torch's, or a subclass with the same state?"""
    if not isinstance(optimizer, tuple(METRICS)):
        return False
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)) or not optimizer.state:
        return True
    alike = (
        isinstance(state.get("step"), Tensor)
        and isinstance(v := state.get("exp_avg_sq"), Tensor)
        and (v.is_floating_point() or v.is_complex())
        and v.shape == p.shape
        for p, state in optimizer.state.items()
        if state  # a look at the state of a parameter leaves an empty one
    )
    return all(alike)


def _sgd(group: Any, states: list[Any]) -> list[float]:
    """What one gradient does over all the steps in which momentum keeps it; Adam's and Muon's momenta are means, which sum to 1."""
    momentum = group["momentum"]
    kept = (1 - group["dampening"]) / (1 - momentum) if 0 < momentum < 1 else 1.0
    return [float(group["lr"]) * kept] * len(states)


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
def _muon(group: Any, states: list[Any]) -> list[Tensor]:
    """lr·(1 - (m+1)/2n)/σ of each matrix of a group, m <= n its sides, σ the root mean square of its momentum's singular values.

    Muon replaces the singular values of the momentum UΣVᵀ by 1, and multiplies by a learning rate that depends on the shape. If all singular values
    are σ, a small change D of the momentum moves the step by its part D - UVᵀDᵀUVᵀ, halved, within the rows' space and by all of D outside, both
    divided by σ. On average over directions, its product with D is (1 - (m+1)/2n)·‖D‖²/σ.
    """
    if not states:
        return []
    buffers = [state["momentum_buffer"] for state in states]
    shapes = [tuple(buffer.shape) for buffer in buffers]
    length = torch.stack(torch._foreach_norm([local(buffer) for buffer in buffers]))
    if sharded(buffers):
        length = ranks.total(length.square()).sqrt()
    factors = [(1 - (min(shape) + 1) / (2 * max(shape))) * math.sqrt(min(shape)) * _of_shape(group["adjust_lr_fn"], *shape) for shape in shapes]
    return list(torch.where(length > 0, group["lr"] * length.new_tensor(factors) / length, 0.0).unbind())


def _of_shape(rule: str | None, rows: int, columns: int) -> float:
    """The factor by which Muon changes the learning rate of a matrix."""
    return 0.2 * math.sqrt(max(rows, columns)) if rule == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))


# the state that an optimiser has of a parameter once it has moved it, and P of such parameters
METRICS: dict[type, tuple[str, Callable[[Any, list[Any]], Sequence[Tensor | float]]]] = {
    torch.optim.SGD: ("", _sgd),
    torch.optim.Adam: ("exp_avg_sq", _adam),
    torch.optim.AdamW: ("exp_avg_sq", _adam),
    torch.optim.Muon: ("momentum_buffer", _muon),
}
