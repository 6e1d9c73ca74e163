"""The folder of a training that never was, as far as its live page reads it, and the server of that page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from noiseclock.lab import pictures, watch
from noiseclock.lab.folder import Log, write_json

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


def trained(step: int, **other) -> dict:
    """A line of the log: an update."""
    loss = 1 / (1 + step / 50)
    record = {"kind": "train", "step": step, "loss": loss, "norm": 2 * loss, "lr": 1e-3, "images": 64 * step, "seconds": 0.1 * step, "skipped": 0}
    return {**record, "sampler": "", **other}


def validated(step: int, points: int = 50, **other) -> dict:
    """A line of the log: the loss of held-out images by time, and the density."""
    time = [(i + 0.5) / points for i in range(points)]
    density = [0.5 + u if step < 100 else 1.5 - u for u in time]
    losses = [0.5 / (1 + 5 * u) / (1 + step / 50) for u in time]
    record = {"kind": "validation", "step": step, "seconds": 0.1 * step, "weighted": 0.2, "loss": sum(losses) / points, "time": time}
    return {**record, "loss_by_time": losses, "density_time": time, "density": density, **other}


def config(folder: Path, **settings) -> None:
    write_json(folder / "config.json", {"settings": {"data": "digits", "sampler": "adaptive", "updates": 1000, "betas": [0.9, 0.999]} | settings})


def picture(folder: Path, step: int) -> Path:
    """A grid of samples."""
    path = folder / "samples" / f"step-{step:08d}.png"
    pictures.save(torch.full((4, 1, 8, 8), step % 256, dtype=torch.uint8), path)
    return path


def add(folder: Path, *records: dict) -> None:
    with Log(folder / "log.jsonl") as log:
        for record in records:
            log.write(record)


@contextmanager
def served(folder: Path) -> Iterator[watch.Server]:
    """The server of its live page, on a port of its own."""
    with watch.serve(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()
