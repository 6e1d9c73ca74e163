import hashlib
import http.server
import io
import os
import pickle
import socket
import struct
import tarfile
import threading
from gzip import compress
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseclock.lab import classics, formats
from noiseclock.lab.data import load
from noiseclock.lab.download import fetch, fetch_members
from noiseclock.lab.errors import Mistake
from noiseclock.lab.home import home


def random_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


@pytest.fixture
def at_home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path))
    return tmp_path


# --- digits and MNIST -----------------------------------------------------------------------------------------------------------------------


def test_digits_are_scikit_learns_with_every_sixth_held_out():
    from sklearn.datasets import load_digits

    original = load_digits()
    train, test = load("digits"), load("digits", split="test")
    assert (len(train), len(test), train.shape, train.classes, train.name) == (1497, 300, (1, 8, 8), 10, "digits train")
    levels = original.images[::6]
    # 0..16 become 0..255 within the rounding to whole numbers, and are told apart
    assert np.abs(test.pixels[:, 0].numpy() - levels * 255 / 16).max() <= 0.5
    assert np.array_equal(np.rint(test.pixels[:, 0].numpy() * (16 / 255)), levels)
    assert test.labels.tolist() == original.target[::6].tolist()
    assert train.labels.tolist() == np.delete(original.target, np.s_[::6]).tolist()
    assert np.array_equal(np.rint(train.pixels[:, 0].numpy() * (16 / 255)), np.delete(original.images, np.s_[::6], axis=0))


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(root: Path, prefix: str, pixels: np.ndarray, labels: np.ndarray, packed: bool = False) -> None:
    (root / "mnist").mkdir(exist_ok=True)
    for kind, array in (("images-idx3", pixels), ("labels-idx1", labels)):
        content = idx(array)
        (root / "mnist" / f"{prefix}-{kind}-ubyte{'.gz' if packed else ''}").write_bytes(compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_reads_idx_files(at_home, packed):
    pixels, labels = random_pixels(5, 28, 28), np.array([3, 0, 9, 1, 2], np.uint8)
    write_mnist(at_home, "train", pixels, labels, packed)
    write_mnist(at_home, "t10k", pixels[:2], labels[:2], packed)
    train, test = load("mnist"), load("mnist", split="test")
    assert np.array_equal(train.pixels[:, 0], pixels)
    assert train.labels.tolist() == [3, 0, 9, 1, 2]
    assert (len(test), train.classes, train.shape) == (2, 10, (1, 28, 28))


PIXELS, LABELS = idx(random_pixels(3, 28, 28)), idx(np.array([1, 2, 3], np.uint8))


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (b"\0\0\x0d\x03" + PIXELS[4:], LABELS, "begins with 00000d03, but IDX files of 3-dimensional bytes begin with 00000803"),
        (LABELS, LABELS, "begins with 00000801"),
        (PIXELS[:10], LABELS, "damaged"),
        (b"", LABELS, "damaged"),
        (PIXELS[:-1], LABELS, r"promises 2352 bytes of data \(3 x 28 x 28\), but it holds 2351"),
        (PIXELS + b"x", LABELS, "promises 2352 bytes of data .* it holds 2353"),
        (idx(random_pixels(3, 28, 27)), LABELS, "its images are 28 x 27"),
        (PIXELS, idx(np.array([1, 2], np.uint8)), "2 labels do not fit 3 images"),
        (PIXELS, idx(np.array([1, 2, 10], np.uint8)), r"its labels lie in 1\.\.10"),
    ],
)
def test_damaged_mnist_is_a_mistake(at_home, images, labels, message):
    write_mnist(at_home, "train", np.zeros((0, 28, 28), np.uint8), np.zeros(0, np.uint8))
    (at_home / "mnist/train-images-idx3-ubyte").write_bytes(images)
    (at_home / "mnist/train-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(Mistake, match=message):
        load("mnist")


@pytest.mark.parametrize("broken", [compress(PIXELS)[:-20], b"no gzip at all", compress(PIXELS)[:40] + b"zzzz" + compress(PIXELS)[44:]])
def test_a_damaged_gzip_is_a_mistake(at_home, broken):
    write_mnist(at_home, "train", np.zeros((3, 28, 28), np.uint8), np.zeros(3, np.uint8), packed=True)
    (at_home / "mnist/train-images-idx3-ubyte.gz").write_bytes(broken)
    with pytest.raises(Mistake, match=r"images-idx3-ubyte\.gz is damaged"):
        load("mnist")


# --- CIFAR-10 in its layouts --------------------------------------------------------------------------------------------------------------

BATCHES = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]


