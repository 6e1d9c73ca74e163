"""Captions of a folder of pictures, embedded once, and read back while a model trains.

    embed("pictures", "encoders/clip", "pictures-clip")        what `noiseclock embed` does
    data = load("captions:pictures-clip")                      pictures, and data.texts with their embedded captions

The folder of pictures holds captions.jsonl with lines such as {"file": "train/1.jpg", "caption": "a red circle"}. A caption may be a list, and a
file may have several lines. The embedded set is a folder of

    index.json              the encoder, L and D, the folder of the pictures, the checksum of each file
    captions.jsonl          one line for each row of the embeddings
    empty.safetensors       the empty caption: the null condition, when the caption is dropped
    00000.safetensors ...   `tokens` float16 (n, L, D) and `mask` bool (n, L) of up to `SHARD` captions
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from noiseclock.lab.encoder import Embedded, Encoder
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import checksum, lock, sync, write_json
from noiseclock.lab.sources import Folder
from noiseclock.lab.stored import Stored

CAPTIONS, INDEX, EMPTY = "captions.jsonl", "index.json", "empty.safetensors"
BEGUN = "begun.json"  # in the unfinished folder: the complete files with their checksums, and what they are made of
SHARD = 8192  # captions per file: 1 GB with CLIP ViT-L/14
SAME = 0.02  # largest difference between two devices for an embedding of order one


# --- writing ------------------------------------------------------------------------------------------------------------------------------


def read_captions(file: Path) -> list[tuple[str, str]]:
    """All pairs (picture, caption) of a captions.jsonl; pictures are paths relative to the file's folder."""
    if not file.is_file():
        raise Mistake(f'there is no {file}; write one, with a line {{"file": "1.png", "caption": "a red circle"}} for each picture')
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise Mistake(f"{file} is not text in UTF-8 ({error.reason} at byte {error.start:,}); save it in UTF-8") from error
    found = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split at characters that are legal within a JSON string
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            captions = [row["caption"]] if isinstance(row["caption"], str) else row["caption"]
            if not isinstance(row["file"], str) or not captions or not all(isinstance(caption, str) for caption in captions):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise Mistake(f'line {number} of {file} should read {{"file": "1.png", "caption": "a red circle"}}, or with a list of captions') from None
        found += [(Path(row["file"]).as_posix(), caption) for caption in captions]
    if not found:
        raise Mistake(f"{file} is empty; it should have a line for each picture")
    return found


