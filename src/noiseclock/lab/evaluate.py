"""How good a model is: its pictures against a dataset's, its bound on the likelihood, its loss over time.

    scores = compare_images(pictures, load("cifar10"), solver="ddim", steps=50)
    print(scores)                                                   # every figure with what it was measured on
    print(bits_per_dim(model, schedule, "eps", load("cifar10", split="test"), steps=50))

Pictures are compared by their Inception features. For digits and MNIST the features are those of a small classifier, and the distance is not called
FID.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noiseclock.core.batch import Predict, call, column, noised
from noiseclock.core.checks import choose
from noiseclock.core.clock import Clock
from noiseclock.core.likelihood import bits, bound, decoder_term, kl_term, prior_term
from noiseclock.core.measure import LossOverTime, loss_over_time
from noiseclock.core.objectives import Objective, objective as make_objective
from noiseclock.core.probes import undisturbed
from noiseclock.core.reach import modules_of
from noiseclock.core.schedules import Discrete, Schedule
from noiseclock.core.streams import in_unit
from noiseclock.core.table import wide
from noiseclock.lab import classifier, inception, metrics
from noiseclock.lab.built import placed
from noiseclock.lab.cache import digest, remembered
from noiseclock.lab.classifier import Classifier
from noiseclock.lab.data import Data, Files, Images, cpus, from_disk, head
from noiseclock.lab.errors import Mistake
from noiseclock.lab.home import home
from noiseclock.lab.inception import Inception
from noiseclock.lab.metrics import Moments, Spread

Network = Inception | Classifier

REFERENCE = 50_000  # images of the dataset, as is usual for FID
NEIGHBOURS = 10_000  # images of each side for precision and recall, whose cost grows with their square
SUBSETS, SUBSET = 100, 1000  # of the kernel distance
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
NEAREST = 3  # neighbours that make the manifolds of precision and recall
CURVE = 512  # held-out images for the loss over time


# --- features -----------------------------------------------------------------------------------------------------------------------------


def network_for(name: str, *, resize: str = "pytorch") -> Network:
    """The feature network for a dataset. name: as `load` takes it, or the dataset's `name`. resize: see `Inception`."""
    short = name.split()[0]
    return classifier.load(short) if short in classifier.DATA else inception.load(resize=resize)


@torch.no_grad()
def features_of(
    images: Tensor | Images | Files,
    network: Network,
    *,
    count: int | None = None,
    batch: int | None = None,
    device: str | torch.device = "cpu",
    precision: str | None = None,
) -> Tensor:
    """(N, D) float32 on the CPU: the features of the first `count` uint8 images (N, C, H, W); the network moves to `device`.

    batch: by default a size that suits the device. precision: of the convolutions, one of PRECISIONS; by default that of `precision_on`.
    """
    device = torch.device(device)
    network, wanted = placed(network, device), len(images) if count is None else count
    with _computing(device, precision or precision_on(device)):
        found = [network(pixels).float() for pixels in _in_order(images, wanted, batch or (250 if device.type == "cuda" else 64), device)]
        return torch.cat(found).cpu()


def precision_on(device: str | torch.device) -> str:
    """The default precision of features on a device; docs/performance.md shows what each precision saves and does to FID."""
    return "tf32" if torch.device(device).type == "cuda" else "fp32"


def _in_order(images: Tensor | Images | Files, count: int, batch: int, device: torch.device) -> Iterator[Tensor]:
    if isinstance(images, Files):
        rows = torch.split(torch.arange(min(count, len(images))), batch)
        yield from (pixels for pixels, _ in from_disk(images, rows, device, min(4, cpus())))
    else:
        pixels = images.pixels if isinstance(images, Images) else images
        yield from (part.to(device) for part in torch.split(pixels[:count], batch))


@contextmanager
def _computing(device: torch.device, precision: str) -> Iterator[None]:
    """Compute in this precision, even inside a trainer's autocast."""
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(choose("precision", precision, PRECISIONS))
    with (
        torch.autocast(device.type, half, enabled=half is not None),
        torch.backends.cudnn.flags(enabled=True, allow_tf32=precision == "tf32"),
    ):
        yield


