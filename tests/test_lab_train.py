"""A training: what it leaves behind, that it computes what it says, and every way to do it."""

import json
import math
import re
import shutil
import subprocess
import time
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import noiseclock as nc
import noiseclock.lab.data as lab_data
import noiseclock.lab.train as lab_train
import noiseclock.lab.validation as lab_validation
from noiseclock.core.clock import Clock
from noiseclock.core.measure import loss_over_time
from noiseclock.lab import checkpoint, pictures
from noiseclock.lab.built import sampled
from noiseclock.lab.data import head, load
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import Log
from noiseclock.lab.interrupt import Wish
from noiseclock.lab.models.dit import DiT
from noiseclock.lab.order import Order, uniforms
from noiseclock.lab.train import train
from noiseclock.lab.trained import opened
from small_runs import EDM, FLOW, TINY, UNET, differing, lines, run_of, state_of, trained

# --- what a run leaves behind -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A U-Net run of 6 updates with everything switched on: its folder, its recipe and its records."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    settings = replace(UNET, updates=6, log_every=2, save_every=2, validate_every=3, sample_every=4, track=("tensorboard",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab_validation, "IMAGES", 4)
        return folder, settings, trained(settings, folder)


def test_there_is_one_record_an_update(finished):
    _, _, records = finished
    assert [record.step for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record.images for record in records] == [16, 32, 48, 64, 80, 96]
    assert all(math.isfinite(record.loss) and record.norm > 0 and record.skipped == 0 for record in records)
    assert all(a.seconds < b.seconds for a, b in pairwise(records))


