"""Encode pictures once, into a folder of latents to train on (`lab/latents.py` describes its files).

    for done, of in encode("folder:data/faces", "autoencoders/faces", "data/faces-latents", size=128, flip=True): ...

Each shard is written atomically and then recorded in index.json. After an interruption, the same call continues after the last complete shard and
replaces damaged shards. On one machine the result is identical, byte for byte, to that of an uninterrupted run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from noiseclock.lab import autoencoder, pictures
from noiseclock.lab.autoencoder import Autoencoder
from noiseclock.lab.data import Files, Images, cpus, from_disk, load_images
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import checksum, difference, lock, sync, write_json
from noiseclock.lab.latents import FORMAT, VERIFIED, read_index
from noiseclock.lab.sources import SPLITS

# beside shards, what a folder without index.json may hold: it was not yet written when a run was killed, or it was damaged and has been removed
MINE = (".lock", VERIFIED, "autoencoder")


class Shard(NamedTuple):
    """The pictures from `start` to `stop` (excluded) of a split, and the file of their latents."""

    split: str
    file: str
    start: int
    stop: int


def encode(
    data: str,
    coder: str | Path,
    out: str | Path,
    *,
    size: int | None = None,
    flip: bool = False,
    batch: int = 32,
    shard_size: int = 4096,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[int, int]]:
    """Write the latents of both splits of `data` into the folder `out`; yields (pictures done, pictures in all).

    coder: the folder of an autoencoder. size: as in `load`. flip: encode the mirrored pictures too. batch: pictures per forward pass; the last bits
    of the latents may depend on it. shard_size: pictures per file.
    """
    if min(batch, shard_size) < 1:
        raise Mistake(f"batch and shard size must be at least 1, got {batch} and {shard_size}")
    if data.startswith("latents:"):
        raise Mistake(f"{data} is latents already; give pictures")
    coding, out = autoencoder.load(coder, device=device), Path(out)
    sets = {split: load_images(data, split=split, size=size) for split in SPLITS}
    train = sets["train"]
    made_of: dict[str, Any] = {
        "data": _lasting(data), "size": size, "pictures": list(train.shape), "count": {split: len(found) for split, found in sets.items()},
        "flip": flip, "batch": batch, "shard size": shard_size, "class": coding.name, "autoencoder": coding.digest,
    }  # fmt: skip
    index: dict[str, Any] = {
        "format": FORMAT, "made of": made_of, "shape": list(coding.latent_shape(train.shape)), "classes": train.classes,
        "posterior": coding.encode(torch.zeros((1, *train.shape), dtype=torch.uint8)).std is not None, "splits": {},
    }  # fmt: skip
    if train.texts is not None:
        made_of["captions"] = {split: found.texts.known_by for split, found in sets.items() if found.texts is not None}
    with lock(out):
        for left in out.glob(".index.json.*.tmp"):  # left by a run that was killed while it wrote index.json
            left.unlink()
        kept = _begin(out, index, coding)
        yield from _shards(out, index, kept, sets, coding, batch)
        write_json(out / "index.json", {**index, **statistics(index["splits"]["train"])})


def _lasting(data: str) -> str:
    """The name of the data with an absolute path, because an evaluation may start in another working directory."""
    kind, colon, place = data.partition(":")
    path = Path(place).expanduser()
    return f"{kind}:{path.resolve()}" if colon and path.exists() else data


def _begin(out: Path, index: dict[str, Any], coding: Autoencoder) -> dict[str, dict[str, Any]]:
    """Raise a Mistake if the folder holds other latents or other files; returns the shards recorded in its index, by file name."""
    kept = {}
    if (out / "index.json").exists():
        before = read_index(out, whole=False)
        if changes := difference(index["made of"], before["made of"], where=f"in {out}"):
            raise Mistake(f"{out} holds other latents; choose another folder, or make the settings alike:\n{changes}")
        kept = {shard["file"]: shard for shards in before["splits"].values() for shard in shards}
    elif strange := [path.name for path in out.iterdir() if path.name not in MINE and path.suffix not in (".safetensors", ".tmp", ".new")]:
        raise Mistake(f"{out} holds other files, such as {strange[0]}; choose another folder")
    if not (out / "autoencoder" / "config.json").exists():
        pictures.whole(out / "autoencoder", lambda new: coding.net.save_pretrained(str(new)))
    return kept


def _shards(
    out: Path, index: dict[str, Any], kept: dict[str, dict[str, Any]], sets: dict[str, Images | Files], coding: Autoencoder, batch: int
) -> Iterator[tuple[int, int]]:
    """Write the missing and damaged shards, and record all of them in the index."""
    made_of, total, done = index["made of"], sum(map(len, sets.values())), 0
    planned = [
        Shard(split, f"{split}-{number:05d}.safetensors", start, min(start + made_of["shard size"], len(found)))
        for split, found in sets.items()
        for number, start in enumerate(range(0, len(found), made_of["shard size"]))
    ]
    noted = {shard.file: kept[shard.file] for shard in planned if shard.file in kept and _is_whole(out / shard.file, kept[shard.file])}
    stream = _pictures([shard for shard in planned if shard.file not in noted], sets, batch)
    for shard in planned:
        if shard.file not in noted:
            tensors = _encoded(shard, stream, coding, flip=made_of["flip"], batch=batch)
            _write(tensors, out / shard.file)
            noted[shard.file] = {
                "file": shard.file, "count": shard.stop - shard.start, "sha256": checksum(out / shard.file), **moments(tensors)
            }  # fmt: skip
            index["splits"] = {split: [noted[each.file] for each in planned if each.split == split and each.file in noted] for split in sets}
            write_json(out / "index.json", index)
        done += shard.stop - shard.start
        yield done, total
    index["splits"] = {split: [noted[each.file] for each in planned if each.split == split] for split in sets}


def _is_whole(path: Path, noted: dict[str, Any]) -> bool:
    return path.is_file() and checksum(path) == noted["sha256"]


def _pictures(shards: list[Shard], sets: dict[str, Images | Files], batch: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The pictures of these shards, uint8 (n, C, H, W) with n at most `batch`, and their labels; no batch contains pictures of two shards."""
    for split, data in sets.items():
        rows = [rows for shard in shards if shard.split == split for rows in torch.split(torch.arange(shard.start, shard.stop), batch)]
        if isinstance(data, Images):
            yield from ((data.pixels[index], None if data.labels is None else data.labels[index]) for index in rows)
        elif rows:
            yield from from_disk(data, rows, torch.device("cpu"), min(4, cpus()))


