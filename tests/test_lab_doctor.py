import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from noiseclock import cli
from noiseclock.lab import doctor, inception
from noiseclock.lab.doctor import Check, Finding, examine, healthy, render

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def text(checks: list[Check]) -> str:
    """As the command line prints it, in a narrow terminal."""
    console = Console(file=io.StringIO(), width=80, soft_wrap=cli.console.soft_wrap)
    console.print(render(checks))
    return console.file.getvalue()


# --- the whole ----------------------------------------------------------------------------------------------------------------------------


def test_this_machine_is_healthy_and_all_that_is_absent_says_how_to_get_it(home):
    checks = {check.name: check for check in examine()}
    assert healthy(list(checks.values())), [check for check in checks.values() if check.ok is False]
    assert all(check.advice for check in checks.values() if check.ok is None)
    assert not home.exists()  # looking makes nothing
    for name, place in (("MNIST", "mnist"), ("CIFAR-10", "cifar10"), ("Inception weights", "inception")):
        assert checks[name].ok is None
        assert str(home / place) in checks[name].found
    assert checks["diffusers"].found == importlib.metadata.version("diffusers")
    assert checks["digits"].found == "1,497 + 300 images"  # scikit-learn's 1797


def test_a_check_that_raises_is_a_line_and_counts_only_where_required(monkeypatch):
    def broken():
        raise RuntimeError("the cable is loose")

    fine = {"fine": lambda: Finding(True, "here")}
    for required, optional, verdict in (({"thing": broken}, fine, False), (fine, {"thing": broken}, True)):
        monkeypatch.setattr(doctor, "REQUIRED", required)
        monkeypatch.setattr(doctor, "OPTIONAL", optional)
        checks = examine()
        (thing,) = (check for check in checks if check.name == "thing")
        assert thing.ok is False
        assert thing.found == "RuntimeError: the cable is loose"
        assert healthy(checks) is verdict


def test_no_check_raises_though_everything_below_it_does(monkeypatch):
    def refuse(*_, **__):
        raise OSError("nothing works today")

    for owner, names in (
        (os, ("sysconf", "access", "sched_getaffinity")),
        (shutil, ("disk_usage",)),
        (subprocess, ("run",)),
        (importlib, ("import_module",)),
        (importlib.metadata, ("version",)),
        (torch.cuda, ("is_available",)),
        (torch.distributed, ("is_available",)),
        (torch.accelerator, ("current_accelerator",)),
        (Path, ("is_file", "cwd", "exists")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, refuse)
    checks = examine()
    monkeypatch.undo()
    failed = {check.name for check in checks if check.ok is False}
    assert {"processor", "arithmetic", "working folder", "data folder", "diffusers", "GPU", "distributed", "MNIST", "wandb"} <= failed
    assert not healthy(checks)


def test_health_needs_what_is_required_alone():
    assert healthy([Check("a", True, ""), Check("b", None, "", "get it"), Check("c", False, "", required=False)])
    assert not healthy([Check("a", True, ""), Check("b", False, "")])


def test_each_check_is_shown_whole():
    address = "https://example.org/" + "very-long-path/" * 12 + "end"
    shown = text(
        [Check("one", True, "/data [v2]/[red]x"), Check("two", None, "not there", f"Get it from {address}"), Check("three", False, "bad", "Mend it.")]
    )
    lines = [line.strip() for line in shown.splitlines()]
    assert lines[0].split()[:2] == ["ok", "one"]
    assert "/data [v2]/[red]x" in lines[0]
    assert f"Get it from {address}" in lines  # in one piece, to be copied
    assert [line.split()[0] for line in lines if re.match("(ok|absent|broken) ", line)] == ["ok", "absent", "broken"]


def test_what_it_asks_for_is_what_the_project_declares():
    lab = {re.match(r"[\w-]+", line)[0] for line in PROJECT["optional-dependencies"]["lab"]}
    packages = {name for name, look in (doctor.REQUIRED | doctor.OPTIONAL).items() if getattr(look, "func", None) in (doctor.needed, doctor.optional)}
    assert packages - lab == {"transformers", "wandb"}
    assert any(line.startswith("transformers") for line in PROJECT["optional-dependencies"]["text"])
    assert lab - packages == {"rich", "tyro"}  # without which the doctor cannot speak
    assert f"torch>={'.'.join(map(str, doctor.TORCH))}" in PROJECT["dependencies"]
    assert PROJECT["requires-python"] == f">={'.'.join(map(str, doctor.PYTHON))}"


# --- the machine --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "ok"), [("2.10.1", False), ("2.9.0+cu128", False), ("2.11.0a0+git123", True), ("2.13.0+cpu", True), ("3.0.0", True)]
)
def test_old_versions_of_torch_are_refused(version, ok, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    finding = doctor.pytorch()
    assert (finding.ok, finding.found, bool(finding.advice)) == (ok, version, not ok)


def test_old_versions_of_python_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4))
    assert doctor.python().ok is False
    assert "3.11" in doctor.python().advice


