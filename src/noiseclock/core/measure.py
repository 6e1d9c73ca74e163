"""Measurements over time: the loss, the variance of the gradient, and how training at some times changes the loss at others.

With ℓ_t(x0, eps) the plain loss of one sample at time t and g_t = ∇_θ ℓ_t its gradient:

    loss_over_time      E[ℓ_t] and E[w·ℓ_t]
    gradient_variance   Tr Var[g_t] over (x0, eps), and E‖g_t‖² = Tr Var[g_t] + ‖E g_t‖²
    interdependence     E[ℓ_t] before and after updates that saw times in one interval only
    utility_over_time   how much an update by one sample at time t lowers an objective, to first order

Each takes any model, data and conditioning that a Clock trains, returns numpy arrays, and leaves the model unchanged: parameters, buffers,
gradients, training flags and random states.
"""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from noiseclock.core.batch import Predict, at_least_float32, call, check_batch
from noiseclock.core.checks import brief
from noiseclock.core.clock import Clock
from noiseclock.core.conditioning import take_rows
from noiseclock.core.gradient_variance import gradient_moments, split
from noiseclock.core.health import warn
from noiseclock.core.lookahead import target_of, utility
from noiseclock.core.optimizers import attachable, groups, metric, trained
from noiseclock.core.probes import Probe, autocast_dtype, uncached
from noiseclock.core.reach import modules_of, rows_held, told
from noiseclock.core.schedules import Array, as_time
from noiseclock.core.streams import finalize
from noiseclock.core.table import wide
from noiseclock.core.weightings import Constant, Weighting

Running = tuple[list[nn.Module], list[nn.Module]]


class LossOverTime(NamedTuple):
    """Mean losses at some times, as numpy arrays (n,).

    time: the times. loss: unweighted. weighted: `loss` multiplied by the clock's weight. error: the standard error of `loss` over the samples.
    """

    time: Array
    loss: Array
    weighted: Array
    error: Array


class GradientsOverTime(NamedTuple):
    """Gradients by time bin, as numpy arrays (bins,).

    time: the middle of each bin. variance: Tr Var[g_t] over (x0, eps). squared_norm: E‖g_t‖². error: the standard error of `variance`, from
    the spread between a bin's pairs, so it includes the change of the variance within the bin; NaN if a bin has only one pair.
    """

    time: Array
    variance: Array
    squared_norm: Array
    error: Array


class Interdependence(NamedTuple):
    """Unweighted losses at some times before and after training in an interval, as numpy arrays (n,); change = after - before."""

    time: Array
    before: Array
    after: Array
    change: Array


class UtilityOverTime(NamedTuple):
    """The utility of a sample for a target objective, by time bin, as numpy arrays (bins,).

    time: the middle of each bin. utility: the decrease of the target by an update with one sample from the bin, to first order; negative where the
    update hurts. error: its standard error over probes.
    """

    time: Array
    utility: Array
    error: Array


def loss_over_time(
    clock: Clock,
    predict: Predict,
    x0: Tensor,
    *,
    cond: Any = None,
    times: int | Sequence[float] | Array = 50,
    repeats: int = 1,
    batch: int = 128,
    seed: int = 0,
    model: nn.Module | None = None,
) -> LossOverTime:
    """The loss at `times` on x0 (N, ...), in evaluation mode, with the same noises at every time.

    times: a list of times in [0, 1], or the number of evenly spaced times. repeats: noises per sample. batch: rows per forward pass. model: the
    module to measure, if it cannot be found from `predict`.
    """
    check_batch(x0, None)
    time = _grid(times)
    found = _losses(clock, predict, x0, cond, time, _modules(predict, model, len(x0)), repeats=repeats, batch=batch, seed=seed)
    # repeats of one sample are not independent: their mean counts as one observation
    by_sample = found.mean(0)
    error = by_sample.std(1, ddof=1) / math.sqrt(len(x0)) if len(x0) > 1 else np.full(len(time), np.nan)
    loss = by_sample.mean(1)
    return LossOverTime(time, loss, loss * _weights(clock, x0, time), error)


