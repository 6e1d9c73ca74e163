"""Latents: what a cache holds, that it survives being killed, and that everything trains on it."""

import json
import os
import shutil
import signal
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from forked import Forked
from noiseclock.lab import autoencoder, latents as latents_module
from noiseclock.lab.built import sampled
from noiseclock.lab.compare import Plan, compare
from noiseclock.lab.data import batches, head, load, load_images, pictured
from noiseclock.lab.encode import encode
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.evaluate import network_for
from noiseclock.lab.folder import checksum
from noiseclock.lab.latents import Latents
from noiseclock.lab.order import Order, flips, normals
from noiseclock.lab.trained import evaluated, opened
from small_autoencoders import encoded, saved
from small_runs import EDM, TINY, UNET, content, differing, state_of, trained, wait_until

# Python 3.12 warns when a process with threads forks; torch's loader forks, and its workers only read files
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def coder(tmp_path_factory) -> Path:
    """A KL autoencoder of 8x8 grey pictures, latents 2x4x4."""
    return saved(tmp_path_factory.mktemp("coders") / "kl")


@pytest.fixture(scope="module")
def cache(tmp_path_factory, coder) -> Path:
    """Latents of digits with their mirror images."""
    return encoded(tmp_path_factory.mktemp("latents") / "digits", coder, flip=True)


@pytest.fixture(scope="module")
def statistics(tmp_path_factory) -> Path:
    """A data folder of this module's own, where the classifier of digits is trained once."""
    return tmp_path_factory.mktemp("home")


def tensors(folder: Path, split: str = "train") -> dict[str, torch.Tensor]:
    """All shards of a split, joined."""
    found = [load_file(path) for path in sorted(folder.glob(f"{split}-*.safetensors"))]
    return {name: torch.cat([shard[name] for shard in found]) for name in found[0]}


def index_of(folder: Path) -> dict:
    return json.loads((folder / "index.json").read_text())


def on_latents(cache: Path, settings=TINY, **changes):
    return replace(settings, data=f"latents:{cache}", patch=2, **changes)


# --- what is stored -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["AutoencoderKL", "VQModel", "AutoencoderTiny"])
def test_a_cache_holds_the_latents_of_every_picture_and_its_mirror_image(tmp_path, kind):
    folder = encoded(tmp_path / "latents", saved(tmp_path / "coder", kind), flip=True)
    mine = autoencoder.load(tmp_path / "coder")
    for split in ("train", "test"):
        found, data = tensors(folder, split), load_images("digits", split=split)
        assert torch.equal(found["labels"], data.labels)
        for side, pixels in (("", data.pixels), ("mirrored.", data.pixels.flip(-1))):
            # in batches of another size than they were made in: the same but for rounding
            mean, std = mine.encode(pixels)
            assert (found[f"{side}mean"] - mean).abs().max() < 1e-5
            assert (std is None) == (f"{side}std" not in found)
            assert std is None or (found[f"{side}std"] - std).abs().max() < 1e-5
    shards = {split: [shard["count"] for shard in noted] for split, noted in index_of(folder)["splits"].items()}
    assert shards == {"train": [400, 400, 400, 297], "test": [300]}


@pytest.mark.parametrize("flip", [False, True])
def test_mean_and_std_are_numpys_over_the_training_pictures(tmp_path, coder, flip):
    folder = encoded(tmp_path, coder, flip=flip)
    found, index = tensors(folder), index_of(folder)
    sides = ("", "mirrored.")[: 1 + flip]
    z, std = (np.concatenate([found[side + kind].numpy() for side in sides]).astype(np.float64) for kind in ("mean", "std"))
    # float64 throughout; what remains is the order of the sums
    assert np.abs(index["mean"] - z.mean((0, 2, 3))).max() < 1e-12
    assert np.abs(index["std"] - z.std((0, 2, 3))).max() < 1e-12
    assert np.abs(index["noise"] - (std**2).mean((0, 2, 3))).max() < 1e-12


@pytest.mark.parametrize("place", ["", "@mean"], ids=["draws", "means"])
def test_a_network_sees_latents_of_mean_0_and_std_1(cache, place):
    data = load(f"latents:{cache}{place}")
    x0, labels = next(batches(data, 20 * len(data), seed=0, flip=True))
    assert (labels.shape, x0.shape, x0.dtype) == ((29_940,), (29_940, 2, 4, 4), torch.float32)
    # 20 epochs with random flips and draws: the error of either, by channel, is below 1/sqrt(29,940) even if all pixels of one picture moved together
    assert x0.mean((0, 2, 3)).abs().max() < 4 / 29_940**0.5
    assert (x0.std((0, 2, 3)) - 1).abs().max() < 4 / 29_940**0.5


