"""What goes wrong in a training: losses that are not finite, memory, disks, signals and kill -9."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import noiseclock.lab.train as lab_train
from forked import Forked
from noiseclock import cli
from noiseclock.core.clock import Clock
from noiseclock.lab import checkpoint, interrupt
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.models.dit import DiT
from noiseclock.lab.train import train
from small_runs import TINY, differing, lines, run_of, state_of, trained, wait_until, words

# --- losses that are not finite -----------------------------------------------------------------------------------------------------------


def spoil(monkeypatch, spoiled: dict[int, float]) -> None:
    """Put a value into one pixel of what the model predicts in some updates, counted from 1."""
    loss = Clock.loss

    def spoiled_loss(self, batch, prediction):
        poison = torch.zeros_like(prediction)
        poison[3, 0, 2, 2] = spoiled.get(int(self._chance.draws), 0.0)
        return loss(self, batch, prediction + poison)

    monkeypatch.setattr(Clock, "loss", spoiled_loss)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_update_that_is_not_finite_is_skipped_and_counted(tmp_path, monkeypatch, value):
    spoil(monkeypatch, {2: value, 3: value, 5: value})
    run = run_of(replace(TINY, updates=6, patience=3), tmp_path)
    stream, seen = run._stream(), []
    for _ in range(6):
        record = run._update(stream)
        moments = run.optimizer.state_dict()["state"]
        seen.append({"net": run.net.state_dict(), "ema": run.ema.state_dict(), "moments": moments, "clock": run.clock.updates})
        seen[-1] = {name: {k: v for k, v in _flat(part)} if isinstance(part, dict) else part for name, part in seen[-1].items()}
        assert record.step == len(seen)
    assert record.skipped == 3
    assert [state["clock"] for state in seen] == [1, 1, 1, 2, 2, 3]
    for lost in (1, 2, 4):
        assert differing(seen[lost], seen[lost - 1]) == []
    for good in (3, 5):
        assert differing(seen[good]["net"], seen[good - 1]["net"]) != []
    assert all(bool(v.isfinite().all()) for v in seen[-1]["net"].values())


def _flat(part, place=""):
    for key, value in part.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value.clone()


def test_an_infinite_loss_with_a_finite_gradient_is_skipped_too(tmp_path, monkeypatch):
    loss = Clock.loss
    monkeypatch.setattr(Clock, "loss", lambda self, batch, prediction: loss(self, batch, prediction) + float("inf"))
    run = run_of(TINY, tmp_path)
    before = {name: value.clone() for name, value in run.net.state_dict().items()}
    record = run._update(run._stream())
    assert (record.loss, record.skipped) == (float("inf"), 1)
    assert 0 < record.norm < float("inf")
    assert differing(before, dict(run.net.state_dict())) == []


def test_the_log_names_what_was_lost(tmp_path, monkeypatch):
    spoil(monkeypatch, {2: float("nan")})
    records = trained(replace(TINY, updates=3), tmp_path)
    assert [record.skipped for record in records] == [0, 1, 1]
    assert [line["loss"] == "NaN" for line in lines(tmp_path)] == [False, True, False]
    assert state_of(tmp_path)["skipped"] == 1


def test_after_too_many_in_a_row_the_last_good_checkpoint_is_named(tmp_path, monkeypatch):
    # two in a row are put up with; the count starts again after a good one
    spoil(monkeypatch, {3: float("nan"), 4: float("nan"), **{n: float("nan") for n in range(6, 20)}})
    settings = replace(TINY, updates=20, save_every=2, patience=3)
    with pytest.raises(Failure) as failure:
        trained(settings, tmp_path)
    named = tmp_path / "checkpoints" / "step-00000006"
    assert f"not finite for 3 updates in a row, up to 8; the last good checkpoint is {named}" in str(failure.value)
    assert all(bool(value.isfinite().all()) for value in state_of(tmp_path, 6)["model"].values())
    with pytest.raises(Failure, match="there is no checkpoint yet"):
        trained(replace(settings, seed=1, patience=1, save_every=0), tmp_path / "none")


def test_a_run_with_lost_updates_resumes_bit_for_bit(tmp_path, monkeypatch):
    spoil(monkeypatch, {2: float("nan"), 5: float("inf"), 6: float("inf")})
    settings = replace(TINY, sampler="adaptive.scaled:every=2,queue=3")
    trained(settings, tmp_path / "whole")
    for stop in (2, 5, None):
        trained(settings, tmp_path / "parts", stop=stop)
    assert state_of(tmp_path / "whole")["skipped"] == 3
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts")) == []
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")


# --- memory -------------------------------------------------------------------------------------------------------------------------------


def test_a_probe_that_runs_out_of_memory_goes_on_in_smaller_pieces(tmp_path, monkeypatch):
    forward, sizes = DiT.forward, []

    def small_memory(self, x, t, labels=None):
        if not self.training:
            sizes.append(len(x))
            if len(x) > 5:
                raise torch.OutOfMemoryError("out of memory, for the test")
        return forward(self, x, t, labels)

    monkeypatch.setattr(DiT, "forward", small_memory)
    run = run_of(replace(TINY, sampler="adaptive.scaled:every=2,queue=3", updates=6), tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        records = list(run.updates(interrupt.Wish()))
    assert [str(warning.message) for warning in told] == [
        f"a probe of the model ran out of memory; it continues with {rows} samples at a time" for rows in (8, 4)
    ]
    assert run.clock.probe_rows == 4
    assert sizes[:3] == [16, 8, 4]
    assert set(sizes[3:]) == {4}
    assert records[-1].sampler.startswith("3 probes")
    # pieces make no difference but for rounding: the same run with memory enough probes the same
    monkeypatch.setattr(DiT, "forward", forward)
    whole = run_of(run.recipe, tmp_path / "whole")
    unhurt = list(whole.updates(interrupt.Wish()))
    assert [record.loss for record in records] == pytest.approx([record.loss for record in unhurt], rel=1e-3)


def test_memory_that_does_not_suffice_for_training_is_a_failure(tmp_path, monkeypatch):
    def no_memory(self, x, t, labels=None):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DiT, "forward", no_memory)
    with pytest.raises(Failure, match="out of memory after update 0; raise accumulate"):
        trained(TINY, tmp_path)


# --- disks --------------------------------------------------------------------------------------------------------------------------------


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """No file can grow beyond `room` bytes: what writes more gets an error from the system, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_on_a_full_disk_the_old_checkpoint_stays(tmp_path, capsys):
    settings = replace(TINY, updates=6, save_every=2)
    trained(settings, tmp_path / "whole")
    trained(settings, tmp_path / "run", stop=2)
    good = tmp_path / "run" / "checkpoints" / "step-00000002"
    with full_disk(50_000):
        assert cli.main(words(settings, tmp_path / "run")) == 1
    assert (good / "tensors.safetensors").stat().st_size > 50_000
    said = capsys.readouterr().err
    assert re.search(rf"noiseclock: could not save the checkpoint of step 4 \(.+\); the newest whole one is {good}\n", said)
    assert "Traceback" not in said
    assert checkpoint.steps(tmp_path / "run") == [2]
    # when there is room again, the same command goes on
    assert cli.main(words(settings, tmp_path / "run")) == 0
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "run")) == []