def gradient_variance(
    clock: Clock,
    predict: Predict,
    x0: Tensor,
    *,
    cond: Any = None,
    bins: int = 32,
    samples: int = 64,
    pairs: int = 4,
    weighted: bool = False,
    seed: int = 0,
    model: nn.Module | None = None,
) -> GradientsOverTime:
    """The trace of the variance of the gradient in equal bins of time, from x0 (N, ...), in evaluation mode; see `gradient_moments`.

    samples: number of (x0, eps) in each bin; 64 of them in 4 `pairs` are 8 backward passes of 8 rows. The times of the pairs are evenly spaced in
    the bin. pairs = samples/2 makes one backward pass per sample: slow, and the most accurate. weighted: measure w·ℓ_t instead of ℓ_t.
    model: the module to measure, if it cannot be found from `predict`.
    """
    check_batch(x0, None)
    middles = _grid(bins)
    half, pairs = split(samples, pairs, len(x0))
    time = (np.arange(bins * pairs) + 0.5) / (bins * pairs)
    noise = _noise(x0, _generator(x0.device, seed, "noise"))
    modules, others = _modules(predict, model, len(x0))
    probe = Probe(
        predict, clock.schedule, clock.objective, x0, cond, noise=noise, modules=modules, others=others, autocast=autocast_dtype(x0.device), seed=seed
    )
    found = gradient_moments(probe, torch.as_tensor(time, device="cpu"), half).cpu().double().numpy()
    if weighted:
        found = found * _weights(clock, x0, time) ** 2
    variance, squared_norm = found.reshape(2, bins, pairs)
    error = variance.std(1, ddof=1) / math.sqrt(pairs) if pairs > 1 else np.full(bins, np.nan)
    return GradientsOverTime(middles, variance.mean(1), squared_norm.mean(1), error)


def interdependence(
    clock: Clock,
    predict: Predict,
    optimizer: Any,
    x0: Tensor,
    *,
    cond: Any = None,
    interval: tuple[float, float] = (0.0, 0.2),
    updates: int = 100,
    times: int | Sequence[float] | Array = 50,
    repeats: int = 1,
    batch: int = 128,
    seed: int = 0,
    model: nn.Module | None = None,
) -> Interdependence:
    """How the loss changes at all times when only times in `interval` are trained (the adaptive paper's Fig. 4).

    The model is trained for `updates` updates of `optimizer` (or several in a list), each on `batch` samples of x0 (N, ...) at times spread evenly
    over the interval, with the clock's weighted loss and in its current mode (train or eval). Then everything is restored bit for bit;
    the optimiser's hooks do not run, and the clock counts no update. times, repeats, model: as for `loss_over_time`, with the same noise before and
    after.
    """
    check_batch(x0, None)
    lo, hi = interval
    if not 0 <= lo < hi <= 1:
        raise ValueError(f"interval must be (lo, hi) with 0 <= lo < hi <= 1, got {interval}")
    optimizers = _several(optimizer)
    if not optimizers:
        raise ValueError("interdependence trains the model for a moment, so it needs its optimiser, or a list of several")
    time, (modules, others) = _grid(times), _modules(predict, model, len(x0))
    # the updates also reach what runs beside the model, and the parameters of a learned weighting
    touched = [*modules, *others, *(part for part in vars(clock.weighting).values() if isinstance(part, nn.Module))]

    def losses() -> Array:
        found = _losses(clock, predict, x0, cond, time, (modules, others), repeats=repeats, batch=batch, seed=seed)
        return np.asarray(found.mean((0, 2)))

    before = losses()
    with _restored(touched, optimizers, x0.device), uncached(x0.device, autocast_dtype(x0.device)):
        generator = _generator(x0.device, seed, "training")
        torch.default_generator.manual_seed(seed)
        if x0.is_cuda:
            torch.cuda.default_generators[x0.get_device()].manual_seed(seed)
        for _ in range(updates):
            rows = torch.randint(len(x0), (batch,), generator=generator, device=x0.device)
            jitter = torch.rand(batch, generator=generator, device=x0.device, dtype=wide(x0.device))
            place = (torch.arange(batch, device=x0.device) + jitter) / batch
            inside = (lo + (hi - lo) * place).clamp(max=math.nextafter(hi, 0))  # rounding must not carry a time out of the interval
            some = x0[rows]
            b = clock.at(some, inside, noise=_noise(some, generator), cond=take_rows(cond, rows, len(x0)))
            with torch.enable_grad():
                clock.loss(b, call(predict, b.x_t, b.t, b.cond)).mean().backward()  # type: ignore[no-untyped-call]
            for each in optimizers:
                each.step()
                each.zero_grad()
        after = losses()
    return Interdependence(time, before, after, after - before)


