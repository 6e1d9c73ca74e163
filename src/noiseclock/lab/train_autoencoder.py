"""Train a small AutoencoderKL on your pictures, to encode them.

    for record in train_autoencoder(Settings("folder:data/faces", size=128), "autoencoders/faces"): ...

The loss is L1 + kl · KL, both per element of the picture, so that `kl` has the same meaning as in latent diffusion (arXiv 2112.10752, appendix G).
L1 is minimal at the conditional median of a pixel, MSE at the mean; the median keeps edges sharper. There is no perceptual or adversarial term,
because these need networks trained on other data. So fine texture is lost; a published autoencoder keeps more of it.

`autoencoder.load` and diffusers' from_pretrained can load the folder; every checkpoint updates it. The same call again resumes the training.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from noiseclock.lab import checkpoint
from noiseclock.lab.autoencoder import Autoencoder, psnr
from noiseclock.lab.autoencoder_settings import Settings
from noiseclock.lab.built import placed
from noiseclock.lab.data import Files, Images, batches, head, load_images
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import Log, difference, lock, refuse_comparison, refuse_encoded
from noiseclock.lab.interrupt import Wish, listening
from noiseclock.lab.moments import load_moments, moments
from noiseclock.lab.order import normals

HELD_OUT = 256  # pictures for the PSNR
CLIP = 1.0  # maximum gradient norm
FREE = ("updates", "save_every")
OTHER = "{} holds something that was not trained by this command; choose another folder"


@dataclass(frozen=True)
class Progress:
    """The state after an update. l1, kl: the two terms of its loss, kl without its weight. psnr: on held-out pictures, in decibels, if measured."""

    step: int
    l1: float
    kl: float
    seconds: float
    psnr: float | None = None


def train_autoencoder(settings: Settings, folder: str | Path, *, device: str | torch.device = "cpu") -> Iterator[Progress]:
    """Train into `folder`, or resume; yields after every update. Ctrl-C and SIGTERM finish the current update, save a checkpoint and stop."""
    with ExitStack() as stack:
        data = load_images(settings.data, size=settings.size)
        held_out = load_images(settings.data, split="test", size=settings.size)
        refuse_encoded(Path(folder))
        refuse_comparison(Path(folder))
        stack.enter_context(lock(folder))
        run = _Run(settings, Path(folder), data, held_out, torch.device(device))
        yield from run.training(stack.enter_context(listening()))


class _Run:
    def __init__(self, settings: Settings, folder: Path, data: Images | Files, held_out: Images | Files, device: torch.device) -> None:
        self.settings, self.folder, self.data, self.device = settings, folder, data, device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.net = placed(settings.network(data.shape), device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=settings.lr, fused=True)
        x, _ = head(held_out, HELD_OUT)
        self.held_out = ((x + 1) * 127.5).round().byte()
        self.step, self.seconds = 0, 0.0
        self._resume()

    def _resume(self) -> None:
        if not checkpoint.steps(self.folder):
            if (self.folder / "config.json").exists():
                raise Mistake(OTHER.format(self.folder))
            return
        self.step, state = checkpoint.load(self.folder)
        if "latent_channels" not in state["settings"]:
            raise Mistake(OTHER.format(self.folder))
        mine, theirs = ({k: v for k, v in found.items() if k not in FREE} for found in (asdict(self.settings), state["settings"]))
        if changes := difference(mine, theirs):
            raise Mistake(f"{self.folder} holds another training; choose another folder, or make the settings alike:\n{changes}")
        self.net.load_state_dict(state["model"])
        load_moments(self.optimizer, list(self.net.named_parameters()), state["optimizer"])
        self.seconds = state["seconds"]
        self._publish()  # an earlier run may have been killed between its checkpoint and this

    def training(self, wish: Wish) -> Iterator[Progress]:
        settings, saved = self.settings, self.step
        stream: Any = batches(self.data, settings.batch, seed=settings.seed, start=self.step, device=self.device, flip=settings.flip)
        try:
            with Log(self.folder / "log.jsonl") as log:
                log.truncate_after(self.step)
                while self.step < settings.updates:
                    wish.patient = True
                    start = time.perf_counter()
                    l1, kl = self._update(next(stream)[0])
                    self.seconds += time.perf_counter() - start
                    found, stop = None, wish.signal is not None
                    if self.step % settings.save_every == 0 or self.step == settings.updates or stop:
                        found = psnr(Autoencoder(self.net), self.held_out)
                        log.write({"step": self.step, "seconds": self.seconds, "l1": l1, "kl": kl, "psnr": found})
                        log.sync()
                        self.save()
                        saved = self.step
                    wish.patient = saved < self.step
                    yield Progress(self.step, l1, kl, self.seconds, found)
                    if stop:  # not wish.signal: a signal that came after the check above waits for the next checkpoint
                        wish.grant()
        except GeneratorExit:
            if saved < self.step:
                self.save()
            raise
        except torch.OutOfMemoryError as error:
            raise Failure(f"out of memory after update {self.step}; lower batch or channels, or use precision bf16") from error
        finally:
            stream.close()

    def _update(self, x: Tensor) -> tuple[float, float]:
        settings = self.settings
        with torch.autocast(self.device.type, torch.bfloat16, enabled=settings.precision == "bf16"):
            posterior = self.net.encode(x).latent_dist
            # the noise depends on (seed, update) only, so a checkpoint needs no generator state
            noise = normals(settings.seed, "posterior", self.step * len(x), len(x), tuple(posterior.mean.shape[1:]), self.device)
            back = self.net.decode(posterior.mean + posterior.std * noise).sample
        l1, kl = (back.float() - x).abs().mean(), posterior.kl().float().mean() / x[0].numel()
        loss = l1 + settings.kl * kl
        if not math.isfinite(loss.item()):
            raise Failure(f"the loss was not finite at update {self.step + 1}; {checkpoint.last_good(self.folder)}; lower lr")
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), CLIP)
        self.optimizer.step()
        self.step += 1
        return l1.item(), kl.item()

    def save(self) -> None:
        """Write a checkpoint, and the autoencoder in diffusers' format."""
        named = list(self.net.named_parameters())
        state = {"settings": asdict(self.settings), "model": dict(self.net.state_dict()), "optimizer": moments(self.optimizer, named)}
        checkpoint.save(self.folder, self.step, {**state, "seconds": self.seconds})
        self._publish()

    def _publish(self) -> None:
        spread = float(Autoencoder(self.net).encode(self.held_out).mean.std())
        # for diffusers' pipelines; `noiseclock encode` measures mean and std itself
        self.net.register_to_config(scaling_factor=1 / spread if spread else 1.0)
        publish(self.net, self.folder)


def publish(net: Any, folder: Path) -> None:
    """Write the network into `folder` in diffusers' format, each file atomically, config.json last, so that a config always has its weights."""
    new = folder / ".new"
    try:
        net.save_pretrained(str(new))
        for path in sorted(new.iterdir(), key=lambda path: path.name == "config.json"):
            os.replace(path, folder / path.name)
    except (OSError, SafetensorError) as error:
        raise Failure(f"could not write the autoencoder into {folder}: {error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
