"""Latent diffusion on faces of 128x128: train an autoencoder, cache its latents, and compare samplers on them.

    python benchmarks/faces.py faces-128.tar runs/faces --minutes 25       # again to go on where it stopped
    python benchmarks/faces.py some-faces runs/look --small                # does it run? a minute on a CPU with a hundred pictures

The sizes are meant for 3,000 pictures on one H200. On one that was shared with eight other trainings the autoencoder took 3.6 minutes, and 2,500 of
the 5,000 updates of a method 3. One picture in twenty is held out.

FID compares decoded samples with the training pictures themselves, not with decoded ones. So it contains the error of the autoencoder, which the
first row of the table shows alone: the training pictures, encoded and decoded, against themselves. The folder gets results.json, reconstructions.png
(held-out pictures, each beside its reconstruction), and samples-METHOD-SEED.png (64 samples; picture i has the same noise for every method).
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from noiseclock.lab import compare
from noiseclock.lab.autoencoder_settings import Settings
from noiseclock.lab.data import head, load, pictured
from noiseclock.lab.encode import encode
from noiseclock.lab.evaluate import compare_images
from noiseclock.lab.folder import records, write_json
from noiseclock.lab.latents import Latents
from noiseclock.lab.pictures import save, whole
from noiseclock.lab.recipes import recipe
from noiseclock.lab.results import read
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.train_autoencoder import train_autoencoder

METHODS = ("uniform", "adaptive", "variance-optimal")
BASE, LR = "cifar10-sprint", 4e-4  # its U-Net is made for 32x32; the rate is the best of three that were tried on CIFAR-10
SHOWN = 32  # reconstructions


@dataclass(frozen=True)
class Size:
    """How large everything is. coder: settings of the autoencoder. changes: to the recipe. every, samples: of the comparison."""

    coder: dict[str, Any]
    changes: dict[str, Any]
    every: int
    samples: int


# Without a perceptual loss a factor of 8 blurs faces, so the factor is 4: latents of 4x32x32. The schedule is Stable Diffusion's, which ends at
# σ = 14.6: latents are not clipped, and at the end of DDPM's, σ = 157, a young model's x0 is mostly error, which DDIM keeps as a wash of colour.
LATENT = {"schedule": "scaled-linear"}
CODER = {"size": 128, "factor": 4, "batch": 64, "updates": 3000, "lr": 5e-4, "precision": "bf16"}
LARGE = Size(CODER, {**LATENT, "updates": 5000}, every=2500, samples=5000)
SMALL = Size(
    {"size": 32, "factor": 4, "batch": 8, "updates": 10, "save_every": 5, "channels": 8},
    {
        **LATENT, "updates": 4, "channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (), "batch": 8, "precision": "fp32",
        "solver_steps": 4, "log_every": 1,
    },
    every=2,
    samples=8,
)  # fmt: skip


class OutOfTime(Exception):
    """The minutes are over; what was under way is saved."""


def in_time(work: Any, end: float) -> Iterator[Any]:
    """What a resumable generator yields. When the time is over it is closed, and so saves where it is."""
    with closing(work):
        for step in work:
            yield step
            if time.monotonic() > end:
                raise OutOfTime


def unpacked(place: Path, out: Path) -> Path:
    """The folder of the pictures; a tar is unpacked into `out`, once."""
    if place.is_dir():
        return place
    if not (out / "pictures").is_dir():
        with tarfile.open(place) as archive:
            whole(out / "pictures", lambda new: archive.extractall(new, filter="data"))
    return out / "pictures"


def train(pictures: Path, out: Path, size: Size, seeds: int, device: str, end: float) -> None:
    """All stages, one after the other; each continues where it was stopped, and does nothing if it is complete."""
    settings = Settings(f"folder:{pictures}", flip=True, **size.coder)
    for progress in in_time(train_autoencoder(settings, out / "autoencoder", device=device), end):
        if progress.psnr is not None:
            told(f"autoencoder: update {progress.step:,} of {settings.updates:,}, held-out PSNR {progress.psnr:.2f} dB")
    for done, of in in_time(encode(settings.data, out / "autoencoder", out / "latents", size=settings.size, flip=True, device=device), end):
        told(f"latents: {done:,} of {of:,} pictures")
    if not (out / "reconstructions.json").exists():
        reconstruct(out, device)
    base = replace(recipe(BASE), data=f"latents:{out / 'latents'}", **size.changes)
    plan = compare.Plan(BASE, base, METHODS, tuple(range(seeds)), (LR,), size.every, size.samples)
    for event in in_time(compare.compare(plan, out / "comparison", device=device), end):
        if event.point is not None:
            numbers = (f"{name} {event.point[name]:.5g}" for name in ("step", "validation", "frechet"))
            told(f"{event.cell.method}, seed {event.cell.seed}: {', '.join(numbers)}")
        if event.failure:  # a method that diverges is a result
            told(f"{event.cell.method}, seed {event.cell.seed}: {event.failure}")


def reconstruct(out: Path, device: str) -> None:
    """What the autoencoder alone loses: its distance, and pictures to look at."""
    data, held_out = (load(f"latents:{out / 'latents'}", split=split) for split in ("train", "test"))
    assert isinstance(data, Latents)
    real, back = head(pictured(held_out), SHOWN)[0], data.decoded(head(held_out, SHOWN, device)[0])
    save(torch.stack([((real + 1) * 127.5).round().byte(), back], 1).flatten(0, 1), out / "reconstructions.png")
    scores = compare_images(data.decoded(head(data, len(data), device)[0]), pictured(data), device=device)
    write_json(out / "reconstructions.json", asdict(scores))


def told(line: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S"), line, flush=True)


def gathered(out: Path, device: str) -> dict[str, Any]:
    """Everything that was measured so far, with the sample grids copied beside it."""
    coder: dict[str, Any] = {"log": [record for record in records(out / "autoencoder" / "log.jsonl") if "step" in record]}
    if (out / "reconstructions.json").exists():
        coder["scores"] = json.loads((out / "reconstructions.json").read_bytes())
    results = read(out / "comparison")
    cells = [cell for method in results.methods for cell in results.of(method)]
    for cell in cells:
        if cell.pictures:
            shutil.copyfile(cell.pictures[max(cell.pictures)], out / f"samples-{cell.method}-{cell.seed}.png")
    methods = [{"method": cell.method, "lr": cell.lr, "seed": cell.seed, "finished": cell.finished, "points": cell.points} for cell in cells]
    return {"setup": surroundings(torch.device(device), 1), "autoencoder": coder, "methods": methods}


def table(found: dict[str, Any]) -> str:
    """One line for the autoencoder alone, and one for each training at its last evaluation."""
    rows = [["", "seed", "updates", "minutes", "held-out", "distance", "precision", "recall"]]
    coder, title = found["autoencoder"], "no samples were compared yet"
    if coder["log"]:
        last, scores = coder["log"][-1], coder.get("scores", {})
        row = [f"{last['step']:,}", f"{last['seconds'] / 60:.1f}", f"{last['psnr']:.2f} dB"]
        rows.append(["autoencoder alone", "", *row, *(f"{scores.get(name, math.nan):.4g}" for name in ("frechet", "precision", "recall"))])
    for cell in found["methods"]:
        for point in cell["points"][-1:]:
            row = [f"{point['step']:,}", f"{point['seconds'] / 60:.1f}", f"{point['validation']:.4f}"]
            rows.append([cell["method"], str(cell["seed"]), *row, *(f"{point[name]:.4g}" for name in ("frechet", "precision", "recall"))])
            made = f"{point['samples']:,} decoded samples, {point['solver']} {point['solver_steps']}"
            title = f"distance: {point['frechet_name']} of {made}, against {coder['scores']['reference_count']:,} training pictures"
    lines = [f"{row[0]:<18}" + "".join(f"{value:>11}" for value in row[1:]) for row in rows]
    return "\n".join([title, *lines])


def main(argv: list[str] | None = None) -> None:
    """Train as far as the time allows, write what was measured, print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faces", type=Path, help="tar or folder of pictures")
    parser.add_argument("out", type=Path, help="folder of the results")
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and stop after so many minutes")
    parser.add_argument("--seeds", type=int, default=1, help="trainings of each method")
    parser.add_argument("--small", action="store_true", help="tiny networks, for a look on a CPU; they learn nothing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    end, note = time.monotonic() + 60 * args.minutes, ""
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        train(unpacked(args.faces, args.out), args.out, SMALL if args.small else LARGE, args.seeds, args.device, end)
    except OutOfTime:
        note = "\nstopped after its minutes; run the same command again to go on"
    found = gathered(args.out, args.device)
    write_json(args.out / "results.json", found)
    print(table(found) + note)


if __name__ == "__main__":
    main()
