"""The commands about comparisons: what they print, what they write, and with what status they end."""

import io
import re
import shlex
import shutil
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import made_up_results
import noiseclock.lab.compare as lab_compare
from forked import Forked
from noiseclock import cli, cli_results
from noiseclock.lab import analyze, analyze_figures, statistics, watch
from noiseclock.lab.compare import Event, Plan, begin, compare
from noiseclock.lab.errors import Failure
from noiseclock.lab.recipes import RECIPES, recipe
from noiseclock.lab.report_markdown import command
from noiseclock.lab.results import read
from noiseclock.lab.train import train
from small_runs import TINY, comparison, content, differing, points, said, same_cells, state_of, trained, unframed

pytestmark = pytest.mark.usefixtures("elsewhere")

METHODS = ("uniform", "uniform@importance", "min-snr")  # the second is the first, with a correction of 1
SAMPLERS = ("--samplers", *METHODS)
# what `comparison` plans
BASE = replace(TINY, updates=4, **{name: getattr(recipe("digits"), name) for name in cli_results.REPLACED})
SMALL = Plan("digits", BASE, METHODS, (0, 1), (1e-3,), 2, samples=0, vlb_images=0)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """The folder of a comparison, and what was printed of it."""
    folder, shown = tmp_path_factory.mktemp("compared") / "results", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(shown):
        patch.setattr(cli.console, "_width", 100)
        assert cli.main(comparison(folder, *SAMPLERS)) == 0
    return folder, shown.getvalue()


def table_of(shown: str) -> str:
    """From the title of the table to the end."""
    return shown[shown.index("validation loss after 4 updates; lower is better") :]


# --- compare ------------------------------------------------------------------------------------------------------------------------------


