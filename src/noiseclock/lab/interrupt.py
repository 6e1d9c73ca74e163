"""Ctrl-C and SIGTERM as a wish, granted between two updates and not in the middle of one."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ECHO = 3.0  # seconds


class Wish:
    """The signal that asked for the end, or None. A second one does not wait, unless it is an echo of the first: `timeout` and batch systems send one
    to the process and one to its group. patient: while it is set, the second one waits too."""

    def __init__(self) -> None:
        self.patient = False
        self.signal: int | None = None
        self._at = 0.0
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = number, time.monotonic()
            outer = getattr(self._before[number], "__self__", None)
            if isinstance(outer, Wish):  # who may have more to do after this is done
                outer._take(number, frame)
        elif not self.patient and time.monotonic() - self._at > ECHO:
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
