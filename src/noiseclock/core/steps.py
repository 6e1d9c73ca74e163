"""When does an update begin and end? The steps of one or several optimisers, as their hooks tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class Steps:
    """Hooks on the optimisers of one update, in the order of their steps: the first that steps begins it, the last ends it.

    waiting: how many batches wait for the update. failed: called if a step began and was never ended, because it raised an error. ended: called
    with the answer to "was the update skipped?", a tensor if only the device knows.
    """

    def __init__(
        self, optimizers: Sequence[Any], waiting: Callable[[], int], failed: Callable[[], None], ended: Callable[[bool | Tensor], None]
    ) -> None:
        self._waiting, self._failed, self._ended = waiting, failed, ended
        # the batches that waited when the step began, None outside a step: a draw inside belongs to the step, as those of a closure do
        self._began: int | None = None
        self._running = False  # is some optimiser in its step, or has it raised an error there?
        self.counted: bool | None = None  # do the hooks see all updates? None before the first, False after a capture: replays run no hook
        # a GradScaler may skip the step of the first, but not of all
        self._hooks = [each.register_step_pre_hook(self._before_other) for each in optimizers[1:]]
        self._hooks += [each.register_step_post_hook(self._returned) for each in optimizers]
        self._hooks += [optimizers[0].register_step_pre_hook(self._before), optimizers[-1].register_step_post_hook(self._after)]

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @property
    def inside(self) -> bool:
        """Has a step begun that has not ended?"""
        return self._began is not None

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        # If the last step raised an error, its batch was left out. If it returned, the last optimiser steps more rarely than the first.
        if self._running and self._began not in (None, self._waiting()):
            self._failed()
        self._began, self._running = self._waiting(), True

    def _before_other(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._running = True
        if self._began is None:
            self._began = self._waiting()

    def _returned(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._running = False

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._began is None:  # the step of a subclass, after that of its parent class: torch runs the hooks for both
            return
        self._began = None
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.counted = False
            return  # a capture makes no update; the user reports each replay by `Clock.updated`
        self.counted = self.counted is not False
        # If a gradient is infinite, a GradScaler skips the step of most optimisers, and this hook does not run. The step of a fused optimiser always
        # runs, and decides on the device whether to skip.
        found_inf = getattr(optimizer, "found_inf", None)
        self._ended(False if found_inf is None else found_inf)
