"""Figures of a comparison for a paper: PNG files, 200 dots an inch, sans-serif, in colours that the colour-blind can tell apart."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from noiseclock.lab.report_charts import COLOURS, charts
from noiseclock.lab.results import Results

STYLE = {
    "text.parse_math": False,  # a name may have dollar signs
    "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 9, "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#8a8a8a", "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e8e8e8", "grid.linewidth": 0.6, "xtick.color": "#555555", "ytick.color": "#555555", "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.frameon": False, "legend.fontsize": 8, "legend.handlelength": 3.5, "lines.linewidth": 1.6, "lines.markersize": 5, "savefig.dpi": 200,
    "figure.constrained_layout.use": True,
}  # fmt: skip
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
MARKERS = {
    "circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "cross": "P", "x": "X", "triangle-down": "v", "star": "*",
}  # fmt: skip
WIDTH = 5.2  # inches, of one panel


def figures(results: Results, folder: str | Path) -> list[Path]:
    """Write all figures that the results allow, and return their paths."""
    data, folder = charts(results), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plans: dict[str, Callable[[], Figure]] = {}
    for key, metric in data["metrics"].items():
        plans[f"quality-{key}"] = partial(_quality, data, metric)
        if any(metric["lrs"]):
            plans[f"learning-rate-{key}"] = partial(_learning_rate, data, metric)
        for i, sweep in enumerate(data["sweeps"]):
            plans[f"sweep-{_slug(sweep['title'])}-{key}"] = partial(_sweep, data, metric, sweep, metric["sweeps"][i])
    if data["loss"]:
        plans["loss"] = partial(_loss, data)
    if data["utility"]:
        plans["utility"] = partial(_utility, data)
    if data["density"]:
        plans["density"] = partial(_density, data)
    if any(data["overhead"]):
        plans["overhead"] = partial(_overhead, data)
    with _style():
        for name, draw in plans.items():
            draw().savefig(folder / f"{name}.png")
    return [folder / f"{name}.png" for name in plans]


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names in a script that the font lacks are drawn as boxes
        yield


def _quality(data: dict[str, Any], metric: dict[str, Any]) -> Figure:
    """Against images, and against relative training time, as in the adaptive paper's Fig. 1."""
    figure = Figure(figsize=(2 * WIDTH, 3.6))
    left, right = figure.subplots(1, 2, sharey=True)
    _against(left, data, metric, "images")
    _against(right, data, metric, "seconds")
    left.set_title(_title(metric))
    _legend(figure, left)
    return figure


def _against(axes: Axes, data: dict[str, Any], metric: dict[str, Any], by: str, curves: Sequence[dict[str, Any] | None] | None = None) -> None:
    """The metric through training. curves: those of a sweep, over its own seeds; all that came to the end unless given."""
    day = metric["day"] if by == "seconds" else None
    for m, curve in enumerate(curves or metric["curves"]):
        if curve and (curves or not data["methods"][m]["early"]):
            x = _floats(curve[by]) / (day or 1)
            _line(axes, data, m, x, curve)
    if metric["target"] is not None and not curves:
        axes.axhline(metric["target"], color="#8a8a8a", linewidth=0.8, linestyle=":")
    axes.set_xlabel("images" if by == "images" else f"training time, 1D = {day:.3g} s" if day else "training time in seconds")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}D" if day else f"{value:,.0f}"))
    _scale(axes, metric["log"])


def _line(axes: Axes, data: dict[str, Any], m: int, x: np.ndarray, curve: dict[str, Any], marks: bool = True) -> None:
    """The mean over seeds and the range over them."""
    look = data["methods"][m]
    colour = COLOURS[look["colour"]][0]
    marker = MARKERS[look["symbol"]] if marks else None
    axes.plot(x, _floats(curve["mean"]), color=colour, linestyle=DASHES[look["dash"]], marker=marker, label=_short(look["name"]))
    axes.fill_between(x, _floats(curve["low"]), _floats(curve["high"]), color=colour, alpha=0.14, linewidth=0)


