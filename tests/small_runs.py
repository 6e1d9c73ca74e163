"""Trainings that take a fraction of a second, and what they leave behind."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import Forked
from noiseclock import cli
from noiseclock.cli_results import REPLACED
from noiseclock.lab import checkpoint
from noiseclock.lab.latents import VERIFIED
from noiseclock.lab.processes import joined
from noiseclock.lab.recipes import Recipe, recipe
from noiseclock.lab.results import read
from noiseclock.lab.train import Record, Run, train

# A DiT of one block and 12,000 parameters on 8x8 digits, 20 steps of noise: an update takes 10 ms. Nothing is shown or saved unless asked for.
TINY = replace(
    recipe("digits"), sampler="uniform", model="dit", channels=16, head_channels=8, blocks=1, patch=4, batch=16, updates=8, warmup=4, steps=20,
    solver_steps=2, log_every=1, save_every=0, validate_every=0, sample_every=0, track=(),
)  # fmt: skip
UNET = replace(TINY, model="unet", channels=8, head_channels=0, multipliers=(1,), attention=())
# What turns them into other kinds of diffusion.
EDM = {"schedule": "edm", "steps": None, "objective": "edm", "base": "log-normal"}
FLOW = {"schedule": "flow", "steps": None, "objective": "flow"}


def trained(settings: Recipe, folder: Path, *, stop: int | None = None) -> list[Record]:
    """Train, or go on, to the end or until after update `stop`."""
    records = []
    updates = train(settings, folder, device="cpu")
    for record in updates:
        records.append(record)
        if record.step == stop:
            updates.close()  # type: ignore[attr-defined]
    return records


def run_of(settings: Recipe, folder: Path) -> Run:
    """What `train` trains, to be looked at."""
    folder.mkdir(parents=True, exist_ok=True)
    return Run(settings, folder, joined(folder, "cpu", settings.track), shard=False)


def state_of(folder: Path, step: int | None = None) -> dict[str, Any]:
    """A checkpoint, without the time that it took."""
    _, state = checkpoint.load(folder, step)
    del state["seconds"]
    return dict(state)


def lines(folder: Path) -> list[dict[str, Any]]:
    """The log, without the time that it took."""
    found = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in found]


def differing(mine: Any, theirs: Any, place: str = "") -> list[str]:
    """Where two states are not the same to the bit."""
    if isinstance(mine, torch.Tensor):
        alike = mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.numpy().tobytes() == theirs.numpy().tobytes()
        return [] if alike else [place]
    if isinstance(mine, dict):
        if mine.keys() != theirs.keys():
            return [place]
        return [found for key in mine for found in differing(mine[key], theirs[key], f"{place}.{key}")]
    if isinstance(mine, (list, tuple)):
        if len(mine) != len(theirs):
            return [place]
        return [found for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) for found in differing(a, b, f"{place}.{i}")]
    return [] if mine == theirs else [place]


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder; apart from the lock, which names the process that held it last, and the record of shards that were verified there."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in (".lock", VERIFIED)]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def distance(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The Euclidean distance between two sets of tensors."""
    return float(sum(((mine[name].double() - theirs[name].double()) ** 2).sum() for name in mine) ** 0.5)


def points(folder: Path) -> dict[tuple[str, float, int, int], dict[str, Any]]:
    """Every evaluation of a comparison by method, learning rate, seed and update, without the time that it took."""
    return {(c.method, c.lr, c.seed, p["step"]): {k: v for k, v in p.items() if k != "seconds"} for c in read(folder).cells for p in c.points}


def same_cells(mine: Path, theirs: Path) -> bool:
    """Have two comparisons the same evaluations, and none of them twice? Seconds apart."""
    assert read(mine).problems == read(theirs).problems == []
    return points(mine) == points(theirs)


def words(settings: Recipe, folder: Path) -> list[str]:
    """The command line that trains these settings."""
    return ["train", "digits", "--out", str(folder), "--device", "cpu", *_options(settings)]


def comparison(folder: Path, *more: str, settings: Recipe = replace(TINY, updates=4)) -> list[str]:
    """The command line that compares under these settings, by the held-out loss after every other update; more: options that count instead."""
    quick = ["--every", "2", "--samples", "0", "--vlb-images", "0", "--seeds", "2"]
    return ["compare", "digits", "--out", str(folder), "--device", "cpu", *quick, *_options(settings, besides=REPLACED), *more]


def _options(settings: Recipe, besides: Collection[str] = ()) -> list[str]:
    given = []
    for name, value in settings.settings().items():
        option = name.replace("_", "-")
        if name in besides:
            continue
        if isinstance(value, bool):
            given.append(f"--{option}" if value else f"--no-{option}")
        else:
            given += [f"--{option}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return given


def said(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    """What a command prints; where it fails, what it says about that."""
    capsys.readouterr()
    found: Any
    try:
        found = cli.main(argv)
    except SystemExit as end:  # tyro's, for a mistake in the options
        found = end.code
    out, err = capsys.readouterr()
    assert found == status, out + err
    assert "Traceback" not in out + err
    return out if status == 0 else err


def unframed(text: str) -> str:
    """What tyro says, on one line and without the frame that it draws around it."""
    return re.sub(r"[│─\s]+", " ", text)


def wait_until(happened: Callable[[], object], process: Forked | subprocess.Popen[bytes], what: str) -> None:
    """Wait for progress, not for a time; two minutes without any are a failure."""
    deadline = time.monotonic() + 120
    while not happened():
        assert process.poll() is None, f"the run ended before {what}, with {process.poll()}"
        assert time.monotonic() < deadline, f"waited two minutes for {what}"
        time.sleep(0.0005)
