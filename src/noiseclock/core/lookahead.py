"""Which noise levels help a target objective: the first-order utility of a sample.

An update by sample i alone, -η·P·g_i, lowers a target J by u_i = η·g_i·P∇J to first order. By symmetry u_i is the derivative of the sample's own
loss along d = η·P∇J, so one gradient of J and two forward passes give the u_i, the prices, of a whole batch (`core/directions.py`).
c(t) = E[u | t] tells, in units of J per update, which times help and which hurt.

The priced samples must not be among the samples that gave ∇J. Otherwise E u_i contains an extra ‖g_i‖²_P/n, the influence of a sample on itself,
which says nothing about its effect on other samples.

c(t) is mainly a diagnostic. It defines no optimal density: the gain is linear in p, so the optimum would put all mass on one time. `Lookahead`
therefore uses a power of c(t) and a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.batch import Predict, call
from noiseclock.core.checks import resolve, take_finite
from noiseclock.core.directions import ALONG, CHECKED, derivative, gradients, scaled
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import trained
from noiseclock.core.priced import Priced, evenly
from noiseclock.core.probes import Probe, full_precision
from noiseclock.core.ranks import local, sharded
from noiseclock.core.samplers import Setting
from noiseclock.core.weightings import VLB, Constant, MinSNR, Weighting

TARGETS: dict[str, Callable[[], Weighting]] = {"simple": lambda: Constant(on="eps"), "min-snr": MinSNR, "vlb": VLB}


def target_of(target: str | Weighting) -> Weighting:
    """The weighting of a target objective, or of the one called so."""
    return resolve("target", target, Weighting, TARGETS, {})


def utility(probe: Probe, weighting: Weighting, target: Weighting, power: Sequence[Tensor | float], *, number: int = 0) -> tuple[Tensor, Tensor]:
    """Times (n,), and for a sample at each time the decrease of the target by an update with this sample alone, (n,), float64.

    One half of the probe's batch gives ∇J, where J is the mean over uniform times of the target's weight times the loss. The other half, with its
    own noise, is priced by the training loss, `weighting` included. power: the optimiser's P (`core.optimizers.metric`). number: the index of
    the probe, which shifts the times.
    """
    size = len(probe.x0)
    if size < 4:
        raise ValueError(f"a utility needs a batch of at least four samples, two for the target's gradient and two to price, got {size}")
    device = probe.x0.device
    shuffled = probe.shuffled()
    asked, priced = shuffled[: size // 2], shuffled[size // 2 :]
    exact = probe.exact()
    exact.rows = min(exact.rows, len(priced))  # otherwise each pass of half a batch would be filled up to a whole one
    parameters = trained(probe.modules, probe.optimizers)
    gradient = exact.within_memory(partial(_gradient, exact, parameters, target, evenly(len(asked), number + 0.5, device), asked))
    if not sharded(parameters):  # the gradient of a sharded model is already the mean over ranks
        ranks.average_(gradient)
    # two parameters that enter as a sum have one tensor for both gradients, which must not be scaled twice
    direction = scaled([part.clone() for part in gradient], power)
    time = evenly(len(priced), number, device)
    weight = weighting(probe.schedule, time, probe.objective)
    slope = derivative(probe.modules, parameters, power, direction, lambda: exact.losses(time, priced), step=ALONG, checked=number == CHECKED)
    return time, slope.to(weight.dtype) * weight


def _gradient(probe: Probe, parameters: Sequence[Tensor], target: Weighting, time: Tensor, rows: Tensor) -> list[Tensor]:
    """∇J from the samples `rows` of this rank, or of all ranks if the model is sharded; `.grad` is left unchanged."""
    # a `predict` that replays CUDA graphs has a graph for gradients too
    gradient = getattr(probe.predict, "replayed_gradient", None) or partial(gradient_of_sum, getattr(probe.predict, "_orig_mod", probe.predict))
    weight = target(probe.schedule, time, probe.objective) / len(rows)
    total: list[Tensor] = []
    with probe.at_rest(), full_precision(probe.resting, probe.x0.device):
        for start in range(0, len(rows), probe.rows):
            chosen, at = rows[start : start + probe.rows], time[start : start + probe.rows]
            found = gradient(parameters, *probe.inputs(at, chosen, chosen, None), weight[start : start + probe.rows])
            if total:
                torch._foreach_add_(total, found)
            else:
                total = [f.clone() for f in found] if len(rows) > probe.rows else list(found)
    return total


def gradient_of_sum(
    predict: Predict, parameters: Sequence[Tensor], x_t: Tensor, t: Tensor, cond: Any, target: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    """The gradient of Σ weight·loss over a batch, for each parameter; for a model sharded by FSDP2, this rank's shard of the mean over ranks."""
    with torch.enable_grad():
        loss = (squared_error(call(predict, x_t, t, cond), target) * weight).sum()
        if not loss.requires_grad:
            raise ValueError("the loss depends on no trained parameter; predict must not disable gradients")
        return tuple(map(local, gradients(loss, parameters)))


@dataclass
class Lookahead(Priced):
    """p = (1-floor)·p* + floor·base in bins of time, with p* ∝ base·max(c, 0)^power: times that help the target are drawn more often.

    Use it for its `curve`: c(t) and its standard error. As a sampler it was not better than the uniform one (docs/choose.md).

    target: "simple" (the plain error of the noise), "min-snr", "vlb", or a weighting. every: optimiser updates between probes, fewer between the
    first; a probe takes a gradient on half of a batch and two forward passes on the other half. bins: number of time bins. decay: factor on old
    estimates at each probe. warmup: probes before the density leaves the base. power: 0 stays at the base, 1 samples in proportion to the utility.
    """

    target: str | Weighting = "simple"
    every: int = 40
    bins: int = 32
    decay: float = 0.95
    floor: float = 0.2
    warmup: int = 20
    power: float = 0.5

    least_batch = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        take_finite(self, "power")
        if not 0 <= self.power <= 1:
            raise ValueError(f"Lookahead: power must lie in [0, 1], got {self.power}")
        target_of(self.target)

    @property
    def corrects(self) -> bool:
        return False

    def _price(self, probe: Probe, setting: Setting, number: int) -> tuple[Tensor, Tensor]:
        return utility(probe, setting.weighting, target_of(self.target), self._metric(probe), number=number)

    def _density(self, price: Tensor) -> Tensor:
        return self._base_cells() * price.clamp(min=0) ** self.power

    def _willing(self, price: Tensor) -> Tensor:
        """Do the bins differ by more than noise? With many probes the threshold is twice the squared standard error of `curve`."""
        return price.var() > (self._scatter() / self._buffers["faded"][0].clamp(min=1)).mean()
