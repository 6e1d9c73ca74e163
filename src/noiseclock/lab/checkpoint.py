"""Checkpoints that a kill -9, a full disk or a damaged file cannot take away.

A state is nested dicts, lists and tuples of tensors, numbers, strings, bools and None. It becomes one folder, without any pickle:

    checkpoints/step-00001234/tensors.safetensors   all tensors, by their place in the state: "model.conv_in.weight"
                              state.json            everything else, with a placeholder for each tensor
                              SHA256SUMS            of all files, as `sha256sum --check` reads it

If a model is sharded over ranks (FSDP2), each rank writes the rows that it holds, and no rank ever holds the whole model:

                              part-00000-of-00008.safetensors   rows of the sharded tensors, under the same names

Loading gives whole tensors, or only the rows that are asked for, on any number of ranks.

A checkpoint is written under a temporary name, synced to the disk and renamed: a folder named "step-..." is always complete. Only then are older
checkpoints removed. One training at a time may save into a folder (see folder.lock); any number of processes may load meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import checksum, sync
from noiseclock.lab.processes import all_or_none
from noiseclock.lab.shards import my_rows
from noiseclock.lab.stored import Files, Stored

FORMAT, SPREAD_FORMAT = 1, 2  # versions of the file format, without and with parts; a new number when an older reader would misread it
TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"
T = TypeVar("T")


class _Damaged(Exception):
    """The files are not those that were saved."""


# --- saving -------------------------------------------------------------------------------------------------------------------------------


def save(folder: str | os.PathLike[str], step: int, state: Mapping[str, Any], *, keep: int = 2, accelerator: Accelerator | None = None) -> Path:
    """Save the state of a step and return the checkpoint's path; then remove all but the last `keep` checkpoints up to this one.

    Checkpoints of later steps are removed as well: a run may have gone further before it was resumed from an earlier step. A Failure if the
    checkpoint cannot be written: then nothing has changed, and the message names the newest intact checkpoint. accelerator: needed if tensors of
    the state are sharded over ranks; then all ranks must call this, with a folder that all can access.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got {step} and {keep}")
    main, rank, world = (True, 0, 1) if accelerator is None else (accelerator.is_main_process, accelerator.process_index, accelerator.num_processes)
    kept = _Kept(None if accelerator is None else {}, whole=main)
    content = {"format": FORMAT, "step": step, "state": _encode(state, (), kept)}
    if kept.parts:
        content |= {"format": SPREAD_FORMAT, "parts": world}
    text = json.dumps(content, allow_nan=False)
    parent = Path(folder) / "checkpoints"
    final, unfinished, replaced = (parent / f"{kind}-{step:08d}" for kind in ("step", "tmp", "old"))

    def together() -> Any:
        return nullcontext() if accelerator is None else all_or_none(accelerator)

    with together(), _nothing_left(folder, step, unfinished):
        if main:
            parent.mkdir(parents=True, exist_ok=True)
            for left in parent.glob("tmp-*"):
                shutil.rmtree(left, ignore_errors=True)
            unfinished.mkdir()
    sums: list[str] = [""] * world
    if kept.parts:
        with together(), _nothing_left(folder, step, unfinished):
            name = _part(rank, world)
            save_file(kept.parts, unfinished / name)
            sync(unfinished / name)
            sums[rank] = _line(unfinished, name)
        dist.all_gather_object(sums, sums[rank])
    with together(), _nothing_left(folder, step, unfinished):
        if main:
            _write(unfinished, kept.tensors, text, "".join(sums))
            if final.exists():
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)  # loaders read this one until the next line
            unfinished.rename(final)
            sync(parent)
            sync(parent.parent)
    if main:
        _remove_all_but(parent, [s for s in steps(folder) if s <= step][-keep:])
    return final


@contextmanager
def _nothing_left(folder: str | os.PathLike[str], step: int, unfinished: Path) -> Iterator[None]:
    """Remove the unfinished checkpoint on any error; an error of the disk becomes a Failure."""
    try:
        yield
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            good = newest(folder)
            stays = f"the newest whole one is {good}" if good else "there is no earlier one"
            raise Failure(f"could not save the checkpoint of step {step} ({_reason(error)}); {stays}") from error
        raise


