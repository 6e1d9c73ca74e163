"""Samplers that learn from the training losses, without extra forward passes.

With importance correction the mean of the gradient does not depend on p, and its variance is minimal at p* ∝ base·√E‖w∇ℓ_t‖². These samplers do
not see gradients and use losses instead:

    LossSecondMoment    p* ∝ base·√E[(w·ℓ)²]    in bins of time
    LossEMA             p* ∝ base·E[w·ℓ]        in bins of time (Kingma & Gao, 2303.00848)
    LossHistory         p* ∝ base·√E[ℓ²]        for each step, over its last losses (improved-diffusion, 2102.09672)

ℓ is the unweighted loss of a sample, w = batch.weight its weight, without the importance correction. Each rank sums its own losses; every
`refresh` optimiser updates the ranks combine their sums, so that all ranks draw from one density. There is no other communication.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from noiseclock.core import ranks
from noiseclock.core.batch import Batch
from noiseclock.core.checks import take_finite, take_whole
from noiseclock.core.learned import LearnedDensity
from noiseclock.core.record import take_losses
from noiseclock.core.samplers import TINY, Sampler, Setting
from noiseclock.core.schedules import Discrete, Schedule
from noiseclock.core.table import cell, widen

MOST_WAITING = 64  # batches that wait before they are added to the buffers
ENOUGH = 0.9  # the share of the base that must be known before the density leaves it
RARE = 0.5  # the share of the base in steps that LossHistory does not wait for, in units of 1/steps: under a uniform base it waits for all


class LossBased(LearnedDensity):
    """A density that is learned from losses and recomputed every `refresh` optimiser updates. Losses that are not finite are skipped and counted.

    To write a subclass: add a batch to the buffers in `_add`; combine the ranks' buffers and set the density in `_fold`.
    """

    refresh: int

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "refresh", least=1)

    def _begin(self, base: Sampler | None = None, steps: int = 0) -> None:
        super()._begin(base, steps)
        self._waiting: list[tuple[Tensor, Tensor, Tensor]] = []  # times, weights and losses that are not in the buffers yet
        self._since = 0  # updates since the density was set
        self._seen = 0  # the update count at the last call of `advance`
        self._resumed = False

    @property
    def needs_updates(self) -> bool:
        return True

    @property
    def skipped(self) -> int:
        """How many losses on this rank were not finite; reads the device."""
        self._flush()
        return int(self._buffers["skipped"])

    @property
    def info(self) -> dict[str, Any]:
        return {**super().info, "skipped": self.skipped}

    @abstractmethod
    def _add(self, time: Tensor, weight: Tensor, losses: Tensor) -> Tensor:
        """Add times, weights and losses (N,), float64, to the buffers; returns (N,) which losses were finite.

        Two calls must have exactly the effect of one call with both inputs.
        """

    @abstractmethod
    def _fold(self) -> None:
        """Learn from the losses of all ranks since the last call."""

    @torch.no_grad()
    def update(self, batch: Batch, losses: Tensor) -> None:
        losses = take_losses(losses, batch.time)
        super().update(batch, losses)
        # An eager step is bound by kernel launches, and adding many batches takes as many launches as adding one, so batches wait. A captured
        # graph replays without this Python code, so there nothing can wait.
        if losses.is_cuda and torch.cuda.is_current_stream_capturing():
            self._note(batch.time, batch.weight, losses)
            return
        self._waiting.append((batch.time, batch.weight, losses.clone()))  # errors of the user's own may be in a buffer that the next batch fills
        if len(self._waiting) == MOST_WAITING:
            self._flush()

    def _note(self, time: Tensor, weight: Tensor, losses: Tensor) -> None:
        finite = self._add(time, weight, widen(losses))
        self._buffers["skipped"].add_((~finite).sum())

    @torch.no_grad()
    def _flush(self) -> None:
        if self._waiting:
            self._note(*(torch.cat(parts) for parts in zip(*self._waiting, strict=True)))
            self._waiting = []

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._waiting = []

    @torch.no_grad()
    def advance(self, updates: int) -> bool:
        # A Clock that has loaded a state calls this once more with the same count, which is no update. Otherwise calls are counted, not updates: the
        # update count falls when a fused optimiser turns out to have skipped steps.
        told_again, self._resumed = self._resumed and updates <= self._seen, False
        if told_again:
            return False
        self._seen = updates
        self._since += 1
        if self._since < self.refresh:
            return False
        self._since = 0
        self._flush()
        self._fold()
        self._check_health(self._buffers["skipped"])
        return True

    def _counters(self) -> dict[str, int]:
        return {"since": self._since, "seen": self._seen}

    def _load_counters(self, counters: dict[str, int]) -> None:
        self._since, self._seen = counters["since"], counters["seen"]
        self._resumed = True


class BinnedLoss(LossBased):
    """Exponentially decaying means of a moment of w·ℓ in equal bins of time.

    A bin is known once it has seen `warmup` losses; unknown bins are interpolated linearly between their known neighbours. The density is the
    base until the known bins hold 90 % of the base's mass. In each bin old losses decay by `decay` per update, but only when new losses arrive,
    so a rarely drawn bin keeps its estimate. Bins are equal in time, not in log-SNR, where a quarter of them would be empty on a cosine schedule.
    """

    bins: int
    decay: float
    warmup: int

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "bins", least=2)
        take_whole(self, "warmup", least=1)
        take_finite(self, "decay")
        if not 0 <= self.decay < 1:
            raise ValueError(f"{type(self).__name__}: decay must lie in [0, 1), got {self.decay}")
        self._begin()

    @property
    def cells(self) -> int:
        return self.bins

    def _statistics(self) -> dict[str, Tensor]:
        # rows of `pending` (this rank's) and `faded` (all ranks'): the number of losses, and the sum of their moments
        zeros = torch.zeros(2, self.bins, dtype=torch.float64, device="cpu")
        return {"pending": zeros, "faded": zeros.clone(), "count": zeros[0].clone(), "skipped": torch.zeros((), dtype=torch.int64, device="cpu")}

    @abstractmethod
    def _moment(self, losses: Tensor, weight: Tensor) -> Tensor:
        """The quantity that is averaged, from ℓ and w (B,)."""

    @abstractmethod
    def _price(self, mean: Tensor) -> Tensor:
        """p*/base, up to a factor, from the means (n,)."""

    def _add(self, time: Tensor, weight: Tensor, losses: Tensor) -> Tensor:
        moment = self._moment(losses, weight)
        finite = moment.isfinite()
        rows = torch.stack([finite.to(moment.dtype), torch.where(finite, moment, 0.0)])
        self._buffers["pending"].index_add_(1, cell(time, self.bins), rows)
        return finite

    def _fold(self) -> None:
        faded, count = self._buffers["faded"], self._buffers["count"]
        new = ranks.total(self._buffers["pending"])
        faded.copy_(torch.where(new[0] > 0, faded * self.decay**self.refresh + new, faded))
        count.add_(new[0])
        self._buffers["pending"].zero_()
        known = count >= self.warmup
        price = between_known(self._price(faded[1] / faded[0].clamp(min=TINY)), known)
        base = self._base_cells()
        self.set_density_(base * price, (base * known).sum() >= ENOUGH)


@dataclass
class LossSecondMoment(BinnedLoss):
    """p* ∝ base·√E[(w·ℓ)²] in bins of time: the density that minimises the variance of the corrected loss.

    Start with this one if extra compute is not allowed: it reads the training losses and makes no extra passes. It also minimises the variance of
    the gradient if a sample's gradient norm is proportional to its loss. `LossSecondMoment.published()` is the original, with a history per step.

    bins: number of time bins. decay: factor on old losses per update, so that about the last 1/(1-decay) updates count. floor: the share of the base
    in p. refresh: updates between new densities. warmup: losses in a bin before it is known. power: p* ∝ base·√E[(w·ℓ^power)²]. The gradient of a
    squared error is the error, of size √ℓ, times the gradient of the network. So power = ½ would be optimal for the gradient if the network's
    gradient had the same norm at all times; the best measured power lies between ½ and 1 (docs/log.md).
    """

    bins: int = 64
    decay: float = 0.995
    floor: float = 0.1
    refresh: int = 20
    warmup: int = 32
    power: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        take_finite(self, "power")
        if not 0 < self.power <= 1:
            raise ValueError(f"LossSecondMoment: power must lie in (0, 1], got {self.power}")

    def _moment(self, losses: Tensor, weight: Tensor) -> Tensor:
        return (losses if self.power == 1 else losses**self.power).mul(weight).square()

    def _price(self, mean: Tensor) -> Tensor:
        return mean.sqrt()

    @staticmethod
    def published() -> LossHistory:
        """Improved-diffusion's sampler: ten losses of each step, unweighted, and a floor of 0.001."""
        return LossHistory()