def utility_over_time(
    clock: Clock,
    predict: Predict,
    optimizer: Any,
    x0: Tensor,
    *,
    cond: Any = None,
    target: str | Weighting = "simple",
    bins: int = 32,
    probes: int = 32,
    batch: int = 128,
    seed: int = 0,
    model: nn.Module | None = None,
) -> UtilityOverTime:
    """Which times help a target objective and which hurt it: c(t) of `nc.Lookahead`, on x0 (N, ...), in evaluation mode.

    target: "simple", "min-snr", "vlb", or the weighting of the target objective. Each of the `probes` takes the target's gradient on a new random
    half of x0 and prices the other half by the clock's weighted loss, in the metric of `optimizer` (or several in a
    list) and along its parameters. batch: rows per forward pass. model: the module to measure, if it cannot be found from `predict`.

    With several ranks all of them must call it, each with an x0 of its own: the target's gradient is the mean over ranks.
    """
    check_batch(x0, None)
    if min(bins, probes) < 1:
        raise ValueError(f"bins and probes must be at least 1, got {bins} and {probes}")
    (modules, others), optimizers = _modules(predict, model, len(x0)), _several(optimizer)
    power, unknown = metric(optimizers, trained(modules, optimizers))
    if unknown:
        warn(f"{unknown}, so gradients are measured without preconditioning")
    wanted = target_of(target)
    generator = _generator(x0.device, seed, "noise")
    found = np.full((probes, bins), np.nan)
    for number in range(probes):
        probe = Probe(
            predict, clock.schedule, clock.objective, x0, cond, noise=_noise(x0, generator), modules=modules, others=others,
            rows=min(batch, len(x0) // 2 or 1), optimizers=optimizers, seed=seed * probes + number,
        )  # fmt: skip
        time, slope = (part.cpu().double().numpy() for part in utility(probe, Constant(), wanted, power, number=number))
        price = slope * _weights(clock, x0, time)
        place = np.minimum((time * bins).astype(int), bins - 1)
        count, total = (np.bincount(place, weights, bins) for weights in (None, price))
        found[number] = np.divide(total, count, out=found[number], where=count > 0)
    known = np.isfinite(found).sum(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns about bins that no probe has reached
        return UtilityOverTime(_grid(bins), np.nanmean(found, 0), np.nanstd(found, 0, ddof=1) / np.sqrt(known))


def _several(optimizer: Any) -> tuple[Any, ...]:
    """One optimiser or several, without their wrappers."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else () if optimizer is None else (optimizer,)
    return tuple(attachable(each) for each in given)


@contextmanager
def _restored(modules: list[nn.Module], optimizers: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Restore modules, optimisers and random states on exit: every tensor is the same object with the same bits. No hook of an optimiser runs inside.

    `load_state_dict` would not do: it casts the optimiser's state to the parameters' dtype and makes new tensors.
    """
    tensors = {id(x): x for module in modules for x in (*module.parameters(), *module.buffers())}
    tensors |= {id(p): p for group in groups(optimizers) for p in group["params"]}
    # what is frozen does not change, and may be large
    kept = [(x, x.detach().clone()) for x in tensors.values() if x.requires_grad or not isinstance(x, nn.Parameter)]
    gradients = [(x, x.grad) for x in tensors.values()]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - the state that a user's model may draw from
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), ExitStack() as stack:
        for optimizer in optimizers:
            stack.enter_context(_restored_one(optimizer))
        try:
            for x, _ in gradients:
                x.grad = None
            yield
        finally:
            with torch.no_grad():
                for x, bits in kept:
                    x.copy_(bits)
            for x, gradient in gradients:
                x.grad = gradient
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def _restored_one(optimizer: Any) -> Iterator[None]:
    params = [group["params"] for group in optimizer.param_groups]
    states = {p: _kept(state) for p, state in optimizer.state.items()}
    settings = [_kept({name: value for name, value in group.items() if name != "params"}) for group in optimizer.param_groups]
    hooks = [(h, h.copy()) for h in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)]
    try:
        for hook, _ in hooks:
            hook.clear()
        yield
    finally:
        with torch.no_grad():
            optimizer.state.clear()
            optimizer.state.update({p: _given_back(state) for p, state in states.items()})
            for group, mine, setting in zip(optimizer.param_groups, params, settings, strict=True):
                group.clear()
                group.update({"params": mine, **_given_back(setting)})
        for hook, saved in hooks:
            hook.update(saved)