def test_memory_is_what_the_container_allows(monkeypatch):
    sizes = {"SC_PHYS_PAGES": 2**24, "SC_PAGE_SIZE": 2**12}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    for content, gib in (("max\n", 64), (f"{3 * 2**30}\n", 3), (f"{2**63}\n", 64)):
        monkeypatch.setattr(Path, "read_text", lambda self, content=content: content)
        assert re.fullmatch(rf"3 cores, .*, {gib}\.0 GiB of memory", doctor.processor().found)


def smi(found: str):
    def run(command, **_):
        assert command[0] == "nvidia-smi"
        if not found:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=found)

    return run


def test_no_gpu_is_no_fault(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", smi(""))
    assert doctor.gpu()[:2] == (None, "none")


def test_a_driver_that_torch_cannot_use_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(subprocess, "run", smi("470.57\n470.57\n"))
    finding = doctor.gpu()
    assert finding.ok is False
    assert finding.found.startswith("a GPU with driver 470.57, which torch")


@pytest.mark.parametrize("native", [True, False])
def test_gpus_are_described(native, monkeypatch):
    Properties = namedtuple("Properties", "name total_memory")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Properties(f"Card {i}", (80 + i) * 2**30))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    monkeypatch.setattr(subprocess, "run", smi("570.86.15\n570.86.15\n"))
    finding = doctor.gpu()
    assert finding.ok is True
    assert finding.found == f"Card 0 with 80 GiB, Card 1 with 81 GiB; driver 570.86.15; bf16 {'yes' if native else 'no'}"
    assert bool(finding.advice) is not native


@pytest.mark.parametrize(
    ("failing", "ok", "said"),
    [
        ((), True, "multiply correctly"),
        ((torch.bfloat16,), None, "no bfloat16"),
        ((torch.float64,), None, "no float64"),
        ((torch.float32,), False, "float32"),
    ],
)
@pytest.mark.parametrize("how", ["raises", "is wrong"])
def test_products_are_checked_by_their_numbers(failing, ok, said, how, monkeypatch):
    real = torch.Tensor.__matmul__

    def product(a, b):
        if a.dtype not in failing:
            return real(a, b)
        if how == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        return real(a, b) + torch.eye(16, dtype=a.dtype)

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    monkeypatch.setattr(torch.Tensor, "__matmul__", product)
    finding = doctor.arithmetic()
    assert finding.ok is ok
    assert said in finding.found
    assert bool(finding.advice) is bool(failing)


def test_torch_without_distributed(monkeypatch):
    assert "gloo" in doctor.distributed().found
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    assert doctor.distributed().ok is None


# --- disks --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "ok", "advice"), [(0.1, False, "Free some space: "), (1.0, True, "before a CIFAR-10 run"), (50.0, True, "")])
def test_space_in_the_working_folder(free, ok, advice, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free * 2**30))
    finding = doctor.working_folder()
    assert (finding.ok, finding.found) == (ok, f"{tmp_path}, {free:.1f} GiB free")
    assert advice in finding.advice
    assert bool(finding.advice) is bool(advice)


