"""Open the checkpoint of a training, to sample from it and evaluate it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from noiseclock.core.clock import Clock
from noiseclock.core.measure import LossOverTime
from noiseclock.core.schedules import Discrete
from noiseclock.lab import checkpoint
from noiseclock.lab.autoencoder_settings import refuse_autoencoder
from noiseclock.lab.built import network, optimizer_for, placed, sampled, told_held_out
from noiseclock.lab.captions import refuse_other_encoder
from noiseclock.lab.clip import CLIP, ClipScore, clip_score
from noiseclock.lab.data import Data, load, pictured, refuse_other_latents, without_images
from noiseclock.lab.errors import Failure, Mistake, choose
from noiseclock.lab.evaluate import CURVE, BitsPerDim, Scores, bits_per_dim, compare_images, loss_curve, network_for
from noiseclock.lab.folder import write_json
from noiseclock.lab.inception import RESIZES
from noiseclock.lab.latents import Latents
from noiseclock.lab.moments import by_size, load_moments
from noiseclock.lab.recipes import Recipe, completed


class Trained(NamedTuple):
    """A training at a checkpoint: its recipe, the network with averaged weights in evaluation mode, the clock, the training data, the number of
    updates, and the folder of the run."""

    recipe: Recipe
    net: Any
    clock: Clock
    data: Data
    step: int
    folder: Path

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser of this network, with its state from the checkpoint."""
        _, state = checkpoint.load(self.folder, self.step)
        found = optimizer_for(self.recipe, list(by_size(self.net).values()))
        load_moments(found, list(self.net.named_parameters()), state["optimizer"]["state"])
        return found


def opened(folder: str | Path, *, step: int | None = None, device: str | torch.device = "cpu", images: bool = True) -> Trained:
    """The training in `folder` at its newest checkpoint, or at that of `step`. images: False does not load the training images, if the checkpoint
    has all that sampling needs."""
    if not checkpoint.steps(folder):
        raise Mistake(f"{folder} holds no checkpoint; give the folder of a training that has saved one")
    step, state = checkpoint.load(folder, step)
    refuse_autoencoder(state["settings"], str(folder))
    recipe = recipe_of(state["settings"])
    outline = state.get("data") or {}  # None in checkpoints of earlier versions
    data = load(recipe.data, size=recipe.size) if images or "shape" not in outline else without_images(outline)
    refuse_other_latents(data, outline)
    clock = recipe.clock(rank=0, world_size=1)
    clock.load_state_dict(state["ranks"][0]["clock"])
    with torch.random.fork_rng(devices=[]):  # must not change the random numbers of a training in the same process
        net = network(recipe, data, clock)
    refuse_other_encoder(net, state["model"])
    net.load_state_dict({**state["model"], **state["ema"]})
    return Trained(recipe, placed(net, device).eval(), clock, data, step, Path(folder))


