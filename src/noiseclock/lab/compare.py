"""Every method, seed and learning rate under one recipe, into one folder of results.

    for event in compare("digits", recipe("digits"), ["uniform", "min-snr", "adaptive"], seeds=[0, 1, 2], folder="results/digits"): ...

A cell is one training: a method, a learning rate and a seed. Cells of one seed see the same images in the same order and start from the same
weights. A cell that is finished is never run again, one that was killed goes on from its checkpoint. Several processes, on several machines even,
may work on one folder at a time: each cell is locked by the one that runs it. The layout of the folder is told in `lab/results.py`.
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
from noiseclock.lab.folder import Busy, Log, difference, lock, making, plain, records, write_json
from noiseclock.lab.interrupt import listening
from noiseclock.lab.latents import Latents
from noiseclock.lab.methods import applied
from noiseclock.lab.recipes import Recipe, completed, entry_of
from noiseclock.lab.results import OF_THE_CELL, THEN, VERSION
from noiseclock.lab.sources import refuse_among
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.train import Record, train
from noiseclock.lab.trained import opened

LEAST_SAMPLES = 4  # precision and recall look at the third neighbour
USEFUL_IMAGES, USEFUL_BINS, USEFUL_PROBES = 128, 16, 8  # for which noise levels help, once a training is done
GROWS = ("methods", "seeds", "lrs")  # more of which may join a comparison


@dataclass(frozen=True)
class Plan:
    """What is compared, and how it is looked at.

    recipe: its name. base: the recipe itself, whose sampler, weighting, learning rate and seed the cells replace. methods: the first is the
    baseline. every: updates between evaluations. samples: pictures in each, 0 for none. vlb_images: for bits per dimension, 0 for none;
    latents have none.
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
                raise Mistake(f"a comparison needs at least one of its {name}")
            if len(set(values)) < len(values):
                raise Mistake(f"the {name} of a comparison must differ, got {', '.join(map(str, values))}")
        for name in ("samples", "vlb_images"):
            if getattr(self, name) < 0:
                raise Mistake(f"{name} must not be negative, got {getattr(self, name)}")
        if 0 < self.samples < LEAST_SAMPLES:
            raise Mistake(f"samples must be 0, or at least {LEAST_SAMPLES} to say anything about them, got {self.samples}")
        if self.every < 1 or self.base.updates % self.every:
            raise Mistake(f"evaluations every {self.every} updates do not end with the last of {self.base.updates}; choose a divisor of it")
        for cell in self.cells():
            cell.recipe(self)  # its mistakes are this plan's
        self.refuse_twins(self.methods)

    def refuse_twins(self, methods: Sequence[str]) -> None:
        """Raise if two of these are one method in other words: it would be trained twice, and each counted as evidence beside the other."""
        found: dict[str, str] = {}
        for method in methods:
            first = found.setdefault(repr(applied(method, self.base).clock()), method)
            if first != method:
                raise Mistake(f"{first} and {method} are the same method; name it once, as {first}")

    def cells(self) -> list[Cell]:
        """All of them, in the order in which they are run: whole seeds first, so that a comparison cut short still compares."""
        return [Cell(method, lr, seed) for seed, lr, method in product(self.seeds, self.lrs, self.methods)]

    def config(self) -> dict[str, Any]:
        """What compare.json holds, apart from where it was made. changed: the settings in which it is not the recipe of that name."""
        mine = {name: value for name, value in asdict(self).items() if name not in ("base", "recipe")}
        settings, usual = self.base.settings(), entry_of(self.recipe).recipe.settings()
        changed = [name for name, value in settings.items() if value != usual[name] and name not in OF_THE_CELL]
        return {"version": VERSION, "recipe": self.recipe, "settings": settings, "changed": changed, **mine, "baseline": self.methods[0]}


class Cell(NamedTuple):
    """One training."""

    method: str
    lr: float
    seed: int

    @property
    def slug(self) -> str:
        """A folder's name: readable, of safe characters, and different for every cell."""
        readable = re.sub(r"[^A-Za-z0-9.+@-]+", "_", self.method)[:60]
        return f"{readable}-{sha256(self.method.encode()).hexdigest()[:6]}--lr-{self.lr}--seed-{self.seed}"

    def recipe(self, plan: Plan) -> Recipe:
        """What is trained."""
        mine = applied(self.method, plan.base)
        every = plan.every
        return replace(mine, lr=self.lr, seed=self.seed, track=(), save_every=every, validate_every=every, sample_every=every)


class Event(NamedTuple):
    """Something that happened in a cell: an update, or the evaluation after it, or why it could not go on; none of them if it was finished before."""

    cell: Cell
    record: Record | None = None
    point: dict[str, Any] | None = None
    failure: str = ""