def test_the_largest_recipe_fits_into_what_is_called_ample():
    # three checkpoints of four float32 copies of 35.7 M parameters
    assert doctor.AMPLE > 3 * 4 * 4 * 35.7e6


def test_folders_that_cannot_be_written_to(monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor.working_folder().ok is False
    assert doctor.data_folder().ok is None
    assert "NOISECLOCK_HOME" in doctor.data_folder().advice


def test_the_data_folder_need_not_be_there_yet(home):
    assert f"{home}, not made yet, " in doctor.data_folder().found
    home.mkdir()
    assert doctor.data_folder().found.startswith(f"{home}, ")
    assert "not made yet" not in doctor.data_folder().found


# --- data and weights ---------------------------------------------------------------------------------------------------------------------


def idx(path: Path, shape: tuple[int, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes() + bytes(int(np.prod(shape))))


def only(name: str) -> Check:
    return doctor._examined(name, doctor.OPTIONAL[name], required=False)


def test_mnist_is_read_as_training_reads_it(home):
    for split, n in (("train", 20), ("t10k", 10)):
        idx(home / "mnist" / f"{split}-images-idx3-ubyte", (n, 28, 28))
        idx(home / "mnist" / f"{split}-labels-idx1-ubyte", (n,))
    assert only("MNIST") == Check("MNIST", True, f"20 + 10 images in {home / 'mnist'}", required=False)
    path = home / "mnist" / "t10k-images-idx3-ubyte"
    os.truncate(path, 1000)
    check = only("MNIST")
    assert check.ok is False
    assert check.found.startswith(f"{path} is damaged")
    path.unlink()
    check = only("MNIST")
    assert check.ok is None
    assert path.name in check.found


def test_cifar10_is_read_as_training_reads_it(home):
    root = home / "cifar10" / "cifar-10-batches-bin"
    root.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        assert only("CIFAR-10").ok is None
        (root / name).touch()
        os.truncate(root / name, 10_000 * 3073)  # zeros
    assert only("CIFAR-10") == Check("CIFAR-10", True, f"50,000 + 10,000 images in {home / 'cifar10'}", required=False)
    os.truncate(root / "data_batch_3.bin", 3073 * 17)
    check = only("CIFAR-10")
    assert check.ok is False
    assert "40017 images" in check.found


def test_inception_weights():
    def seen() -> Check:
        return only("Inception weights")

    check, path = seen(), inception.weights_path()
    assert check.ok is None
    assert inception.SOURCE in check.advice
    path.parent.mkdir(parents=True)
    path.write_bytes(b"<html>404</html>")
    assert seen().ok is False
    with torch.device("meta"):
        shapes = inception.Inception().state_dict()
    weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in shapes.items()}
    torch.save(weights, path)
    check = seen()
    assert check.ok is True
    assert "without the classifier layer" in check.found
    assert "Inception Score" in check.advice
    weights["fc.weight"][3, 5] = 1
    torch.save(weights, path)
    check = seen()
    assert (check.ok, check.advice) == (True, "")
    assert ", with the classifier layer" in check.found
    del weights["Mixed_7c.branch_pool.conv.weight"]
    torch.save(weights, path)
    assert seen().ok is False


def test_the_real_files_where_they_are(monkeypatch):
    monkeypatch.undo()
    if not inception.weights_path().is_file():
        pytest.skip(f"no Inception weights at {inception.weights_path()}")
    assert only("Inception weights").ok is True


# --- packages -----------------------------------------------------------------------------------------------------------------------------


def test_packages(monkeypatch):
    assert doctor.needed("no_such_module", "no-such-package").ok is False
    assert "noiseclock[lab]" in doctor.needed("no_such_module", "no-such-package").advice
    assert doctor.optional("no-such-package", "tests") == Finding(None, "not installed", "For tests: pip install no-such-package.")
    assert doctor.optional("numpy", "tests") == Finding(True, np.__version__)

    def conflict(_):
        raise ImportError("cannot import name 'cached_download'")

    monkeypatch.setattr(importlib, "import_module", conflict)
    assert doctor.needed("diffusers", "diffusers")[:2] == (False, "cannot be imported: cannot import name 'cached_download'")
