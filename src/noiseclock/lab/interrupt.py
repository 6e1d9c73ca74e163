"""Ctrl-C and SIGTERM as a request to stop, granted between two updates and not in the middle of one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 3.0  # seconds
LOSS = b"\nnoiseclock: it stops once its progress is saved; ask again to stop at once and lose that progress\n"


class Wish:
    """A request to stop. signal: the signal that was received, or None. patient: is there training progress that is not saved yet?

    A second signal stops at once, unless progress would be lost: then it prints a warning, and a third signal stops at once. Signals within ECHO
    seconds count as one, because `timeout` and batch systems signal both the process and its group.
    """

    def __init__(self) -> None:
        self.patient = False
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        outer = getattr(self._before[signal.SIGINT], "__self__", None)
        self._outer = outer if isinstance(outer, Wish) else None  # the outer block may have work left after this one, or a signal already
        self.signal: int | None = self._outer.signal if self._outer else None
        self._at: float = self._outer._at if self._outer else 0.0
        self._told = False

    def _take(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signal is None:
            self.signal, self._at = number, now
            if self._outer is not None:
                self._outer._take(number, frame)
        elif now - self._at > ECHO:
            self._at = now
            if self.patient and not self._told:
                self._told = True
                if multiprocessing.parent_process() is None:  # only the main process writes to the terminal
                    with suppress(OSError):
                        os.write(2, LOSS)  # not print, whose lock the interrupted code may hold
            else:
                self._restore()
                signal.raise_signal(number)

    def grant(self) -> None:
        """Stop here if a signal was received."""
        if self.signal is not None:
            raise KeyboardInterrupt if self.signal == signal.SIGINT else SystemExit(128 + self.signal)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def listening() -> Iterator[Wish]:
    """Record signals inside the `with` block. Only the main thread can; in other threads no signal is recorded."""
    wish = Wish()
    main = threading.current_thread() is threading.main_thread()
    if main:
        for number in SIGNALS:
            signal.signal(number, wish._take)
    try:
        yield wish
    finally:
        if main:
            wish._restore()