def test_a_channel_that_never_changes_is_not_divided_by_nothing(tmp_path, cache):
    copied = tmp_path / "copy"
    copied.mkdir()
    for path in cache.glob("*.*"):
        (copied / path.name).write_bytes(path.read_bytes())
    index = index_of(cache)
    index["std"][0], index["noise"][0] = 0.0, 0.0
    (copied / "index.json").write_text(json.dumps(index))
    assert head(load(f"latents:{copied}"), 10)[0].isfinite().all()


def test_a_folder_of_pictures_keeps_labels_splits_and_where_it_lay(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("test", 3)):
        for kind in ("cats", "dogs"):
            (tmp_path / "set" / split / kind).mkdir(parents=True)
            for number in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(tmp_path / "set" / split / kind / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    coder = saved(tmp_path / "coder", channels=3)
    for name, limit in (("in memory", 2**30), ("on disk", 0)):
        monkeypatch.setattr("noiseclock.lab.data.IN_MEMORY", limit)
        encoded(tmp_path / name, coder, "folder:set", size=16, batch=4, shard_size=6)
    assert content(tmp_path / "in memory") == content(tmp_path / "on disk")
    data = load(f"latents:{tmp_path / 'in memory'}")
    assert (len(data), data.shape, data.classes) == (10, (2, 8, 8), 2)
    monkeypatch.chdir("/")
    pictures = pictured(data)
    assert (pictures.name, len(pictures), pictures.shape) == (f"folder:{tmp_path / 'set'} train", 10, (3, 16, 16))
    assert torch.equal(data.labels, pictures.labels)


# --- what is trained on -------------------------------------------------------------------------------------------------------------------


def test_flips_take_the_mirrored_picture_and_draws_depend_on_seed_and_place(cache):
    found, data = tensors(cache), load(f"latents:{cache}")
    stream = batches(data, 64, seed=3, start=40, flip=True)  # the third epoch
    for first in (40 * 64, 41 * 64):
        index, turned = Order(len(data), 3)(first, 64), flips(3, first, 64)
        assert 0 < turned.sum() < 64
        rows = [("mirrored." if flip else "", i) for i, flip in zip(index.tolist(), turned.tolist(), strict=True)]
        mean, std = (torch.stack([found[side + kind][i] for side, i in rows]) for kind in ("mean", "std"))
        z = mean + std * normals(3, "posterior", first, 64, (2, 4, 4), "cpu")
        x0, labels = next(stream)
        assert torch.equal(x0, (z - data.mean) / data.std)
        assert torch.equal(labels, found["labels"][index])
    # without draws and flips
    x0, _ = next(batches(load(f"latents:{cache}@mean"), 64, seed=3))
    plain = load(f"latents:{cache}@mean")
    assert torch.equal(x0, (found["mean"][Order(len(data), 3)(0, 64)] - plain.mean) / plain.std)


def test_ranks_share_the_order_and_the_draws(cache):
    data = load(f"latents:{cache}")
    alone = next(batches(data, 32, seed=1, flip=True))[0]
    shared = [next(batches(data, 16, seed=1, rank=rank, world_size=2, flip=True))[0] for rank in (0, 1)]
    assert torch.equal(torch.cat(shared), alone)


def test_normals_are_normal_and_others_for_every_place():
    z = normals(0, "posterior", 5, 1000, (2, 8, 8), "cpu")
    assert z.shape == (1000, 2, 8, 8)
    # 128,000 numbers: errors of 0.003 and 0.002
    assert abs(z.mean()) < 0.012
    assert abs(z.std() - 1) < 0.008
    assert torch.equal(normals(0, "posterior", 7, 3, (2, 8, 8), "cpu"), z[2:5])
    assert not torch.equal(normals(1, "posterior", 5, 1000, (2, 8, 8), "cpu"), z)


def test_a_large_cache_is_read_from_its_files(cache, monkeypatch):
    data = load(f"latents:{cache}")
    in_memory = [next(batches(data, 50, seed=2, start=start, flip=True)) for start in (0, 29)]
    monkeypatch.setattr(latents_module, "IN_MEMORY", 0)
    from_files = [next(batches(data, 50, seed=2, start=start, flip=True)) for start in (0, 29)]
    assert not differing(in_memory, from_files)


def test_held_out_latents_are_the_means_in_order(cache):
    data = load(f"latents:{cache}", split="test")
    x0, labels = head(data, 1000)
    found = tensors(cache, "test")
    assert torch.equal(x0, (found["mean"] - data.mean) / data.std)
    assert torch.equal(labels, found["labels"])
    train = load(f"latents:{cache}")
    assert torch.equal(data.mean, train.mean)  # the training pictures' for both
    assert torch.equal(data.std, train.std)


def test_what_a_network_made_is_decoded_by_the_copy_in_the_folder(cache, coder):
    data, found = load(f"latents:{cache}@mean", split="test"), tensors(cache, "test")
    pictures = data.decoded(head(data, 20)[0])
    theirs = autoencoder.load(coder).decode(found["mean"][:20])
    assert (pictures.dtype, pictures.shape) == (torch.uint8, (20, 1, 8, 8))
    # scaling there and back costs the last bits, at which rounding may tip over
    assert (pictures.int() - theirs.int()).abs().max() <= 1


# --- killed and damaged -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3])
def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path, cache, coder, after):
    run = encode("digits", coder, tmp_path, flip=True, batch=100, shard_size=400)
    for _ in range(after):
        next(run)
    run.close()
    assert len(list(tmp_path.glob("train-*.safetensors"))) == after
    with pytest.raises(Mistake, match="is incomplete, because encoding was stopped; run the same noiseclock encode again to go on"):
        load(f"latents:{tmp_path}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    encoded(tmp_path, coder, flip=True)
    assert content(tmp_path) == content(cache)
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())  # not made again


