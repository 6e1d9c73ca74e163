"""The command line: `noiseclock train | sample | evaluate | export | compare | report | analyze | watch | recipes | doctor`, and the commands for
latents and captions.

Exit status: 0 for success, 2 for a mistake of the user, 1 for a run that failed, 130 after Ctrl-C and 143 after SIGTERM. Each command imports what
it needs, so that --help does not import diffusers.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro
from rich.console import Console

from noiseclock.lab.errors import Failure, Mistake, choose

if TYPE_CHECKING:
    from noiseclock.lab.recipes import Recipe
    from noiseclock.lab.train import Record

USAGE = """noiseclock: which noise level a diffusion model trains on next, and whether that pays

  noiseclock recipes                     list the recipes
  noiseclock train RECIPE [options]      train a recipe; run it again to go on
  noiseclock sample FOLDER [options]     sample pictures from a training
  noiseclock embed PICTURES [options]    embed captions with a text encoder, to train on them
  noiseclock evaluate FOLDER [options]   measure FID or Fréchet distance, KID, precision, recall, bits per dimension, loss by noise level
  noiseclock export FOLDER OUT           write a folder that diffusers' DiffusionPipeline.from_pretrained loads
  noiseclock watch FOLDER                follow a training in a browser

  noiseclock compare RECIPE [options]    train every method with several seeds, and show what the choice gains
  noiseclock report RESULTS [options]    write what a comparison found as one page (compare does so too)
  noiseclock analyze RECIPE [options]    make the papers' measurements: gradient variance, interdependence, densities through training

  noiseclock train-autoencoder DATA      train a small autoencoder on your pictures
  noiseclock encode DATA [options]       encode pictures into latents once, to train on with --data latents:FOLDER

  noiseclock doctor                      show what this machine has, what is missing and how to get it

Add --help to any of them for its options."""

console = Console(highlight=False, markup=False, soft_wrap=True)  # no markup: a path may contain square brackets
errors = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
NEEDS_RECIPE = "`noiseclock recipes` lists the recipes; `noiseclock train digits --help` shows the options of one."
Options = TypeVar("Options")
Folder = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="FOLDER", help="folder of a training")]


@dataclass(frozen=True)
class Train:
    """Train a recipe, or resume its training. Every setting of the recipe is an option."""

    recipe: tyro.conf.OmitArgPrefixes[Any]
    out: str = ""
    """folder of the run; runs/RECIPE unless given"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""
    shard: bool = False
    """spread the model over all processes (FSDP2) instead of copying it (DDP)"""
    dry_run: bool = False
    """print data, model and settings without training"""


