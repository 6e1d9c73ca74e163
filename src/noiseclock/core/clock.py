"""The Clock: schedule + sampler + weighting + objective = `draw` and `loss`.

The objective is base(t)·w(t): `base` is the measure over time that is meant, `weighting` the weight. The sampler's density p(t) is how it is
estimated. With importance correction the loss carries base/p, and p changes only the variance of the gradient; without it, as in the papers,
p changes the objective itself to p·w.

From draw to loss nothing is read back from the device and no random number comes from the host, so that the step can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed
from torch import Tensor

from noiseclock.core import names
from noiseclock.core.checks import choose
from noiseclock.core.objectives import Objective, objective as make_objective, squared_error
from noiseclock.core.probes import Predict, Probe, Probing, call, noised
from noiseclock.core.record import Record
from noiseclock.core.samplers import Draw, Sampler, Uniform
from noiseclock.core.schedules import Array, Discrete, Schedule, schedule as make_schedule, wide
from noiseclock.core.streams import finalize, stratified
from noiseclock.core.weightings import Constant, Weighting, weighting as make_weighting

VERSION = 1  # of the state; raised when an older one can no longer be read
CORRECTIONS = ("auto", "none", "importance")


@dataclass(frozen=True)
class Batch:
    """One batch, ready for the model.

    x0 (B, ...): the data. x_t (B, ...): what the model sees, in the dtype of x0. t (B,): what the model is told of the noise level.
    target (B, ...): what it should predict. noise (B, ...). time (B,): in [0, 1). weight (B,): of each loss, importance correction included.
    draw: the sampler's own account of the times. cond: passed through.
    """

    x0: Tensor
    x_t: Tensor
    t: Tensor
    target: Tensor
    noise: Tensor
    time: Tensor
    weight: Tensor
    draw: Draw
    cond: Any = None


class PlotData(NamedTuple):
    """Curves over time, as numpy arrays: the density p, the weight w, and what is trained in effect, p·w (base·w when corrected)."""

    time: Array
    log_snr: Array
    p: Array
    w: Array
    effective: Array


class Clock:
    """Decides which noise level each sample trains on, and what its loss counts.

    schedule, sampler, weighting, objective: objects or their names. base: the density over time that the objective means.
    correct: "importance" puts base/p on the loss, "none" leaves it out, "auto" does as the sampler declares.
    seed: of times and noise. rank, world_size: taken from torch.distributed where it runs, unless given.

    >>> clock = Clock("linear", "uniform", "min-snr")
    >>> batch = clock.draw(torch.zeros(4, 3, 8, 8))
    >>> batch.x_t.shape, batch.t.dtype, clock.loss(batch, batch.noise)
    (torch.Size([4, 3, 8, 8]), torch.int64, tensor([0., 0., 0., 0.]))
    """

    def __init__(
        self,
        schedule: str | Schedule,
        sampler: str | Sampler,
        weighting: str | Weighting = Constant(),
        objective: str | Objective = "eps",
        *,
        base: str | Sampler = Uniform(),
        correct: str = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.schedule = make_schedule(schedule)
        self.sampler = names.sampler(sampler).bind(self.schedule)
        self.weighting = make_weighting(weighting)
        self.objective = make_objective(objective)
        self.base = names.sampler(base).bind(self.schedule)
        choose("correction", correct, dict.fromkeys(CORRECTIONS))
        self.corrected = self.sampler.corrects if correct == "auto" else correct == "importance"
        self._check_base()
        self.seed = seed
        self._rank, self._world_size = _check_place(rank, world_size)
        self.record = Record()
        self._draws = torch.zeros((), dtype=torch.int64)
        self._updates = 0
        self._unread_skips: Tensor | None = None
        self._noise: torch.Generator | None = None
        self._saved_noise: Mapping[str, Any] | None = None
        self._mean_weight: dict[torch.device, Tensor] = {}
        self._latest: Probe | None = None
        self._pending: Probe | None = None
        self._next_probe = 0
        self._hook: Any = None

    def __repr__(self) -> str:
        return (
            f"Clock({self.schedule}, {self.sampler}, {self.weighting}, {self.objective.name!r}, base={self.base}, "
            f"correct={'importance' if self.corrected else 'none'!r}, seed={self.seed})"
        )

    def _check_base(self) -> None:
        if not self.corrected and self.base != Uniform():
            raise ValueError(f"base={self.base} has no effect without importance correction; pass correct='importance'")
        (lo, hi), (base_lo, base_hi) = self.sampler.support, self.base.support
        if self.corrected and (lo > base_lo or hi < base_hi):
            raise ValueError(
                f"importance correction cannot reach all of the base: {self.sampler} draws from [{lo:g}, {hi:g}] only, {self.base} covers "
                f"[{base_lo:g}, {base_hi:g}]; mix it with the base (Mixture), restrict the base, or pass correct='none'"
            )

    # --- the step -----------------------------------------------------------------------------------------------------------------------

    def draw(
        self,
        x0: Tensor,
        *,
        predict: Predict | None = None,
        cond: Any = None,
        noise: Tensor | None = None,
        micro: tuple[int, int] = (0, 1),
    ) -> Batch:
        """Noise a batch x0 (B, ...) at newly drawn times.

        predict: the model, as `predict(x_t, t)` or with `cond`; samplers that probe need it. cond: a mapping goes to the model as keywords,
        anything else as a third argument. noise: (B, ...), drawn here unless given. micro: (i, n) for micro-batch i of n in one update, so
        that the times are stratified over all of them.
        """
        self._check_draw(x0, noise, micro)
        rank, world_size = self._place()
        this = self._next_draw(x0.device, first=micro[0] == 0)
        uniforms = stratified(self.seed, this, len(x0), part=micro[0] * world_size + rank, parts=micro[1] * world_size)
        draw = self.sampler.sample(len(x0), x0=x0, uniforms=uniforms)
        if noise is None:
            kind = torch.promote_types(x0.dtype, torch.float32)
            noise = torch.randn(x0.shape, generator=self.generator(x0.device), device=x0.device, dtype=kind)
        x_t, target = noised(self.schedule, self.objective, x0, noise, draw.time)
        weight = self._weight(draw, x0)
        if predict is not None:
            self._latest = Probe(predict, self.schedule, self.objective, x0, noise, cond)
        if self.due and self._pending is None and micro[0] == 0:
            self.probe()
        return Batch(x0, x_t, self.schedule.condition(draw.time), target, noise, draw.time, weight, draw, cond)

    def loss(self, batch: Batch, prediction: Tensor) -> Tensor:
        """(B,) the weighted losses; average them yourself. The sampler learns from them and the record notes them, unweighted."""
        error = squared_error(prediction, batch.target)
        seen = error.detach()
        self.record.add(batch.time, seen)
        self.sampler.update(batch.draw, seen)
        return error * batch.weight.to(error.dtype)

    @contextmanager
    def step(self, predict: Predict, x0: Tensor, **cond: Any) -> Iterator[Tensor]:
        """One training step: yields the losses (B,); do backward and the optimiser's step inside.

        Without `attach` the end of the block counts as the update.
        """
        batch = self.draw(x0, predict=predict, cond=cond or None)
        yield self.loss(batch, call(predict, batch.x_t, batch.t, batch.cond))
        if self._hook is None:
            self.updated()

    def _weight(self, draw: Draw, x0: Tensor | None) -> Tensor:
        weight = self.weighting(self.schedule, draw.time, self.objective)
        if self.weighting.normalize:
            weight = weight / self._mean(draw.time.device)
        return weight * self._correction(draw, x0) if self.corrected and self.sampler != self.base else weight

    def _correction(self, draw: Draw, x0: Tensor | None) -> Tensor:
        """base/p: of the step's probabilities on discrete steps, of the densities in continuous time."""
        if not isinstance(self.schedule, Discrete):
            return (self.base.log_prob(draw.time) - draw.log_prob).exp()
        step, steps = self.schedule.step(draw.time), self.schedule.steps
        log_pmf = self.sampler.log_pmf(step, steps, x0=x0) if draw.log_pmf is None else draw.log_pmf
        return (self.base.log_pmf(step, steps) - log_pmf).exp()

    def _mean(self, device: torch.device) -> Tensor:
        if device not in self._mean_weight:
            self._mean_weight[device] = self._measure_mean(device)
        return self._mean_weight[device]

    def _measure_mean(self, device: torch.device) -> Tensor:
        """The mean weight under the sampler, or under the base when the loss is corrected to it."""
        density = self.base if self.corrected else self.sampler
        if isinstance(self.schedule, Discrete):
            step = torch.arange(self.schedule.steps, device=device)
            weight = self.weighting(self.schedule, self.schedule.time_of(step), self.objective)
            return (density.log_pmf(step, self.schedule.steps).exp() * weight).sum()
        points = 2**14
        middles = (torch.arange(points, device=device, dtype=wide(device)) + 0.5) / points
        return self.weighting(self.schedule, density.sample(points, uniforms=middles).time, self.objective).mean()

    # --- updates and probes -------------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Any) -> Self:
        """Count the optimiser's updates by itself, through a hook that runs after each of its steps; returns the clock."""
        while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # accelerate and others wrap the real one
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise TypeError(f"attach needs a torch optimiser, got {type(optimizer).__name__}; or call clock.updated() after each update")
        if self._hook is not None:
            self._hook.remove()
        self._hook = optimizer.register_step_post_hook(self._after_step)
        return self

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # A GradScaler leaves out the step of most optimisers when a gradient is infinite, and then this hook does not run. Fused ones run and
        # decide on the device; looking there would synchronise, so outside probes the flag is only added up.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self.updated()
        elif self._pending is not None:
            self.updated(skipped=bool(found_inf))
        else:
            skips = torch.zeros_like(found_inf) if self._unread_skips is None else self._unread_skips
            self._unread_skips = skips + (found_inf > 0)
            self.updated()

    def updated(self, *, skipped: bool = False) -> None:
        """An optimiser update was made, or `skipped`. `attach` calls this; call it yourself after a graph replay."""
        probe, self._pending = self._pending, None
        if skipped:
            return
        self._updates += 1
        if probe is not None:
            self._prober().after(probe)
            self._next_probe = self._updates - 1 + self.sampler.every
        if self.sampler.advance(self._updates) or probe is not None:
            for device, mean in self._mean_weight.items():
                mean.copy_(self._measure_mean(device))

    @property
    def updates(self) -> int:
        """Optimiser updates so far. Reading it may synchronise if a GradScaler drives a fused optimiser."""
        self._count_skips()
        return self._updates

    def _count_skips(self) -> None:
        if self._unread_skips is not None:
            self._updates -= int(self._unread_skips)
            self._unread_skips = None

    @property
    def due(self) -> bool:
        """Is a probe due in this step? Never for a fixed sampler."""
        if self.sampler.every == 0 or self._updates < self._next_probe:
            return False
        self._count_skips()  # a probe costs far more than this look at the device, and some updates may not have happened
        return self._updates >= self._next_probe

    def probe(self) -> None:
        """Show the sampler the model before the coming update; `updated` shows it again. `draw` does this when one is due."""
        if self._latest is None:
            raise ValueError(f"{type(self.sampler).__name__} looks at the model: pass it as clock.draw(x0, predict=model)")
        self._pending = self._latest
        self._prober().before(self._pending)

    def _prober(self) -> Probing:
        if not isinstance(self.sampler, Probing):
            raise TypeError(f"{self.sampler!r} does not probe")
        return self.sampler

    # --- what it shows ------------------------------------------------------------------------------------------------------------------

    def plot_data(self, points: int = 1000) -> PlotData:
        """p, w and their product over time, on the schedule's steps or on `points` times."""
        time = self.schedule.grid(points)
        if isinstance(self.schedule, Discrete):
            step, steps = torch.arange(self.schedule.steps), self.schedule.steps
            p, base = (density.log_pmf(step, steps).exp() * steps for density in (self.sampler, self.base))
        else:
            p, base = self.sampler.log_prob(time).exp(), self.base.log_prob(time).exp()
        w = self.weighting(self.schedule, time, self.objective)
        if self.weighting.normalize:
            w = w / self._mean(time.device)
        curves = time, self.schedule.log_snr(time), p, w, (base if self.corrected else p) * w
        return PlotData(*(curve.numpy() for curve in curves))

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: nested dicts of tensors, numbers and strings."""
        state: dict[str, Any] = {
            "version": VERSION,
            "setup": self._setup(),
            "updates": self.updates,
            "next_probe": self._next_probe,
            "draws": int(self._draws),
            "record": self.record.state_dict(),
            "sampler": self.sampler.state_dict(),
        }
        if self._noise is not None:
            state["noise"] = {
                "device": self._noise.device.type,
                "rank": self._place()[0],
                "world_size": self._place()[1],
                "state": self._noise.get_state(),
            }
        elif self._saved_noise is not None:
            state["noise"] = dict(self._saved_noise)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. One that is incomplete or belongs to another set-up is refused, and nothing is changed.

        The noise goes on exactly where it was on the same rank, number of ranks and kind of device, and starts a new stream elsewhere; times
        go on in either case.
        """
        needed = {"version", "setup", "updates", "next_probe", "draws", "record", "sampler"}
        if missing := needed - set(state):
            raise ValueError(f"this is not the whole state of a Clock: {', '.join(sorted(missing))} missing")
        if state["version"] != VERSION:
            raise ValueError(f"the state has version {state['version']}, this library reads {VERSION}")
        for part, mine in self._setup().items():
            if state["setup"].get(part) != mine:
                raise ValueError(f"the state belongs to another clock: its {part} is {state['setup'].get(part)}, this one's is {mine}")
        self.record.check(state["record"])
        self.sampler.load_state_dict(state["sampler"])
        self.record.load_state_dict(state["record"])
        self._updates, self._next_probe, self._unread_skips = int(state["updates"]), int(state["next_probe"]), None
        self._draws.fill_(int(state["draws"]))
        self._noise, self._saved_noise = None, state.get("noise")
        self._pending = self._latest = None
        self.sampler.advance(self._updates)
        for device, mean in self._mean_weight.items():
            mean.copy_(self._measure_mean(device))

    def _setup(self) -> dict[str, Any]:
        return {
            "schedule": repr(self.schedule),
            "sampler": repr(self.sampler),
            "weighting": repr(self.weighting),
            "objective": repr(self.objective),
            "base": repr(self.base),
            "corrected": self.corrected,
            "seed": self.seed,
        }

    # --- random streams and ranks -------------------------------------------------------------------------------------------------------

    def _place(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _next_draw(self, device: torch.device, *, first: bool) -> Tensor:
        """The number of this draw, the same on every rank. Micro-batches of one update share it: only the first one moves on."""
        if self._draws.device != device:
            self._draws = self._draws.to(device)
        if first:
            self._draws += 1
        return self._draws

    def generator(self, device: torch.device) -> torch.Generator:
        """This rank's stream of noise. A CUDA graph that captures `draw` must know it: `graph.register_generator_state(...)`."""
        if self._noise is None or self._noise.device != device:
            rank, world_size = self._place()
            self._noise = torch.Generator(device)
            saved, self._saved_noise = self._saved_noise, None
            if saved is not None and (saved["device"], saved["rank"], saved["world_size"]) == (device.type, rank, world_size):
                self._noise.set_state(saved["state"].cpu())
            else:
                self._noise.manual_seed(finalize(finalize(finalize(self.seed) + 1 + rank) + int(self._draws)) // 2)
        return self._noise

    @staticmethod
    def _check_draw(x0: Tensor, noise: Tensor | None, micro: tuple[int, int]) -> None:
        if not isinstance(x0, Tensor) or not x0.is_floating_point():
            kind = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
            raise TypeError(f"x0 must be a floating-point tensor (images scaled to [-1, 1]), got {kind}")
        if x0.ndim < 2 or len(x0) == 0:
            raise ValueError(f"x0 must be a batch (B, ...) of at least one sample, got shape {tuple(x0.shape)}")
        if noise is not None and noise.shape != x0.shape:
            raise ValueError(f"noise has shape {tuple(noise.shape)}, x0 {tuple(x0.shape)}")
        if len(micro) != 2 or not 0 <= micro[0] < micro[1]:
            raise ValueError(f"micro must be (i, n) with 0 <= i < n, got {micro}")


def _check_place(rank: int | None, world_size: int | None) -> tuple[int | None, int | None]:
    if (rank is None) != (world_size is None):
        raise ValueError(f"rank and world_size go together, got rank={rank}, world_size={world_size}")
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    return rank, world_size
