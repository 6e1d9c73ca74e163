"""The CLIP score against a direct computation, CLIP's way to see pictures against Pillow's, and what is said where something is missing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, CLIPModel

from noiseclock.lab.captions import embed
from noiseclock.lab.clip import CLIP, MEAN, STD, clip_score, prepared
from noiseclock.lab.errors import Mistake
from shapes import KINDS, WORDINGS, picture, write_encoder, write_shapes
from small_runs import TINY, said, trained

WORDS = [WORDINGS[i % 3].format(*kind) for i, kind in enumerate(KINDS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_encoder(tmp_path_factory.mktemp("clip") / "clip", "both")


def shown(side: int) -> torch.Tensor:
    """uint8 (12, 3, side, side): one picture of each kind, in noise, so that every pixel counts."""
    random = np.random.default_rng(0)
    images = [Image.fromarray(picture(*kind, random)).resize((side, side)) for kind in KINDS]
    noisy = np.stack([np.asarray(image) for image in images]) // 2 + random.integers(0, 100, (12, side, side, 3))
    return torch.from_numpy(noisy.astype(np.uint8)).permute(0, 3, 1, 2)


@torch.no_grad()
def test_the_score_is_that_of_a_direct_computation(folder):
    images = shown(24)  # as large as the model sees them
    found = clip_score(images, WORDS, CLIP(folder), batch=5)
    model, tokenizer = CLIPModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    given = tokenizer(WORDS, padding="max_length", max_length=8, return_tensors="pt")
    pixels = (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    out = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"], pixel_values=pixels)
    wanted = 100 * (out.logits_per_image / model.logit_scale.exp()).diagonal()
    # cosines in float32, of vectors that were normalised: a few times 6e-8, times 100
    assert found.mean == pytest.approx(wanted.mean().item(), abs=1e-4)
    assert found.error == pytest.approx(wanted.std().item() / 12**0.5, rel=1e-3)
    assert found.count == 12
    assert wanted.std() > 0.01
    other = clip_score(images, WORDS[1:] + WORDS[:1], CLIP(folder))
    assert abs(other.mean - found.mean) > 1e-3


@pytest.mark.parametrize("size", [(16, 16), (24, 24), (32, 48), (50, 35)])
def test_pictures_are_prepared_as_pillow_does_it(size):
    random = np.random.default_rng(1)
    pixels = random.integers(0, 256, (*size, 3)).astype(np.uint8)
    image = Image.fromarray(pixels)
    shorter = min(size)
    height, width = (24 * side // shorter for side in size)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    top, left = (height - 24) // 2, (width - 24) // 2
    wanted = np.asarray(image.crop((left, top, left + 24, top + 24)), np.float64) / 255
    found = prepared(torch.from_numpy(pixels).permute(2, 0, 1)[None], 24)[0].permute(1, 2, 0) * torch.tensor(STD) + torch.tensor(MEAN)
    # Pillow keeps its weights as whole numbers, so that a half may be rounded the other way: one step of brightness, and seldom
    difference = np.abs(found.numpy() - wanted)
    assert difference.max() < 1.01 / 255
    assert (difference > 0.5 / 255).mean() < 0.02


def test_grey_pictures_count_as_colours():
    grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(prepared(grey, 16), prepared(grey.expand(-1, 3, -1, -1), 16))


def test_the_folder_may_say_how_pixels_are_scaled(folder, tmp_path):
    write_encoder(tmp_path / "clip", "both")
    plain = clip_score(shown(24), WORDS, CLIP(folder))
    file = tmp_path / "clip" / "preprocessor_config.json"
    file.write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    assert clip_score(shown(24), WORDS, CLIP(tmp_path / "clip")).mean == plain.mean
    file.write_text(json.dumps({"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}))
    assert clip_score(shown(24), WORDS, CLIP(tmp_path / "clip")).mean != plain.mean
    file.write_text("{}")
    with pytest.raises(Mistake, match=r"preprocessor_config.json is damaged"):
        CLIP(tmp_path / "clip")


def test_evaluate_writes_it_down(folder, tmp_path, capsys, elsewhere):
    embed(write_shapes(tmp_path / "pictures", 40), write_encoder(tmp_path / "encoder"), tmp_path / "embedded")
    settings = replace(TINY, data="captions:embedded", conditional=True, model="uvit", patch=8, batch=8, updates=1)
    trained(settings, tmp_path / "run")
    trained(replace(TINY, updates=1), tmp_path / "digits")
    asked = ("evaluate", "run", "--samples", "0", "--vlb-images", "0", "--device", "cpu")
    text = said(capsys, *asked, "--clip", str(folder), "--clip-samples", "6", "--guidance", "2")
    assert "(6 samples, DDIM 2, with the captions of held-out images, CLIP of clip)" in text
    (file,) = (tmp_path / "run" / "evaluations").glob("*clip-*-ddim-2-6-guidance-2.json")
    written = json.loads(file.read_text())["clip"]
    assert f"CLIP score {written['mean']:.3f}" in text
    assert written["count"] == 6
    other = write_encoder(tmp_path / "elsewhere" / "clip", "both", seed=1)
    assert said(capsys, *asked, "--clip", str(other), "--clip-samples", "6", "--guidance", "2") != text
    files = sorted((tmp_path / "run" / "evaluations").glob("*.json"))
    assert len(files) == 2  # the folders have one name, the models are two
    assert file in files
    assert json.loads(file.read_text())["clip"] == written
    for where, message in (
        ("nowhere", "there is no folder nowhere; give that of a CLIP model"),
        ("encoder", "'clip_text_model', which is no known CLIP model"),
    ):
        assert message in said(capsys, *asked, "--clip", where, status=2)
    assert "at least one picture" in said(capsys, *asked, "--clip", str(folder), "--clip-samples", "0", status=2)
    without = said(capsys, "evaluate", "digits", "--samples", "0", "--vlb-images", "0", "--device", "cpu", "--clip", str(folder), status=2)
    assert "trained without" in without


def test_every_picture_needs_a_caption(folder):
    with pytest.raises(Mistake, match="got 11 for 12"):
        clip_score(shown(24), WORDS[1:], CLIP(folder))
