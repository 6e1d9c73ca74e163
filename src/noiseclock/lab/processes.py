"""The processes of a training, one or many, as accelerate knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration

from noiseclock.lab.errors import Failure, Mistake


def joined(folder: Path, device: str | None, track: tuple[str, ...]) -> Accelerator:
    """The Accelerator of a process that torchrun or accelerate launch started, or that is alone. track: accelerate's trackers; they use `folder`."""
    # without a GPU accelerate starts a process group only if cpu=True
    cpu = device == "cpu" or not torch.accelerator.is_available()
    place = ProjectConfiguration(str(folder), logging_dir=str(folder / "tensorboard"))
    accelerator = Accelerator(cpu=cpu, log_with=trackers(track) or None, project_config=place)
    if device not in (None, accelerator.device.type):
        raise Mistake(f"this process trains on {accelerator.device}, not on {device}; choose a GPU with CUDA_VISIBLE_DEVICES")
    return accelerator


def trackers(names: tuple[str, ...]) -> list[str]:
    """The names of accelerate's trackers; a Mistake if one of them is not installed."""
    there = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    for name in names:
        if name not in there:
            raise Mistake(f"the tracker {name!r} is not installed; installed: {', '.join(there) or 'none'}")
    return list(names)


def leave(accelerator: Accelerator) -> None:
    """End the trackers and the process group."""
    with suppress(OSError):  # a tracker could not write, which was reported when it happened
        accelerator.end_training()


@contextmanager
def all_or_none(accelerator: Accelerator) -> Iterator[None]:
    """A Mistake or Failure on one rank ends all ranks: the others would wait for it forever."""
    error: Exception | None = None
    try:
        yield
    except (Mistake, Failure) as caught:
        error = caught
    if accelerator.num_processes > 1:
        failed = torch.tensor(int(error is not None), device=accelerator.device)
        dist.all_reduce(failed)
        if int(failed) and error is None:
            raise SystemExit(1)  # the rank that failed says why
    if error is not None:
        raise error
