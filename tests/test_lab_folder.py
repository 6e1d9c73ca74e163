import errno
import json
import math
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from noiseclock.lab import folder
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import Log, difference, lock, plain, write_json

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def strictly(text: str):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


# --- the lock -----------------------------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_and_told_who_holds_the_folder(tmp_path):
    with lock(tmp_path / "new" / "run"):
        with pytest.raises(Mistake, match=rf"run is in use by process {os.getpid()} on .*; wait for that run to end or choose"):  # noqa: SIM117
            with lock(tmp_path / "new" / "run"):
                pass
        (tmp_path / "new" / "run" / ".lock").read_bytes()  # to look at the file must not free it
        with pytest.raises(Mistake), lock(tmp_path / "new" / "run"):
            pass
        with lock(tmp_path / "other"):
            pass
    with lock(tmp_path / "new" / "run"):
        pass


def test_the_lock_is_free_again_after_an_error(tmp_path):
    with pytest.raises(KeyError), lock(tmp_path):
        raise KeyError
    with lock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_a_mistake(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Mistake, match=r"cannot write into .*choose a folder"), lock(tmp_path / "file" / "run"):
        pass


def test_a_lock_can_be_waited_for(tmp_path):
    order = []

    def second() -> None:
        with lock(tmp_path, wait=True):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with lock(tmp_path):
            waiting = pool.submit(second)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.2)
            order.append("first")
        waiting.result(timeout=60)
    assert order == ["first", "second"]


def test_on_a_full_disk_the_lock_holds_without_a_name(tmp_path):
    (tmp_path / ".lock").write_text("process 1 on a machine that is long gone")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # Python ignores the signal, and every write fails
    try:
        with lock(tmp_path), pytest.raises(Mistake, match="is in use by another process"), lock(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(folder.fcntl, "flock", missing)
    with pytest.warns(UserWarning, match="cannot be locked .Function not implemented") as caught, lock(tmp_path):
        pass
    assert caught[0].filename == __file__


# A run that holds the lock and has forked a worker, as a DataLoader does, and started a program; then it is killed and they live on.
LOCKS = """
import multiprocessing, os, signal, subprocess, sys, time
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import lock

folder = sys.argv[1]

def refused():
    try:
        with lock(folder):
            return ""
    except Mistake as error:
        return str(error)

reading, telling = os.pipe()
run = os.fork()
if run == 0:
    with lock(folder):
        short = multiprocessing.get_context("fork").Process(target=refused)  # a worker that ends must not free the run's lock
        short.start()
        short.join()
        unwound = os.fork()
        if unwound:
            os.waitpid(unwound, 0)
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            worker.start()
            program = subprocess.Popen(["sleep", "60"], close_fds=False)
            os.write(telling, f"{worker.pid} {program.pid}".encode())
            time.sleep(60)
    os._exit(0)  # the child that left the block above like any other code
workers = [int(pid) for pid in os.read(reading, 100).split()]
try:
    assert f"process {run} on" in refused(), refused()
    os.kill(run, signal.SIGKILL)
    os.waitpid(run, 0)
    for pid in workers:
        os.kill(pid, 0)  # they live
    assert refused() == ""
finally:
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
print("good")
"""


def test_kill_9_frees_the_lock_though_workers_live_on(tmp_path):
    done = subprocess.run([sys.executable, "-c", LOCKS, tmp_path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


# --- JSON ---------------------------------------------------------------------------------------------------------------------------------


def test_json_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_json(path, {"lr": 1e-4, "clip": math.inf, "size": (32, 32)})
    assert strictly(path.read_text()) == {"lr": 1e-4, "clip": "Infinity", "size": [32, 32]}

    def full(_):
        raise FULL

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Failure, match=r"could not write .*config.json: No space left on device"):
        write_json(path, {"lr": 2e-4})
    assert strictly(path.read_text())["lr"] == 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(path, {"path": Path()})
    assert strictly(path.read_text())["lr"] == 1e-4


def test_many_may_write_the_same_json(tmp_path):
    """As the workers of a comparison do. With one name for all unfinished files, one took away what the other was about to put in place."""
    path = tmp_path / "compare.json"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: write_json(path, {"writer": i}), range(200)))
    assert set(json.loads(path.read_text())) == {"writer"}
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_keep_apart():
    values = [math.nan, math.inf, -math.inf, None, 0.0]
    written = strictly(json.dumps(plain(values), allow_nan=False))
    assert written == ["NaN", "Infinity", "-Infinity", None, 0.0]
    assert [float(v) for v in written[1:3]] == values[1:3]
    assert math.isnan(float(written[0]))


