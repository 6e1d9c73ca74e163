"""A training that was stopped, fell, or is finished goes on as if it had never stopped, or says why it cannot."""

import json
from dataclasses import replace

import pytest

import noiseclock.lab.train as lab_train
import noiseclock.lab.validation as lab_validation
from noiseclock.lab import checkpoint, pictures
from noiseclock.lab.data import load
from noiseclock.lab.errors import Mistake
from noiseclock.lab.recipes import FREE, Recipe
from noiseclock.lab.train import train
from noiseclock.lab.trained import opened
from small_runs import EDM, FLOW, TINY, content, differing, lines, state_of, trained

RESUMED = {
    "uniform": {},
    "unet": {"model": "unet", "channels": 8, "head_channels": 0, "multipliers": (1,), "attention": ()},
    "adm": {"model": "adm", "channels": 8, "head_channels": 0, "multipliers": (1, 2), "attention": (4,), "conditional": True, "dropout": 0.1},
    "adaptive": {"sampler": "adaptive.scaled:every=3,queue=3"},
    "loss-second-moment": {"sampler": "loss-second-moment:bins=5,warmup=1"},
    "gradient-variance": {"sampler": "gradient-variance:every=3,bins=4,samples=8,pairs=2"},
    "dropout": {"dropout": 0.3, "conditional": True, "flip": True},
    "accumulate": {"accumulate": 2, "weighting": "uncertainty", "optimizer": "adamw", "weight_decay": 0.1},
    "bf16": {"precision": "bf16", "sampler": "annealed:sampler=logit-normal,stop=8"},
    "edm": {**EDM, "sampler": "variance-optimal:every=3,bins=4,warmup=1,gain=1.0"},
    "edm, adaptive": {**EDM, "sampler": "adaptive.scaled:every=3,queue=3,stride=50"},
    "flow": {**FLOW, "sampler": "adaptive.scaled:every=3,queue=3,stride=50"},
    "flow, loss-second-moment": {**FLOW, "sampler": "loss-second-moment:bins=5,warmup=1"},
}


@pytest.mark.parametrize("changes", RESUMED.values(), ids=RESUMED)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, changes, monkeypatch):
    monkeypatch.setattr(lab_validation, "IMAGES", 4)
    monkeypatch.setattr(lab_validation, "TIMES", 5)
    settings = replace(TINY, **changes, updates=10, validate_every=5)
    whole = trained(settings, tmp_path / "whole")
    parts = [trained(settings, tmp_path / "parts", stop=stop) for stop in (5, None)]
    assert [record.step for part in parts for record in part] == list(range(1, 11))
    assert [record.loss for part in parts for record in part] == [record.loss for record in whole]
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts")) == []
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert len(lines(tmp_path / "whole")) == 12


def test_updates_after_the_last_checkpoint_are_made_again(tmp_path):
    settings = replace(TINY, updates=10, save_every=4)
    trained(settings, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        update = lab_train.Run._update
        patch.setattr(lab_train.Run, "_update", lambda self, stream: 1 / 0 if self.step == 6 else update(self, stream))
        with pytest.raises(ZeroDivisionError):
            trained(settings, tmp_path / "fallen")
    assert [line["step"] for line in lines(tmp_path / "fallen")] == [1, 2, 3, 4, 5, 6]
    assert [record.step for record in trained(settings, tmp_path / "fallen")] == [5, 6, 7, 8, 9, 10]
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "fallen")) == []
    assert lines(tmp_path / "whole") == lines(tmp_path / "fallen")


def test_a_closed_run_saves_once(tmp_path):
    settings = replace(TINY, save_every=2)
    updates = train(settings, tmp_path, device="cpu")
    next(updates)
    next(updates)
    before = content(tmp_path)
    updates.close()
    assert content(tmp_path) == before
    assert checkpoint.steps(tmp_path) == [2]


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path):
    trained(replace(TINY, updates=5), tmp_path / "parts")
    trained(replace(TINY, updates=9, save_every=2, patience=3), tmp_path / "parts")
    trained(replace(TINY, updates=9), tmp_path / "whole")
    parts, whole = (state_of(tmp_path / name) for name in ("parts", "whole"))
    del parts["settings"], whole["settings"]
    assert differing(parts, whole) == []
    assert json.loads((tmp_path / "parts" / "config.json").read_text())["settings"]["updates"] == 9


def test_a_finished_run_is_left_alone(tmp_path):
    settings = replace(TINY, track=("tensorboard",))
    trained(settings, tmp_path)
    before = content(tmp_path)
    assert trained(settings, tmp_path) == []
    assert trained(replace(settings, updates=3, log_every=5), tmp_path) == []
    assert content(tmp_path) == before