def _encode_in_child(coder: Path, out: Path) -> int:
    encoded(out, coder, flip=True, shard_size=100)
    return 0


def test_a_killed_run_goes_on_to_the_same_bytes(tmp_path, coder):
    out = tmp_path / "killed"
    with Forked(_encode_in_child, coder, out, output=tmp_path / "output") as process:
        wait_until(lambda: (out / "train-00003.safetensors").exists(), process, "four shards were there")
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "test-00002.safetensors").exists()
    (out / ".index.json.0123abcd.tmp").write_bytes(b"half an index")
    (out / ".train-00009.safetensors.tmp").write_bytes(b"half a shard")  # as a kill leaves it, and the next run writes over it
    encoded(out, coder, flip=True, shard_size=100)
    encoded(tmp_path / "whole", coder, flip=True, shard_size=100)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("place", [8, -1], ids=["header", "data"])
def test_a_flipped_bit_is_found_and_mended(tmp_path, coder, cache, place):
    encoded(tmp_path, coder, flip=True)
    path = tmp_path / "train-00001.safetensors"
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 1
    path.write_bytes(damaged)
    data = load(f"latents:{tmp_path}")
    for read in (lambda: next(batches(data, 4, seed=0)), lambda: head(data, 4)):
        with pytest.raises(Mistake, match=r"train-00001\.safetensors is damaged: its checksum is not the one in index\.json; run the same"):
            read()
    head(load(f"latents:{tmp_path}", split="test"), 4)  # which is whole
    encoded(tmp_path, coder, flip=True)
    assert content(tmp_path) == content(cache)


@pytest.fixture
def verified(monkeypatch) -> list[str]:
    """The names of the shards whose checksums are computed from now on."""
    names: list[str] = []
    monkeypatch.setattr(latents_module, "checksum", lambda path: names.append(path.name) or checksum(path))
    return names


SHARDS = ["train-00000.safetensors", "train-00001.safetensors", "train-00002.safetensors", "train-00003.safetensors"]


