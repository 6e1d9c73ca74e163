"""Train every method, seed and learning rate under one recipe, into one folder of results.

    plan = Plan("digits", recipe("digits"), ("uniform", "min-snr", "adaptive"), seeds=(0, 1, 2), lrs=(1e-3,), every=500)
    for event in compare(plan, "results/digits"): ...

A cell is one training: a method, a learning rate and a seed. Cells of one seed see the same images in the same order and start from the same
weights. A finished cell is never run again; a killed cell resumes from its checkpoint. Several processes, even on several machines, may work on
one folder at the same time: the process that runs a cell locks it. `lab/results.py` describes the layout of the folder.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import re
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from noiseclock.core.measure import utility_over_time
from noiseclock.core.schedules import Discrete
from noiseclock.lab import checkpoint, classifier
from noiseclock.lab.built import sampled, told_held_out
from noiseclock.lab.data import cpus, head, load, load_images, pictured
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.evaluate import bits_per_dim, compare_images, network_for
from noiseclock.lab.folder import Busy, Log, difference, lock, making, plain, records, refuse_encoded, refuse_training, write_json
from noiseclock.lab.interrupt import listening
from noiseclock.lab.latents import Latents
from noiseclock.lab.methods import applied, values
from noiseclock.lab.recipes import Recipe, completed, entry_of
from noiseclock.lab.results import OF_THE_CELL, THEN, VERSION
from noiseclock.lab.sources import refuse_among
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.train import Record, train
from noiseclock.lab.trained import opened

LEAST_SAMPLES = 4  # precision and recall use the third nearest neighbour
USEFUL_IMAGES, USEFUL_BINS, USEFUL_PROBES = 128, 16, 8  # for `utility_over_time` at the end of a training
GROWS = ("methods", "seeds", "lrs")  # a comparison may be extended by more of these


@dataclass(frozen=True)
class Plan:
    """What is compared, and how it is evaluated.

    recipe: its name. base: the recipe itself; the cells replace its sampler, weighting, learning rate and seed. methods: the first is the
    baseline. every: updates between evaluations. samples: pictures per evaluation, 0 for none. vlb_images: images for bits per dimension, 0 for
    none; for latents, bits per dimension are never computed.
    """

    recipe: str
    base: Recipe
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    lrs: tuple[float, ...]
    every: int
    samples: int = 1000
    vlb_images: int = 100
    vlb_steps: int = 50

    def __post_init__(self) -> None:
        for name in GROWS:
            values = getattr(self, name)
            if not values:
                raise Mistake(f"the {name} of a comparison must not be empty")
            if len(set(values)) < len(values):
                raise Mistake(f"the {name} of a comparison must differ, got {', '.join(map(str, values))}")
        for name in ("samples", "vlb_images"):
            if getattr(self, name) < 0:
                raise Mistake(f"{name} must not be negative, got {getattr(self, name)}")
        if 0 < self.samples < LEAST_SAMPLES:
            raise Mistake(f"samples must be 0, or at least {LEAST_SAMPLES} to say anything about them, got {self.samples}")
        if self.every < 1 or self.base.updates % self.every:
            raise Mistake(f"every must divide the {self.base.updates} updates, so that the last one is evaluated, got {self.every}")
        for cell in self.cells():
            cell.recipe(self)  # raises a Mistake if the recipe of a cell is invalid
        self.refuse_twins(self.methods)

    def refuse_twins(self, methods: Sequence[str]) -> None:
        """Raise if two of these names mean the same method: it would be trained twice, and its results counted as independent evidence."""
        found: dict[str, str] = {}
        for method in methods:
            first = found.setdefault(repr(applied(method, self.base).clock()), method)
            if first != method:
                raise Mistake(f"{first} and {method} are the same method; name it once, as {first}")

    def cells(self) -> list[Cell]:
        """All cells in the order in which they run: one seed after the other, so that an interrupted comparison still compares all methods."""
        return [Cell(method, lr, seed) for seed, lr, method in product(self.seeds, self.lrs, self.methods)]

    def config(self) -> dict[str, Any]:
        """The content of compare.json, except "made with". changed: the settings that differ from the named recipe. options: see `methods.values`."""
        mine = {name: value for name, value in asdict(self).items() if name not in ("base", "recipe")}
        settings, usual = self.base.settings(), entry_of(self.recipe).recipe.settings()
        changed = [name for name, value in settings.items() if value != usual[name] and name not in OF_THE_CELL]
        options = {method: values(method, self.base) for method in self.methods}
        mine |= {"changed": changed, "options": options, "baseline": self.methods[0]}
        return {"version": VERSION, "recipe": self.recipe, "settings": settings, **mine}


class Cell(NamedTuple):
    """One training."""

    method: str
    lr: float
    seed: int

    @property
    def slug(self) -> str:
        """The name of the cell's folder: readable, of safe characters, and different for every cell."""
        readable = re.sub(r"[^A-Za-z0-9.+@-]+", "_", self.method)[:60]
        return f"{readable}-{sha256(self.method.encode()).hexdigest()[:6]}--lr-{self.lr}--seed-{self.seed}"

    def recipe(self, plan: Plan) -> Recipe:
        """The recipe that this cell trains."""
        mine = applied(self.method, plan.base)
        every = plan.every
        return replace(mine, lr=self.lr, seed=self.seed, track=(), save_every=every, validate_every=every, sample_every=every)


