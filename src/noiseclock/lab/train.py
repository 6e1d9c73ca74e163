"""Training as a generator: it yields one record per update and writes everything else into the run's folder.

    for record in train(recipe("digits"), "runs/digits"):
        print(record.step, record.loss)

The folder holds config.json, log.jsonl, checkpoints/, samples/ and tensorboard/. The same call again resumes from the last checkpoint: on one CPU
the result is, bit for bit, that of an uninterrupted run. Under `torchrun` or `accelerate launch` the same call trains on many processes, with DDP,
or with FSDP2 if `shard` is set; rank 0 writes.

Order and flips of the images, dropped labels and times depend on (seed, update) only. Noise and dropout come from generators whose states are saved.
"""

from __future__ import annotations

import json
import math
import signal
import time
import warnings
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from noiseclock.core.batch import call
from noiseclock.core.uncertainty import Uncertainty
from noiseclock.integrations.trackers import track
from noiseclock.lab import checkpoint, pictures
from noiseclock.lab.autoencoder_settings import refuse_autoencoder
from noiseclock.lab.built import loaded, network, optimizer_for, placed, sampled, told_held_out
from noiseclock.lab.captions import refuse_other_encoder
from noiseclock.lab.captured import CapturedForward, CapturedUpdate, Numbers, why_not_captured
from noiseclock.lab.data import batches, outlined, refuse_other_count, refuse_other_latents
from noiseclock.lab.ema import EMA
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import Log, difference, lock, refuse_comparison, refuse_encoded, write_json, writing
from noiseclock.lab.half import HalfWeights
from noiseclock.lab.interrupt import Wish, listening
from noiseclock.lab.latents import Latents
from noiseclock.lab.moments import by_size, load_moments, moments
from noiseclock.lab.order import uniforms
from noiseclock.lab.processes import all_or_none, joined, leave
from noiseclock.lab.random_state import random_state, set_random_state
from noiseclock.lab.recipes import FREE, Recipe, completed
from noiseclock.lab.shards import blocks, fill_, whole
from noiseclock.lab.sources import refuse_among
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.validation import validation
from noiseclock.lab.wording import state_of

GRID = 64  # samples in one grid
PROBED = 4  # batches per forward pass of a captured probe: without gradients, four take less memory than an update with one
LOOK = 100  # a captured training reads its loss from the device at least every so many updates


@dataclass(frozen=True)
class Record:
    """One update.

    step: its number, from 1. loss: the mean weighted loss over all ranks. norm: of the gradient, before clipping. lr: the learning rate. images:
    seen so far by all ranks. seconds: training time so far, without validation, samples, checkpoints and compiling. skipped: updates skipped so far
    because the loss or its gradient was not finite. sampler: what the sampler has learned, in words, as of the last logged update. If updates are
    captured (`lab/captured.py`), loss, norm and skipped are also those of the last update at which they were read.
    """

    step: int
    loss: float
    norm: float
    lr: float
    images: int
    seconds: float
    skipped: int
    sampler: str = ""


def train(recipe: Recipe, folder: str | Path, *, device: str | None = None, shard: bool = False) -> Generator[Record, None, None]:
    """Train into `folder`, or resume the training there; yields after every update.

    device: "cpu" or "cuda"; None takes a GPU if there is one. shard: spread the model over the ranks (FSDP2). Ctrl-C and SIGTERM finish the current
    update and save a checkpoint; then Ctrl-C raises KeyboardInterrupt, SIGTERM SystemExit(143). Closing the generator also saves a checkpoint.
    """
    with ExitStack() as stack:
        accelerator = joined(Path(folder), device, recipe.track)
        stack.callback(leave, accelerator)
        with all_or_none(accelerator):
            if accelerator.is_main_process:
                stack.enter_context(lock(folder))
        run = Run(recipe, Path(folder), accelerator, shard)
        stack.callback(run.close)
        yield from run.updates(stack.enter_context(listening()))


