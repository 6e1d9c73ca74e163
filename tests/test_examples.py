"""Every example is short, runs, and does what it says."""

import os
import re
import runpy
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sklearn.datasets
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import DDPMPipeline
from safetensors.torch import load_file
from sklearn.utils import Bunch

import noiseclock as nc
from forked import Forked
from noiseclock.core.names import SAMPLERS

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOP = EXAMPLES / "accelerate_loop.py"
COMPARISONS = ("audio", "fine_tuning", "lora", "points")
ALONE = ("accelerate_loop", "diffusers_unconditional")
LOOPS = ("flow_matching_style", "k_diffusion_style", "lightning_loop", "plain")  # in test_integrations_loops.py


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in a folder of its own; gives what it prints and its names. Not as a process: imports take longer than the run."""
    monkeypatch.chdir(tmp_path)

    def main(name: str, *arguments: object) -> tuple[str, dict[str, Any]]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        capsys.readouterr()
        scope = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out, scope

    return main


def test_every_example_is_short_and_run():
    found = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert sorted(found) == sorted((*COMPARISONS, *ALONE, *LOOPS))
    for name, text in found.items():
        assert len(text.splitlines()) < 60, name


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_tells_what_each_sampler_gave(name, run, monkeypatch):
    if name == "lora":
        pytest.importorskip("peft")
    measured, loss_over_time = [], nc.measure.loss_over_time

    def at_two_times(*args: Any, **options: Any) -> nc.measure.LossOverTime:
        measured.append(loss_over_time(*args, **options, times=2))  # of 50, which take nine tenths of the time
        return measured[-1]

    monkeypatch.setattr(nc.measure, "loss_over_time", at_two_times)
    lines = run(name, "--updates", 3, "--seeds", 1)[0].splitlines()
    assert {"uniform", "losssecondmoment", "varianceoptimal", "adaptive"} <= {line.split()[0].lower().replace("-", "") for line in lines}
    told = [re.findall(r"(?<!± )\b(\d\.\d{4})", line) for line in lines]
    # of one seed the mean is what was measured, and so are the ends of the range
    assert sorted({number for numbers in told for number in numbers}) == sorted({f"{found.loss.mean():.4f}" for found in measured})


@pytest.fixture
def alone():
    """accelerate keeps its state for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def test_the_diffusers_script_goes_on_where_it_was_and_leaves_a_pipeline(run, tmp_path, monkeypatch, alone):
    digits = sklearn.datasets.load_digits()
    monkeypatch.setattr(sklearn.datasets, "load_digits", lambda: Bunch(images=digits.images[:330]))
    # so that its density is a learned one from the fourth update on
    monkeypatch.setitem(SAMPLERS, "loss-second-moment", partial(nc.LossSecondMoment, refresh=4, warmup=2))
    pipeline = DDPMPipeline.__call__
    # of 50 steps, which take most of the time
    monkeypatch.setattr(DDPMPipeline, "__call__", lambda self, **options: pipeline(self, **{**options, "num_inference_steps": 2}))
    said = []
    for folder, epochs in (("whole", 2), ("parts", 1), ("parts", 2)):
        text, scope = run("diffusers_unconditional", "--output_dir", folder, "--num_epochs", epochs)
        said.append(text)
        assert scope["clock"].plot_data().p.std() > 0.01
    # 330 digits in batches of 64
    assert [re.findall(r"after (\d+) updates the loss is \d\.\d{4}; samples \(64, 8, 8, 1\)", text) for text in said] == [["10"], ["5"], ["10"]]
    weights = [load_file(tmp_path / folder / "unet" / "diffusion_pytorch_model.safetensors") for folder in ("whole", "parts")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    changed = re.findall(r"# noiseclock$", (EXAMPLES / "diffusers_unconditional.py").read_text(), re.MULTILINE)
    assert len(changed) == 7  # as docs/integrations-diffusers.md says


# what an example's process knew at its end: it is run as it is, in a process that looks on
ONLOOKER = """
import os, runpy, sys
import torch
import noiseclock as nc

times, draw = [], nc.Clock.draw

def noted(self, *args, **kwargs):
    batch = draw(self, *args, **kwargs)
    times.append(batch.time)
    return batch

nc.Clock.draw = noted
rank, sys.argv = os.environ["RANK"], sys.argv[1:]
scope = runpy.run_path(sys.argv[0], run_name="__main__")
state = scope["clock"].state_dict()
known = {"times": torch.stack(times), "sampler": state["sampler"], "updates": state["updates"], "weights": scope["net"].state_dict()}
torch.save(known, f"{sys.argv[-1]}-{rank}.pt")
"""


def same(one, other) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def launched(folder: Path, *arguments: object) -> str:
    """What is printed under `accelerate launch`."""
    settings = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --mixed_precision no --dynamo_backend no"
    command = [sys.executable, "-m", "accelerate.commands.launch", *settings.split(), "onlooker.py", LOOP, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def forked(folder: Path, *arguments: object) -> str:
    """What two processes print that are told of each other as the launcher tells them, and start at once."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    said = folder / "said.txt"
    said.unlink(missing_ok=True)
    with ExitStack() as stack:
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **place} for rank in range(2)]
        both = [stack.enter_context(Forked(_looked_on, folder, *map(str, arguments), output=said, **rank)) for rank in ranks]
        assert [process.wait(120) for process in both] == [0, 0], said.read_text()
    return said.read_text()


def _looked_on(folder: Path, *arguments: str) -> int:
    os.chdir(folder)
    sys.argv = ["onlooker.py", str(LOOP), *arguments]
    runpy.run_path("onlooker.py", run_name="__main__")
    return 0


def known_after(start: Callable[..., str], folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """What two processes knew after the loop."""
    (folder / "onlooker.py").write_text(ONLOOKER)
    said = start(folder, *arguments)
    known = [torch.load(folder / f"{arguments[-1]}-{rank}.pt", weights_only=False) for rank in range(2)]
    assert f"2 processes, {known[0]['updates']} updates, densities alike: True" in said
    assert same(known[0]["sampler"], known[1]["sampler"])
    assert same(known[0]["weights"], known[1]["weights"])
    return known


def test_two_processes_draw_disjoint_strata_and_price_alike(tmp_path):
    """With a sampler that takes gradients through the replicas; it waits for 20 probes, and till then the density is uniform."""
    known = known_after(launched, tmp_path, "--sampler", "lookahead", "--updates", 45, "--checkpoint", "c")
    both = torch.cat([each["times"] for each in known], 1)
    assert torch.equal((both * 64).long().sort(1).values, torch.arange(64).expand(45, 64))  # of 64 samples one in each 64th
    assert int(known[0]["sampler"]["probes"]) == 9  # at updates 0, 1, 3, 6, 10, 15, 21, 28 and 36


def test_two_processes_learn_the_same_and_go_on_bit_for_bit(tmp_path):
    whole = known_after(forked, tmp_path, "--updates", 60, "--checkpoint", "whole")
    first = known_after(forked, tmp_path, "--updates", 40, "--checkpoint", "parts")
    second = known_after(forked, tmp_path, "--updates", 60, "--checkpoint", "parts")
    for rank in range(2):
        assert torch.equal(torch.cat([first[rank]["times"], second[rank]["times"]]), whole[rank]["times"])
        assert same(second[rank]["sampler"], whole[rank]["sampler"])
        assert same(second[rank]["weights"], whole[rank]["weights"])
    assert not torch.equal(whole[0]["times"], whole[1]["times"])
