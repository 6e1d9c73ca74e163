"""Adaptive non-uniform timestep sampling (2411.09998): a policy that learns which times make an update useful.

Every `every` updates the loss is measured before and after one update. δ_τ = L_τ(θ_k) - L_τ(θ_{k+1}) with L_τ = c_τ·‖eps - eps_θ‖² is the decrease
of the variational bound's term at τ, in bits per dimension; Δ, the mean of δ_τ over all τ, is the value of the update. For each x0 of the batch Δ is
estimated by Δ̃, the mean of δ_τ over the few times S that predict Δ best, and the policy takes one REINFORCE step:

    ascend  E[A·ln π(t|x0)] + β·H(π),    A = Δ̃, or (Δ̃ - its running mean) / its running standard deviation.

Most of Δ̃ is the effect of the whole batch's update, and little of it that of the sample itself. So the baseline is a mean over past probes: a mean
over the batch would remove exactly the first part. And times are drawn independently, not stratified: stratified batches all have the same
composition, so the policy could not learn whether batches with more of some times do better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from noiseclock.core import ranks
from noiseclock.core.batch import Batch, Draw
from noiseclock.core.checks import choose, take_finite, take_positive, take_whole
from noiseclock.core.conditioning import take_rows
from noiseclock.core.health import LEAST_ESS, Health
from noiseclock.core.later import Later
from noiseclock.core.policy import BetaCells, Policy, draw_cells
from noiseclock.core.probes import Probe
from noiseclock.core.samplers import TINY, Sampler, Setting, take_uniforms, unit_time
from noiseclock.core.schedules import Betas, Discrete, Linear, Quadratic
from noiseclock.core.selection import SELECTORS, Queue, r_squared
from noiseclock.core.table import Table, cell, lasting, wide
from noiseclock.core.weightings import VLB

CELLS = 1000  # cells of time if the schedule has no steps
VARIANTS = ("paper", "scaled", "released")
STARVED = 0.02  # a time is starved if its density is below this share of the uniform density
MEMORY = 0.9  # decay of the running mean and spread of the reward, per probe
STATE = {"probes", "skipped", "chance", "reward", "mean", "queue", "shape", "policy", "optimizer"}


@dataclass(eq=False)
class Adaptive(Sampler):
    """The paper's sampler. Defaults are its settings: f_S = 40, |S| = 3, |Q| = 20, entropy 0.01, policy learning rate by schedule.

    Choose it to reproduce the paper; our measurements favour VarianceOptimal (docs/choose.md). A probe takes 2·|S| + 2·T/B forward passes of a batch
    of size B. With 1000 steps, batches of 128 and these defaults, training takes 1.15 to 1.2 times as long (docs/performance.md); see `cheap`.

    every: f_S, optimiser updates between probes. count: |S|. select: how S is chosen, "f" (the paper's F statistic), "greedy" (forward
    selection) or "all" (every time of the grid for every x0: the exact Δ). queue: |Q|. stride: the probe grid has every `stride`-th step. entropy: β.
    lr: learning rate of the policy's Adam; None means 0.01 on the linear and quadratic schedules, 0.001 on others. floor: share of the uniform
    density in p, so that every time can be drawn. hidden: width of the policy's two hidden layers.

    variant "paper": the printed algorithm, with the same noise before and after. It stays near uniform: raw rewards are small against the entropy.
    variant "scaled" (`Adaptive.scaled()`): ours; rewards centred and scaled by their running mean and spread. It learns, but may collapse.
    variant "released" (`Adaptive.released()`): the authors' code made runnable: fresh noise after the update, δ summed over S, and the entropy
    inside the reward, where it multiplies ln π. (Dropout, which stays on in that code, is off here.)
    """

    every: int = 40
    count: int = 3
    select: str = "f"
    queue: int = 20
    stride: int = 1
    entropy: float = 0.01
    lr: float | None = None
    floor: float = 0.001
    hidden: int = 128
    variant: str = "paper"

    probes: int = field(init=False, repr=False, default=0)
    _setting: Setting | None = field(init=False, repr=False, default=None)

    stratified = False

    @classmethod
    def paper(cls, **changes: Any) -> Self:
        """The printed algorithm, the same as `Adaptive()`."""
        return cls(**{"variant": "paper", **changes})

    @classmethod
    def scaled(cls, **changes: Any) -> Self:
        """With scaled rewards, which the entropy does not dominate, and a larger floor: it learns, while the printed algorithm hardly moves."""
        return cls(**{"variant": "scaled", "floor": 0.05, **changes})

    @classmethod
    def released(cls, **changes: Any) -> Self:
        """The algorithm of the authors' code, made runnable."""
        return cls(**{"variant": "released", **changes})

    @classmethod
    def cheap(cls, **changes: Any) -> Self:
        """A tenth of the probe grid, and a quarter of the probes: under 2 % more passes of the model than with a fixed sampler, at batches of 128."""
        return cls(**{"every": 160, "stride": 10, **changes})

    def __post_init__(self) -> None:
        take_whole(self, "every", "count", "stride", "hidden", least=1)
        take_whole(self, "queue", least=3)
        take_finite(self, "entropy", "floor")
        if self.lr is not None:
            take_positive(self, "lr")
        choose("way to select times", self.select, SELECTORS)
        choose("Adaptive variant", self.variant, VARIANTS)
        if not 0 < self.floor < 1:
            raise ValueError(f"Adaptive: floor must lie between 0 and 1, so that every time can be drawn, got {self.floor}")

    @property
    def must_know(self) -> bool:
        return False

    # --- binding to a clock -------------------------------------------------------------------------------------------------------------

    def bind(self, setting: Setting) -> Self:
        bound = replace(self)  # a copy for this clock: two clocks must not share what they learn
        bound._bind(setting)
        return bound

    def _bind(self, setting: Setting) -> None:
        self._setting = setting
        schedule = setting.schedule
        if self.cells < 3:
            raise ValueError(f"Adaptive compares at least three times, but the schedule has only {self.cells} steps; use another sampler")
        if self.stride > self.cells // 3:
            raise ValueError(f"Adaptive: stride {self.stride} leaves fewer than three of {self.cells} times to probe; lower `stride`")
        grid = (torch.arange(self.stride // 2, self.cells, self.stride, device="cpu", dtype=torch.float64) + 0.5) / self.cells
        if self.count > len(grid):
            raise ValueError(f"Adaptive: count is {self.count}, but the probe grid has only {len(grid)} times; lower `count` or `stride`")
        self._beta = BetaCells(self.cells)
        self._grid = Table(grid)
        # in bits per dimension and step, which the entropy coefficient is tuned for; in continuous time the bound is per unit of time, which has
        # as many cells as the policy
        self._bits = Table(VLB()(schedule, grid, setting.objective) / math.log(2) / (CELLS if schedule.steps is None else 1))
        self._mean = Table(torch.full((self.cells,), 1 / self.cells, dtype=torch.float64, device="cpu"))
        self._queue = Queue(self.queue, len(grid), self.count, self.select)
        self._health = Health()
        self._skipped, self._chance = 0, 0
        self._reward = torch.zeros(3, dtype=torch.float64, device="cpu")  # running count, sum and sum of squares
        self._shape: tuple[int, ...] = ()  # of a sample; () until one is known
        self._policy: Policy | None = None
        self._optimizer: torch.optim.Adam | None = None
        self._saved: Mapping[str, Any] | None = None
        self._before: tuple[Tensor, Tensor] | None = None
        self._told: Later | None = None

    @property
    def _bound(self) -> Setting:
        if self._setting is None:
            raise ValueError("Adaptive learns from a Clock: use it as nc.Clock(schedule, nc.Adaptive(), ...)")
        return self._setting

    @property
    def cells(self) -> int:
        """The number of time cells, each with a probability of its own: the schedule's steps, or a fine grid in continuous time."""
        return self._bound.schedule.steps or CELLS

    @property
    def learning_rate(self) -> float:
        """The learning rate of the policy."""
        if self.lr is not None:
            return self.lr
        schedule = self._bound.schedule
        if isinstance(schedule, Betas):  # a diffusers scheduler's, which may be linear too; float32 rounds them by 6e-8
            return 0.01 if np.allclose(schedule.betas, np.linspace(schedule.betas[0], schedule.betas[-1], schedule.steps), rtol=1e-6) else 0.001
        return 0.01 if type(schedule) in (Linear, Quadratic) else 0.001

    def _policy_for(self, x0: Tensor) -> Policy:
        shape = tuple(x0.shape[1:])
        if shape != (self._shape or shape):
            raise ValueError(f"this Adaptive has learned on samples of shape {self._shape}, got {shape}; use a new clock for another shape")
        if self._policy is None:
            self._shape, policy = shape, self._new_policy(shape)
            with lasting():
                self._policy = policy.to(x0.device)
            self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=self.learning_rate, fused=True)
            if self._saved is not None:
                self._restore(self._saved)
        return self._policy

    def _new_policy(self, shape: tuple[int, ...]) -> Policy:
        """A policy that has learned nothing, on the host: the same weights on every rank, float32 whatever torch's default dtype is."""
        with lasting(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(0)  # only the host's generator: torch.manual_seed would seed those of all GPUs too
            return Policy(shape, self.hidden).float()

    # --- the density --------------------------------------------------------------------------------------------------------------------

    def _pmf(self, x0: Tensor) -> Tensor:
        """(B, n) the probability of every cell for every sample, floor included; differentiable if gradients are enabled."""
        return (1 - self.floor) * self._beta.mass(self._policy_for(x0)(x0.detach())) + self.floor / self.cells

    @torch.no_grad()
    def sample(self, n: int, *, x0: Tensor | None = None, uniforms: Tensor | None = None, generator: torch.Generator | None = None) -> Draw:
        v = take_uniforms(n, x0, uniforms, generator)
        schedule = self._bound.schedule
        pmf = self._mean_on(v.device).expand(n, -1) if x0 is None else self._pmf(x0)
        time, mass = draw_cells(pmf, v)
        log_pmf = mass.log()  # finite, because of the floor
        return Draw(time, log_pmf + math.log(self.cells), log_pmf if isinstance(schedule, Discrete) else None)

    @torch.no_grad()
    def log_prob(self, time: Tensor, *, x0: Tensor | None = None) -> Tensor:
        index = cell(unit_time(time), self.cells)
        pmf = self._mean_on(time.device)[index] if x0 is None else self._pmf(x0).gather(1, index[:, None])[:, 0]
        return (pmf * self.cells).clamp(min=TINY).log()

    @torch.no_grad()
    def log_pmf(self, step: Tensor, steps: int, *, x0: Tensor | None = None) -> Tensor:
        # the mass of the step's interval; the density is constant within each cell
        pmf = self._mean_on(step.device).expand(len(step), -1) if x0 is None else self._pmf(x0)
        lo, hi = step.to(pmf.dtype) * (self.cells / steps), (step + 1).to(pmf.dtype) * (self.cells / steps)
        edges = torch.arange(self.cells, device=step.device, dtype=pmf.dtype)
        overlap = (torch.minimum(hi[:, None], edges + 1) - torch.maximum(lo[:, None], edges)).clamp(min=0)
        return (pmf * overlap).sum(1).clamp(min=TINY).log()

    # --- learning -----------------------------------------------------------------------------------------------------------------------

    @property
    def selected(self) -> Tensor:
        """(|S|,) the selected times S."""
        self._settle()
        return self._grid.values[self._queue.selected]

    @property
    def skipped(self) -> int:
        """The number of rewards left out: not finite, or of an update that a fused optimiser skipped."""
        self._settle()
        return self._skipped

    @property
    def info(self) -> dict[str, Any]:
        """Probes so far, how well S predicts Δ (R² and its F statistic), the times of S, the entropy of the mean density, skipped rewards."""
        mean = self._mean_on(torch.device("cpu"))
        entropy = -(mean * mean.clamp(min=TINY).log()).sum().item() - math.log(self.cells)
        return {
            "probes": self.probes,
            "r_squared": self._queue.r_squared,
            "f": self._queue.f,
            "selected": self.selected.tolist(),
            "entropy": entropy,
            "skipped": self.skipped,
        }

    def before(self, probe: Probe) -> None:
        self._settle()
        self._before = self._measure(probe)

    def after(self, probe: Probe, batch: Batch) -> None:
        if self._before is None:
            return
        if self.variant == "released":
            generator = torch.Generator(probe.noise.device).manual_seed(probe.seed)
            probe.noise = torch.randn(probe.noise.shape, generator=generator, device=probe.noise.device, dtype=probe.noise.dtype)
        (batch_before, row_before), self._before = self._before, None
        batch_after, row_after = self._measure(probe)
        fall = batch_before - batch_after  # (|S|, B)
        reward = fall.sum(0) if self.variant == "released" else fall.mean(0)
        lost = torch.zeros((), dtype=torch.bool, device=reward.device) if probe.lost is None else probe.lost
        usable = reward.isfinite() & ~lost
        assert batch.draw is not None
        mean, square = self._learn(probe.x0, batch.draw, reward, usable, lost)
        self._told = Later(torch.cat([mean, square, torch.stack([(~usable).sum(), lost]), row_before - row_after]))
        self.probes += 1
        if not reward.is_cuda:
            self._settle()

    def _settle(self) -> None:
        """Read the last probe's results on the host. On a GPU this is delayed until they are needed, because waiting would leave the device idle."""
        self._bound  # noqa: B018  # raises if there is no clock to learn from
        if self._told is None:
            return
        told, self._told = self._told.read().double(), None
        mean, (square, skipped, lost), row = told[: self.cells], told[self.cells : self.cells + 3], told[self.cells + 3 :]
        self._skipped += int(skipped)
        if self.select != "all" and not lost:
            self._queue.push(row)
        self._look(mean, 1 / float(square))
        self._mean.set_(mean)

    def _mean_on(self, device: torch.device) -> Tensor:
        """(n,) the mean density over the last batch that was probed."""
        self._settle()
        return self._mean.on(device)

    def _measure(self, probe: Probe) -> tuple[Tensor, Tensor]:
        """L_τ in bits per dimension: at S for every x0 of the batch, (|S|, B), and at every τ of the grid for one x0, (G,)."""
        device, size = probe.x0.device, len(probe.x0)
        grid, bits = self._grid.on(device), self._bits.on(device)
        selected = self._queue.selected.to(device, non_blocking=True)
        rows, time = torch.arange(size, device=device).repeat(len(selected)), grid[selected].repeat_interleave(size)
        if self.select == "all":
            losses = probe.losses(time, rows)
            whole = losses.new_empty(0)
        elif ranks.active():
            losses, whole = probe.losses(time, rows), self._whole_grid(probe) * bits
        else:  # both in one call: fewer and fuller forward passes
            noise_rows = torch.arange(len(grid), device=device) % size
            one = torch.full_like(noise_rows, self.probes % size)
            found = probe.losses(torch.cat([time, grid]), torch.cat([rows, one]), torch.cat([rows, noise_rows]))
            losses, whole = found[: len(rows)], found[len(rows) :] * bits
        return losses.view(len(selected), size) * bits[selected, None], whole

    def _whole_grid(self, probe: Probe) -> Tensor:
        """(G,) the loss of one x0 of rank 0 at every time of the grid; the times are divided among the ranks."""
        device = probe.x0.device
        size = ranks.least(len(probe.x0), device)  # the last batch of an epoch may differ in size between ranks
        row = torch.full((1,), self.probes % size, device=device)
        x0, noise = ranks.from_first(probe.x0[row]), ranks.from_first(probe.noise[:size])
        cond = ranks.anything_from_first(take_rows(probe.cond, row, len(probe.x0)), device)
        alone = Probe(
            probe.predict, probe.schedule, probe.objective, x0, cond, noise=noise, modules=probe.modules, others=probe.others,
            autocast=probe.autocast, rows=None if probe.rows >= size else probe.rows, seed=probe.seed,
        )  # fmt: skip
        alone.lowered = probe.lowered
        grid = self._grid.on(device)
        # shares follow the process group that gathers them, not the `rank` and `world_size` given to the clock
        share = math.ceil(len(grid) / ranks.count())
        mine = (torch.arange(share, device=device) + ranks.mine() * share) % len(grid)
        losses = alone.losses(grid[mine], torch.zeros_like(mine), mine % size)
        probe.rows = min([probe.rows, *probe.lowered])  # lower if memory ran out
        return torch.cat(ranks.gathered(losses))[: len(grid)]

    def _learn(self, x0: Tensor, draw: Draw, reward: Tensor, usable: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
        """One policy step, with the same gradient on every rank; returns the new mean density (n,) over the batch, and E_p[(base/p)²] (1,)."""
        policy = self._policy_for(x0)
        assert self._optimizer is not None
        advantage = self._advantage(torch.where(usable, reward, 0.0), usable.to(reward.dtype))
        with torch.enable_grad():
            pmf = self._pmf(x0)
            log_p = pmf.gather(1, cell(draw.time, self.cells)[:, None])[:, 0].clamp(min=TINY).log()
            # in a Mixture or an Annealed times are drawn from p, not from π: π/p makes the mean one over π again; alone it is exactly 1
            ratio = (log_p.detach() + math.log(self.cells) - draw.log_prob).exp()
            entropy = -(pmf * pmf.clamp(min=TINY).log()).sum(1) - math.log(self.cells)  # 0 for the uniform
            if self.variant == "released":
                # of the density, as in that code: the entropy, not only its factor, has a gradient here, so a constant in ln π counts
                gain = ((advantage + self.entropy * entropy) * usable * ratio * (log_p + math.log(self.cells))).mean()
            else:
                gain = (advantage * usable * ratio * log_p).mean() + self.entropy * entropy.mean()
            gradients = torch.autograd.grad(-gain, list(policy.parameters()))
        grads = [g.detach().clone() for g in gradients]
        ranks.average_(grads)
        for p, g in zip(policy.parameters(), grads, strict=True):
            p.grad = g
        norm = nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        # a fused optimiser reads this, and skips the step if it is not 0
        self._optimizer.found_inf = (~norm.isfinite() | lost).float()  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            pmf = self._pmf(x0)
            # 1/square is the effective sample size of a corrected loss, as a share of the batch
            mean, square = pmf.mean(0), (self._base(pmf.device).square() / pmf).sum(1).mean().reshape(1)
            ranks.average_([mean, square])
        return mean, square

    def _base(self, device: torch.device) -> Tensor:
        """(n,) the probabilities of the cells under the base."""
        base = self._bound.base.log_pmf(torch.arange(self.cells, device=device), self.cells).exp()
        return base / base.sum()

    def _advantage(self, reward: Tensor, usable: Tensor) -> Tensor:
        """The advantage of REINFORCE: the raw reward; in "scaled" centred and scaled by the running statistics of past probes on all ranks."""
        if self.variant != "scaled":
            return reward
        now = ranks.total(torch.stack([usable.sum(), reward.sum(), reward.square().sum()])).to(wide(reward.device))
        self._reward = self._reward.to(now)
        any_usable = now[0] > 0
        count, total, squares = torch.where(self._reward[0] > 0, self._reward, now)
        self._reward = torch.where(any_usable, MEMORY * self._reward + (1 - MEMORY) * now, self._reward)
        mean = total / count
        spread = (squares / count - mean**2).clamp(min=0).sqrt().clamp(min=1e-30)
        return torch.where(any_usable, (reward - mean) / spread, reward).to(reward.dtype)

    # --- health -------------------------------------------------------------------------------------------------------------------------

    def _look(self, mean: Tensor, ess: float) -> None:
        if self._bound.corrected and ess < LEAST_ESS:
            self._health.warn(
                "ess",
                f"Adaptive: the importance weights leave an effective sample size of {ess:.1%} of the batch, so a few samples decide each gradient. "
                f"Raise `floor`, now {self.floor:g}.",
            )
        free = ((mean - self.floor / self.cells) / (1 - self.floor)).clamp(min=0)  # the policy without its floor
        if free.sort(descending=True).values[: max(self.cells // 20, 1)].sum() > 0.99:
            self._health.warn(
                "collapse",
                "the sampling policy has collapsed: 99 % of its mass lies in 5 % of the times. Raise `entropy` or `floor`, or lower `lr`.",
            )
        if (mean - self._mean.values).abs().sum() / 2 > 0.3:
            self._health.warn(
                "jump",
                "the sampling density moved by more than 30 % in one step. The policy's learning rate is too high: lower `lr`, "
                f"now {self.learning_rate:g}.",
            )
        starved = (mean * self.cells < STARVED).double().mean().item()
        if starved > 0.05:
            self._health.warn(
                "starved",
                f"{starved:.0%} of the times are drawn less than {STARVED:.0%} as often as under uniform sampling: the model hardly sees them. "
                "Raise `floor`.",
            )
        self._look_at_selection()

    def _look_at_selection(self) -> None:
        rows = self._queue.rows
        if self.select == "all" or len(rows) < self.queue:
            return
        if not rows.any():
            self._health.warn(
                "prices",
                f"Adaptive: in {self.queue} probes the optimiser's updates changed no loss, so nothing can be learned; pass the model that it trains "
                "as predict=, not a copy of it such as averaged weights",
            )
            return
        generator = torch.Generator("cpu").manual_seed(0)
        random = torch.stack([torch.randperm(rows.shape[1], generator=generator, device="cpu")[: self.count] for _ in range(20)])
        by_chance = r_squared(rows, random).sort().values[10]
        self._chance = self._chance + 1 if not self._queue.r_squared > by_chance else 0
        if self._chance >= 5:
            self._health.warn(
                "selection",
                f"for five probes the {self.count} selected times predicted the mean over all times no better than random ones "
                f"(R² {self._queue.r_squared:.2f}). Raise `count` or `queue`, or use select='greedy'.",
            )

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        state: dict[str, Any] = {
            "probes": self.probes,
            "skipped": self._skipped,
            "chance": self._chance,
            "reward": self._reward.cpu().double(),
            "mean": self._mean.values.clone(),
            "queue": self._queue.state_dict(),
        }
        if self._policy is None or self._optimizer is None:
            kept = self._saved or {"shape": [], "policy": {}, "optimizer": {}}
            return {**state, **{name: kept[name] for name in ("shape", "policy", "optimizer")}}
        moments = self._optimizer.state_dict()["state"]
        return {
            **state,
            "shape": list(self._shape),
            "policy": {name: value.detach().clone() for name, value in self._policy.state_dict().items()},
            "optimizer": {f"{i}.{name}": value.detach().clone() for i, moment in moments.items() for name, value in moment.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._bound  # noqa: B018
        if set(state) != STATE:
            raise ValueError(f"Adaptive: its state must hold {sorted(STATE)}, got {sorted(state)}")
        self._queue.check(state["queue"])
        if not isinstance(state["mean"], Tensor) or state["mean"].shape != self._mean.values.shape:
            raise ValueError(f"Adaptive: the density in the state must have {self.cells} times")
        if shape := tuple(state["shape"]):
            if self._policy is not None and shape != self._shape:
                raise ValueError(f"this Adaptive has learned on samples of shape {self._shape}, the state's on {shape}; use a new clock")
            with torch.device("meta"):
                wanted = Policy(shape, self.hidden).state_dict()
            if {n: v.shape for n, v in wanted.items()} != {n: v.shape for n, v in state["policy"].items()}:
                raise ValueError("Adaptive: the policy network in the state has other layer sizes than this one; `hidden` must be the same")
            moments = {name: value for name, value in state["optimizer"].items() if not name.endswith(".step")}
            if any(value.shape != list(wanted.values())[int(name.partition(".")[0])].shape for name, value in moments.items()):
                raise ValueError("Adaptive: the state is damaged: its policy's optimiser does not fit the policy")
        else:
            moments = {}
        if not all(bool(value.isfinite().all()) for value in (state["mean"], state["reward"], *state["policy"].values(), *moments.values())):
            raise ValueError("Adaptive: the state is damaged: it holds numbers that are not finite")
        self.probes, self._skipped, self._chance = int(state["probes"]), int(state["skipped"]), int(state["chance"])
        self._reward = state["reward"].clone()
        self._queue.load_state_dict(state["queue"])
        self._mean.set_(state["mean"])
        self._before = self._told = None
        self._saved = dict(state)
        if self._policy is not None:
            self._restore(self._saved)
        else:
            self._shape = shape

    def _restore(self, state: Mapping[str, Any]) -> None:
        assert self._policy is not None
        assert self._optimizer is not None
        self._saved = None
        # a state of before the first draw has no policy: it takes a policy that has learned since back to the start
        self._policy.load_state_dict(state["policy"] if state["shape"] else self._new_policy(self._shape).state_dict())
        moments: dict[int, dict[str, Tensor]] = {}
        for key, value in state["optimizer"].items():
            i, name = key.split(".")
            moments.setdefault(int(i), {})[name] = value.clone()
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
