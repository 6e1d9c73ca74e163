"""The CLIP score: how well pictures match their captions, by a CLIP model in a local folder.

    score = clip_score(pictures, captions, CLIP("encoders/clip-vit-large-patch14"))      # the mean of 100·cos over the pictures

Pictures are preprocessed as in CLIP's own processor, but with torch: the shorter side resized (bicubic), cropped to the centre, normalised.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from noiseclock.lab.cache import digest
from noiseclock.lab.encoder import kind_of, loaded, tokenized, tokenizer_of
from noiseclock.lab.errors import Mistake
from noiseclock.lab.evaluate import made_by

# of the pixels that CLIP was trained on (code of 2103.00020), used if the folder has no preprocessor_config.json
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class ClipScore:
    """The mean of 100·cos between pictures and captions, its standard error, the number of pictures, the CLIP model, and how they were sampled.

    known_by: a hash of the CLIP model's weights, because two models may be in folders of the same name.
    """

    mean: float
    error: float
    count: int
    network: str
    known_by: str = ""
    solver: str | None = None
    steps: int | None = None

    def __str__(self) -> str:
        made = made_by(self.solver, self.steps)
        return f"CLIP score {self.mean:.3f} ± {self.error:.2g} ({self.count:,} samples, {made}, with the captions of held-out images, {self.network})"


class CLIP:
    """A CLIP model with both its text and its image encoder, in evaluation mode."""

    def __init__(self, folder: str | Path, *, device: str | torch.device = "cpu") -> None:
        self.folder, self.device = Path(folder).expanduser(), torch.device(device)
        kind_of(self.folder, {"clip": "CLIPModel"}, "CLIP model")
        self.model = loaded(self.folder, "CLIPModel").to(device)
        self.tokenizer = tokenizer_of(self.folder)
        self.title = f"CLIP of {self.folder.resolve().name}"
        self._mean, self._std = _scaling(self.folder / "preprocessor_config.json")
        self.known_by = digest([*self.model.state_dict().values(), torch.tensor([self._mean, self._std])])[:8]

    @torch.no_grad()
    def cosines(self, pictures: Tensor, captions: Sequence[str]) -> Tensor:
        """(n,) float64: the cosine similarity of each picture, uint8 (n, C, H, W), with its caption."""
        config = self.model.config
        pixels = prepared(pictures.to(self.device), config.vision_config.image_size, self._mean, self._std)
        given = tokenized(self.tokenizer, captions, config.text_config.max_position_embeddings).to(self.device)
        out = self.model(pixel_values=pixels, **given)
        return functional.cosine_similarity(out.image_embeds.double(), out.text_embeds.double()).cpu()


def prepared(pictures: Tensor, side: int, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> Tensor:
    """CLIP's input, float32 (n, 3, side, side), for pictures uint8 (n, C, H, W); a single grey channel is repeated three times."""
    if pictures.shape[1] == 1:
        pictures = pictures.expand(-1, 3, -1, -1)
    height, width = pictures.shape[2:]
    shorter = min(height, width)
    size = height * side // shorter, width * side // shorter
    pixels = pictures.float()
    # first the width, then the height, each rounded to bytes, as in Pillow, which resized CLIP's training images
    for step in ((height, size[1]), size):
        if pixels.shape[2:] != step:
            pixels = functional.interpolate(pixels, step, mode="bicubic", antialias=True).round().clamp(0, 255)
    top, left = (size[0] - side) // 2, (size[1] - side) // 2
    pixels = pixels[:, :, top : top + side, left : left + side] / 255
    centre, spread = (torch.tensor(part, device=pixels.device).view(3, 1, 1) for part in (mean, std))
    return (pixels - centre) / spread


def clip_score(
    pictures: Tensor, captions: Sequence[str], clip: CLIP, *, batch: int = 64, solver: str | None = None, steps: int | None = None
) -> ClipScore:
    """The CLIP score of pictures uint8 (n, C, H, W), each with its own caption. solver, steps: how they were sampled, for the record."""
    if len(pictures) != len(captions) or not captions:
        raise Mistake(f"a CLIP score needs a caption for each picture, got {len(captions)} for {len(pictures)}")
    parts = range(0, len(captions), batch)
    found = 100 * torch.cat([clip.cosines(pictures[i : i + batch], captions[i : i + batch]) for i in parts])
    error = found.std().item() / math.sqrt(len(found)) if len(found) > 1 else math.nan
    return ClipScore(found.mean().item(), error, len(found), clip.title, clip.known_by, solver, steps)


def _scaling(file: Path) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The pixel mean and standard deviation that the model expects, from its preprocessor_config.json if there is one."""
    if not file.is_file():
        return MEAN, STD
    try:
        config = json.loads(file.read_text())
        mean, std = (tuple(float(x) for x in config[name]) for name in ("image_mean", "image_std"))
    except (ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{file} is damaged; replace it with the one of this CLIP model, or remove it") from error
    return mean, std