def _learning_rate(data: dict[str, Any], metric: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots()
    rates = sorted({lr for curve in metric["lrs"] if curve for lr in curve["lr"]})
    for m, curve in enumerate(metric["lrs"]):
        if curve:
            _line(axes, data, m, _floats(curve["lr"]), curve)
    axes.set_xscale("log")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    axes.set_xlabel("learning rate")
    axes.set_title(_title(metric))
    _scale(axes, metric["log"])
    _legend(figure, axes)
    return figure


def _sweep(data: dict[str, Any], metric: dict[str, Any], sweep: dict[str, Any], end: dict[str, Any]) -> Figure:
    """Values at their common end against an option, and these methods against training time; for |S| this is the adaptive paper's Fig. 7."""
    figure = Figure(figsize=(2 * WIDTH, 3.4))
    left, right = figure.subplots(1, 2)
    there = [(m, value, end["values"][m]) for m, value in sweep["points"] if end["values"][m]]
    places = [value if sweep["numeric"] else i for i, (_, value, _) in enumerate(there)]
    left.plot(places, [final["mean"] for *_, final in there], color="#8a8a8a", linewidth=1)
    for place, (m, _, final) in zip(places, there, strict=True):
        look = data["methods"][m]
        ends = [[final["mean"] - final["low"]], [final["high"] - final["mean"]]]
        left.errorbar([place], [final["mean"]], ends, fmt=MARKERS[look["symbol"]], color=COLOURS[look["colour"]][0], capsize=2)
    base = [m for m, method in enumerate(data["methods"]) if method["baseline"] and end["values"][m]]
    for m in base:
        left.axhline(end["values"][m]["mean"], color=COLOURS[0][0], linewidth=1, linestyle=":", label=_short(data["methods"][m]["name"]))
    if sweep["log"]:
        left.set_xscale("log")
    left.set_xticks(places, [f"{value:g}" if sweep["numeric"] else _short(value, 12) for _, value, _ in there])
    left.minorticks_off()
    left.set_xlabel(_short(sweep["label"], 60))
    left.set_title(_title(metric) + (f", after {end['step']:,} updates" if end["step"] else ""))
    _against(right, data, metric, end["by"], end["curves"])
    _legend(figure, right)
    return figure


def _loss(data: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(2 * WIDTH, 3.4))
    left, right = figure.subplots(1, 2)
    for m, curve in enumerate(data["loss"]["methods"]):
        if curve:
            _line(left, data, m, _floats(curve["time"]), curve, marks=False)
            if "ratio" in curve:
                look = data["methods"][m]
                right.plot(curve["time"], _floats(curve["ratio"]), color=COLOURS[look["colour"]][0], linestyle=DASHES[look["dash"]])
    for axes in (left, right):
        axes.set_xlabel("noise level: 0 clean, 1 pure noise")
        axes.set_xlim(0, 1)
    left.set_title("loss")
    right.set_title("loss, relative to the baseline")
    _scale(left, all(min(curve["low"]) > 0 for curve in data["loss"]["methods"] if curve))
    _legend(figure, left)
    return figure


def _utility(data: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(WIDTH, 3.4))
    axes = figure.subplots()
    axes.axhline(0, color="#8a8a8a", linewidth=0.8)
    for m, curve in enumerate(data["utility"]["methods"]):
        if curve:
            per_cent = {name: (100 * _floats(curve[name])).tolist() for name in ("mean", "low", "high")}
            _line(axes, data, m, _floats(curve["time"]), {**curve, **per_cent}, marks=False)
    axes.set_xlabel("noise level: 0 clean, 1 pure noise")
    axes.set_xlim(0, 1)
    axes.set_title("an update there lowers the loss by, in per cent")
    _legend(figure, axes)
    return figure


def _density(data: dict[str, Any]) -> Figure:
    there = [(m, entry) for m, entry in enumerate(data["density"]["methods"]) if entry]
    columns = min(4, len(there))
    rows = math.ceil(len(there) / columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.1 * rows))
    every = figure.subplots(rows, columns, squeeze=False, sharey=True).ravel()
    for axes, (m, entry) in zip(every, there, strict=False):
        # cells around the points, as heat maps on the page have them
        picture = axes.pcolormesh(
            _borders(entry["step"]), _borders(entry["time"]), _floats(entry["density"]), vmin=0, vmax=data["density"]["most"], cmap="cividis"
        )
        axes.set_title(_short(data["methods"][m]["name"]))
        axes.grid(False)
    for axes in every[len(there) :]:
        axes.set_visible(False)
    figure.supxlabel("updates", fontsize=9)
    figure.supylabel("noise level", fontsize=9)
    figure.colorbar(picture, ax=every, label="density (1 is uniform)", extend="max")
    return figure


def _overhead(data: dict[str, Any]) -> Figure:
    there = [(m, entry) for m, entry in enumerate(data["overhead"]) if entry]
    figure = Figure(figsize=(WIDTH, 0.6 + 0.32 * len(there)))
    axes = figure.subplots()
    bars = axes.barh(
        range(len(there)), [entry["ratio"] for _, entry in there], height=0.6, color=[COLOURS[data["methods"][m]["colour"]][0] for m, _ in there]
    )
    axes.bar_label(bars, [entry["label"] for _, entry in there], padding=3, fontsize=8)
    axes.set_yticks(range(len(there)), [_short(data["methods"][m]["name"]) for m, _ in there])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.axvline(1, color="#8a8a8a", linewidth=0.8, linestyle=":")
    axes.margins(x=0.12)
    axes.set_xlabel("seconds per update, the baseline = 1")
    return figure


def _scale(axes: Axes, log: bool) -> None:
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        plain = FuncFormatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(plain if high / low < 12 else NullFormatter())


def _title(metric: dict[str, Any]) -> str:
    return f"{_short(metric['name'], 50)}, {'higher' if metric['higher'] else 'lower'} is better"


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=min(4, max(1, len(axes.get_legend_handles_labels()[1]))))


def _borders(centres: Sequence[float]) -> np.ndarray:
    """The borders of cells around points: half-way between neighbours, and as far beyond the first and last."""
    x = np.array(centres, dtype=float)
    if len(x) == 1:
        return np.array([x[0] - 0.5, x[0] + 0.5])
    middle = (x[1:] + x[:-1]) / 2
    return np.concatenate([[2 * x[0] - middle[0]], middle, [2 * x[-1] - middle[-1]]])


def _floats(values: Any) -> np.ndarray:
    return np.array(values, dtype=float)  # None becomes NaN, which leaves a gap


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", text).strip("_.")[:60]
