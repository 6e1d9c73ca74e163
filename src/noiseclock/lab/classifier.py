"""A small classifier of handwritten digits, trained on first use. Its last hidden layer gives features for digits, on which Inception's mean little.

It must be the same on every machine. So it has a random stream of its own and trains in one thread and in float64: rounding differences between
processors disappear when the weights are rounded to float32 at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noiseclock.core.checks import choose
from noiseclock.lab.cache import remembered
from noiseclock.lab.data import Images, load as load_data
from noiseclock.lab.home import home
from noiseclock.lab.order import Order

DATA = ("digits", "mnist")
VERSION = 1  # to be raised with any change of the network or its training: distances by different classifiers cannot be compared
FEATURES = 64
STEPS, BATCH, RATE = 400, 64, 3e-3


class Classifier(nn.Module):
    """(B, 64) features of uint8 images (B, C, H, W), H and W at least 8; `title` is its name in results.

    The mean variance of the 64 features over the training images is 1, which fixes the scale of distances.
    """

    def __init__(self, channels: int, classes: int, title: str, *, width: int = 24) -> None:
        super().__init__()
        self.title = title
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.second = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.hidden = nn.Linear(2 * width * 16, FEATURES)
        self.last = nn.Linear(FEATURES, classes)
        self.scale: Tensor = nn.Buffer(torch.ones(()))

    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.to(self.last.weight.dtype) / 127.5 - 1
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.adaptive_max_pool2d(F.relu(self.second(x)), 4)
        return F.silu(self.hidden(x.flatten(1))) * self.scale  # under ReLU a third of the features never rises above zero

    def logits(self, features: Tensor) -> Tensor:
        """(B, classes) from features (B, 64)."""
        out: Tensor = self.last(features / self.scale)
        return out


def train(data: Images, *, steps: int = STEPS, seed: int = 0) -> Classifier:
    """A classifier of these labelled images, trained by AdamW with a one-cycle learning rate."""
    if data.labels is None or data.classes is None:
        raise ValueError(f"a classifier needs labels, and {data.name} has none")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = Classifier(data.shape[0], data.classes, f"{data.name.split()[0]} classifier").double()
    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    order = Order(len(data), seed)
    with _one_thread(), torch.enable_grad():
        for step in range(steps):
            rows = order(step * BATCH, BATCH)
            loss = F.cross_entropy(network.logits(network(data.pixels[rows])), data.labels[rows])
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            rate.step()
        network.scale.div_(features(network, data).var(0).mean().sqrt())
    return network.float().eval().requires_grad_(False)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Layers as small as these are slower in several threads, and ten times slower where other work holds the processors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def accuracy(network: Classifier, data: Images) -> float:
    """The share of images that it classifies correctly."""
    if data.labels is None:
        raise ValueError(f"{data.name} has no labels")
    return (network.logits(features(network, data)).argmax(1) == data.labels).double().mean().item()


@torch.no_grad()
def features(network: Classifier, data: Images) -> Tensor:
    """(N, 64) features of all images, in the dtype of the network."""
    return torch.cat([network(pixels) for pixels in torch.split(data.pixels, 1000)])


def load(name: str) -> Classifier:
    """The classifier of "digits" or "mnist", on the CPU; trained on first use (seconds and about a minute on one core) and kept in `home()`."""
    choose("data with a classifier", name, DATA)
    state = remembered(home() / "classifiers" / f"{name}-v{VERSION}.safetensors", lambda: dict(train(_images(name)).state_dict()))
    channels, classes = state["first.weight"].shape[1], len(state["last.weight"])
    with torch.device("meta"):
        network = Classifier(channels, classes, f"{name} classifier")
    network.load_state_dict(state, assign=True)
    return network.eval().requires_grad_(False)


def _images(name: str) -> Images:
    data = load_data(name)
    assert isinstance(data, Images)
    return data