def _part(rank: int, world: int) -> str:
    return f"part-{rank:05d}-of-{world:05d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor], text: str, sums: str) -> None:
    save_file(tensors, path / TENSORS)
    (path / STATE).write_text(text, encoding="ascii")
    (path / SUMS).write_text("".join(_line(path, name) for name in (TENSORS, STATE)) + sums, encoding="ascii")
    for name in (TENSORS, STATE, SUMS):
        sync(path / name)
    sync(path)


def _remove_all_but(parent: Path, kept: list[int]) -> None:
    stay = {path for step, path in _found(parent).items() if step in kept}
    for path in parent.iterdir():
        if re.fullmatch(r"(step|old)-\d+", path.name) and path not in stay:
            # Renamed first: a kill must not leave half a checkpoint under a valid name. A checkpoint that cannot be removed costs only space.
            away = path.with_name(f"tmp-{path.name}")
            try:
                path.rename(away)
            except OSError:
                continue
            shutil.rmtree(away, ignore_errors=True)


def _reason(error: OSError | SafetensorError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


# --- loading ------------------------------------------------------------------------------------------------------------------------------


def steps(folder: str | os.PathLike[str]) -> list[int]:
    """The steps that have a checkpoint, in order."""
    return sorted(_found(Path(folder) / "checkpoints"))


def load(folder: str | os.PathLike[str], step: int | None = None, device: str | torch.device = "cpu") -> tuple[int, Any]:
    """The step and the state of the newest checkpoint, or of the one asked for, with all tensors on `device`.

    If the newest is damaged, a warning names it and the previous one is loaded. A Mistake if none can be loaded.
    Torch's optimisers and generators need parts of their state on the CPU and move the rest themselves: load their states on the CPU.
    """

    def read(path: Path) -> Any:
        content, files = _opened(path)
        try:
            return _decode(content["state"], files, lambda stored: stored.whole().to(device))
        finally:
            files.close()

    return _first_whole(folder, step, read)


@contextmanager
def reading(folder: str | os.PathLike[str], *, lazy: Collection[str]) -> Iterator[tuple[int, Any]]:
    """As `load`, but tensors under the keys `lazy` of the state are `Stored`: inside the `with` block they can be read, whole or by rows."""
    step, (content, files) = _first_whole(folder, None, _opened)
    try:
        takes: dict[bool, Callable[[Stored], Any]] = {True: lambda stored: stored, False: Stored.whole}
        yield step, {key: _decode(value, files, takes[key in lazy]) for key, value in content["state"].items()}
    finally:
        files.close()


def _first_whole(folder: str | os.PathLike[str], step: int | None, read: Callable[[Path], T]) -> tuple[int, T]:
    """The step and the result of `read` for the newest checkpoint that is not damaged, or for the one asked for."""
    found = _found(Path(folder) / "checkpoints")
    if step is not None and step not in found:
        raise Mistake(f"{folder} has no checkpoint of step {step}; it has: {', '.join(map(str, sorted(found))) or 'none'}")
    for candidate in [step] if step is not None else sorted(found, reverse=True):
        try:
            return candidate, read(found[candidate])
        except (_Damaged, OSError, SafetensorError) as error:
            if step is not None:
                raise Mistake(f"the checkpoint {found[candidate]} is damaged ({error}); load another step") from error
            warnings.warn(f"the checkpoint {found[candidate]} is damaged ({error}) and is skipped", stacklevel=3)
    raise Mistake(f"{folder} has no checkpoint that could be loaded; start again in another folder, or remove its checkpoints")


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint with correct checksums."""
    for _, path in sorted(_found(Path(folder) / "checkpoints").items(), reverse=True):
        try:
            _check(path)
        except (_Damaged, OSError):
            continue
        return path
    return None


def last_good(folder: str | os.PathLike[str]) -> str:
    """The newest good checkpoint in words, for the message of a failed training."""
    good = newest(folder)
    return f"the last good checkpoint is {good}" if good else "there is no checkpoint yet"


def _found(parent: Path) -> dict[int, Path]:
    """Checkpoints by step. "old-", set aside while its step is saved again, counts until the new checkpoint is in place."""
    found = {}
    for kind in ("old", "step"):
        for path in parent.glob(f"{kind}-*"):
            if number := re.fullmatch(rf"{kind}-(\d+)", path.name):
                found[int(number[1])] = path
    return found


def _check(path: Path) -> None:
    """Raise unless all files are, to the bit, what was saved."""
    lines = (path / SUMS).read_bytes().decode("ascii", "replace").splitlines(keepends=True)
    for name in (TENSORS, STATE):
        _compare(path, name, lines)
    for name in _parts(json.loads((path / STATE).read_bytes())):
        _compare(path, name, lines)


def _compare(path: Path, name: str, lines: Collection[str]) -> None:
    if _line(path, name) not in lines:
        raise _Damaged(f"{name} does not have the checksum that was noted when it was saved")


def _opened(path: Path) -> tuple[Any, Files]:
    """What state.json says, and the files with the tensors."""
    _check(path)
    content = json.loads((path / STATE).read_bytes())
    if content["format"] not in (FORMAT, SPREAD_FORMAT):
        known = f"{FORMAT} and {SPREAD_FORMAT}"
        raise Mistake(f"{path} has format {content['format']}, this version reads {known}; use the version of noiseclock that wrote it")
    return content, Files(path / TENSORS, [path / name for name in _parts(content)])


def _parts(content: Mapping[str, Any]) -> list[str]:
    world = content.get("parts", 0)
    return [_part(rank, world) for rank in range(world)]


def _line(path: Path, name: str) -> str:
    """As `sha256sum` writes it."""
    return f"{checksum(path / name)}  {name}\n"


# --- the state as JSON and tensors --------------------------------------------------------------------------------------------------------

# A type that JSON lacks becomes an object with one of these keys alone: {"$tuple": [1, 2]}. A dict with keys that are not strings, or that start
# with "$", becomes a list of pairs.
TENSOR, SPREAD, TUPLE, FLOAT, PAIRS = "$tensor", "$spread", "$tuple", "$float", "$pairs"


class _Kept:
    """The tensors of a state by name. tensors: whole ones, which only the main process writes. parts: this rank's rows of sharded ones."""

    def __init__(self, parts: dict[str, Tensor] | None, *, whole: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts, self._whole = parts, whole

    def put(self, tensor: Tensor, place: tuple[str, ...]) -> dict[str, str]:
        """Copy a tensor, and return its placeholder for the JSON."""
        mine = None if self.parts is None else my_rows(tensor)
        if mine is not None and self.parts is not None:
            return {SPREAD: _put(mine, place, self.parts)}
        return {TENSOR: _put(tensor, place, self.tensors) if self._whole else ""}


def _encode(value: Any, place: tuple[str, ...], kept: _Kept) -> Any:
    """The value as JSON; its tensors go to `kept`. Subclasses of dict, tuple and so on come back as the plain type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: str(float(value))}
    if isinstance(value, Tensor):
        return kept.put(value, place)
    if isinstance(value, (list, tuple)):
        items = [_encode(item, (*place, str(i)), kept) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        inner = {key: _encode(item, (*place, str(key)), kept) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in inner):
            return inner
        if any(isinstance(key, (Tensor, tuple)) for key in inner):
            raise TypeError(f"{'.'.join(place) or 'the state'} has a key that is neither a string nor a number; a checkpoint cannot hold it")
        return {PAIRS: [[_encode(key, place, kept), item] for key, item in inner.items()]}
    known = "dicts, lists, tuples, tensors, numbers, strings, bools and None"
    raise TypeError(f"{'.'.join(place) or 'the state'} is a {type(value).__name__}; a checkpoint holds {known}")


def _put(tensor: Tensor, place: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    """Copy a tensor into `tensors` under a name that says where it was."""
    name = ".".join(place).encode("ascii", "backslashreplace").decode("ascii")
    while name in tensors or name == "__metadata__":  # "a.b" may stand for two places; safetensors reserves the other name
        name += "+"
    if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"{name} is no ordinary tensor ({type(tensor).__name__}, {tensor.layout}, {tensor.device}); gather or convert it first")
    # Always a copy, because safetensors refuses tensors that share memory.
    tensors[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
    return name


def _decode(value: Any, files: Files, take: Callable[[Stored], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, files, take) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: _decode(item, files, take) for key, item in value.items()}
    inner = value[tag]
    if tag == TENSOR:
        return take(files.whole(inner))
    if tag == SPREAD:
        return take(files.spread(inner))
    if tag == TUPLE:
        return tuple(_decode(item, files, take) for item in inner)
    if tag == FLOAT:
        return float(inner)
    return {_decode(key, files, take): _decode(item, files, take) for key, item in inner}
