"""The way from pictures to a model of latents, by commands alone."""

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image

from small_autoencoders import encoded, saved
from small_runs import TINY, UNET, _options, said, trained, unframed

pytestmark = pytest.mark.usefixtures("elsewhere")

AUTOENCODER = "train-autoencoder digits --out coder --channels 8 --factor 2 --latent-channels 2 --save-every 4 --device cpu"
ENCODE = "encode digits --autoencoder coder --out latents --flip --batch 300 --shard-size 1000 --device cpu"


def test_from_pictures_to_samples_of_latents(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path / "home"))
    shown = said(capsys, *AUTOENCODER.split(), "--updates", "8").splitlines()
    number = r"\d+\.?\d*(e[+-]\d+)?"
    assert re.fullmatch(rf"update 4 of 8: L1 {number}, KL {number}, held-out PSNR {number} dB", shown[3])
    assert re.fullmatch(rf"coder: an AutoencoderKL after 8 updates in 0\.\d minutes, held-out PSNR {number} dB", shown[-2])
    assert shown[-1] == "next: noiseclock encode digits --autoencoder coder --out LATENTS"
    for asked in ("8", "4"):
        assert said(capsys, *AUTOENCODER.split(), "--updates", asked).startswith("coder has already made 8 updates; give --updates a larger number")
    assert "update 12 of 12" in said(capsys, *AUTOENCODER.split(), "--updates", "12")

    assert said(capsys, *ENCODE.split()).splitlines() == [
        "1,000 of 1,797 pictures",
        "1,497 of 1,797 pictures",
        "1,797 of 1,797 pictures",
        "latents: latents of 2x4x4 of 1,497 training pictures, and of their mirror images",
        "next: noiseclock train RECIPE --data latents:latents",
    ]

    settings = replace(TINY, data="latents:latents", flip=True, patch=2, updates=3, validate_every=3)
    command = ["train", "digits", "--out", "run", "--device", "cpu", *_options(settings)]
    assert "data        latents:latents train, 1,497 images of 2x4x4, 10 classes" in said(capsys, *command, "--dry-run")
    said(capsys, *command)
    assert said(capsys, "sample", "run", "--count", "4") == "samples.png: 4 samples of run at update 3\n"
    with Image.open("samples.png") as grid:
        assert (grid.size, grid.mode) == ((134, 134), "L")
    shown = said(capsys, "evaluate", "run", "--samples", "10").splitlines()
    assert "(10 samples, DDIM 2, against 1,497 of digits train, digits classifier)" in shown[1]
    assert shown[4] == "no bits per dimension: they are defined for pixels, and this is a model of latents"
    written = json.loads((tmp_path / "run" / "evaluations" / "step-00000003-ddim-2-10-digits-train.json").read_text())
    assert written["bits"] is None


def test_a_model_of_latents_is_not_exported(capsys, tmp_path):
    cache = encoded(tmp_path / "latents", saved(tmp_path / "coder"))
    trained(replace(UNET, data=f"latents:{cache}", updates=1), tmp_path / "run")
    assert "use noiseclock sample for its pictures" in said(capsys, "export", "run", "out", status=2)


def test_the_next_command_encodes_the_pictures_as_the_autoencoder_saw_them(capsys):
    shown = said(capsys, *AUTOENCODER.split(), "--updates", "1", "--size", "8", "--flip").splitlines()
    assert shown[-1] == "next: noiseclock encode digits --size 8 --flip --autoencoder coder --out LATENTS"


MISTAKES = {
    "train-autoencoder": "DATA",
    "train-autoencoder digits": "--out",
    "train-autoencoder digits --out x --factor 16": "noiseclock: pictures of 8x8 cannot be halved 4 times",
    "train-autoencoder digits --out x --factor 6": "noiseclock: factor must be 2, 4, 8 or another power of 2, got 6\n",
    "train-autoencoder digits --out x --lr inf": "noiseclock: lr must be positive, kl not negative, both finite, and seed in [0, 2**32), got lr=inf",
    "train-autoencoder digits --out x --kl nan": "got lr=0.0003, kl=nan, seed=0\n",
    "train-autoencoder digits --out x --seed 4294967296": "got lr=0.0003, kl=1e-06, seed=4294967296\n",
    "train-autoencoder latents:x --out x": "noiseclock: latents:x is latents already; give pictures\n",
    "train-autoencoder folder:nowhere --out x": "noiseclock: there is no folder nowhere",
    "encode digits --autoencoder nowhere --out x": "noiseclock: there is no autoencoder in nowhere: it has no config.json",
    "encode latents:x --autoencoder nowhere --out x": "noiseclock: latents:x is latents already; give pictures\n",
    "encode digits --autoencoder nowhere --out x --shard-size 0": "noiseclock: batch and shard size must be at least 1, got 32 and 0\n",
    "train digits --data latents:nowhere": "noiseclock: there are no latents in nowhere: it has no index.json; make them with noiseclock encode\n",
    "train digits --data latents:": "noiseclock: 'latents:' lacks a path; say latents:PATH\n",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named_and_ends_with_2(capsys, tmp_path, command, message):
    assert message.strip() in unframed(said(capsys, *command.split(), status=2))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [AUTOENCODER, ENCODE], ids=["train-autoencoder", "encode"])
def test_a_missing_gpu_is_named(capsys, tmp_path, command):
    saved(tmp_path / "coder")
    assert "there is no CUDA device here" in said(capsys, *command.replace("cpu", "cuda").split(), status=2)
