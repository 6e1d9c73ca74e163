"""A run's folder: its lock, its log, and the JSON files in it.

    config.json     what is run
    log.jsonl       one record per line
    checkpoints/    see checkpoint.py
    .lock           held while a run writes here

All JSON is valid JSON: numbers that are not finite, which JSON lacks, are written as the strings "NaN", "Infinity" and "-Infinity". They stay
distinct from each other and from null, and `float` and pandas read them back.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from noiseclock.lab.errors import Failure, Mistake

# --- one run at a time --------------------------------------------------------------------------------------------------------------------

# The kernel releases two kinds of lock when a process dies. POSIX record locks are also lost as soon as the process opens and closes the lock file
# anywhere else (a tracker that uploads the folder), and they do not exclude a second run in the same process. `flock` has neither flaw, but it lasts
# as long as any copy of the file descriptor. A forked DataLoader worker has such a copy and may outlive a killed parent, so each child closes its
# copies as it starts. Programs started by exec never get any, because Python opens files with O_CLOEXEC.
_open_locks: set[FileIO] = set()


def _give_back_copies() -> None:
    for file in _open_locks:
        file.close()
    _open_locks.clear()


os.register_at_fork(after_in_child=_give_back_copies)


class Busy(Mistake):
    """Another process holds the folder."""


@contextmanager
def making(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Turn an OSError into a Mistake that names the folder."""
    try:
        yield
    except OSError as error:
        raise Mistake(f"cannot write into {folder} ({error.strerror}); choose a folder that can be written to") from error


@contextmanager
def lock(folder: str | os.PathLike[str], *, wait: bool = False) -> Iterator[None]:
    """Lock the folder for this process, and create it if it is missing; a Mistake names the other process that holds the lock.

    wait: wait for the lock, for short operations. The lock file stays behind, unlocked: removing it could take it away from the next run.
    """
    path = Path(folder) / ".lock"
    with making(folder):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(path, "a+")
    _open_locks.add(file)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace") or "another process"
            raise Busy(f"{folder} is in use by {holder}; wait for that run to end or choose another folder") from None
        except OSError as error:  # some network file systems are mounted without locks
            warnings.warn(f"{folder} cannot be locked ({error.strerror}); make sure that no other run writes there", stacklevel=3)
        with suppress(OSError):  # on a full disk the lock works without the name in it
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        _open_locks.discard(file)
        file.close()


def refuse_encoded(folder: Path) -> None:
    """Raise a Mistake if the folder holds latents or embedded captions, whose files a training must not be mixed with."""
    if (folder / "index.json").exists():
        raise Mistake(f"{folder} holds latents or embedded captions; choose another folder")


def refuse_comparison(folder: Path) -> None:
    """Raise a Mistake if a training would begin in a comparison's folder. One that began there, in an earlier version, can go on."""
    if (folder / "compare.json").exists() and not (folder / "config.json").exists():
        raise Mistake(f"{folder} holds a comparison; choose another folder for a training")


def refuse_training(folder: Path) -> None:
    """Raise a Mistake if a comparison would begin in a training's folder. One that began there, in an earlier version, can go on."""
    if (folder / "config.json").exists() and not (folder / "compare.json").exists():
        raise Mistake(f"{folder} holds a training; choose another folder for a comparison")


# --- JSON ---------------------------------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """The value as JSON can hold it: mappings with string keys, lists, numbers that are finite or named.

    >>> plain({"loss": float("nan"), "size": (32, 32)})
    {'loss': 'NaN', 'size': [32, 32]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    return value


def write_json(path: str | os.PathLike[str], data: Any) -> None:
    """Write the whole file or nothing: whoever reads it, even after a crash, finds the old content or the new."""
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{token_hex(4)}.tmp")  # a name of its own: the workers of a comparison all write compare.json
    text = json.dumps(plain(data), indent=2, allow_nan=False) + "\n"
    with _replacing(path, unfinished):
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def _replacing(path: Path, unfinished: Path) -> Iterator[None]:
    try:
        yield
        sync(unfinished)
        unfinished.replace(path)
        sync(path.parent)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise Failure(f"could not write {path}: {error.strerror}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into a Failure that names the file."""
    try:
        yield
    except OSError as error:
        raise Failure(f"could not write to {path}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any], *, where: str = "in the checkpoint") -> str:
    """How two configs differ, one line per key; empty if they do not. A config equals what is read back from its JSON file.

    >>> print(difference({"lr": 2e-4, "size": (32, 32), "ema": 0.9999}, {"lr": 1e-4, "size": [32, 32], "clip": 1.0}))
    lr: 0.0002 here, 0.0001 in the checkpoint
    ema: 0.9999 here, absent in the checkpoint
    clip: absent here, 1.0 in the checkpoint
    """
    here, there = plain(mine), plain(theirs)

    def shown(config: Mapping[str, Any], key: str) -> str:
        return repr(config[key]) if key in config else "absent"

    keys = [key for key in here | there if key not in here or key not in there or here[key] != there[key]]
    return "\n".join(f"{key}: {shown(here, key)} here, {shown(there, key)} {where}" for key in keys)


# --- the log ------------------------------------------------------------------------------------------------------------------------------


class Log:
    """An append-only file of records, one JSON object per line; a record with a "step" belongs to that step."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = FileIO(self.path, "a")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. It survives a crash of the process at once, and a power cut after `sync`."""
        line = (json.dumps(plain(record), allow_nan=False) + "\n").encode()
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), size)  # or the next record would continue this line
            raise Failure(f"could not write {self.path}: {error.strerror}") from error

    def truncate_after(self, step: int) -> None:
        """Drop the records of later steps, and lines cut off by a crash, so that a run resumed from `step` logs each of its steps once."""
        shorter = self.path.with_name(f".{self.path.name}.tmp")
        with _replacing(self.path, shorter), self.path.open("rb") as old, shorter.open("wb") as new:
            new.writelines(line for line in old if _step_of(line) <= step)
        self._file.close()
        self._file = FileIO(self.path, "a")

    def sync(self) -> None:
        """Wait until all records are on the disk. To be called before saving a checkpoint, so that no checkpoint is ahead of the log."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more records."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, in order. Damaged lines are skipped; a missing log has no records."""
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _step_of(line: bytes) -> float:
    """The step of a line: -∞, always kept, for a record without a step; ∞, always dropped, for a line that is not a record."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return math.inf
    step = record.get("step")
    return step if isinstance(step, (int, float)) else -math.inf
