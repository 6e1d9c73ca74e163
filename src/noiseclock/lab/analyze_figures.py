"""Figures of an analysis: PNG files from the data that `analyze` finds, in the style of the report's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from noiseclock.lab.report_figures import STYLE

if TYPE_CHECKING:
    from noiseclock.lab.analyze import Coupling, Density, Process, Profile, Utility

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#8a8a8a"
AREAS = {"acceleration": "#dcebf5", "deceleration": "#faf4e4", "convergence": "#eeeeee"}
TIME = "time, from clean (0) to noise (1)"
WIDTH, HEIGHT = 3.5, 2.6  # inches, of one panel


def draw(name: str, data: dict[str, list[Any]], path: Path) -> Path:
    """Draw the figure of that name into a file; returns its path."""
    with matplotlib.rc_context(STYLE):
        DRAW[name](**data).savefig(path)
    return path


def gradients(profiles: Sequence[Profile]) -> Figure:
    """The variance of the gradient above and the loss below, a column for each schedule, a line for each update."""
    columns = _by(profiles, "schedule")
    figure, axes = _panels(2, len(columns), sharey="row")
    for column, (schedule, rows) in enumerate(columns):
        _profiles(axes[:, column], rows)
        axes[0, column].set_title(f"{schedule} schedule")
        axes[1, column].set_xlabel(TIME)
    axes[0, 0].set_ylabel("Tr Var of the gradient")
    axes[1, 0].set_ylabel("loss")
    _legend(figure, axes[0, 0], "after update")
    return figure


def vlb(profiles: Sequence[Profile], densities: Sequence[Density]) -> Figure:
    """Variance and loss with the VLB's weight, of models trained with it; beside them the density that the adaptive sampler learned."""
    rows = _by(profiles, "schedule")
    figure, axes = _panels(len(rows), 3)
    for row, (schedule, of_schedule) in enumerate(rows):
        _profiles(axes[row, :2], of_schedule)
        _densities(axes[row, 2], [each for each in densities if each.schedule == schedule])
        names = "Tr Var of the gradient", "loss, nats per dimension", "density, uniform = 1"
        titles = "gradient under the VLB", "loss under the VLB", "adaptive sampler"
        for place, name, title in zip(axes[row], names, titles, strict=True):
            place.set_ylabel(name)
            place.set_title(f"{schedule}: {title}")
    for place in axes[-1]:
        place.set_xlabel(TIME)
    _legend(figure, axes[0, 0], "after update")
    return figure


def interdependence(couplings: Sequence[Coupling]) -> Figure:
    """The absolute and relative change of the loss after updates in one interval of time and, as a control, after as many at all times."""
    figure, axes = _panels(len(couplings), 2, width=4.6, height=3.0)
    for (left, right), found in zip(axes, couplings, strict=True):
        lo, hi = found.interval
        for place, scale in ((left, np.ones_like(found.before)), (right, found.before / 100)):
            place.axvspan(lo, hi, color=AREAS["acceleration"], linewidth=0, label="the times that are trained")
            place.axhline(0, color=GREY, linewidth=0.8)
            place.plot(found.time, (found.inside - found.before) / scale, color=BLUE, label=f"{found.updates} updates at these times alone")
            place.plot(
                found.time, (found.everywhere - found.before) / scale, color=ORANGE, linestyle="--", label=f"{found.updates} updates at all times"
            )
            place.set_xlabel(TIME)
            _time(place)
        # relative changes may span decades and have both signs
        right.set_yscale("symlog", linthresh=10)
        right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+,.0f}" if value else "0"))
        left.set_ylabel("change of the loss")
        right.set_ylabel("change of the loss, in per cent")
        left.set_title(f"{found.schedule} schedule, after update {found.step:,}")
        right.set_title("relative to the loss before")
    _legend(figure, axes[0, 0])
    return figure


def utility(utilities: Sequence[Utility]) -> Figure:
    """By how many per cent an update at one time alone lowers each target: a panel for each target, a line for each stage of training."""
    targets = utilities[0].targets
    figure, axes = _panels(1, len(targets), width=3.8, height=3.0)
    for place, target in zip(axes[0], targets, strict=True):
        place.axhline(0, color=GREY, linewidth=0.8)
        for found, colour in zip(utilities, _colours(len(utilities)), strict=True):
            row = found.targets.index(target)
            values, error = 100 * found.utility[row], 100 * found.error[row]
            place.plot(found.time, values, color=colour, label=f"{found.step:,}")
            place.fill_between(found.time, values - error, values + error, color=colour, alpha=0.15, linewidth=0)
        place.set_title(f"objective: {target}")
        place.set_xlabel(TIME)
        _time(place)
    axes[0, 0].set_ylabel("an update at this time alone lowers the\nobjective by, to first order, in per cent")
    _legend(figure, axes[0, 0], f"{utilities[0].schedule} schedule, after update")
    return figure


