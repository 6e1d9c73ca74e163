"""Pictures on disk: what is written is read back pixel by pixel, and nothing is overwritten or left half done."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from noiseclock.lab import pictures
from noiseclock.lab.errors import Failure, Mistake


def some(n: int, channels: int, height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (n, channels, height, width), generator=generator, dtype=torch.uint8)


def pixels(image: Image.Image) -> Tensor:
    """(C, H, W)"""
    array = np.asarray(image)
    return torch.from_numpy(array[None].copy() if array.ndim == 2 else array.transpose(2, 0, 1).copy())


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
@pytest.mark.parametrize(("side", "factor"), [(8, 8), (28, 2), (32, 2), (33, 1), (64, 1), (100, 1)])
def test_a_grid_holds_every_image_magnified_and_framed(channels, mode, side, factor):
    images = some(5, channels, side, side)
    grid = pictures.grid(images)
    assert grid.mode == mode
    cell = factor * side + pictures.BORDER
    assert grid.size == (3 * cell + pictures.BORDER, 2 * cell + pictures.BORDER)
    seen = pixels(grid)
    for i, image in enumerate(images):
        top, left = pictures.BORDER + i // 3 * cell, pictures.BORDER + i % 3 * cell
        block = seen[:, top : top + factor * side, left : left + factor * side]
        assert torch.equal(block, image.repeat_interleave(factor, 1).repeat_interleave(factor, 2))
        seen[:, top : top + factor * side, left : left + factor * side] = pictures.BACKGROUND
    assert (seen == pictures.BACKGROUND).all()


def test_oblong_images():
    assert pictures.grid(some(5, 3, 16, 32)).size == (3 * (64 + 2) + 2, 2 * (32 + 2) + 2)


@pytest.mark.parametrize("channels", [1, 3])
def test_each_form_reads_back_as_it_was(tmp_path, channels):
    images = some(11, channels, 8, 8)
    pictures.save(images, tmp_path / "new" / "grid.png")
    assert torch.equal(pixels(Image.open(tmp_path / "new" / "grid.png")), pixels(pictures.grid(images)))

    pictures.save(images, tmp_path / "samples.npz")
    with np.load(tmp_path / "samples.npz") as arrays:
        assert arrays["arr_0"].dtype == np.uint8
        assert np.array_equal(arrays["arr_0"], images.permute(0, 2, 3, 1).numpy())

    pictures.save(images, tmp_path / "folder")
    files = sorted((tmp_path / "folder").iterdir())
    assert [file.name for file in files] == [f"{i:02}.png" for i in range(11)]
    assert all(torch.equal(pixels(Image.open(file)), image) for file, image in zip(files, images, strict=True))
    assert {path.name for path in tmp_path.iterdir()} == {"new", "samples.npz", "folder"}  # nothing temporary is left


def test_any_number_of_channels_goes_into_an_npz(tmp_path):
    pictures.save(some(2, 4, 8, 8), tmp_path / "latents.npz")
    with np.load(tmp_path / "latents.npz") as arrays:
        assert arrays["arr_0"].shape == (2, 8, 8, 4)
    with pytest.raises(Mistake, match=r"1 or 3 channels, got 4; save to a name ending in \.npz"):
        pictures.save(some(2, 4, 8, 8), tmp_path / "latents.png")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "0.png").write_text("mine")
    with pytest.raises(Mistake, match="a folder that is not empty"):
        pictures.save(some(1, 1, 8, 8), tmp_path / "kept")
    assert (tmp_path / "kept" / "0.png").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    pictures.save(some(1, 1, 8, 8), tmp_path / "empty")
    assert [file.name for file in (tmp_path / "empty").iterdir()] == ["0.png"]


@pytest.mark.parametrize("name", ["grid.png", "samples.npz", "folder"])
def test_an_interrupted_write_leaves_what_was_there(tmp_path, monkeypatch, name):
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if name != "folder":
        pictures.save(some(1, 1, 8, 8), tmp_path / name)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Image.Image, "save", full)
    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(Failure, match=f"{name} could not be written: No space left"):
        pictures.save(some(4, 1, 8, 8), tmp_path / name)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_place_that_cannot_be_is_a_failure(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Failure, match="could not be written"):
        pictures.save(some(1, 1, 8, 8), tmp_path / "file" / "grid.png")


@pytest.mark.parametrize("images", [torch.zeros(2, 3, 8, 8), torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(0, 3, 8, 8, dtype=torch.uint8)])
def test_what_is_no_picture_is_named(images):
    with pytest.raises(Mistake, match=r"uint8 tensor \(N, C, H, W\)"):
        pictures.grid(images)
