"""Single images from a folder or a Hugging Face dataset: uint8 (3, H, W), always RGB.

Images are sorted by a hash, not by name. The first n are then a random sample; sorted by name, they would all be of one class. If there is no test
split, the same hash decides which images are held out, so that new files do not move old ones from one split to the other.
"""

from __future__ import annotations

import hashlib
import io
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from noiseclock.lab.errors import Mistake, choose
from noiseclock.lab.order import uniforms

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SPLITS = ("train", "test")
VALIDATION = ("validation", "valid", "val")  # splits of a hub dataset that replace a missing test split
HELD_OUT = 0.05  # fraction held out of a set without a test split


class Unreadable(Exception):
    """An image cannot be decoded; the message has its location and the reason."""


class Source(ABC):
    """Images by index. labels: int64 (N,) or None. classes: the number of classes, or None."""

    labels: Tensor | None = None
    classes: int | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def open(self, index: int) -> Image.Image: ...

    @abstractmethod
    def where(self, index: int) -> str:
        """The image's location, for messages."""

    @abstractmethod
    def training(self) -> Source:
        """The training split of the same set, or `self` if there is none."""

    def read(self, index: int, size: tuple[int, int] | None) -> Tensor:
        """uint8 (3, H, W), cropped to the centre and resized to `size` (H, W) unless that is None; raises Unreadable if decoding fails."""
        try:
            with self.open(index) as image:
                return to_pixels(image, size)
        except Exception as error:  # decoders raise nearly any error on a broken file
            raise Unreadable(f"{self.where(index)} ({error})") from error


def to_pixels(image: Image.Image, size: tuple[int, int] | None) -> Tensor:
    """uint8 (3, H, W), rotated by its EXIF tag, without transparency, cropped to the centre and resized (Lanczos) to `size` (H, W) unless None."""
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):  # 16-bit grey; Pillow's own conversion clips at 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode == "P":  # a palette may contain transparent colours, which Pillow cannot convert to RGB directly
        image = image.convert("RGBA")
    image = image.convert("RGB")
    if size is not None:
        image = fit(image, *size)
    return torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())


def fit(image: Image.Image, height: int, width: int) -> Image.Image:
    """The largest central crop with the target's aspect ratio, resized. Cropped first, so that outside pixels do not blend in at the edges."""
    scale = min(image.height / height, image.width / width)
    cut_height, cut_width = max(round(height * scale), 1), max(round(width * scale), 1)
    top, left = (image.height - cut_height) // 2, (image.width - cut_width) // 2
    return image.crop((left, top, left + cut_width, top + cut_height)).resize((width, height), Image.Resampling.LANCZOS)


def hold_out(hashes: Tensor, split: str) -> Tensor:
    """Indices of a split, sorted by hash: "test" has the images with a hash below `HELD_OUT`, at least one, and "train" the others."""
    order = hashes.argsort(stable=True)
    held = min(max(int((hashes < HELD_OUT).sum()), 1), len(order) - 1)
    return order[:held] if split == "test" else order[held:]


class Folder(Source):
    """The image files of a split below `root`, at any depth.

    If `root` has sub-folders `train` and `test` (or `val`), these are the splits; else some images are held out. If all files of a split are in
    sub-folders, and there is more than one, the first level of sub-folders are the classes, numbered by sorted name over both splits.
    """

    def __init__(self, root: Path, split: str) -> None:
        if not root.is_dir():
            raise Mistake(f"there is no folder {root}; give the path of a folder with images as folder:PATH")
        self.set, self.split = root, choose("split", split, SPLITS)
        train, test = divided(root)
        self.root = test if split == "test" else train
        files = {top: image_files(top) for top in {train, test}}
        mine = files[self.root]
        if not mine:
            raise Mistake(f"there is no image ({', '.join(SUFFIXES)}) in {self.root} or below; put some there")
        hashes = torch.tensor([hash_of(file) for file in mine], dtype=torch.float64)
        order = hold_out(hashes, split) if train == test else hashes.argsort(stable=True)
        # one array of bytes: with a list of a million strings, reference counting makes every worker copy the memory
        self.files = np.array([os.fsencode(file) for file in mine])[order.numpy()]
        names = sorted({file.partition("/")[0] for found in files.values() for file in found if "/" in file})
        if len(names) > 1 and all("/" in file for file in mine):
            number = {name: index for index, name in enumerate(names)}
            self.labels = torch.tensor([number[file.partition("/")[0]] for file in mine])[order]
            self.classes = len(names)

    def __len__(self) -> int:
        return len(self.files)

    def open(self, index: int) -> Image.Image:
        return Image.open(self.where(index))

    def where(self, index: int) -> str:
        return str(self.root / os.fsdecode(self.files[index]))

    def training(self) -> Source:
        return self if self.split == "train" else Folder(self.set, "train")


