"""The commands about comparisons and measurements: `noiseclock compare | report | analyze | watch`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from noiseclock.cli import Folder, _check_device as check_device, _parsed as parsed, console
from noiseclock.lab.errors import Mistake

if TYPE_CHECKING:
    from noiseclock.lab import statistics
    from noiseclock.lab.compare import Event, Plan

METHODS = ("uniform", "min-snr", "p2", "logit-normal", "speed+change-aware", "adaptive", "lsm", "variance-optimal")
RecipeName = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RECIPE", help="name of a recipe; noiseclock recipes lists them")]
REPLACED = ("sampler", "weighting", "correct", "lr", "seed", "save_every", "validate_every", "sample_every", "track")


@dataclass(frozen=True)
class Compare:
    """Train every method with every seed under one recipe, evaluate them during training, and report what the choice gains. Run it again to resume.

    Every other setting of the recipe is an option too: see `noiseclock train RECIPE --help`.
    """

    recipe: RecipeName
    samplers: tuple[str, ...] = METHODS
    """methods, the first is the baseline; each a sampler, a weighting or both, e.g. speed:k=5 adaptive+min-snr lsm@importance"""
    seeds: int = 3
    """number of seeds"""
    lr: tuple[float, ...] = ()
    """learning rates; every method is trained with each; the recipe's unless given"""
    every: int | None = None
    """updates between evaluations; about a quarter of all unless given"""
    samples: int = 1000
    """pictures per evaluation; 0 for none"""
    vlb_images: int = 100
    """held-out images for bits per dimension; 0 for none"""
    until: int | None = None
    """stop each training after the evaluation at this update; to continue only the best methods, run again with these and without --until"""
    out: str = ""
    """folder of the results; results/RECIPE unless given"""
    jobs: int = 1
    """trainings in parallel, which share the CPU cores; faster for small networks"""
    part: str = "1/1"
    """i/n: this is the i-th of n machines, and takes every n-th training"""
    merge: tuple[str, ...] = ()
    """results folders of other machines, to copy into this one first"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


@dataclass(frozen=True)
class Report:
    """Write the results of a comparison as one page."""

    results: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RESULTS", help="folder of a comparison")]
    out: str | None = None
    """the file to write, or the folder for figures; beside the results unless given"""
    format: str = "html"
    """html, markdown or png"""
    at: int | None = None
    """report the results at this update, also for trainings stopped there; the last update that all have reached unless given"""
    methods: tuple[str, ...] = ()
    """these methods alone, compared with the first of them; all unless given"""
    seeds: tuple[int, ...] = ()
    """these seeds alone; all unless given. Charts show means over seeds, so compare methods with different seeds at those they share"""


@dataclass(frozen=True)
class Watch:
    """Follow a training in a browser on this machine."""

    folder: Folder
    port: int = 8765
    """port on 127.0.0.1"""
    open: bool = False
    """open a browser"""


def compare(argv: list[str]) -> int:
    """`noiseclock compare`."""
    options, rest = tyro.cli(Compare, args=argv, prog="noiseclock compare", description=getdoc(Compare), return_unknown_args=True)
    from noiseclock.lab.compare import baseline, by_workers, merge
    from noiseclock.lab.recipes import Recipe, recipe

    base = parsed(Recipe, rest, f"noiseclock compare {options.recipe}", default=recipe(options.recipe))
    for name in REPLACED:
        if getattr(base, name) != getattr(recipe(options.recipe), name):
            raise Mistake(
                f"--{name.replace('_', '-')} cannot be given, because a comparison sets it for each training; see noiseclock compare --help"
            )
    folder = Path(options.out or f"results/{options.recipe}")
    plan, part, device = _plan(options, base), _part(options.part), check_device(options.device)
    if options.merge:
        console.print(f"{merge(plan, folder, options.merge, until=options.until)} trainings copied into {folder}")
    first = plan.methods[0]
    if (known := baseline(plan, folder)) != first:
        console.print(f"{folder} has the baseline {known}; to compare with {first}: noiseclock report {folder} --methods {first} {known} --out FILE")
    events = by_workers(plan, folder, options.jobs, part=part, device=device, until=options.until)
    useful = _followed(events, options.until or plan.base.updates, len(plan.cells()[part[0] :: part[1]]))
    _summary(folder, options.until)
    return 0 if useful else 1


def _plan(options: Compare, base: Any) -> Plan:
    from noiseclock.lab.compare import Plan

    if options.seeds < 1 or options.jobs < 1:
        raise Mistake(f"a comparison needs at least one seed and one job, got {options.seeds} and {options.jobs}")
    evenly = [n for n in range(10, 0, -1) if base.updates % n == 0]  # numbers of evaluations that divide the updates evenly
    every = base.updates // min(evenly, key=lambda n: abs(n - 4)) if options.every is None else options.every
    return Plan(
        options.recipe, base, options.samplers, tuple(range(options.seeds)), options.lr or (base.lr,), every, samples=options.samples,
        vlb_images=options.vlb_images,
    )  # fmt: skip


def _part(text: str) -> tuple[int, int]:
    number, slash, of = text.partition("/")
    if not (slash and number.isdigit() and of.isdigit() and 1 <= int(number) <= int(of)):
        raise Mistake(f"--part must be i/n with 1 <= i <= n, got {text!r}")
    return int(number) - 1, int(of)


def _followed(events: Iterable[Event], updates: int, cells: int) -> bool:
    """Show the progress of a comparison, or of this machine's part. False if trainings failed and none finished."""
    reached: dict[Any, int] = {}
    failed = False
    finished = set()  # a set, not a count: every worker reports a finished cell
    columns = (BarColumn(24), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"0 of {cells} trainings", total=cells * updates)
        for event in events:
            if event.failure:
                console.print(f"{event.cell.method}, lr {event.cell.lr:g}, seed {event.cell.seed} failed: {event.failure}")
                failed = True
                continue
            done = updates if event.record is None and event.point is None else event.record.step if event.record else event.point["step"]  # type: ignore[index]
            reached[event.cell] = done
            if done == updates and (event.record is None or event.point is not None):
                finished.add(event.cell)
                if event.point is not None and not console.is_terminal:
                    console.print(f"{event.cell.method}, lr {event.cell.lr:g}, seed {event.cell.seed}: {_quality(event.point)}")
            text = f"{len(finished)} of {cells} trainings, {event.cell.method} seed {event.cell.seed}"
            bar.update(task, completed=sum(reached.values()), description=text)
    return bool(finished) or not failed


