"""Ctrl-C and SIGTERM as a wish, granted between two updates and not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Wish:
    """The signal that asked for the end, or None. A second one does not wait."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before = {number: signal.getsignal(number) for number in SIGNALS}

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        self._restore()

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
