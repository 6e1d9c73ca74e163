"""Log a clock to TensorBoard, Weights & Biases or any tracker of accelerate and Lightning.

    track(writer, clock, step)

TensorBoard gets numbers, histograms over time and, where matplotlib is installed, a figure; W&B gets numbers, tables and line plots; other trackers
get the numbers. Names start with "noiseclock/":

    loss_q1 ... loss_q4     mean unweighted loss of about the last 1000 batches in each quarter of time, q1 the least noise
    ess                     effective sample size of the importance weights, as a share of the batch
    rho                     predicted variance of the gradient, relative to the variance under the base
    r_squared, f, entropy   how well Adaptive's selected times predict the other times, and how even its density is (0: uniform)
    probes, skipped, share  number of probes, number of values that were not finite, share of the other sampler in an Annealed

`track` reads the device, so call it only when you log, and with several processes only on the one that writes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from noiseclock.core.clock import Clock
from noiseclock.core.priced import Priced
from noiseclock.core.schedules import Array
from noiseclock.core.wrappers import Blend

PREFIX = "noiseclock/"


class Curves(NamedTuple):
    """The curves of a clock in equal cells of time, as numpy arrays (cells,).

    time: the middle of each cell. log_snr: at these times. density: p. weight: w. effective: the weight that is trained in effect, p·w, or base·w
    if corrected. drawn: number of draws so far. loss: unweighted, mean of about the last 1000 batches, NaN where none was drawn.
    """

    time: Array
    log_snr: Array
    density: Array
    weight: Array
    effective: Array
    drawn: Array
    loss: Array


class Prices(NamedTuple):
    """The prices that a `Priced` sampler has measured, (bins,): the middle of each bin, the mean price and its standard error."""

    time: Array
    price: Array
    error: Array


def curves(clock: Clock) -> Curves:
    """The clock's curves in the cells of its record; density, weight and effective are means over each cell."""
    found, seen = clock.plot_data(), clock.record.by_time()
    p, w, effective = (means(values, len(seen.time)) for values in (found.p, found.w, found.effective))
    return Curves(seen.time, clock.schedule.log_snr(torch.from_numpy(seen.time)).numpy(), p, w, effective, seen.drawn, seen.loss)


def means(values: Array, cells: int) -> Array:
    """(cells,) the means over equal cells of a function that is constant on n other equal cells, (n,).

    >>> means(np.array([1.0, 2.0, 6.0]), 2)
    array([1.33333333, 4.66666667])
    """
    below = np.concatenate([[0.0], np.cumsum(values) / len(values)])
    return np.asarray(np.diff(np.interp(np.linspace(0, 1, cells + 1), np.linspace(0, 1, len(below)), below)) * cells)


def prices(clock: Clock) -> Prices | None:
    """The prices of the clock's sampler, or None if it is not a `Priced` sampler."""
    sampler = clock.sampler
    while isinstance(sampler, Blend):
        sampler = sampler.sampler
    if not isinstance(sampler, Priced):
        return None
    price, error = (values.numpy() for values in sampler.curve)
    return Prices((np.arange(len(price)) + 0.5) / len(price), price, error)


def numbers(clock: Clock) -> dict[str, float]:
    """The sampler's `info` and the loss by quarter of time, by name; numbers that are not known yet are left out."""
    found = {name: float(value) for name, value in clock.sampler.info.items() if not isinstance(value, list)}
    seen = clock.record.by_time()
    for quarter in range(4):
        loss = seen.loss[np.floor(seen.time * 4) == quarter]
        if not np.isnan(loss).all():
            found[f"loss_q{quarter + 1}"] = float(np.nanmean(loss))
    return {PREFIX + name: value for name, value in found.items() if math.isfinite(value)}


def track(where: Any, clock: Clock, step: int) -> None:
    """Log the clock at this step.

    where: a SummaryWriter, a wandb run, or a tracker of accelerate (`accelerator.trackers`) or Lightning (`trainer.loggers`).
    """
    if not isinstance(clock, Clock):
        raise TypeError(f"track(where, clock, step) takes a Clock second, got {type(clock).__name__}")
    inside, log = _opened(where, step)
    if hasattr(inside, "add_histogram_raw"):
        _to_tensorboard(inside, clock, step)
    elif _is_wandb(inside):
        log({**numbers(clock), **_charts(clock)})
    else:
        log(numbers(clock))