configs = st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.tuples(st.integers()))


@given(configs)
def test_a_config_does_not_differ_from_its_file(config):
    assert difference(config, json.loads(json.dumps(plain(config)))) == ""


@given(configs, configs)
def test_a_difference_has_one_line_for_each_key_that_differs(mine, theirs):
    mine, theirs = ({key.encode().hex(): value for key, value in config.items()} for config in (mine, theirs))
    here, there = plain(mine), plain(theirs)
    expected = {key for key in mine.keys() | theirs.keys() if (key in mine) != (key in theirs) or here[key] != there[key]}
    assert sorted(line.split(":")[0] for line in difference(mine, theirs).split("\n") if line) == sorted(expected)


def test_the_words_of_a_difference():
    assert difference({"lr": 0.0002, "steps": 10}, {"lr": 0.0001, "steps": 10}) == "lr: 0.0002 here, 0.0001 in the checkpoint"
    assert difference({"data": "mnist"}, {"ema": None}) == "data: 'mnist' here, absent in the checkpoint\nema: absent here, None in the checkpoint"


# --- the log ------------------------------------------------------------------------------------------------------------------------------


def read(path: Path) -> list:
    return [strictly(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_logs_each_step_once(tmp_path):
    path = tmp_path / "log.jsonl"
    with Log(path) as log:
        log.write({"event": "start"})
        for step in range(1, 8):
            log.write({"step": step, "loss": step / 3})
    with path.open("ab") as file:
        file.write(b'{"step": 8, "lo')  # killed here
    with Log(path) as log:
        log.truncate_after(5)
        for step in (6, 7):
            log.write({"step": step, "loss": -step / 3})
        log.sync()
        assert [r["step"] for r in read(path)[1:]] == [1, 2, 3, 4, 5, 6, 7]  # on the disk before it is closed
    assert read(path) == [{"event": "start"}] + [{"step": s, "loss": s / 3 if s < 6 else -s / 3} for s in range(1, 8)]
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("torn", [b"", b"{", b'{"step": 3}', b"\0\0\0", b'{"step": 3\n', b"\xff\n", b"[3]\n", b"3\n"])
def test_torn_lines_are_dropped(torn, tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + torn)
    with Log(path) as log:
        log.truncate_after(10)
        log.write({"step": 11})
    assert read(path) == [{"step": 1}, {"step": 11}]


def test_a_run_from_the_start_has_an_empty_log(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.write({"step": 1})
        log.truncate_after(0)
        assert read(log.path) == []


def test_the_log_is_valid_json_whatever_the_loss(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.write({"step": 1, "loss": math.nan, "by_time": [1.0, -math.inf], "text": "line\nbreak"})
    assert read(tmp_path / "log.jsonl") == [{"step": 1, "loss": "NaN", "by_time": [1.0, "-Infinity"], "text": "line\nbreak"}]


def test_a_record_that_does_not_fit_leaves_no_half_line(tmp_path):
    with Log(tmp_path / "log.jsonl") as log:
        log.write({"step": 1})
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # a part of the line still fits
        try:
            with pytest.raises(Failure, match=r"could not write .*log.jsonl: File too large"):
                log.write({"step": 2, "text": "x" * 200})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.write({"step": 2})
    assert read(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]
