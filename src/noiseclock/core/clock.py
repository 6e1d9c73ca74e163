"""The Clock: schedule + sampler + weighting + objective = `draw` and `loss`.

The objective is base(t)·w(t): `base` is the intended measure over time, `weighting` the weight. The sampler's density p(t) is used to
estimate it. With importance correction the loss is multiplied by base/p, and p changes only the variance of the gradient; without it, as in the
papers, p changes the objective itself to p·w.

Between `draw` and `loss` nothing is read back from the device and no random number comes from the host, so a CUDA graph can capture the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import index
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from noiseclock.core import names, ranks
from noiseclock.core.batch import Batch, Draw, Predict, at_least_float32, call, check_batch, noised
from noiseclock.core.chance import Chance
from noiseclock.core.checks import alike, choose, take_whole, told_apart, without_address
from noiseclock.core.eager import eager
from noiseclock.core.health import Health, warn
from noiseclock.core.objectives import Objective, squared_error
from noiseclock.core.optimizers import attachable, no_gradients
from noiseclock.core.probes import Probe, autocast_dtype
from noiseclock.core.reach import telling
from noiseclock.core.record import Record
from noiseclock.core.samplers import Sampler, Setting, Uniform, mean_under
from noiseclock.core.schedules import Array, Discrete, Schedule, as_time
from noiseclock.core.steps import Steps
from noiseclock.core.table import Table, wide
from noiseclock.core.trained import Trained
from noiseclock.core.weightings import Constant, Weighting, weighting as make_weighting

VERSION = 1  # of the state; raised when older states can no longer be read
STATE = {"version", "setup", "updates", "next_probe", "draws", "record", "sampler", "noise"}
AUTOCAST = {"": None, "bfloat16": torch.bfloat16, "float16": torch.float16}  # as the state names them
TOO_SMALL = 20  # too small batches in a row before a due probe raises an error; the short last batches of epochs are fewer
SILENT = 100  # updates of batches without any loss before a warning
PATIENCE = 1000  # draws without an optimiser update before a warning, for samplers that need updates


class PlotData(NamedTuple):
    """Curves over time, as numpy arrays: the density p, the weight w, and the effective weight p·w (base·w if corrected)."""

    time: Array
    log_snr: Array
    p: Array
    w: Array
    effective: Array


class Clock:
    """Decides which noise level each sample trains on, and the weight of its loss.

    - schedule, sampler, weighting, objective: objects or their names. The schedule may be a diffusers scheduler; the default objective is then the
      one that it is configured for, otherwise "flow" on flow, "edm" on EDM and "eps" on discrete steps.
    - base: the density over time in the objective base(t)·w(t).
    - correct: "importance" multiplies the loss by base/p, "none" does not, "auto" follows the sampler's default;
      `clock.corrected` says which it was.
    - seed: of times and noise. Two clocks with the same seed draw the same times and noise.
    - rank, world_size: by default those of torch.distributed, if it is initialised.
    - probe_rows: the largest number of samples in one forward pass of a probe, by default the batch size. Fewer need less memory, more keep a GPU
      busier.

    >>> clock = Clock("linear", "uniform", "min-snr")
    >>> batch = clock.draw(torch.zeros(4, 3, 8, 8))
    >>> batch.x_t.shape, batch.t.dtype, clock.loss(batch, batch.noise)
    (torch.Size([4, 3, 8, 8]), torch.int64, tensor([0., 0., 0., 0.]))
    """

    def __init__(
        self,
        schedule: str | Schedule | Any,
        sampler: str | Sampler,
        weighting: str | Weighting = Constant(),
        objective: str | Objective | None = None,
        *,
        base: str | Sampler = Uniform(),
        correct: str = "auto",
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        probe_rows: int | None = None,
    ) -> None:
        self.schedule = names.schedule(schedule)
        self.objective = names.objective(objective, schedule, self.schedule)
        self.weighting = make_weighting(weighting)
        if isinstance(seed, bool) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be a whole number, got {seed!r}")
        self.seed = int(seed)
        self._chance = Chance(self.seed, rank, world_size)
        self.probe_rows = probe_rows
        if probe_rows is not None:
            take_whole(self, "probe_rows", least=1)
        self._health = Health()
        self._heard, self._unheard = False, 0  # has any loss come through `loss` or `weigh`? Updates of batches without one
        self._steps: Steps | None = None
        choose("correction", correct, ("auto", "none", "importance"))
        base, sampler = names.sampler(base), names.sampler(sampler)
        self.corrected = sampler.corrects if correct == "auto" else correct == "importance"
        setting = Setting(self.schedule, self.objective, self.weighting, base, self.corrected)
        self.base = base.bind(setting)
        self.sampler = sampler.bind(replace(setting, base=self.base))
        self._check_base()
        self.record = Record()
        self._trained = Trained()
        # Optimiser updates, and how many of them a fused optimiser has skipped; only the device knows the latter. Two counts, because reading
        # `updates` on one rank must not change `_updates` there: it decides when a probe is due, and ranks that disagree would deadlock.
        self._updates = 0
        self._skips: Tensor | int = 0
        self._waiting = 0
        # probes
        self._probe: Probe | None = None
        self._next_probe = 0
        self._put_off = 0  # batches in a row that were too small for a due probe
        self._batch: Batch | None = None
        self._paired = False  # does the batch belong to the probe that waits for its update?
        self._autocast: torch.dtype | None = None
        self._mean_weight = Table(self._measure_mean()) if self.weighting.normalize else None

    def __repr__(self) -> str:
        correct = "importance" if self.corrected else "none"
        return f"Clock({self.schedule}, {self.sampler}, {self.weighting}, {self.objective}, base={self.base}, {correct=}, seed={self.seed})"

    def _check_base(self) -> None:
        if self.base.learns:
            raise ValueError(f"the base is the density that the objective means, which cannot be learned, got {self.base}; give a fixed density")
        if not self.corrected and self.base != Uniform():
            raise ValueError(f"base={self.base} has no effect without importance correction; pass correct='importance'")
        (lo, hi), (base_lo, base_hi) = self.sampler.support, self.base.reach
        if self.corrected and (lo > base_lo or hi < base_hi):
            raise ValueError(
                f"importance correction needs a sampler that covers the base: {self.sampler} covers [{lo:g}, {hi:g}] only, {self.base} reaches over "
                f"[{base_lo:g}, {base_hi:g}]; mix the sampler with the base (Mixture), restrict the base, or pass correct='none'"
            )
        # learned densities begin at the base, and look after themselves
        if self.corrected and (share := self._hardly_drawn()) > 0.05:
            self._health.warn(
                "hardly drawn",
                f"{type(self.sampler).__name__} draws {share:.0%} of the base, {type(self.base).__name__}, less than a hundredth as often as the "
                "objective means, so a few huge weights decide the gradient, and what is never drawn is not trained; mix the sampler with the base "
                "(Mixture), or pass correct='none'",
            )

    def _hardly_drawn(self) -> float:
        """The share of the base where the importance weight base/p is above 100."""
        if isinstance(self.schedule, Discrete):
            step, steps = torch.arange(self.schedule.steps, device="cpu"), self.schedule.steps
            base, p = (density.log_pmf(step, steps) for density in (self.base, self.sampler))
            return float(base.exp()[base - p > math.log(100)].sum())
        return float(
            mean_under(self.base, self.schedule, lambda time: (self.base.log_prob(time) - self.sampler.log_prob(time) > math.log(100)).double())
        )

    # --- the step -----------------------------------------------------------------------------------------------------------------------

    @eager  # counting, drawing and probing is Python; a compiled step is cut there, and its model stays compiled
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
        anything else as a third argument; probes select rows of its tensors, and of lists with one string, tensor, number or None per sample.
        noise: (B, ...), drawn here if not given. micro: (i, n) for micro-batch i of n in one update; times are stratified over all n.
        """
        check_batch(x0, noise)
        if not isinstance(micro, tuple) or len(micro) != 2 or not all(hasattr(m, "__index__") for m in micro) or not 0 <= micro[0] < micro[1]:
            raise ValueError(f"micro must be a tuple (i, n) of whole numbers with 0 <= i < n, got {micro}")
        micro = index(micro[0]), index(micro[1])
        if get_worker_info() is not None:  # each worker gets a new copy of the clock in every epoch
            raise ValueError("in a DataLoader every worker would draw the same times and noise in every epoch; call clock.draw in the training loop")
        if micro[0] == 0 and not _capturing(x0):
            self._before_update(x0, predict, cond)
        # before `uniforms` counts this draw: the seed of a new stream depends on the number of draws, and a graph may need it before the first
        generator = self.generator(x0.device) if noise is None else None
        uniforms = self._chance.uniforms(len(x0), x0.device, micro, evenly=self.sampler.stratified)
        draw = self.sampler.sample(len(x0), x0=x0, uniforms=uniforms)
        if noise is None:
            noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=at_least_float32(x0))
        correction = self._correction(draw, x0) if self.corrected else torch.ones_like(draw.time)
        batch = self._make(x0, draw.time, noise, cond, correction, draw)
        # keep the batch whose x0 the probe saw, even if more are drawn before the update; during a capture keep the graph's batch, which replays fill
        if self.sampler.every and micro[0] == 0 and (not self._paired or _capturing(x0)):
            self._batch, self._paired = batch, self._probe is not None
        return batch

    def at(
        self, x0: Tensor, time: Tensor | float, *, noise: Tensor | None = None, cond: Any = None, generator: torch.Generator | None = None
    ) -> Batch:
        """Noise a batch x0 (B, ...) at chosen times, (B,) or one for all: for validation. Nothing is drawn, recorded or learned.

        noise: (B, ...), drawn with `generator` if not given. The loss is weighted by w alone, without importance correction.
        """
        check_batch(x0, noise)
        time = as_time(time).to(x0.device, wide(x0.device))
        if time.ndim > 0 and time.shape != x0.shape[:1]:
            raise ValueError(f"time must be one number or have shape ({len(x0)},), got {tuple(time.shape)}")
        if noise is None:
            noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=at_least_float32(x0))
        time = time.expand(len(x0))
        return self._make(x0, time, noise, cond, torch.ones_like(time), None)

    def _make(self, x0: Tensor, time: Tensor, noise: Tensor, cond: Any, correction: Tensor, draw: Draw | None) -> Batch:
        x_t, target = noised(self.schedule, self.objective, x0, noise, time)
        weight = self.weighting(self.schedule, time, self.objective)
        if self._mean_weight is not None:
            weight = weight / self._mean_weight.on(time.device)
        return Batch(x0, x_t, self.schedule.condition(time), target, noise, time, weight, correction, cond, draw)

    @eager
    def loss(self, batch: Batch, prediction: Tensor) -> Tensor:
        """(B,) the weighted losses; average them yourself. The sampler learns from the unweighted losses, and the record stores them.

        The loss of a batch made by `at` is weighted too, but neither recorded nor learned from.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"clock.loss takes a batch and then the prediction, got {type(batch).__name__} first")
        errors = squared_error(prediction, batch.target)
        if batch.draw is not None and self.sampler.every and torch.is_grad_enabled():
            # remembered for the next probe, which may run outside the user's autocast block
            reduced = prediction.dtype != batch.x_t.dtype and prediction.dtype in (torch.bfloat16, torch.float16)
            self._autocast = prediction.dtype if reduced else autocast_dtype(prediction.device)
        return self.weigh(batch, errors)

    @eager
    def weigh(self, batch: Batch, errors: Tensor) -> Tensor:
        """(B,) the weighted losses of your own errors (B,), in place of the mean squared ones of `loss`; recorded and learned from alike.

        Probes measure the squared error all the same, so a sampler that probes does not follow your errors.
        """
        if not isinstance(batch, Batch):
            raise TypeError(f"clock.weigh takes a batch and then the errors, got {type(batch).__name__} first")
        if not isinstance(errors, Tensor) or errors.shape != batch.time.shape:
            found = tuple(errors.shape) if isinstance(errors, Tensor) else type(errors).__name__
            raise ValueError(f"the errors must be a tensor of one number per sample, of shape {tuple(batch.time.shape)}, got {found}")
        if torch._C._functorch.is_functorch_wrapped_tensor(errors):
            raise ValueError(
                "inside a transform of torch.func nothing can be recorded; multiply the errors by b.weight * b.correction there, return them too, "
                "and pass them to clock.weigh outside"
            )
        errors = errors.to(torch.promote_types(errors.dtype, torch.float32))  # as in `loss`: under autocast they may be half precision
        if batch.draw is not None and not torch.is_grad_enabled():
            self._health.warn(
                "validation",
                "a loss computed without gradients is taken for a validation, and is neither recorded nor learned from; make validation batches with "
                "clock.at, which draws no time",
            )
        elif batch.draw is not None:
            self._heard = True
            seen = errors.detach()
            self.record.add(batch.time, seen)
            self.sampler.update(batch, seen)
        return self.weighting.apply(errors, batch, self.schedule, self.objective)

    @contextmanager
    def step(self, predict: Predict, x0: Tensor, **cond: Any) -> Iterator[Tensor]:
        """One training step: yields the losses (B,); call backward and the optimiser's step inside the block.

        Without `attach` the end of the block counts as the update.
        """
        batch = self.draw(x0, predict=predict, cond=cond or None)
        yield self.loss(batch, call(predict, batch.x_t, batch.t, batch.cond))
        if self._steps is None:
            self.updated()

    def _correction(self, draw: Draw, x0: Tensor) -> Tensor:
        """base/p: the ratio of the step's probabilities on a discrete schedule, of the densities in continuous time."""
        if not isinstance(self.schedule, Discrete):
            return (self.base.log_prob(draw.time) - draw.log_prob).exp()
        step, steps = self.schedule.step(draw.time), self.schedule.steps
        log_pmf = self.sampler.log_pmf(step, steps, x0=x0) if draw.log_pmf is None else draw.log_pmf
        return (self.base.log_pmf(step, steps) - log_pmf).exp()

    def _measure_mean(self) -> Tensor:
        """The mean weight under the sampler, or under the base when the loss is corrected to it."""
        density = self.base if self.corrected else self.sampler
        return mean_under(density, self.schedule, lambda time: self.weighting(self.schedule, time, self.objective))

    # --- updates and probes -------------------------------------------------------------------------------------------------------------

    def attach(self, optimizer: Any, *others: Any, model: nn.Module | None = None) -> Self:
        """Count the optimiser's updates from now on, by hooks around each of its steps; returns the clock.

        others: if several optimisers train the model, such as Muon and AdamW, name all of them in the order of their steps: the step of the last ends
        an update. model: the trained one, if it cannot be found from `predict`; probes put it into evaluation mode, and may move its parameters for
        a moment.
        """
        optimizers = tuple(attachable(each) for each in (optimizer, *others))
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}; put several into nn.ModuleList([...])")
        if self._steps is not None:
            self._steps.remove()
        self._steps = Steps(optimizers, lambda: self._waiting, self._drop_probe, self._updated)
        self._trained = Trained(optimizers, model)
        return self

    def _drop_probe(self) -> None:
        self._probe, self._paired = None, False

    def updated(self, *, skipped: bool | Tensor = False) -> None:
        """Report an optimiser update, made or `skipped`: after a graph replay, or if no optimiser is attached (a hook counts the attached one).

        skipped: was the update skipped? True may be passed after a skipped step in any loop. It may be a tensor on the device; the clock waits for
        its value only if the sampler or the base needs it now.
        """
        if self._steps is not None and self._steps.counted and (isinstance(skipped, Tensor) or not skipped):
            raise ValueError("a hook already counts the attached optimiser's updates, and clock.updated() would count them twice; remove the call")
        self._updated(skipped)

    @eager
    def _updated(self, skipped: bool | Tensor) -> None:
        if isinstance(skipped, Tensor):
            skipped = skipped.reshape(())
            if (self._probe is not None and self.sampler.must_know) or self.sampler.counts_updates or self.base.counts_updates:
                skipped = bool(skipped)
            else:
                self._skips = self._skips + (skipped > 0)
                if self._probe is not None:
                    self._probe.lost = skipped > 0
                skipped = False
        probe, self._probe, self._paired = self._probe, None, False
        if skipped:
            return
        self._check_heard()
        self._updates += 1
        self._waiting = 0
        self.weighting.updated(self._updates)
        if probe is not None and self._batch is not None:
            with telling(probe.predict, len(probe.x0)):
                self.sampler.after(probe, self._batch)
            self._remember_rows(probe)
            self._next_probe = self._updates - 1 + self.sampler.pause
        if self._advance() or probe is not None:
            self._refresh()

    def _check_heard(self) -> None:
        """Warn if batches are trained on whose loss does not come."""
        self._unheard += self._waiting > 0
        if self._heard or self._unheard != SILENT:
            return
        name, advice = type(self.sampler).__name__, "use clock.loss(b, prediction), or clock.weigh(b, errors) for errors (B,) of your own"
        if self.sampler.learns and not self.sampler.every:
            self._health.warn("unheard", f"{name} has seen no loss, so it cannot learn; {advice}")
        elif self.corrected:
            self._health.warn(
                "unheard",
                "no loss has come through clock.loss or clock.weigh; unless you multiply by b.correction yourself, nothing corrects for the times "
                f"that {name} draws more often: {advice}",
            )

    def _advance(self) -> bool:
        moved = [density.advance(self._updates) for density in (self.sampler, self.base)]
        return any(moved)

    def _refresh(self) -> None:
        # the mean weight of a corrected loss is taken under the base, so it does not depend on the sampler
        if self._mean_weight is not None and (not self.corrected or self.base.counts_updates):
            self._mean_weight.set_(self._measure_mean())

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The attached optimisers."""
        return self._trained.optimizers

    @property
    def updates(self) -> int:
        """Optimiser updates so far. Reading it may synchronise if a GradScaler drives a fused optimiser."""
        return self._updates - int(self._skips)

    @property
    def due(self) -> bool:
        """Is a probe due in this step? Never for a fixed sampler."""
        if self.sampler.every == 0 or self._updates < self._next_probe:
            return False
        if self.sampler.must_know:  # all ranks read the device here; the probe of such a sampler costs far more
            self._updates, self._skips = self.updates, 0
        return self._updates >= self._next_probe

    @eager
    def probe(self, x0: Tensor, predict: Predict, cond: Any = None) -> None:
        """Let the sampler measure the model on x0 (B, ...) before the coming update; `updated` lets it measure again.

        `draw` does this when a probe is due. Around a captured graph call it yourself: `if clock.due: clock.probe(x0, model)`, replay, `updated()`.
        If the batch is too small for the sampler, as the last of an epoch may be, nothing is measured and the probe stays due.
        """
        if self._too_small(x0):
            return
        modules, others = self._trained.modules(predict)
        # the probe's own noise, seeded by the update count: training must not depend on how often the model is probed
        generator = torch.Generator(x0.device).manual_seed(self._chance.seed_of("probe", self._updates))
        noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=at_least_float32(x0))
        autocast = autocast_dtype(x0.device) or self._autocast
        self._drop_probe()  # until the probe has succeeded: if the model raises an error, the user may continue training
        probe = Probe(
            predict, self.schedule, self.objective, x0, cond, noise=noise, modules=modules, others=others, autocast=autocast,
            rows=self.probe_rows, optimizers=self.optimizers, seed=self._chance.seed_of("sampler", self._updates),
        )  # fmt: skip
        self._trained.check(probe, self._health)
        with telling(predict, len(x0)):
            self.sampler.before(probe)
        self._remember_rows(probe)
        self._probe = probe

    def _remember_rows(self, probe: Probe) -> None:
        if probe.lowered:  # memory ran out, and would run out again at the next probe
            self.probe_rows = min(probe.lowered)

    def _too_small(self, x0: Tensor) -> bool:
        least = self.sampler.least_batch
        # the smallest batch of all ranks, because all ranks must make the same decision
        if least == 1 or ranks.least(len(x0), x0.device) >= least:
            self._put_off = 0
            return False
        self._put_off += 1
        if self._put_off == TOO_SMALL:
            raise ValueError(
                f"{type(self.sampler).__name__} needs batches of at least {least} samples on every rank to probe the model, but the last "
                f"{TOO_SMALL} were smaller; use larger batches or another sampler"
            )
        return True

    def _before_update(self, x0: Tensor, predict: Predict | None, cond: Any) -> None:
        self._waiting += 1
        if self._waiting == PATIENCE and self.sampler.needs_updates:
            warn(
                f"{PATIENCE} batches were drawn and no optimiser update was seen, so the density of {type(self.sampler).__name__} does not change; "
                "call clock.attach(optimizer), or clock.updated() after each update"
            )
        # The probe's batch contributes nothing to the coming update: a GradScaler has skipped its step, for which there is no other sign unless the
        # optimiser is fused. Otherwise this is one more batch of the same update.
        if self._paired and self._steps is not None and not self._steps.inside and no_gradients(self.optimizers, x0.device):
            self._drop_probe()
        if self.due and self._probe is None:
            if predict is None:
                raise ValueError(f"{type(self.sampler).__name__} probes the model: pass it as clock.draw(x0, predict=model)")
            self.probe(x0, predict, cond)

    # --- plots --------------------------------------------------------------------------------------------------------------------------

    def plot_data(self, points: int = 1000) -> PlotData:
        """p, w and the effective weight over time, at the schedule's steps or at `points` times."""
        time = self.schedule.grid(points)
        if isinstance(self.schedule, Discrete):
            step, steps = torch.arange(self.schedule.steps, device="cpu"), self.schedule.steps
            p, base = (density.log_pmf(step, steps).exp() * steps for density in (self.sampler, self.base))
        else:
            p, base = self.sampler.log_prob(time).exp(), self.base.log_prob(time).exp()
        w = self.weighting(self.schedule, time, self.objective)
        if self._mean_weight is not None:
            w = w / self._mean_weight.values
        curves = time, self.schedule.log_snr(time), p, w, (base if self.corrected else p) * w
        return PlotData(*(curve.numpy() for curve in curves))

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs: nested dicts of tensors, numbers and strings."""
        return {
            "version": VERSION,
            "setup": self._setup(),
            "updates": self.updates,
            "skips": int(self._skips),
            "next_probe": self._next_probe,
            # a probe that is due right after loading must use the same autocast as before; "" for none
            "autocast": str(self._autocast or "").removeprefix("torch."),
            "record": self.record.state_dict(),
            "sampler": self.sampler.state_dict(),
            "weighting": self.weighting.state_dict(),
            **self._chance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state. A state that is incomplete or belongs to another set-up is refused, and nothing is changed.

        If rank, number of ranks and device type are the same, the noise continues exactly where it was; otherwise it starts a new stream. Times
        continue in both cases.
        """
        self._check_state(state)
        updates, skips, next_probe = int(state["updates"]), int(state.get("skips", 0)), int(state["next_probe"])
        before = self.sampler.state_dict()
        try:
            self.sampler.load_state_dict(state["sampler"])
            self.weighting.load_state_dict(state.get("weighting", {}))  # if this raises, the weighting is unchanged
        except Exception:
            self.sampler.load_state_dict(before)
            raise
        self.record.load_state_dict(state["record"])
        self._updates, self._skips, self._next_probe = updates + skips, skips, next_probe
        self._autocast = AUTOCAST[state.get("autocast", "")]
        self._chance.load_state_dict(state)
        self._trained.forget()
        self._probe, self._batch, self._paired = None, None, False
        self._advance()
        self._refresh()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or (missing := STATE - set(state)):
            lacks = f"{', '.join(sorted(missing))} missing" if isinstance(state, Mapping) else f"it is {state!r}"
            raise ValueError(f"this is not a complete state of a Clock: {lacks}")
        for part in ("setup", "record", "sampler", "noise"):
            if not isinstance(state[part], Mapping):
                raise ValueError(f"this is not a complete state of a Clock: its {part} is {state[part]!r}")
        if state["version"] != VERSION:
            raise ValueError(f"the state has version {state['version']}, but this library reads version {VERSION} only")
        for part, mine in self._setup().items():
            theirs, mine = str(state["setup"].get(part)), str(mine)
            if not alike(theirs, mine):
                theirs, mine = told_apart(theirs, mine)
                raise ValueError(f"the state belongs to another clock: its {part} is {theirs}, this one's is {mine}")
        choose("autocast of the state", state.get("autocast", ""), AUTOCAST)
        self._chance.check(state)
        self.record.check(state["record"])

    def _setup(self) -> dict[str, Any]:
        parts = {name: without_address(repr(getattr(self, name))) for name in ("schedule", "sampler", "weighting", "objective", "base")}
        return {**parts, "corrected": self.corrected, "seed": self.seed}

    # --- ranks and random numbers -------------------------------------------------------------------------------------------------------

    def place(self) -> tuple[int, int]:
        """This process's rank and the number of ranks."""
        return self._chance.place()

    def generator(self, device: torch.device) -> torch.Generator:
        """This rank's noise generator. Register it with a CUDA graph that captures `draw`: `graph.register_generator_state(...)`."""
        return self._chance.generator(device)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: references to the optimiser, the model and the current step are left out. Attach the copy again."""
        return {**self.__dict__, "_steps": None, "_trained": Trained(), "_probe": None, "_batch": None, "_paired": False}


def _capturing(x0: Tensor) -> bool:
    return x0.is_cuda and torch.cuda.is_current_stream_capturing()
