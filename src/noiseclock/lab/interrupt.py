"""Ctrl-C and SIGTERM as a wish, granted between two updates and not in the middle of one."""

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
LOSS = b"\nnoiseclock: it ends once what was trained is saved; ask again, and it ends at once and loses that\n"


class Wish:
    """The signal that asked for the end, or None. patient: is there anything that was trained and not saved?

    A second signal does not wait, unless something would be lost: then it is told so, and the third does not wait. Echoes do not count: `timeout`
    and batch systems send a signal to the process and one to its group.
    """

    def __init__(self) -> None:
        self.patient = False
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        outer = getattr(self._before[signal.SIGINT], "__self__", None)
        self._outer = outer if isinstance(outer, Wish) else None  # who may have more to do after this is done, or have heard of a signal before
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
                if multiprocessing.parent_process() is None:  # one process writes to the terminal, if there is any
                    with suppress(OSError):
                        os.write(2, LOSS)  # past print and its lock, which what was interrupted may hold
            else:
                self._restore()
                signal.raise_signal(number)

    def grant(self) -> None:
        """End here, if that was asked for."""
        if self.signal is not None:
            raise KeyboardInterrupt if self.signal == signal.SIGINT else SystemExit(128 + self.signal)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def listening() -> Iterator[Wish]:
    """Take note of signals meanwhile. Only the main thread can; elsewhere nothing is taken note of."""
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