def _quality(point: dict[str, Any]) -> str:
    named = point.get("frechet_name")
    first = f"{named} {point['frechet']:.4g}, " if named else ""
    return f"{first}held-out loss {point['validation']:.4g} after {point['step']:,} updates, {point['seconds']:.0f} s"


def _summary(folder: Path, at: int | None) -> None:
    from rich import box
    from rich.table import Table

    from noiseclock.lab import statistics
    from noiseclock.lab.report import write
    from noiseclock.lab.results import read

    results = read(folder, at=at)
    for metric in statistics.measured(results)[:1]:
        found = statistics.table(results, metric)
        direction = "higher" if found.higher_is_better else "lower"
        console.print(f"\n{found.title} after {found.step or 0:,} updates; {direction} is better")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        columns = _fitting(found, console.width)
        for heading in columns:
            table.add_column(heading)
        for line in zip(*columns.values(), strict=True):
            table.add_row(*line)
        console.print(table)
    console.print(statistics.answer(results))
    console.print(f"report: {write(folder, at=at)}")


def _fitting(table: statistics.Table, width: int) -> dict[str, list[str]]:
    """The columns of a table, the most important first, as many as fit into the terminal."""
    parts = dict(zip(table.headings, zip(*table.lines, strict=True), strict=True))
    names = {
        "method": "method", table.headings[2]: "mean ± spread", table.headings[4]: f"against {table.baseline} (95 %)", "verdict": "verdict",
        "speed-up in time": "speed-up in time", "time per update, ratio": "time per update",
    }  # fmt: skip
    columns: dict[str, list[str]] = {}
    for heading, name in names.items():
        column = [name, *parts[heading]]
        width -= max(map(len, column)) + 3
        if columns and width < 0:
            break
        columns[name] = column[1:]
    return columns


def report(argv: list[str]) -> int:
    """`noiseclock report`."""
    options = parsed(Report, argv, "noiseclock report")
    from noiseclock.lab.report import write

    path = write(options.results, options.out, format=options.format, at=options.at, methods=options.methods, seeds=options.seeds)
    console.print(f"written to {path}")
    return 0


@dataclass(frozen=True)
class Analyze:
    """Make the papers' measurements on a recipe, trained in short stages, or on a checkpoint; writes figures and their data."""

    recipe: RecipeName
    out: str = ""
    """folder for the figures; analysis/RECIPE unless given"""
    checkpoint: str | None = None
    """folder of a training to measure instead"""
    quick: bool = False
    """rough measurements, in a minute or two"""
    device: str | None = None
    """cpu or cuda; None for cuda if available, else cpu"""


def analyze(argv: list[str]) -> int:
    """`noiseclock analyze`."""
    options = parsed(Analyze, argv, "noiseclock analyze")
    from noiseclock.lab.analyze import run
    from noiseclock.lab.recipes import recipe

    folder = Path(options.out or f"analysis/{options.recipe}")
    device = check_device(options.device)
    figures = run(options.recipe, recipe(options.recipe), folder, options.checkpoint, options.quick, device=device, say=console.print)
    for figure in figures:
        console.print(str(figure))
    return 0


def watch(argv: list[str]) -> int:
    """`noiseclock watch`."""
    options = parsed(Watch, argv, "noiseclock watch")
    from noiseclock.lab.watch import watch as serve

    serve(options.folder, options.port, open_browser=options.open, say=console.print)
    return 0