class Event(NamedTuple):
    """Something that happened in a cell: an update, an evaluation or a failure; none of these if the cell was already finished."""

    cell: Cell
    record: Record | None = None
    point: dict[str, Any] | None = None
    failure: str = ""


def compare(
    plan: Plan, folder: str | Path, *, part: tuple[int, int] = (0, 1), device: str | None = None, until: int | None = None, jobs: int = 1
) -> Iterator[Event]:
    """Run every cell that is not finished and that no other process is running; yields an Event for all that happens.

    part: (i, n) takes every n-th cell only, for machines that share no disk; `merge` joins their folders afterwards. until: stop each cell after
    the evaluation at that update. To continue the promising methods, call it again with these, without `until` or with a later one. jobs: how many
    such processes share this machine, for the record.
    """
    folder, until = Path(folder), _until(plan, until)
    begin(plan, folder, device)
    with listening() as wish:  # for a signal that comes when a cell's training has ended and no longer reacts to it
        for cell in plan.cells()[part[0] :: part[1]]:
            try:
                with lock(folder / "locks" / cell.slug):
                    yield from run(plan, cell, folder / "cells" / cell.slug, device, until, jobs)
            except Busy:
                continue
            except Failure as error:  # the other cells continue
                yield Event(cell, failure=str(error))
            wish.grant()


def _until(plan: Plan, until: int | None) -> int:
    last = plan.base.updates if until is None else until
    if last < 1 or last > plan.base.updates or last % plan.every:
        raise Mistake(f"until must be an update that is evaluated, every {plan.every:,} updates up to {plan.base.updates:,}, got {last:,}")
    return last