def made_cifar10() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Four random images for each of the official files."""
    random = np.random.default_rng(10)
    return {name: (random.integers(0, 256, (4, 3, 32, 32), np.uint8), random.integers(0, 10, 4)) for name in BATCHES}


@pytest.fixture
def small_cifar10(monkeypatch) -> None:
    monkeypatch.setattr(classics, "CIFAR10_COUNT", {"train": 20, "test": 4})


def binary(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(pixels, labels, strict=True))


def python2_pickle(pixels: np.ndarray, labels: np.ndarray) -> bytes:
    """A batch as Python 2 and its numpy wrote it in protocol 2: byte strings throughout, and numpy's old module names."""

    def string(value: bytes) -> bytes:
        return b"T" + struct.pack("<i", len(value)) + value  # BINSTRING

    def whole(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)  # BININT

    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + whole(0) + b"\x85" + string(b"b") + b"tR"
    kind = b"cnumpy\ndtype\n(" + string(b"u1") + whole(0) + whole(1) + b"tR(" + whole(3) + string(b"|") + b"NNN" + whole(-1) * 2 + whole(0) + b"tb"
    state = b"(" + whole(1) + whole(len(pixels)) + whole(3072) + b"\x86" + kind + b"\x89" + string(pixels.tobytes()) + b"tb"
    numbers = b"](" + b"".join(map(whole, labels.tolist())) + b"e"
    return b"\x80\x02}(" + string(b"data") + array + state + string(b"labels") + numbers + string(b"batch_label") + string(b"made up") + b"u."


def python3_pickle(pixels: np.ndarray, labels: np.ndarray, protocol: int = 2) -> bytes:
    return pickle.dumps({b"data": pixels.reshape(-1, 3072), b"labels": labels.tolist(), b"filenames": [b"a.png"]}, protocol)


def parquet(pixels: np.ndarray, labels: np.ndarray, column: str = "img") -> bytes:
    import pyarrow
    import pyarrow.parquet

    encoded = []
    for image in pixels:
        file = io.BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(file, "PNG")
        encoded.append({"bytes": file.getvalue(), "path": None})
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({column: encoded, "label": labels.tolist()}), out)
    return out.getvalue()


LAYOUTS = {
    "binary": ("cifar-10-batches-bin/{}.bin", binary),
    "python 2": ("cifar-10-batches-py/{}", python2_pickle),
    "python 3": ("cifar-10-batches-py/{}", python3_pickle),
    "parquet": ("plain_text/{}.parquet", parquet),
    "parquet, image": ("{}.parquet", lambda pixels, labels: parquet(pixels, labels, "image")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cifar10_reads_every_layout_alike(at_home, small_cifar10, layout):
    pattern, write = LAYOUTS[layout]
    made = made_cifar10()
    for name, (pixels, labels) in made.items():
        if "parquet" in pattern:
            name = name.replace("data_batch_", "train-0000")
        path = at_home / "cifar10" / pattern.format(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(write(pixels, labels))
    train, test = load("cifar10"), load("cifar10", split="test")
    assert np.array_equal(train.pixels, np.concatenate([made[name][0] for name in BATCHES[:5]]))
    assert train.labels.tolist() == np.concatenate([made[name][1] for name in BATCHES[:5]]).tolist()
    assert np.array_equal(test.pixels, made["test_batch"][0])
    assert (train.shape, train.classes, test.name) == ((3, 32, 32), 10, "cifar10 test")


class Malicious:
    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({b"data": Malicious()}), r"it asks for posix\.system"),
        (pickle.dumps({b"data": eval}), r"it asks for builtins\.eval"),
        (b"cnumpy\nload\n.", r"it asks for numpy\.load"),
        (b"c_codecs\nencode\n(Va\nVrot13\ntR.", "it asks for the encoding 'rot13'"),
        (b"not a pickle", "no pickled batch"),
        (b"", "no pickled batch"),
        (pickle.dumps([1, 2]), "no pickled batch"),
        (pickle.dumps({b"labels": [1]}), "no pickled batch of CIFAR-10 .KeyError: 'data'"),
        (pickle.dumps({b"data": np.zeros((2, 3072)), b"labels": [1, 2]}, 2), r"its data are float64 \(2, 3072\)"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}, 2), "1 labels do not fit 2 images"),
    ],
)
def test_a_pickle_runs_no_code(tmp_path, content, message, monkeypatch):
    monkeypatch.setattr(f"{os.name}.system", lambda _: pytest.fail("the pickle was run"))
    path = tmp_path / "test_batch"
    path.write_bytes(content)
    with pytest.raises(Mistake, match=message):
        formats.read_cifar10_pickle(path)