def _opened(where: Any, step: int) -> tuple[Any, Callable[[dict[str, Any]], None]]:
    """The writer or run inside a tracker of accelerate or Lightning, or `where` itself; and its log function, which knows how it counts steps."""
    if hasattr(where, "log_metrics") and hasattr(where, "experiment"):  # Lightning
        return where.experiment, lambda values: where.log_metrics(values, step)
    if hasattr(where, "store_init_configuration") and hasattr(where, "log"):  # accelerate
        return getattr(where, "tracker", None), lambda values: where.log(values, step=step)
    if hasattr(where, "add_histogram_raw") or _is_wandb(where):
        return where, lambda values: where.log(values, step=step)
    raise TypeError(
        f"track writes to a SummaryWriter, a wandb run (what wandb.init gives), or a tracker of accelerate or Lightning, got {type(where).__name__}"
    )


def _is_wandb(thing: Any) -> bool:
    return type(thing).__module__.split(".")[0] == "wandb" and hasattr(thing, "log")


# --- TensorBoard --------------------------------------------------------------------------------------------------------------------------


def _to_tensorboard(writer: Any, clock: Clock, step: int) -> None:
    for name, value in numbers(clock).items():
        writer.add_scalar(name, value, step)
    seen, priced = curves(clock), prices(clock)
    bars = {"density": seen.density / len(seen.density), "drawn": seen.drawn, "loss_by_time": np.nan_to_num(seen.loss)}
    if priced is not None:
        bars["price_by_time"] = priced.price
    for name, heights in bars.items():
        # not add_histogram, which would choose its own cells
        n = len(heights)
        time = (np.arange(n) + 0.5) / n
        writer.add_histogram_raw(
            PREFIX + name, 0.0, 1.0, float(heights.sum()), float(heights @ time), float(heights @ time**2), (np.arange(1, n + 1) / n).tolist(),
            heights.tolist(), step,
        )  # fmt: skip
    figure = _figure(clock, seen, priced)
    if figure is not None:
        writer.add_figure(PREFIX + "by_time", figure, step)


def _figure(clock: Clock, seen: Curves, priced: Prices | None) -> Any:
    """The curves as a matplotlib figure, None if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(5.0 * (3 if priced else 2), 3.5), layout="constrained")
    density, loss, *others = figure.subplots(1, 3 if priced else 2)
    density.step(seen.time, seen.density, where="mid", label="density")
    if seen.drawn.sum() > 0:
        density.step(seen.time, seen.drawn / seen.drawn.mean(), where="mid", label="drawn so far", linewidth=0.8)
    density.step(seen.time, seen.effective / seen.effective.mean(), where="mid", label="trained in effect, mean 1", linestyle=":")
    selected = clock.sampler.info.get("selected", [])
    if len(selected) < len(seen.time):
        density.plot(selected, [0.0] * len(selected), "k^", label="selected times" if selected else None)
    density.set(ylim=(0, None), title="density")
    density.legend(fontsize="small")
    loss.plot(seen.time, seen.loss)
    loss.set(yscale="log" if np.nanmax(seen.loss, initial=0) > 0 else "linear", title="unweighted loss")
    if priced is not None:
        others[0].errorbar(priced.time, priced.price, priced.error)
        others[0].set(title="price of a sample")
    for axes in (density, loss, *others):
        axes.set(xlim=(0, 1), xlabel="time (0: data, 1: noise)")
    return figure


# --- Weights & Biases ---------------------------------------------------------------------------------------------------------------------


def _charts(clock: Clock) -> dict[str, Any]:
    """The curves as tables, and lines drawn from them."""
    wandb, seen, priced = importlib.import_module("wandb"), curves(clock), prices(clock)
    found = {PREFIX + "by_time": _table(wandb, seen._asdict())}
    lines = {name: (seen.time, getattr(seen, name)) for name in ("density", "effective", "loss")}
    if priced is not None:
        found[PREFIX + "prices"] = _table(wandb, priced._asdict())
        lines["price"] = (priced.time, priced.price)
    for name, (time, values) in lines.items():
        table = _table(wandb, {"time": time, name: values})
        found[f"{PREFIX}{name}_by_time"] = wandb.plot.line(table, "time", name, title=f"{name} by time")
    return found


def _table(wandb: Any, columns: dict[str, Array]) -> Any:
    rows = [[float(x) if math.isfinite(x) else None for x in row] for row in zip(*columns.values(), strict=True)]
    return wandb.Table(columns=list(columns), data=rows)