def test_a_disk_that_fills_up_between_two_checkpoints_is_a_failure(tmp_path, capsys):
    settings = replace(TINY, updates=500, save_every=400, track=("tensorboard",))
    with full_disk(6_000):  # enough for the config, not for 500 lines of log or as many points of a curve
        assert cli.main(words(settings, tmp_path / "run")) == 1
    told = capsys.readouterr().err
    assert re.fullmatch(r"noiseclock: could not write (to )?\S+: File too large\n", told)
    assert 1 < len(lines(tmp_path / "run")) < 500  # and none of them torn


# --- signals ------------------------------------------------------------------------------------------------------------------------------


def test_a_signal_is_granted_between_two_updates_and_the_handlers_come_back(monkeypatch):
    before = [signal.getsignal(number) for number in interrupt.SIGNALS]
    for number in interrupt.SIGNALS:
        with interrupt.listening() as wish:
            assert wish.signal is None
            for _ in range(3):  # an echo is no second wish
                os.kill(os.getpid(), number)
            assert wish.signal == number
    assert [signal.getsignal(number) for number in interrupt.SIGNALS] == before
    # the next one does not wait, unless something would be lost, and then not the one after it
    monkeypatch.setattr(interrupt, "ECHO", -1.0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest's workers take away
    try:
        with interrupt.listening():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with interrupt.listening() as wish:
            wish.patient = True
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before[0])


