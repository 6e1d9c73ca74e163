"""Writes a folder as `noiseclock compare` does, with results that are made up: the effect of every method is known."""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image

from noiseclock.lab.folder import Log, write_json

METHODS = ("uniform", "speed:k=5", "adaptive+min-snr")
LOWER = {"validation": 0.08, "frechet": 12.0, "kernel": 0.01, "bits": 4.0}  # where uniform would end without noise
HIGHER = {"precision": 0.6, "recall": 0.5}
TIMES = (np.arange(50) + 0.5) / 50
HOSTILE = "</script><img src=x onerror=alert(1)>"
HOSTILES = [
    "uniform", HOSTILE, '"><svg onload=alert(2)>', "&lt;b&gt;x", "<a href='http://a.example/'>link</a>", "${data} %{x} $x^2$ {{7*7}}", "`| **bold** [x](http://b.example/)",
    "speed:k=<b>1</b>", "speed:k=--><script>alert(3)</script>", "' onmouseover='alert(4)", "名前 \N{LINE SEPARATOR}" + "x" * 300,
]  # fmt: skip


def write(
    folder: str | Path,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0, 1, 2),
    *,
    effect: Mapping[str, float] = {},
    lrs: Sequence[float] = (1e-3,),
    best_lr: Mapping[str, float] = {},
    overhead: Mapping[str, float] = {},
    updates: int = 2000,
    every: int = 250,
    batch: int = 64,
    rate: float = 4.0,
    faster: Mapping[str, float] = {},
    spread: float = 0.05,
    noise: float = 0.01,
    metrics: Collection[str] = (*LOWER, *HIGHER),
    stopped: Mapping[tuple[str, int], int] = {},
    pictures: bool = True,
    recipe: str = "digits",
    baseline: str = "uniform",
    rng: int = 0,
) -> Path:
    """Write the results of methods x lrs x seeds and give back the folder.

    With u = step / updates, v the value in LOWER or HIGHER, a distance or loss of a method is v·effect·(1 + 9·exp(-rate·faster·u)) times
    exp(spread·N) of the seed, which all methods share, exp(noise·N) of each evaluation, and exp(0.1·log²(lr/best_lr)) where the method has a
    best_lr. A share is v·(1 - exp(-rate·faster·u))/effect likewise, at most 1. overhead: a method's seconds an update over uniform's.
    stopped: the last update of cells that did not finish, by method and seed. rng: of all noise.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "data": recipe,
        "sampler": "uniform",
        "weighting": "constant",
        "correct": "auto",
        "lr": lrs[0],
        "seed": 0,
        "batch": batch,
        "updates": updates,
    }
    made_with = {
        "versions": {"noiseclock": "0.1.0", "torch": "2.13.0"},
        "python": "3.11.9",
        "machine": "x86_64, 2 threads",
        "processes": 1,
        "git": None,
    }
    write_json(folder / "compare.json", {
        "version": 1, "recipe": recipe, "settings": settings, "methods": list(methods), "seeds": list(seeds), "lrs": list(lrs), "baseline": baseline,
        "every": every, "samples": 1000, "made with": made_with,
    })  # fmt: skip
    for (number, method), (i, lr), seed in product(enumerate(methods), enumerate(lrs), seeds):
        random = np.random.default_rng([1, rng, number, i, seed])
        common = spread * np.random.default_rng([2, rng, seed]).normal()
        cell = folder / "cells" / f"{slug(method)}--lr-{lr:g}--seed-{seed}"
        (cell / "samples").mkdir(parents=True)
        own = {"method": method, "lr": lr, "seed": seed, "settings": {**settings, "sampler": method, "lr": lr, "seed": seed}, "made with": made_with}
        write_json(cell / "cell.json", own)
        level = effect.get(method, 1.0) * math.exp(0.1 * math.log(lr / best_lr.get(method, lr)) ** 2)
        pace, end = 0.01 * overhead.get(method, 1.0), stopped.get((method, seed), updates)
        with Log(cell / "points.jsonl") as points, Log(cell / "log.jsonl") as log:
            for step in range(every, end + 1, every):
                place = {"step": step, "seconds": step * pace}
                left = math.exp(-rate * faster.get(method, 1.0) * step / updates)
                point = {name: _value(name, level, left, math.exp(common + noise * random.normal())) for name in metrics}
                made_by = {"samples": 1000, "solver": "ddim", "solver_steps": 50}
                names = {"frechet_name": "Fréchet distance (digits classifier)"}
                useful = {"utility_time": TIMES.tolist(), "utility": (1e-4 * level * (1 - 2 * TIMES)).tolist()} if step == updates else {}
                points.write({**place, "images": step * batch, **point, **made_by, **names, **useful})
                loss = point.get("validation", 0.08 * level)
                learned = "" if number == 0 else f"effective sample size {100 - 20 * step / updates:.0f}%"
                train = {"loss": 1.1 * loss, "norm": 0.5, "lr": lr, "images": step * batch, "skipped": 0, "sampler": learned}
                log.write({"kind": "train", **place, **train})
                by_time = {"time": TIMES.tolist(), "loss_by_time": (loss * 3 * (1 - TIMES) ** 2).tolist()}
                density = {"density_time": TIMES.tolist(), "density": _density(number, step / updates).tolist()}
                log.write({"kind": "validation", **place, "weighted": loss, "loss": loss, **by_time, **density})
                if pictures:
                    pixels = random.integers(0, 256, (16, 16), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
                    Image.fromarray(pixels).save(cell / "samples" / f"step-{step:08d}.png")
        if end == updates:
            write_json(cell / "finished.json", {"step": end, "seconds": end * pace})
    return folder


def five_methods(folder: Path) -> Path:
    """Five methods of which three are a sweep over |S|, two learning rates, and known effects: 20 % better and 30 % worse, over 1 % of noise."""
    methods = ["uniform", "speed", "adaptive:count=1", "adaptive:count=3", "min-snr"]
    return write(
        folder, methods, effect={"speed": 0.8, "min-snr": 1.3}, lrs=(1e-3, 2e-3), best_lr={"speed": 2e-3},
        overhead={"adaptive:count=1": 1.1, "adaptive:count=3": 1.25}, updates=400, every=100,
    )  # fmt: skip


def hostile_and_plain(place: Path) -> tuple[Path, Path]:
    """Two comparisons that differ in the words in them."""
    pair = []
    names = [name for name in HOSTILES if name.isprintable()]
    plain = [f"speed:k=x{i}" if name.startswith("speed") else "uniform" if name == "uniform" else f"name{i}" for i, name in enumerate(names)]
    for kind, methods, word in (("bad", names, HOSTILE), ("good", plain, "word")):
        folder = write(place / kind, methods, seeds=(0, 1), metrics=["frechet", "validation"], updates=200, every=100)
        config = json.loads((folder / "compare.json").read_text())
        config["recipe"], config["settings"] = word, {**config["settings"], f"{word} 2": [word]}
        config["made with"] = {"versions": {word: word}, "machine": word}
        (folder / "compare.json").write_text(json.dumps(config))
        for path in (folder / "cells").iterdir():
            (path / "points.jsonl").write_text((path / "points.jsonl").read_text().replace("Fr\\u00e9chet distance (digits classifier)", word))
        (folder / "cells" / f"{word.replace('/', '')}").mkdir()
        pair.append(folder)
    return pair[0], pair[1]


def _value(name: str, level: float, left: float, luck: float) -> float:
    if name in HIGHER:
        return min(1.0, HIGHER[name] * (1 - left) / level / luck)
    return LOWER[name] * level * (1 + 9 * left) * luck


def slug(method: str) -> str:
    """A name of safe characters, another for every method."""
    safe = re.sub(r"[^A-Za-z0-9-]+", "_", method)[:60]
    return safe if re.fullmatch(r"[a-z0-9-]+", method) else f"{safe}-{zlib.crc32(method.encode()):08x}"


def _density(number: int, u: float) -> np.ndarray:
    """(50,) uniform for the first method; the others move on from there to Beta(2, 1 + their number)."""
    if number == 0:
        return np.ones(50)
    beta = TIMES * (1 - TIMES) ** number * (1 + number) * (2 + number)
    return (1 - u) + u * beta / beta.mean()
