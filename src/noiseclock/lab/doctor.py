"""Is everything there? What the machine has, what is missing, and how to get it.

Each check itself imports what may be broken, so that a failure becomes a line of the output and not a traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed
from rich.text import Text

import noiseclock as nc
from noiseclock.lab.errors import Mistake
from noiseclock.lab.home import home

PYTHON, TORCH = (3, 11), (2, 11)  # the oldest supported versions
GIB = 2**30
LITTLE = GIB // 4  # with less free disk even a small run may fail
# free disk for the CIFAR-10 recipes: weights, their average and Adam's two moments, 35.7 M numbers of 4 bytes each, in two checkpoints and a third
# while it is written, make 1.7 GB
AMPLE = 2 * GIB


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ok: None if it is optional and absent. advice: how to get or mend it. required: can nothing run without it?"""

    name: str
    ok: bool | None
    found: str
    advice: str = ""
    required: bool = True


class Finding(NamedTuple):
    """What a check saw."""

    ok: bool | None
    found: str
    advice: str = ""


# --- the machine --------------------------------------------------------------------------------------------------------------------------


def python() -> Finding:
    """The interpreter."""
    return Finding(sys.version_info >= PYTHON, platform.python_version(), "" if sys.version_info >= PYTHON else "Install Python 3.11 or newer.")


def pytorch() -> Finding:
    """Its version; one built from source before a release counts as the release."""
    numbers = re.match(r"(\d+)\.(\d+)", torch.__version__)
    good = numbers is not None and (int(numbers[1]), int(numbers[2])) >= TORCH
    return Finding(good, str(torch.__version__), "" if good else f"Install torch {TORCH[0]}.{TORCH[1]} or newer: pip install --upgrade torch.")


def processor() -> Finding:
    """Cores and memory that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):  # a container's limit, in cgroup v2 and v1
        try:
            memory = min(memory, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return Finding(True, f"{cores} cores, {torch.get_num_threads()} of them used by torch, {memory / GIB:.1f} GiB of memory")


def gpu() -> Finding:
    """CUDA devices and their driver, or a driver that torch cannot use."""
    driver = _driver()
    if not torch.cuda.is_available():
        if driver:
            advice = "Install a build of torch that fits the driver, see https://pytorch.org/get-started/locally."
            return Finding(False, f"a GPU with driver {driver}, which torch {torch.__version__} cannot use", advice)
        return Finding(None, "none", "Small recipes run without; the larger ones need an NVIDIA GPU and a CUDA build of torch.")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    found = ", ".join(f"{device.name} with {device.total_memory / GIB:.0f} GiB" for device in devices)
    native = torch.cuda.is_bf16_supported(including_emulation=False)
    return Finding(
        True,
        f"{found}; driver {driver or 'unknown'}; bf16 {'yes' if native else 'no'}",
        "" if native else "Train in float32: bf16 would be slow here.",
    )


def _driver() -> str:
    """The version of NVIDIA's driver, empty without one."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def arithmetic() -> Finding:
    """Does a matrix product give the right numbers on the device, in the dtypes that are used?"""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # whole numbers up to 16·3·3 = 144: exact in bf16, which represents all up to 256
    whole = (torch.arange(256) % 4).reshape(16, 16)
    wrong = [dtype for dtype in (torch.float32, torch.bfloat16, torch.float64) if not _multiplies(whole, dtype, device)]
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in wrong)
    if not wrong:
        return Finding(True, f"float32, bfloat16 and float64 multiply correctly on {device.type}")
    if torch.float32 in wrong:
        return Finding(False, f"{names} products fail on {device.type}", "Install a build of torch made for this device, or hide it and use the CPU.")
    return Finding(
        None, f"no {names} on {device.type}", "Train in float32." if torch.bfloat16 in wrong else "Nothing to do: float32 is used instead."
    )


