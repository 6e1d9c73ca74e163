"""Where images come from: folders, files that are read as they are needed, and Hugging Face datasets."""

import hashlib
import io
import itertools
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseclock.lab import data as data_module, sources
from noiseclock.lab.data import Files, Images, batches, head, load
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.order import Order, uniforms

# Python 3.12 warns when a process with threads forks; torch's loader forks, and its workers only read files
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


# --- folders ------------------------------------------------------------------------------------------------------------------------------


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def made_folder(root: Path, names: list[str], size: tuple[int, int] = (6, 6)) -> dict[str, np.ndarray]:
    """A random image (H, W, 3) for each name."""
    made = {name: np.random.default_rng(i).integers(0, 256, (*size, 3), np.uint8) for i, name in enumerate(names)}
    for name, pixels in made.items():
        save(root / name, pixels)
    return made


def as_set(data: Images | Files) -> set[bytes]:
    return {data[i].numpy().tobytes() for i in range(len(data))}


def planes(pixels: np.ndarray) -> bytes:
    return pixels.transpose(2, 0, 1).tobytes()


def test_a_folder_is_found_at_any_depth_and_split_by_the_hash_of_the_path(tmp_path):
    names = [f"{i:03}.png" for i in range(60)] + [f"a/b/{i}.PNG" for i in range(60)]
    made = made_folder(tmp_path, names)
    (tmp_path / "notes.txt").write_text("no image")
    (tmp_path / "._000.png").write_text("what a Mac leaves behind")
    (tmp_path / ".hidden").mkdir()
    save(tmp_path / ".hidden/x.png", made["000.png"])
    (tmp_path / "a" / "round").symlink_to(tmp_path)
    train, test = load(f"folder:{tmp_path}"), load(f"folder:{tmp_path}", split="test")
    held = {name for name in names if int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") < 0.05 * 2**64}
    assert 0 < len(held) < 20
    assert as_set(test) == {planes(made[name]) for name in held}
    assert as_set(train) == {planes(made[name]) for name in set(names) - held}
    assert (len(train), len(test), train.shape, train.labels, train.classes) == (120 - len(held), len(held), (3, 6, 6), None, None)
    # new files leave the old ones where they were
    made_folder(tmp_path / "new", [f"{i}.png" for i in range(40)])
    assert as_set(test) <= as_set(load(f"folder:{tmp_path}", split="test"))
    assert as_set(train) <= as_set(load(f"folder:{tmp_path}"))


def test_a_tiny_folder_holds_one_out(tmp_path):
    made_folder(tmp_path, ["a.png", "b.png"])
    assert len(load(f"folder:{tmp_path}")) == len(load(f"folder:{tmp_path}", split="test")) == 1
    (tmp_path / "a.png").unlink()
    assert len(load(f"folder:{tmp_path}")) == 1
    with pytest.raises(Mistake, match="has no images"):
        load(f"folder:{tmp_path}", split="test")
    (tmp_path / "b.png").unlink()
    with pytest.raises(Mistake, match=f"no image .*png.* in {tmp_path}"):
        load(f"folder:{tmp_path}")
    with pytest.raises(Mistake, match="unknown split 'valid'"):
        load(f"folder:{tmp_path}", split="valid")


@pytest.mark.parametrize("held", ["test", "val"])
def test_classes_are_the_sorted_folders_over_both_splits(tmp_path, held):
    names = [f"train/{name}/{i}.png" for name in ("dog", "ant", "cat") for i in range(5)]
    made = made_folder(tmp_path, [*names, f"{held}/dog/1.png", f"{held}/cat/deeper/2.png"])
    number = {planes(pixels): ["ant", "cat", "dog"].index(name.split("/")[1]) for name, pixels in made.items()}
    for split, count in (("train", 15), ("test", 2)):
        found = load(f"folder:{tmp_path}", split=split)
        assert (len(found), found.classes) == (count, 3)
        assert [number[image.numpy().tobytes()] for image in found.pixels] == found.labels.tolist()
    train = load(f"folder:{tmp_path}")
    assert set(train.labels[:7].tolist()) == {0, 1, 2}  # sorted by name, seven images would have two classes


def test_folders_are_classes_only_where_they_hold_everything(tmp_path):
    made_folder(tmp_path, ["train/images/a.png", "train/images/b.png"])
    assert load(f"folder:{tmp_path}").labels is None  # one folder, and `train` without `test` is just where they lie
    assert len(load(f"folder:{tmp_path}")) == 1
    made_folder(tmp_path, ["train/more/a.png"])
    assert load(f"folder:{tmp_path}").classes == 2
    made_folder(tmp_path, ["train/a.png"])
    assert load(f"folder:{tmp_path}").classes is None


def test_the_first_image_gives_the_size_and_others_are_cropped_to_it(tmp_path):
    """A wide image of which only the middle has its proportions: after the crop nothing of the sides is left."""
    wide = np.zeros((20, 100, 3), np.uint8)
    wide[:, 45:55] = 200
    save(tmp_path / "train/wide.png", wide)
    save(tmp_path / "test/x.png", wide)
    assert load(f"folder:{tmp_path}").shape == (3, 20, 100)
    squares = load(f"folder:{tmp_path}", size=20)
    assert squares.shape == (3, 20, 20)
    assert np.array_equal(squares.pixels[0], wide[:, 40:60].transpose(2, 0, 1))
    source = sources.Folder(tmp_path, "train")
    assert (source.read(0, (40, 20)) == 200).all()
    assert (source.read(0, (10, 5)) == 200).all()
    save(tmp_path / "test/x.png", wide.transpose(1, 0, 2))
    assert load(f"folder:{tmp_path}", split="test").shape == (3, 20, 100)  # that of the training images


def test_shrinking_averages_instead_of_picking_pixels(tmp_path):
    """A chessboard of single pixels has the mean 127.5 everywhere; picking would give 0 or 255."""
    board = (np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8)
    save(tmp_path / "board.png", board)
    small = load(f"folder:{tmp_path}", size=8).pixels.double()
    # The alternating sum of Lanczos' weights is at most 0.041, at the edges, on each axis: 0.041² · 127.5 = 0.22 are left of the board.
    # Pillow rounds after each axis, and the second pass enlarges the first rounding by the sum of its absolute weights, below 1.5.
    assert (small - 127.5).abs().max() <= 0.22 + 0.5 * 1.5 + 0.5


def test_every_kind_of_image_becomes_rgb(tmp_path):
    ramp = np.arange(36, dtype=np.uint8).reshape(6, 6) * 7
    grey = np.stack([ramp] * 3, 2)
    palette = Image.fromarray(grey).quantize(64)
    colours = np.array(palette.convert("RGB"))
    palette.save(tmp_path / "palette.png", transparency=bytes([0, 128] + [255] * 62))
    Image.fromarray(ramp).save(tmp_path / "grey.png")
    Image.fromarray(ramp.astype(np.uint16) * 256 + 77).save(tmp_path / "deep.png")
    Image.fromarray(np.dstack([grey, ramp])).save(tmp_path / "clear.png")
    Image.fromarray(grey).save(tmp_path / "plain.bmp")
    Image.fromarray(grey).save(tmp_path / "plain.webp", lossless=True)
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned: to be rotated by 90 degrees clockwise
    Image.fromarray(np.rot90(grey).copy()).save(tmp_path / "turned.png", exif=exif)
    Image.fromarray(grey).save(tmp_path / "photo.jpeg", quality=100)
    source = sources.Folder(tmp_path, "train")
    read = {Path(source.where(i)).name: source.read(i, None).permute(1, 2, 0).numpy() for i in range(len(source))}
    held = sources.Folder(tmp_path, "test")
    read |= {Path(held.where(i)).name: held.read(i, None).permute(1, 2, 0).numpy() for i in range(len(held))}
    assert len(read) == 8
    assert np.array_equal(read.pop("palette.png"), colours)
    # JPEG of the best quality rounds its 64 coefficients to whole numbers, an error of norm 0.5 · 8 at most, and then the pixels
    assert np.abs(read.pop("photo.jpeg").astype(int) - grey).max() <= 4 + 0.5
    for name, pixels in read.items():
        assert np.array_equal(pixels, grey), name


def test_corrupt_files_are_skipped_with_one_warning(tmp_path):
    made = made_folder(tmp_path, [f"train/{name}/{i}.png" for name in "ab" for i in range(4)] + ["test/a/x.png"])
    whole = (tmp_path / "train/a/0.png").read_bytes()
    (tmp_path / "train/a/0.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "train/b/1.png").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"skipped 2 of 8 images that cannot be read, the first is .*\.png \(.+\)") as caught:
        data = load(f"folder:{tmp_path}")
    assert len(caught) == 1
    assert (len(data), data.skipped, data.classes) == (6, 2, 2)
    number = {planes(pixels): "ab".index(name.split("/")[1]) for name, pixels in made.items()}
    assert [number[image.numpy().tobytes()] for image in data.pixels] == data.labels.tolist()
    for path in (tmp_path / "train").rglob("*.png"):
        path.write_bytes(b"broken")
    for size in (None, 8):
        with pytest.raises(Mistake, match=r"none of the 8 images can be read, the first is .*cannot identify"):
            load(f"folder:{tmp_path}", size=size)


# --- reading from disk --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(monkeypatch) -> None:
    """No set is small enough for memory."""
    monkeypatch.setattr(data_module, "IN_MEMORY", 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_files_give_the_batches_of_images_and_resume(tmp_path, workers, monkeypatch):
    made_folder(tmp_path, [f"{name}/{i}.png" for name in "abc" for i in range(6)], size=(5, 7))
    images = load(f"folder:{tmp_path}")
    monkeypatch.setattr(data_module, "IN_MEMORY", 0)
    files = load(f"folder:{tmp_path}")
    assert isinstance(images, Images)
    assert isinstance(files, Files)
    assert (files.shape, len(files), files.classes, files.name) == (images.shape, len(images), 3, images.name)
    assert all(torch.equal(files[i], images[i]) for i in range(len(files)))
    assert all(torch.equal(one, other) for one, other in zip(head(files, 4), head(images, 4), strict=True))
    with pytest.raises(IndexError):
        files[len(files)]
    assert torch.equal(pickle.loads(pickle.dumps(files))[3], images[3])  # as workers that are not forked receive it
    before = torch.get_rng_state()
    options = {"seed": 9, "flip": True, "workers": workers, "rank": 1, "world_size": 2}
    expected = list(itertools.islice(batches(images, 8, **options), 7))
    for start in (0, 4):
        stream = batches(files, 8, **options, start=start)
        for x0, labels in expected[start:]:
            found_x0, found_labels = next(stream)
            assert torch.equal(found_x0, x0)
            assert torch.equal(found_labels, labels)
        stream.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("limit", [0, 2**30])
def test_the_gpu_shows_the_same_batches(tmp_path, monkeypatch, limit):
    made_folder(tmp_path, [f"{name}/{i}.png" for name in "ab" for i in range(20)])
    here = batches(load(f"folder:{tmp_path}"), 16, seed=1, flip=True)
    monkeypatch.setattr(data_module, "IN_MEMORY", limit)
    there = batches(load(f"folder:{tmp_path}"), 16, seed=1, flip=True, device="cuda", workers=2)
    for _ in range(10):
        (x0, labels), (cuda_x0, cuda_labels) = next(here), next(there)
        assert cuda_x0.is_cuda
        assert cuda_x0.abs().max() <= 1
        assert torch.equal(labels, cuda_labels.cpu())
        # a GPU may multiply by 1/127.5 where a CPU divides: two more roundings of a value up to 2
        assert torch.allclose(x0, cuda_x0.cpu(), rtol=0, atol=4 * 2.0**-24)
    there.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_that_breaks_later_is_replaced_and_warned_of_once(tmp_path, on_disk, workers):
    made_folder(tmp_path, [f"train/{name}/{i}.png" for name in "ab" for i in range(5)] + ["test/a/x.png"])
    files = load(f"folder:{tmp_path}")
    good = [files[i] for i in range(10)]
    for index in (3, 4, 9):
        Path(files.source.where(index)).write_bytes(b"broken")
    stream = batches(files, 10, seed=0, workers=workers)
    with pytest.warns(UserWarning, match="cannot read .*png .*cannot identify.* takes its place") as caught:
        seen = [next(stream) for _ in range(2)]
    stream.close()
    assert len(caught) == 1
    assert files.skipped == 3
    instead = {3: 5, 4: 5, 9: 0}
    indices = Order(10, 0)(0, 20).tolist()
    for index, image, label in zip(indices, torch.cat([x0 for x0, _ in seen]), torch.cat([labels for _, labels in seen]), strict=True):
        actual = instead.get(index, index)
        assert torch.equal(image, good[actual].float() / 127.5 - 1)
        assert label == files.labels[actual]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(files[9], good[0])
        assert torch.equal(head(files, 10)[1], files.labels[[0, 1, 2, 5, 5, 5, 6, 7, 8, 0]])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_is_gone_is_a_failure(tmp_path, on_disk, workers):
    made_folder(tmp_path, [f"{i}.png" for i in range(5)])
    files = load(f"folder:{tmp_path}")
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(Failure, match=r"100 images in a row cannot be read, the last is .*No such file.* check the disk"):
        next(batches(files, 2, seed=0, workers=workers))


# --- Hugging Face datasets ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hf(monkeypatch, tmp_path_factory):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    datasets.disable_progress_bars()
    return datasets


def random_pixels(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, np.uint8)


def table(hf, n: int, **more):
    """(a dataset of n random images with labels, its images by their bytes)."""
    pixels = random_pixels(n, 5, 4, 3)
    features = hf.Features({"caption": hf.Value("string"), "picture": hf.Image(), "kind": hf.ClassLabel(names=["x", "y", "z"])})
    rows = {"caption": ["c"] * n, "picture": [Image.fromarray(image) for image in pixels], "kind": [i % 3 for i in range(n)]} | more
    return hf.Dataset.from_dict(rows, features), {planes(image): i for i, image in enumerate(pixels)}


def test_a_saved_dataset_is_read_by_the_types_of_its_columns(hf, tmp_path, monkeypatch):
    train, numbers = table(hf, 30)
    hf.DatasetDict({"train": train, "validation": table(hf, 7)[0]}).save_to_disk(tmp_path / "set")
    images = load(f"hf:{tmp_path}/set")
    assert (len(images), images.shape, images.classes) == (30, (3, 5, 4), 3)
    found = [numbers[image.numpy().tobytes()] for image in images.pixels]
    assert sorted(found) == list(range(30))
    assert found != sorted(found)
    assert images.labels.tolist() == [number % 3 for number in found]
    assert load(f"hf:{tmp_path}/set", split="validation").pixels.shape == (7, 3, 5, 4)
    small = hf.Dataset.from_dict({"picture": [Image.new("RGB", (2, 2))]}, hf.Features({"picture": hf.Image()}))
    hf.DatasetDict({"train": train, "test": small}).save_to_disk(tmp_path / "mixed")
    assert load(f"hf:{tmp_path}/mixed", split="test").shape == (3, 5, 4)
    hf.DatasetDict({"one": train, "two": small}).save_to_disk(tmp_path / "untrained")
    assert load(f"hf:{tmp_path}/untrained", split="two").shape == (3, 2, 2)
    assert load(f"hf:{tmp_path}/set", size=8).shape == (3, 8, 8)
    held_out, validation = (load(f"hf:{tmp_path}/set", split=split) for split in ("test", "validation"))
    assert torch.equal(held_out.pixels, validation.pixels)  # which many sets on the hub have in place of a test split
    with pytest.raises(Mistake, match=r"unknown split of .*/untrained 'test'; known: one, two"):
        load(f"hf:{tmp_path}/untrained", split="test")
    monkeypatch.setattr(data_module, "IN_MEMORY", 0)
    files = load(f"hf:{tmp_path}/set")
    assert isinstance(files, Files)
    assert torch.equal(pickle.loads(pickle.dumps(files))[3], images[3])
    streams = (batches(images, 16, seed=4, flip=True), batches(files, 16, seed=4, flip=True, workers=2))
    for _ in range(3):
        (x0, labels), (other_x0, other_labels) = map(next, streams)
        assert torch.equal(x0, other_x0)
        assert torch.equal(labels, other_labels)
    streams[1].close()


def test_a_dataset_without_splits_holds_a_few_out(hf, tmp_path):
    dataset, numbers = table(hf, 60)
    dataset.save_to_disk(tmp_path / "set")
    parts = {split: [numbers[image] for image in as_set(load(f"hf:{tmp_path}/set", split=split))] for split in ("train", "test")}
    assert sorted(parts["train"] + parts["test"]) == list(range(60))
    assert sorted(parts["test"]) == (uniforms(0, "hold out", 0, 60) < 0.05).nonzero().flatten().tolist() != []
    with pytest.raises(Mistake, match=r"unknown split of .* 'valid'; known: train, test"):
        load(f"hf:{tmp_path}/set", split="valid")


def test_unlabelled_rows_and_corrupt_rows(hf, tmp_path):
    table(hf, 4, kind=[0, 1, -1, 2])[0].save_to_disk(tmp_path / "unlabelled")
    assert load(f"hf:{tmp_path}/unlabelled").labels is None
    features = hf.Features({"image": hf.Image(decode=False)})
    good = io.BytesIO()
    Image.fromarray(random_pixels(5, 4, 3)).save(good, "PNG")
    rows = [{"bytes": content, "path": None} for content in (good.getvalue(), b"broken", good.getvalue(), good.getvalue())]
    splits = {"train": hf.Dataset.from_dict({"image": rows}, features), "other": hf.Dataset.from_dict({"image": rows[:1]}, features)}
    hf.DatasetDict(splits).save_to_disk(tmp_path / "corrupt")
    with pytest.warns(UserWarning, match="skipped 1 of 4 images that cannot be read, the first is row 1 of"):
        assert len(load(f"hf:{tmp_path}/corrupt")) == 3
    hf.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "text")
    with pytest.raises(Mistake, match="no column of images, only text"):
        load(f"hf:{tmp_path}/text")


def test_a_folder_that_load_dataset_reads(hf, tmp_path):
    dataset, numbers = table(hf, 6)
    dataset.cast_column("kind", hf.Value("int64")).to_parquet(tmp_path / "all-0.parquet")
    data = load(f"hf:{tmp_path}")
    assert as_set(data) | as_set(load(f"hf:{tmp_path}", split="test")) == set(numbers)
    assert (len(data), data.shape, data.labels) == (5, (3, 5, 4), None)  # a column of whole numbers is no label by its type


def test_a_hub_out_of_reach_is_a_mistake(hf, monkeypatch):
    def unreachable(name):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand a long story")

    monkeypatch.setattr(hf, "load_dataset", unreachable)
    with pytest.raises(Mistake, match=r"cannot load the Hugging Face dataset some/name \(Couldn't reach 'some/name' on the Hub\); check"):
        load("hf:some/name")