def compare(
    plan: Plan, folder: str | Path, *, shard: tuple[int, int] = (0, 1), device: str | None = None, until: int | None = None
) -> Iterator[Event]:
    """Run every cell that is not finished and that no one else is running; yields what happens.

    shard: (i, n) takes every n-th cell only, for machines that share no disk; put their folders together afterwards with `merge`. until: stop each
    cell after the evaluation at that update; run those that are worth it again, without or with a later one, and they go on.
    """
    folder, until = Path(folder), _until(plan, until)
    begin(plan, folder, device)
    with listening() as wish:  # a training that is done does not grant it any more
        for cell in plan.cells()[shard[0] :: shard[1]]:
            try:
                with lock(folder / "locks" / cell.slug):
                    yield from run(plan, cell, folder / "cells" / cell.slug, device, until)
            except Busy:
                continue
            except Failure as error:  # a method that diverges is a result: the others go on, and it counts as not finished
                yield Event(cell, failure=str(error))
            wish.grant()


def _until(plan: Plan, until: int | None) -> int:
    last = plan.base.updates if until is None else until
    if last < 1 or last > plan.base.updates or last % plan.every:
        raise Mistake(f"trainings can stop where they are evaluated, every {plan.every:,} updates up to {plan.base.updates:,}, got until={last:,}")
    return last