def test_shards_are_verified_once_and_again_when_they_have_changed(tmp_path, coder, verified):
    head(load(f"latents:{encoded(tmp_path / 'first', coder)}"), 4)
    assert sorted(verified) == SHARDS
    verified.clear()
    for _ in range(2):  # two processes, or two starts
        assert load(f"latents:{tmp_path / 'first'}").labels is not None
    assert verified == []
    head(load(f"latents:{tmp_path / 'first'}", split="test"), 4)
    assert verified == ["test-00000.safetensors"]
    # a bit that is flipped with the date set back, and the copy of a folder, dates and record included
    path = tmp_path / "first" / SHARDS[1]
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    state, damaged = path.stat(), bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    verified.clear()
    for _ in range(2):  # a damaged one is never recorded
        with pytest.raises(Mistake, match=r"train-00001\.safetensors is damaged: its checksum is not the one in index\.json"):
            head(load(f"latents:{tmp_path / 'first'}"), 4)
    assert verified == [SHARDS[1]] * 2
    verified.clear()
    head(load(f"latents:{tmp_path / 'copy'}"), 4)
    assert sorted(verified) == SHARDS
    # an index that knows another checksum of a shard
    index = index_of(tmp_path / "copy")
    index["splits"]["train"][2]["sha256"] = "0" * 64
    (tmp_path / "copy" / "index.json").write_text(json.dumps(index))
    with pytest.raises(Mistake, match=r"train-00002\.safetensors is damaged"):
        head(load(f"latents:{tmp_path / 'copy'}"), 4)


@pytest.mark.parametrize("text", [None, "", "[1, 2]", '{"train-00000.safetensors": 7}'], ids=["a folder", "empty", "a list", "a number"])
def test_a_record_of_verified_shards_that_cannot_be_read_or_written_is_no_obstacle(tmp_path, coder, verified, text):
    record = encoded(tmp_path, coder) / ".verified.json"
    record.mkdir() if text is None else record.write_text(text)
    for times in (1, 1 if text is not None else 2):
        head(load(f"latents:{tmp_path}"), 4)
        assert sorted(verified) == sorted(SHARDS * times)
    (tmp_path / "index.json").unlink()  # as the user is told to do when it is damaged; the record must not keep `encode` from making it anew
    encoded(tmp_path, coder)


def test_what_is_wrong_with_a_folder_is_one_sentence(tmp_path, coder, cache):
    copied = encoded(tmp_path / "copy", coder, flip=True)
    index = index_of(copied)

    def refused(message: str, name: str = f"latents:{copied}", **options) -> None:
        with pytest.raises(Mistake, match=message) as found:
            head(load(name, **options), 3)
        assert "\n" not in str(found.value)

    refused("there are no latents in .*nowhere: it has no index.json; make them with noiseclock encode", f"latents:{tmp_path / 'nowhere'}")
    refused("'latents:' lacks a path; say latents:PATH", "latents:")
    refused("latents have the size that they were encoded with, got size=8; leave size out", size=8)
    refused("unknown split of .* 'val'; known: train, test", split="val")
    for text, message in (
        ("{", "index.json is damaged; remove it"),
        (json.dumps({**index, "format": 2}), "has format 2, this version reads 1"),
        (json.dumps({**index, "std": ["x", 1]}), "index.json is damaged; run the same noiseclock encode again"),
        (json.dumps({**index, "std": [1.0]}), "index.json is damaged"),
        (json.dumps({**index, "shape": [2, 4, 5]}), r"train-00000\.safetensors does not match its index\.json"),
    ):
        (copied / "index.json").write_text(text)
        refused(message)
    (copied / "index.json").write_text(json.dumps(index))
    (copied / "train-00002.safetensors").unlink()
    refused(r"train-00002\.safetensors is missing; run the same noiseclock encode again")
    saved(copied / "autoencoder", seed=1)
    with pytest.raises(Mistake, match="copy/autoencoder is not the autoencoder that made its latents"):
        load(f"latents:{copied}", split="test").decoded(torch.zeros(1, 2, 4, 4))
    unflipped = encoded(tmp_path / "unflipped", coder)
    with pytest.raises(Mistake, match="has no latents of mirrored pictures; encode with --flip, or train without flip"):
        batches(load(f"latents:{unflipped}"), 4, seed=0, flip=True)


def test_a_folder_of_other_things_stays_as_it_is(tmp_path, coder):
    trained(replace(TINY, updates=1), tmp_path)
    before = content(tmp_path)
    with pytest.raises(Mistake, match=r"holds other files, such as .*; choose another folder"):
        encoded(tmp_path, coder)
    assert content(tmp_path) == before


