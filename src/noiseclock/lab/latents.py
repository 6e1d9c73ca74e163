"""Latents to train on: data from a folder that `noiseclock encode` wrote.

    index.json                 what it was made of, the shards with their checksums, mean and std of each channel
    train-00000.safetensors    mean, and std if the autoencoder has a posterior; mirrored.mean, mirrored.std; labels
    autoencoder/               a copy of the autoencoder, to decode samples even if the original is gone
    .verified.json             the shards whose checksums were verified, as the file system described them then

A network sees (z - mean)/std, per channel. z is drawn from the posterior anew every time an image is used; the draw depends on (seed, place), like
the flips. A flip takes the latents of the mirrored picture, because mirrored latents are not the latents of the mirrored picture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from noiseclock.lab import autoencoder
from noiseclock.lab.autoencoder import Autoencoder
from noiseclock.lab.captions import Captioned, Texts
from noiseclock.lab.errors import Failure, Mistake, choose
from noiseclock.lab.folder import checksum, write_json
from noiseclock.lab.order import Order, flips, normals, uniforms

FORMAT = 1  # version of the files; raised when an older reader would misread them
IN_MEMORY = 2**31  # bytes of latents; a larger set stays on disk
SAME = 0.01  # change of mean and std, in units of std, that does no harm; devices differ by far less
VERIFIED = ".verified.json"
AGAIN = "run the same noiseclock encode again"

Take = Callable[[Tensor], dict[str, Tensor]]  # rows (n,) -> their tensors (n, ...); row N + i is the mirrored picture i


class Latents:
    """The latents of a split. shape: (c, h, w). classes: the number of classes, or None. source: name and `size` of the data that was encoded.

    place: FOLDER, or FOLDER@mean to use the mean of each posterior instead of draws from it.
    """

    skipped = 0

    def __init__(self, place: str, split: str) -> None:
        folder, at, _ = place.rpartition("@mean")
        self.folder = Path(folder if at else place).expanduser()
        self.index = read_index(self.folder)
        whole = self.index.get("splits", {})
        self.split = choose(f"split of {self.folder}", split, whole)
        self.name = f"latents:{place} {split}"
        self._loaded: Autoencoder | None = None
        try:
            self._read_index(whole[split], draws=not at)
        except (KeyError, TypeError, ValueError) as error:
            raise Mistake(f"{self.folder / 'index.json'} is damaged; {AGAIN}") from error
        if lost := [name for name, _, _ in self._files if not (self.folder / name).is_file()]:
            raise Mistake(f"{self.folder / lost[0]} is missing; {AGAIN}")

    def _read_index(self, shards: Any, draws: bool) -> None:
        index, made_of = self.index, self.index["made of"]
        c, h, w = map(int, index["shape"])
        self.shape = c, h, w
        self.classes: int | None = index["classes"]
        self.source: tuple[str, int | None] = made_of["data"], made_of["size"]
        channels, height, width = map(int, made_of["pictures"])
        self.picture_shape = channels, height, width
        self.mirrored, self.draws = bool(made_of["flip"]), draws and bool(index["posterior"])
        self._files = [(str(shard["file"]), int(shard["count"]), str(shard["sha256"])) for shard in shards]
        self._per_shard = int(made_of["shard size"])
        # the variance of a draw is that of the means plus that of the posterior
        spread = [math.sqrt(std**2 + noise * self.draws) for std, noise in zip(index["std"], index["noise"] or [0.0] * c, strict=True)]
        self.mean, self.std = (torch.tensor(values).reshape(c, 1, 1) for values in (index["mean"], [s or 1.0 for s in spread]))

    def __len__(self) -> int:
        return sum(count for _, count, _ in self._files)

    @cached_property
    def _shards(self) -> list[dict[str, Tensor]]:
        """The tensors of all shards, mapped into memory. Checksums are verified, but not again of shards that have not changed since: a large set
        takes minutes to read, for every process and at every start."""
        try:
            before = dict(json.loads((self.folder / VERIFIED).read_bytes()))
        except (OSError, TypeError, ValueError):  # missing or damaged
            before = {}
        with ThreadPoolExecutor(4) as pool:
            now = dict(pool.map(lambda shard: self._verified(shard, before), self._files))
            found = list(pool.map(self._opened, self._files))
        if not now.items() <= before.items():
            with suppress(Failure, OSError):  # without the record, as in a folder that cannot be written to, every start verifies them
                write_json(self.folder / VERIFIED, before | now)
        return found

    def _verified(self, shard: tuple[str, int, str], before: dict[str, Any]) -> tuple[str, list[Any]]:
        """The name of a shard, and how to know that it has not changed; a Mistake if it is damaged."""
        name, _, known = shard
        path = self.folder / name
        try:
            # before reading, so that a change meanwhile will be noticed; ctime and inode differ in a copy, and a program cannot set them back
            state = path.stat()
            seen = [known, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
            if before.get(name) != seen and checksum(path) != known:
                raise Mistake(f"{path} is damaged: its checksum is not the one in index.json; {AGAIN}, which replaces it")
        except OSError as error:
            raise Mistake(f"{path} cannot be read ({error}); {AGAIN}") from error
        return name, seen

    def _opened(self, shard: tuple[str, int, str]) -> dict[str, Tensor]:
        name, count, _ = shard
        path = self.folder / name
        try:
            found: dict[str, Tensor] = load_file(path)
        except (OSError, SafetensorError) as error:
            raise Mistake(f"{path} cannot be read ({error}); {AGAIN}") from error
        wanted = ["mean", *(["std"] if self.draws else []), *(["mirrored.mean"] if self.mirrored else [])]
        if any(key not in found or found[key].shape != (count, *self.shape) for key in wanted):
            raise Mistake(f"{path} does not match its index.json; {AGAIN} into another folder")
        return found

    @cached_property
    def texts(self) -> Texts | None:
        """The embedded captions of the pictures, read from the folder of `noiseclock embed`; None if the pictures have none."""
        kind, _, place = self.source[0].partition(":")
        if kind != "captions":
            return None
        found = Captioned(Path(place), self.split).texts
        if found.known_by != self.index["made of"].get("captions", {}).get(self.split):
            raise Mistake(f"{place} has other pictures or captions than when {self.folder} was made of it; {AGAIN} into another folder")
        return found

    @cached_property
    def labels(self) -> Tensor | None:
        """(N,) int64, or None; for pictures with captions their indices, with which `texts` finds the captions."""
        known = [shard["labels"] for shard in self._shards if "labels" in shard]  # a test split may lack them
        return torch.cat(known) if known else None

    def batches(self, places: Sequence[int], batch: int, *, seed: int, device: torch.device, flip: bool) -> Iterator[tuple[Tensor, Tensor | None]]:
        """For each of `places`, the `batch` places from it on: normalised latents (batch, c, h, w) on the device, and labels or captions, if any."""
        take, order = self._taking(device, flip), Order(len(self), seed)
        mean, std = self.mean.to(device), self.std.to(device)
        for first in places:
            index = order(first, batch)
            found = take(index + len(self) * flips(seed, first, batch) if flip else index)
            z = found["mean"]
            if self.draws:
                z = z + found["std"] * normals(seed, "posterior", first, batch, self.shape, device)
            chance = None if self.texts is None else uniforms(seed, "captions", first, batch)
            yield (z - mean) / std, self._told(index, device, chance)

    @property
    def meaning(self) -> dict[str, Any]:
        """What a network's latents mean: the autoencoder that decodes them, mean and std of each channel."""
        return {"autoencoder": self.index["made of"]["autoencoder"], "mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}

    def unlike(self, known: Mapping[str, Any]) -> str:
        """Why these latents do not mean what they meant; empty if they do."""
        if known["autoencoder"] != self.index["made of"]["autoencoder"]:
            return "another autoencoder made its latents"
        mean, std = (torch.tensor(known[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
        near = ((self.mean - mean).abs() <= SAME * std).all() and ((self.std - std).abs() <= SAME * std).all()
        return "" if bool(near) else "its latents have another mean or std"

    def check(self, *, flip: bool) -> None:
        """Raise a Mistake if the autoencoder cannot decode samples, or if `flip` asks for mirrored pictures and there are none."""
        self._autoencoder(torch.device("cpu"))
        if flip:
            self.check_flips()

    def check_flips(self) -> None:
        """Raise a Mistake if the folder has no latents of mirrored pictures."""
        if not self.mirrored:
            raise Mistake(f"{self.folder} has no latents of mirrored pictures; encode with --flip, or train without flip")

    def _taking(self, device: torch.device, flip: bool) -> Take:
        """The function that takes rows: from the device if all latents take at most `IN_MEMORY` bytes, else from the files."""
        kinds = ["mean", "std"] if self.draws else ["mean"]
        sides = ["", "mirrored."] if flip else [""]
        if 4 * len(self) * math.prod(self.shape) * len(kinds) * len(sides) > IN_MEMORY:
            return lambda rows: {kind: _sent(torch.stack([self._row(kind, row) for row in rows.tolist()]), device) for kind in kinds}
        whole = {kind: torch.cat([shard[side + kind] for side in sides for shard in self._shards]).to(device) for kind in kinds}

        def take(rows: Tensor) -> dict[str, Tensor]:
            rows = rows.to(device, non_blocking=True)
            return {kind: tensor[rows] for kind, tensor in whole.items()}

        return take

    def _row(self, kind: str, row: int) -> Tensor:
        side, place = divmod(row, len(self))
        shard, offset = divmod(place, self._per_shard)
        return self._shards[shard][f"mirrored.{kind}" if side else kind][offset]

    def head(self, n: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
        """The first n latents, normalised, at the mean of their posteriors, and their labels or first captions."""
        n = min(n, len(self))
        z = torch.stack([self._row("mean", row) for row in range(n)])
        return ((z - self.mean) / self.std).to(device), self._told(torch.arange(n), device, None if self.texts is None else torch.zeros(n))

    def _told(self, index: Tensor, device: torch.device | str, chance: Tensor | None) -> Tensor | None:
        """The labels (n,) of these rows; with captions, one caption of each (n, L, D), chosen by uniforms `chance` (n,) in [0, 1)."""
        if self.labels is None:
            return None
        labels = self.labels[index]
        told = labels if self.texts is None or chance is None else self.texts.drawn(labels, chance)
        return told.to(device, non_blocking=True)

    def decoded(self, x: Tensor) -> Tensor:
        """Decode normalised latents x (n, c, h, w) to pictures, uint8 (n, C, H, W) on the CPU; computed on the device of x."""
        return self._autoencoder(x.device).decode(x.float() * self.std.to(x.device) + self.mean.to(x.device))

    def _autoencoder(self, device: torch.device) -> Autoencoder:
        if self._loaded is None:
            found = autoencoder.load(self.folder / "autoencoder")
            if found.digest != self.index["made of"]["autoencoder"]:
                raise Mistake(f"{self.folder / 'autoencoder'} is not the autoencoder that made its latents; {AGAIN} into another folder")
            self._loaded = found
        self._loaded.net.to(device)
        return self._loaded


def _sent(rows: Tensor, device: torch.device) -> Tensor:
    return rows.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else rows.to(device)


def read_index(folder: Path, *, whole: bool = True) -> dict[str, Any]:
    """The folder's index.json. whole: raise a Mistake if encoding is not finished."""
    path = folder / "index.json"
    try:
        index = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise Mistake(f"there are no latents in {folder}: it has no index.json; make them with noiseclock encode") from None
    except ValueError:
        index = None
    if not isinstance(index, dict) or "made of" not in index:
        raise Mistake(f"{path} is damaged; remove it, and {AGAIN}")
    if index.get("format") != FORMAT:
        raise Mistake(f"{path} has format {index.get('format')}, this version reads {FORMAT}; use the version of noiseclock that wrote it")
    if whole and "mean" not in index:
        raise Mistake(f"{folder} is incomplete, because encoding was stopped; {AGAIN} to go on")
    return index