@dataclass(frozen=True)
class Sample:
    """Sample pictures from the averaged weights of a training."""

    folder: Folder
    out: str = "samples.png"
    """.png for a grid, .npz for an array, else a folder of PNG files"""
    count: int = 64
    """number of pictures"""
    label: tuple[int, ...] = ()
    """classes, as numbers, used in turn; all classes unless given"""
    prompt: tuple[str, ...] = ()
    """captions, used in turn; those of held-out images unless given"""
    encoder: str = ""
    """folder of the text encoder; needed for a prompt"""
    solver: str | None = None
    """ddpm, ddim (or euler), heun or dpm++; e.g. euler:shift=3 on flow, ddim:sigma_max=80 on cosine; the recipe's unless given"""
    steps: int | None = None
    """steps of the solver; the recipe's unless given"""
    guidance: float = 1.0
    """scale of classifier-free guidance, for a conditional model; 1 for none"""
    seed: int = 0
    """seed of the noise"""
    batch: int = 256
    """pictures per batch"""
    step: int | None = None
    """update of the checkpoint; the newest unless given"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


@dataclass(frozen=True)
class Embed:
    """Embed the captions in PICTURES/captions.jsonl with a text encoder; train on them with --data captions:OUT --conditional."""

    pictures: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PICTURES", help="folder of pictures, with captions.jsonl in it")]
    encoder: str
    """folder of a CLIP text model or a T5 encoder, with its tokenizer"""
    out: str
    """folder for the embedded captions"""
    length: int | None = None
    """tokens per caption; the encoder's maximum unless given"""
    batch: int = 64
    """captions per forward pass"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


@dataclass(frozen=True)
class Evaluate:
    """Evaluate the averaged weights of a training; results are printed, and written to FOLDER/evaluations."""

    folder: Folder
    samples: int = 10_000
    """samples for FID or Fréchet distance, KID, precision and recall; 0 leaves these out"""
    reference: str = "train"
    """split of the data to compare samples with"""
    solver: str | None = None
    """ddpm, ddim (or euler), heun or dpm++; e.g. euler:shift=3 on flow, ddim:sigma_max=80 on cosine; the recipe's unless given"""
    steps: int | None = None
    """steps of the solver; the recipe's unless given"""
    guidance: float = 1.0
    """scale of classifier-free guidance, for a conditional model; 1 for none"""
    vlb_images: int = 500
    """held-out images for bits per dimension; 0 leaves these out"""
    vlb_steps: int | None = 100
    """steps of the variational bound evaluated per image; None for all"""
    clip: str = ""
    """folder of a CLIP model, for the CLIP score of a model trained on captions"""
    clip_samples: int = 1000
    """pictures for the CLIP score, from captions of held-out images"""
    resize: str = "pytorch"
    """how pictures are resized for Inception: pytorch, as in pytorch-fid, or tensorflow"""
    seed: int = 0
    """seed of the samples"""
    batch: int = 256
    """pictures per batch"""
    step: int | None = None
    """update of the checkpoint; the newest unless given"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


@dataclass(frozen=True)
class Export:
    """Write the averaged weights as a diffusers pipeline."""

    folder: Folder
    out: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="OUT", help="folder to write")]
    step: int | None = None
    """update of the checkpoint; the newest unless given"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        console.print(USAGE)
        return 0 if argv else 2
    if argv[0] == "--version":
        console.print(f"noiseclock {version('noiseclock')}")
        return 0
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return COMMANDS[choose("command", argv[0], COMMANDS)](argv[1:])
        except Mistake as error:
            return _say(f"{error}", 2)
        except Failure as error:
            return _say(f"{error}", 1)
        except KeyboardInterrupt:
            return _say("stopped; run the same command again to go on", 130)
        except SystemExit as end:
            if end.code != 143:
                raise
            return _say("stopped by SIGTERM; run the same command again to go on", 143)


def train(argv: list[str]) -> int:
    """`noiseclock train`."""
    if argv[:1] in (["-h"], ["--help"]):
        console.print(f"usage: noiseclock train RECIPE [options]\n\n{Train.__doc__} {NEEDS_RECIPE}")
        return 0
    if not argv or argv[0].startswith("-"):
        raise Mistake(f"noiseclock train needs a recipe. {NEEDS_RECIPE}")
    from noiseclock.lab.recipes import entry_of, recipe

    name = argv[0]
    options = _parsed(Train, argv[1:], f"noiseclock train {name}", default=Train(entry_of(name).recipe))
    recipe(name)  # after parsing, so that --help works even for a recipe that cannot run
    folder = Path(options.out or f"runs/{name}")
    _check_device(options.device)
    if options.dry_run:
        return _dry_run(options.recipe, folder)
    from noiseclock.lab.train import train as train_recipe

    updates = train_recipe(options.recipe, folder, device=options.device, shard=options.shard)
    main_process = int(os.environ.get("RANK", "0")) == 0
    if main_process:
        _report_training(_followed(updates, options.recipe), options.recipe, folder)
    else:
        for _ in updates:
            pass
    return 0


def _dry_run(recipe: Recipe, folder: Path) -> int:
    import torch

    from noiseclock.lab.built import network
    from noiseclock.lab.data import load
    from noiseclock.lab.models import count

    data, clock = load(recipe.data, size=recipe.size), recipe.clock()
    with torch.device("meta"):  # no memory: parameters are only counted
        parameters = count(network(recipe, data, clock))
    shape = "x".join(str(n) for n in data.shape)
    console.print(f"folder      {folder}")
    console.print(f"data        {data.name}, {len(data):,} images of {shape}" + (f", {data.classes} classes" if data.classes else ""))
    console.print(f"model       {recipe.model}, {parameters:,} parameters")
    console.print(f"clock       {clock}")
    console.print(f"training    {recipe.updates:,} updates of {recipe.batch} images, {recipe.updates * recipe.batch / len(data):,.1f} epochs")
    for name, value in recipe.settings().items():
        console.print(f"  {name:<15} {value}")
    return 0


