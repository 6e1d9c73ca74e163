"""The file formats of MNIST and CIFAR-10, read as pixels uint8 (N, C, H, W) and labels int64 (N,)."""

from __future__ import annotations

import gzip
import io
import math
import pickle
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from noiseclock.lab.errors import Mistake

Bytes: TypeAlias = NDArray[np.uint8]
Pictures: TypeAlias = tuple[Bytes, NDArray[np.int64]]

CIFAR10_FILES = {"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]}
CIFAR10_BINARY, CIFAR10_PICKLED = "cifar-10-batches-bin", "cifar-10-batches-py"
CIFAR10_SHAPE = (3, 32, 32)
# numpy's function that unpickles an array; taken from an array, because its module has been renamed between versions
RECONSTRUCT: Any = np.empty(0).__reduce__()[0]


def damaged(path: Path, what: str) -> Mistake:
    """The Mistake for a file that is not what its name says."""
    return Mistake(f"{path} is damaged: {what}; replace it, or remove it to have it downloaded again")


def read_idx(path: Path, dimensions: int) -> Bytes:
    """An IDX file of unsigned bytes, plain or gzipped: two zero bytes, the type 8, the dimensions' number and sizes (big-endian), the data."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise damaged(path, str(error)) from error
    magic = bytes([0, 0, 8, dimensions])
    start = 4 + 4 * dimensions
    if content[:4] != magic or len(content) < start:
        raise damaged(path, f"it begins with {content[:4].hex()}, but IDX files of {dimensions}-dimensional bytes begin with {magic.hex()}")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], ">u4"))
    if len(content) - start != math.prod(shape):
        raise damaged(
            path, f"its header promises {math.prod(shape)} bytes of data ({' x '.join(map(str, shape))}), but it holds {len(content) - start}"
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def read_mnist(images: Path, labels: Path) -> Pictures:
    """MNIST's two files of one split; pixels (N, 1, 28, 28)."""
    pixels, classes = read_idx(images, 3), read_idx(labels, 1)
    if pixels.shape[1:] != (28, 28):
        raise damaged(images, f"its images are {pixels.shape[1]} x {pixels.shape[2]}, but MNIST's are 28 x 28")
    return checked(labels, pixels[:, None], classes)


def find_cifar10(root: Path, split: str) -> Callable[[], Pictures] | None:
    """A function that reads a split of CIFAR-10 below `root`, in the first layout that is complete there; None if none is."""
    layouts: list[tuple[Callable[[Path], Pictures], list[Path]]] = [
        (read_cifar10_binary, [root / CIFAR10_BINARY / f"{name}.bin" for name in CIFAR10_FILES[split]]),
        (read_cifar10_pickle, [root / CIFAR10_PICKLED / name for name in CIFAR10_FILES[split]]),
        (read_cifar10_parquet, sorted(path for path in root.rglob("*.parquet") if split in path.name)),
    ]
    for read, paths in layouts:
        if paths and all(path.is_file() for path in paths):
            return partial(read_all, read, paths)
    return None


def read_all(read: Callable[[Path], Pictures], paths: list[Path]) -> Pictures:
    """The pictures of several files as one."""
    pixels, labels = zip(*map(read, paths), strict=True)
    return np.concatenate(pixels), np.concatenate(labels)


def checked(path: Path, pixels: Bytes, labels: Any) -> Pictures:
    """Pixels and labels of ten classes; a Mistake that names `path` if they do not fit."""
    labels = np.asarray(labels, np.int64)
    if len(labels) != len(pixels):
        raise damaged(path, f"{len(labels)} labels do not fit {len(pixels)} images")
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 9:
        raise damaged(path, f"its labels lie in {labels.min()}..{labels.max()} and should lie in 0..9")
    return pixels, labels


def read_cifar10_binary(path: Path) -> Pictures:
    """The official binary layout: rows of one label and the planes of red, green and blue."""
    content, row = path.read_bytes(), 1 + math.prod(CIFAR10_SHAPE)
    if not content or len(content) % row:
        raise damaged(path, f"its {len(content)} bytes are not a whole number of rows of {row}")
    rows = np.frombuffer(content, np.uint8).reshape(-1, row)
    return checked(path, rows[:, 1:].reshape(-1, *CIFAR10_SHAPE), rows[:, 0])


class ArraysOnly(pickle.Unpickler):
    """Unpickles numbers, strings, containers and numpy arrays; a pickle that names anything else is refused before it can run."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case (("numpy.core.multiarray" | "numpy._core.multiarray"), "_reconstruct"):
                return RECONSTRUCT
            case "numpy", ("ndarray" | "dtype"):
                return getattr(np, name)
            case "_codecs", "encode":  # how Python 3 writes bytes in the old protocols
                return latin1
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a batch of CIFAR-10 has no use for")


def latin1(text: str, encoding: str) -> bytes:
    """The bytes that a pickle spells as text."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}, which a batch of CIFAR-10 has no use for")
    return text.encode("latin1")


def read_cifar10_pickle(path: Path) -> Pictures:
    """The official python layout: a pickled dictionary with `data` uint8 (N, 3072) and `labels`; no code in it is run."""
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, encoding="bytes").load()
        # written by Python 2, whose strings are read as bytes
        fields = {key.decode() if isinstance(key, bytes) else key: value for key, value in content.items()}
        pixels, labels = fields["data"], fields["labels"]
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (math.prod(CIFAR10_SHAPE),):
            raise ValueError(f"its data are {pixels.dtype} {pixels.shape}")
    except Exception as error:  # a broken pickle fails with nearly any error
        raise damaged(path, f"no pickled batch of CIFAR-10 ({type(error).__name__}: {error})") from error
    return checked(path, pixels.reshape(-1, *CIFAR10_SHAPE), labels)


def read_cifar10_parquet(path: Path) -> Pictures:
    """The Hugging Face layout: columns `img` or `image` (encoded, in the field `bytes`) and `label`."""
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise damaged(path, str(error)) from error
    column = next((name for name in ("img", "image") if name in table.column_names), None)
    if column is None or "label" not in table.column_names:
        raise damaged(path, f"it needs the columns img (or image) and label, and has {', '.join(table.column_names)}")
    try:
        images = [np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")) for row in table[column].to_pylist()]
        pixels = np.stack(images).transpose(0, 3, 1, 2)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise damaged(path, f"an image in it cannot be read ({error})") from error
    if pixels.shape[1:] != CIFAR10_SHAPE:
        raise damaged(path, f"its images are {pixels.shape[2]} x {pixels.shape[3]}, but CIFAR-10's are 32 x 32")
    return checked(path, pixels, table["label"].to_pylist())
