"""Training data by name, in memory or on disk, and as an endless stream of batches.

    data = load("cifar10")
    for x0, labels in batches(data, 128, seed=0, device="cuda", flip=True): ...

Small sets are kept as bytes on the training device; worker processes read large sets from disk. Both give the same batches.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from noiseclock.lab.captions import Captioned, Texts
from noiseclock.lab.classics import CLASSICS
from noiseclock.lab.errors import Failure, Mistake, choose
from noiseclock.lab.latents import Latents
from noiseclock.lab.order import Order, flips, uniforms
from noiseclock.lab.sources import SPLITS, Folder, Hub, Source, Unreadable

IN_MEMORY = 2**30  # bytes of pixels; a larger set stays on disk
IN_A_ROW = 100  # so many unreadable files in a row mean that the disk has failed


@dataclass(frozen=True, eq=False)
class Images:
    """Images in memory.

    pixels: uint8 (N, C, H, W). labels: int64 (N,) or None. classes: the number of classes, or None. skipped: number of unreadable files.
    texts: embedded captions, or None; the labels are then the indices with which `texts` finds them.
    """

    name: str
    pixels: Tensor
    labels: Tensor | None = None
    classes: int | None = None
    skipped: int = 0
    texts: Texts | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of every image."""
        _, channels, height, width = self.pixels.shape
        return channels, height, width

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> Tensor:
        return self.pixels[index]


class Read(NamedTuple):
    """Images read from disk: pixels uint8 (n, C, H, W), their indices (n,), and for each unreadable image that was skipped its index and reason."""

    pixels: Tensor
    indices: Tensor
    broken: dict[int, str]


class Files(Dataset[Tensor]):
    """Images on disk, read when they are needed: `files[i]` is uint8 (C, H, W). An unreadable image is replaced by the next readable one."""

    def __init__(self, name: str, source: Source, shape: tuple[int, int, int]) -> None:
        self.name, self.source, self.shape = name, source, shape
        self.labels, self.classes = source.labels, source.classes
        self.texts = texts_of(source)
        self._broken: set[int] = set()

    @property
    def skipped(self) -> int:
        """The number of unreadable files so far."""
        return len(self._broken)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.counted(self.read([index])).pixels[0]

    def read(self, indices: Sequence[int]) -> Read:
        """The images at these indices, or the next readable ones. Does not update `skipped`, because `self` may be a worker's copy."""
        pixels, found, broken = torch.empty((len(indices), *self.shape), dtype=torch.uint8), [], {}
        for place, index in enumerate(indices):
            for candidate in range(index, index + IN_A_ROW):
                candidate %= len(self)
                try:
                    pixels[place] = self.source.read(candidate, self.shape[1:])
                except Unreadable as error:
                    broken[candidate] = str(error)
                else:
                    found.append(candidate)
                    break
            else:
                raise Failure(f"{IN_A_ROW} images in a row cannot be read, the last is {broken[candidate]}; check the disk")
        return Read(pixels, torch.tensor(found, dtype=torch.int64), broken)

    __getitems__ = read  # a DataLoader calls it with all indices of a batch

    def counted(self, read: Read) -> Read:
        """Return `read`, after adding its unreadable images to `skipped`; the first of them causes a warning."""
        if read.broken and not self._broken:
            reason = next(iter(read.broken.values()))
            warnings.warn(
                f"{self.name}: cannot read {reason}; the next image takes its place, as for every other image that cannot be read", stacklevel=2
            )
        self._broken.update(read.broken)
        return read


Data = Images | Files | Latents


def load(name: str, *, split: str = "train", size: int | None = None) -> Data:
    """The data of a split, "train" or "test": latents for latents:PATH, else the images of `load_images`."""
    kind, colon, place = name.partition(":")
    if not colon or kind != "latents":
        return load_images(name, split=split, size=size)
    if not place:
        raise Mistake(f"{name!r} lacks a path; say latents:PATH")
    if size is not None:
        raise Mistake(f"latents have the size that they were encoded with, got size={size}; leave size out")
    return Latents(place, split)


