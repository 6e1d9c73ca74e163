"""Processes that start at once, forked from a server that has imported everything: a fresh one imports torch and the laboratory for seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["noiseclock.cli", "noiseclock.lab.trained", "noiseclock.lab.models.unet", "sklearn.datasets", "rich.progress"])


def on_two(target: Callable[..., None], *args: Any) -> dict[Any, Any]:
    """What target(rank, *args, results) leaves in the dictionary `results` on ranks 0 and 1; an error in either is raised here."""
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.start_processes(_one_thread, args=(target, *args, results), nprocs=2, start_method="forkserver")
        return dict(results)


def _one_thread(rank: int, target: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    target(rank, *args)


class Forked:
    """A process used like subprocess.Popen.

    It runs target(*args) and exits with what that returns; what it prints goes to the file `output`.
    """

    def __init__(self, target: Callable[..., int], *args: Any, output: Path, **environment: str) -> None:
        self._process = SERVER.Process(target=_in_child, args=(target, args, output, environment))
        self.output = output
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


def _in_child(target: Callable[..., int], args: tuple[Any, ...], output: Path, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with output.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    torch.set_num_threads(1)
    sys.exit(target(*args))