def by_workers(
    plan: Plan, folder: str | Path, jobs: int, *, shard: tuple[int, int] = (0, 1), device: str | None = None, until: int | None = None
) -> Iterator[Event]:
    """`compare` with so many processes at a time, which share the cores: a small network does not keep more than one of them busy."""
    if jobs == 1:
        yield from compare(plan, folder, shard=shard, device=device, until=until)
        return
    _until(plan, until)
    begin(plan, Path(folder), device)
    context = multiprocessing.get_context("spawn")
    events: Any = context.Queue()
    threads = max(cpus() // jobs, 1)
    workers = [context.Process(target=_work, args=(events, threads, plan, folder, shard, device, until)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    with ExitStack() as stack:
        wish = stack.enter_context(listening())
        wish.patient = True  # with what the workers have not saved
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
            worker.terminate()  # it saves, and stops
    for worker in workers:
        worker.join()


def _work(events: Any, threads: int, plan: Plan, folder: Path, shard: tuple[int, int], device: str | None, until: int | None) -> None:
    torch.set_num_threads(threads)
    threading.Thread(target=_outlived, daemon=True).start()
    warnings.showwarning = lambda message, *_: events.put(UserWarning(str(message)))  # one process writes to the terminal
    try:
        for event in compare(plan, folder, shard=shard, device=device, until=until):
            events.put(event)
        events.put(None)
    except (Mistake, Failure) as error:
        events.put(error)
    except (KeyboardInterrupt, SystemExit) as end:  # asked to stop; what it still has to tell may have no listener any more, and must not keep it
        events.cancel_join_thread()
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else end.code)
    except Exception as error:  # whatever it is, the others should not wait for this one
        events.put(Failure(f"a worker stopped with {type(error).__name__}: {error}"))


def _outlived() -> None:
    """End this worker, with a checkpoint, when the process that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def begin(plan: Plan, folder: Path, device: str | None) -> None:
    """Write compare.json, or check that the folder's is of this comparison; more methods, seeds and learning rates may join."""
    check(plan, folder)
    made = surroundings(_where(device), 1)
    with _changing(folder):
        write_json(folder / "compare.json", {**_joined(plan, folder), "made with": made})


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """To be held from reading compare.json to writing it: two processes that begin at once would each leave out what the other adds."""
    _make(folder)
    with lock(folder / "locks" / "compare.json", wait=True):
        yield


def _make(folder: Path) -> None:
    with making(folder):
        folder.mkdir(parents=True, exist_ok=True)


def _where(device: str | None) -> torch.device:
    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def check(plan: Plan, folder: Path) -> None:
    """Raise what is to be refused, before anything is written."""
    latents = load(plan.base.data, size=plan.base.size) if plan.base.data.startswith("latents:") else None
    pictures = latents.source[0] if isinstance(latents, Latents) else plan.base.data
    refuse_among(plan.base.data, folder)
    _joined(plan, folder)
    if plan.samples and pictures not in classifier.DATA:
        network_for(pictures)  # its weights may be missing, and the first evaluation comes late


def _joined(plan: Plan, folder: Path) -> dict[str, Any]:
    """What compare.json is to hold: this plan, and what the folder's holds already, which must be of the same comparison."""
    mine: dict[str, Any] = plain(plan.config())
    if not (folder / "compare.json").exists():
        return mine
    theirs = _theirs(plan, folder)
    return {**mine, **{name: _union(theirs[name], mine[name]) for name in GROWS}, "baseline": theirs["baseline"]}


def _union(known: list[Any], more: list[Any]) -> list[Any]:
    return known + [value for value in more if value not in known]


def run(plan: Plan, cell: Cell, folder: Path, device: str | None, until: int) -> Iterator[Event]:
    """Train one cell up to an update, or go on with it, and evaluate it on the way."""
    if (folder / "finished.json").exists() or (until < plan.base.updates and until in _lines(folder / "points.jsonl")):
        yield Event(cell)
        return
    folder.mkdir(parents=True, exist_ok=True)
    recipe, where = cell.recipe(plan), _where(device)
    good = checkpoint.newest(folder)  # from which `train` goes on, whatever is damaged
    reached = int(good.name.rpartition("-")[2]) if good else 0
    record = None
    if reached < until or not (folder / "cell.json").exists():
        write_json(folder / "cell.json", {**cell._asdict(), "settings": recipe.settings(), "made with": _made_with(folder, where, reached > 0)})
    with Log(folder / "points.jsonl") as points:
        points.truncate_after(reached)
        due = reached > 0 and reached % plan.every == 0
        if due and reached not in _lines(folder / "points.jsonl"):  # stopped between a checkpoint and its evaluation
            yield Event(cell, point=evaluate(plan, folder, reached, points, where))
        with closing(train(recipe, folder, device=device)) as updates:
            # of one that has come to its end, what it had no time to draw
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


def _made_with(folder: Path, device: torch.device, resumed: bool) -> dict[str, Any]:
    """What a cell is made with. One that goes on elsewhere, or in more threads, has the time of no machine alone, and says so."""
    made = surroundings(device, 1)
    with suppress(OSError, ValueError, KeyError, TypeError):
        before = str(json.loads((folder / "cell.json").read_bytes())["made with"]["machine"])
        if resumed and not before.endswith(made["machine"]):
            made["machine"] = before + THEN + made["machine"]
    return made


def evaluate(plan: Plan, folder: Path, step: int, points: Log, device: torch.device) -> dict[str, Any]:
    """One line of points.jsonl: what the averaged weights are worth at a checkpoint. The loss is the one that the training has logged."""
    run = opened(folder, step=step, device=device)
    recipe, schedule = run.recipe, run.clock.schedule
    logged = _lines(folder / "log.jsonl", kind="validation").get(step)
    if logged is None:
        raise Failure(f"{folder / 'log.jsonl'} has lost the validation of update {step}; remove {folder}, and it is trained again")
    point: dict[str, Any] = {"step": step, "images": step * recipe.batch, "seconds": logged["seconds"], "validation": logged["loss"]}
    if plan.vlb_images and isinstance(schedule, Discrete) and not isinstance(run.data, Latents):
        held_out = load_images(recipe.data, split="test", size=recipe.size)
        point["bits"] = bits_per_dim(
            run.net, schedule, run.clock.objective, held_out, n=plan.vlb_images, steps=plan.vlb_steps, variance=recipe.variance,
            conditional=told_held_out(recipe, held_out, warn=False), device=device,  # the training has warned
        ).mean  # fmt: skip
    if plan.samples:
        known = pictured(run.data)  # first, because they may be gone
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
    points.sync()  # before a later checkpoint takes the place of the one that could be evaluated again
    return point


def merge(plan: Plan, folder: str | Path, parts: Sequence[str | Path], *, until: int | None = None) -> int:
    """Copy the cells of other results folders of the same comparison into `folder`; returns how many. Of two that both have, the further one stays.

    until: as in `compare`. What that would refuse is refused here, before anything is copied; Busy where another process trains a cell of `folder`.
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
            with lock(folder / "locks" / cell.name):  # or a process that trains it would go on in the place of the further one, and remove that
                if _reached(target) < _reached(cell):
                    _copy(cell, target)
                    copied += 1
    with _changing(folder):
        write_json(folder / "compare.json", together())
    return copied


def _copy(cell: Path, target: Path) -> None:
    """One training in the place of another; cut short, it must not pass for one."""
    unfinished = target.with_name(f".{target.name}.tmp")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        shutil.copytree(cell, unfinished)
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError as error:
        raise Failure(f"could not copy {cell} to {target}: {error.strerror or error}") from error


def _reached(cell: Path) -> tuple[bool, int, int]:
    """How far a training came, to be compared with another: to its end, to which evaluation, to which checkpoint."""
    return (cell / "finished.json").exists(), max(_lines(cell / "points.jsonl"), default=0), max(checkpoint.steps(cell), default=0)


def _theirs(plan: Plan, folder: Path) -> dict[str, Any]:
    """The folder's compare.json, which must be of this comparison."""
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
    """What must be the same in all runs of one comparison, one entry a setting."""
    apart = (*GROWS, "baseline", "changed", "settings", "made with")
    settings = {name: value for name, value in completed(config["settings"]).items() if name not in OF_THE_CELL}
    return {name: value for name, value in config.items() if name not in apart} | settings


def _lines(path: Path, **wanted: Any) -> dict[int, dict[str, Any]]:
    """The records of a log by step, those that have these values."""
    return {record["step"]: record for record in records(path) if "step" in record and wanted.items() <= record.items()}