def by_workers(
    plan: Plan, folder: str | Path, jobs: int, *, part: tuple[int, int] = (0, 1), device: str | None = None, until: int | None = None
) -> Iterator[Event]:
    """`compare` with `jobs` parallel processes, which share the CPU cores: a small network does not use more than one core well."""
    if jobs == 1:
        yield from compare(plan, folder, part=part, device=device, until=until)
        return
    _until(plan, until)
    begin(plan, Path(folder), device)
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = max(cpus() // jobs, 1)
    workers = [context.Process(target=_work, args=(events, threads, plan, folder, part, device, until, jobs)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    with ExitStack() as stack:
        wish = stack.enter_context(listening())
        wish.patient = True  # the workers may have updates that are not saved yet
        stack.callback(_end, workers)
        working = jobs
        while working:
            wish.grant()
            if lost := [worker.exitcode for worker in workers if worker.exitcode]:
                reason = ", perhaps for want of memory" if lost[0] == -signal.SIGKILL else ""
                raise Failure(f"a worker ended with status {lost[0]}{reason}; run the same command again to go on")
            try:
                event = events.get(timeout=1)
            except queue.Empty:
                continue
            if isinstance(event, Warning):
                warnings.warn(event, stacklevel=1)
            elif isinstance(event, Exception):
                raise event
            elif event is None:
                working -= 1
            else:
                yield event


def _end(workers: Sequence[Any]) -> None:
    for worker in workers:
        if worker.is_alive():
            worker.terminate()  # the worker saves a checkpoint and stops
    for worker in workers:
        worker.join()


def _work(events: Any, threads: int, plan: Plan, folder: Path, part: tuple[int, int], device: str | None, until: int | None, jobs: int) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_outlived, daemon=True).start()
    warnings.showwarning = lambda message, *_: events.put(UserWarning(str(message)))  # only the parent process writes to the terminal
    try:
        for event in compare(plan, folder, part=part, device=device, until=until, jobs=jobs):
            events.put(event)
        events.put(None)
    except (Mistake, Failure) as error:
        events.put(error)
    except (KeyboardInterrupt, SystemExit) as end:  # stopped: do not wait until the parent has read the queue
        events.cancel_join_thread()
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else end.code)
    except Exception as error:  # of any kind: the parent must not wait for this worker
        events.put(Failure(f"a worker stopped with {type(error).__name__}: {error}"))


def _outlived() -> None:
    """Stop this worker, with a checkpoint, when its parent process has ended for any reason."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def begin(plan: Plan, folder: Path, device: str | None) -> None:
    """Write compare.json; an existing one must be of the same comparison, and is extended by new methods, seeds and learning rates."""
    check(plan, folder)
    made = surroundings(_where(device), 1)
    with _changing(folder):
        write_json(folder / "compare.json", {**_joined(plan, folder), "made with": made})


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Lock compare.json from reading to writing: of two processes that start together, one would overwrite what the other has added."""
    _make(folder)
    with lock(folder / "locks" / "compare.json", wait=True):
        yield


def _make(folder: Path) -> None:
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _where(device: str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def check(plan: Plan, folder: Path) -> None:
    """Raise a Mistake if this comparison cannot run in `folder`, before anything is written."""
    latents = load(plan.base.data, size=plan.base.size) if plan.base.data.startswith("latents:") else None
    pictures = latents.source[0] if isinstance(latents, Latents) else plan.base.data
    refuse_among(plan.base.data, folder)
    refuse_encoded(folder)
    refuse_training(folder)
    _joined(plan, folder)
    if plan.samples and pictures not in classifier.DATA:
        network_for(pictures)  # its weights may be missing; without this check, the first evaluation would notice, hours later


def baseline(plan: Plan, folder: Path) -> str:
    """What the others are compared with: the first method, in an existing folder that of its beginning."""
    return str(_joined(plan, folder)["baseline"])


def _joined(plan: Plan, folder: Path) -> dict[str, Any]:
    """The new content of compare.json: this plan, joined with the existing compare.json, which must be of the same comparison."""
    mine: dict[str, Any] = plain(plan.config())
    if not (folder / "compare.json").exists():
        return mine
    theirs = _theirs(plan, folder)
    options = theirs.get("options", {}) | mine["options"]
    return {**mine, **{name: _union(theirs[name], mine[name]) for name in GROWS}, "options": options, "baseline": theirs["baseline"]}


def _union(known: list[Any], more: list[Any]) -> list[Any]:
    return known + [value for value in more if value not in known]


def run(plan: Plan, cell: Cell, folder: Path, device: str | None, until: int, jobs: int = 1) -> Iterator[Event]:
    """Train one cell up to the update `until`, or resume it, and evaluate it every `plan.every` updates. If it fails, failed.json says why.

    jobs: how many trainings share this machine, for the record.
    """
    if (folder / "finished.json").exists() or (until < plan.base.updates and until in _lines(folder / "points.jsonl")):
        yield Event(cell)
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    try:
        yield from _run(plan, cell, folder, device, until, jobs)
    except Failure as error:  # a diverged method is a result too, which the report names
        with suppress(Failure):  # on a full disk
            write_json(folder / "failed.json", {"why": str(error)})
        raise


def _run(plan: Plan, cell: Cell, folder: Path, device: str | None, until: int, jobs: int) -> Iterator[Event]:
    recipe, where = cell.recipe(plan), _where(device)
    good = checkpoint.newest(folder)  # `train` resumes from this, the newest undamaged checkpoint
    reached = int(good.name.rpartition("-")[2]) if good else 0
    record = None
    if reached < until or not (folder / "cell.json").exists():
        made = _made_with(folder, where, jobs, resumed=reached > 0)
        write_json(folder / "cell.json", {**cell._asdict(), "settings": recipe.settings(), "made with": made})
    with Log(folder / "points.jsonl") as points:
        points.truncate_after(reached)
        due = reached > 0 and reached % plan.every == 0
        if due and reached not in _lines(folder / "points.jsonl"):  # an earlier run was stopped between a checkpoint and its evaluation
            yield Event(cell, point=evaluate(plan, folder, reached, points, where))
        with closing(train(recipe, folder, device=device)) as updates:
            # a cell that has made all its updates also calls `train`, which draws the last sample grid if that is missing
            for record in updates if reached < until or reached == plan.base.updates else ():
                yield Event(cell, record)
                if record.step % plan.every == 0:
                    yield Event(cell, record, evaluate(plan, folder, record.step, points, where))
                if record.step == until:
                    break
    if until < plan.base.updates:
        return
    seconds = record.seconds if record is not None else checkpoint.load(folder)[1]["seconds"]
    write_json(folder / "finished.json", {"step": plan.base.updates, "seconds": seconds})


def _made_with(folder: Path, device: torch.device, jobs: int, *, resumed: bool) -> dict[str, Any]:
    """The "made with" of a cell. If it is resumed on another machine or with other threads, both are named, and of jobs the most: its time is from
    both."""
    made = {**surroundings(device, 1), "jobs": jobs}
    with suppress(OSError, ValueError, KeyError, TypeError):
        earlier = json.loads((folder / "cell.json").read_bytes())["made with"]
        before = str(earlier["machine"])
        if resumed and not before.endswith(made["machine"]):
            made["machine"] = before + THEN + made["machine"]
        if resumed:
            made["jobs"] = max(jobs, earlier.get("jobs", 1))  # earlier versions did not record it
    return made


def evaluate(plan: Plan, folder: Path, step: int, points: Log, device: torch.device) -> dict[str, Any]:
    """Evaluate the averaged weights at a checkpoint: one line of points.jsonl. The loss is taken from the training's log."""
    run = opened(folder, step=step, device=device)
    recipe, schedule = run.recipe, run.clock.schedule
    logged = _lines(folder / "log.jsonl", kind="validation").get(step)
    if logged is None:
        raise Failure(f"{folder / 'log.jsonl'} lacks the validation of update {step}; remove {folder} to train it again")
    point: dict[str, Any] = {"step": step, "images": step * recipe.batch, "seconds": logged["seconds"], "validation": logged["loss"]}
    if plan.vlb_images and isinstance(schedule, Discrete) and not isinstance(run.data, Latents):
        held_out = load_images(recipe.data, split="test", size=recipe.size)
        point["bits"] = bits_per_dim(
            run.net, schedule, run.clock.objective, held_out, n=plan.vlb_images, steps=plan.vlb_steps, variance=recipe.variance,
            conditional=told_held_out(recipe, held_out, warn=False), device=device,  # the training has already warned
        ).mean  # fmt: skip
    if plan.samples:
        known = pictured(run.data)  # before sampling, because the pictures may have been removed
        images = sampled(run.net, recipe, run.clock, run.data, plan.samples, device=device)
        s = compare_images(images, known, solver=recipe.solver, steps=recipe.solver_steps, device=device)
        point |= {"frechet": s.frechet, "kernel": s.kernel.mean, "precision": s.precision, "recall": s.recall}
        point |= {"samples": s.count, "solver": s.solver, "solver_steps": s.steps, "frechet_name": s.frechet_name}
    if step == recipe.updates:
        x0, labels = head(run.data, USEFUL_IMAGES, device)
        cond = labels if recipe.conditional else None
        useful = utility_over_time(run.clock, run.net, run.optimizer(), x0, cond=cond, bins=USEFUL_BINS, probes=USEFUL_PROBES)
        point |= {"utility_time": useful.time.tolist(), "utility": useful.utility.tolist()}
    points.write(point)
    points.sync()  # synced before a later checkpoint replaces this one: afterwards it could not be evaluated again
    return point


def merge(plan: Plan, folder: str | Path, parts: Sequence[str | Path], *, until: int | None = None) -> int:
    """Copy the cells of other results folders of the same comparison into `folder`; returns how many. If both have a cell, keeps the further trained.

    until: as in `compare`. Raises what `compare` would raise, before anything is copied, and Busy if another process trains a cell of `folder`.
    """
    folder, copied = Path(folder), 0
    _until(plan, until)
    check(plan, folder)
    configs = {part: _theirs(plan, part) for part in map(Path, parts)}

    def together() -> dict[str, Any]:
        mine = _config(folder if (folder / "compare.json").exists() else next(iter(configs), folder))
        for theirs, name in product(configs.values(), GROWS):
            mine[name] = _union(mine[name], theirs[name])
        return mine

    plan.refuse_twins(together()["methods"])
    _make(folder)
    for part in configs:
        for cell in sorted(path.parent for path in (part / "cells").glob("[!.]*/cell.json")):
            target = folder / "cells" / cell.name
            with lock(folder / "locks" / cell.name):  # otherwise a process that trains this cell would overwrite the copy
                if _reached(target) < _reached(cell):
                    _copy(cell, target)
                    copied += 1
    with _changing(folder):
        write_json(folder / "compare.json", together())
    return copied


def _copy(cell: Path, target: Path) -> None:
    """Replace one training by another, atomically: an interrupted copy must not look like a training."""
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(cell, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError as error:
        raise Failure(f"could not copy {cell} to {target}: {error.strerror or error}") from error


def _reached(cell: Path) -> tuple[bool, int, int]:
    """How far a training came, as a sort key: whether it is finished, its last evaluation, its last checkpoint."""
    return (cell / "finished.json").exists(), max(_lines(cell / "points.jsonl"), default=0), max(checkpoint.steps(cell), default=0)


def _theirs(plan: Plan, folder: Path) -> dict[str, Any]:
    """The folder's compare.json; a Mistake if it is of another comparison."""
    theirs = _config(folder)
    if changes := difference(_fixed(plan.config()), _fixed(theirs), where=f"in {folder}"):
        raise Mistake(f"{folder} holds another comparison; choose another folder, or make the settings alike:\n{changes}")
    for known, new in product(theirs["methods"], plan.methods):
        if new not in theirs["methods"]:
            plan.refuse_twins([known, new])
    return theirs


def _config(folder: Path) -> dict[str, Any]:
    """The folder's compare.json."""
    path = folder / "compare.json"
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise Mistake(f"{folder} holds no comparison: there is no compare.json") from None
    except ValueError:
        config = None
    if not isinstance(config, dict) or not {"settings", "baseline", *GROWS} <= config.keys():
        raise Mistake(f"{path} is damaged; choose another folder, or remove that file to go on with the trainings that are there")
    return config


def _fixed(config: dict[str, Any]) -> dict[str, Any]:
    """The settings that must be the same in all runs of one comparison, as one flat mapping."""
    apart = (*GROWS, "baseline", "changed", "options", "settings", "made with")
    settings = {name: value for name, value in completed(config["settings"]).items() if name not in OF_THE_CELL}
    return {name: value for name, value in config.items() if name not in apart} | settings


def _lines(path: Path, **wanted: Any) -> dict[int, dict[str, Any]]:
    """The records of a log that have these values, by step."""
    return {record["step"]: record for record in records(path) if "step" in record and wanted.items() <= record.items()}
