"""What is released: a wheel that holds what it should and runs in an empty environment, and files that agree about the version."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

import noiseclock

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **environment: str) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this source, built without a network."""
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.name == f"noiseclock-{noiseclock.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        commands = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    inside = {name for name in names if not name.startswith(f"noiseclock-{noiseclock.__version__}.dist-info/")}
    there = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "noiseclock").rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert inside == there
    assert "noiseclock/py.typed" in inside
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", about, re.MULTILINE) == ["numpy>=1.26", "torch>=2.11"]  # the core needs no more
    assert "License-Expression: MIT" in about
    assert "noiseclock = noiseclock.cli:main" in commands


def test_the_wheel_s_core_runs_by_itself(wheel, tmp_path):
    """Unpacked where nothing else of ours is: a clock draws, and the version is the one that was asked for."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    script = """
import importlib.metadata, torch, noiseclock as nc
clock = nc.Clock("linear", "loss-second-moment")
print(nc.__file__, importlib.metadata.version("noiseclock"), clock.draw(torch.zeros(4, 2)).x_t.shape[0])
"""
    where, version, drawn = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site")).split()
    assert where.startswith(str(tmp_path / "site"))
    assert (version, drawn) == (noiseclock.__version__, "4")


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_trains(wheel, tmp_path):
    """`make wheel`: installed with the laboratory from the lock file's versions, it looks at the machine and trains twenty updates."""
    run(sys.executable, "-m", "venv", "env", cwd=tmp_path)
    run("env/bin/pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "requirements.lock", f"{wheel}[lab]", cwd=tmp_path)
    program = tmp_path / "env" / "bin" / "noiseclock"
    apart = {"NOISECLOCK_HOME": str(tmp_path / "home"), "PYTHONPATH": ""}
    assert run(program, "--version", cwd=tmp_path, **apart) == f"noiseclock {noiseclock.__version__}\n"
    assert "torch" in run(program, "doctor", cwd=tmp_path, **apart)
    shown = run(program, "train", "digits", "--updates", "20", "--save-every", "20", "--channels", "16", "--sample-every", "0", cwd=tmp_path, **apart)
    assert re.search(r"update 20 of 20: loss \d\.\d{4}", shown)
    assert list((tmp_path / "runs" / "digits" / "checkpoints").iterdir())


def test_everyone_agrees_about_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == noiseclock.__version__
    assert {"cff-version", "message", "title", "authors", "license"} <= citation.keys()
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == noiseclock.__version__


def test_workflows_run_what_there_is():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    assert [path.stem for path in files] == ["test", "wheel"]
    called = set()
    for path in files:
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            called |= {word for step in job["steps"] for word in re.findall(r"make ([a-z-]+)", step.get("run", ""))}
    assert called == {"lint", "test", "test-integrations", "docs", "wheel"}
    assert called <= targets
