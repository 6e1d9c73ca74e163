"""Derivatives of many losses along one direction of the parameters, from forward passes alone.

A central difference along d costs two forward passes for a whole batch; per-sample gradients would cost one backward pass per sample.
Forward-mode differentiation would be exact, but fails on fused attention and group norm. The truncation error of the difference is of order h², its
rounding error of order 1/h: with ‖h·d‖ = 1/1000 of the parameters' norm the error is about 2e-4 in float32. In bfloat16 there is no good h.

The metric: an optimiser's update is -P·gradient, P diagonal. With ξ ~ N(0, I) the squared derivative along P^½ξ has the mean ‖gradient‖²_P.
A model may have several optimisers, such as Muon for its matrices and AdamW for the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.checks import brief
from noiseclock.core.health import warn
from noiseclock.core.table import wide

LOOKS = 10  # probes at which unattached optimisers are looked for
STEP = 1e-3  # ‖h·d‖ as a fraction of the norm of the parameters


def trained(modules: list[nn.Module], optimizers: Sequence[Any] = ()) -> list[nn.Parameter]:
    """The trained parameters, each once: they require a gradient and, if optimisers are known, belong to one of them.

    Frozen parameters, as in fine-tuning with adapters, are neither perturbed nor copied, and their gradients do not count.
    """
    given = _given(optimizers)
    found = (p for module in modules for p in module.parameters() if p.requires_grad and (not optimizers or id(p) in given))
    parameters = list({id(p): p for p in found}.values())
    if not parameters:
        raise ValueError("the model has no trained parameter: none requires a gradient and belongs to the optimiser")
    return parameters


def check_trained(modules: list[nn.Module], optimizers: Sequence[Any], predict: Any, *, named: bool) -> None:
    """Raise an error if no module was found, or if the optimisers have no parameter of any. named: did the user name the model?"""
    given = _given(optimizers)
    if modules and (not optimizers or any(id(p) in given for module in modules for p in module.parameters())):
        return
    if named:
        raise ValueError(
            "the attached optimiser has none of the model's parameters; if it trains copies of them, do not attach it, but call clock.updated() "
            "after each update"
        )
    raise ValueError(f"cannot find the trained model in predict={brief(repr(predict))}; pass it: clock.attach(optimizer, model=model)")


class Unattached:
    """Parameters that none of the attached optimisers has, and that change: probably another optimiser trains them."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}
        self._looks = LOOKS

    def look(self, modules: list[nn.Module], optimizers: Sequence[Any]) -> None:
        """Warn once of such parameters; only the first looks count, which is time enough for an optimiser that steps rarely or is skipped."""
        if not optimizers or not self._looks:
            return
        self._looks -= 1
        given = _given(optimizers)
        named = ((name, p) for module in modules for name, p in module.named_parameters())
        rest = {name: p for name, p in named if p.requires_grad and id(p) not in given and not p.is_inference()}
        moved = [name for name, p in rest.items() if self._first.setdefault(name, p._version) != p._version]  # torch counts changes in place
        if moved:
            self._looks = 0
            warn(
                f"{len(moved)} parameters of the model, such as {moved[0]}, are trained by an optimiser that is not attached, so the sampler leaves "
                "them out; attach all of the model's optimisers, in the order of their steps: clock.attach(first, second)"
            )


def _groups(optimizers: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The parameter groups of all optimisers."""
    for optimizer in optimizers:
        yield from optimizer.param_groups


def _given(optimizers: Sequence[Any]) -> set[int]:
    """The ids of the parameters of all optimisers."""
    return {id(p) for group in _groups(optimizers) for p in group["params"]}


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
    return bool(optimizers) and all(not isinstance(lr := group.get("lr"), Tensor) and lr == 0 for group in _groups(optimizers))


def no_gradients(optimizers: Sequence[Any], device: torch.device) -> bool:
    """Have the optimisers nothing to make a step of: no gradients, only zeros, or some that are not finite?

    Waits for the device. All ranks must ask, and get the same answer: a rank that probed the model alone would wait for the others forever.
    """
    grads = [local(p.grad.detach()) for group in _groups(optimizers) for p in group["params"] if p.grad is not None]
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
        isinstance(state.get("step"), Tensor) and isinstance(v := state.get("exp_avg_sq"), Tensor) and v.is_floating_point() and v.shape == p.shape
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
        forget_gathered(modules, spread)
        above = losses()
        torch._foreach_copy_(mine, kept)
        torch._foreach_sub_(mine, step)
        forget_gathered(modules, spread)
        return (above - losses()) / (2 * h).to(above.dtype)
    finally:
        torch._foreach_copy_(mine, kept)
        forget_gathered(modules, spread)


def forget_gathered(modules: list[nn.Module], spread: bool = True) -> None:
    """Make FSDP2 gather the parameters again: after a forward pass alone it may keep the full ones, which are not those that the optimiser has."""
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