def embed(
    pictures: str | Path,
    encoder: str | Path,
    out: str | Path,
    *,
    length: int | None = None,
    batch: int = 64,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the embedded captions of a folder of pictures into the new folder `out`; returns the number of captions.

    `out` appears when it is complete; until then the files are in a hidden folder beside it. After an interruption, the same call continues after
    the last complete file. length: tokens per caption, by default the encoder's maximum. progress: called with the number of captions done.
    """
    pictures, out = Path(pictures).expanduser(), Path(out).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Mistake(f"{out} is there already; choose another folder, or remove it first")
    if batch < 1:
        raise Mistake(f"batch must be at least 1, got {batch}")
    rows = read_captions(pictures / CAPTIONS)
    if absent := sorted({file for file, _ in rows if not (pictures / file).is_file()}):
        raise Mistake(f"{pictures / CAPTIONS} names {len(absent)} files that are not there, the first is {absent[0]}")
    encode = Encoder(encoder, length=length, device=device)
    made_of = {"captions": checksum(pictures / CAPTIONS), "encoder": encode.digest, "length": encode.length, "shard": SHARD}
    unfinished = out.with_name(f".{out.name}.tmp")
    try:
        with lock(unfinished):
            files, cut = _kept(unfinished, made_of)
            empty = encode([""])
            files[EMPTY] = _write(unfinished / EMPTY, empty)
            for start in range(0, len(rows), SHARD):
                name, behind = f"{start // SHARD:05d}.safetensors", min(start + SHARD, len(rows))
                if name not in files:
                    parts = []
                    for first in range(start, behind, batch):
                        parts.append(encode([caption for _, caption in rows[first : min(first + batch, behind)]]))
                        if progress is not None:
                            progress(min(first + batch, behind))
                    whole = Embedded(torch.cat([p.tokens for p in parts]), torch.cat([p.mask for p in parts]))
                    files[name] = _write(unfinished / name, whole)
                    write_json(unfinished / BEGUN, {"made of": made_of, "sha256": files, "cut": cut + encode.cut})
            lines = [json.dumps({"file": file, "caption": caption}, ensure_ascii=False) for file, caption in rows]
            (unfinished / CAPTIONS).write_text("\n".join(lines) + "\n", encoding="utf-8")
            files[CAPTIONS] = checksum(unfinished / CAPTIONS)
            # a relative path, so that the two folders can be moved together
            place = os.path.relpath(pictures.resolve(), out.resolve())
            index = {"encoder": encode.name, "length": encode.length, "width": empty.tokens.shape[2], "captions": len(rows), "shard": SHARD}
            write_json(unfinished / INDEX, {**index, "pictures": place, "sha256": files})
            for name in (BEGUN, ".lock"):
                (unfinished / name).unlink(missing_ok=True)
            if out.exists():
                out.rmdir()
            unfinished.replace(out)
    except (OSError, SafetensorError) as error:
        raise Failure(f"could not write {out} ({error}); run the same command again to go on") from error
    _say_what_was_cut(cut + encode.cut, encode.length, len(rows))
    return len(rows)


def _kept(unfinished: Path, made_of: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """What an interrupted run with the same inputs has left: its files with checksums, and its number of cut captions. Deletes all other files."""
    files, cut = {}, 0
    try:
        begun = json.loads((unfinished / BEGUN).read_bytes())
        if begun["made of"] == made_of and all(checksum(unfinished / name) == known for name, known in begun["sha256"].items()):
            files, cut = dict(begun["sha256"]), int(begun["cut"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # begun.json is missing or damaged
    for path in unfinished.iterdir():
        if path.name not in (*files, BEGUN, ".lock"):
            path.unlink()
    return files, cut


def _say_what_was_cut(cut: int, length: int, of: int) -> None:
    if cut:
        warnings.warn(f"{cut} of {of} captions are longer than {length} tokens and were cut to that length", stacklevel=3)


def _write(path: Path, embedded: Embedded) -> str:
    save_file({"tokens": embedded.tokens.contiguous(), "mask": embedded.mask.contiguous()}, path)
    sync(path)
    return checksum(path)


# --- reading ------------------------------------------------------------------------------------------------------------------------------


class EmbeddedSet:
    """The folder that `embed` wrote. The checksum of each file is verified at its first use; embeddings stay on disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        file = folder / INDEX
        if not file.is_file():
            raise Mistake(f"{folder} holds no embedded captions; make them with noiseclock embed PICTURES --encoder FOLDER --out {folder}")
        try:
            index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            self.shard, self.length, self.width = (int(index[name]) for name in ("shard", "length", "width"))
            self.count, self._digests = int(index["captions"]), dict(index["sha256"])
            self.pictures = Path(os.path.normpath(folder.resolve() / index["pictures"]))
        except (ValueError, KeyError, TypeError) as error:
            raise Mistake(f"{file} is damaged; embed the captions anew") from error
        if not self.pictures.is_dir():
            raise Mistake(f"{file} says that the pictures are in {self.pictures}, but there is no such folder; put them there, or embed anew")
        self._open: dict[str, Embedded] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # each worker process maps the files itself

    @cached_property
    def rows(self) -> list[tuple[str, str]]:
        """(picture, caption) of each row."""
        found = read_captions(self._checked(CAPTIONS))
        if len(found) != self.count:
            raise Mistake(f"{self.folder / CAPTIONS} is damaged; embed the captions anew")
        return found

    @cached_property
    def empty(self) -> Tensor:
        """(L, D) float16: the empty caption."""
        return self._tensors(EMPTY).seen()[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        """(n, L, D) float16: the embedded captions of these rows (n,), zero after the last token of each."""
        out = torch.empty((len(rows), self.length, self.width), dtype=torch.float16)
        shards = rows // self.shard
        for shard in sorted(set(shards.tolist())):
            mine, of = shards == shard, self._tensors(f"{shard:05d}.safetensors")
            places = rows[mine] % self.shard
            out[mine] = Embedded(of.tokens[places], of.mask[places]).seen()
        return out

    def _tensors(self, name: str) -> Embedded:
        """The tensors of a file, mapped into memory."""
        if name not in self._open:
            with safe_open(self._checked(name), "pt") as file:
                self._open[name] = Embedded(file.get_tensor("tokens"), file.get_tensor("mask"))
        return self._open[name]

    def _checked(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file() or checksum(path) != self._digests.get(name):
            raise Mistake(f"{path} is missing or damaged, as its checksum says; embed the captions anew")
        return path


class Texts:
    """The embedded captions of the images of one split, in the order of its images.

    order: the rows of the embedded set, sorted by image. first, count: int64 (N,), the position in `order` of an image's first caption, and its
    number of captions. examples: int64 (M,), the row of the first caption of each held-out image; samples are generated from these.
    """

    def __init__(self, embedded: EmbeddedSet, order: Tensor, first: Tensor, count: Tensor, examples: Tensor) -> None:
        self._embedded, self._order, self._first, self._count, self._examples = embedded, order, first, count, examples

    def __len__(self) -> int:
        return len(self._first)

    @property
    def empty(self) -> Tensor:
        """(L, D) float16: the empty caption, the null condition of a model."""
        return self._embedded.empty

    @cached_property
    def known_by(self) -> str:
        """A hash of the picture names and their captions, in this order; it does not depend on the encoder."""
        total, rows = hashlib.sha256(), self._order.tolist()
        for first, count in zip(self._first.tolist(), self._count.tolist(), strict=True):
            total.update(json.dumps([self._embedded.rows[row] for row in rows[first : first + count]]).encode())
        return total.hexdigest()[:16]

    def drawn(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """(n, L, D) float16: for each of the images (n,) one of its captions, chosen by uniforms (n,) in [0, 1)."""
        place = (uniforms * self._count[images]).long().minimum(self._count[images] - 1)
        return self._embedded[self._order[self._first[images] + place]]

    def held_out(self, n: int) -> Tensor:
        """(n, L, D) float16: the embedded captions of held-out images, repeated if there are fewer than n."""
        return self._embedded[self._examples[torch.arange(n) % len(self._examples)]]

    def held_out_words(self, n: int) -> list[str]:
        """The same n captions as text."""
        return [self._embedded.rows[self._examples[i % len(self._examples)]][1] for i in range(n)]


class Captioned(Folder):
    """The pictures of an embedded set as a source of images. The label of an image is its index, with which `texts` finds its captions."""

    def __init__(self, place: Path, split: str) -> None:
        embedded = EmbeddedSet(place)
        super().__init__(embedded.pictures, split)
        self.place = place
        names = np.array([os.fsencode(file) for file, _ in embedded.rows])
        order = np.argsort(names, kind="stable")  # puts the captions of one picture next to each other
        sorted_names = names[order]

        def rows(source: Folder) -> tuple[Tensor, Tensor]:
            below = os.fsencode(source.root.relative_to(source.set))
            mine = source.files if below == b"." else np.array([below + b"/" + file for file in source.files])
            first, behind = (np.searchsorted(sorted_names, mine, side) for side in ("left", "right"))
            if not (first < behind).all():
                bare = mine[np.flatnonzero(first == behind)]
                raise Mistake(
                    f"{len(bare)} pictures of {embedded.pictures} have no caption in {place}, the first is {os.fsdecode(bare[0])}; embed anew"
                )
            return torch.from_numpy(first), torch.from_numpy(behind - first)

        held_out, _ = rows(self if split == "test" else Folder(embedded.pictures, "test"))
        self.labels, self.classes = torch.arange(len(self)), None
        self.texts = Texts(embedded, torch.from_numpy(order), *rows(self), torch.from_numpy(order)[held_out])

    def training(self) -> Folder:
        return self if self.split == "train" else Captioned(self.place, "train")


# --- prompts ------------------------------------------------------------------------------------------------------------------------------


def prompted(net: Any, prompts: Sequence[str], encoder: str, *, device: str | torch.device = "cpu") -> Tensor:
    """(n, L, D) float16: the prompts, embedded by the encoder that embedded the network's training captions."""
    if not isinstance(net.null, Tensor):
        raise Mistake("this model was not trained on captions, so it takes no prompt; leave the prompt out")
    if not encoder:
        raise Mistake("a prompt needs the text encoder that the captions were embedded with; give its folder as --encoder FOLDER")
    encode = Encoder(encoder, length=len(net.null), device=device)
    tokens = encode(["", *prompts]).seen()
    if not _alike(tokens[0], net.null):
        raise Mistake(f"{encoder} is not the encoder that embedded this model's captions: it embeds the empty caption differently")
    _say_what_was_cut(encode.cut, encode.length, len(prompts))
    return tokens[1:]


def refuse_other_encoder(net: Any, weights: Mapping[str, Tensor | Stored]) -> None:
    """Raise a Mistake unless the same encoder embedded the captions that a checkpoint was trained on and those of the current data."""
    known = weights.get("null")
    known = known.whole() if isinstance(known, Stored) else known
    if isinstance(net.null, Tensor) and known is not None and not _alike(known, net.null):
        raise Mistake("the captions have been embedded anew since this training began, with another encoder or length; embed them as before")


def _alike(one: Tensor, other: Tensor) -> bool:
    """Do these two embeddings (L, D) of the empty caption come from one encoder? Equal up to `SAME`, because devices round differently."""
    if one.shape != other.shape:
        return False
    one, other = one.cpu().float(), other.cpu().float()
    return float((one - other).abs().max()) <= SAME * max(1.0, float(one.abs().max()))
