"""Checkpoints that were damaged, disks that are full and runs that are killed: what was saved whole is never lost, and what is not is named."""

import errno
import os
import resource
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from noiseclock.lab import checkpoint
from noiseclock.lab.checkpoint import load, newest, save, steps
from noiseclock.lab.errors import Failure, Mistake
from small_states import same, state_of

# --- damage -------------------------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [truncate, flip, Path.unlink, lambda path: path.write_bytes(b"")], ids=["truncated", "one bit", "missing", "empty"]
)
@pytest.mark.parametrize("name", ["tensors.safetensors", "state.json", "SHA256SUMS"])
def test_a_damaged_one_is_named_and_the_one_before_is_loaded(name, damage, tmp_path):
    save(tmp_path, 1, state_of(1))
    save(tmp_path, 2, state_of(2))
    damage(tmp_path / "checkpoints" / "step-00000002" / name)
    with pytest.warns(UserWarning, match="step-00000002 is damaged .* and is skipped") as caught:
        assert same(load(tmp_path), (1, state_of(1)))
    assert caught[0].filename == __file__
    assert newest(tmp_path) == tmp_path / "checkpoints" / "step-00000001"
    with pytest.raises(Mistake, match=r"step-00000002 is damaged .*; load another step"):
        load(tmp_path, 2)
    # the next save leaves the good one that it went on from, not the damaged one
    save(tmp_path, 2, state_of(2))
    assert same(load(tmp_path), (2, state_of(2)))


def test_damaged_later_ones_never_push_out_a_good_one(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, state_of(step), keep=3)
    for step in (2, 3):
        truncate(tmp_path / "checkpoints" / f"step-{step:08d}" / "tensors.safetensors")
    with pytest.warns(UserWarning, match="is damaged"):
        assert load(tmp_path)[0] == 1
    save(tmp_path, 1, state_of(1))
    assert same(load(tmp_path), (1, state_of(1)))


def test_nothing_to_load_is_a_mistake(tmp_path):
    with pytest.raises(Mistake, match="has no checkpoint that could be loaded"):
        load(tmp_path / "nowhere")
    assert newest(tmp_path) is None
    save(tmp_path, 1, state_of(1))
    with pytest.raises(Mistake, match="has no checkpoint of step 2; it has: 1"):
        load(tmp_path, 2)
    truncate(tmp_path / "checkpoints" / "step-00000001" / "state.json")
    with pytest.warns(UserWarning, match="step-00000001 is damaged"), pytest.raises(Mistake, match="no checkpoint that could be loaded"):
        load(tmp_path)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    save(tmp_path, 1, state_of(1))
    monkeypatch.undo()
    with pytest.raises(Mistake, match="has format 3, this version reads 1 and 2"):
        load(tmp_path)


# --- faults while saving ------------------------------------------------------------------------------------------------------------------


def failing_after(function, count, error):
    calls = iter(range(count))

    def wrapper(*args, **kwargs):
        if next(calls, None) is None:
            raise error
        return function(*args, **kwargs)

    return wrapper


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
FAULTS = {
    "tensors": ("noiseclock.lab.checkpoint.save_file", 0, SafetensorError("I/O error: No space left on device (os error 28)")),
    "json": ("pathlib.Path.write_text", 0, FULL),
    "sums": ("pathlib.Path.write_text", 1, FULL),
    "mkdir": ("pathlib.Path.mkdir", 1, FULL),
    **{f"fsync {i}": ("os.fsync", i, FULL) for i in range(4)},
    "rename": ("pathlib.Path.rename", 0, FULL),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(fault, tmp_path, monkeypatch):
    save(tmp_path, 1, state_of(1))
    save(tmp_path, 2, state_of(2))
    truncate(tmp_path / "checkpoints" / "step-00000002" / "tensors.safetensors")
    target, count, error = FAULTS[fault]
    owner, name = target.rsplit(".", 1)
    owner = {"noiseclock.lab.checkpoint": checkpoint, "pathlib.Path": Path, "os": os}[owner]
    monkeypatch.setattr(owner, name, failing_after(getattr(owner, name), count, error))
    with pytest.raises(Failure, match=r"step 3 \(.*No space left on device.*\); the newest whole one is .*step-00000001"):
        save(tmp_path, 3, state_of(3))
    monkeypatch.undo()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000001", "step-00000002"]
    assert same(load(tmp_path, 1), (1, state_of(1)))


def test_a_full_disk_at_the_second_rename_keeps_what_was_to_be_replaced(tmp_path, monkeypatch):
    save(tmp_path, 1, state_of(1))
    monkeypatch.setattr(Path, "rename", failing_after(Path.rename, 1, FULL))
    with pytest.raises(Failure, match=r"the newest whole one is .*old-00000001"):
        save(tmp_path, 1, state_of(2))
    monkeypatch.undo()
    assert same(load(tmp_path), (1, state_of(1)))


def test_a_first_save_that_fails_says_that_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing_after(os.fsync, 0, FULL))
    with pytest.raises(Failure, match="there is no earlier one"):
        save(tmp_path, 3, state_of(3))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Failure, match="Not a directory"):
        save(tmp_path / "file", 3, state_of(3))


