"""What a run is made with: versions, machine, and the commit of the code."""

from __future__ import annotations

import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import noiseclock as nc

PACKAGES = ("torch", "numpy", "diffusers", "accelerate", "safetensors", "scikit-learn", "datasets")


def surroundings(device: torch.device, world: int) -> dict[str, Any]:
    """What a run was made with: versions, machine, and the commit of the code, where there is one."""
    threads = torch.get_num_threads()
    return {
        "versions": {"noiseclock": nc.__version__} | {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_processor()}, {threads} thread{'s' * (threads > 1)}",
        "processes": world,
        "git": commit(),
    }


@cache
def _processor() -> str:
    """The CPU model, if the system tells it: CPUs of one architecture differ a lot in speed, and times are compared within one model only."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


@cache
def _version(package: str) -> str:
    """Looked up once: a comparison asks for all of them in every training, and each takes milliseconds to find."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "absent"


def commit() -> str | None:
    """The commit of this code, "-dirty" after it where files have changed since; None where it is in no repository."""
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        # raises if this package is only installed inside another repository, whose commit would be wrong
        subprocess.run([*here, "ls-files", "--error-unmatch", "."], capture_output=True, check=True)
        described = subprocess.run(
            [*here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
