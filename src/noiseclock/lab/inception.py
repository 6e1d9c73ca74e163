"""The Inception network behind every published FID: Inception v3 as TensorFlow released it on 2015-12-05.

The names of the parameters are those of pytorch-fid's weights file `pt_inception-2015-12-05`. The network differs from the Inception v3 of the
paper and of other libraries:

- average pooling inside the blocks does not count the padding;
- the last block, Mixed_7c, has max pooling where the others have average pooling;
- it has 1008 classes;
- pixels are scaled to [-1, 1], without any mean or standard deviation of a dataset.

Features are the 2048 averages of the last block's channels over the picture.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseclock.core.checks import choose
from noiseclock.lab.errors import Mistake
from noiseclock.lab.home import home

SIDE = 299
RESIZES = ("pytorch", "tensorflow")
SOURCE = "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"


def weights_path() -> Path:
    """Where the weights file is expected."""
    return home() / "inception" / "pt_inception-2015-12-05.pth"


class Conv(nn.Module):
    """Convolution without bias, batch norm, ReLU; the size stays unless there is a stride or `padded` is off."""

    def __init__(self, inputs: int, outputs: int, kernel: int | tuple[int, int] = 1, *, stride: int = 1, padded: bool = True) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (height // 2, width // 2) if padded and stride == 1 else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, (height, width), stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


def average(x: Tensor) -> Tensor:
    """3x3 average pooling with stride 1; the padding does not count."""
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)


def maximum(x: Tensor) -> Tensor:
    """3x3 max pooling with stride 1."""
    return F.max_pool2d(x, 3, stride=1, padding=1)


def halved(x: Tensor) -> Tensor:
    """3x3 max pooling with stride 2."""
    return F.max_pool2d(x, 3, stride=2)


class BlockA(nn.Module):
    """Mixed_5b to 5d, 35x35."""

    def __init__(self, inputs: int, pool: int) -> None:
        super().__init__()
        self.branch1x1 = Conv(inputs, 64)
        self.branch5x5_1 = Conv(inputs, 48)
        self.branch5x5_2 = Conv(48, 64, 5)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3)
        self.branch_pool = Conv(inputs, pool)

    def forward(self, x: Tensor) -> Tensor:
        five = self.branch5x5_2(self.branch5x5_1(x))
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch1x1(x), five, three, self.branch_pool(average(x))], 1)


class BlockB(nn.Module):
    """Mixed_6a, from 35x35 to 17x17."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3 = Conv(inputs, 384, 3, stride=2)
        self.branch3x3dbl_1 = Conv(inputs, 64)
        self.branch3x3dbl_2 = Conv(64, 96, 3)
        self.branch3x3dbl_3 = Conv(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3dbl_3(self.branch3x3dbl_2(self.branch3x3dbl_1(x)))
        return torch.cat([self.branch3x3(x), three, halved(x)], 1)


class BlockC(nn.Module):
    """Mixed_6b to 6e, 17x17, with 7x7 convolutions factorised into 1x7 and 7x1."""

    def __init__(self, inputs: int, middle: int) -> None:
        super().__init__()
        row, column = (1, 7), (7, 1)
        self.branch1x1 = Conv(inputs, 192)
        self.branch7x7_1 = Conv(inputs, middle)
        self.branch7x7_2 = Conv(middle, middle, row)
        self.branch7x7_3 = Conv(middle, 192, column)
        self.branch7x7dbl_1 = Conv(inputs, middle)
        self.branch7x7dbl_2 = Conv(middle, middle, column)
        self.branch7x7dbl_3 = Conv(middle, middle, row)
        self.branch7x7dbl_4 = Conv(middle, middle, column)
        self.branch7x7dbl_5 = Conv(middle, 192, row)
        self.branch_pool = Conv(inputs, 192)

    def forward(self, x: Tensor) -> Tensor:
        seven = self.branch7x7_3(self.branch7x7_2(self.branch7x7_1(x)))
        twice = self.branch7x7dbl_3(self.branch7x7dbl_2(self.branch7x7dbl_1(x)))
        twice = self.branch7x7dbl_5(self.branch7x7dbl_4(twice))
        return torch.cat([self.branch1x1(x), seven, twice, self.branch_pool(average(x))], 1)


class BlockD(nn.Module):
    """Mixed_7a, from 17x17 to 8x8."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch3x3_1 = Conv(inputs, 192)
        self.branch3x3_2 = Conv(192, 320, 3, stride=2)
        self.branch7x7x3_1 = Conv(inputs, 192)
        self.branch7x7x3_2 = Conv(192, 192, (1, 7))
        self.branch7x7x3_3 = Conv(192, 192, (7, 1))
        self.branch7x7x3_4 = Conv(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        seven = self.branch7x7x3_3(self.branch7x7x3_2(self.branch7x7x3_1(x)))
        return torch.cat([three, self.branch7x7x3_4(seven), halved(x)], 1)


class BlockE(nn.Module):
    """Mixed_7b and 7c, 8x8, with parallel 1x3 and 3x1 convolutions; `last` has max pooling."""

    def __init__(self, inputs: int, *, last: bool = False) -> None:
        super().__init__()
        row, column = (1, 3), (3, 1)
        self.branch1x1 = Conv(inputs, 320)
        self.branch3x3_1 = Conv(inputs, 384)
        self.branch3x3_2a = Conv(384, 384, row)
        self.branch3x3_2b = Conv(384, 384, column)
        self.branch3x3dbl_1 = Conv(inputs, 448)
        self.branch3x3dbl_2 = Conv(448, 384, 3)
        self.branch3x3dbl_3a = Conv(384, 384, row)
        self.branch3x3dbl_3b = Conv(384, 384, column)
        self.branch_pool = Conv(inputs, 192)
        self.pool = maximum if last else average

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        twice = self.branch3x3dbl_2(self.branch3x3dbl_1(x))
        forks = [self.branch3x3_2a(three), self.branch3x3_2b(three), self.branch3x3dbl_3a(twice), self.branch3x3dbl_3b(twice)]
        return torch.cat([self.branch1x1(x), *forks, self.branch_pool(self.pool(x))], 1)


class Inception(nn.Module):
    """(B, 2048) features of uint8 images (B, 3 or 1, H, W), float32.

    resize: "pytorch", as pytorch-fid prepares them: pixel centres are aligned and 0..255 becomes -1..1. "tensorflow", as TensorFlow 1 and the
    first FID did: corner pixels are aligned at the top left only, and 128 becomes 0.
    """

    title = "Inception 2015-12-05"

    def __init__(self, *, resize: str = "pytorch") -> None:
        super().__init__()
        self.resize = choose("resize", resize, RESIZES)
        self.Conv2d_1a_3x3 = Conv(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = Conv(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = Conv(64, 80)
        self.Conv2d_4a_3x3 = Conv(80, 192, 3, padded=False)
        self.Mixed_5b = BlockA(192, 32)
        self.Mixed_5c = BlockA(256, 64)
        self.Mixed_5d = BlockA(288, 64)
        self.Mixed_6a = BlockB(288)
        self.Mixed_6b = BlockC(768, 128)
        self.Mixed_6c = BlockC(768, 160)
        self.Mixed_6d = BlockC(768, 160)
        self.Mixed_6e = BlockC(768, 192)
        self.Mixed_7a = BlockD(768)
        self.Mixed_7b = BlockE(1280)
        self.Mixed_7c = BlockE(2048, last=True)
        self.fc = nn.Linear(2048, 1008)
        self.eval().requires_grad_(False)

    @property
    def has_classifier(self) -> bool:
        """Is the last layer there? Some copies of the weights, made for FID alone, hold zeros in its place."""
        return bool(self.fc.weight.any())

    def forward(self, pixels: Tensor) -> Tensor:
        x = prepared(pixels, self.resize)
        x = halved(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = halved(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        x = self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))
        x = self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))
        features: Tensor = x.mean((2, 3), dtype=torch.float32)
        return features

    def require_classifier(self) -> None:
        """A Mistake unless the last layer is there."""
        if not self.has_classifier:
            raise Mistake(
                f"the Inception Score needs the classifier layer, which is all zeros in {weights_path()}: that copy serves FID, KID, precision and "
                f"recall only; replace it with the original, {SOURCE}"
            )

    def logits(self, features: Tensor) -> Tensor:
        """(B, 1008) from features (B, 2048), for the Inception Score: without the bias, because the code that came with the score left it out."""
        self.require_classifier()
        return features @ self.fc.weight.T


def prepared(pixels: Tensor, resize: str) -> Tensor:
    """(B, 3, 299, 299) what the network sees of uint8 images (B, 3 or 1, H, W)."""
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[1] not in (1, 3):
        raise ValueError(f"images must be uint8 (B, 3 or 1, H, W), got {pixels.dtype} of shape {tuple(pixels.shape)}")
    x = pixels.float().expand(-1, 3, -1, -1)
    if resize == "tensorflow":
        return (resized_as_tensorflow(x) - 128) / 128
    return 2 * F.interpolate(x / 255, (SIDE, SIDE), mode="bilinear", align_corners=False) - 1


def resized_as_tensorflow(x: Tensor) -> Tensor:
    """(B, C, 299, 299) bilinearly from (B, C, H, W) as TensorFlow 1 did: pixel i of the result lies at i·H/299, not at (i+½)·H/299 - ½."""
    for dim in (2, 3):
        size = x.shape[dim]
        place = torch.arange(SIDE, device=x.device, dtype=torch.float32) * (size / SIDE)
        below = place.long()
        share = (place - below).reshape(-1, 1) if dim == 2 else place - below
        x = torch.lerp(x.index_select(dim, below), x.index_select(dim, (below + 1).clamp(max=size - 1)), share)
    return x


def load(*, resize: str = "pytorch", path: Path | None = None) -> Inception:
    """The network with the weights of `path`, or of `weights_path()`."""
    with torch.device("meta"):  # no initialisation, which would draw from the global generator
        network = Inception(resize=resize)
    path = path or weights_path()
    remedy = f"download {SOURCE} to that path"
    if not path.is_file():
        raise Mistake(f"the Inception weights are not at {path}: {remedy}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle raises nearly any error
        raise Mistake(f"{path} cannot be read as a weights file ({type(error).__name__}): {remedy}") from error
    try:
        network.load_state_dict(state, assign=True)
    except (RuntimeError, TypeError) as error:
        raise Mistake(f"{path} holds other weights than those of the Inception network of 2015-12-05: {remedy}") from error
    return network