def _with_float64(device: str | torch.device) -> torch.device:
    """The device for metrics: `device`, or the CPU if it has no float64, like Apple's GPUs."""
    return torch.device(device if torch.device(device).type == "cuda" else "cpu")


@dataclass(frozen=True)
class Reference:
    """What pictures are compared with: the name of a dataset, features (N, D) of its images, float32, and their moments."""

    name: str
    features: Tensor
    moments: Moments


def reference(
    data: Images | Files,
    network: Network,
    *,
    count: int = REFERENCE,
    batch: int | None = None,
    device: str | torch.device = "cpu",
    precision: str | None = None,
) -> Reference:
    """The features of the first `count` images of a dataset, cached in `home()/statistics` under a hash of the images and the network."""
    count = min(count, len(data))
    # the hash covers all images in memory, but only about 64 of a dataset on disk, evenly spaced; the count is in the file's name
    pixels = data.pixels[:count] if isinstance(data, Images) else data.read(range(0, count, max(1, count // 64))).pixels
    known_by = digest([pixels, *network.state_dict().values()])
    size = "x".join(str(n) for n in data.shape)
    precision = precision or precision_on(device)
    names = [data.name, size, str(count), network.title, *([network.resize] if isinstance(network, Inception) else []), precision, known_by]
    file = "-".join(re.sub(r"[^\w.]+", "_", name)[-80:] for name in names) + ".safetensors"

    def make() -> dict[str, Tensor]:
        features = features_of(data, network, count=count, batch=batch, device=device, precision=precision)
        moments = Moments.of(features.to(_with_float64(device)))
        return {"features": features, "mean": moments.mean, "scatter": moments.scatter}

    found = remembered(home() / "statistics" / file, make)
    return Reference(data.name, found["features"], Moments(count, found["mean"], found["scatter"]))


# --- pictures -----------------------------------------------------------------------------------------------------------------------------


def made_by(solver: str | None, steps: int | None) -> str:
    """A solver and its steps, in words."""
    name, _, options = (solver or "").partition(":")
    return f"{name.upper()} {steps}" + f" with {options}" * bool(options) if solver and steps else solver or "solver not known"


@dataclass(frozen=True)
class Scores:
    """How near pictures come to a dataset, and what that was measured on.

    frechet: the Fréchet distance, FID under the Inception network. kernel: the unbiased squared MMD over subsets, KID under that network.
    precision, recall: on the first `neighbours` of both sides. count: of pictures. solver, steps: how they were made. reference,
    reference_count: the dataset and how many of its images. network, resize, dimensions: of the features.
    """

    frechet: float
    kernel: Spread
    precision: float
    recall: float
    count: int
    reference: str
    reference_count: int
    network: str
    dimensions: int
    resize: str | None = None
    solver: str | None = None
    steps: int | None = None
    neighbours: int = NEIGHBOURS

    @property
    def frechet_name(self) -> str:
        """FID for the Inception network alone, which is the only one with a `resize`."""
        return "FID" if self.resize else f"Fréchet distance ({self.network})"

    @property
    def kernel_name(self) -> str:
        """KID for the Inception network alone."""
        return "KID" if self.resize else f"kernel distance ({self.network})"

    @property
    def made_by(self) -> str:
        """The solver and its steps."""
        return made_by(self.solver, self.steps)

    @property
    def features(self) -> str:
        """The network, and its resize if that is not the usual one."""
        return f"{self.network}, TensorFlow's resize" if self.resize == "tensorflow" else self.network

    @property
    def against(self) -> str:
        """What the pictures were compared with, and by which features."""
        return f"against {self.reference_count:,} of {self.reference}, {self.features}"

    @property
    def warning(self) -> str:
        """What is wrong with the Fréchet distance, if anything."""
        if min(self.count, self.reference_count) > self.dimensions:
            return ""
        return f"too few samples: up to {self.dimensions:,}, the dimensions of the features, covariances are singular and the distance too large"

    def __str__(self) -> str:
        made = f"{self.count:,} samples, {self.made_by}"
        size = min(SUBSET, self.count, self.reference_count)
        lines = [
            f"{self.frechet_name} {self.frechet:.4g} ({made}, {self.against})" + (f"; {self.warning}" if self.warning else ""),
            f"{self.kernel_name} {self.kernel.mean:.3g} ± {self.kernel.std:.2g} ({made}, {self.against}; {SUBSETS} subsets of {size:,})",
            f"precision {self.precision:.3f}, recall {self.recall:.3f} ({min(self.count, self.neighbours):,} of {made}, against "
            f"{min(self.reference_count, self.neighbours):,} of {self.reference}, {self.features}; {NEAREST} neighbours)",
        ]
        return "\n".join(lines)


def compare_images(
    fake: Tensor,
    data: Images | Files,
    *,
    network: Network | None = None,
    solver: str | None = None,
    steps: int | None = None,
    count: int = REFERENCE,
    batch: int | None = None,
    device: str | torch.device = "cpu",
    precision: str | None = None,
    seed: int = 0,
) -> Scores:
    """Scores of pictures, uint8 (N, C, H, W), against the first `count` images of a dataset.

    network: by default that of `network_for`. batch, precision: as in `features_of`. solver, steps: how the pictures were made,
    for the record. seed: of the kernel distance's subsets.
    """
    if fake.dtype != torch.uint8 or tuple(fake.shape[1:]) != data.shape:
        wanted = "x".join(str(n) for n in data.shape)
        raise Mistake(f"{data.name} has uint8 images of {wanted}, but the pictures are {fake.dtype} of shape {tuple(fake.shape)}; make them alike")
    if len(fake) <= NEAREST:
        raise Mistake(f"{len(fake)} pictures are too few to compare; make at least {NEAREST + 1}, and thousands for reliable numbers")
    network = network or network_for(data.name)
    known = reference(data, network, count=count, batch=batch, device=device, precision=precision)
    place = _with_float64(device)
    mine, real = features_of(fake, network, batch=batch, device=device, precision=precision).to(place), known.features.to(place)
    shares = metrics.precision_recall(real[:NEIGHBOURS], mine[:NEIGHBOURS], k=NEAREST)
    return Scores(
        frechet=metrics.frechet(Moments.of(mine), known.moments),
        kernel=metrics.kid(mine, real, subsets=SUBSETS, size=SUBSET, seed=seed),
        precision=shares.precision,
        recall=shares.recall,
        count=len(fake),
        reference=known.name,
        reference_count=known.moments.count,
        network=network.title,
        dimensions=mine.shape[1],
        resize=network.resize if isinstance(network, Inception) else None,
        solver=solver,
        steps=steps,
    )


def inception_score(images: Tensor | Images | Files, network: Inception, *, batch: int | None = None, device: str | torch.device = "cpu") -> Spread:
    """The Inception Score over ten parts; a Mistake where the weights lack the classifier."""
    network.require_classifier()
    features = features_of(images, network, batch=batch, device=device)
    return metrics.inception_score(network.cpu().logits(features))


# --- likelihood and loss ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BitsPerDim:
    """The variational bound: its mean over `count` images of `data`, its standard error, and how many of the chain's steps were evaluated."""

    mean: float
    error: float
    count: int
    data: str
    steps: int
    of_steps: int
    variance: str

    def __str__(self) -> str:
        steps = f"all {self.of_steps:,} steps" if self.steps == self.of_steps else f"{self.steps:,} of {self.of_steps:,} steps, at random for each"
        images = f" ± {self.error:.2g} bits/dim ({self.count:,} images" if self.count > 1 else " bits/dim (1 image"
        return f"VLB {self.mean:.4g}{images} of {self.data}, {steps}, variance {self.variance})"


def bits_per_dim(
    predict: Predict,
    schedule: Schedule,
    objective: str | Objective,
    data: Images | Files,
    *,
    n: int = 1000,
    batch: int = 128,
    steps: int | None = None,
    seed: int = 0,
    variance: str = "fixed-large",
    conditional: bool = False,
    device: str | torch.device = "cpu",
) -> BitsPerDim:
    """The bound on the first n images of `data`, in evaluation mode.

    steps: how many to evaluate, with one forward pass each; all by default, fewer give an unbiased estimate (see `strided_bound`). conditional:
    the model gets the labels. The error covers images, noise and choice of steps together.
    """
    if not isinstance(schedule, Discrete):
        raise Mistake(f"the variational bound needs discrete steps, and {type(schedule).__name__} has none; use a schedule such as linear or cosine")
    if steps is not None and steps < 2:
        raise Mistake(f"the bound needs at least 2 steps, the first and another, got steps={steps}")
    steps = schedule.steps if steps is None else min(steps, schedule.steps)
    x0, labels = head(data, n, device)
    if conditional and labels is None:
        raise Mistake(f"{data.name} has no labels; evaluate with conditional=False")
    generator = torch.Generator(x0.device).manual_seed(seed)
    found = []
    with undisturbed(modules_of(predict), x0.device):
        for start in range(0, len(x0), batch):
            some, cond = x0[start : start + batch], labels[start : start + batch] if conditional and labels is not None else None
            if steps == schedule.steps:
                whole = bound(schedule, objective, predict, some, cond=cond, variance=variance, generator=generator)
                found.append(whole.bits_per_dim)
            else:
                found.append(strided_bound(schedule, objective, predict, some, steps=steps, cond=cond, variance=variance, generator=generator))
    values = torch.cat(found).double().cpu()
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return BitsPerDim(values.mean().item(), error, len(values), data.name, steps, schedule.steps, variance)


@torch.no_grad()
def strided_bound(
    schedule: Discrete,
    objective: str | Objective,
    predict: Predict,
    x0: Tensor,
    *,
    steps: int,
    cond: Any = None,
    variance: str = "fixed-large",
    generator: torch.Generator | None = None,
) -> Tensor:
    """(B,) unbiased estimates of the bound of x0 (B, ...) in bits per dimension, from `steps` forward passes of the model.

    Step 0, the decoder's, is always evaluated. The others are divided into steps - 1 equal strata, and each image draws one step in each
    stratum; the sum of these terms times (T-1)/(steps-1) estimates the sum over all steps. Images draw independently of each other, so the
    spread of their estimates gives the error of the mean.
    """
    objective = make_objective(objective)

    def x0_predicted(step: Tensor) -> Tensor:
        time = schedule.time_of(step)
        noise = torch.randn(x0.shape, generator=generator, device=x0.device, dtype=torch.promote_types(x0.dtype, torch.float32))
        x_t, _ = noised(schedule, objective, x0, noise, time)
        a, s = (column(c, x0) for c in schedule(time))
        return objective.to_x0(call(predict, x_t, step, cond), x_t, a, s)

    n, strata, later = len(x0), steps - 1, schedule.steps - 1
    total = prior_term(schedule, x0)
    first = torch.zeros(n, dtype=torch.long, device=x0.device)
    total = total + decoder_term(schedule, x0, x0_predicted(first), variance=variance)
    for stratum in range(strata):
        place = in_unit((stratum + torch.rand(n, generator=generator, device=x0.device, dtype=wide(x0.device))) / strata)
        step = 1 + (place * later).long()
        total = total + kl_term(schedule, step, x0, x0_predicted(step), variance=variance) * (later / strata)
    return bits(total)


def loss_curve(
    clock: Clock,
    predict: Predict,
    data: Data,
    *,
    n: int = CURVE,
    times: int = 50,
    batch: int = 128,
    seed: int = 0,
    conditional: bool = False,
    device: str | torch.device = "cpu",
) -> LossOverTime:
    """The loss at so many `times` on the first n images of `data`, at fixed noise; see `loss_over_time`."""
    x0, labels = head(data, n, device)
    return loss_over_time(clock, predict, x0, cond=labels if conditional else None, times=times, batch=batch, seed=seed)
