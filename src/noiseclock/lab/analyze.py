"""The papers' measurements on a model of yours, as data and as figures.

    gradients        variance of the gradient and loss over time, through training, for each schedule     adaptive paper, Fig. 2
    interdependence  how the loss changes everywhere when only the low times are trained                   Fig. 4
    utility          which times help an objective and which hurt it, to first order                       ours
    densities        what each method samples or weights, as densities, through training                   Fig. 5
    vlb              as gradients, but trained with the VLB's weight; and the density that Adaptive learns Fig. 6
    areas            acceleration, deceleration and convergence of the process                             SpeeD, Fig. 1

For a recipe, `run` makes all of them from short trainings in FOLDER/trainings; for an existing training it makes all but vlb. Each is written to
FOLDER/NAME.json and FOLDER/NAME.png. An interrupted `run` can be called again: finished measurements are not repeated.

The short trainings keep no EMA, so their raw weights are measured. An opened checkpoint is measured with its EMA weights, the model that people use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from noiseclock.core.clock import Clock
from noiseclock.core.lookahead import TARGETS
from noiseclock.core.measure import gradient_variance, interdependence, loss_over_time, utility_over_time
from noiseclock.core.schedules import Array
from noiseclock.lab import analyze_figures, wording
from noiseclock.lab.data import batches, load
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import difference, making, records, write_json
from noiseclock.lab.methods import applied
from noiseclock.lab.recipes import FREE, Recipe
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.train import train
from noiseclock.lab.trained import Trained, opened

VERSION = 1
INTERVAL = (0.0, 0.2)  # the adaptive paper's t in [0, 200] of 1000
SCHEDULES = ("linear", "cosine", "quadratic")
METHODS = ("uniform", "min-snr", "p2", "logit-normal", "speed+change-aware", "adaptive", "lsm", "variance-optimal")
Found = TypeVar("Found")
Data = dict[str, dict[str, list[Any]]]  # name of the figure -> arguments of the function that draws it


# --- what is found ------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """The gradient and the loss of a model over time, both of the loss weighted by `weighting`.

    time, variance, error: (bins,) Tr Var of the gradient and its standard error. loss_time, loss: (times,).
    """

    schedule: str
    weighting: str
    step: int
    time: Array
    variance: Array
    error: Array
    loss_time: Array
    loss: Array


@dataclass(frozen=True)
class Coupling:
    """Losses at times (n,): `before`; `inside`, after updates at times in `interval` alone; `everywhere`, after as many updates at all times.

    Both start with a new optimiser, so `everywhere` is a control: it shows how much of a change comes from the optimiser's start.
    """

    schedule: str
    step: int
    updates: int
    interval: tuple[float, float]
    time: Array
    before: Array
    inside: Array
    everywhere: Array


@dataclass(frozen=True)
class Utility:
    """The relative decrease of each target by an update at one time alone, and its standard error: (targets, bins), over times (bins,)."""

    schedule: str
    weighting: str
    step: int
    targets: tuple[str, ...]
    time: Array
    utility: Array
    error: Array


@dataclass(frozen=True)
class Density:
    """How much a method trains each time at a given update, over times (n,) that cover [0, 1] evenly.

    p: the sampler's density. w: the weight of the loss, without importance correction. density: p·w, normalised; a weight of 2 counts like
    sampling twice as often. corrected: the loss also carries base/p, so the objective is base·w for every p.
    """

    method: str
    schedule: str
    learned: bool
    corrected: bool
    step: int
    time: Array
    p: Array
    w: Array
    density: Array


@dataclass(frozen=True)
class Process:
    """SpeeD's view of a schedule over its steps (T,): acceleration up to step `peak`, deceleration up to `converged`, then convergence.

    variance: Ψ_t of an increment. change: slope of 1-ᾱ per step. speed: slope of √(1-ᾱ) per step.
    """

    schedule: str
    peak: int
    converged: int
    variance: Array
    change: Array
    speed: Array


# --- measuring ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    stages: the updates after which a model is measured; the last is the length of each training. batch: images per update, at most. images: how
    many to measure on. times: at how many the loss is measured. bins, samples, pairs: see `gradient_variance`. probes: see `utility_over_time`.
    updates: how many train INTERVAL alone. methods: whose densities are shown. probing: settings of probing methods for such short trainings.
    """

    stages: tuple[int, ...]
    batch: int
    images: int = 512
    times: int = 50
    bins: int = 32
    samples: int = 64
    pairs: int = 4
    probes: int = 16
    updates: int = 100
    methods: tuple[str, ...] = METHODS
    probing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0] < 1 or any(a >= b for a, b in pairwise(self.stages)):
            raise Mistake(f"stages must be increasing numbers of updates, from 1 on, got {self.stages}")


