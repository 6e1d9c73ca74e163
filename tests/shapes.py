"""Coloured shapes with captions, a text encoder that knows their words, and a judge that says what a picture shows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel
from transformers.utils import logging

from noiseclock.lab.captions import embed

logging.disable_progress_bar()

SIZE = 16
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (40, 60, 230), "yellow": (230, 220, 30)}
SHAPES = ("circle", "square", "triangle")
KINDS = [(colour, shape) for colour in COLOURS for shape in SHAPES]
WORDINGS = ("a {0} {1}", "one {0} {1} on black", "this {1} is {0}")
WORDS = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "one", "on", "black", "this", "is", *COLOURS, *SHAPES]
CAPTIONS = [wording.format(*kind) for kind in KINDS for wording in WORDINGS]
LENGTH = 8  # of the longest wording, with its two ends: 7
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def outline(shape: str, x: float, y: float, radius: float) -> np.ndarray:
    """bool (16, 16): the pixels of a shape about (x, y)."""
    row, column = np.mgrid[:SIZE, :SIZE]
    down, right = row - y, column - x
    if shape == "circle":
        return down**2 + right**2 <= radius**2
    if shape == "square":
        return np.maximum(abs(down), abs(right)) <= radius * 0.9
    return (abs(down) <= radius) & (abs(right) <= (down + radius) / 2)


def places(shape: str) -> list[np.ndarray]:
    """Every outline that a picture may have: two rows × two columns."""
    return [outline(shape, x, y, 5.5) for x in (7, 8) for y in (7, 8)]


def picture(colour: str, shape: str, random: np.random.Generator) -> np.ndarray:
    """uint8 (16, 16, 3)."""
    inside = places(shape)[random.integers(len(places(shape)))]
    return (inside[..., None] * np.array(COLOURS[colour])).astype(np.uint8)


def write_shapes(folder: Path, n: int, seed: int = 0) -> Path:
    """n pictures in turn of all kinds, and their captions in every wording."""
    random, lines = np.random.default_rng(seed), []
    folder.mkdir(parents=True)
    for i in range(n):
        colour, shape = KINDS[i % len(KINDS)]
        Image.fromarray(picture(colour, shape, random)).save(folder / f"{i}.png")
        lines.append(json.dumps({"file": f"{i}.png", "caption": [wording.format(colour, shape) for wording in WORDINGS]}))
    (folder / "captions.jsonl").write_text("\n".join(lines))
    return folder


def write_embedded(root: Path) -> Path:
    """pictures, an encoder, and the embedded set of both, in folders of these names."""
    embed(write_shapes(root / "pictures", 60), write_encoder(root / "encoder"), root / "embedded")
    return root


def write_tokenizer(folder: Path, length: int = LENGTH) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names).save_pretrained(folder)


def write_encoder(folder: Path, kind: str = "clip", seed: int = 0) -> Path:
    """A tiny text encoder with random weights: clip's text model, t5's encoder, or a whole clip model ("both")."""
    text = {**TEXT, **ENDS, "vocab_size": len(WORDS), "max_position_embeddings": LENGTH}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "clip":
            model = CLIPTextModel(CLIPTextConfig(**text))
        elif kind == "t5":
            model = T5EncoderModel(T5Config(vocab_size=len(WORDS), d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, pad_token_id=0))
        else:
            vision = {**TEXT, "image_size": 24, "patch_size": 8}
            model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def judged(images: Tensor) -> list[tuple[str, str]]:
    """(colour, shape) that each of the pictures uint8 (n, 3, 16, 16) shows: the colour nearest to the mean of what is lit, the nearest outline."""
    known = [(shape, inside) for shape in SHAPES for inside in places(shape)]
    found = []
    for pixels in images.permute(0, 2, 3, 1).double().numpy():
        lit = pixels.max(2) > 100
        mean = pixels[lit].mean(0) if lit.any() else np.zeros(3)
        colour = min(COLOURS, key=lambda name: float(((mean - COLOURS[name]) ** 2).sum()))
        shape, _ = min(known, key=lambda one: int((one[1] != lit).sum()))
        found.append((colour, shape))
    return found
