"""Every example is short, runs, and does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
COMPARISONS = ("audio", "fine_tuning", "lora", "points")
ALONE = ("accelerate_loop", "diffusers_unconditional")
LOOPS = ("flow_matching_style", "k_diffusion_style", "lightning_loop", "plain")  # in test_integrations_loops.py


def run(name: str, *arguments: object, cwd: Path, launcher: tuple[str, ...] = ()) -> str:
    """What an example prints, run in a folder of its own."""
    command = [sys.executable, *launcher, EXAMPLES / f"{name}.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_short_and_run():
    found = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert sorted(found) == sorted((*COMPARISONS, *ALONE, *LOOPS))
    for name, text in found.items():
        assert len(text.splitlines()) < 60, name


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_tells_what_each_sampler_gave(name, tmp_path):
    if name == "lora":
        pytest.importorskip("peft")
    lines = run(name, "--updates", 3, "--seeds", 1, cwd=tmp_path).splitlines()
    assert {"uniform", "loss-second-moment", "variance-optimal", "adaptive"} <= {line.split()[0] for line in lines}
    assert all(re.search(r"\d\.\d{4}", line) for line in lines)


def test_the_diffusers_script_goes_on_where_it_was_and_leaves_a_pipeline(tmp_path):
    said = [
        run("diffusers_unconditional", "--output_dir", folder, "--num_epochs", epochs, cwd=tmp_path)
        for folder, epochs in (("whole", 2), ("parts", 1), ("parts", 2))
    ]
    # 1797 digits in batches of 64
    assert [re.findall(r"after (\d+) updates the loss is \d\.\d{4}; samples \(64, 8, 8, 1\)", text) for text in said] == [["56"], ["28"], ["56"]]
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


def launched(folder: Path, *arguments: object) -> list[dict[str, Any]]:
    """What two processes knew after the loop."""
    (folder / "onlooker.py").write_text(ONLOOKER)
    settings = [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--main_process_port",
        "0",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    launcher = ("-m", "accelerate.commands.launch", *settings, str(folder / "onlooker.py"))
    said = run("accelerate_loop", *arguments, launcher=launcher, cwd=folder)
    known = [torch.load(folder / f"{arguments[-1]}-{rank}.pt", weights_only=False) for rank in range(2)]
    assert f"2 processes, {known[0]['updates']} updates, densities alike: True" in said
    assert same(known[0]["sampler"], known[1]["sampler"])
    assert same(known[0]["weights"], known[1]["weights"])
    return known


def test_two_processes_draw_disjoint_strata_and_price_alike(tmp_path):
    """With a sampler that takes gradients through the replicas; it waits for 20 probes, and till then the density is uniform."""
    known = launched(tmp_path, "--sampler", "lookahead", "--updates", 45, "--checkpoint", "c")
    both = torch.cat([each["times"] for each in known], 1)
    assert torch.equal((both * 64).long().sort(1).values, torch.arange(64).expand(45, 64))  # of 64 samples one in each 64th
    assert int(known[0]["sampler"]["probes"]) == 2


def test_two_processes_learn_the_same_and_go_on_bit_for_bit(tmp_path):
    whole = launched(tmp_path, "--updates", 60, "--checkpoint", "whole")
    first = launched(tmp_path, "--updates", 40, "--checkpoint", "parts")
    second = launched(tmp_path, "--updates", 60, "--checkpoint", "parts")
    for rank in range(2):
        assert torch.equal(torch.cat([first[rank]["times"], second[rank]["times"]]), whole[rank]["times"])
        assert same(second[rank]["sampler"], whole[rank]["sampler"])
        assert same(second[rank]["weights"], whole[rank]["weights"])
    assert not torch.equal(whole[0]["times"], whole[1]["times"])
