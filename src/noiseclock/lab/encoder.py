"""A text encoder from a local folder: it turns captions into tokens for a network's attention.

    encode = Encoder("encoders/clip-vit-large-patch14")
    embedded = encode(["a red circle", ""])              # embedded.tokens (2, 77, 768), embedded.mask (2, 77)

CLIP's text model or T5's encoder, through transformers. Only this module imports transformers, and only when needed. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from noiseclock.lab.cache import digest
from noiseclock.lab.errors import Failure, Mistake

# model_type of config.json -> the transformers class of the text encoder; a CLIP folder may hold the whole model
ENCODERS = {"clip": "CLIPTextModel", "clip_text_model": "CLIPTextModel", "t5": "T5EncoderModel"}


class Embedded(NamedTuple):
    """The encoder's output for captions: tokens float16 (n, L, D), and mask bool (n, L), false after the last token of a caption."""

    tokens: Tensor
    mask: Tensor

    def seen(self) -> Tensor:
        """(n, L, D) as the networks take them: padding is zero, which marks that there is no token."""
        return self.tokens.masked_fill(~self.mask[..., None], 0)


class Encoder:
    """The text encoder in `folder`, in evaluation mode. length: L, to which captions are truncated or padded; by default the encoder's maximum.

    cut: the number of captions truncated so far.
    """

    def __init__(self, folder: str | Path, *, length: int | None = None, device: str | torch.device = "cpu") -> None:
        self.folder, self.device = Path(folder).expanduser(), device
        kind = kind_of(self.folder, ENCODERS, "text encoder")
        self.model = loaded(self.folder, ENCODERS[kind]).to(device)
        self.tokenizer = tokenizer_of(self.folder)
        self.name = f"{self.folder.resolve().name} ({ENCODERS[kind]})"
        own = getattr(self.model.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        if length is None and own > 10_000:  # transformers writes "no limit" as a huge number
            raise Mistake(f"the encoder in {folder} does not say how long captions can be; give the length in tokens")
        if length is not None and not 2 <= length <= own:
            raise Mistake(f"the encoder in {folder} takes captions of 2 to {own} tokens, got length {length}")
        self.length: int = length or own
        self.cut = 0

    @property
    def digest(self) -> str:
        """A hash of its weights, sixteen characters."""
        return digest(self.model.state_dict().values())

    @torch.no_grad()
    def __call__(self, captions: Sequence[str]) -> Embedded:
        """Embed n captions in one forward pass."""
        self.cut += sum(len(words) > self.length for words in self.tokenizer(list(captions), verbose=False)["input_ids"])
        given = tokenized(self.tokenizer, captions, self.length).to(self.device)
        tokens = self.model(**given).last_hidden_state.to("cpu", torch.float16)
        mask = given["attention_mask"].bool().cpu()
        if not bool(tokens[mask].isfinite().all()):
            raise Failure(f"the encoder in {self.folder} gives numbers that float16 cannot hold")
        return Embedded(tokens, mask)


def kind_of(folder: Path, known: dict[str, str], what: str) -> str:
    """The model_type in the folder's config.json; a Mistake if it is not in `known`."""
    if not folder.is_dir():
        raise Mistake(f"there is no folder {folder}; give that of a {what}, saved by transformers' save_pretrained")
    config = folder / "config.json"
    try:
        kind = json.loads(config.read_text())["model_type"]
    except FileNotFoundError:
        raise Mistake(f"{folder} holds no config.json; give the folder of a {what}, saved by transformers' save_pretrained") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{config} does not name a model_type; give the folder of a {what}, saved by transformers' save_pretrained") from error
    if kind not in known:
        raise Mistake(f"{config} names the model type {kind!r}, which is no known {what}; known: {', '.join(known)}")
    return str(kind)


def loaded(folder: Path, name: str) -> Any:
    """The model in `folder`, of the transformers class `name`, float32, in evaluation mode; a Mistake if weights are missing."""
    make = getattr(_transformers(), name)
    with _quiet():
        try:
            model, info = make.from_pretrained(folder, local_files_only=True, dtype=torch.float32, output_loading_info=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise Mistake(f"cannot load a {name} from {folder} ({str(error).partition(chr(10))[0]}); save it there anew") from error
    if absent := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
        # transformers would initialise them at random
        raise Mistake(f"the {name} in {folder} lacks {len(absent)} of its weights, the first is {absent[0]}; save it there anew")
    return model.eval()


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer in a model's folder."""
    with _quiet():
        try:
            tokenizer = _transformers().AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # the package tokenizers raises plain Exceptions
            reason = str(error).strip().partition("\n")[0]
            raise Mistake(f"cannot load a tokenizer from {folder} ({reason}); put its tokenizer.json and tokenizer_config.json there") from error
    if tokenizer.pad_token is None:
        raise Mistake(f"the tokenizer in {folder} has no padding token; set its pad_token and save it anew")
    return tokenizer


def tokenized(tokenizer: Any, captions: Sequence[str], length: int) -> Any:
    """input_ids and attention_mask, both (n, length)."""
    given = tokenizer(list(captions), padding="max_length", max_length=length, truncation=True, return_attention_mask=True, return_tensors="pt")
    for name in set(given) - {"input_ids", "attention_mask"}:
        del given[name]
    return given


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise Mistake("text needs the package transformers; pip install noiseclock[text]") from error
    return transformers


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' progress bars and its list of unused weights; `loaded` checks for missing weights itself."""
    logging = _transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