def _encoded(shard: Shard, stream: Iterator[tuple[Tensor, Tensor | None]], coding: Autoencoder, *, flip: bool, batch: int) -> dict[str, Tensor]:
    """The tensors of a shard, by name."""
    found: dict[str, list[Tensor]] = {}
    for _ in range(shard.start, shard.stop, batch):
        pixels, labels = next(stream)
        for side, seen in (("", pixels), ("mirrored.", pixels.flip(-1)))[: 1 + flip]:
            mean, std = coding.encode(seen, batch=batch)
            if not bool(mean.isfinite().all()):
                raise Failure(f"the latents of pictures {shard.start:,} to {shard.stop:,} of {shard.split} are not finite; check the autoencoder")
            found.setdefault(f"{side}mean", []).append(mean)
            if std is not None:
                found.setdefault(f"{side}std", []).append(std)
        if labels is not None:
            found.setdefault("labels", []).append(labels)
    return {name: torch.cat(parts).contiguous() for name, parts in found.items()}


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a shard atomically: to a temporary file, synced to disk, then renamed."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        save_file(tensors, unfinished)
        sync(unfinished)
        os.replace(unfinished, path)
        sync(path.parent)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        raise Failure(f"could not write {path} ({error}); run the same command again to go on") from error


# --- mean and std -------------------------------------------------------------------------------------------------------------------------


def moments(tensors: dict[str, Tensor]) -> dict[str, list[float] | None]:
    """Per channel of a shard's latents, including the mirrored ones: mean, variance, and "noise", the mean variance of the posteriors."""

    def joined(kind: str) -> Tensor:
        return torch.cat([tensor for name, tensor in tensors.items() if name.removeprefix("mirrored.") == kind]).double()

    z = joined("mean")
    variance = z.var((0, 2, 3), correction=0)
    noise = joined("std").square().mean((0, 2, 3)).tolist() if "std" in tensors else None
    return {"mean": z.mean((0, 2, 3)).tolist(), "variance": variance.tolist(), "noise": noise}


def statistics(shards: list[dict[str, Any]]) -> dict[str, list[float] | None]:
    """Per channel of all latents of these shards: mean, std and "noise" (see `moments`)."""
    share = torch.tensor([shard["count"] for shard in shards], dtype=torch.float64)
    share = (share / share.sum())[:, None]
    means, variances = (torch.tensor([shard[name] for shard in shards], dtype=torch.float64) for name in ("mean", "variance"))
    mean = (share * means).sum(0)
    variance = (share * (variances + (means - mean) ** 2)).sum(0)
    noisy = shards[0]["noise"] is not None
    noise = (share * torch.tensor([shard["noise"] for shard in shards], dtype=torch.float64)).sum(0).tolist() if noisy else None
    return {"mean": mean.tolist(), "std": variance.sqrt().tolist(), "noise": noise}