def densities(densities: Sequence[Density]) -> Figure:
    """A panel for each method: its density p·w; a line for each stage of training if the sampler learns."""
    methods = _by(densities, "method")
    columns = min(4, len(methods))
    figure, axes = _panels(-(-len(methods) // columns), columns, width=3.0, height=2.3)
    for place, (method, rows) in zip(axes.flat, methods, strict=False):
        _densities(place, rows)
        place.set_title("\n".join(wrap(method, 30)))
    for place in axes.flat[len(methods) :]:
        place.set_visible(False)
    for place in axes[:, 0]:
        place.set_ylabel("density, uniform = 1")
    for place in axes.flat[max(0, len(methods) - columns) : len(methods)]:
        place.set_xlabel(TIME)
    learning = [place for place, (_, rows) in zip(axes.flat, methods, strict=False) if len(rows) > 1]
    if learning:
        _legend(figure, learning[0], "samplers that learn, after update")
    return figure


def areas(processes: Sequence[Process]) -> Figure:
    """The variance of an increment above and the slope of 1 - ᾱ below, on SpeeD's three areas, a column for each schedule."""
    figure, axes = _panels(2, len(processes), sharey="row")
    for column, found in enumerate(processes):
        step = np.arange(len(found.variance))
        borders = 0, found.peak, found.converged, len(step)
        for place, values in zip(axes[:, column], (found.variance, found.change * 1000), strict=True):
            for (name, colour), lo, hi in zip(AREAS.items(), borders, borders[1:], strict=False):
                place.axvspan(lo, hi, color=colour, linewidth=0, label=name)
            for border in borders[1:-1]:
                place.axvline(border, color=GREY, linewidth=0.8, linestyle=":")
            place.plot(step, values, color=BLUE)
            place.set_xlim(0, len(step))
            place.set_ylim(bottom=0)
            place.grid(False)
        axes[0, column].set_title(f"{found.schedule}: areas begin at {found.peak} and {found.converged}")
        axes[1, column].set_xlabel("step")
    axes[0, 0].set_ylabel("variance of the increment, Ψ")
    axes[1, 0].set_ylabel("slope of 1 - ᾱ, per 1000 steps")
    _legend(figure, axes[0, 0])
    return figure


DRAW: dict[str, Callable[..., Figure]] = {
    "gradients": gradients,
    "interdependence": interdependence,
    "utility": utility,
    "densities": densities,
    "vlb": vlb,
    "areas": areas,
}


# --- parts of them ------------------------------------------------------------------------------------------------------------------------


def _profiles(places: Sequence[Axes], profiles: Sequence[Profile]) -> None:
    """Variance and loss, each on axes of its own, later updates darker."""
    for found, colour in zip(profiles, _colours(len(profiles)), strict=True):
        places[0].plot(found.time, found.variance, color=colour, label=f"{found.step:,}")
        low = np.maximum(found.variance - found.error, found.variance / 10)  # a logarithmic axis cannot show a band down to zero
        places[0].fill_between(found.time, low, found.variance + found.error, color=colour, alpha=0.15, linewidth=0)
        places[1].plot(found.loss_time, found.loss, color=colour)
    for place in places:
        _logarithmic(place)
        _time(place)


def _time(place: Axes) -> None:
    ticks = np.linspace(0, 1, 6)
    place.set_xlim(0, 1)
    place.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def _logarithmic(place: Axes) -> None:
    """A logarithmic axis whose labels are plain numbers, at 1, 2 and 5 where it has few decades."""
    place.set_yscale("log")
    low, high = place.dataLim.intervaly
    place.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 30 * low else (1,)))
    place.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    place.yaxis.set_minor_formatter(NullFormatter())


def _densities(place: Axes, rows: Sequence[Density]) -> None:
    place.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    colours = _colours(len(rows))
    for found, colour in zip(rows, colours, strict=True):
        place.plot(found.time, found.density, color=colour, label=f"{found.step:,}")
    if len(rows) == 1:
        place.fill_between(rows[0].time, rows[0].density, color=colours[0], alpha=0.12, linewidth=0)
    top = max(float(found.density.max()) for found in rows)
    _time(place)
    place.set_ylim(0, max(2.0, 1.08 * min(top, 8)))  # a spike at one end must not flatten the rest
    told = [f"up to {top:.3g}"] * (top > 8) + ["importance-corrected"] * rows[0].corrected
    place.annotate("\n".join(told), (0.97, 0.93), xycoords="axes fraction", ha="right", va="top", fontsize=8, color="#555555")


def _colours(n: int) -> list[Any]:
    """n colours from early to late, light to dark; one alone is blue."""
    return [BLUE] if n == 1 else list(matplotlib.colormaps["viridis_r"](np.linspace(0.12, 0.95, n)))


def _by(items: Iterable[Any], name: str) -> list[tuple[str, list[Any]]]:
    """Neighbouring items grouped by an attribute."""
    return [(key, list(group)) for key, group in groupby(items, key=lambda item: getattr(item, name))]


def _panels(rows: int, columns: int, *, width: float = WIDTH, height: float = HEIGHT, **share: Any) -> tuple[Figure, Any]:
    apart = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06)  # inches, so that tick labels of neighbouring axes do not touch
    figure = Figure(figsize=(width * columns, height * rows), layout=apart)
    return figure, figure.subplots(rows, columns, squeeze=False, **share)


def _legend(figure: Figure, axes: Axes, title: str = "") -> None:
    """One legend for the whole figure, above it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=len(labels), title=title or None, alignment="left", title_fontsize=8)