def load_images(name: str, *, split: str = "train", size: int | None = None) -> Images | Files:
    """The images of a split, "train" or "test".

    name: digits, mnist, cifar10, folder:PATH (images, perhaps in one folder per class), hf:NAME_OR_PATH (a Hugging Face dataset, which may have
    other splits) or captions:PATH (images with embedded captions, see lab/captions.py). size: for the last three, images are cropped to the
    centre and resized to size x size; if None, to the size of the first image in "train".
    """
    kind, colon, place = name.partition(":")
    if colon and kind in ("folder", "hf", "captions"):
        if not place:
            raise Mistake(f"{name!r} lacks a path; say {kind}:PATH")
        if size is not None and size < 1:
            raise Mistake(f"size must be at least 1, got {size}")
        path = Path(place).expanduser()
        source = Hub(place, split) if kind == "hf" else Folder(path, split) if kind == "folder" else Captioned(path, split)
        return gather(f"{name} {split}", source, size)
    if kind == "latents" and colon:
        raise Mistake(f"{name} is latents already; give pictures")
    if name and name not in CLASSICS and Path(name).expanduser().is_dir():
        raise Mistake(f"{name!r} is a folder; say folder:{name}")
    choose("data", name, [*CLASSICS, "folder:PATH", "hf:NAME_OR_PATH", "latents:PATH", "captions:PATH"])
    pixels, labels = CLASSICS[name](choose("split", split, SPLITS))
    if size not in (None, pixels.shape[-1]):
        raise Mistake(f"{name} has images of size {pixels.shape[-1]}, got size={size}; leave size out")
    return Images(f"{name} {split}", torch.from_numpy(np.require(pixels, requirements=["C", "W"])), torch.from_numpy(labels), classes=10)


def outlined(data: Data) -> dict[str, Any]:
    """What a checkpoint keeps of its data: how many images there are. Of images also name, shape and number of classes, which suffice to sample a
    model without them, unless they have captions, which sampling needs. Of latents: what they mean."""
    if isinstance(data, Latents):
        return {"count": len(data), "latents": data.meaning}
    if data.texts is not None:
        return {"count": len(data)}
    return {"count": len(data), "name": data.name, "shape": list(data.shape), "classes": data.classes}


def without_images(outline: Mapping[str, Any]) -> Images:
    """A data set of no images, with the name, shape and classes of an outline."""
    return Images(outline["name"], torch.empty((0, *outline["shape"]), dtype=torch.uint8), classes=outline["classes"])


def refuse_other_latents(data: Data, outline: Mapping[str, Any]) -> None:
    """Raise a Mistake if these latents are not those of a checkpoint's outline: of another autoencoder, or of another scale."""
    known = outline.get("latents")
    if isinstance(data, Latents) and known is not None and (reason := data.unlike(known)):
        raise Mistake(f"{data.folder} is not what this training began with: {reason}; encode as before, or start a new training")


def refuse_other_count(data: Data, outline: Mapping[str, Any]) -> None:
    """Raise a Mistake if a training that goes on would see another number of images than before: their order would not be what it was."""
    then = outline.get("count", len(data))  # earlier versions did not keep it
    if then != len(data):
        raise Mistake(
            f"{data.name} has {len(data):,} images, and had {then:,} when this training began; make them as they were, or choose another folder for "
            "a new training"
        )


def pictured(data: Data) -> Images | Files:
    """The images themselves; for latents, the original images, which must still exist.

    Decoded latents would not do as a reference: they hide the error of the autoencoder, so the model would look better than it is.
    """
    if not isinstance(data, Latents):
        return data
    name, size = data.source
    try:
        found = load_images(name, split=data.split, size=size)
    except Mistake as error:
        raise Mistake(f"samples are compared with the images that {data.folder} was made of, but these cannot be loaded: {error}") from error
    if len(found) != len(data) or found.shape != data.picture_shape:
        then, now = (f"{count:,} of {'x'.join(map(str, shape))}" for count, shape in ((len(data), data.picture_shape), (len(found), found.shape)))
        raise Mistake(f"{found.name} has changed since {data.folder} was made of it, from {then} to {now}; encode it again")
    return found


def gather(name: str, source: Source, size: int | None) -> Images | Files:
    """All images of a source, decoded into memory if they take at most `IN_MEMORY` bytes."""
    if len(source) == 0:
        raise Mistake(f"{name} has no images; add some")
    # every split takes the shape of the training images, so that a model trained on them fits the other splits
    shape = first_shape(name, source.training()) if size is None else (3, size, size)
    if len(source) * shape[0] * shape[1] * shape[2] > IN_MEMORY:
        return Files(name, source, shape)
    pixels = torch.empty((len(source), *shape), dtype=torch.uint8)

    def decode(index: int) -> str | None:
        try:
            pixels[index] = source.read(index, shape[1:])
        except Unreadable as error:
            return str(error)
        return None

    with ThreadPoolExecutor(cpus()) as pool:
        reasons = list(pool.map(decode, range(len(source))))
    broken = [reason for reason in reasons if reason is not None]
    if not broken:
        return Images(name, pixels, source.labels, source.classes, texts=texts_of(source))
    good = torch.tensor([reason is None for reason in reasons])
    if not good.any():
        raise nothing_readable(name, len(source), broken[0])
    warnings.warn(f"{name}: skipped {len(broken)} of {len(source)} images that cannot be read, the first is {broken[0]}", stacklevel=3)
    labels = None if source.labels is None else source.labels[good]
    return Images(name, pixels[good], labels, source.classes, len(broken), texts_of(source))


