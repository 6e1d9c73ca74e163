"""Checkpoints that a kill -9, a full disk or a damaged file cannot take away.

A state is nested dicts, lists and tuples of tensors, numbers, strings, bools and None. It becomes one folder, without any pickle:

    checkpoints/step-00001234/tensors.safetensors   all tensors, by their place in the state: "model.conv_in.weight"
                              state.json            everything else, with a placeholder for each tensor
                              SHA256SUMS            of both, as `sha256sum --check` reads it

It is written beside its final place, brought to the disk, and renamed into place: under the name "step-..." there is never half a checkpoint. Only
then are older ones removed. Of a folder, one process may save (see folder.lock); any number may load meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import sync

FORMAT = 1  # of the files; raised when an older reader would misread them
TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"


class _Damaged(Exception):
    """Not what was once saved."""


# --- saving -------------------------------------------------------------------------------------------------------------------------------


def save(folder: str | os.PathLike[str], step: int, state: Mapping[str, Any], *, keep: int = 2) -> Path:
    """Save the state of a step and return its path; then keep the last `keep` checkpoints up to this one.

    Later ones, left by a run that went further before it was resumed from an earlier step, are removed as well. A Failure if it cannot be
    written: then nothing has changed, and the message names the newest checkpoint that is whole.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got {step} and {keep}")
    tensors: dict[str, Tensor] = {}
    text = json.dumps({"format": FORMAT, "step": step, "state": _encode(state, (), tensors)}, allow_nan=False)
    parent = Path(folder) / "checkpoints"
    final, unfinished, replaced = (parent / f"{kind}-{step:08d}" for kind in ("step", "tmp", "old"))
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob("tmp-*"):
            shutil.rmtree(left, ignore_errors=True)
        unfinished.mkdir()
        _write(unfinished, tensors, text)
        if final.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)  # which is read in its place until the next line
        unfinished.rename(final)
        sync(parent)
        sync(parent.parent)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            good = newest(folder)
            stays = f"the newest whole one is {good}" if good else "there is no earlier one"
            raise Failure(f"could not save the checkpoint of step {step} ({_reason(error)}); {stays}") from error
        raise
    _remove_all_but(parent, [s for s in steps(folder) if s <= step][-keep:])
    return final


def _write(path: Path, tensors: dict[str, Tensor], text: str) -> None:
    save_file(tensors, path / TENSORS)
    (path / STATE).write_text(text, encoding="ascii")
    (path / SUMS).write_text("".join(f"{_digest(path / name)}  {name}\n" for name in (TENSORS, STATE)), encoding="ascii")
    for name in (TENSORS, STATE, SUMS):
        sync(path / name)
    sync(path)


def _remove_all_but(parent: Path, kept: list[int]) -> None:
    stay = {path for step, path in _found(parent).items() if step in kept}
    for path in parent.iterdir():
        if re.fullmatch(r"(step|old)-\d+", path.name) and path not in stay:
            # Renamed first: a kill in the middle must not leave half of one under a good name. What cannot be removed costs space, not the run.
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

    Where the newest is damaged, a warning names it and the one before is loaded. A Mistake if there is none to load.
    Torch's optimisers and generators want parts of their state on the CPU and move the rest themselves: load for them on the CPU.
    """
    found = _found(Path(folder) / "checkpoints")
    if step is not None and step not in found:
        raise Mistake(f"{folder} has no checkpoint of step {step}; it has: {', '.join(map(str, sorted(found))) or 'none'}")
    for candidate in [step] if step is not None else sorted(found, reverse=True):
        try:
            return candidate, _read(found[candidate], torch.device(device))
        except (_Damaged, OSError, SafetensorError) as error:
            if step is not None:
                raise Mistake(f"the checkpoint {found[candidate]} is damaged ({error}); load another step") from error
            warnings.warn(f"the checkpoint {found[candidate]} is damaged ({error}) and is passed over", stacklevel=2)
    raise Mistake(f"{folder} has no checkpoint that could be loaded; start again in another folder, or remove its checkpoints")


def newest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint whose checksums are right."""
    for _, path in sorted(_found(Path(folder) / "checkpoints").items(), reverse=True):
        try:
            _check(path)
        except (_Damaged, OSError):
            continue
        return path
    return None


