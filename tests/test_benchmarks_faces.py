"""The benchmark on faces runs through its stages, stops when its time is over, and goes on. The pictures are blots of colour, made on the spot."""

import json
import runpy
import tarfile
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import noiseclock.lab.compare as lab_compare
import noiseclock.lab.evaluate as lab_evaluate
from noiseclock.lab.classifier import Classifier

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faces.py"
# Python 3.12 warns when a process with threads forks
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture
def faces(monkeypatch, tmp_path):
    """The script, with features of a small random network: those of Inception take minutes on a CPU, and its weights may not be here."""
    network = Classifier(3, 10, "random features").eval().requires_grad_(False)
    for module in (lab_compare, lab_evaluate):
        monkeypatch.setattr(module, "network_for", lambda name, **_: network)
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path / "home"))
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def tar(tmp_path):
    rng = np.random.default_rng(0)
    with tarfile.open(tmp_path / "faces.tar", "w") as archive:
        for number in range(60):
            path = tmp_path / f"{number}.png"
            Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((40, 40)).save(path)
            archive.add(path, path.name)
    return tmp_path / "faces.tar"


def test_faces_go_through_all_stages_and_on_where_they_stopped(faces, tar, tmp_path, capsys):
    out = tmp_path / "out"
    command = [str(tar), str(out), "--small", "--device", "cpu"]
    faces["main"]([*command, "--minutes", "0"])
    printed = capsys.readouterr().out
    assert printed.endswith("stopped after its minutes; run the same command again to go on\n")
    assert "no samples were compared yet" in printed
    assert (out / "autoencoder" / "config.json").exists()  # it was saved
    assert not (out / "latents").exists()
    faces["main"](command)
    printed = capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    lines = printed.splitlines()[-6:]
    held = 60 - found["autoencoder"]["scores"]["reference_count"]
    against = f"against {60 - held} training pictures"
    assert lines[0] == f"distance: Fréchet distance (random features) of 8 decoded samples, ddim 4, {against}"
    assert [line.split()[0] for line in lines[2:]] == ["autoencoder", "uniform", "adaptive", "variance-optimal"]
    assert [entry["step"] for entry in found["autoencoder"]["log"]] == [5, 10]
    for method in found["methods"]:
        assert method["finished"]
        assert [point["step"] for point in method["points"]] == [2, 4]
        with Image.open(out / f"samples-{method['method']}-0.png") as grid:
            assert grid.size == (2 + 8 * (64 + 2),) * 2  # 64 decoded pictures of 32x32, magnified
    with Image.open(out / "reconstructions.png") as grid:
        assert grid.size[1] >= 2 + 64 + 2
    before = (out / "results.json").read_bytes()
    faces["main"](command)  # nothing is left to do
    assert (out / "results.json").read_bytes() == before
    assert capsys.readouterr().out.splitlines()[-6:] == lines


def test_a_stopped_comparison_goes_on_and_tells_what_there_is(faces, tar, tmp_path, capsys, monkeypatch):
    out, seconds = tmp_path / "out", count()
    command = [str(tar), str(out), "--small", "--device", "cpu"]
    # a clock for the script alone: a second passes at every look
    monkeypatch.setitem(faces["main"].__globals__, "time", SimpleNamespace(monotonic=lambda: next(seconds), strftime=lambda _: ""))
    faces["main"]([*command, "--minutes", str(20 / 60)])  # ten updates of the autoencoder, two shards, and some of uniform
    assert "stopped after its minutes" in capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    assert [(method["method"], method["finished"]) for method in found["methods"]] == [("uniform", True), ("adaptive", False)]
    faces["main"](command)
    assert all(method["finished"] for method in json.loads((out / "results.json").read_text())["methods"])
