"""The command line: what it prints, what it writes, and with what status it ends."""

import json
import os
import pty
import re
import runpy
import select
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import noiseclock.lab.train as lab_train
from forked import Forked
from noiseclock import cli
from noiseclock.lab.built import sampled
from noiseclock.lab.data import load
from noiseclock.lab.errors import Failure
from noiseclock.lab.recipes import RECIPES, Recipe
from noiseclock.lab.train import Record
from noiseclock.lab.trained import opened
from small_runs import FLOW, TINY, UNET, content, said, trained, unframed, words

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a small U-Net with checkpoints of updates 2 and 4."""
    folder = tmp_path_factory.mktemp("runs") / "unet"
    trained(replace(UNET, updates=4, save_every=2), folder)
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory):
    """The folder of a small DiT, which is faster."""
    folder = tmp_path_factory.mktemp("runs") / "dit"
    trained(replace(TINY, updates=4), folder)
    return folder


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """A data folder of this module's own, where the classifier of digits is trained once."""
    return tmp_path_factory.mktemp("home")


# --- help and mistakes --------------------------------------------------------------------------------------------------------------------


def test_help_names_every_command(capsys):
    shown = said(capsys, "--help")
    assert all(f"noiseclock {command} " in shown for command in cli.COMMANDS)
    assert said(capsys, status=2) == ""  # what to do is on the standard output
    assert said(capsys, "--version") == f"noiseclock {version('noiseclock')}\n"