def _multiplies(whole: torch.Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    try:
        product = whole.to(device, dtype) @ whole.to(device, dtype)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(product.cpu().long(), whole @ whole)


def distributed() -> Finding:
    """The backends through which processes can communicate."""
    known = ("gloo", "nccl", "xccl", "mpi") if torch.distributed.is_available() else ()
    there = [name for name in known if getattr(torch.distributed, f"is_{name}_available", bool)()]
    return (
        Finding(True, ", ".join(there)) if there else Finding(None, "none", "Install a build of torch with torch.distributed to use several devices.")
    )


# --- disks --------------------------------------------------------------------------------------------------------------------------------


def working_folder() -> Finding:
    """Where runs are written unless told otherwise."""
    path = Path.cwd()
    free = shutil.disk_usage(path).free
    found = f"{path}, {free / GIB:.1f} GiB free"
    if not os.access(path, os.W_OK):
        return Finding(False, f"{path} cannot be written to", "Change to a folder that you can write to.")
    if free < LITTLE:
        return Finding(False, found, "Free some space: a run needs some for its checkpoints.")
    return Finding(True, found, "" if free >= AMPLE else f"Free some space before a CIFAR-10 run: its checkpoints take up to {AMPLE / GIB:.0f} GiB.")


def data_folder() -> Finding:
    """Where data and weights are kept."""
    path = home()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    if not os.access(there, os.W_OK):
        return Finding(None, f"{path} cannot be written to", "Set NOISECLOCK_HOME to a folder that you can write to, unless all data is there.")
    free = shutil.disk_usage(there).free
    found = f"{path}, {'' if path == there else 'not made yet, '}{free / GIB:.1f} GiB free"
    return Finding(True, found, "" if free >= LITTLE else "Free some space, or set NOISECLOCK_HOME to a folder on a larger disk.")


# --- data and weights ---------------------------------------------------------------------------------------------------------------------


def digits() -> Finding:
    """Comes with scikit-learn."""
    return Finding(True, _read("digits"))


def mnist() -> Finding:
    """Four files in the data folder."""
    from noiseclock.lab.classics import MNIST_MD5

    root = home() / "mnist"
    missing = [name for name in MNIST_MD5 if not any((root / f"{name}{packed}").is_file() for packed in ("", ".gz"))]
    if missing:
        return Finding(
            None, f"{missing[0]} is not in {root}", f"It is downloaded when first used; without a network put its 4 IDX files into {root}."
        )
    return Finding(True, f"{_read('mnist')} in {root}")


def cifar10() -> Finding:
    """Any of its layouts in the data folder."""
    from noiseclock.lab.formats import find_cifar10

    root = home() / "cifar10"
    if any(find_cifar10(root, split) is None for split in ("train", "test")):
        return Finding(None, f"not in {root}", f"It is downloaded when first used; without a network unpack cifar-10-binary.tar.gz in {root}.")
    return Finding(True, f"{_read('cifar10')} in {root}")


def _read(name: str) -> str:
    """Read a data set as training does; raises if it is damaged."""
    from noiseclock.lab.classics import CLASSICS

    train, test = (len(CLASSICS[name](split)[0]) for split in ("train", "test"))
    return f"{train:,} + {test:,} images"


def inception_weights() -> Finding:
    """The weights of the FID network, with or without the layer that the Inception Score needs."""
    from noiseclock.lab import inception

    path = inception.weights_path()
    if not path.is_file():
        return Finding(None, f"not at {path}", f"For FID, KID, precision and recall download {inception.SOURCE} to that path.")
    whole = inception.load().has_classifier
    found = f"{path}, {path.stat().st_size / 2**20:.0f} MiB, {'with' if whole else 'without'} the classifier layer"
    return Finding(True, found, "" if whole else f"Serves all but the Inception Score; for that replace it with {inception.SOURCE}.")


# --- packages -----------------------------------------------------------------------------------------------------------------------------


def needed(module: str, package: str) -> Finding:
    """A package that the laboratory imports."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Finding(False, f"cannot be imported: {error}", 'Install what the laboratory needs: pip install --upgrade "noiseclock[lab]".')
    return Finding(True, importlib.metadata.version(package))


def optional(package: str, use: str) -> Finding:
    """A package that only a part of the laboratory imports."""
    try:
        return Finding(True, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Finding(None, "not installed", f"For {use}: pip install {package}.")


# --- the whole ----------------------------------------------------------------------------------------------------------------------------

REQUIRED: dict[str, Callable[[], Finding]] = {
    "Python": python,
    "noiseclock": lambda: Finding(True, nc.__version__),
    "torch": pytorch,
    "accelerate": partial(needed, "accelerate", "accelerate"),
    "diffusers": partial(needed, "diffusers", "diffusers"),
    "pillow": partial(needed, "PIL", "pillow"),
    "safetensors": partial(needed, "safetensors", "safetensors"),
    "scikit-learn": partial(needed, "sklearn", "scikit-learn"),
    "scipy": partial(needed, "scipy", "scipy"),
    "processor": processor,
    "arithmetic": arithmetic,
    "working folder": working_folder,
    "digits": digits,
}
OPTIONAL: dict[str, Callable[[], Finding]] = {
    "GPU": gpu,
    "distributed": distributed,
    "data folder": data_folder,
    "MNIST": mnist,
    "CIFAR-10": cifar10,
    "Inception weights": inception_weights,
    "datasets": partial(optional, "datasets", "Hugging Face datasets"),
    "matplotlib": partial(optional, "matplotlib", "figures"),
    "plotly": partial(optional, "plotly", "reports and the live view"),
    "pyarrow": partial(optional, "pyarrow", "parquet files"),
    "tensorboard": partial(optional, "tensorboard", "curves in TensorBoard"),
    "transformers": partial(optional, "transformers", "captions, prompts and the CLIP score"),
    "wandb": partial(optional, "wandb", "tracking with Weights & Biases"),
}


def examine() -> list[Check]:
    """Look at everything. Takes some seconds, downloads nothing and never raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_examined(name, look, required) for checks, required in ((REQUIRED, True), (OPTIONAL, False)) for name, look in checks.items()]


def _examined(name: str, look: Callable[[], Finding], required: bool) -> Check:
    try:
        finding = look()
    except Mistake as error:  # its message says what to do
        finding = Finding(False, str(error))
    except Exception as error:
        finding = Finding(False, f"{type(error).__name__}: {error}", "This check could not be made; the message says why.")
    return Check(name, *finding, required=required)


def healthy(checks: list[Check]) -> bool:
    """Is everything required in order?"""
    return all(check.ok is not False or not check.required for check in checks)


def render(checks: list[Check]) -> Text:
    """A line for each check, and one for its advice. Not a table: its cells would break URLs and paths."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        broken = ("broken", "bold red" if check.required else "yellow")
        mark, style = broken if check.ok is False else ("ok", "green") if check.ok else ("absent", "dim")
        # as Text, so that square brackets in a path are not taken for markup
        lines.append(Text.assemble((f"{mark:<8}", style), f"{check.name:<{width}}  {check.found}"))
        if check.advice:
            lines.append(Text(" " * (width + 10) + check.advice, "italic"))
    return Text("\n").join(lines)