def recipe_of(settings: Mapping[str, Any]) -> Recipe:
    """The recipe with the settings of a config.json or checkpoint, where tuples are lists."""
    settings = completed(settings)
    if unknown := settings.keys() - {f.name for f in fields(Recipe)}:
        raise Mistake(f"config.json has settings that this version does not know: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    return Recipe(**values)


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one checkpoint; None for a metric that was left out. guidance, seed: of the samples. no_bits: why `bits` is undefined."""

    step: int
    scores: Scores | None
    bits: BitsPerDim | None
    curve: LossOverTime
    held_out: int
    guidance: float
    seed: int
    no_bits: str = ""
    clip: ClipScore | None = None

    def text(self) -> str:
        """All results as text, each with the data that it was measured on."""
        guided = self.guidance != 1 and (self.scores is not None or self.clip is not None)
        lines = [f"averaged weights at update {self.step:,}" + (f", samples with guidance {self.guidance:g}" if guided else "")]
        lines += [str(part) for part in (self.scores, self.clip, self.bits) if part is not None]
        if self.no_bits:
            lines.append(f"no bits per dimension: {self.no_bits}")
        lines.append(f"loss by noise level ({self.held_out} held-out images, fixed noise; time from clean to noise)")
        for times, losses in zip(np.array_split(self.curve.time, 10), np.array_split(self.curve.loss, 10), strict=True):
            lines.append(f"  {times[0]:.2f} to {times[-1]:.2f}   {losses.mean():.5f}")
        return "\n".join(lines)

    def write(self, folder: Path) -> Path:
        """Write it to FOLDER/evaluations; evaluations that cannot be compared get different names. Returns the file."""
        parts = [f"step-{self.step:08d}"]
        if (scores := self.scores) is not None:
            parts += [f"{scores.solver}-{scores.steps}-{scores.count}", scores.reference.replace("/", "_").replace(" ", "-")]
            parts += [scores.resize] if scores.resize else []
        if self.clip is not None:
            parts.append(f"clip-{self.clip.known_by}-{self.clip.solver}-{self.clip.steps}-{self.clip.count}")
        if self.scores is not None or self.clip is not None:
            parts += [f"guidance-{self.guidance:g}"] if self.guidance != 1 else []
            parts += [f"seed-{self.seed}"] if self.seed else []
        if self.bits is not None:
            parts.append(f"vlb-{self.bits.count}-{self.bits.steps}")
        target = folder / "evaluations" / ("-".join(parts) + ".json")
        try:
            target.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise Failure(f"could not make {target.parent}: {error.strerror}") from error
        curve = {"time": self.curve.time.tolist(), "loss": self.curve.loss.tolist(), "images": self.held_out}
        both = {name: part and asdict(part) for name, part in {"scores": self.scores, "bits": self.bits, "clip": self.clip}.items()}
        write_json(target, {"step": self.step, "guidance": self.guidance, "seed": self.seed, "curve": curve, **both})
        return target


def evaluated(
    run: Trained,
    *,
    samples: int = 10_000,
    reference_split: str = "train",
    solver: str | None = None,
    steps: int | None = None,
    guidance: float = 1.0,
    vlb_images: int = 500,
    vlb_steps: int | None = 100,
    resize: str = "pytorch",
    seed: int = 0,
    batch: int = 256,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
    clip: str = "",
    clip_samples: int = 1000,
) -> Evaluation:
    """Evaluate a training: distances of `samples` generated pictures from a split of its data, bits per dimension and loss on held-out images.

    The variational bound uses `vlb_steps` steps for each of `vlb_images` images, all steps if None. It needs a discrete schedule and pixels, and is
    left out otherwise. clip: the folder of a CLIP model, for the CLIP score of `clip_samples` pictures; the model must be trained on captions.
    """
    if min(samples, vlb_images) < 0:
        raise Mistake(f"samples and vlb_images must not be negative, got {samples} and {vlb_images}; 0 leaves them out")
    if batch < 1 or (vlb_images and vlb_steps is not None and vlb_steps < 2):
        raise Mistake(f"batch must be at least 1 and vlb_steps at least 2, got {batch} and {vlb_steps}")
    choose("resize", resize, RESIZES)
    recipe = run.recipe
    held_out = load(recipe.data, split="test", size=recipe.size)
    told = told_held_out(recipe, held_out)
    scores = bits = fit = None
    judge = _judge(run, clip, clip_samples, device) if clip else None
    drawn = max(samples, clip_samples if judge else 0)
    if samples:
        data = pictured(run.data if reference_split == "train" else load(recipe.data, split=reference_split, size=recipe.size))
        network_seeing = network_for(data.name, resize=resize)  # before sampling, which takes long, because its weights may be missing
    if drawn:
        solver, steps = solver or recipe.solver, recipe.solver_steps if steps is None else steps
        images = sampled(
            run.net, recipe, run.clock, run.data, drawn, seed=seed, guidance=guidance, solver=solver, steps=steps, batch=batch, device=device,
            progress=progress,
        )  # fmt: skip
        if samples:
            scores = compare_images(images[:samples], data, network=network_seeing, solver=solver, steps=steps, batch=batch, device=device)
        if judge and run.data.texts is not None:
            fit = clip_score(images[:clip_samples], run.data.texts.held_out_words(clip_samples), judge, solver=solver, steps=steps)
    no_bits = ""
    if isinstance(held_out, Latents):
        no_bits = "they are defined for pixels, and this is a model of latents"
    elif not isinstance(run.clock.schedule, Discrete):
        no_bits = "they are those of a chain of discrete steps, and this schedule is continuous"
    elif vlb_images:
        bits = bits_per_dim(
            run.net, run.clock.schedule, run.clock.objective, held_out, n=vlb_images, batch=batch, steps=vlb_steps, variance=recipe.variance,
            conditional=told, device=device,
        )  # fmt: skip
    curve = loss_curve(run.clock, run.net, held_out, batch=batch, conditional=told, device=device)
    return Evaluation(run.step, scores, bits, curve, min(CURVE, len(held_out)), guidance, seed, no_bits, fit)


def _judge(run: Trained, folder: str, samples: int, device: str | torch.device) -> CLIP:
    if not run.recipe.conditional or run.data.texts is None:
        raise Mistake("a CLIP score compares pictures with their captions, but this model was trained without captions; leave --clip out")
    if samples < 1:
        raise Mistake(f"a CLIP score needs at least one picture, got clip_samples={samples}")
    return CLIP(folder, device=device)