def test_the_log_has_a_line_for_every_logged_update(finished):
    folder, _, records = finished
    logged = lines(folder)
    train_lines = [line for line in logged if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == [1, 2, 4, 6]
    for line in train_lines:
        record = records[line["step"] - 1]
        assert (line["loss"], line["norm"], line["lr"], line["images"]) == (record.loss, record.norm, record.lr, record.images)
    assert [line["step"] for line in logged if line["kind"] == "validation"] == [3, 6]


def test_without_log_every_nothing_is_logged(tmp_path):
    trained(replace(TINY, updates=3, log_every=0), tmp_path)
    assert lines(tmp_path) == []


def test_tensorboard_shows_what_the_log_says(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, _ = finished
    events = EventAccumulator(str(folder / "tensorboard" / "noiseclock")).Reload()
    for name in ("loss", "norm", "lr"):
        shown = [(event.step, event.value) for event in events.Scalars(name)]
        assert shown == [(line["step"], np.float32(line[name])) for line in lines(folder) if line["kind"] == "train"]


def test_tensorboard_shows_the_density_at_each_validation(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _, _ = finished
    events = EventAccumulator(str(folder / "tensorboard" / "noiseclock"), size_guidance={"histograms": 0}).Reload()
    shown = events.Histograms("noiseclock/density")
    assert [event.step for event in shown] == [3, 6]
    assert shown[0].histogram_value.bucket == pytest.approx([1 / 50] * 50, abs=1e-12)  # the sampler is uniform


def test_two_checkpoints_are_kept(finished):
    folder, _, _ = finished
    assert checkpoint.steps(folder) == [4, 6]


def test_grids_of_samples_show_the_averaged_weights(finished):
    folder, settings, _ = finished
    assert sorted(path.name for path in (folder / "samples").iterdir()) == ["step-00000004.png", "step-00000006.png"]
    run = opened(folder)
    wanted = pictures.grid(sampled(run.net, settings, run.clock, run.data, 64))
    with Image.open(folder / "samples" / "step-00000006.png") as shown:
        assert np.array_equal(np.asarray(shown), np.asarray(wanted))


def test_the_config_says_what_was_run_and_with_what(finished):
    folder, settings, _ = finished
    config = json.loads((folder / "config.json").read_text())
    assert config["settings"] == json.loads(json.dumps(settings.settings()))
    made = config["made with"]
    assert made["versions"]["torch"] == version("torch")
    assert made["versions"]["diffusers"] == version("diffusers")
    assert made["processes"] == 1
    git = subprocess.run(["git", "-C", str(Path(lab_train.__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    assert (made["git"] or "").removesuffix("-dirty") == git.stdout.strip()  # empty in a copy without its repository


def test_the_config_is_there_before_the_first_update(tmp_path, monkeypatch):
    def stop(self, stream):
        raise RuntimeError("the first update")

    monkeypatch.setattr(lab_train.Run, "_update", stop)
    with pytest.raises(RuntimeError, match="the first update"):
        trained(TINY, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["lr"] == TINY.lr


@pytest.mark.parametrize(
    ("told", "name"), [("processor\t: 0\nmodel name\t: Fast 9000\n\nmodel name\t: Fast 9000\n", "Fast 9000"), ("Features: sve\n", "kind")]
)
def test_machines_are_told_apart_by_their_processor(monkeypatch, told, name):
    from noiseclock.lab import surroundings

    monkeypatch.setattr(Path, "read_text", lambda self: told if str(self) == "/proc/cpuinfo" else "")
    monkeypatch.setattr(surroundings.platform, "processor", lambda: "")
    monkeypatch.setattr(surroundings.platform, "machine", lambda: "kind")
    surroundings._processor.cache_clear()
    made = surroundings.surroundings(torch.device("cpu"), 1)
    surroundings._processor.cache_clear()
    assert made["machine"].partition(", ")[0] == name


def test_a_run_from_a_folder_of_sources_tells_the_librarys_version(monkeypatch):
    from noiseclock.lab import surroundings

    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(surroundings, "version", absent)
    surroundings._version.cache_clear()
    made = surroundings.surroundings(torch.device("cpu"), 1)["versions"]
    surroundings._version.cache_clear()
    assert made["noiseclock"] == nc.__version__
    assert made["torch"] == "absent"


def test_where_there_is_no_git_a_run_has_no_commit(monkeypatch):
    from noiseclock.lab.surroundings import commit

    monkeypatch.setenv("PATH", "/nonexistent")
    assert commit() is None


# --- what is seen on the way --------------------------------------------------------------------------------------------------------------


def test_validation_is_the_averaged_model_on_held_out_images_at_fixed_noise(tmp_path):
    settings = replace(TINY, updates=4, save_every=4)
    trained(settings, tmp_path)
    run = run_of(settings, tmp_path)
    with Log(tmp_path / "twice.jsonl") as log:
        run._validate(log)
        torch.randn(7)  # whatever else is drawn in between
        run._validate(log)
    first, second = (tmp_path / "twice.jsonl").read_text().splitlines()
    assert first == second
    held_out, _ = head(load("digits", split="test"), 128)
    wanted = loss_over_time(run.clock, opened(tmp_path).net, held_out, times=50, seed=settings.seed)
    found = json.loads(first)
    assert len(held_out) == 128
    assert found["loss_by_time"] == wanted.loss.tolist()
    assert found["loss"] == wanted.loss.mean()
    # the density that is sampled: uniform
    assert found["density"] == pytest.approx([1.0] * 20, abs=1e-12)


@pytest.mark.parametrize("sampler", ["uniform", "log-normal", "variance-optimal"])
def test_the_held_out_loss_is_the_mean_over_the_density_that_is_meant(tmp_path, sampler):
    """Whatever is sampled, so that methods are held to one objective: EDM means a log-normal density, and every sampler of it is told so."""
    settings = replace(TINY, **EDM, sampler=sampler, updates=1, validate_every=1)
    trained(settings, tmp_path)
    (found,) = (line for line in lines(tmp_path) if line["kind"] == "validation")
    time, loss = (np.array(found[name]) for name in ("time", "loss_by_time"))
    log_sigma = np.log(0.002) + np.log(80 / 0.002) * time
    density = np.exp(-(((log_sigma + 1.2) / 1.2) ** 2) / 2)
    assert found["loss"] == pytest.approx((loss * density).sum() / density.sum(), rel=1e-9)
    assert found["loss"] != pytest.approx(loss.mean(), rel=1e-2)


def test_a_look_at_the_model_does_not_change_what_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(lab_validation, "IMAGES", 4)
    monkeypatch.setattr(lab_validation, "TIMES", 5)
    settings = replace(TINY, dropout=0.1)
    trained(settings, tmp_path / "unseen")
    trained(replace(settings, validate_every=1, sample_every=1, save_every=1, log_every=3), tmp_path / "seen")
    unseen, seen = (state_of(tmp_path / name) for name in ("unseen", "seen"))
    del unseen["settings"], seen["settings"]
    assert differing(unseen, seen) == []


# --- the arithmetic of an update ----------------------------------------------------------------------------------------------------------


def test_the_update_that_compiles_does_not_count_as_training(tmp_path, monkeypatch):
    """Where updates are not captured, as with several micro-batches or processes; here a compiler is played, which a CPU has no use for."""
    forward, calls = DiT.forward, []

    def compiling(self, *given):
        calls.append(time.sleep(0 if calls else 0.5))
        return forward(self, *given)

    monkeypatch.setattr(DiT, "forward", compiling)
    run = run_of(replace(TINY, updates=3), tmp_path)
    run._compiled = True
    seconds = [record.seconds for record in run.updates(Wish())]
    assert seconds[0] == 0 < seconds[1] < seconds[2] < 0.5


def test_the_learning_rate_rises_over_the_warm_up_and_stays(tmp_path, monkeypatch):
    used, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (used.append(self.param_groups[0]["lr"]), step(self))[1])
    lrs = [record.lr for record in trained(replace(TINY, lr=1e-3, warmup=4), tmp_path)]
    assert lrs == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3] + [1e-3] * 5, rel=1e-12)
    assert used == lrs


@pytest.mark.parametrize("clip", [0.0, 0.05, 100.0])
def test_the_gradient_is_clipped_to_its_norm(tmp_path, clip):
    (record,) = trained(replace(TINY, updates=1, clip=clip), tmp_path)
    moments = state_of(tmp_path)["optimizer"]["state"]
    # after one update Adam's first moment is (1-0.9)·g, so its norm is a tenth of what was applied
    applied = 10 * math.sqrt(sum(float(moment["exp_avg"].double().square().sum()) for moment in moments.values()))
    # torch divides by norm + 1e-6; float32 of a sum over 12,000 squares leaves 1e-5
    assert applied == pytest.approx(min(record.norm, clip or math.inf), rel=1e-4)
    assert record.norm > 0.05


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9999])
def test_averaged_weights_follow_their_formula(tmp_path, decay):
    run = run_of(replace(TINY, ema=decay), tmp_path)
    wanted = {name: value.double() for name, value in run.net.state_dict().items()}
    stream = run._stream()
    for n in range(1, 9):
        run._update(stream)
        d = min(decay, (1 + n) / (10 + n))
        wanted = {name: d * wanted[name] + (1 - d) * value.double() for name, value in run.net.state_dict().items()}
    found = run.ema.state_dict()
    assert found.keys() == wanted.keys()
    # eight roundings to float32 of numbers below 2: 8·2^-24
    assert max(float((found[name].double() - wanted[name]).abs().max()) for name in wanted) < 5e-7
    if decay == 0.0:
        assert differing(found, dict(run.net.state_dict())) == []


def by_image(x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A time and a noise that depend on the image alone, so that it does not matter with which others it is in a batch."""
    place = (x0.double().flatten(1) * torch.arange(1, 65).double().sqrt()).sum(1) % 1
    noises = [torch.randn(x0.shape[1:], generator=torch.Generator().manual_seed(int(u * 2**31))) for u in place]
    return place, torch.stack(noises)


def test_micro_batches_add_up_to_the_gradient_of_the_batch(tmp_path, monkeypatch):
    drawn, draw = [], Clock.draw

    def watched(self, x0, **options):
        batch = draw(self, x0, **options)
        drawn.append((x0, batch.time))
        time, noise = by_image(x0)
        return self.at(x0, time, noise=noise)

    monkeypatch.setattr(Clock, "draw", watched)
    gradients, losses = [], []
    for parts in (1, 2, 4):
        (record,) = trained(replace(TINY, updates=1, accumulate=parts, clip=0), tmp_path / str(parts))
        moments = state_of(tmp_path / str(parts))["optimizer"]["state"]
        gradients.append(torch.cat([moment["exp_avg"].flatten() for moment in moments.values()]).double())
        losses.append(record.loss)
    assert len(drawn) == 7
    # sums of 16 losses in another order: 16·2^-24 = 1e-6 at most, relative to the largest terms
    assert losses == pytest.approx([losses[0]] * 3, rel=2e-6)
    assert [float((g - gradients[0]).norm() / gradients[0].norm()) for g in gradients] == pytest.approx([0, 0, 0], abs=1e-5)
    # the same images, and the times of one draw over all of them
    for first, count in ((1, 2), (3, 4)):
        together = drawn[first : first + count]
        assert torch.equal(torch.cat([x0 for x0, _ in together]), drawn[0][0])
        assert torch.equal(torch.cat([time for _, time in together]).sort().values, drawn[0][1].sort().values)


def test_images_come_in_the_order_of_the_seed(tmp_path, monkeypatch):
    seen, draw = [], Clock.draw
    monkeypatch.setattr(Clock, "draw", lambda self, x0, **options: seen.append(x0) or draw(self, x0, **options))
    trained(replace(TINY, updates=3, seed=5), tmp_path)
    data = load("digits")
    wanted = data.pixels[Order(len(data), 5)(0, 48)].float() / 127.5 - 1
    assert torch.equal(torch.cat(seen), wanted)


def test_bf16_computes_in_bf16_and_keeps_float32(tmp_path):
    settings = replace(TINY, updates=3, precision="bf16")
    run = run_of(settings, tmp_path)
    kinds = []
    run.net.out.register_forward_hook(lambda module, args, out: kinds.append(out.dtype))
    run._update(run._stream())
    assert kinds == [torch.bfloat16]
    assert {p.dtype for p in run.net.parameters()} == {torch.float32}
    records = trained(settings, tmp_path / "bf16")
    exact = trained(replace(settings, precision="fp32"), tmp_path / "fp32")
    # the first prediction is zero in either; later ones are small, and off by 2^-8 of themselves
    assert records[0].loss == exact[0].loss
    assert [r.loss for r in records] == pytest.approx([r.loss for r in exact], rel=2**-8)
    assert [r.loss for r in records[1:]] != [r.loss for r in exact[1:]]
    assert [r.norm for r in records] == pytest.approx([r.norm for r in exact], rel=2**-5)


def test_adamw_decays_the_weights_themselves(tmp_path):
    settings = replace(TINY, updates=1, optimizer="adamw", lr=0.1, warmup=0)
    start = run_of(settings, tmp_path / "start").net.state_dict()
    trained(settings, tmp_path / "plain")
    trained(replace(settings, weight_decay=0.5), tmp_path / "decayed")
    plain, decayed = (state_of(tmp_path / name)["model"] for name in ("plain", "decayed"))
    # p ← (1 - lr·decay)·p before Adam's own step: one rounding of numbers below 1
    gap = [float((decayed[name] - (plain[name] - 0.1 * 0.5 * start[name])).abs().max()) for name in start]
    assert max(gap) < 2e-7


def test_images_that_are_read_from_disk_train_the_same(tmp_path, monkeypatch):
    folder = tmp_path / "images"
    folder.mkdir()
    for i, pixels in enumerate(load("digits").pixels[:40]):
        Image.fromarray(pixels[0].numpy()).save(folder / f"{i:02}.png")
    settings = replace(TINY, data=f"folder:{folder}", flip=True, updates=6)
    trained(settings, tmp_path / "memory")
    monkeypatch.setattr(lab_data, "IN_MEMORY", 0)
    monkeypatch.setattr(lab_data, "cpus", lambda: 1)  # one worker
    for stop in (3, None):
        trained(settings, tmp_path / "disk", stop=stop)
    assert isinstance(opened(tmp_path / "disk").data, lab_data.Files)
    assert differing(state_of(tmp_path / "memory"), state_of(tmp_path / "disk")) == []


# --- labels -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [TINY, UNET], ids=["dit", "unet"])
def test_labels_are_told_and_some_withheld(tmp_path, monkeypatch, settings):
    told, draw = [], Clock.draw
    monkeypatch.setattr(Clock, "draw", lambda self, x0, **options: told.append(options["cond"]) or draw(self, x0, **options))
    updates = 60 if settings is TINY else 3
    settings = replace(settings, conditional=True, drop_labels=0.3, updates=updates)
    trained(settings, tmp_path / "one")
    data = load("digits")
    labels = torch.cat(told)
    withheld = labels == 10
    true = data.labels[Order(len(data), settings.seed)(0, len(labels))]
    assert torch.equal(labels[~withheld], true[~withheld])
    assert torch.equal(withheld, uniforms(settings.seed, "labels", 0, len(labels)) < 0.3)
    # 960 draws: a standard deviation of √(0.3·0.7/960) = 0.015; four of them
    if settings.model == "dit":
        assert abs(float(withheld.double().mean()) - 0.3) < 0.06
    # the same with micro-batches
    told.clear()
    trained(replace(settings, accumulate=2, updates=3), tmp_path / "two")
    assert torch.equal(torch.cat(told), labels[:48])


def test_a_model_of_labels_gives_its_classes_in_turn(tmp_path, monkeypatch):
    settings = replace(TINY, conditional=True, updates=2)
    trained(settings, tmp_path)
    run, asked = opened(tmp_path), []
    real = run.net.forward
    monkeypatch.setattr(run.net, "forward", lambda x, t, labels=None: asked.append(labels) or real(x, t, labels))
    sampled(run.net, settings, run.clock, run.data, 12)
    assert len(asked) == settings.solver_steps
    assert all(labels.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1] for labels in asked)


def test_data_without_classes_make_no_conditional_model(tmp_path):
    image = Image.fromarray(np.zeros((8, 8), dtype=np.uint8))
    for i in range(20):
        (tmp_path / "images").mkdir(exist_ok=True)
        image.save(tmp_path / "images" / f"{i}.png")
    with pytest.raises(Mistake, match="no classes"):
        trained(replace(TINY, data=f"folder:{tmp_path / 'images'}", conditional=True), tmp_path / "run")


# --- every way to train -------------------------------------------------------------------------------------------------------------------

WAYS = {
    "linear, eps": {},
    "cosine, v": {"schedule": "cosine", "objective": "v"},
    "quadratic, x0": {"schedule": "quadratic", "objective": "x0"},
    "zero terminal SNR, v": {"schedule": "linear:zero_terminal_snr=true", "objective": "v"},
    "flow": {**FLOW, "sampler": "logit-normal"},
    "edm": {**EDM, "sampler": "log-normal", "weighting": "edm"},
    "edm, adaptive": {**EDM, "sampler": "adaptive.scaled:every=5,stride=20"},
    "edm, variance-optimal": {**EDM, "sampler": "variance-optimal:every=5,bins=8,warmup=2"},
    "flow, adaptive": {**FLOW, "sampler": "adaptive.scaled:every=5,stride=20"},
    "flow, variance-optimal": {**FLOW, "sampler": "variance-optimal:every=5,bins=8,warmup=2"},
    "uncertainty": {"weighting": "uncertainty:weighting=min-snr"},
    "speed": {"sampler": "speed:k=3,tau=10", "weighting": "change-aware"},
}


@pytest.mark.parametrize("changes", WAYS.values(), ids=WAYS)
def test_every_kind_of_diffusion_learns(tmp_path, changes):
    settings = replace(TINY, **changes, updates=40, batch=32, lr=1e-2, save_every=40, log_every=40)
    run = run_of(settings, tmp_path)
    held_out, _ = head(run.held_out, 128)
    before = loss_over_time(run.clock, run.net, held_out, times=10)
    trained(settings, tmp_path)
    done = opened(tmp_path)
    after = loss_over_time(run.clock, done.net, held_out, times=10)
    # it starts by predicting zero; a tenth less is six standard errors of the mean of 128 images, which see the same noise both times
    assert after.loss.mean() < 0.9 * before.loss.mean()
    images = sampled(done.net, settings, done.clock, done.data, 4)
    assert images.shape == (4, 1, 8, 8)
    assert images.float().std() > 10


def test_what_uncertainty_learns_is_optimised_and_saved(tmp_path):
    settings = replace(TINY, weighting="uncertainty", updates=3)
    trained(settings, tmp_path)
    learned = opened(tmp_path).clock.weighting.net
    assert float(learned.weight.detach().abs().max()) > 0
    # two parameters of its own behind those of the network
    moments = state_of(tmp_path)["optimizer"]["state"]
    assert len(moments) == len(list(run_of(settings, tmp_path).net.parameters())) + 2


def test_moments_are_kept_by_name_and_those_of_a_checkpoint_that_has_them_by_place_are_found(tmp_path):
    settings = replace(TINY, weighting="uncertainty", updates=6)
    whole = [record.loss for record in trained(settings, tmp_path / "whole")]
    trained(settings, tmp_path / "run", stop=3)
    step, state = checkpoint.load(tmp_path / "run")
    names = [*(name for name, _ in run_of(settings, tmp_path / "run").net.named_parameters()), "weighting.0", "weighting.1"]
    assert set(state["optimizer"]["state"]) == set(names)
    state["optimizer"]["state"] = {i: state["optimizer"]["state"][name] for i, name in enumerate(names)}
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    checkpoint.save(tmp_path / "run", step, state)
    assert [record.loss for record in trained(settings, tmp_path / "run")] == whole[3:]


@pytest.mark.filterwarnings("ignore:the sampling density moved")
def test_samplers_that_learn_say_what_they_have_learned(tmp_path):
    records = trained(replace(TINY, sampler="adaptive.scaled:every=2,queue=3", updates=9), tmp_path / "adaptive")
    assert records[0].sampler.startswith("1 probe")
    assert records[-1].sampler.startswith("5 probes, R² ")
    clock = opened(tmp_path / "adaptive").clock
    assert clock.sampler.probes == 5
    assert clock.plot_data().p.std() > 1e-4  # no longer uniform

    records = trained(replace(TINY, sampler="loss-second-moment:bins=5,warmup=1", updates=40, lr=1e-2), tmp_path / "lsm")
    density = opened(tmp_path / "lsm").clock.plot_data().p
    assert density.std() > 0.01
    ess = 1 / np.mean(1 / density)  # 1/E_p[(1/p)²] on a uniform base
    assert records[-1].sampler == f"effective sample size {ess:.0%}"
    assert records[-2].sampler != ""

    records = trained(replace(TINY, sampler="variance-optimal:every=1,warmup=2", updates=4, log_every=2), tmp_path / "optimal")
    assert re.fullmatch(r"4 probes, ρ [01]\.\d\d \(held out \d\.\d\d\), effective sample size \d+%", records[-1].sampler)


# --- starting from another training -------------------------------------------------------------------------------------------------------


def test_a_training_can_start_from_the_averaged_weights_of_another(tmp_path):
    trained(replace(TINY, updates=20, lr=1e-2, save_every=20), tmp_path / "first")
    theirs = checkpoint.load(tmp_path / "first")[1]["ema"]
    settings = replace(TINY, updates=4, pretrained=str(tmp_path / "first"), seed=3)
    run = run_of(settings, tmp_path / "second")
    for name, weight in run.net.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    for name, mean in run.ema.state_dict().items():
        assert torch.equal(mean, theirs[name]), name
    whole = trained(settings, tmp_path / "whole")
    trained(settings, tmp_path / "parts", stop=2)
    shutil.rmtree(tmp_path / "first")  # a run that has begun has weights of its own
    assert [record.loss for record in trained(settings, tmp_path / "parts")] == [record.loss for record in whole[2:]]


def test_what_cannot_be_started_from_is_named(tmp_path):
    trained(replace(TINY, updates=2), tmp_path / "first")
    with pytest.raises(Mistake, match="holds no checkpoint"):
        trained(replace(TINY, pretrained=str(tmp_path / "nowhere")), tmp_path / "second")
    with pytest.raises(Mistake, match="its network differs"):
        trained(replace(TINY, channels=32, pretrained=str(tmp_path / "first")), tmp_path / "second")
    assert not (tmp_path / "second" / "checkpoints").exists()


def test_a_run_does_not_write_its_samples_among_the_images_that_it_trains_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures.save(load("digits").pixels[:20], tmp_path / "all")  # type: ignore[union-attr]
    settings = replace(TINY, updates=1, sample_every=1)
    for place, folder in (("all", "all"), ("all", "all/runs/mine"), (".", "runs/mine")):
        with pytest.raises(Mistake, match="lies among the images of"):
            trained(replace(settings, data=f"folder:{place}"), Path(folder))
    # beside images that are divided into train and test there is room
    (tmp_path / "train").mkdir()
    (tmp_path / "all").rename(tmp_path / "train" / "all")
    assert len(trained(replace(settings, data="folder:."), Path("runs/mine"))) == 1
    assert len(load("folder:.")) + len(load("folder:.", split="test")) == 20


# --- what is asked of a process -----------------------------------------------------------------------------------------------------------


def test_a_run_for_many_processes_says_so_in_one(tmp_path):
    with pytest.raises(Mistake, match="torchrun"):
        next(train(TINY, tmp_path, device="cpu", shard=True))


def test_an_unknown_tracker_is_a_mistake(tmp_path):
    with pytest.raises(Mistake, match=r"'weights and measures' is not installed; installed: .*tensorboard"):
        trained(replace(TINY, track=("weights and measures",)), tmp_path)


def test_a_device_that_this_process_does_not_train_on_is_refused(tmp_path):
    with pytest.raises(Mistake, match="CUDA_VISIBLE_DEVICES"):
        next(train(TINY, tmp_path, device="cuda:1"))