def _found(parent: Path) -> dict[int, Path]:
    """Checkpoints by step. One that was being replaced by another of the same step counts until that is in its place."""
    found = {}
    for kind in ("old", "step"):
        for path in parent.glob(f"{kind}-*"):
            if number := re.fullmatch(rf"{kind}-(\d+)", path.name):
                found[int(number[1])] = path
    return found


def _check(path: Path) -> None:
    """Raise unless both files are, to the bit, what was saved."""
    lines = (path / SUMS).read_bytes().decode("ascii", "replace").splitlines()
    for name in (TENSORS, STATE):
        if f"{_digest(path / name)}  {name}" not in lines:
            raise _Damaged(f"{name} does not have the checksum that was noted when it was saved")


def _read(path: Path, device: torch.device) -> Any:
    _check(path)
    content = json.loads((path / STATE).read_bytes())
    if content["format"] != FORMAT:
        raise Mistake(f"{path} has format {content['format']}, this version reads {FORMAT}; use the version of noiseclock that wrote it")
    # Copies, because on the CPU the tensors are windows on the file: to keep it open would stop a network file system from deleting it.
    tensors = {name: tensor.to(device, copy=True) for name, tensor in load_file(path / TENSORS).items()}
    return _decode(content["state"], tensors)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- the state as JSON and tensors --------------------------------------------------------------------------------------------------------

# What JSON lacks is an object with one of these keys alone: {"$tuple": [1, 2]}. A dict with keys that are no strings, or that could be taken for
# one of these, is a list of pairs.
TENSOR, TUPLE, FLOAT, PAIRS = "$tensor", "$tuple", "$float", "$pairs"


def _encode(value: Any, place: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """The value as JSON; its tensors go to `tensors`. Subclasses of dict, tuple and so on come back as the plain type."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: str(float(value))}
    if isinstance(value, Tensor):
        return {TENSOR: _put(value, place, tensors)}
    if isinstance(value, (list, tuple)):
        items = [_encode(item, (*place, str(i)), tensors) for i, item in enumerate(value)]
        return {TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        inner = {key: _encode(item, (*place, str(key)), tensors) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in inner):
            return inner
        if any(isinstance(key, (Tensor, tuple)) for key in inner):
            raise TypeError(f"{'.'.join(place) or 'the state'} has a key that is neither a string nor a number; a checkpoint cannot hold it")
        return {PAIRS: [[_encode(key, place, tensors), item] for key, item in inner.items()]}
    known = "dicts, lists, tuples, tensors, numbers, strings, bools and None"
    raise TypeError(f"{'.'.join(place) or 'the state'} is a {type(value).__name__}; a checkpoint holds {known}")


def _put(tensor: Tensor, place: tuple[str, ...], tensors: dict[str, Tensor]) -> str:
    """Copy a tensor into `tensors` under a name that says where it was."""
    name = ".".join(place).encode("ascii", "backslashreplace").decode("ascii")
    while name in tensors or name == "__metadata__":  # "a.b" may be two places; safetensors keeps the other name for itself
        name += "+"
    if type(tensor.detach()) is not Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"{name} is no ordinary tensor ({type(tensor).__name__}, {tensor.layout}, {tensor.device}); gather or convert it first")
    # Always a copy, because safetensors refuses tensors that share memory.
    tensors[name] = tensor.detach().to("cpu", memory_format=torch.contiguous_format, copy=True)
    return name


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (tag := next(iter(value))).startswith("$"):
        return {key: _decode(item, tensors) for key, item in value.items()}
    inner = value[tag]
    if tag == TENSOR:
        return tensors[inner]
    if tag == TUPLE:
        return tuple(_decode(item, tensors) for item in inner)
    if tag == FLOAT:
        return float(inner)
    return {_decode(key, tensors): _decode(item, tensors) for key, item in inner}