def test_damaged_cifar10_is_a_mistake(at_home, tmp_path):
    pixels, labels = made_cifar10()["test_batch"]
    good = binary(pixels, labels)
    path = at_home / "cifar10/cifar-10-batches-bin/test_batch.bin"
    path.parent.mkdir(parents=True)
    for content, message in (
        (good[:-1], "12291 bytes are not a whole number of rows of 3073"),
        (b"", "0 bytes are not a whole number"),
        (b"\x0b" + good[1:], r"its labels lie in \d\.\.11"),
        (good, "has 4 images in test and should have 10000"),
    ):
        path.write_bytes(content)
        with pytest.raises(Mistake, match=message):
            load("cifar10", split="test")
    table = tmp_path / "test.parquet"
    for content, message in (
        (b"no parquet", "damaged"),
        (parquet(pixels, labels, "picture"), "needs the columns img .or image. and label, and has picture, label"),
        (parquet(pixels[..., :16], labels), "its images are 32 x 16"),
    ):
        table.write_bytes(content)
        with pytest.raises(Mistake, match=message):
            formats.read_cifar10_parquet(table)


# --- downloads ----------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path_factory):
    """(address, folder) of a web server on this machine."""
    folder = tmp_path_factory.mktemp("served")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", folder
        running.shutdown()
        thread.join()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