def test_a_file_too_large_is_a_real_write_error(tmp_path):
    save(tmp_path, 1, state_of(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # Python ignores the signal, and the write fails
    try:
        with pytest.raises(Failure, match=r"File too large.*; the newest whole one is .*step-00000001"):
            save(tmp_path, 2, {"big": torch.zeros(2**16)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


SMALL_DISK = """
import sys, torch
from noiseclock.lab.checkpoint import load, save
from noiseclock.lab.errors import Failure
folder = sys.argv[1]
save(folder, 1, {"x": torch.ones(2**17)})
try:
    save(folder, 2, {"x": torch.ones(2**17)})
except Failure as error:
    step, state = load(folder)
    print(step, bool((state["x"] == 1).all()), error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mounts a small disk of its own")
def test_a_really_full_disk(tmp_path):
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("this system does not allow to mount a small disk")
    # room for one checkpoint of 512 KiB, not for two
    command = f'mount -t tmpfs -o size=800k tmpfs "{tmp_path}" && exec "{sys.executable}" -c "$SCRIPT" "{tmp_path}"'
    done = subprocess.run(["unshare", "-rm", "sh", "-c", command], env={**os.environ, "SCRIPT": SMALL_DISK}, capture_output=True, text=True)
    assert done.stdout.startswith("1 True could not save the checkpoint of step 2"), done
    assert "No space left on device" in done.stdout
    assert "step-00000001" in done.stdout


def test_an_interrupt_while_saving_leaves_nothing_behind(tmp_path, monkeypatch):
    save(tmp_path, 1, state_of(1))
    monkeypatch.setattr(os, "fsync", failing_after(os.fsync, 2, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, state_of(2))
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


def test_an_old_one_that_cannot_be_removed_does_not_stop_the_run(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step, state_of(step))
    rename = Path.rename

    def refuse(self, target):
        if self.name == "step-00000001":
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    save(tmp_path, 3, state_of(3))
    assert steps(tmp_path) == [1, 2, 3]


# Children that save step after step and are killed: at random moments, then before each single thing that they do to the file system. Forked from one
# process that has imported torch, because that takes longer than all of the rest.
KILLS = """
import os, random, signal, sys, time, warnings
import torch
from noiseclock.lab.checkpoint import load, save, steps

warnings.filterwarnings("error", "the checkpoint .* is damaged")  # nothing may ever look so
torch.set_num_threads(1)  # a forked child cannot use the threads of its parent
folder, rounds, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}

def state_of(step):
    return {"weights": torch.full((2**16,), float(step)), "moments": [torch.arange(2**14) + step], "step": step}

def child(first, plan, told, kill_at):
    count = 0
    def hook(event, args):
        nonlocal count
        if event in EVENTS and "checkpoints" in str(args[0]):
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if kill_at:
        sys.addaudithook(hook)
    for step, keep in plan(first):
        save(folder, step, state_of(step), keep=keep)
        os.write(told, step.to_bytes(8, "little"))
    os._exit(0)

def endless(first):
    while True:
        first += 1
        yield first, 2

def short(first):  # two new steps, and one of them twice, with no other to fall back on
    yield from ((first + 1, 2), (first + 2, 1), (first + 2, 1))

def round_of(first, plan, kill_at=0, delay=None):
    reading, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(first, plan, told, kill_at)
    os.close(told)
    if delay is not None:
        os.read(reading, 8)  # it has saved once
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    acknowledged = first
    while said := os.read(reading, 8):
        acknowledged = int.from_bytes(said, "little")
    os.close(reading)
    return status, acknowledged

def check(acknowledged, at_most):
    newest, _ = load(folder)
    assert acknowledged <= newest <= at_most, (newest, acknowledged)
    for step in steps(folder):  # each of them is whole
        _, state = load(folder, step)
        expected = state_of(step)
        assert state["step"] == step
        assert torch.equal(state["weights"], expected["weights"]) and torch.equal(state["moments"][0], expected["moments"][0])
    return newest

save(folder, 0, state_of(0))
step, kills = 0, [0, 0]
generator = random.Random(seed)
for _ in range(rounds):
    status, acknowledged = round_of(step, endless, delay=generator.uniform(0, 0.05))
    kills[0] += os.WIFSIGNALED(status)
    step = check(acknowledged, acknowledged + 10**6)
os.fsync = lambda _: None  # makes no difference to a kill
for kill_at in range(1, 10**6):
    status, acknowledged = round_of(step, short, kill_at=kill_at)
    if not os.WIFSIGNALED(status):
        assert status == 0, status
        break
    kills[1] += 1
    step = check(acknowledged, step + 2)
save(folder, step + 1, state_of(step + 1))
assert len(os.listdir(folder + "/checkpoints")) == len(steps(folder)) <= 2  # no litter
print(*kills)
"""


def kill_and_load(folder: Path, rounds: int, seed: int) -> None:
    done = subprocess.run([sys.executable, "-c", KILLS, folder, str(rounds), str(seed)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    at_random, at_each = map(int, done.stdout.split())
    assert at_random == rounds
    # three saves of at least one mkdir, five files to open (two of them twice) and one rename, and older ones to remove
    assert at_each > 3 * 9


def test_kill_9_loses_nothing_that_was_saved(tmp_path):
    kill_and_load(tmp_path, rounds=12, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_many_random_moments(seed, tmp_path):
    kill_and_load(tmp_path, rounds=100, seed=seed)


def test_a_load_beside_a_saving_run_is_whole(tmp_path):
    # what a reader lists may be removed before it reads: then it is passed over, never half read
    save(tmp_path, 1, state_of(1))
    save(tmp_path, 2, state_of(2))
    real = checkpoint._check

    def removed_just_now(path):
        if path.name == "step-00000002":
            shutil.rmtree(path, ignore_errors=True)
        real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_check", removed_just_now)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert same(load(tmp_path), (1, state_of(1)))