def divided(root: Path) -> tuple[Path, Path]:
    """The folders of the training and of the test images; the same folder twice if there are no separate ones."""
    train = root / "train"
    if not train.is_dir():
        return root, root
    return train, next((root / name for name in ("test", "val") if (root / name).is_dir()), train)


def refuse_among(data: str, folder: Path) -> None:
    """Raise a Mistake if a run's folder is inside the images of folder:PATH: a resumed run would train on its own sample grids."""
    kind, _, place = data.partition(":")
    if kind == "folder" and any(folder.resolve().is_relative_to(top.resolve()) for top in divided(Path(place).expanduser())):
        raise Mistake(f"{folder} lies among the images of {place}, so samples written there would be trained on; choose a folder outside with --out")


def image_files(top: Path) -> list[str]:
    """The image files below `top`, as relative paths with forward slashes; follows links, skips hidden files and folders."""
    found, seen = [], set()
    for folder, inner, names in os.walk(top, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link to a parent folder would loop forever
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        below = "" if folder == str(top) else Path(folder).relative_to(top).as_posix() + "/"
        found += [below + name for name in names if name.lower().endswith(SUFFIXES) and not name.startswith(".")]
    return found


def hash_of(file: str) -> float:
    """A hash in [0, 1) of the relative path."""
    return (int.from_bytes(hashlib.sha256(os.fsencode(file)).digest()[:8]) >> 11) * 2.0**-53


class Hub(Source):
    """A split of a Hugging Face dataset: the first column of images and the first of class labels.

    name: a local folder, saved by `save_to_disk` or readable by `load_dataset`, or a name on the hub. If there is only one split, some of its
    images are held out. If there are several and none is called "test", the validation split is used as "test".
    """

    def __init__(self, name: str, split: str) -> None:
        import datasets

        found = load_splits(name)
        alone = len(found) == 1
        if not alone and "test" not in found:
            split = next((other for other in VALIDATION if other in found), split) if split == "test" else split
        self.name, self.splits = name, SPLITS if alone else tuple(found)
        self.split = choose(f"split of {name}", split, self.splits)
        dataset = next(iter(found.values())) if alone else found[split]
        image = first_column(dataset, datasets.Image)
        if image is None:
            raise Mistake(f"{name} has no column of images, only {', '.join(dataset.column_names)}; cast one to datasets.Image")
        hashes = uniforms(0, "hold out", 0, len(dataset))
        self.rows = hold_out(hashes, split) if alone else hashes.argsort(stable=True)
        label = first_column(dataset, datasets.ClassLabel)
        if label is not None:
            labels = dataset.select_columns([label])[:][label]
            # hub datasets mark a missing label, as in many test splits, by -1 or None
            if all(value is not None and value >= 0 for value in labels):
                self.labels, self.classes = torch.tensor(labels)[self.rows], dataset.features[label].num_classes
        self.column = image
        self.dataset = dataset.select_columns([image]).cast_column(image, datasets.Image(decode=False))

    def __len__(self) -> int:
        return len(self.rows)

    def open(self, index: int) -> Image.Image:
        found = self.dataset[int(self.rows[index])][self.column]
        return Image.open(found["path"] if found["bytes"] is None else io.BytesIO(found["bytes"]))

    def where(self, index: int) -> str:
        return f"row {int(self.rows[index])} of {self.name}"

    def training(self) -> Source:
        return Hub(self.name, "train") if self.split != "train" and "train" in self.splits else self


def load_splits(name: str) -> dict[str, Any]:
    """The splits of a Hugging Face dataset by name; a dataset saved without splits counts as "train"."""
    import datasets

    path = Path(name).expanduser()
    if not path.exists() and name.startswith(("/", ".", "~")):
        raise Mistake(f"there is no folder {path}; give a folder or a name on the Hugging Face hub as hf:NAME_OR_PATH")
    try:
        if any((path / file).is_file() for file in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(str(path))
        else:
            found = datasets.load_dataset(str(path) if path.exists() else name)
    except Exception as error:  # errors of the network, the hub, the cache, a dataset builder ...
        raise Mistake(f"cannot load the Hugging Face dataset {name} ({str(error).partition(chr(10))[0]}); check its name and the network") from error
    return dict(found) if isinstance(found, datasets.DatasetDict) else {"train": found}


def first_column(dataset: Any, kind: type) -> str | None:
    """The name of the first column of this feature type, or None."""
    return next((name for name, feature in dataset.features.items() if isinstance(feature, kind)), None)