def test_a_comparison_shows_every_training_a_table_and_the_answer(done):
    folder, shown = done
    cells = shown.splitlines()[:6]
    results = read(folder)
    for line, (seed, method) in zip(cells, ((seed, method) for seed in (0, 1) for method in METHODS), strict=True):
        loss = points(folder)[method, 1e-3, seed, 4]["validation"]
        assert re.fullmatch(rf"{re.escape(method)}, lr 0\.001, seed {seed}: held-out loss {loss:.4g} after 4 updates, \d+ s", line)
    rows = {line.split()[0]: line for line in table_of(shown).splitlines() if line.startswith(" ") and line.strip("─ ")}
    assert list(rows) == ["method", *METHODS]
    found = statistics.table(results, "validation")
    for row in found.rows:
        assert str(row.final) in rows[row.method]
        assert row.verdict in rows[row.method]
    assert max(map(len, rows.values())) <= 100
    assert shown.endswith(f"\n{statistics.answer(results)}\nreport: {folder / 'report.html'}\n")
    assert statistics.answer(results) in (folder / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")


def test_a_finished_comparison_is_only_shown_again(done, capsys, monkeypatch):
    folder, shown = done
    before = content(folder / "cells")
    assert said(capsys, *comparison(folder, *SAMPLERS)) == "\n" + table_of(shown)
    # fewer of its methods and seeds ask for nothing new either, and forget nothing
    again = said(capsys, *comparison(folder, "--samplers", "min-snr", "--seeds", "1"))
    other = f"noiseclock report {folder} --methods min-snr uniform --out FILE"  # the first is the baseline of a new folder only
    assert again == f"{folder} has the baseline uniform; to compare with min-snr: {other}\n\n" + table_of(shown)
    monkeypatch.setattr(cli.console, "_width", 60)
    *table, answer, report, end = said(capsys, *comparison(folder, *SAMPLERS)).split("\n")
    assert max(map(len, table)) <= 60  # the columns that tell least are left out
    assert re.search(r"method +mean ± spread", "\n".join(table))
    assert [answer, report, end] == shown.split("\n")[-3:]
    assert content(folder / "cells") == before


def test_two_methods_that_train_alike_do_not_differ(done):
    folder, shown = done
    row = next(row for row in statistics.table(read(folder), "validation").rows if row.method == "uniform@importance")
    assert row.difference is not None
    assert (row.difference.mean, row.difference.corrected, row.verdict) == (0.0, 1.0, "no significant difference")
    assert re.search(r"^ *uniform@importance .* \+0\.0 % \(\+0\.0 to \+0\.0\) +no significant difference ", shown, re.MULTILINE)
    # two trainings, not one that was counted twice
    assert len(list((folder / "cells").glob("uniform*--seed-0/checkpoints"))) == 2


def test_machines_share_a_comparison_and_its_parts_are_merged(done, capsys, tmp_path):
    whole, _ = done
    for i in (1, 2):
        said(capsys, *comparison(tmp_path / f"{i}", *SAMPLERS, "--part", f"{i}/2"))
        assert len(list((tmp_path / f"{i}" / "cells").iterdir())) == 3
    begin(SMALL, tmp_path / "idle", "cpu")  # a machine that was stopped before its first training
    before = content(tmp_path / "1")
    merged = said(capsys, *comparison(tmp_path / "all", *SAMPLERS, "--merge", "1", "2", "idle", "1"))
    assert merged.startswith(f"6 trainings copied into {tmp_path / 'all'}\n\nvalidation loss")  # and none was trained
    assert same_cells(tmp_path / "all", whole)
    assert content(tmp_path / "1") == before
    assert statistics.answer(read(whole)) in merged


def test_a_folder_merged_with_itself_loses_nothing(capsys, tmp_path):
    for event in compare(SMALL, tmp_path / "run", device="cpu"):
        if event.record and event.record.step == 3:
            break  # not finished: a finished training would be left alone anyway
    before = content(tmp_path / "run")
    assert lab_compare.merge(SMALL, tmp_path / "run", [tmp_path / "run"]) == 0
    assert content(tmp_path / "run") == before


def test_a_training_that_fails_is_named_and_the_others_compared(capsys, tmp_path, monkeypatch):
    def training(settings, folder, **options):
        if settings.weighting == "min-snr" and settings.seed == 1:
            raise Failure("the loss was not finite for 10 updates in a row")
        return train(settings, folder, **options)

    monkeypatch.setattr(lab_compare, "train", training)
    shown = said(capsys, *comparison(tmp_path / "run", "--samplers", "uniform", "min-snr"))
    assert "min-snr, lr 0.001, seed 1 failed: the loss was not finite for 10 updates in a row\n" in shown
    assert "nothing can be told: min-snr (failed in 1 of 2 seeds)" in shown


def test_a_comparison_of_which_every_training_fails_has_failed(capsys, tmp_path, monkeypatch):
    def training(settings, folder, **options):
        raise Failure("the loss was not finite for 10 updates in a row")

    monkeypatch.setattr(lab_compare, "train", training)
    assert cli.main(comparison(tmp_path / "run", "--samplers", "uniform", "min-snr")) == 1
    assert capsys.readouterr().out.count(" failed: the loss was not finite") == 4


def test_learning_rates_are_compared_at_a_common_one_and_at_the_best_of_each(capsys, tmp_path):
    argv = comparison(tmp_path / "run", "--samplers", "uniform", "min-snr", "--lr", "1e-3", "2e-3", settings=replace(TINY, updates=2))
    shown = said(capsys, *argv)
    assert len(re.findall(r"^\S+, lr 0\.00[12], seed [01]: held-out loss", shown, re.MULTILINE)) == 8
    assert "With each at its own best of 2 learning rates, " in shown
    path = tmp_path / "report.md"
    assert said(capsys, "report", "run", "--format", "markdown", "--out", "report.md") == "written to report.md\n"
    common, own = path.read_text().split("## ")[1:3]
    assert common.startswith("Validation loss\n")
    assert own.startswith("Validation loss, each at its own best learning rate\n")
    results = read(tmp_path / "run")
    for text, own_lr in ((common, False), (own, True)):
        for row in statistics.table(results, "validation", own_lr=own_lr).rows:
            assert f"| `{row.method}` | {row.lr:g} | {row.final} |" in text
    # the trainings do differ by learning rate, and the best is the one with the lower mean
    best = next(row for row in statistics.table(results, "validation", own_lr=True).rows if row.method == "uniform")
    means = {lr: sum(points(tmp_path / "run")["uniform", lr, seed, 2]["validation"] for seed in (0, 1)) / 2 for lr in (1e-3, 2e-3)}
    assert best.lr == min(means, key=means.__getitem__)
    assert means[1e-3] != means[2e-3]


def test_samples_are_scored_where_they_are_asked_for(capsys, tmp_path):
    shown = said(capsys, *comparison(tmp_path / "run", "--samplers", "uniform", "--seeds", "1", "--samples", "30", "--vlb-images", "2"))
    last = points(tmp_path / "run")["uniform", 1e-3, 0, 4]
    assert f"seed 0: Fréchet distance (digits classifier) {last['frechet']:.4g}, held-out loss {last['validation']:.4g} after" in shown
    assert (last["samples"], last["solver"], last["solver_steps"]) == (30, "ddim", 2)
    assert last["bits"] > 0
    assert "There is nothing to compare: uniform is the only method." in shown


@pytest.mark.parametrize(("updates", "every"), [(2000, 500), (796_875, 159_375), (7, 1), (2003, 2003), (1, 1)])
def test_evaluations_end_with_the_training(updates, every):
    options = cli_results.Compare("digits")
    assert cli_results._plan(options, replace(TINY, updates=updates)).every == every


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------

MISTAKES = {
    "compare": "Missing from noiseclock compare: RECIPE",
    "compare digts": "noiseclock: unknown recipe 'digts' (did you mean digits?); known: digits, mnist,",
    "compare celebahq-ldm": "noiseclock: there are no latents in data/celebahq-latents: it has no index.json; make them with noiseclock encode\n",
    "compare digits --samplers unifrom": "noiseclock: unknown method 'unifrom' (did you mean uniform?); known: uniform, adaptive,",
    "compare digits --samplers uniform lsm uniform": "noiseclock: the methods of a comparison must differ, got uniform, lsm, uniform\n",
    "compare digits --samplers": "noiseclock: the methods of a comparison must not be empty\n",
    "compare digits --samplers speed:q=3": "takes no option 'q'",
    "compare digits --lr 1e-3 0.001": "noiseclock: the lrs of a comparison must differ, got 0.001, 0.001\n",
    "compare digits --lr -1": "noiseclock: lr must be positive, got -1.0\n",
    "compare digits --part 3/2": "noiseclock: --part must be i/n with 1 <= i <= n, got '3/2'\n",
    "compare digits --part x": "noiseclock: --part must be i/n with 1 <= i <= n, got 'x'\n",
    "compare digits --part 0/2 --merge somewhere": "--part must be i/n",
    "compare digits --seeds 0": "noiseclock: a comparison needs at least one seed and one job, got 0 and 1\n",
    "compare digits --jobs 0": "noiseclock: a comparison needs at least one seed and one job, got 3 and 0\n",
    "compare digits --every 3": "noiseclock: every must divide the 2000 updates, so that the last one is evaluated, got 3\n",
    "compare digits --every 0": "every must divide the 2000 updates, so that the last one is evaluated, got 0",
    "compare digits --until 700": "noiseclock: until must be an update that is evaluated, every 500 updates up to 2,000, got 700\n",
    "compare digits --until 2500 --jobs 2": "every 500 updates up to 2,000, got 2,500\n",
    "compare digits --samples -1": "noiseclock: samples must not be negative, got -1\n",
    "compare digits --samples 3": "noiseclock: samples must be 0, or at least 4 to say anything about them, got 3\n",
    "compare digits --vlb-images -1": "noiseclock: vlb_images must not be negative, got -1\n",
    "compare digits --device tpu": "noiseclock: unknown device 'tpu'; known: cpu, cuda\n",
    "compare digits --lrr 3": "Perhaps you meant: --lr FLOAT",
    "compare digits --batch 10 --accumulate 3": "noiseclock: a batch of 10 cannot be split into 3 equal micro-batches\n",
    "compare digits --merge nowhere": "noiseclock: nowhere holds no comparison: there is no compare.json\n",
    "compare digits --out /dev/null": "noiseclock: cannot write into /dev/null (File exists); choose a folder that can be written to\n",
    "compare digits --out /dev/null/results": "noiseclock: cannot write into /dev/null/results (Not a directory); choose a folder that can be",
    "report": "Missing from noiseclock report: RESULTS",
    "report nowhere": "noiseclock: there is no folder nowhere; give the one that `noiseclock compare` has written\n",
    "report .": "noiseclock: . holds no comparison; give the folder that `noiseclock compare` has written, and look at a single training with",
    "report . --format pdf": "noiseclock: unknown format 'pdf'; known: html, markdown, png\n",
    "analyze digts": "noiseclock: unknown recipe 'digts' (did you mean digits?)",
    "analyze digits --device tpu": "noiseclock: unknown device 'tpu'; known: cpu, cuda\n",
    "analyze digits --checkpoint nowhere": "noiseclock: nowhere holds no checkpoint; give the folder of a training that has saved one\n",
    "analyze digits --out /dev/null": "noiseclock: cannot write into /dev/null (File exists); choose a folder that can be written to\n",
    "watch": "Missing from noiseclock watch: FOLDER",
    "watch nowhere": "noiseclock: there is no folder nowhere; give the folder of a training\n",
    "watch . --port 65536": "noiseclock: port must lie in 0..65535, got 65536\n",
}


@pytest.mark.parametrize(("line", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_is_named_and_ends_with_2(capsys, tmp_path, line, message):
    told = said(capsys, *line.split(), status=2)
    assert unframed(message).strip() in unframed(told)
    if told.startswith("noiseclock: "):
        assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


REPLACED = {
    "--sampler": "adaptive", "--weighting": "p2", "--correct": "none", "--seed": "3", "--save-every": "7", "--validate-every": "7",
    "--sample-every": "7", "--track": "wandb",
}  # fmt: skip


@pytest.mark.parametrize("option", REPLACED)
def test_what_a_comparison_decides_for_each_training_is_no_option(capsys, tmp_path, option):
    told = said(capsys, "compare", "digits", option, REPLACED[option], status=2)
    assert told == f"noiseclock: {option} cannot be given, because a comparison sets it for each training; see noiseclock compare --help\n"
    assert list(tmp_path.iterdir()) == []


def test_all_that_a_comparison_replaces_is_refused():
    assert {option[2:].replace("-", "_") for option in REPLACED} | {"lr"} == set(cli_results.REPLACED)  # --lr has a meaning of its own


def test_another_comparison_in_the_folder_is_told_by_what_differs(done, capsys):
    folder, _ = done
    before = content(folder)
    told = said(capsys, *comparison(folder, *SAMPLERS, "--dropout", "0.1", "--attention", "--samples", "8"), status=2)
    assert told == (
        f"noiseclock: {folder} holds another comparison; choose another folder, or make the settings alike:\n"
        f"samples: 8 here, 0 in {folder}\nattention: [] here, [4] in {folder}\ndropout: 0.1 here, 0.0 in {folder}\n"
    )
    assert content(folder) == before


def test_a_comparison_and_a_training_do_not_share_a_folder(done, capsys, tmp_path):
    compared, run = shutil.copytree(done[0], tmp_path / "compared"), tmp_path / "run"
    trained(replace(TINY, updates=1), run)
    before = content(run), content(compared)
    assert said(capsys, *comparison(run), status=2) == f"noiseclock: {run} holds a training; choose another folder for a comparison\n"
    for training in ("train", "train-autoencoder"):
        told = said(capsys, training, "digits", "--out", str(compared), "--device", "cpu", status=2)
        assert told == f"noiseclock: {compared} holds a comparison; choose another folder for a training\n"
    assert (content(run), content(compared)) == before


def test_another_comparison_is_not_merged(done, capsys, tmp_path):
    folder, _ = done
    begin(replace(SMALL, base=replace(BASE, dropout=0.1)), tmp_path / "other", "cpu")
    told = said(capsys, *comparison(tmp_path / "new", *SAMPLERS, "--merge", str(folder), "other"), status=2)
    other = "noiseclock: other holds another comparison; choose another folder, or make the settings alike:\n"
    assert told == f"{other}dropout: 0.0 here, 0.1 in other\n"
    assert not (tmp_path / "new").exists()  # not even the part that would fit


REFUSED = {
    "uniform --dropout 0.1": "holds another comparison",
    "uniform --until 3": "until must be an update that is evaluated",
    "constant": "uniform and constant are the same method",
}


@pytest.mark.parametrize("line", REFUSED)
def test_nothing_is_copied_for_a_comparison_that_is_refused(done, capsys, tmp_path, line):
    assert REFUSED[line] in said(capsys, *comparison(tmp_path / "new", "--merge", str(done[0]), "--samplers", *line.split()), status=2)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"settings": {}}'])
def test_a_damaged_comparison_is_named(done, capsys, tmp_path, text):
    shutil.copytree(done[0], tmp_path / "run")
    (tmp_path / "run" / "compare.json").write_text(text)
    for folder, options in (("run", []), ("new", ["--merge", "run"])):
        told = said(capsys, *comparison(Path(folder), *SAMPLERS, *options), status=2)
        assert told.startswith("noiseclock: run/compare.json is damaged; choose another folder, or remove that file to go on")
    (tmp_path / "run" / "compare.json").unlink()
    again = said(capsys, *comparison(Path("run"), *SAMPLERS))
    assert table_of(again) == table_of(done[1]).replace(str(done[0]), "run")


# --- several processes --------------------------------------------------------------------------------------------------------------------


def test_jobs_give_the_same_and_warn_in_one_voice(done, tmp_path):
    whole, _ = done
    run = tmp_path / "run"
    for event in compare(SMALL, run, device="cpu"):
        if event.record and event.record.step == 4:
            break  # after the checkpoint, before its evaluation
    (damaged,) = run.glob("cells/*/checkpoints/step-00000004/state.json")
    damaged.write_bytes(damaged.read_bytes() + b" ")
    with Forked(cli.main, comparison(run, *SAMPLERS, "--jobs", "2"), output=tmp_path / "said.txt") as process:
        assert process.wait(120) == 0
    told = (tmp_path / "said.txt").read_text()
    (warning,) = [line for line in told.splitlines() if "damaged" in line]
    assert warning.startswith(f"warning: the checkpoint {damaged.parent} is damaged (state.json does not have the checksum")
    assert len(re.findall(r"^\S+, lr 0\.001, seed [01]: held-out loss", told, re.MULTILINE)) == 6
    assert same_cells(run, whole)
    assert statistics.answer(read(whole)) in told


def test_a_training_that_several_workers_come_across_counts_once(monkeypatch):
    """Each worker goes through all cells, and tells of those that it finds finished."""
    shown = io.StringIO()
    monkeypatch.setattr(cli_results, "console", Console(file=shown, force_terminal=True, width=100))
    plan = replace(SMALL, seeds=(0,))
    cli_results._followed([Event(cell, point={"step": 4}) for cell in plan.cells()] + [Event(cell) for cell in plan.cells()] * 2, 4, 3)
    assert re.findall(r"(\d+) of 3 trainings", shown.getvalue())[-1] == "3"
    assert "100%" in shown.getvalue()


def test_trainings_that_were_stopped_are_compared_there_and_the_chosen_ones_go_on(done, capsys, tmp_path):
    """Stopped half-way, the table is of that update; one of them goes on, and ends as if it had never been stopped."""
    whole, _ = done
    shown = said(capsys, *comparison(tmp_path / "halves", *SAMPLERS, "--until", "2"))
    assert "validation loss after 2 updates" in shown
    assert shown.count("after 2 updates, ") == 6 + shown.count("On digits, after 2 updates, ")  # a line for each training
    assert "report-2.html" in shown
    there = read(tmp_path / "halves", at=2)
    assert there.problems == []
    assert [cell.points for cell in there.cells] == [
        [{**point, "seconds": mine["seconds"]} for point, mine in zip(cell.points[:1], other.points, strict=True)]
        for cell, other in zip(read(whole, at=2).cells, there.cells, strict=True)
    ]
    assert said(capsys, *comparison(tmp_path / "halves", *SAMPLERS, "--until", "2")).endswith("report-2.html\n")  # nothing is left to do
    said(capsys, *comparison(tmp_path / "halves", "--samplers", "uniform", "min-snr"))
    found = {cell.method: cell for cell in read(tmp_path / "halves").cells if cell.seed == 0}
    assert {method: cell.finished for method, cell in found.items()} == {"uniform": True, "min-snr": True, "uniform@importance": False}
    for cell in (whole / "cells").iterdir():
        if not cell.name.startswith("uniform@"):
            assert differing(state_of(tmp_path / "halves" / "cells" / cell.name), state_of(cell)) == []
    # the report says what it is of, and how to make it
    text = (tmp_path / "halves" / "report-2.html").read_text()
    assert "2 of 4 updates" in text
    assert "--until 2" in text


# --- the command that the report shows ----------------------------------------------------------------------------------------------------

SETTINGS = [
    ["digits", "--flip", "--conditional"],
    ["cifar10-sprint", "--no-flip", "--precision", "fp32"],
    ["digits", "--multipliers", "1", "2", "2", "--attention"],
    ["digits", "--attention", "4", "8", "--betas", "0.8", "0.99", "--seeds", "2"],
    ["digits", "--schedule", "flow", "--steps", "None", "--objective", "flow", "--updates", "400", "--every", "100"],
    ["digits", "--data", "folder:my pictures; $HOME", "--size", "16"],
    ["digits", "--samplers", "speed:k=5,tau=641+change-aware@none", "lsm", "--lr", "1.23456789e-4", "1e-05", "--samples", "7", "--vlb-images", "0"],
]


@pytest.fixture
def plans(monkeypatch):
    """What would have been compared, instead of comparing it."""
    found = []

    def planned(plan, folder, jobs, **_):
        found.append(plan)
        begin(plan, folder, "cpu")
        return iter(())

    monkeypatch.setattr(lab_compare, "by_workers", planned)
    monkeypatch.setattr(lab_compare, "network_for", lambda data: None)  # Inception's weights, which need not be here
    return found


@pytest.mark.parametrize("argv", SETTINGS, ids=lambda argv: " ".join(argv[:3]))
def test_the_command_in_the_report_makes_the_same_plan(capsys, plans, argv):
    said(capsys, "compare", *argv, "--device", "cpu", "--out", "first")
    program, *again = shlex.split(command(read("first")))
    assert program == "noiseclock"
    said(capsys, *again, "--device", "cpu", "--out", "second")
    assert plans[0] == plans[1]
    assert plans[0].base != recipe(argv[0]) or plans[0].lrs != (recipe(argv[0]).lr,)


@pytest.mark.parametrize("seeds", [(0, 2), (1,)], ids=str)
def test_the_command_in_a_report_on_some_seeds_trains_these(capsys, plans, tmp_path, seeds):
    folder = made_up_results.write(tmp_path / "made", ["uniform"], (0, 1, 2), every=500, pictures=False)
    said(capsys, *shlex.split(command(read(folder, seeds=seeds)))[1:], "--device", "cpu", "--out", "again")
    assert set(seeds) <= set(plans[0].seeds)


# --- report, analyze, watch ---------------------------------------------------------------------------------------------------------------


def test_reports_go_where_they_are_asked_for(done, capsys, tmp_path):
    folder, _ = done
    answer = statistics.answer(read(folder))
    assert said(capsys, "report", str(folder), "--out", "new/page.html") == "written to new/page.html\n"
    assert answer in (tmp_path / "new" / "page.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert said(capsys, "report", str(folder), "--format", "markdown") == f"written to {folder / 'report.md'}\n"
    assert answer in (folder / "report.md").read_text()
    assert said(capsys, "report", str(folder), "--format", "png", "--out", "figures") == "written to figures\n"
    figures = list((tmp_path / "figures").glob("*.png"))
    assert figures
    assert all(figure.read_bytes().startswith(b"\x89PNG") for figure in figures)
    methods = read(folder).methods[::-1]
    assert said(capsys, "report", str(folder), "--format", "markdown", "--out", "some.md", "--methods", *methods) == "written to some.md\n"
    assert f"against {methods[0]}" in (tmp_path / "some.md").read_text()
    seed = str(read(folder).seeds[0])
    assert said(capsys, "report", str(folder), "--format", "markdown", "--out", "one.md", "--seeds", seed) == "written to one.md\n"
    assert said(capsys, "report", str(folder), "--at", "5", status=2) == f"noiseclock: no training in {folder} was evaluated at update 5\n"


def test_a_report_is_not_of_a_single_training(done, capsys, tmp_path):
    training = shutil.copytree(next((done[0] / "cells").iterdir()), tmp_path / "training")
    before = content(training)
    told = said(capsys, "report", "training", status=2)
    assert told.startswith("noiseclock: training holds no comparison; give the folder that `noiseclock compare` has written, and look at a single ")
    assert content(training) == before


def test_an_analysis_tells_what_it_measures_and_where_its_figures_are(capsys, tmp_path, monkeypatch):
    asked = []

    def smallest(settings, images, *, quick):
        asked.append((settings, images, quick))
        often = ("adaptive:every=1,stride=5,queue=3",)
        return analyze.Plan((1, 2), 8, images=8, times=4, bins=2, samples=4, pairs=1, updates=1, methods=("uniform", "lsm"), probing=often)

    monkeypatch.setattr(analyze, "planned", smallest)
    monkeypatch.setitem(RECIPES, "digits", RECIPES["digits"]._replace(recipe=TINY))
    *told, last = said(capsys, "analyze", "digits", "--quick", "--device", "cpu").splitlines()
    assert asked == [(TINY, 1497, True)]
    names = ["gradients", "interdependence", "utility", "densities", "vlb", "areas"]
    assert [*told, last][-6:] == [f"analysis/digits/{name}.png" for name in names]
    assert told[0] == "linear schedule, uniform: update 1 of 2"
    assert all((tmp_path / "analysis" / "digits" / f"{name}.{kind}").stat().st_size > 0 for name in names for kind in ("json", "png"))
    # again, everything is there already; to draw it takes most of the time, and need not be seen twice
    monkeypatch.setattr(analyze_figures, "draw", lambda name, data, path: path)
    assert said(capsys, "analyze", "digits", "--quick", "--device", "cpu").splitlines() == [f"analysis/digits/{name}.png" for name in names]
    # a training is measured as it is
    trained(replace(TINY, updates=2), tmp_path / "run")
    told = said(capsys, "analyze", "digits", "--checkpoint", "run", "--out", "other", "--device", "cpu").splitlines()
    assert told == [
        "run at update 2: the gradient over time",
        "interdependence",
        "which times help",
        *(f"other/{name}.png" for name in names if name != "vlb"),
    ]
    assert asked[-1] == (replace(TINY, updates=2), 1497, False)
    assert "holds another analysis" in said(capsys, "analyze", "digits", "--out", "other", "--device", "cpu", status=2)


def test_watch_tells_its_address_and_ends_with_ctrl_c(capsys, tmp_path, monkeypatch, free_port):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.Server, "serve_forever", interrupted)
    (tmp_path / "run").mkdir()
    assert said(capsys, "watch", "run", "--port", str(free_port)) == f"run is shown at http://127.0.0.1:{free_port}/ (Ctrl-C ends it)\n"


def test_a_comparison_is_not_watched_but_its_trainings(done, capsys):
    told = said(capsys, "watch", str(done[0]), status=2)
    assert told == f"noiseclock: {done[0]} holds a comparison; give the folder of one of its trainings, in {done[0] / 'cells'}\n"
