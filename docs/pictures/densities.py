"""The pictures of the method pages, drawn from the library itself.

    python docs/pictures/densities.py           # all of them, in two minutes on one core

The curves of everything that is fixed go to densities.json, to which a test holds the library: a picture that no longer shows what the code does
is an error. What is learned comes from short trainings on digits, seeded, and is drawn only.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import noiseclock as nc

HERE = Path(__file__).parent
STORED = HERE / "densities.json"
SCHEDULES = ("linear", "flow")
POINTS = 100
BINS = 32  # of the samplers that price time, whose densities are drawn on three cells for each
LOG_SNR = [-9.9 + 0.2 * i for i in range(POINTS)]
Curve = list[float]
Panels = dict[str, dict[str, Curve]]  # the title of a panel, the label of a curve

# stated in time, so the schedule decides which noise levels they mean
IN_TIME: dict[str, dict[str, nc.Sampler]] = {
    "sd3": {"LogitNormal()": nc.LogitNormal(), "LogitNormal(-1, 0.5)": nc.LogitNormal(-1.0, 0.5), "Mode()": nc.Mode(), "CosMap()": nc.CosMap()},
    "beta": {"Beta()": nc.Beta(), "Beta(2, 5)": nc.Beta(2.0, 5.0), "Beta(4, 1)": nc.Beta(4.0, 1.0)},
    "wrappers": {
        "LogitNormal()": nc.LogitNormal(),
        "Shifted(..., k=3)": nc.Shifted(nc.LogitNormal(), 3.0),
        "Truncated(..., 0.2, 0.8)": nc.Truncated(nc.LogitNormal(), 0.2, 0.8),
        "Mixture(..., floor=0.3)": nc.Mixture(nc.LogitNormal(), floor=0.3),
    },
}
# stated in noise levels, so the schedule decides which times they mean
BY_SCHEDULE: dict[str, dict[str, nc.Sampler]] = {
    "noise-level": {"LogNormal()": nc.LogNormal(), "LogSNRNormal()": nc.LogSNRNormal(), "LogSNRNormal(0, 2)": nc.LogSNRNormal(0.0, 2.0)},
    "speed": {"SpeeD()": nc.SpeeD(), "SpeeD(k=10, tau=700)": nc.SpeeD(10.0, 700), 'variant="released"': nc.SpeeD(variant="released")},
}
WEIGHTINGS: dict[str, nc.Weighting] = {
    "MinSNR()": nc.MinSNR(),
    "SoftMinSNR()": nc.SoftMinSNR(),
    "P2()": nc.P2(),
    "Debiased()": nc.Debiased(),
    "TruncatedSNR()": nc.TruncatedSNR(),
    "Sigmoid()": nc.Sigmoid(),
    "VLB()": nc.VLB(),
    "EDMWeight()": nc.EDMWeight(),
    "ChangeAware()": nc.ChangeAware(),
}


def rounded(curve: Any) -> Curve:
    """Five digits, which a picture cannot tell from more."""
    return [float(f"{value:.5g}") for value in np.asarray(curve, dtype=float)]


def on_cells(sampler: nc.Sampler, cells: int = POINTS) -> Curve:
    """(cells,) the density in equal cells of time: mass over width."""
    return rounded(sampler.log_pmf(torch.arange(cells), cells).exp().numpy() * cells)


def over_log_snr(sampler: nc.Sampler, schedule: nc.Schedule) -> Curve:
    """(POINTS,) the density of ln SNR at LOG_SNR, 0 where the schedule does not go."""
    time = schedule.inverse(torch.tensor(LOG_SNR, dtype=torch.float64)).clamp(1e-9, 1 - 1e-9)
    reached = (schedule.log_snr(time) - torch.tensor(LOG_SNR)).abs() < 0.3  # a step of the schedule's own grid is less
    return rounded(torch.where(reached, sampler.log_prob(time).exp() / schedule.slope(time), 0.0))


def fixed() -> dict[str, Panels]:
    """Every curve that no training decides, by picture."""
    pictures: dict[str, Panels] = {}
    schedules = {name: nc.schedule(name) for name in SCHEDULES}
    for picture, samplers in IN_TIME.items():
        pictures[picture] = {"density in time": {label: on_cells(s) for label, s in samplers.items()}}
        for name, schedule in schedules.items():
            pictures[picture][f"the same in ln SNR, {name}"] = {label: over_log_snr(s, schedule) for label, s in samplers.items()}
    for picture, samplers in BY_SCHEDULE.items():
        pictures[picture] = {name: {label: on_cells(nc.Clock(name, s).sampler) for label, s in samplers.items()} for name in SCHEDULES}
    time, eps = torch.tensor(middles(POINTS), dtype=torch.float64), nc.objective("eps")
    pictures["weightings"] = {name: {label: rounded(w(schedules[name], time, eps)) for label, w in WEIGHTINGS.items()} for name in SCHEDULES}
    alone = nc.Uniform().sample(64, generator=torch.Generator().manual_seed(0)).time
    spread = nc.Clock("linear", "uniform", seed=0).draw(torch.zeros(64, 1)).time
    pictures["uniform"] = {"the times of one batch of 64": {"independent": rounded(alone.sort().values), "stratified": rounded(spread.sort().values)}}
    return pictures


def checksum(panels: Panels) -> str:
    """By which a picture names the curves that it was drawn from."""
    return hashlib.sha256(json.dumps(panels, sort_keys=True).encode()).hexdigest()[:16]


# --- trainings --------------------------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Digits (B, 64), and the time as sines."""

    def __init__(self, scale: float, width: int = 128) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.Sequential(nn.Linear(64 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """The prediction for x (B, 64) at t (B,)."""
        angles = (t[:, None] / self.scale * math.pi * 2 ** torch.arange(8)).to(x.dtype)
        return self.layers(torch.cat([x, angles.sin(), angles.cos()], 1))


def training(schedule: str, sampler: nc.Sampler, updates: int) -> Iterator[nc.Clock]:
    """The clock after each update of a short training, always the same."""
    from sklearn.datasets import load_digits

    digits = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
    torch.manual_seed(0)
    net, order = Net(1.0 if schedule == "flow" else 1000.0), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    clock = nc.Clock(schedule, sampler, objective="flow" if schedule == "flow" else "eps").attach(optimizer)
    for _ in range(updates):
        b = clock.draw(digits[torch.randint(len(digits), (128,), generator=order)], predict=net)
        clock.loss(b, net(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield clock


def learned() -> dict[str, Panels]:
    """What each sampler that learns has come to, by picture."""
    pictures: dict[str, Panels] = {name: {} for name in ("loss-based", "gradient-variance", "variance-optimal", "adaptive", "lookahead")}
    for name in SCHEDULES:
        losses = {"LossSecondMoment()": nc.LossSecondMoment(), "its power=0.7": nc.LossSecondMoment(power=0.7), "LossEMA()": nc.LossEMA()}
        pictures["loss-based"][name] = {label: through(name, sampler, {"": 2000})[""] for label, sampler in losses.items()}
        stages = {f"after {n} updates": n for n in (500, 1000, 2000)}
        pictures["gradient-variance"][name] = through(name, nc.GradientVariance(every=500), stages, 3 * BINS)
        pictures["variance-optimal"][name] = through(name, nc.VarianceOptimal(), stages, 3 * BINS)
        pictures["adaptive"][name] = through(name, nc.Adaptive.scaled(), stages)
        *_, last = training(name, nc.Lookahead(every=1, decay=0.99), 100)
        assert isinstance(last.sampler, nc.Lookahead)
        utility, error = last.sampler.curve
        pictures["lookahead"][name] = {"c(t) after 100 updates": rounded(utility), "its standard error": rounded(error)}
    return pictures


def through(schedule: str, sampler: nc.Sampler, stages: dict[str, int], cells: int = POINTS) -> dict[str, Curve]:
    """The density at some numbers of updates of one training."""
    wanted = {updates: label for label, updates in stages.items()}
    clocks = enumerate(training(schedule, sampler, max(wanted)), 1)
    return {wanted[n]: on_cells(clock.sampler, cells) for n, clock in clocks if n in wanted}


# --- drawing ----------------------------------------------------------------------------------------------------------------------------


def draw(picture: str, panels: Panels) -> None:
    """PICTURE.svg, the same bytes for the same curves."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "noiseclock", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 10, "axes.titlesize": 10})
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 2 if picture == "uniform" else 3.2), layout="constrained", squeeze=False)
    for axis, (title, curves) in zip(axes[0], panels.items(), strict=True):
        axis.spines[["top", "right"]].set_visible(False)
        axis.set(title=title, xlabel="time u (data at 0, noise at 1)", xlim=(0, 1))
        if picture == "uniform":
            for row, (_, times) in enumerate(curves.items()):
                axis.plot(times, [row] * len(times), "|", markersize=24)
            axis.set(yticks=range(len(curves)), yticklabels=list(curves), ylim=(-0.7, len(curves) - 0.3))
        elif picture == "lookahead":
            (label, utility), (_, error) = curves.items()
            axis.errorbar(middles(len(utility)), utility, error, fmt=".", capsize=2, label=f"{label}, in units of the loss, with standard errors")
            axis.axhline(0, color="black", linewidth=0.5)
        else:
            for label, curve in curves.items():
                style = "steps-mid" if len(curve) == 3 * BINS else "default"
                axis.plot(LOG_SNR if "ln SNR" in title else middles(len(curve)), curve, drawstyle=style, linewidth=1.6, label=label)
            axis.set_ylim(0, min(axis.get_ylim()[1], 6))
        if "ln SNR" in title:
            axis.set(xlabel="ln SNR (noise on the left)", xlim=(-10, 10))
        if picture == "weightings":
            axis.set(yscale="log", ylim=(1e-3, 1e3))
            axis.minorticks_off()
    axes[0][0].set_ylabel({"weightings": "weight of the eps error", "uniform": "", "lookahead": "c(t)"}.get(picture, "density"))
    if picture != "uniform":
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 5), frameon=False)
    drawn = StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None, "Description": checksum(panels)})
    plt.close(figure)
    # a hundredth of a point is more than a screen shows
    paths = re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), drawn.getvalue())
    (HERE / f"{picture}.svg").write_text(re.sub(r" +$", "", paths, flags=re.MULTILINE))


def middles(n: int) -> Curve:
    """Of n equal cells of [0, 1]."""
    return [(i + 0.5) / n for i in range(n)]


def main() -> None:
    """Everything anew."""
    torch.set_num_threads(1)
    pictures = fixed()
    # a curve a line
    STORED.write_text(json.dumps(pictures).replace("], ", "],\n").replace("]}, ", "]},\n") + "\n")
    for picture, panels in (pictures | learned()).items():
        draw(picture, panels)
        print(f"{picture}.svg  {(HERE / f'{picture}.svg').stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
