"""A comparison that is killed or asked to stop, or loses a worker: the same command goes on, and nothing is lost."""

import multiprocessing
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from forked import Forked
from noiseclock import cli
from noiseclock.lab.results import read
from small_runs import TINY, comparison, differing, lines, points, said, same_cells, state_of, wait_until

pytestmark = pytest.mark.usefixtures("elsewhere")


def alone(argv: list[str]) -> int:
    """A command as a session of its own, which can be killed with all its processes."""
    os.setsid()
    return cli.main(argv)


def alone_with_forks(argv: list[str]) -> int:
    """The same, and its workers are forked from it: started afresh, as in test_cli_results.py, each would import for seconds."""
    get_context = multiprocessing.get_context
    multiprocessing.get_context = lambda _: get_context("fork")
    return alone(argv)


def log_of(cells: Path, kind: str) -> int:
    """Records of a kind in all logs."""
    return sum(path.read_bytes().count(f'"kind": "{kind}"'.encode()) for path in cells.glob("*/log.jsonl"))


def workers(run: Path) -> set[int]:
    """The processes that train: a lock names its own."""
    return {int(number) for path in run.glob("locks/*/.lock") for number in re.findall(r"^process (\d+) on", path.read_text())}


def test_a_lost_worker_ends_the_comparison_at_once_and_the_next_one_goes_on(tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--samplers", "uniform", "min-snr", "--seeds", "1", "--every", "300"]
    argv = comparison(run, *options, settings=replace(TINY, updates=300))
    with Forked(alone_with_forks, [*argv, "--jobs", "2"], output=tmp_path / "said.txt") as process:
        wait_until(lambda: len(workers(run)) == 2, process, "both workers had a training")  # whoever is left has most of its 300 updates to go
        wait_until(lambda: log_of(run / "cells", "train"), process, "an update")
        os.kill(min(workers(run)), signal.SIGKILL)
        assert process.wait(120) == 1
    told = (tmp_path / "said.txt").read_text()
    assert told == "noiseclock: a worker ended with status -9, perhaps for want of memory; run the same command again to go on\n"
    assert not list(run.glob("cells/*/finished.json"))  # nobody waited for the other one to get there
    said(capsys, *argv)
    assert [step for *_, step in points(run)] == [300, 300]
    assert read(run).problems == []


@pytest.mark.parametrize(("number", "status", "message"), [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "stopped")])
def test_a_signal_ends_all_workers_with_checkpoints(number, status, message, tmp_path):
    run = tmp_path / "run"
    options = ["--samplers", "uniform", "min-snr", "--seeds", "1", "--every", "3000", "--jobs", "2"]
    with Forked(alone_with_forks, comparison(run, *options, settings=replace(TINY, updates=3000)), output=tmp_path / "said.txt") as process:
        wait_until(lambda: len(list(run.glob("cells/*/log.jsonl"))) == 2 and log_of(run / "cells", "train") > 4, process, "updates of both")
        os.kill(process.pid, number)
        os.killpg(process.pid, number)  # as `timeout` does
        assert process.wait(120) == status
    assert (tmp_path / "said.txt").read_text() == f"noiseclock: {message}; run the same command again to go on\n"
    assert len(list(run.glob("cells/*/checkpoints/step-*"))) == 2


def test_killed_twice_and_resumed_gives_the_same_results(tmp_path, capsys):
    """kill -9 between two evaluations of the first training, and in an evaluation of the second."""
    settings = replace(TINY, updates=12, dropout=0.1)
    options = ["--samplers", "adaptive:every=2,stride=5,lr=0.001", "lsm+min-snr", "--every", "4", "--seeds", "1", "--vlb-images", "4"]
    whole, run = (comparison(tmp_path / name, *options, settings=settings) for name in ("whole", "run"))
    said(capsys, *whole)
    cells = tmp_path / "run" / "cells"

    def evaluating() -> bool:
        evaluated = sum(path.read_bytes().count(b"\n") for path in cells.glob("*/points.jsonl"))
        return log_of(cells, "validation") > max(evaluated, 3)

    for happened, what in ((lambda: log_of(cells, "train") >= 6, "update 6"), (evaluating, "an evaluation")):
        with Forked(alone, run, output=tmp_path / "said.txt") as process:
            wait_until(happened, process, what)
            os.killpg(process.pid, signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
    assert len(list(cells.glob("*/finished.json"))) == 1
    said(capsys, *run)
    assert same_cells(tmp_path / "run", tmp_path / "whole")
    for cell in (tmp_path / "whole" / "cells").iterdir():
        assert lines(cells / cell.name) == lines(cell)
        assert differing(state_of(cells / cell.name), state_of(cell)) == []
