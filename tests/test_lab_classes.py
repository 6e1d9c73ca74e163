"""Models of classes: told one, they make pictures of it, a classifier agrees; and what is done and said where classes are missing."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from noiseclock import cli
from noiseclock.core.measure import loss_over_time
from noiseclock.lab import classifier
from noiseclock.lab.built import sampled
from noiseclock.lab.data import head, load
from noiseclock.lab.models.dit import DiT
from noiseclock.lab.recipes import recipe
from noiseclock.lab.trained import opened
from small_runs import TINY, comparison, points, said, trained

# --- held-out images without labels -------------------------------------------------------------------------------------------------------


@pytest.fixture
def unlabelled(tmp_path, elsewhere):
    """Settings of a conditional model of two classes whose test images lie in none, as in many published sets."""
    random = np.random.default_rng(0)
    for i in range(20):
        for place in (tmp_path / "set" / "train" / f"class {i % 2}", tmp_path / "set" / "test"):
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8)).save(place / f"{i}.png")
    return replace(TINY, data="folder:set", conditional=True, updates=2, validate_every=2)


SAID = "folder:set test has no labels, so the model is evaluated there with the null class"


def test_a_training_says_that_it_is_validated_without_classes(unlabelled, tmp_path, recwarn):
    trained(unlabelled, tmp_path / "run")
    assert [str(found.message) for found in recwarn if "labels" in str(found.message)] == [SAID]
    trained(replace(unlabelled, drop_labels=0.0), tmp_path / "never withheld")
    assert [str(found.message) for found in recwarn][-1] == f"{SAID}, which it was not trained with: drop_labels is 0"


@pytest.mark.filterwarnings("ignore:.*has no labels")
def test_what_is_measured_without_classes_is_the_model_that_is_told_none(unlabelled, tmp_path, capsys):
    settings = replace(unlabelled, lr=0.05, warmup=0, updates=20, validate_every=20)  # so far that the label counts
    trained(settings, tmp_path / "run")
    assert "VLB" in said(capsys, "evaluate", "run", "--samples", "0", "--vlb-images", "8", "--device", "cpu")
    (written,) = (tmp_path / "run" / "evaluations").glob("*.json")
    run, held_out = opened(tmp_path / "run"), load("folder:set", split="test")
    x0, _ = head(held_out, 20)
    none, other = (loss_over_time(run.clock, run.net, x0, cond=torch.full((20,), label), times=50).loss for label in (2, 0))
    found = json.loads(written.read_text())["curve"]["loss"]
    assert np.abs(found - none).max() < 1e-6 < np.abs(found - other).max()


@pytest.mark.filterwarnings("default:.*has no labels")
def test_a_comparison_goes_on_without_the_classes_of_held_out_images(unlabelled, tmp_path, capsys):
    more = "--samplers", "uniform", "--seeds", "1", "--vlb-images", "8"
    assert cli.main(comparison(tmp_path / "results", *more, settings=replace(unlabelled, updates=4))) == 0
    assert capsys.readouterr().err == f"warning: {SAID}\n"
    assert all(np.isfinite(point["bits"]) for point in points(tmp_path / "results").values())


# --- the class that was asked for ---------------------------------------------------------------------------------------------------------


def test_samples_are_of_the_labels_that_were_given_in_turn(tmp_path, capsys, elsewhere, monkeypatch):
    trained(replace(TINY, conditional=True, updates=1), tmp_path / "run")
    told, real = [], DiT.forward
    monkeypatch.setattr(DiT, "forward", lambda self, x, t, labels=None: told.append(labels.tolist()) or real(self, x, t, labels))
    said(capsys, "sample", "run", "--count", "5", "--label", "7", "3", "--device", "cpu")
    assert told == [[7, 3, 7, 3, 7]] * TINY.solver_steps
    told.clear()
    said(capsys, "sample", "run", "--count", "2", "--label", "7", "--guidance", "2", "--device", "cpu")
    assert told == [[7, 7, 10, 10]] * TINY.solver_steps


def test_labels_and_guidance_that_a_model_does_not_know_are_named(tmp_path, capsys, elsewhere):
    trained(replace(TINY, updates=1), tmp_path / "plain")
    trained(replace(TINY, conditional=True, drop_labels=0.0, updates=1), tmp_path / "classes")
    ask = ("sample", "--count", "1", "--device", "cpu")
    assert "not trained on classes" in said(capsys, *ask, "plain", "--label", "3", status=2)
    for label in ("10", "-1"):
        assert f"the labels 0 to 9, got {label}" in said(capsys, *ask, "classes", "--label", label, status=2)
    assert "need at least as many pictures, got 1; raise --count" in said(capsys, *ask, "classes", "--label", "1", "2", "3", status=2)
    guided = "guidance needs a model of classes or captions, and this one was trained without; leave guidance out"
    assert guided in said(capsys, *ask, "plain", "--guidance", "2", status=2)
    assert "not both" in said(capsys, *ask, "classes", "--label", "3", "--prompt", "three", status=2)
    assert "trained with drop_labels 0" in said(capsys, *ask, "classes", "--guidance", "2", status=2)
    assert "trained with drop_labels 0" in said(capsys, "evaluate", "classes", "--samples", "5", "--guidance", "2", "--device", "cpu", status=2)


@pytest.mark.slow  # two minutes each on one core
@pytest.mark.parametrize("model", ["dit", "uvit"])
def test_samples_are_of_the_class_that_was_asked_for(model, tmp_path):
    settings = replace(
        recipe("digits"), model=model, channels=64, head_channels=16, blocks=4, patch=2, conditional=True, updates=1500, lr=2e-3,
        schedule="edm", steps=None, objective="edm", sampler="log-normal", solver="heun", solver_steps=10,
        save_every=0, validate_every=0, sample_every=0, track=(),
    )  # fmt: skip
    trained(settings, tmp_path)
    run, judge = opened(tmp_path), classifier.load("digits")
    assert classifier.accuracy(judge, load("digits", split="test")) > 0.97
    images = sampled(run.net, run.recipe, run.clock, run.data, 500, guidance=2.0)
    agrees = (judge.logits(judge(images)).argmax(1) == torch.arange(500) % 10).double().mean().item()
    assert agrees >= 0.95  # found: 0.996 for DiT and 0.982 for U-ViT; without guidance 0.92 and 0.87