def test_a_training_with_flips_that_cannot_be_leaves_nothing_in_its_folder(tmp_path, coder):
    settings = on_latents(encoded(tmp_path / "unflipped", coder), updates=1)
    with pytest.raises(Mistake, match="has no latents of mirrored pictures"):
        trained(replace(settings, flip=True), tmp_path / "run")
    assert content(tmp_path / "run") == {}
    trained(settings, tmp_path / "run")  # it was refused, because of what the first had written


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda coder: shutil.rmtree(coder), "there is no autoencoder in .*autoencoder: it has no config.json"),
        (lambda coder: saved(coder, seed=1), "autoencoder is not the autoencoder that made its latents"),
    ],
    ids=["gone", "another"],
)
def test_a_training_whose_samples_could_not_be_decoded_is_not_begun(tmp_path, coder, damage, message):
    """Otherwise it would end hours later, at its first samples."""
    settings = on_latents(encoded(tmp_path / "latents", coder), updates=1)
    damage(tmp_path / "latents" / "autoencoder")
    with pytest.raises(Mistake, match=message):
        trained(settings, tmp_path / "run")
    assert content(tmp_path / "run") == {}


def test_other_settings_do_not_go_into_the_same_folder(tmp_path, cache, coder):
    other = saved(tmp_path / "other", seed=1)
    for options, line in (
        ({"flip": False}, "flip: False here, True in"),
        ({"coder": other}, "autoencoder: '"),
        ({"batch": 50}, "batch: 50 here, 100"),
    ):
        settings = {"coder": coder, "flip": True, "batch": 100, "shard_size": 400, **options}
        with pytest.raises(Mistake, match=f"holds other latents; choose another folder, or make the settings alike:\n{line}"):
            next(encode("digits", out=cache, **settings))
    for options, message in (
        ({"batch": 0}, "batch and shard size must be at least 1, got 0 and 4096"),
        ({"data": f"latents:{cache}"}, "is latents already; give pictures"),
    ):
        with pytest.raises(Mistake, match=message):
            next(encode(**{"data": "digits", "coder": coder, "out": tmp_path / "new", **options}))
    assert not (tmp_path / "new").exists()


def test_a_full_disk_is_a_failure_that_loses_no_shard(tmp_path, coder, cache, monkeypatch):
    run = encode("digits", coder, tmp_path, flip=True, batch=100, shard_size=400)
    next(run)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(Failure, match=r"could not write .*train-00001\.safetensors .*No space left on device.*; run the same command again"):
            next(run)
    assert not list(tmp_path.glob(".*.tmp"))
    encoded(tmp_path, coder, flip=True)
    assert content(tmp_path) == content(cache)


# --- everything works on them -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [TINY, replace(UNET, dropout=0.2)], ids=["dit", "unet"])
def test_a_training_on_latents_resumes_to_the_bit_and_shows_pictures(tmp_path, cache, settings):
    mine = on_latents(cache, settings, flip=True, updates=6, save_every=2, sample_every=2, validate_every=3)
    trained(mine, tmp_path / "whole")
    trained(mine, tmp_path / "parts", stop=3)
    trained(mine, tmp_path / "parts")
    assert not differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts"))
    for step in (2, 4, 6):
        name = Path("samples") / f"step-{step:08d}.png"
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()
    with Image.open(tmp_path / "whole" / "samples" / "step-00000006.png") as grid:
        assert grid.size == (2 + 8 * (64 + 2), 2 + 8 * (64 + 2))  # 8x8 pictures, magnified, not 4x4 latents


def test_a_training_refuses_the_latents_of_another_autoencoder(tmp_path, coder):
    """Encoded anew into the same folder they have the same shape, so nothing else would notice."""
    settings = on_latents(encoded(tmp_path / "latents", coder), updates=4)
    trained(settings, tmp_path / "run", stop=2)
    shutil.rmtree(tmp_path / "latents")
    encoded(tmp_path / "latents", saved(tmp_path / "other", seed=1))
    for again in (lambda: trained(settings, tmp_path / "run"), lambda: opened(tmp_path / "run"), lambda: opened(tmp_path / "run", images=False)):
        with pytest.raises(Mistake, match=r"latents is not what this training began with: .*; encode as before, or start a new training"):
            again()
    shutil.rmtree(tmp_path / "latents")
    index = index_of(encoded(tmp_path / "latents", coder))
    # the posteriors of random weights have a std of about 1; another device rounds differently, other pictures have other means and spreads
    for name, more, alike in (("mean", 1e-4, True), ("std", 1e-4, True), ("mean", 0.1, False), ("std", 1.0, False)):
        (tmp_path / "latents" / "index.json").write_text(json.dumps({**index, name: [value + more for value in index[name]]}))
        with nullcontext() if alike else pytest.raises(Mistake, match="is not what this training began with: its latents have another mean or std"):
            opened(tmp_path / "run")
    (tmp_path / "latents" / "index.json").write_text(json.dumps(index))
    assert [record.step for record in trained(settings, tmp_path / "run")] == [3, 4]