def test_who_listens_around_a_listener_hears_of_a_signal_too(monkeypatch):
    with interrupt.listening() as outer:
        with interrupt.listening() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
            assert inner.signal == outer.signal == signal.SIGTERM
        with pytest.raises(SystemExit, match="143"):
            outer.grant()
    # and a second one waits for neither
    monkeypatch.setattr(interrupt, "ECHO", -1.0)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with interrupt.listening(), interrupt.listening():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_a_run_with_a_checkpoint(tmp_path, number, error):
    steps = []

    def stopped() -> None:
        for record in train(TINY, tmp_path / "run", device="cpu"):
            steps.append(record.step)
            if record.step == 3:
                os.kill(os.getpid(), number)

    with pytest.raises(error) as end:
        stopped()
    assert steps == [1, 2, 3, 4]
    assert checkpoint.steps(tmp_path / "run") == [4]
    if error is SystemExit:
        assert end.value.code == 143
    trained(TINY, tmp_path / "run")
    trained(TINY, tmp_path / "whole")
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "run")) == []


@pytest.mark.parametrize("moment", ["drawing", "saving", "updating"])
def test_a_second_signal_loses_nothing_that_was_trained(tmp_path, monkeypatch, capfd, moment):
    """Drawing, it does not wait, but the update is saved by then; else it waits. What was not drawn is drawn when the run goes on."""
    settings = replace(TINY, updates=6, save_every=0, sample_every=3)
    owner, name = {"drawing": (lab_train, "sampled"), "saving": (checkpoint, "save"), "updating": (lab_train.Run, "_plain_update")}[moment]
    work = getattr(owner, name)

    def interrupted(first, *args, **options):
        if moment != "updating" or first.step == 2:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
        return work(first, *args, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which pytest's workers take away
    try:
        with monkeypatch.context() as patch:
            patch.setattr(interrupt, "ECHO", -1.0)
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                trained(settings, tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoint.steps(tmp_path / "run")[0] == 3
    assert ("stops once its progress is saved" in capfd.readouterr().err) == (moment != "drawing")
    trained(settings, tmp_path / "run")
    trained(settings, tmp_path / "whole")
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "run")) == []
    grids = [{path.name: path.read_bytes() for path in (tmp_path / which / "samples").iterdir()} for which in ("whole", "run")]
    assert sorted(grids[0]) == ["step-00000003.png", "step-00000006.png"]
    assert grids[0] == grids[1]


def test_two_runs_in_one_process_cannot_share_a_folder(tmp_path):
    first = train(TINY, tmp_path, device="cpu")
    next(first)
    with pytest.raises(Mistake, match=f"in use by process {os.getpid()}"):
        next(train(TINY, tmp_path, device="cpu"))
    assert [record.step for record in first] == list(range(2, 9))


# --- whole processes ----------------------------------------------------------------------------------------------------------------------

# Every update is saved, so that about half of the time of a run is spent in a save.
STUBBORN = replace(TINY, updates=80, save_every=1, sampler="loss-second-moment:bins=5,warmup=1", dropout=0.1)


def forked(settings, folder: Path) -> Forked:
    """`noiseclock train` as a process of its own."""
    return Forked(cli.main, words(settings, folder), output=folder.with_suffix(".txt"))


def fresh(settings, folder: Path) -> subprocess.Popen[bytes]:
    """The same in an interpreter of its own, which takes some seconds to start."""
    command = [sys.executable, "-m", "noiseclock.cli", *words(settings, folder)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})