def _followed(updates: Iterable[Record], recipe: Recipe) -> Record | None:
    """Show the progress of a training: a bar on a terminal, else about 20 lines. Returns the last record."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    last, first, mean, seen = None, None, 0.0, 0
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal truncates this column only
    columns = (BarColumn(10), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}", table_column=rest))
    lines = max(recipe.updates // 20, 1)
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as bar:
        task = bar.add_task("starting", total=recipe.updates)
        for last in updates:
            if first is None:
                first = last
                bar.reset(task, completed=last.step)  # updates of an earlier run must not count in the speed
            if math.isfinite(last.loss):  # updates with another loss were skipped
                seen += 1
                mean += (last.loss - mean) * max(0.02, 1 / seen)
            seconds, images = last.seconds - first.seconds, last.images - first.images
            speed = f", {images / seconds:,.0f} images/s" if seconds > 0 else ""
            learned = f", {last.sampler}" if last.sampler else ""
            lost = f", {last.skipped} updates skipped" if last.skipped else ""
            text = f"loss {mean:.4f}{speed}{learned}{lost}"
            bar.update(task, completed=last.step, description=text)
            if not console.is_terminal and (last.step % lines == 0 or last is first):
                console.print(f"update {last.step:,} of {recipe.updates:,}: {text}")
    return last


def _report_training(last: Record | None, recipe: Recipe, folder: Path) -> None:
    if last is None:
        console.print(already(folder))
        return
    console.print(f"{last.step:,} updates, {last.images:,} images, {last.seconds / 60:.1f} minutes of training")
    console.print(f"{folder} holds checkpoints, samples and log.jsonl")
    console.print(f"next: noiseclock evaluate {folder}")


def already(folder: Path) -> str:
    """What is said of a training that has made all updates, or more, that were asked for."""
    from noiseclock.lab import checkpoint

    return f"{folder} has already made {max(checkpoint.steps(folder)):,} updates; give --updates a larger number to go on"


def sample(argv: list[str]) -> int:
    """`noiseclock sample`."""
    options = _parsed(Sample, argv, "noiseclock sample")
    from noiseclock.lab import pictures
    from noiseclock.lab.built import sampled
    from noiseclock.lab.trained import opened

    device, out = _check_device(options.device), Path(options.out)
    pictures.check_place(out)  # before, not after, hours of sampling
    run = opened(options.folder, step=options.step, device=device, images=False)
    if options.encoder and not options.prompt:
        raise Mistake('--encoder needs a prompt; give one as --prompt "a red circle"')
    asked = _asked(options, run.net, device)
    with _bar("sampling", options.count * (options.steps or run.recipe.solver_steps)) as progress:
        images = sampled(
            run.net, run.recipe, run.clock, run.data, options.count, seed=options.seed, guidance=options.guidance, solver=options.solver,
            steps=options.steps, batch=options.batch, device=device, progress=progress, asked=asked,
        )  # fmt: skip
    pictures.save(images, options.out)
    console.print(f"{options.out}: {options.count:,} samples of {options.folder} at update {run.step:,}")
    return 0


def _asked(options: Sample, net: Any, device: str) -> Any:
    """The classes (m,) or embedded captions (m, L, D) to sample; None for the default: all classes, or the captions of held-out images."""
    import torch

    from noiseclock.lab.captions import prompted

    if options.prompt and options.label:
        raise Mistake("a model takes classes or captions, not both; give --label or --prompt")
    if (asked := len(options.prompt or options.label)) > options.count:
        raise Mistake(f"{asked} classes or captions need at least as many pictures, got {options.count}; raise --count")
    if options.prompt:
        return prompted(net, options.prompt, options.encoder, device=device)
    if not options.label:
        return None
    if not isinstance(net.null, int):
        raise Mistake("this model was not trained on classes, so it takes no label; leave --label out")
    if not all(0 <= label < net.null for label in options.label):
        raise Mistake(f"this model takes the labels 0 to {net.null - 1}, got {' '.join(map(str, options.label))}")
    return torch.tensor(options.label)


def embed(argv: list[str]) -> int:
    """`noiseclock embed`."""
    options = _parsed(Embed, argv, "noiseclock embed")
    from noiseclock.lab.captions import CAPTIONS, embed as write, read_captions

    device = _check_device(options.device)
    with _bar("embedding", len(read_captions(Path(options.pictures).expanduser() / CAPTIONS))) as progress:
        count = write(options.pictures, options.encoder, options.out, length=options.length, batch=options.batch, device=device, progress=progress)
    console.print(f"{options.out}: {count:,} embedded captions of {options.pictures}")
    console.print(f"next: noiseclock train RECIPE --data captions:{options.out} --conditional --model uvit")
    return 0


def evaluate(argv: list[str]) -> int:
    """`noiseclock evaluate`."""
    options = _parsed(Evaluate, argv, "noiseclock evaluate")
    from noiseclock.lab.trained import evaluated, opened

    device = _check_device(options.device)
    run = opened(options.folder, step=options.step, device=device)
    steps = options.steps or run.recipe.solver_steps
    drawn = max(options.samples, options.clip_samples if options.clip else 0)
    with _bar("sampling", drawn * steps) as progress:
        found = evaluated(
            run, samples=options.samples, reference_split=options.reference, solver=options.solver, steps=options.steps, guidance=options.guidance,
            vlb_images=options.vlb_images, vlb_steps=options.vlb_steps, resize=options.resize, seed=options.seed, batch=options.batch,
            device=device, progress=progress, clip=options.clip, clip_samples=options.clip_samples,
        )  # fmt: skip
    console.print(found.text())
    console.print(f"written to {found.write(Path(options.folder))}")
    return 0


def export(argv: list[str]) -> int:
    """`noiseclock export`."""
    options = _parsed(Export, argv, "noiseclock export")
    from noiseclock.lab.export import export as write
    from noiseclock.lab.latents import Latents
    from noiseclock.lab.trained import opened

    run = opened(options.folder, step=options.step, images=False)
    if isinstance(run.data, Latents):
        raise Mistake("diffusers has no pipeline for a model of latents that are scaled by channel; use noiseclock sample for its pictures")
    write(run.net, run.clock.schedule, run.clock.objective, options.out, run.recipe.variance)
    console.print(f"{options.out}: a diffusers pipeline of {options.folder} at update {run.step:,}")
    return 0


def recipes(argv: list[str]) -> int:
    """`noiseclock recipes`."""
    _parsed(Nothing, argv, "noiseclock recipes")
    from rich.table import Table
    from rich.text import Text

    from noiseclock.lab.recipes import RECIPES

    table = Table.grid(padding=(0, 2))
    for name, entry in RECIPES.items():
        lines = [(f"{entry.about}\n", ""), (f"needs {entry.needs}; {entry.cost}", "dim")]
        table.add_row(Text(name, "bold", no_wrap=True), Text.assemble(*lines))
    console.print(table)
    return 0


def doctor(argv: list[str]) -> int:
    """`noiseclock doctor`."""
    _parsed(Nothing, argv, "noiseclock doctor")
    from noiseclock.lab.doctor import examine, healthy, render

    checks = examine()
    console.print(render(checks))
    return 0 if healthy(checks) else 1


@dataclass(frozen=True)
class Nothing:
    """This command has no options."""


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "export": export,
    "embed": embed,
    "recipes": recipes,
    "doctor": doctor,
    "compare": lambda argv: _results().compare(argv),
    "report": lambda argv: _results().report(argv),
    "analyze": lambda argv: _results().analyze(argv),
    "watch": lambda argv: _results().watch(argv),
    "train-autoencoder": lambda argv: _latents().train_autoencoder(argv),
    "encode": lambda argv: _latents().encode(argv),
}


def _results() -> ModuleType:
    """The module of the commands about comparisons."""
    return import_module("noiseclock.cli_results")


def _latents() -> ModuleType:
    """The module of the commands about latents."""
    return import_module("noiseclock.cli_latents")


def _parsed(kind: type[Options], argv: list[str], program: str, default: Any = None) -> Options:
    options: Options = tyro.cli(kind, args=argv, prog=program, description=kind.__doc__, **({} if default is None else {"default": default}))
    return options


def _check_device(name: str | None) -> str:
    import torch

    found = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(found)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise Mistake(f"unknown device {found!r}; known: cpu, cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Mistake("there is no CUDA device here; leave --device out, or say --device cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        raise Mistake(f"there is no {found} here, where CUDA devices end with cuda:{count - 1}; leave --device out, or name one of them")
    return found


class _bar:
    """A progress bar on a terminal; entering it gives a function that takes the amount done."""

    def __init__(self, text: str, total: int) -> None:
        from rich.progress import Progress

        self._bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task(text, total=total)

    def __enter__(self) -> Callable[..., None]:
        self._bar.start()
        return lambda done, total=None: self._bar.update(self._task, completed=done, total=total)  # with None, rich keeps the total

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _say(message: str, status: int) -> int:
    errors.print(f"noiseclock: {message}")
    return status


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    errors.print(f"warning: {message}")


if __name__ == "__main__":
    sys.exit(main())