def test_the_module_is_the_command(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["noiseclock", "recipes", "--nonsense"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module("noiseclock", run_name="__main__")
    assert end.value.code == 2
    assert "--nonsense" in capsys.readouterr().err


def test_help_of_training_names_every_setting(capsys):
    assert "`noiseclock recipes` lists the recipes" in said(capsys, "train", "--help")
    shown = said(capsys, "train", "digits", "--help")
    for name in (*Recipe.__dataclass_fields__, "out", "device", "shard", "dry_run"):
        assert f"--{name.replace('_', '-')}" in shown
    assert "default: 0.001" in shown  # the recipe's own
    # a recipe whose data are not there can be looked at
    assert "1.92e-4" in said(capsys, "train", "celebahq-ldm", "--help").replace("0.000192", "1.92e-4")


MISTAKES = {
    "trian digits": "noiseclock: unknown command 'trian' (did you mean train?); known: train, sample, evaluate,",
    "train": "noiseclock: noiseclock train needs a recipe. `noiseclock recipes` lists the recipes",
    "train --lr 3": "noiseclock: noiseclock train needs a recipe",
    "train digts": "noiseclock: unknown recipe 'digts' (did you mean digits?); known: digits, mnist,",
    "train celebahq-ldm": "noiseclock: there are no latents in data/celebahq-latents: it has no index.json; make them with noiseclock encode\n",
    "train digits --lrr 3": "Perhaps you meant: --lr FLOAT",
    "train digits --smapler adaptive": "Perhaps you meant: --sampler STR",
    "train digits --lr abc": "Error parsing --lr: could not convert string to float: 'abc'",
    "train digits --lr -1": "noiseclock: lr must be positive, got -1.0\n",
    "train digits --batch 10 --accumulate 3": "noiseclock: a batch of 10 cannot be split into 3 equal micro-batches\n",
    "train digits --sampler speed:q=3": "noiseclock: sampler 'speed:q=3': sampler 'speed' takes no option 'q'; allowed: k, tau, variant, schedule\n",
    "train digits --sampler adaptve": "noiseclock: unknown sampler 'adaptve' (did you mean adaptive?)",
    "train digits --schedule flow": "noiseclock: the schedule 'flow' is continuous and has no steps; set steps to None\n",
    "train digits --solver magic": "noiseclock: unknown solver 'magic'; known: ddpm, ddim, euler, heun, dpm++",
    "train digits --data digit --dry-run": "noiseclock: unknown data 'digit' (did you mean digits?)",
    "train digits --data folder:nowhere": "noiseclock: there is no folder nowhere; ",
    "train digits --device tpu": "noiseclock: unknown device 'tpu'; known: cpu, cuda\n",
    "train digits --attention 5 --dry-run": "noiseclock: attention at height 5 never happens; this U-Net works at heights 8, 4\n",
    "sample run --device cpu:x": "noiseclock: unknown device 'cpu:x'; known: cpu, cuda\n",
    "train digits --track nothing": "noiseclock: the tracker 'nothing' is not installed",
    "sample": "FOLDER",
    "sample nowhere": "noiseclock: nowhere holds no checkpoint; give the folder of a training that has saved one\n",
    "evaluate nowhere": "noiseclock: nowhere holds no checkpoint",
    "export nowhere out": "noiseclock: nowhere holds no checkpoint",
    "recipes --all": "Unrecognized options: --all",
}


@pytest.mark.parametrize(("command", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named_and_ends_with_2(capsys, tmp_path, command, message):
    told = said(capsys, *command.split(), status=2)
    assert message.strip() in unframed(told)
    assert told.startswith("noiseclock: ") == message.startswith("noiseclock: ")  # in a frame are tyro's own, about options alone
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(capsys):
    assert said(capsys, "train", "digits", "--device", "cuda", status=2).endswith("leave --device out, or say --device cpu\n")


def test_a_gpu_with_too_great_a_number_is_named(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    told = said(capsys, "sample", "run", "--device", "cuda:2", status=2)
    assert told == "noiseclock: there is no cuda:2 here, where CUDA devices end with cuda:1; leave --device out, or name one of them\n"


def test_a_failure_ends_with_1_and_ctrl_c_with_130(capsys, monkeypatch):
    def broken(argv):
        raise Failure("the disk is [full]")

    monkeypatch.setitem(cli.COMMANDS, "doctor", broken)
    assert said(capsys, "doctor", status=1) == "noiseclock: the disk is [full]\n"

    def stopped(argv):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.COMMANDS, "doctor", stopped)
    assert said(capsys, "doctor", status=130) == "noiseclock: stopped; run the same command again to go on\n"


# --- recipes and doctor -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_recipes_are_listed_with_what_they_need_and_cost(capsys, monkeypatch, width):
    monkeypatch.setattr(cli.console, "_width", width)
    shown = said(capsys, "recipes")
    assert max(map(len, shown.splitlines())) <= width
    assert [line.split()[0] for line in shown.splitlines() if line[0] != " "] == list(RECIPES)
    together = " ".join(shown.split())
    for entry in RECIPES.values():
        assert entry.about in together
        assert f"needs {entry.needs}; {entry.cost}" in together
    assert len(shown.splitlines()) <= (4 if width == 80 else 3) * len(RECIPES)  # a look, not a page each


def test_doctor_finds_what_is_needed(capsys):
    shown = said(capsys, "doctor")
    assert re.search(r"ok +torch", shown)
    assert re.search(r"ok +digits +1,497 \+ 300 images", shown)


# --- training -----------------------------------------------------------------------------------------------------------------------------


def test_a_dry_run_shows_everything_and_writes_nothing(capsys, tmp_path):
    shown = said(capsys, *words(TINY, tmp_path / "run"), "--dry-run")
    assert list(tmp_path.iterdir()) == []
    assert "digits train, 1,497 images of 1x8x8, 10 classes" in shown
    assert "8 updates of 16 images, 0.1 epochs" in shown
    for name, value in TINY.settings().items():
        assert re.search(rf"^  {name} +{re.escape(str(value))}$", shown, re.MULTILINE)
    parameters = sum(p.numel() for p in lab_train.network(TINY, load("digits"), TINY.clock()).parameters())
    assert f"dit, {parameters:,} parameters" in shown


def test_a_dry_run_of_a_large_model_takes_no_memory_for_it(capsys, tmp_path):
    for i in range(12):
        (tmp_path / "faces").mkdir(exist_ok=True)
        Image.fromarray(np.full((70, 64, 3), i, dtype=np.uint8)).save(tmp_path / "faces" / f"{i}.png")
    start = time.monotonic()
    shown = said(capsys, "train", "ffhq-dit", "--data", f"folder:{tmp_path / 'faces'}", "--size", "64", "--patch", "4", "--dry-run")
    assert "dit, 673,736,880 parameters" in shown
    assert time.monotonic() - start < 20  # to make 674 M weights takes longer than that, and 2.7 GB


def test_training_reports_and_goes_on(capsys, tmp_path):
    run = tmp_path / "[a run]"
    shown = said(capsys, *words(replace(TINY, updates=3), run)).splitlines()
    assert [line.split(":")[0] for line in shown[:3]] == ["update 1 of 3", "update 2 of 3", "update 3 of 3"]
    assert re.fullmatch(r"update 3 of 3: loss \d\.\d{4}, [\d,]+ images/s", shown[2])
    assert re.fullmatch(r"3 updates, 48 images, \d\.\d minutes of training", shown[3])
    assert shown[4:] == [f"{run} holds checkpoints, samples and log.jsonl", f"next: noiseclock evaluate {run}"]
    before = content(run)
    for asked in (3, 2):
        again = said(capsys, *words(replace(TINY, updates=asked), run))
        assert again == f"{run} has already made 3 updates; give --updates a larger number to go on\n"
    assert content(run) == before
    assert "update 5 of 5" in said(capsys, *words(replace(TINY, updates=5), run))
    refused = said(capsys, *words(replace(TINY, updates=5, lr=0.5), run), status=2)
    assert refused.endswith("make the settings alike:\nlr: 0.5 here, 0.001 in the checkpoint\n")


def test_without_a_folder_a_run_goes_to_runs(capsys, tmp_path):
    argv = words(replace(TINY, updates=1), tmp_path)
    out = argv.index("--out")
    said(capsys, *argv[:out], *argv[out + 2 :])
    assert (tmp_path / "runs" / "digits" / "config.json").is_file()


def test_a_warning_is_one_line(tmp_path):
    trained(replace(TINY, updates=4, save_every=2), tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.json"
    file.write_bytes(file.read_bytes() + b" ")
    with Forked(cli.main, words(replace(TINY, updates=5), tmp_path / "run"), output=tmp_path / "said.txt") as process:
        assert process.wait(60) == 0
    first, second, *_ = (tmp_path / "said.txt").read_text().splitlines()
    assert first.startswith(f"warning: the checkpoint {file.parent} is damaged (state.json")
    assert second.startswith("update 3 of 5: loss ")


def records(first: int, last: int, seconds: float = 0.0) -> list[Record]:
    return [Record(n, 1.0 / n, 1.0, 1e-3, 10 * n, seconds + n, skipped=int(n == last), sampler="3 probes") for n in range(first, last + 1)]


def test_what_is_shown_of_a_run_follows_its_records(capsys):
    cli._followed(records(1, 40), replace(TINY, updates=40))
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 21  # the first, and twenty
    assert shown[0] == "update 1 of 40: loss 1.0000, 3 probes"
    # 390 images in 39 seconds; the loss is the mean of all, until there are fifty
    mean = np.mean([1 / n for n in range(1, 41)])
    assert shown[-1] == f"update 40 of 40: loss {mean:.4f}, 10 images/s, 3 probes, 1 updates skipped"


def test_a_skipped_update_does_not_spoil_the_loss_that_is_shown(capsys):
    given = records(1, 10)
    given[4] = replace(given[4], loss=float("nan"))
    cli._followed(given, replace(TINY, updates=10))
    assert f"loss {np.mean([1 / n for n in range(1, 11) if n != 5]):.4f}," in capsys.readouterr().out.splitlines()[-1]


def slow_updates() -> int:
    """A run that goes on at update 901 and takes a tenth of a second for each."""

    def updates():
        for n in range(901, 921):
            time.sleep(0.1)
            yield Record(n, 0.5, 1.0, 1e-3, 10 * n, 0.1 * n, 0, "7 probes, R² 0.50, entropy -0.10")

    cli.console.width = 80
    cli._followed(updates(), Recipe(updates=960))
    return 0


def test_a_terminal_shows_a_bar_with_loss_speed_sampler_and_time_left():
    reader, terminal = pty.openpty()
    with Forked(slow_updates, output=Path(os.ttyname(terminal)), TERM="xterm") as process:
        shown = b""
        while process.poll() is None or select.select([reader], [], [], 0.1)[0]:
            if select.select([reader], [], [], 0.1)[0]:
                shown += os.read(reader, 65536)
        assert process.poll() == 0, shown.decode()
    os.close(reader)
    os.close(terminal)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    last = [line for line in re.split(r"[\r\n]+", plain) if line.strip()][-1]
    assert len(last) <= 80
    left = re.search(r" 920/960 0:(\d\d):(\d\d) loss 0\.5000, 100 images/s, 7 probes, R² 0\.50, ", last)
    # 40 updates at a tenth of a second, or more where the machine is busy; 900 made before the start would promise less than one second
    assert left is not None, last
    assert 60 * int(left[1]) + int(left[2]) >= 3


# --- looking at a run ---------------------------------------------------------------------------------------------------------------------


def test_sampling_takes_fewer_at_a_time_when_memory_runs_out(run):
    """And gives the same samples: each depends on its own number alone."""
    found, sizes = opened(run), []

    class Small:
        """The network on a device with memory for two samples."""

        def __call__(self, x, t, labels=None):
            sizes.append(len(x))
            if len(x) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return found.net(x, t, labels)

    settings = found.recipe, found.clock, found.data, 7
    with pytest.warns(UserWarning, match="memory ran out while sampling; it starts again with [42] samples at a time") as told:
        images = sampled(Small(), *settings)
    assert len(told) == 2
    assert sizes[:3] == [7, 4, 2]
    assert torch.equal(images, sampled(found.net, *settings, batch=2))
    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="with 1 samples"):
        sampled(without_memory, *settings[:3], 2)


def without_memory(x, t, labels=None):
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_samples_are_written_as_the_name_asks(capsys, run, tmp_path):
    assert said(capsys, "sample", str(run), "--count", "5") == f"samples.png: 5 samples of {run} at update 4\n"
    assert (tmp_path / "samples.png").is_file()
    said(capsys, "sample", str(run), "--count", "5", "--out", "all.npz", "--batch", "2")
    found = opened(run)
    wanted = sampled(found.net, found.recipe, found.clock, found.data, 5)
    assert np.array_equal(np.load(tmp_path / "all.npz")["arr_0"], wanted.permute(0, 2, 3, 1).numpy())
    # other solver, steps, seed and checkpoint: other pictures
    for options in (["--solver", "heun"], ["--steps", "3"], ["--seed", "1"], ["--step", "2"]):
        said(capsys, "sample", str(run), "--count", "5", "--out", "other.npz", *options)
        assert not np.array_equal(np.load(tmp_path / "other.npz")["arr_0"], np.load(tmp_path / "all.npz")["arr_0"])
    said(capsys, "sample", str(run), "--count", "3", "--out", "folder")
    assert len(list((tmp_path / "folder").iterdir())) == 3
    assert "is a folder that is not empty" in said(capsys, "sample", str(run), "--out", "folder", status=2)
    said(capsys, "sample", str(run), "--count", "3", "--out", "LOUD.PNG")
    assert (tmp_path / "LOUD.PNG").is_file()
    (tmp_path / "notes.txt").write_text("mine")
    assert "notes.txt is a file" in said(capsys, "sample", str(run), "--out", "notes.txt", status=2)


def test_a_place_that_cannot_be_written_is_said_before_hours_of_sampling(capsys, run, tmp_path, monkeypatch):
    monkeypatch.setattr("noiseclock.lab.built.sampled", None)  # it would fail if it were called
    (tmp_path / "file").write_text("mine")
    shown = said(capsys, "sample", str(run), "--out", str(tmp_path / "file" / "grid.png"), status=2)
    assert f"cannot write into {tmp_path / 'file'} (" in shown


SAMPLING = {
    "--steps 0": "steps must be at least 1",
    "--steps 21": "steps must be at least 1 and at most 20, the steps that there are, got 21",
    "--solver magic": "unknown solver 'magic'; known: ddpm, ddim, euler, heun, dpm++",
    "--solver heun:shift=3": "only the schedule flow has a grid to shift",
    "--guidance 2": "guidance needs a model of classes or captions, and this one was trained without",
    "--guidance nan": "guidance needs a model of classes or captions, and this one was trained without",
    "--out a.jpg": "written as .png, .npz or a folder of PNG files, not as .jpg; give a.jpg another name",
    "--out a.GIF": "not as .GIF",
    "--count 0": "the number of pictures and the batch must be at least 1",
    "--step 3": "has no checkpoint of step 3; it has: 2, 4",
}


@pytest.mark.parametrize(("options", "message"), SAMPLING.items(), ids=SAMPLING)
def test_what_cannot_be_sampled_is_said(capsys, run, options, message):
    assert message in said(capsys, "sample", str(run), *options.split(), status=2)


def test_figures_carry_what_they_were_measured_on(capsys, dit, features, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(features))
    options = ["--samples", "70", "--vlb-images", "6", "--vlb-steps", "4"]
    shown = said(capsys, "evaluate", str(dit), *options).splitlines()
    assert shown[0] == "averaged weights at update 4"
    number = r"\d+\.?\d*(e[+-]\d+)?"
    against = "against 1,497 of digits train, digits classifier"
    assert re.fullmatch(rf"Fréchet distance \(digits classifier\) {number} \(70 samples, DDIM 2, {against}\)", shown[1])
    assert re.fullmatch(rf"kernel distance \(digits classifier\) {number} ± {number} \(70 samples, DDIM 2, {against}; 100 subsets of 70\)", shown[2])
    assert re.fullmatch(rf"precision {number}, recall {number} \(70 of 70 samples, DDIM 2, {against}; 3 neighbours\)", shown[3])
    assert re.fullmatch(rf"VLB {number} ± {number} bits/dim \(6 images of digits test, 4 of 20 steps, at random for each, .+\)", shown[4])
    assert shown[5].startswith("loss by noise level (300 held-out images, fixed noise")
    assert len(shown) == 17
    file = dit / "evaluations" / "step-00000004-ddim-2-70-digits-train-vlb-6-4.json"
    assert shown[16] == f"written to {file}"
    written = json.loads(file.read_text())
    assert (written["scores"]["count"], written["scores"]["solver"], written["scores"]["steps"]) == (70, "ddim", 2)
    assert f"{written['scores']['frechet']:.4g}" in shown[1]
    assert (written["seed"], written["guidance"], written["bits"]["count"], written["curve"]["images"]) == (0, 1.0, 6, 300)
    # the same again gives the same; what cannot be compared is kept apart
    assert said(capsys, "evaluate", str(dit), *options).splitlines() == shown
    said(capsys, "evaluate", str(dit), *options, "--seed", "3", "--reference", "test", "--solver", "heun", "--steps", "3", "--vlb-images", "0")
    said(capsys, "evaluate", str(dit), *options[:2], "--vlb-images", "6", "--vlb-steps", "5")
    assert sorted(path.name for path in (dit / "evaluations").iterdir()) == [
        "step-00000004-ddim-2-70-digits-train-vlb-6-4.json",
        "step-00000004-ddim-2-70-digits-train-vlb-6-5.json",
        "step-00000004-heun-3-70-digits-test-seed-3.json",
    ]
    assert "must not be negative" in said(capsys, "evaluate", str(dit), "--vlb-images", "-1", status=2)


EVALUATING = {
    "--samples 0 --batch 0": "batch must be at least 1 and vlb_steps at least 2",
    "--samples 0 --vlb-images 0 --batch -3": "batch must be at least 1 and vlb_steps at least 2",
    "--vlb-steps 1": "vlb_steps at least 2, got 256 and 1",
    "--resize bicubic": "unknown resize 'bicubic'; known: pytorch, tensorflow",
}


@pytest.mark.parametrize(("options", "message"), EVALUATING.items(), ids=EVALUATING)
def test_what_cannot_be_evaluated_is_said_before_pictures_are_made(capsys, run, monkeypatch, options, message):
    monkeypatch.setattr("noiseclock.lab.trained.sampled", None)
    assert message in said(capsys, "evaluate", str(run), *options.split(), status=2)


def test_evaluate_says_why_there_are_no_bits_in_continuous_time(capsys, tmp_path):
    trained(replace(TINY, **FLOW, updates=1), tmp_path / "run")
    shown = said(capsys, "evaluate", str(tmp_path / "run"), "--samples", "0", "--guidance", "2", "--device", "cpu").splitlines()
    why = "no bits per dimension: they are those of a chain of discrete steps, and this schedule is continuous"
    assert shown[:2] == ["averaged weights at update 1", why]  # and no word of samples, of which there are none


def test_a_flow_is_sampled_and_evaluated_on_a_shifted_grid(capsys, features, tmp_path, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(features))
    shifted, even = tmp_path / "shifted", tmp_path / "even"
    for folder, solver in ((shifted, "euler:shift=3"), (even, "euler")):
        # a network that begins at a velocity of 0, whatever the time, has to learn something before its grid matters
        trained(replace(TINY, **FLOW, updates=4, ema=0.0, lr=0.01, solver=solver), folder)
        said(capsys, "sample", str(folder), "--count", "5", "--out", f"{folder.name}.npz")
    said(capsys, "sample", str(even), "--count", "5", "--solver", "euler:shift=3", "--out", "asked.npz")
    found = {name: np.load(f"{name}.npz")["arr_0"] for name in ("shifted", "even", "asked")}
    assert np.array_equal(found["shifted"], found["asked"])  # both folders hold the same weights
    assert not np.array_equal(found["shifted"], found["even"])
    shown = said(capsys, "evaluate", str(shifted), "--samples", "70")
    assert "(70 samples, EULER 2 with shift=3, against 1,497 of digits train, digits classifier)" in shown
    assert [path.name for path in (shifted / "evaluations").iterdir()] == ["step-00000004-euler:shift=3-2-70-digits-train.json"]


def test_figures_can_be_left_out(capsys, dit):
    shown = said(capsys, "evaluate", str(dit), "--samples", "0", "--vlb-images", "0").splitlines()
    assert shown[1].startswith("loss by noise level")
    assert shown[-1].endswith("evaluations/step-00000004.json")


def test_an_exported_run_is_a_pipeline_that_samples(capsys, run, dit, tmp_path):
    from diffusers import DiffusionPipeline

    assert said(capsys, "export", str(run), "pipeline") == f"pipeline: a diffusers pipeline of {run} at update 4\n"
    pipeline = DiffusionPipeline.from_pretrained(str(tmp_path / "pipeline"))
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(batch_size=2, num_inference_steps=20, generator=torch.Generator().manual_seed(0), output_type="np").images
    assert images.shape == (2, 8, 8, 1)
    assert images.std() > 0.05
    # it is the averaged network: the same prediction
    found = opened(run)
    x, t = torch.randn(3, 1, 8, 8), torch.tensor([0, 7, 19])
    with torch.no_grad():
        assert torch.equal(pipeline.unet(x, t).sample, found.net(x, t))
    assert "only U-Nets can be exported" in said(capsys, "export", str(dit), "other", status=2)


def test_a_model_of_pictures_that_are_gone_is_sampled_and_exported(capsys, tmp_path, monkeypatch):
    pixels = load("digits").pixels
    for i in range(20):
        (tmp_path / f"pictures/{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[i, 0].numpy()).save(tmp_path / f"pictures/{i % 2}/{i}.png")
    of_classes = replace(TINY, data="folder:pictures", conditional=True, updates=1)
    trained(of_classes, tmp_path / "run")
    trained(replace(UNET, data="folder:pictures", updates=1), tmp_path / "unet")
    with monkeypatch.context() as patch:
        patch.setattr(lab_train, "outlined", lambda data: None)  # as checkpoints were
        trained(of_classes, tmp_path / "old")
    said(capsys, "sample", "run", "--count", "4", "--out", "there.npz")
    (tmp_path / "pictures").rename(tmp_path / "away")
    said(capsys, "sample", "run", "--count", "4", "--out", "gone.npz")
    there, gone = (np.load(tmp_path / f"{name}.npz")["arr_0"] for name in ("there", "gone"))
    assert np.array_equal(there, gone)
    said(capsys, "export", "unet", "pipeline")
    assert (tmp_path / "pipeline" / "unet").is_dir()
    # those who look at the pictures themselves still need them, and so do old checkpoints
    for command in ("evaluate run", "sample old"):
        assert said(capsys, *command.split(), status=2).startswith("noiseclock: there is no folder pictures; ")