def steps_made(folder: Path) -> int:
    """Updates in the log."""
    try:
        return (folder / "log.jsonl").read_bytes().count(b'"kind": "train"')
    except FileNotFoundError:
        return 0


def kill_at(moment: str, delay: float, count: int, process, folder: Path) -> None:
    """Wait for a moment of the run, then kill -9: as it starts, after update `count`, or in the save after it; `delay` seconds later."""
    if moment == "start":
        before = (folder / ".lock").stat().st_mtime_ns if (folder / ".lock").exists() else 0
        wait_until(lambda: (folder / ".lock").exists() and (folder / ".lock").stat().st_mtime_ns != before, process, "it held the folder")
    else:
        wait_until(lambda: steps_made(folder) >= count, process, f"update {count}")
    if moment == "save":
        wait_until(lambda: any((folder / "checkpoints").glob("tmp-*")), process, "a save")
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.wait()


def survive(settings, kills: list[tuple[str, float]], folder: Path, start=forked) -> list[int]:
    """Kill a run at these moments, one after the other, each time starting it again; returns the steps that were left each time."""
    whole, run = folder / "whole", folder / "run"
    trained(settings, whole)
    left = []
    for number, (moment, delay) in enumerate(kills, 1):
        # a later place for every kill, the last of them well before the end
        count = settings.updates * number // (len(kills) + 2)
        with start(settings, run) as process:
            kill_at(moment, delay, count, process, run)
        assert process.poll() == -signal.SIGKILL, "the run was over before it was killed"
        left.append(max(checkpoint.steps(run), default=0))
        assert left[-1] >= steps_made(run) - 1  # at most the update since the last complete save is lost
    assert left == sorted(left)
    assert cli.main(words(settings, run)) == 0
    assert differing(state_of(whole), state_of(run)) == []
    assert lines(whole) == lines(run)
    assert not list((run / "checkpoints").glob("tmp-*"))
    return left


def test_kill_9_at_three_moments_changes_nothing(tmp_path):
    left = survive(STUBBORN, [("start", 0.02), ("update", 0.003), ("save", 0.0)], tmp_path)
    assert 0 < left[1] < left[2] < STUBBORN.updates


@pytest.mark.slow
def test_kill_9_at_twenty_moments_changes_nothing(tmp_path):
    chance = random.Random(0)
    kills = [(chance.choice(["start", "update", "save", "save"]), chance.uniform(0, 0.03)) for _ in range(20)]
    assert {moment for moment, _ in kills} == {"start", "update", "save"}
    survive(replace(STUBBORN, updates=300), kills, tmp_path, start=fresh)


def test_signals_end_a_process_with_a_checkpoint_and_its_status(tmp_path, capsys):
    settings = replace(STUBBORN, save_every=0, updates=5000)
    run = tmp_path / "run"
    with forked(settings, run) as process:
        wait_until(lambda: steps_made(run) >= 5, process, "update 5")
        # a second run into the same folder is refused meanwhile
        assert cli.main(words(settings, run)) == 2
        assert re.fullmatch(rf"noiseclock: {run} is in use by process {process.pid} on \S+; .+\n", capsys.readouterr().err)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    said = process.output.read_text()
    assert said.endswith("noiseclock: stopped; run the same command again to go on\n")
    assert "Traceback" not in said
    (first,) = checkpoint.steps(run)
    assert first == steps_made(run) >= 5
    with forked(settings, run) as process:
        wait_until(lambda: steps_made(run) >= first + 5, process, f"update {first + 5}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert process.output.read_text().endswith("noiseclock: stopped by SIGTERM; run the same command again to go on\n")
    second = checkpoint.steps(run)[-1]
    assert first + 5 <= second == steps_made(run) < 5000
    shorter = replace(settings, updates=second + 3)
    assert cli.main(words(shorter, run)) == 0
    trained(shorter, tmp_path / "whole")
    assert differing(state_of(tmp_path / "whole"), state_of(run)) == []
    assert lines(tmp_path / "whole") == lines(run)
