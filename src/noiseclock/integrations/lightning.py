"""A clock in a LightningModule, with `lightning` or `pytorch_lightning`.

    class Model(ClockMixin, LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.clock = Net(), nc.Clock("linear", "loss-second-moment")

        def predict(self, x_t, t):
            return self.net(x_t, t)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    Trainer(callbacks=ClockCallback()).fit(Model(), loader)

The mixin's training step needs only `clock` and `predict`. The callback lets the clock count the optimiser's updates, saves its state in Lightning's
checkpoints, one state for each process, and logs what the sampler learns. It also moves an `Uncertainty` weighting to the module's device and
averages its gradients over the processes. The mixin and the callback can be used independently.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from noiseclock.core.batch import call
from noiseclock.core.checks import take_whole
from noiseclock.core.clock import Clock
from noiseclock.core.conditioning import map_tensors
from noiseclock.core.ranks import average_
from noiseclock.core.uncertainty import Uncertainty
from noiseclock.integrations.trackers import numbers, track

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callbacks() -> tuple[type, ...]:
    """The Callback class of each Lightning package (they differ) that the program has imported, or else of the first one installed."""
    if imported := [sys.modules[name] for name in PACKAGES if sys.modules.get(name)]:
        return tuple(package.Callback for package in imported)
    for name in PACKAGES:
        with suppress(ImportError):
            return (importlib.import_module(name).Callback,)
    return ()


_FOUND = _callbacks()


def micro_batch(trainer: Any, batch_idx: int) -> tuple[int, int]:
    """The index of a batch among the micro-batches of its update, and their number: the last update of an epoch may have fewer."""
    parts = trainer.accumulate_grad_batches
    i = batch_idx % parts
    left = trainer.num_training_batches - (batch_idx - i)  # infinite for a loader without length
    return i, int(left) if i < left < parts else parts  # a run resumed at the very end of an epoch gets batches beyond it


class ClockMixin:
    """For a LightningModule that has a `clock` and defines `predict(x_t, t)`, or with a third argument for conditioning."""

    clock: Clock
    trainer: Any

    def predict(self, x_t: Tensor, t: Tensor, *cond: Any) -> Tensor:
        """The network's prediction from x_t (B, ...) and t (B,), a tensor like x_t."""
        raise NotImplementedError(f"{type(self).__name__} must define predict(self, x_t, t), or predict(self, x_t, t, cond)")

    def clock_losses(self, x0: Tensor, *, cond: Any = None, micro: tuple[int, int] = (0, 1)) -> Tensor:
        """(B,) the weighted losses of x0 (B, ...) at newly drawn times, for a training step of your own; `cond` and `micro` as for `clock.draw`."""
        b = self.clock.draw(x0, predict=self.predict, cond=cond, micro=micro)
        return self.clock.loss(b, call(self.predict, b.x_t, b.t, cond))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The mean loss of a batch, which is x0, (x0,) or (x0, cond); times are stratified over the micro-batches of an update."""
        x0, *cond = (batch,) if isinstance(batch, Tensor) else batch if isinstance(batch, (tuple, list)) and batch else (None,)
        if not isinstance(x0, Tensor) or len(cond) > 1:
            raise TypeError(
                f"a batch must be x0 or (x0, cond), got {type(batch).__name__}; for others define training_step with self.clock_losses(x0, cond=...)"
            )
        loss = self.clock_losses(x0, cond=cond[0] if cond else None, micro=micro_batch(self.trainer, batch_idx)).mean()
        self.log("train_loss", loss, prog_bar=True)  # type: ignore[attr-defined]  # the LightningModule's
        return loss


class ClockCallback(*_FOUND):  # type: ignore[misc]  # the Callback classes of zero, one or two Lightning packages
    """Attaches the module's clock to its optimiser, saves and restores the clock, and logs its numbers as often as the trainer logs.

    optimizer: the index of the optimiser that trains the clock's model, if there are several; if several train it, such as Muon and AdamW, their
    indices in the order of their steps. curves_every: updates between logs of densities and
    losses by time, see `integrations/trackers.py`; they are also logged at the end; 0 for never.
    """

    def __init__(self, *, optimizer: int | Sequence[int] | None = None, curves_every: int = 1000) -> None:
        if not _FOUND:
            raise ImportError("ClockCallback needs Lightning, which is not installed: pip install lightning")
        super().__init__()
        self.optimizer, self.curves_every = optimizer, curves_every
        take_whole(self, "curves_every", least=0)
        self._clock: Clock | None = None
        self._restored = False
        self._logged, self._tracked = 0, 0  # the last step that was checked for logging, and the last step whose curves were logged
        self._learned: list[Tensor] = []  # the weighting's parameters, if it is not a submodule of the module

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        clock = getattr(pl_module, "clock", None)
        if not isinstance(clock, Clock):
            raise TypeError(f"ClockCallback looks for a Clock in the module's `clock`: set self.clock = nc.Clock(...) in {type(pl_module).__name__}")
        self._clock, self._restored, self._learned = clock, False, []
        # Lightning itself moves the module's submodules and averages their gradients
        if isinstance(clock.weighting, Uncertainty) and clock.weighting.net not in set(pl_module.modules()):
            self._learned = list(clock.weighting.to(trainer.strategy.root_device).parameters())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.ckpt_path and not self._restored:
            warnings.warn(f"{trainer.ckpt_path} was made without ClockCallback, so the clock starts anew", stacklevel=2)
        trained = {p for optimizer in trainer.optimizers for group in optimizer.param_groups for p in group["params"]}
        if not trained.issuperset(self._learned):
            raise ValueError(
                "no optimiser trains the Uncertainty weighting, which is no part of self.parameters(): in configure_optimizers give it "
                "[*self.parameters(), *self.clock.weighting.parameters()]"
            )
        self._logged = self._tracked = trainer.global_step
        pl_module.clock.attach(*self._chosen(trainer.optimizers))

    def _chosen(self, optimizers: list[Any]) -> list[Any]:
        if self.optimizer is None and len(optimizers) == 1:
            return optimizers
        chosen = [self.optimizer] if isinstance(self.optimizer, int) else list(self.optimizer or ())
        if not chosen or not all(0 <= index < len(optimizers) for index in chosen):
            raise ValueError(
                f"there are {len(optimizers)} optimisers; say which trains the clock's model: ClockCallback(optimizer=0) for the first, "
                "optimizer=(0, 1) for both"
            )
        return [optimizers[index] for index in chosen]

    # --- updates ------------------------------------------------------------------------------------------------------------------------

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        # DDP averages the module's gradients only. This hook runs before a GradScaler checks for infinite gradients, so all processes skip the same
        # steps. Averaging after each micro-batch is as good as after the last: what was averaged before does not change.
        average_([p.grad for p in self._learned if p.grad is not None])

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        i, parts = micro_batch(trainer, batch_idx)
        if i == parts - 1 and trainer.is_global_zero:
            self._log(trainer, pl_module.clock)

    # --- logging ------------------------------------------------------------------------------------------------------------------------

    def _log(self, trainer: Any, clock: Clock) -> None:
        step, before = trainer.global_step, self._logged
        self._logged = step
        # compared with the last step, because a batch may make no update, or several with several optimisers
        due = [every > 0 and step // every > before // every for every in (self.curves_every, trainer.log_every_n_steps)]
        if due[0]:
            self._track(trainer, clock)
        elif due[1]:
            found = numbers(clock)
            for logger in trainer.loggers:
                logger.log_metrics(found, step)

    def _track(self, trainer: Any, clock: Clock) -> None:
        self._tracked = trainer.global_step
        for logger in trainer.loggers:
            track(logger, clock, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.curves_every and trainer.is_global_zero and trainer.global_step > self._tracked:
            self._track(trainer, pl_module.clock)

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The clock state of every process: Lightning calls this on all processes and writes the result of the first."""
        if self._clock is None:
            return {}
        mine = map_tensors(Tensor.cpu, self._clock.state_dict())  # otherwise the first process would open a CUDA context on every GPU
        ranks: list[Any] = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, mine)
        return {"ranks": ranks}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the clock of this process; if the number of processes has changed, that of the first: times continue, noise starts a new stream."""
        if self._clock is None:
            raise ValueError("a ClockCallback restores the clock of a module: give it to a Trainer, and the checkpoint to trainer.fit(ckpt_path=...)")
        ranks = state_dict["ranks"]
        rank, world_size = self._clock.place()
        self._clock.load_state_dict(ranks[rank if len(ranks) == world_size else 0])
        self._restored = True