def texts_of(source: Source) -> Texts | None:
    """The embedded captions of a source that has them."""
    return source.texts if isinstance(source, Captioned) else None


def first_shape(name: str, source: Source) -> tuple[int, int, int]:
    """(C, H, W) of the first image that can be read."""
    reason = ""
    for index in range(len(source)):
        try:
            channels, height, width = source.read(index, None).shape
        except Unreadable as error:
            reason = reason or str(error)
        else:
            return channels, height, width
    raise nothing_readable(name, len(source), reason)


def nothing_readable(name: str, count: int, reason: str) -> Mistake:
    """The Mistake for a set in which every file is unreadable."""
    return Mistake(f"{name}: none of the {count} images can be read, the first is {reason}; replace them")


def batches(
    data: Data,
    batch: int,
    *,
    seed: int,
    start: int = 0,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    flip: bool = False,
    workers: int | None = None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Endless batches on `device`: images (batch, C, H, W), float32 in [-1, 1], or normalised latents; and labels (batch,), captions (batch, L, D)
    or None.

    Batch k of a rank starts at place (k·world_size + rank)·batch of the order given by `seed`. start: the first k, that is, the number of batches
    that this rank has already had. flip: mirror each image with probability 1/2. Flips, and the choice among an image's captions, depend only on
    seed and place. workers: processes that read `Files`, by default one per CPU and at most 4.
    """
    for label, value, least in (("batch", batch, 1), ("start", start, 0), ("world_size", world_size, 1), ("workers", workers or 0, 0)):
        if value < least:
            raise Mistake(f"{label} must be at least {least}, got {value}")
    if not 0 <= rank < world_size:
        raise Mistake(f"rank must lie in 0..{world_size - 1}, got {rank}")
    places = range((start * world_size + rank) * batch, sys.maxsize, world_size * batch)
    if isinstance(data, Latents):
        if flip:
            data.check_flips()
        return data.batches(places, batch, seed=seed, device=torch.device(device), flip=flip)
    return _stream(data, batch, seed, places, torch.device(device), flip, min(4, cpus()) if workers is None else workers)


def _stream(
    data: Images | Files, batch: int, seed: int, places: Sequence[int], device: torch.device, flip: bool, workers: int
) -> Iterator[tuple[Tensor, Tensor | None]]:
    order = Order(len(data), seed)
    indices = (order(first, batch) for first in places)
    stream = from_memory(data, indices, device) if isinstance(data, Images) else from_disk(data, indices, device, workers)
    for first, (pixels, labels) in zip(places, stream, strict=True):
        if flip:
            mirrored = flips(seed, first, batch).to(device, non_blocking=True)
            pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
        if data.texts is not None and labels is not None:
            labels = data.texts.drawn(labels, uniforms(seed, "captions", first, batch))
        yield scaled(pixels), None if labels is None else labels.to(device, non_blocking=True)


def from_memory(data: Images, indices: Iterable[Tensor], device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Pixels on the device, which holds the whole set, and labels."""
    pixels = data.pixels.to(device)
    for index in indices:
        yield pixels[index.to(device, non_blocking=True)], None if data.labels is None else data.labels[index]


def from_disk(data: Files, indices: Iterable[Tensor], device: torch.device, workers: int) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Pixels on the device, read ahead by worker processes, and labels."""
    loader: DataLoader[Tensor] = DataLoader(
        data,
        batch_sampler=(index.tolist() for index in indices),  # endless, so it needs no length
        num_workers=workers,
        collate_fn=as_it_is,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # otherwise the DataLoader draws its workers' seed from the global generator
    )
    for read in loader:
        data.counted(read)
        yield read.pixels.to(device, non_blocking=True), None if data.labels is None else data.labels[read.indices]


def as_it_is(read: Any) -> Any:
    """The collate function: nothing to do, because a batch is read as a whole."""
    return read


def scaled(pixels: Tensor) -> Tensor:
    """uint8 in 0..255 as float32 in [-1, 1]."""
    return pixels.float() / 127.5 - 1


def head(data: Data, n: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor | None]:
    """The first n images (n, C, H, W), or all if there are fewer, scaled to [-1, 1], and their labels (n,), first captions (n, L, D) or
    None: a fixed batch of held-out data."""
    if isinstance(data, Latents):
        return data.head(n, device)
    n = min(n, len(data))
    if isinstance(data, Images):
        pixels, index = data.pixels[:n], torch.arange(n)
    else:
        pixels, index, _ = data.counted(data.read(range(n)))
    labels = None if data.labels is None else data.labels[index]
    if data.texts is not None and labels is not None:
        labels = data.texts.drawn(labels, torch.zeros(n))
    return scaled(pixels.to(device)), None if labels is None else labels.to(device)


def cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
