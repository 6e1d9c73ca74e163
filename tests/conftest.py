import gc
import os
import shutil
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# The models here are tiny: more threads only wait for each other, the more so when tests run beside other work.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


def pytest_collection_finish() -> None:
    """What was imported stays, and a compiler makes millions of objects: to look through them again and again took a tenth of some tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Commands write into the working folder unless told otherwise. The screen has 100 columns."""
    from noiseclock import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for screen in (cli.console, cli.errors):
        monkeypatch.setattr(screen, "_width", 100)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by playwright; who asks for it is skipped where one of them is missing."""
    program = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip("there is no Chromium here")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