class Run:
    """One training: its data, network, clock and optimiser, and its progress."""

    def __init__(self, recipe: Recipe, folder: Path, accelerator: Accelerator, shard: bool) -> None:
        self.recipe, self.folder, self.accelerator = recipe, folder, accelerator
        self.device: torch.device = accelerator.device
        self.rank: int = accelerator.process_index
        self.world: int = accelerator.num_processes
        parts = self.world * recipe.accumulate
        if recipe.batch % parts:
            raise Mistake(f"a batch of {recipe.batch} cannot be shared by {self.world} processes with {recipe.accumulate} micro-batches each")
        self.data, self.held_out = loaded(recipe, accelerator)
        if isinstance(self.data, Latents):
            self.data.check(flip=recipe.flip)  # before anything is written
        refuse_among(recipe.data, folder)
        refuse_encoded(folder)
        refuse_comparison(folder)
        self.clock = recipe.clock(rank=self.rank, world_size=self.world)
        torch.manual_seed(recipe.seed)  # the same weights on every rank
        self.net = placed(network(recipe, self.data, self.clock), self.device)
        if recipe.pretrained and not checkpoint.steps(folder):
            self._start_from(Path(recipe.pretrained))
        torch.manual_seed(recipe.seed * 1000 + self.rank)  # for dropout: different on every rank
        self.not_captured = why_not_captured(recipe, self.device, self.world, shard)
        captured = not self.not_captured
        self._half = HalfWeights(self.net) if captured and recipe.precision == "bf16" else None
        self.predict: nn.Module = self._wrapped(shard)
        self._sharded = isinstance(self.net, FSDPModule)
        weighting = self.clock.weighting
        self.others = list(weighting.to(self.device).parameters()) if isinstance(weighting, Uncertainty) else []
        lr = torch.tensor(recipe.lr, device=self.device) if captured else recipe.lr
        groups = [group for group in (list(by_size(self.net).values()), self.others) if group]  # two groups: only the first may be sharded
        self.optimizer = optimizer_for(recipe, *groups, lr=lr, fused=True, capturable=captured)
        # kept, because after a forward pass without a backward pass a sharded network holds unsharded parameters until the next update
        self._named = [*self.net.named_parameters(), *((f"weighting.{i}", p) for i, p in enumerate(self.others))]
        self.clock.attach(self.optimizer, model=self.net)
        self.ema = EMA(self.net, recipe.ema)
        self.step, self.skipped, self.seconds = 0, 0, 0.0
        self._lost_in_a_row, self._learned, self._numbers = 0, "", Numbers(math.nan, math.nan, 0, 0)
        with all_or_none(accelerator):
            self._resume()
        self._captured = self._capturing() if captured else None

    def _start_from(self, other: Path) -> None:
        if not checkpoint.steps(other):
            raise Mistake(f"cannot start from {other}: it holds no checkpoint; give the folder of a training that has saved one")
        _, state = checkpoint.load(other)
        refuse_autoencoder(state["settings"], f"cannot start from {other}: it")
        refuse_other_encoder(self.net, state["model"])
        try:
            self.net.load_state_dict({**state["model"], **state["ema"]})
        except RuntimeError as error:  # its message lists every parameter that differs
            raise Mistake(f"cannot start from {other}: its network differs; use the same model, channels, blocks and so on") from error

    def _capturing(self) -> CapturedUpdate:
        self._seen_by_probes = CapturedForward(self.predict, exact=self.net)
        self.clock.probe_rows = PROBED * self.recipe.batch
        return CapturedUpdate(
            self._loss, self.net, self.optimizer, self.ema, clip=self.recipe.clip or math.inf, generator=self.clock.generator(self.device),
            replayed=lambda lost: self.clock.updated(skipped=lost), half=self._half, skipped=self.skipped,
        )  # fmt: skip

    def _wrapped(self, shard: bool) -> nn.Module:
        predict: nn.Module = self.net if self._half is None else self._half.net
        if shard:
            if not dist.is_initialized():
                raise Mistake("shard spreads a model over processes, but there is only one; start it with torchrun or accelerate launch")
            # accelerate's FSDP2 plugin calls this too, but takes no CPUs, on which tests shard a model over two processes
            for block in blocks(self.net):
                fully_shard(block)
            fully_shard(self.net)
        self._compiled = self.recipe.compile and self.device.type == "cuda"
        if self._compiled:
            predict = torch.compile(predict, dynamic=False)  # type: ignore[assignment]  # all batches have the same size
        if self.world > 1 and not shard:
            predict = DistributedDataParallel(predict, device_ids=[self.device.index] if self.device.type == "cuda" else None)
        return predict

    def close(self) -> None:
        """Release DDP before the process group ends: if DDP held the last reference to the group, gloo could wait forever for its own threads."""
        self.predict = self.net

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def _resume(self) -> None:
        """Resume from the last checkpoint in the folder, if there is one."""
        config = self.folder / "config.json"
        if config.exists():
            try:
                self._refuse_other(json.loads(config.read_text())["settings"])
            except (KeyError, TypeError, OSError, ValueError) as error:
                raise Mistake(f"{config} is damaged or is not that of a training; choose another folder, or remove it") from error
        if checkpoint.steps(self.folder):
            with checkpoint.reading(self.folder, lazy=("model", "ema", "optimizer")) as (self.step, state):
                self._refuse_other(state["settings"])
                self._load(state)
        steps: list[Any] = [self.step] * self.world
        if self.world > 1:
            dist.all_gather_object(steps, self.step)
        if len(set(steps)) > 1:
            raise Mistake(f"the processes see checkpoints of different steps, {steps}; put {self.folder} on a disk that all machines share")

    def _refuse_other(self, theirs: dict[str, Any]) -> None:
        both = (self.recipe.settings(), completed(theirs))
        if changes := difference(*({name: value for name, value in settings.items() if name not in FREE} for settings in both)):
            raise Mistake(f"{self.folder} holds another training; choose another folder, or make the settings alike:\n{changes}")

    def _state(self) -> dict[str, Any]:
        """What a resumed run needs; the same on every rank, except for sharded tensors."""
        mine = {"clock": self.clock.state_dict(), "random": random_state(self.device)}
        ranks: list[Any] = [mine] * self.world
        if self.world > 1:
            dist.all_gather_object(ranks, mine)
        return {
            "settings": self.recipe.settings(),
            "data": outlined(self.data),
            "model": dict(self.net.state_dict()),
            "ema": self.ema.state_dict(),
            "optimizer": {"state": moments(self.optimizer, self._named)},
            "ranks": ranks,
            "skipped": self.skipped,
            "seconds": self.seconds,
        }

    def _load(self, state: dict[str, Any]) -> None:
        refuse_other_encoder(self.net, state["model"])
        outline = state.get("data") or {}  # None in checkpoints of earlier versions
        refuse_other_latents(self.data, outline)
        refuse_other_count(self.data, outline)
        parameters = dict(self.net.state_dict())
        for name, value in state["model"].items():
            fill_(parameters[name], value)
        self.ema.load_state_dict(state["ema"])
        load_moments(self.optimizer, self._named, state["optimizer"]["state"])
        same = len(state["ranks"]) == self.world
        mine = state["ranks"][self.rank if same else 0]
        self.clock.load_state_dict(mine["clock"])  # last, so that the clock does not count the loading of the optimiser as an update
        if same:
            set_random_state(mine["random"], self.device)
        self.skipped, self.seconds = state["skipped"], state["seconds"]

    def save(self, log: Log | None) -> None:
        """Write a checkpoint; all ranks must call it."""
        if self._captured is not None:
            self.skipped = self._captured.read().skipped
        state = self._state()
        with all_or_none(self.accelerator):
            if log is not None:  # on rank 0
                log.sync()
                if not self._sharded:
                    checkpoint.save(self.folder, self.step, state)
        if self._sharded:
            checkpoint.save(self.folder, self.step, state, accelerator=self.accelerator)

    # --- the loop -----------------------------------------------------------------------------------------------------------------------

    def updates(self, wish: Wish) -> Iterator[Record]:
        """Train to the end, or until `wish` asks to stop."""
        recipe, first, saved = self.recipe, self.step, self.step
        if self._greatest(self.step > 0 and self._comes(recipe.sample_every) and not self._grid.exists()):
            self._sample()  # an earlier run was stopped before it sampled this grid
        if self.step >= recipe.updates:
            return
        log = self._begin() if self.accelerator.is_main_process else None
        stream = self._stream()
        try:
            while self.step < recipe.updates:
                wish.patient = True
                start = time.perf_counter()
                counts = self._captured.ready if self._captured is not None else self.step > first or not self._compiled
                record = self._update(stream)
                self.seconds += (time.perf_counter() - start) * counts
                logged = self._logged(record.step)
                self._learned = state_of(self.clock.sampler) if logged else self._learned
                record = replace(record, seconds=self.seconds, sampler=self._learned)
                if log is not None and logged:
                    log.write({"kind": "train", **asdict(record)})
                    self._track({"loss": record.loss, "norm": record.norm, "lr": record.lr})
                if self._comes(recipe.validate_every):
                    self._validate(log)
                stop, sample = self._greatest(wish.signal or 0), self._comes(recipe.sample_every)
                if _due(self.step, recipe.save_every) or self.step == recipe.updates or sample or stop:
                    self.save(log)
                    saved = self.step
                wish.patient = saved < self.step
                if sample and not stop:
                    self._sample()
                yield record
                if stop:
                    raise KeyboardInterrupt if stop == signal.SIGINT else SystemExit(128 + stop)
        except GeneratorExit:
            if saved < self.step:
                self.save(log)
            raise
        except torch.OutOfMemoryError as error:
            raise Failure(f"out of memory after update {self.step}; raise accumulate, lower batch, or use checkpointing or precision bf16") from error
        finally:
            stream.close()
            if log is not None:
                log.close()

    def _begin(self) -> Log:
        """Write config.json, open the log and start the trackers, before the first update."""
        settings = self.recipe.settings()
        if isinstance(self.data, Latents) and self.recipe.objective == "edm":
            warnings.warn("latents are scaled to a standard deviation of 1, but edm expects 0.5; use edm:sigma_data=1", stacklevel=2)
        if self.recipe.validate_every:
            told_held_out(self.recipe, self.held_out)
        write_json(self.folder / "config.json", {"settings": settings, "made with": surroundings(self.device, self.world)})
        with writing(self.folder):
            log = Log(self.folder / "log.jsonl")
            log.truncate_after(self.step)
            if self.device.type == "cuda":
                how = f"not captured: {self.not_captured}" if self.not_captured else "captured as one CUDA graph"
                log.write({"kind": "note", "step": self.step, "note": f"updates are {how}"})
            self.accelerator.init_trackers("noiseclock", config=_flat(settings), init_kwargs={"tensorboard": {"purge_step": self.step + 1}})
        return log

    def _track(self, values: dict[str, float]) -> None:
        with writing(self.folder):
            self.accelerator.log(values, step=self.step)

    def _stream(self) -> Any:
        recipe = self.recipe
        size = recipe.batch // (self.world * recipe.accumulate)
        flip, start = recipe.flip, self.step * recipe.accumulate
        return batches(self.data, size, seed=recipe.seed, start=start, rank=self.rank, world_size=self.world, device=self.device, flip=flip)

    def _update(self, stream: Iterator[tuple[Tensor, Tensor | None]]) -> Record:
        self.net.train()
        lr = self.recipe.lr * min(1.0, (self.step + 1) / max(self.recipe.warmup, 1))
        mean, norm = self._plain_update(stream, lr) if self._captured is None else self._fast_update(self._captured, stream, lr)
        return Record(self.step, mean, norm, lr, self.step * self.recipe.batch, 0.0, self.skipped)

    def _plain_update(self, stream: Iterator[tuple[Tensor, Tensor | None]], lr: float) -> tuple[float, float]:
        """One update on any device, with any number of micro-batches and ranks; returns the mean loss and the norm of its gradient."""
        parts = self.recipe.accumulate
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        total = torch.zeros((), device=self.device)
        for micro in range(parts):
            x0, labels = next(stream)
            with self._synchronised(micro == parts - 1):
                loss = self._loss(x0, self._condition(labels, micro), micro) / parts
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        mean, norm = self._mean(total), self._clipped()
        finite = math.isfinite(mean) and math.isfinite(norm)  # both are the same on all ranks
        if finite:
            self.optimizer.step()
        else:
            self.clock.updated(skipped=True)
        self.optimizer.zero_grad()
        self.step += 1
        self.skipped += not finite
        self._lost_in_a_row = 0 if finite else self._lost_in_a_row + 1
        self._give_up()
        if finite:
            self.ema.towards(self.ema.weight(self.step))
        return mean, norm

    def _fast_update(self, captured: CapturedUpdate, stream: Iterator[tuple[Tensor, Tensor | None]], lr: float) -> tuple[float, float]:
        """Like `_plain_update`, as one CUDA graph. Reading loss and norm waits for the device; if nothing needs them, returns those last read."""
        x0, labels = next(stream)
        cond = self._condition(labels, 0)
        if self.clock.due:
            with self.recipe.autocast(self.device):
                self.clock.probe(x0, self._seen_by_probes, cond)
        captured(x0, cond, lr=lr, averaging=self.ema.weight(self.step + 1))
        self.step += 1
        if self._looked_at(self.step):
            self._numbers = captured.read()
            self.skipped, self._lost_in_a_row = self._numbers.skipped, self._numbers.lost_in_a_row
            self._give_up()
        return self._numbers.loss, self._numbers.norm

    def _loss(self, x0: Tensor, cond: Tensor | None, micro: int = 0) -> Tensor:
        """The mean weighted loss of a batch at newly drawn times."""
        with self.recipe.autocast(self.device):
            b = self.clock.draw(x0, predict=self.predict, cond=cond, micro=(micro, self.recipe.accumulate))
            return self.clock.loss(b, call(self.predict, b.x_t, b.t, cond)).mean()

    def _logged(self, step: int) -> bool:
        return _due(step, self.recipe.log_every) or (step == 1 and self.recipe.log_every > 0)

    def _looked_at(self, step: int) -> bool:
        """Does anything need the loss, the norm or the time of this update?"""
        recipe = self.recipe
        seen = any(_due(step, every) for every in (recipe.validate_every, recipe.sample_every, recipe.save_every, LOOK))
        return seen or self._logged(step) or step == recipe.updates

    def _condition(self, labels: Tensor | None, micro: int) -> Tensor | None:
        """The condition of the model: labels (B,) or captions (B, L, D), some replaced by the null label or the empty caption."""
        if not self.recipe.conditional:
            return None
        assert labels is not None
        size = len(labels)
        first = ((self.step * self.recipe.accumulate + micro) * self.world + self.rank) * size
        dropped = uniforms(self.recipe.seed, "labels", first, size) < self.recipe.drop_labels
        dropped = dropped.to(labels.device).reshape(size, *[1] * (labels.ndim - 1))
        return torch.where(dropped, self.net.null, labels)

    def _clipped(self) -> float:
        """Clip the gradient; returns its norm before clipping."""
        if self.world > 1:
            for p in self.others:  # DDP reduces the gradients of the network only
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad /= self.world
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.clip or math.inf)
        return float(whole(norm))

    def _mean(self, x: Tensor) -> float:
        """The mean of x over all ranks."""
        if self.world > 1:
            dist.all_reduce(x)
        return float(x) / self.world

    def _give_up(self) -> None:
        """Raise a Failure if `patience` updates in a row were not finite."""
        if self._lost_in_a_row >= self.recipe.patience:
            raise Failure(
                f"the loss or its gradient was not finite for {self._lost_in_a_row} updates in a row, up to {self.step}; "
                f"{checkpoint.last_good(self.folder)}; lower lr, raise warmup, or use precision fp32"
            )

    @contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Synchronise gradients over the ranks only in the last micro-batch."""
        if self._sharded:
            self.net.set_requires_gradient_sync(last)
        no_sync = self.predict.no_sync() if isinstance(self.predict, DistributedDataParallel) and not last else nullcontext()
        with no_sync:
            yield

    def _greatest(self, number: int) -> int:
        """The maximum of `number` over all ranks, so that they agree on when to stop and what to do."""
        if self.world == 1:
            return number
        seen = torch.tensor(int(number), device=self.device)
        dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        return int(seen)

    # --- validation and samples ---------------------------------------------------------------------------------------------------------

    def averaged(self) -> Any:
        """The unsharded network with the averaged weights, in evaluation mode; None except on rank 0, but all ranks must call it."""
        weights = {}
        for name, value in {**self.net.state_dict(), **self.ema.state_dict()}.items():
            gathered = whole(value)
            if self.rank == 0:  # the other ranks only take part in the gathering
                weights[name] = gathered
        if self.rank > 0:
            return None
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            net = network(self.recipe, self.data, self.clock)
        net.load_state_dict(weights)
        return placed(net, self.device).eval()

    def _validate(self, log: Log | None) -> None:
        """Measure the averaged weights, and log that."""
        net = self.averaged()
        if log is not None:
            found = validation(self.recipe, self.clock, net, self.held_out, self.device)
            log.write({"kind": "validation", "step": self.step, "seconds": self.seconds, **found})
            self._track({"validation": found["loss"]})
            with writing(self.folder):
                for tracker in self.accelerator.trackers:
                    track(tracker, self.clock, self.step)
        self.accelerator.wait_for_everyone()

    @property
    def _grid(self) -> Path:
        return self.folder / "samples" / f"step-{self.step:08d}.png"

    def _comes(self, every: int) -> bool:
        """Is something due now that happens every `every` updates and after the last one?"""
        return _due(self.step, every) or (every > 0 and self.step == self.recipe.updates)

    def _sample(self) -> None:
        net = self.averaged()
        if self.accelerator.is_main_process:
            images = sampled(net, self.recipe, self.clock, self.data, GRID, device=self.device)
            pictures.save(images, self._grid)
        self.accelerator.wait_for_everyone()


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as numbers, strings and booleans, which trackers accept."""
    return {name: value if isinstance(value, (int, float, str, bool)) else str(value) for name, value in settings.items()}