def archive(members: dict[str, bytes], link: str | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
            tar.addfile(info)
    return out.getvalue()


def test_cifar10_is_downloaded_once_and_read(at_home, small_cifar10, server):
    address, served = server
    made = made_cifar10()
    members = {f"cifar-10-batches-bin/{name}.bin": binary(*pictures) for name, pictures in made.items()}
    content = archive(members | {"cifar-10-batches-bin/readme.html": b"not wanted"})
    (served / "cifar.tar.gz").write_bytes(content)
    pixels, _ = classics.cifar10("train", url=f"{address}/cifar.tar.gz", md5=md5(content))
    assert np.array_equal(pixels, np.concatenate([made[name][0] for name in BATCHES[:5]]))
    folder = at_home / "cifar10/cifar-10-batches-bin"
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.bin" for name in BATCHES)
    # readable by all whom the umask allows, as any other file
    umask = os.umask(0)
    os.umask(umask)
    assert (folder / "test_batch.bin").stat().st_mode & 0o777 == 0o666 & ~umask
    (served / "cifar.tar.gz").unlink()
    assert classics.cifar10("test", url=f"{address}/cifar.tar.gz")[1].tolist() == made["test_batch"][1].tolist()


def test_mnist_is_downloaded_file_by_file(at_home, server, monkeypatch):
    address, served = server
    packed = {"train-images-idx3-ubyte": compress(PIXELS), "train-labels-idx1-ubyte": compress(LABELS)}
    for name, content in packed.items():
        (served / f"{name}.gz").write_bytes(content)
        monkeypatch.setitem(classics.MNIST_MD5, name, md5(content))
    pixels, labels = classics.mnist("train", url=address)
    assert (pixels.shape, labels.tolist()) == ((3, 1, 28, 28), [1, 2, 3])
    assert len(load("mnist")) == 3  # from the files, without the server's address


def test_a_wrong_checksum_leaves_nothing_behind(tmp_path, server):
    address, served = server
    (served / "file").write_bytes(b"hello")
    with pytest.raises(OSError, match="has the md5 5d41402abc4b2a76b9719d911017c592 and should have 0000"):
        fetch(f"{address}/file", tmp_path / "file", "0000")
    with pytest.raises(OSError, match="404"):
        fetch(f"{address}/other", tmp_path / "file", "0000")
    assert list(tmp_path.iterdir()) == []
    fetch(f"{address}/file", tmp_path / "deep" / "file", "5d41402abc4b2a76b9719d911017c592")  # the published md5 of "hello"
    assert (tmp_path / "deep" / "file").read_bytes() == b"hello"


def test_a_broken_connection_is_an_oserror(tmp_path):
    """A server that promises more than it sends, and one that speaks no HTTP."""
    for answer in (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf", b"nonsense\r\n\r\n"):
        with socket.create_server(("127.0.0.1", 0)) as listening:

            def serve(listening=listening, answer=answer):
                connection, _ = listening.accept()
                connection.recv(1000)
                connection.sendall(answer)
                connection.close()

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.raises(OSError, match=r"md5|broke off"):
                fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/file", tmp_path / "file", md5(b"half" * 25))
            thread.join()
    assert list(tmp_path.iterdir()) == []


def test_an_archive_writes_nothing_but_what_is_asked_for(tmp_path, server):
    address, served = server
    content = archive({"../../evil": b"1", "/tmp/wanted": b"inside", "other": b"2"}, link="also")
    (served / "a.tar.gz").write_bytes(content)
    inner = tmp_path / "one" / "two"
    with pytest.raises(OSError, match="holds no also"):
        fetch_members(f"{address}/a.tar.gz", inner, md5(content), ["wanted", "also"])
    assert list(inner.iterdir()) == []
    fetch_members(f"{address}/a.tar.gz", inner, md5(content), ["wanted"])
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["one/two/wanted"]
    assert (inner / "wanted").read_bytes() == b"inside"


def test_without_network_the_mistake_names_the_path(at_home, free_port):
    nobody = f"http://127.0.0.1:{free_port}"
    with pytest.raises(Mistake, match=f"cannot be downloaded .*{at_home}/cifar10/cifar-10-batches-bin/data_batch_1.bin"):
        classics.cifar10("train", url=f"{nobody}/cifar-10-binary.tar.gz")
    with pytest.raises(Mistake, match=f"cannot be downloaded .*{at_home}/mnist/t10k-images-idx3-ubyte"):
        classics.mnist("test", url=nobody)


# --- the real sets, where they are --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not (home() / "mnist/train-images-idx3-ubyte").is_file(), reason=f"no MNIST in {home()}")
def test_the_real_mnist():
    train, test = load("mnist"), load("mnist", split="test")
    assert (len(train), len(test), train.shape) == (60_000, 10_000, (1, 28, 28))
    # the counts of the classes and the mean of the pixels, 0.1307, as published many times
    assert torch.bincount(train.labels).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert abs(train.pixels.numpy().mean() / 255 - 0.1307) < 1e-4


@pytest.mark.skipif(formats.find_cifar10(home() / "cifar10", "train") is None, reason=f"no CIFAR-10 in {home()}")
def test_the_real_cifar10():
    train, test = load("cifar10"), load("cifar10", split="test")
    assert (len(train), len(test), train.shape, train.classes) == (50_000, 10_000, (3, 32, 32), 10)
    assert torch.bincount(train.labels).tolist() == [5000] * 10
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    assert train.labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # frog, truck, truck, deer, ...
    mean = train.pixels.numpy().mean((0, 2, 3)) / 255
    assert np.abs(mean - [0.4914, 0.4822, 0.4465]).max() < 1e-4