@pytest.mark.parametrize("has_config", [True, False])
def test_another_recipe_is_refused_with_the_differences(tmp_path, has_config):
    trained(replace(TINY, updates=2), tmp_path)
    if not has_config:
        (tmp_path / "config.json").unlink()
    before = content(tmp_path)
    other = replace(TINY, updates=4, lr=0.5, sampler="logit-normal", channels=32)
    with pytest.raises(Mistake) as refusal:
        trained(other, tmp_path)
    first, *changes = str(refusal.value).splitlines()
    assert str(tmp_path) in first
    assert sorted(changes) == [
        "channels: 32 here, 16 in the checkpoint",
        "lr: 0.5 here, 0.001 in the checkpoint",
        "sampler: 'logit-normal' here, 'uniform' in the checkpoint",
    ]
    assert content(tmp_path) == before


def test_a_run_of_a_version_that_knew_fewer_settings_goes_on(tmp_path):
    trained(replace(TINY, updates=2), tmp_path)
    config, (_, state) = json.loads((tmp_path / "config.json").read_text()), checkpoint.load(tmp_path)
    for settings in (config["settings"], state["settings"]):
        del settings["base"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint.save(tmp_path, 2, state)
    with pytest.raises(Mistake, match="base: 'logit-normal' here, 'uniform' in the checkpoint"):
        trained(replace(TINY, updates=4, base="logit-normal"), tmp_path)
    assert [record.step for record in trained(replace(TINY, updates=4), tmp_path)] == [3, 4]


def test_a_setting_that_only_the_other_version_knows_is_a_difference(tmp_path):
    trained(replace(TINY, updates=2), tmp_path)
    _, state = checkpoint.load(tmp_path)
    state["settings"]["wings"] = 2
    checkpoint.save(tmp_path, 2, state)
    with pytest.raises(Mistake, match="wings: absent here, 2 in the checkpoint"):
        trained(replace(TINY, updates=4), tmp_path)


def test_another_number_of_pictures_is_refused(tmp_path):
    digits, folder, run = load("digits").pixels, tmp_path / "pictures", tmp_path / "run"
    settings = replace(TINY, data=f"folder:{folder}")
    pictures.save(digits[:40], folder)
    trained(settings, run, stop=2)
    pictures.save(digits[40:80], folder / "more")
    before, now = content(run), len(load(settings.data))
    with pytest.raises(Mistake, match=rf"pictures train has {now} images, and had \d+ when this training began; make them as they were, or choose"):
        trained(settings, run)
    assert content(run) == before
    _, state = checkpoint.load(run)
    del state["data"]["count"]  # as in checkpoints of earlier versions
    checkpoint.save(run, 2, state)
    assert trained(settings, run)[0].step == 3


def test_what_may_change_between_runs_is_what_does_not_change_the_training():
    fixed = set(TINY.settings()) - set(FREE)
    assert {"lr", "batch", "seed", "precision", "accumulate", "ema", "data", "compile"} <= fixed
    assert set(FREE) <= set(Recipe.__dataclass_fields__)


def test_a_damaged_config_is_named(tmp_path):
    trained(replace(TINY, updates=2), tmp_path)
    for damaged in (b'{"settings"', b"[]", b'{"settings": null}', b"\xb0\xff\x00"):
        (tmp_path / "config.json").write_bytes(damaged)
        with pytest.raises(Mistake, match=r"config\.json is damaged"):
            trained(TINY, tmp_path)
    (tmp_path / "config.json").unlink()  # as the message says
    assert [record.step for record in trained(TINY, tmp_path)] == [3, 4, 5, 6, 7, 8]


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    settings = replace(TINY, save_every=2)
    trained(settings, tmp_path / "whole")
    trained(settings, tmp_path / "damaged", stop=6)
    file = tmp_path / "damaged" / "checkpoints" / "step-00000006" / "tensors.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.warns(UserWarning, match="step-00000006 is damaged"):
        records = trained(settings, tmp_path / "damaged")
    assert [record.step for record in records] == [5, 6, 7, 8]
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "damaged")) == []
    assert lines(tmp_path / "whole") == lines(tmp_path / "damaged")


def test_an_opened_run_has_the_averaged_weights_and_its_clock(tmp_path):
    settings = replace(TINY, save_every=2, sampler="loss-second-moment:bins=5,warmup=1")
    trained(settings, tmp_path)
    run, state = opened(tmp_path), state_of(tmp_path)
    assert (run.recipe, run.step) == (settings, 8)
    assert differing(dict(run.net.state_dict()), state["ema"]) == []
    assert not run.net.training
    assert differing(run.clock.state_dict()["sampler"], state["ranks"][0]["clock"]["sampler"]) == []
    earlier = opened(tmp_path, step=6)
    assert earlier.step == 6
    assert differing(dict(earlier.net.state_dict()), state_of(tmp_path, 6)["ema"]) == []
    with pytest.raises(Mistake, match="it has: 6, 8"):
        opened(tmp_path, step=7)
    with pytest.raises(Mistake, match="holds no checkpoint"):
        opened(tmp_path / "elsewhere")
