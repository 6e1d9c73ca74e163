"""The papers' recipes for latents, at reduced depth: they train, are told classes or none, and are sampled, on latents of the shape they ask for."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from noiseclock.lab.built import sampled
from noiseclock.lab.models import DiT, UViT
from noiseclock.lab.recipes import recipe
from noiseclock.lab.trained import opened
from small_autoencoders import encoded, saved
from small_runs import trained

# Two heads, and the least depth; all else is the recipe's. `coco-t2i`, which needs captions, is trained in test_lab_text_to_image.py.
NARROW = {"dit": {"channels": 144, "blocks": 1}, "uvit": {"channels": 144, "blocks": 2}, "unet": {"channels": 32, "blocks": 1}}
QUIET = {"save_every": 0, "validate_every": 0, "sample_every": 0, "log_every": 1, "track": ()}


@pytest.fixture(scope="module")
def latents(tmp_path_factory):
    """A function that encodes pictures of noise in three classes to latents of a shape, twelve to train on and three held out."""
    random, made = np.random.default_rng(0), {}

    def folder(channels: int, side: int) -> Path:
        if (channels, side) not in made:
            root = tmp_path_factory.mktemp("noise")
            for number in range(15):
                path = root / "pictures" / ("test" if number < 3 else "train") / "abc"[number % 3] / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(random.integers(0, 256, (2 * side, 2 * side, 3), np.uint8)).save(path)
            coder = saved(root / "coder", channels=3, latent_channels=channels)  # it halves pictures once
            made[channels, side] = encoded(root / "latents", coder, f"folder:{root / 'pictures'}", flip=True, batch=5)
        return made[channels, side]

    return folder


@pytest.mark.parametrize("name", ["celebahq-ldm", "imagenet-uvit", "imagenet-dit", "ffhq-dit", "metfaces-dit"])
def test_a_papers_recipe_trains_and_samples_at_reduced_depth(tmp_path, latents, name, monkeypatch):
    channels, side = (3, 64) if name == "celebahq-ldm" else (4, 32)
    paper = recipe(name)
    told = []
    for kind in (DiT, UViT):
        real = kind.forward
        monkeypatch.setattr(kind, "forward", lambda net, x, t, labels=None, real=real: told.append(labels) or real(net, x, t, labels))
    settings = replace(paper, data=f"latents:{latents(channels, side)}", **NARROW[paper.model], **QUIET, batch=4, updates=6, drop_labels=0.5)
    records = trained(settings, tmp_path)
    first = records[0].loss
    if paper.model == "uvit":  # it does not start at zero, and min-SNR's weights are at most 1
        assert 0 < first < 2
    else:  # it predicts zero: the mean square of 4 pictures of noise, 4·4,096 normals or more, has the standard error √(2/16384) = 0.011
        assert first == pytest.approx(1, abs=0.05)
    assert len(records) == 6
    assert all(np.isfinite(record.loss) for record in records)
    run = opened(tmp_path)
    assert run.data.shape == (channels, side, side)
    if not paper.conditional:
        assert all(labels is None for labels in told)
        assert sampled(run.net, run.recipe, run.clock, run.data, 2, steps=2).shape == (2, 3, 2 * side, 2 * side)
        return
    seen = torch.cat(told).tolist()
    assert run.net.null == 3
    assert set(seen) == {0, 1, 2, 3}
    assert 0 < seen.count(3) < len(seen)  # half of 24 on average: all or none has the probability 2⁻²³
    told.clear()
    assert sampled(run.net, run.recipe, run.clock, run.data, 3, steps=2, guidance=1.5).shape == (3, 3, 2 * side, 2 * side)
    assert all(labels.tolist() == [0, 1, 2, 3, 3, 3] for labels in told)  # each picture once with its class, and once without