@dataclass
class LossEMA(BinnedLoss):
    """p* ∝ base·E[w·ℓ] in bins of time, so that every time contributes equally to the loss (Kingma & Gao, who bin log-SNR).

    It costs as little as LossSecondMoment, and uses the mean instead of the root mean square: times with a few large losses are drawn less.
    """

    bins: int = 100
    decay: float = 0.995
    floor: float = 0.1
    refresh: int = 20
    warmup: int = 32

    def _moment(self, losses: Tensor, weight: Tensor) -> Tensor:
        return losses * weight

    def _price(self, mean: Tensor) -> Tensor:
        return mean


@dataclass
class LossHistory(LossBased):
    """p = (1-floor)·p* + floor·base with p* ∝ base·√(mean of ℓ² over the last `length` losses of the step), for discrete steps.

    With the uniform base this is improved-diffusion's LossSecondMomentResampler, a baseline: the bins of LossSecondMoment are known far sooner. It
    makes no extra passes. The density is the base until every step that the base draws has seen `length` losses, at least 10,000 in total with 1000
    steps. Between refreshes each rank keeps the last `length` losses of a step; a refresh joins them in the order of the ranks.
    """

    length: int = 10
    floor: float = 0.001
    refresh: int = 1
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        take_whole(self, "length", least=1)
        if self.schedule is not None:
            self._begin()

    @property
    def _steps(self) -> Discrete:
        if self.schedule is None:
            raise ValueError(f"{type(self).__name__} needs a noise schedule: use it in a Clock, or pass schedule=nc.schedule(...)")
        if not isinstance(self.schedule, Discrete):
            raise ValueError(
                f"{type(self).__name__} keeps a history for every discrete step, and {self.schedule} has none; "
                "in continuous time use LossSecondMoment(), which bins time"
            )
        return self.schedule

    @property
    def cells(self) -> int:
        return self._steps.steps

    def bind(self, setting: Setting) -> Self:
        if self.schedule not in (None, setting.schedule):
            raise ValueError(f"{type(self).__name__} was made for {self.schedule}, the clock runs on {setting.schedule}")
        bound = replace(self, schedule=setting.schedule)
        bound._begin(setting.base, bound.cells)
        return bound

    def _on(self, device: torch.device, name: str) -> Tensor:
        _ = self._steps  # raises if there is no schedule yet
        return super()._on(device, name)

    def _statistics(self) -> dict[str, Tensor]:
        # Ring buffers: the i-th loss of a step since the last reset is in column i mod length. `waiting` and `passed` count the losses that were
        # written to `pending` (this rank's) and `history` (all ranks'). The last row of `pending` takes the losses that are discarded.
        pending = torch.zeros(self.cells + 1, self.length, dtype=torch.float64, device="cpu")
        waiting = torch.zeros(self.cells + 1, dtype=torch.int64, device="cpu")
        return {
            "history": pending[:-1].clone(),
            "passed": waiting[:-1].clone(),
            "pending": pending,
            "waiting": waiting,
            "skipped": waiting[0].clone(),
        }

    def _add(self, time: Tensor, weight: Tensor, losses: Tensor) -> Tensor:
        pending, waiting = self._buffers["pending"], self._buffers["waiting"]
        nowhere = len(waiting) - 1
        finite = losses.square().isfinite()
        step = torch.where(finite, self._steps.step(time), nowhere)
        # the index of each sample within its step: in sorted order, the distance from the first sample of this step
        step, order = step.sort(stable=True)
        losses = losses[order]
        place = torch.arange(len(step), device=step.device) - torch.searchsorted(step, step)
        count = torch.zeros_like(waiting).index_add_(0, step, torch.ones_like(step))
        # if a step has more than `length` losses only the last ones are kept, so that no two are written to one column
        row = torch.where(place >= count[step] - self.length, step, nowhere)
        pending.index_put_((row, (waiting[step] + place) % self.length), torch.where(row < nowhere, losses, 0.0))
        waiting.add_(count)
        waiting[-1:].zero_()
        return finite

    def _fold(self) -> None:
        history, passed = self._buffers["history"], self._buffers["passed"]
        pending, waiting = self._buffers["pending"], self._buffers["waiting"]
        column = torch.arange(self.length, device=history.device)
        for new, count in zip(ranks.gathered(pending[:-1]), ranks.gathered(waiting[:-1]), strict=True):
            kept = count.clamp(max=self.length)[:, None]
            source = (count[:, None] - kept + column) % self.length  # oldest first
            target = (passed[:, None] + column) % self.length
            values = torch.where(column < kept, new.gather(1, source), history.gather(1, target))
            history.scatter_(1, target, values)
            passed.add_(kept[:, 0])
        pending.zero_()
        waiting.zero_()
        base, known, price = self._base_cells(), passed >= self.length, history.square().mean(1).sqrt()
        # a step that the base never or hardly ever draws, as outside a truncated base, need not be known; its price is the mean of the others
        price = torch.where(known, price, (price * known).sum() / known.sum().clamp(min=1))
        self.set_density_(base * price, (base * ~known).sum() < RARE / self.cells)


def between_known(values: Tensor, known: Tensor) -> Tensor:
    """values (n,) where `known` (n,); elsewhere interpolated linearly between the nearest known values, constant beyond the outermost.

    >>> between_known(torch.tensor([9.0, 1.0, 9.0, 9.0, 4.0]), torch.tensor([False, True, False, False, True]))
    tensor([1., 1., 2., 3., 4.])
    """
    n = len(values)
    i = torch.arange(n, device=values.device)
    left = torch.where(known & (i <= i[:, None]), i, -1).amax(1)
    right = torch.where(known & (i >= i[:, None]), i, n).amin(1)
    first, last = torch.where(left < 0, right, left).clamp(max=n - 1), torch.where(right == n, left, right).clamp(min=0)
    part = (i - first) / (last - first).clamp(min=1)
    return torch.where(first == last, values[first], torch.lerp(values[first], values[last], part.to(values.dtype)))