def _kept(values: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value itself, and a copy of its content."""
    return {name: (value, value.detach().clone() if isinstance(value, Tensor) else deepcopy(value)) for name, value in values.items()}


def _given_back(kept: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {name: value.copy_(held) if isinstance(value, Tensor) else held for name, (value, held) in kept.items()}


def _losses(clock: Clock, predict: Predict, x0: Tensor, cond: Any, time: Array, running: Running, *, repeats: int, batch: int, seed: int) -> Array:
    """(repeats, n, N) unweighted losses of x0 (N, ...) at times (n,)."""
    if min(repeats, batch) < 1:
        raise ValueError(f"repeats and batch must be at least 1, got {repeats} and {batch}")
    generator = _generator(x0.device, seed, "noise")
    n, batch = len(x0), min(batch, len(x0))
    moments = torch.as_tensor(time, device=x0.device, dtype=wide(x0.device)).repeat_interleave(batch)
    found = np.empty((repeats, len(time), n))
    for repeat in range(repeats):
        noise = _noise(x0, generator)
        for start in range(0, n, batch):
            # the last batch is filled up with the first rows, so that every forward pass has the same shape
            rows = torch.arange(start, start + batch, device=x0.device) % n
            probe = Probe(
                predict,
                clock.schedule,
                clock.objective,
                x0[rows],
                take_rows(cond, rows, n),
                noise=noise[rows],
                modules=running[0],
                others=running[1],
                autocast=autocast_dtype(x0.device),
            )
            losses = probe.losses(moments, torch.arange(batch, device=x0.device).repeat(len(time)))
            found[repeat, :, start : start + batch] = losses.reshape(len(time), batch)[:, : n - start].cpu().double().numpy()
    return found


def _generator(device: torch.device, seed: int, purpose: str) -> torch.Generator:
    # hashed: with the plain seed the noise would equal data that were drawn with the same seed
    return torch.Generator(device).manual_seed(finalize(finalize(seed) + 1 + ("noise", "training").index(purpose)) // 2)


def _noise(x0: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x0.shape, generator=generator, device=x0.device, dtype=at_least_float32(x0))


def _grid(times: int | Sequence[float] | Array) -> Array:
    """(n,) the given times, or the midpoints of `times` equal intervals."""
    if isinstance(times, Integral):
        grid = (np.arange(int(times)) + 0.5) / max(int(times), 1)
    else:
        grid = as_time(torch.as_tensor(np.asarray(times, dtype=np.float64), device="cpu")).reshape(-1).numpy().copy()
    if len(grid) == 0:
        raise ValueError(f"at least one time or bin is needed, got {times}")
    return grid


def _weights(clock: Clock, x0: Tensor, time: Array) -> Array:
    """(n,) the weight of the loss at times (n,)."""
    # `at` knows the mean of a normalised weighting; `like` only sets the device
    like = torch.zeros(len(time), 1, device=x0.device)
    return np.asarray(clock.at(like, torch.as_tensor(time, device="cpu"), noise=like).weight.cpu().double())


def _modules(predict: Predict, model: nn.Module | None, batch: int) -> Running:
    """The modules to measure, and the others that `predict` runs."""
    found = modules_of(predict)
    modules = found if model is None else [model]
    if not modules:
        raise ValueError(f"cannot find the model in predict={brief(repr(predict))}; pass it as model=...")
    if held := rows_held(predict, batch):
        warn(told(list(held)))
    return modules, [module for module in found if not any(module is other for other in modules)]
