"""The data sets known by name: scikit-learn's digits, MNIST and CIFAR-10. The last two lie in `home()`, and are downloaded on first use.

Each gives pixels uint8 (N, C, H, W) and labels int64 (N,) of ten classes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from noiseclock.lab.download import fetch, fetch_members
from noiseclock.lab.errors import Mistake
from noiseclock.lab.formats import CIFAR10_BINARY, CIFAR10_FILES, Pictures, find_cifar10, read_mnist
from noiseclock.lab.home import home

CIFAR10_URL, CIFAR10_MD5 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_COUNT = {"train": 50_000, "test": 10_000}
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
MNIST_PREFIX = {"train": "train", "test": "t10k"}
MNIST_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}


def digits(split: str) -> Pictures:
    """1797 handwritten digits of 8 x 8: every sixth image, the first included, is test (300), the others are train (1497)."""
    pixels, labels = _all_digits()
    chosen = (np.arange(len(pixels)) % 6 == 0) == (split == "test")
    return pixels[chosen], labels[chosen]


@cache
def _all_digits() -> Pictures:
    """Read once: scikit-learn keeps them as text, and a comparison asks for them twice in every training and once in every evaluation."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8), labels.astype(np.int64)


def mnist(split: str, *, url: str = MNIST_URL) -> Pictures:
    """60,000 and 10,000 handwritten digits of 28 x 28, from the IDX files in `home()/mnist`, plain or gzipped."""
    root = home() / "mnist"
    images, labels = (find_or_fetch(root, f"{MNIST_PREFIX[split]}-{kind}-ubyte", url) for kind in ("images-idx3", "labels-idx1"))
    return read_mnist(images, labels)


def find_or_fetch(root: Path, name: str, url: str) -> Path:
    """The path of MNIST's file `name`, plain or gzipped; downloaded if neither exists."""
    plain, packed = root / name, root / f"{name}.gz"
    if plain.is_file():
        return plain
    if not packed.is_file():
        try:
            fetch(f"{url}/{packed.name}", packed, MNIST_MD5[name])
        except OSError as error:
            raise Mistake(f"MNIST is missing and cannot be downloaded ({error}); put its file at {plain}, or gzipped at {packed}") from error
    return packed


def cifar10(split: str, *, url: str = CIFAR10_URL, md5: str = CIFAR10_MD5) -> Pictures:
    """50,000 and 10,000 photographs of 32 x 32 in `home()/cifar10`: the official binary or python layout, or Hugging Face's parquet files."""
    root = home() / "cifar10"
    if (read := find_cifar10(root, split)) is None:
        folder = root / CIFAR10_BINARY
        names = [f"{name}.bin" for names in CIFAR10_FILES.values() for name in names]
        try:
            fetch_members(url, folder, md5, names)
        except OSError as error:
            raise Mistake(
                f"CIFAR-10 is missing and cannot be downloaded ({error}); unpack cifar-10-binary.tar.gz so that {folder / names[0]} and the other "
                f"{len(names) - 1} files are in place"
            ) from error
        read = find_cifar10(root, split)
        assert read is not None  # just downloaded
    pixels, labels = read()
    if len(pixels) != CIFAR10_COUNT[split]:
        raise Mistake(f"CIFAR-10 in {root} has {len(pixels)} images in {split} and should have {CIFAR10_COUNT[split]}; replace its files")
    return pixels, labels


CLASSICS: dict[str, Callable[[str], Pictures]] = {"digits": digits, "mnist": mnist, "cifar10": cifar10}