def test_edm_is_told_the_spread_of_latents(tmp_path, cache):
    edm = on_latents(cache, replace(TINY, **EDM), updates=1)
    with pytest.warns(UserWarning, match="use edm:sigma_data=1"):
        trained(edm, tmp_path / "as it is")
    trained(replace(edm, objective="edm:sigma_data=1"), tmp_path / "told")
    x0, _ = next(batches(load(f"latents:{cache}"), 1000, seed=0))
    run = opened(tmp_path / "told")
    batch = run.clock.draw(x0)
    # of 1000 latents of 2x4x4, of std 1 in all: Var of a square is 2 at most where they are normal, and their pixels are not independent
    assert batch.target.square().mean() == pytest.approx(1, abs=0.1)
    assert batch.x_t.square().mean() == pytest.approx(1, abs=0.1)


def test_a_training_on_latents_is_sampled_and_evaluated_against_the_pictures(tmp_path, cache, statistics, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(statistics))
    trained(on_latents(cache, conditional=True, updates=3), tmp_path)
    run = opened(tmp_path)
    images = sampled(run.net, run.recipe, run.clock, run.data, 7, batch=3)
    assert (images.dtype, images.shape) == (torch.uint8, (7, 1, 8, 8))
    found = evaluated(run, samples=20, vlb_images=5, batch=150)
    assert found.bits is None
    assert (found.scores.reference, found.scores.reference_count, found.scores.count) == ("digits train", 1497, 20)
    assert found.scores.network == network_for("digits").title
    assert "no bits per dimension: they are defined for pixels, and this is a model of latents" in found.text()
    assert found.held_out == 300
    assert evaluated(run, samples=20, reference_split="test", batch=150).scores.reference == "digits test"


def test_predictions_of_latents_are_not_clipped(cache):
    """Latents of std 1 reach beyond 1: a model that always says 3 makes the picture of 3."""
    recipe = on_latents(cache, objective="x0")
    data, clock = load(recipe.data), recipe.clock()
    images = sampled(lambda x, t, *_: torch.full_like(x, 3.0), recipe, clock, data, 2)
    assert torch.equal(images, data.decoded(torch.full((2, 2, 4, 4), 3.0)))


def test_methods_are_compared_on_latents(tmp_path, cache, statistics, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(statistics))
    plan = Plan("digits", on_latents(cache, updates=2), ("uniform", "adaptive"), (0,), (1e-3,), 2, samples=8, vlb_images=4)
    points = [event.point for event in compare(plan, tmp_path, device="cpu") if event.point]
    assert len(points) == 2
    assert all("bits" not in point and point["frechet"] > 0 and point["samples"] == 8 for point in points)
    assert all(np.isfinite(point["utility"]).all() for point in points)


def test_pictures_that_are_gone_or_changed_are_named_and_samples_go_on(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "set").mkdir()
    for number in range(60):
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(tmp_path / "set" / f"{number}.png")
    cache = encoded(tmp_path / "latents", saved(tmp_path / "coder", channels=3), f"folder:{tmp_path / 'set'}")
    trained(on_latents(cache, updates=1), tmp_path / "run")
    (tmp_path / "set" / "1.png").rename(tmp_path / "1.png")
    run = opened(tmp_path / "run")
    with pytest.raises(Mistake, match=r"set train has changed since .*latents was made of it, from 5. of 3x8x8 to 5. of 3x8x8; encode it again"):
        evaluated(run, samples=20)
    (tmp_path / "set").rename(tmp_path / "elsewhere")
    with pytest.raises(Mistake, match=r"compared with the images that .*latents was made of, but these cannot be loaded: there is no folder"):
        evaluated(run, samples=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluated(run, samples=0).scores is None
    assert sampled(run.net, run.recipe, run.clock, run.data, 3).shape == (3, 3, 8, 8)


def test_latents_take_no_size_and_know_their_name(cache):
    assert isinstance(load(f"latents:{cache}"), Latents)
    assert load(f"latents:{cache}@mean").name == f"latents:{cache}@mean train"
    with pytest.raises(Mistake, match=r"unknown data 'latent:x'.*latents:PATH"):
        load("latent:x")