def planned(recipe: Recipe, images: int, *, quick: bool = False) -> Plan:
    """The plan for a data set of `images` images: 20 epochs, as in the adaptive paper's Fig. 2, or the recipe's if fewer; quick: a first look."""
    if quick:
        often = ("adaptive:every=4,stride=50,queue=5", "variance-optimal:every=2,warmup=2")
        return Plan((8, 24), min(recipe.batch, 16), images=32, times=12, bins=6, samples=16, pairs=1, probes=4, updates=6, probing=often)
    last = min(recipe.updates, max(20, round(20 * images / recipe.batch)))
    stages = sorted({max(1, round(last * share)) for share in (0.05, 0.1, 0.25, 0.5, 1)})
    # at least 100 probes: where the paper's settings would give fewer, probe more often and on a coarser grid
    every = max(1, last // 100)
    return Plan(tuple(stages), recipe.batch, probing=() if last >= 4000 else (f"adaptive:every={every},stride=10",))


def profile(run: Trained, plan: Plan, *, weighted: bool = False, device: str = "cpu") -> Profile:
    """The variance of the gradient and the loss over time; weighted: by the run's weighting, else unweighted."""
    x0, cond = some(run, plan.images, device)
    with run.recipe.autocast(device):
        slope = gradient_variance(
            run.clock, run.net, x0, cond=cond, bins=plan.bins, samples=min(plan.samples, len(x0)), pairs=plan.pairs, weighted=weighted
        )
        curve = loss_over_time(run.clock, run.net, x0, cond=cond, times=plan.times)
    weighting = run.recipe.weighting if weighted else "constant"
    loss = curve.weighted if weighted else curve.loss
    return Profile(run.recipe.schedule, weighting, run.step, slope.time, slope.variance, slope.error, curve.time, loss)


def coupling(run: Trained, plan: Plan, *, device: str = "cpu") -> Coupling:
    """How training on INTERVAL alone changes the loss at all times; the model itself is left unchanged."""
    x0, cond = some(run, plan.images, device)
    optimizer, found = run.optimizer(), []
    for interval in (INTERVAL, (0.0, 1.0)):
        with run.recipe.autocast(device):
            found.append(
                interdependence(
                    run.clock, run.net.train(), optimizer, x0, cond=cond, interval=interval, updates=plan.updates, times=plan.times, batch=plan.batch
                )
            )
    run.net.eval()
    only, control = found
    return Coupling(run.recipe.schedule, run.step, plan.updates, INTERVAL, only.time, only.before, only.after, control.after)


def usefulness(run: Trained, plan: Plan, *, device: str = "cpu") -> Utility:
    """Which times help which objective, in the metric of the optimiser's state in the checkpoint."""
    x0, cond = some(run, plan.images, device)
    optimizer, targets = run.optimizer(), tuple(TARGETS) if run.recipe.steps else ("simple", "min-snr")
    found = [utility_over_time(run.clock, run.net, optimizer, x0, cond=cond, target=target, bins=plan.bins, probes=plan.probes) for target in targets]
    with run.recipe.autocast(device):
        curve = loss_over_time(run.clock, run.net, x0, cond=cond, times=plan.times)
    clock, time = run.clock, torch.as_tensor(curve.time)
    levels = [float((TARGETS[name]()(clock.schedule, time, clock.objective).numpy() * curve.loss).mean()) for name in targets]
    utility, error = (np.stack([getattr(each, name) / level for each, level in zip(found, levels, strict=True)]) for name in ("utility", "error"))
    return Utility(run.recipe.schedule, run.recipe.weighting, run.step, targets, found[0].time, utility, error)


def density(clock: Clock, method: str, schedule: str, step: int = 0) -> Density:
    """What a clock samples and weights now, at the steps of its schedule or at 1000 times."""
    curves = clock.plot_data()
    return _density(clock, method, schedule, step, curves.time, curves.p, curves.w)


def logged(run: Trained, method: str) -> list[Density]:
    """The densities of a training so far, from the validation records in its log, and its present density."""
    found, clock = [], run.clock
    for record in records(run.folder / "log.jsonl"):
        if record.get("kind") == "validation" and "density" in record and record["step"] < run.step:
            time, p = (np.array(record[name], dtype=np.float64) for name in ("density_time", "density"))
            w = clock.weighting(clock.schedule, torch.as_tensor(time), clock.objective).numpy()
            found.append(_density(clock, method, run.recipe.schedule, record["step"], time, p, w))
    return [*found, density(clock, method, run.recipe.schedule, run.step)]


def _density(clock: Clock, method: str, schedule: str, step: int, time: Array, p: Array, w: Array) -> Density:
    learned = clock.sampler.learns or clock.sampler.counts_updates
    weighted = p * w * (p.mean() / (p * w).mean())
    return Density(method, schedule, learned, clock.corrected, step, time, p, w, weighted)


def process(schedule: str, steps: int | None) -> Process:
    """The areas of a schedule, which is given as text (`lab/wording.py`) and number of steps."""
    made = wording.schedule(schedule, steps)
    return Process(schedule, *made.areas(), *made.increments())


def some(run: Trained, n: int, device: str) -> tuple[Tensor, Tensor | None]:
    """n training images (n, C, H, W), or all if there are fewer, and their labels (n,) if the model is conditional."""
    stream: Any = batches(run.data, min(n, len(run.data)), seed=run.recipe.seed, device=device)
    x0, labels = next(stream)
    stream.close()
    return x0, labels if run.recipe.conditional else None


# --- all of it ----------------------------------------------------------------------------------------------------------------------------


def run(
    recipe_name: str, recipe: Recipe, folder: str | Path, checkpoint: str | Path | None = None, quick: bool = False, *,
    plan: Plan | None = None, device: str | None = None, say: Callable[[str], None] = lambda text: None,
) -> list[Path]:  # fmt: skip
    """Measure, write and draw everything into `folder`; returns the figures.

    checkpoint: the folder of a training, which is then measured instead of new trainings, with its own recipe. quick: about a minute for digits.
    say: called with a line on what is being done.
    """
    folder, device = Path(folder), device or ("cuda" if torch.cuda.is_available() else "cpu")
    trained = None if checkpoint is None else opened(checkpoint, device=device)
    recipe = recipe if trained is None else trained.recipe
    plan = plan or planned(recipe, len(load(recipe.data, size=recipe.size) if trained is None else trained.data), quick=quick)
    _claim(folder, recipe_name, recipe, plan, None if trained is None else trained.step, device)
    found = from_recipe(recipe, folder, plan, device, say) if trained is None else from_checkpoint(trained, plan, device, say)
    written = []
    for name, data in found.items():
        write_json(folder / f"{name}.json", {kind: [as_json(each) for each in every] for kind, every in data.items()})
        written.append(analyze_figures.draw(name, data, folder / f"{name}.png"))
    return written


def from_recipe(recipe: Recipe, folder: Path, plan: Plan, device: str, say: Callable[[str], None]) -> Data:
    """The data of every figure, from trainings in FOLDER/trainings."""
    short = shortened(recipe, plan)
    schedules = tuple(dict.fromkeys((recipe.schedule, *SCHEDULES))) if recipe.steps else (recipe.schedule,)

    def trained(schedule: str, method: str, kind: type[Found], measure: Callable[[Trained], Found]) -> list[Found]:
        place = folder / "trainings" / f"{schedule}-{method}".replace(":", "-").replace(",", "-")
        settings = replace(applied(next((words for words in plan.probing if words.startswith(f"{method}:")), method), short), schedule=schedule)
        stages = plan.stages[-1:] if kind in (Coupling, Utility) else plan.stages
        return through(settings, place, stages, kind, measure, device=device, say=lambda text: say(f"{schedule} schedule, {method}: {text}"))

    def densities(schedule: str, method: str) -> list[Density]:
        now = density(replace(applied(method, short), schedule=schedule).clock(rank=0, world_size=1), method, schedule)
        if not now.learned:
            return [now]
        return trained(schedule, method, Density, lambda run: density(run.clock, method, schedule, run.step))

    plain, weighted = partial(profile, plan=plan, device=device), partial(profile, plan=plan, weighted=True, device=device)
    gradients = [each for schedule in schedules for each in trained(schedule, "uniform", Profile, plain)]
    coupled = trained(recipe.schedule, "uniform", Coupling, partial(coupling, plan=plan, device=device))
    useful = trained(recipe.schedule, "uniform", Utility, partial(usefulness, plan=plan, device=device))
    all_densities = [each for method in plan.methods for each in densities(recipe.schedule, method)]
    profiles = [each for schedule in schedules[:2] for each in trained(schedule, "vlb", Profile, weighted)]
    learned = [each for schedule in schedules[:2] for each in densities(schedule, "adaptive")]
    return {
        "gradients": {"profiles": gradients},
        "interdependence": {"couplings": coupled},
        "utility": {"utilities": useful},
        "densities": {"densities": all_densities},
        "vlb": {"profiles": profiles, "densities": learned},
        "areas": {"processes": [process(schedule, recipe.steps) for schedule in schedules]},
    }


def from_checkpoint(run: Trained, plan: Plan, device: str, say: Callable[[str], None]) -> Data:
    """The data of every figure that needs no new training."""
    recipe = run.recipe
    say(f"{run.folder} at update {run.step:,}: the gradient over time")
    gradients = [profile(run, plan, device=device)]
    say("interdependence")
    coupled = [coupling(run, plan, device=device)]
    say("which times help")
    useful = [usefulness(run, plan, device=device)]
    fixed = [density(applied(method, recipe).clock(rank=0, world_size=1), method, recipe.schedule) for method in plan.methods]
    own = logged(run, f"this training: {recipe.sampler}" + (f", {recipe.weighting}" if recipe.weighting != "constant" else ""))
    densities = [*own, *(each for each in fixed if not each.learned)]
    return {
        "gradients": {"profiles": gradients},
        "interdependence": {"couplings": coupled},
        "utility": {"utilities": useful},
        "densities": {"densities": densities},
        "areas": {"processes": [process(recipe.schedule, recipe.steps)]},
    }


def shortened(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe for the short trainings: no EMA, warmup of at most a quarter of the updates, no logs, validations or samples."""
    quiet: dict[str, Any] = {"log_every": 0, "validate_every": 0, "sample_every": 0, "track": ()}
    accumulate = recipe.accumulate if plan.batch % recipe.accumulate == 0 else 1
    warmup = min(recipe.warmup, plan.stages[-1] // 4)
    return replace(recipe, ema=0.0, warmup=warmup, batch=plan.batch, accumulate=accumulate, updates=plan.stages[-1], **quiet)


def through(
    recipe: Recipe, folder: Path, stages: Sequence[int], kind: type[Found], measure: Callable[[Trained], Found], *, device: str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> list[Found]:  # fmt: skip
    """Train to each stage and measure there. Earlier measurements are read from the training's folder.

    Training never continues past a stage that is not measured, so after an interruption the missing measurement can still be made.
    """
    found = []
    for stage in stages:
        file = folder / "measured" / f"{kind.__name__.lower()}-{stage:08d}.json"
        if not file.exists():
            say(f"update {stage:,} of {stages[-1]:,}")
            for _ in train(replace(recipe, updates=stage), folder, device=device):
                pass
            made = measure(opened(folder, device=device))
            file.parent.mkdir(exist_ok=True)
            write_json(file, as_json(made))
        found.append(from_json(kind, json.loads(file.read_text())))
    return found


# --- files --------------------------------------------------------------------------------------------------------------------------------


def as_json(found: Any) -> dict[str, Any]:
    """A dataclass of numbers, words and arrays as plain values."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in asdict(found).items()}


def from_json(kind: type[Found], data: Mapping[str, Any]) -> Found:
    """The inverse of `as_json`."""
    kinds = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    values = {name: np.array(value, dtype=np.float64) if kinds[name] == "Array" else value for name, value in data.items()}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _claim(folder: Path, name: str, recipe: Recipe, plan: Plan, step: int | None, device: str) -> None:
    """Write the settings to FOLDER/analysis.json; a Mistake if the folder holds another analysis."""
    config: dict[str, Any] = {"version": VERSION, "recipe": name, "checkpoint": step, "settings": recipe.settings(), "plan": asdict(plan)}
    file = folder / "analysis.json"
    if file.exists():
        try:
            both = _fixed(config), _fixed(json.loads(file.read_text()))
        except (KeyError, TypeError, ValueError) as error:
            raise Mistake(f"{file} is damaged; remove it, or choose another folder") from error
        if changes := difference(*both, where=f"in {file.name}"):
            raise Mistake(f"{folder} holds another analysis; choose another folder, or make the settings alike:\n{changes}")
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(file, {**config, "made with": surroundings(torch.device(device), 1)})


def _fixed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same for two analyses to share a folder, as one flat mapping."""
    settings = {name: config["settings"][name] for name in config["settings"] if name not in FREE}
    return {**settings, **config["plan"], "recipe": config["recipe"], "checkpoint": config["checkpoint"]}
