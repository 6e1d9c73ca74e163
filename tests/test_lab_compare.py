"""Comparisons: cells, what they share, and that nothing is lost or done twice."""

import json
import math
import os
import shutil
import signal
from dataclasses import replace

import pytest

import forked
import noiseclock.lab.compare as lab_compare
import noiseclock.lab.validation as lab_validation
from noiseclock.core.adaptive import Adaptive
from noiseclock.core.samplers import LogitNormal
from noiseclock.core.scheduled import LogNormal
from noiseclock.lab import checkpoint
from noiseclock.lab.compare import Cell, Plan, begin, by_workers, compare, merge
from noiseclock.lab.curves import same_machine
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.folder import Busy, Log, lock
from noiseclock.lab.methods import applied
from noiseclock.lab.recipes import Recipe
from noiseclock.lab.results import read
from noiseclock.lab.statistics import table
from noiseclock.lab.train import train
from small_runs import TINY, content, differing, points, state_of


@pytest.fixture(autouse=True)
def small_evaluations(monkeypatch):
    """Held-out losses and utilities of a few images: they are compared with each other, and with what the training has logged."""
    for name, value in (("IMAGES", 4), ("TIMES", 5)):
        monkeypatch.setattr(lab_validation, name, value)
    for name, value in (("USEFUL_IMAGES", 8), ("USEFUL_BINS", 4), ("USEFUL_PROBES", 2)):
        monkeypatch.setattr(lab_compare, name, value)


def plan(**changes):
    settings = {"methods": ("uniform", "lsm+min-snr"), "seeds": (0, 1), "lrs": (1e-3,), "every": 2, "samples": 40, "vlb_images": 8, "vlb_steps": 3}
    return Plan("digits", replace(TINY, updates=4), **{**settings, **changes})


def finished(events):
    """Run to the end; the last step that each cell was seen at."""
    return {event.cell: event for event in events}


@pytest.mark.parametrize(
    ("text", "sampler", "weighting", "correct"),
    [
        ("uniform", "uniform", "constant", "auto"),
        ("min-snr:gamma=4", "uniform", "min-snr:gamma=4", "auto"),
        ("speed:k=5,tau=641+change-aware", "speed:k=5,tau=641", "change-aware", "auto"),
        ("adaptive+min-snr", "adaptive", "min-snr", "auto"),
        ("min-snr+adaptive", "adaptive", "min-snr", "auto"),
        ("lsm@none", "loss-second-moment", "constant", "none"),
        ("lsm:bins=8", "loss-second-moment:bins=8", "constant", "auto"),
        ("adaptive.paper:every=20+p2", "adaptive:variant=paper,every=20", "p2", "auto"),
        ("adaptive.released:floor=0.1", "adaptive:variant=released,floor=0.1", "constant", "auto"),
    ],
)
def test_a_method_is_a_sampler_a_weighting_or_both(text, sampler, weighting, correct):
    found = applied(text, Recipe(sampler="beta", weighting="p2"))
    assert (found.sampler, found.weighting, found.correct) == (sampler, weighting, correct)


def test_variants_of_the_adaptive_sampler_are_those_of_python():
    for name in ("paper", "scaled", "released", "cheap"):
        for recipe in (applied(f"adaptive.{name}", Recipe()), Recipe(sampler=f"adaptive.{name}")):
            assert repr(recipe.clock().sampler) == repr(getattr(Adaptive, name)())


def test_log_normal_is_what_the_papers_on_a_schedule_mean_by_it():
    assert applied("log-normal", Recipe()).sampler == "logit-normal"
    assert applied("log-normal:mean=1+min-snr", Recipe(schedule="cosine")).sampler == "logit-normal:mean=1"
    edm = Recipe(schedule="edm", steps=None, objective="edm")
    assert applied("log-normal", edm).sampler == "log-normal"
    assert applied("logit-normal", edm).sampler == "logit-normal"
    # and these are two densities
    found, other = (applied("log-normal", recipe).clock().sampler for recipe in (edm, Recipe()))
    assert (type(found), type(other)) == (LogNormal, LogitNormal)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom", "did you mean uniform"),
        ("adaptive.papr", "did you mean adaptive.paper"),
        ("adaptive.paper:", "is not option=value"),
        ("adaptive+speed", "names two samplers"),
        ("min-snr+p2", "names two weightings"),
        ("lsm@maybe", "unknown correction 'maybe'"),
        ("speed:q=3", "takes no option 'q'"),
        ("speed:k", "is not option=value"),
    ],
)
def test_a_method_that_does_not_exist_is_named(text, message):
    with pytest.raises(Mistake, match=message):
        applied(text, Recipe())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": ()}, "the methods of a comparison must not be empty"),
        ({"seeds": (0, 0)}, "seeds of a comparison must differ"),
        ({"every": 3}, "every must divide the 4 updates"),
        ({"methods": ("uniform", "unifrom")}, "did you mean uniform"),
        ({"methods": ("lsm", "loss-second-moment")}, "lsm and loss-second-moment are the same method; name it once, as lsm"),
        ({"methods": ("uniform", "constant")}, "uniform and constant are the same method"),
        ({"methods": ("speed:k=3,tau=5", "speed:tau=5,k=3.0")}, "are the same method"),
        ({"methods": ("min-snr", "p2", "uniform+min-snr:gamma=5@none")}, "min-snr and .* are the same method"),
        ({"methods": ("adaptive.scaled", "adaptive:floor=0.05,variant=scaled")}, "are the same method"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused(changes, message):
    with pytest.raises(Mistake, match=message):
        plan(**changes)


def test_a_method_that_joins_in_other_words_is_refused(tmp_path):
    begin(plan(methods=("uniform", "lsm")), tmp_path, "cpu")
    before = (tmp_path / "compare.json").read_bytes()
    with pytest.raises(Mistake, match="lsm and loss-second-moment@importance are the same method; name it once, as lsm"):
        begin(plan(methods=("uniform", "loss-second-moment@importance")), tmp_path, "cpu")
    assert (tmp_path / "compare.json").read_bytes() == before
    begin(plan(methods=("uniform", "loss-second-moment@none")), tmp_path, "cpu")


def test_two_that_begin_at_once_both_join(tmp_path, monkeypatch):
    """Between the look of one at compare.json and its writing, the other does both."""
    found, others = lab_compare.surroundings, ["lsm"]

    def meanwhile(*given):
        while others:
            begin(plan(methods=("uniform", others.pop())), tmp_path, "cpu")
        return found(*given)

    monkeypatch.setattr(lab_compare, "surroundings", meanwhile)
    begin(plan(methods=("uniform", "adaptive")), tmp_path, "cpu")
    assert json.loads((tmp_path / "compare.json").read_text())["methods"] == ["uniform", "lsm", "adaptive"]


def test_missing_inception_weights_are_said_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path / "home"))
    pictured = plan()
    pictured = replace(pictured, base=replace(pictured.base, data=f"folder:{tmp_path / 'pictures'}"))
    with pytest.raises(Mistake, match="the Inception weights are not at"):
        begin(pictured, tmp_path / "results", "cpu")
    assert not (tmp_path / "results").exists()
    begin(replace(pictured, samples=0), tmp_path / "results", "cpu")  # nothing to be seen by it


def test_cells_of_all_methods_rates_and_seeds_have_folders_of_their_own():
    found = plan(methods=("speed:k=5", "speed:k=6", "uniform"), lrs=(1e-3, 1.0000001e-3)).cells()
    assert len(found) == 3 * 2 * 2
    assert len({cell.slug for cell in found}) == len(found)
    hostile = Cell("../../<b>" + "x" * 300, 1e-3, 0).slug
    assert "/" not in hostile
    assert "<" not in hostile
    assert len(hostile) < 120
    assert [cell.seed for cell in found] == sorted(cell.seed for cell in found)  # whole seeds first


def test_a_comparison_from_beginning_to_end(tmp_path):
    whole = plan()
    events = finished(compare(whole, tmp_path, device="cpu"))
    assert list(events) == whole.cells()
    results = read(tmp_path)
    assert results.problems == []
    assert results.config["methods"] == ["uniform", "lsm+min-snr"]
    assert results.config["baseline"] == "uniform"
    assert {(cell.method, cell.seed) for cell in results.cells} == {(cell.method, cell.seed) for cell in whole.cells()}
    for cell in results.cells:
        assert cell.finished
        assert [point["step"] for point in cell.points] == [2, 4]
        assert [v["step"] for v in cell.validations] == [2, 4]
        assert sorted(cell.pictures) == [2, 4]
        for point, validation in zip(cell.points, cell.validations, strict=True):
            assert point["images"] == point["step"] * TINY.batch
            assert (point["samples"], point["solver"], point["solver_steps"]) == (40, "ddim", 2)
            assert point["validation"] == validation["loss"]
            assert all(math.isfinite(point[name]) for name in ("frechet", "bits", "precision", "recall", "seconds"))
            assert point["frechet_name"] == "Fréchet distance (digits classifier)"
    # a finished cell is not run again
    again = list(compare(whole, tmp_path, device="cpu"))
    assert [(event.record, event.point) for event in again] == [(None, None)] * 4
    # and more seeds may join, other settings not
    assert len(list(compare(plan(seeds=(0, 1)), tmp_path, device="cpu"))) == 4
    with pytest.raises(Mistake, match="holds another comparison"):
        list(compare(plan(samples=50), tmp_path, device="cpu"))
    # the recipe's own sampler, which every cell replaces, is not one of them
    assert len(list(compare(replace(whole, base=replace(whole.base, sampler="speed")), tmp_path, device="cpu"))) == 4


def test_cells_of_one_seed_start_alike_and_see_the_same_images(tmp_path):
    """Uniform with a correction of 1 must train to the very same weights; another seed must not."""
    same = plan(methods=("uniform", "uniform@importance"), samples=0, vlb_images=0)
    finished(compare(same, tmp_path, device="cpu"))
    states = {cell: state_of(tmp_path / "cells" / cell.slug) for cell in same.cells()}
    for seed in (0, 1):
        mine, theirs = (states[cell]["model"] for cell in same.cells() if cell.seed == seed)
        assert differing(mine, theirs) == []
    assert differing(states[same.cells()[0]]["model"], states[same.cells()[2]]["model"])


def test_killed_twice_and_resumed_gives_the_same_results(tmp_path):
    """Left between two updates, after a checkpoint and before its evaluation, and in between: all points are those of an undisturbed comparison."""
    whole = plan(methods=("uniform", "adaptive:every=2,stride=5"), seeds=(0,))
    finished(compare(whole, tmp_path / "whole", device="cpu"))
    for stops in ((3, 6), (2, 5)):
        torn = tmp_path / f"torn{stops[0]}"
        for stop in (*stops, None):
            for count, _ in enumerate(compare(whole, torn, device="cpu"), 1):
                if count == stop:
                    break
        assert points(torn) == points(tmp_path / "whole")
        assert read(torn).problems == []
        for cell in whole.cells():
            assert differing(state_of(torn / "cells" / cell.slug), state_of(tmp_path / "whole" / "cells" / cell.slug)) == []


def test_a_damaged_log_is_read_as_far_as_it_goes_and_a_lost_one_costs_its_cell_alone(tmp_path):
    small = plan(seeds=(0,))
    finished(compare(small, tmp_path, device="cpu"))
    cell = next((tmp_path / "cells").glob("uniform*"))
    points = (cell / "points.jsonl").read_bytes()
    for lost in (False, True):
        (cell / "finished.json").unlink()
        (cell / "points.jsonl").write_bytes(points.splitlines(keepends=True)[0])
        if lost:
            (cell / "log.jsonl").unlink()
        else:
            with (cell / "log.jsonl").open("ab") as log:
                log.write(b"\xff\xfe\n[1]\n" + b'{"kind": "validation", "st')
        failures = [event.failure for event in compare(small, tmp_path, device="cpu") if event.failure]
        if lost:
            assert len(failures) == 1
            assert "log.jsonl lacks the validation of update 4; remove" in failures[0]
        else:
            assert failures == []
            assert (cell / "points.jsonl").read_bytes() == points


def test_an_evaluation_whose_checkpoint_is_lost_is_made_again_and_counts_once(tmp_path):
    small = plan(methods=("uniform",), seeds=(0,), samples=0, vlb_images=0)
    finished(compare(small, tmp_path, device="cpu"))
    (cell,) = (tmp_path / "cells").iterdir()
    before = points(tmp_path)
    (cell / "finished.json").unlink()
    shutil.rmtree(cell / "checkpoints" / "step-00000004")
    finished(compare(small, tmp_path, device="cpu"))
    assert [json.loads(line)["step"] for line in (cell / "points.jsonl").read_text().splitlines()] == [2, 4]
    assert points(tmp_path) == before


def test_an_evaluation_is_on_the_disk_before_the_next_checkpoint_is(tmp_path, monkeypatch):
    """After a power cut the older checkpoint is gone, and with it the way to evaluate it again."""
    seen, save = [], checkpoint.save
    monkeypatch.setattr(Log, "sync", lambda self: seen.append((self.path.name, len(self.path.read_text().splitlines()))))
    monkeypatch.setattr(checkpoint, "save", lambda folder, step, state: seen.append(("checkpoint", step)) or save(folder, step, state))
    list(compare(plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,)), tmp_path, device="cpu"))
    assert [each for each in seen if each[0] != "log.jsonl"] == [("checkpoint", 2), ("points.jsonl", 1), ("checkpoint", 4), ("points.jsonl", 2)]


def test_a_cell_that_someone_else_runs_is_left_to_them(tmp_path):
    small = plan(samples=0, vlb_images=0)
    taken = small.cells()[1]
    with lock(tmp_path / "locks" / taken.slug):
        assert set(finished(compare(small, tmp_path, device="cpu"))) == set(small.cells()) - {taken}
    assert set(finished(compare(small, tmp_path, device="cpu"))) == set(small.cells())
    assert all(cell.finished for cell in read(tmp_path).cells)


def test_parts_run_every_cell_once_and_merge(tmp_path):
    small = plan(samples=0, vlb_images=0)
    parts = [tmp_path / "a", tmp_path / "b"]
    ran = [list(finished(compare(small, folder, part=(i, 2), device="cpu"))) for i, folder in enumerate(parts)]
    assert sorted(ran[0] + ran[1]) == sorted(small.cells())
    assert merge(small, tmp_path / "all", parts) == 4
    assert merge(small, tmp_path / "all", parts) == 0  # again changes nothing
    found = read(tmp_path / "all")
    assert found.problems == []
    assert len(found.cells) == 4
    other = plan(samples=0, vlb_images=9)
    list(compare(other, tmp_path / "c", part=(3, 4), device="cpu"))
    with pytest.raises(Mistake, match="c holds another comparison"):
        merge(small, tmp_path / "all", [tmp_path / "c"])
    with pytest.raises(Mistake, match="holds no comparison"):
        merge(small, tmp_path / "all", [tmp_path / "nothing"])


def test_parts_that_name_one_method_differently_are_not_merged(tmp_path):
    """Neither name is in the command."""
    parts = [tmp_path / "a", tmp_path / "b"]
    for part, name in zip(parts, ("lsm", "loss-second-moment"), strict=True):
        begin(plan(methods=("uniform", name)), part, "cpu")
    with pytest.raises(Mistake, match="lsm and loss-second-moment are the same method"):
        merge(plan(methods=("uniform",)), tmp_path / "all", parts)
    assert not (tmp_path / "all").exists()


def test_of_two_unfinished_trainings_the_one_that_came_further_stays(tmp_path):
    small = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,))
    near, far = tmp_path / "near", tmp_path / "far"
    list(compare(small, near, device="cpu", until=2))
    shutil.copytree(near, far)
    cell = far / "cells" / small.cells()[0].slug
    with (cell / "points.jsonl").open("a") as lines:
        lines.write('{"step": 4}\n')
    shutil.rmtree(cell / "checkpoints")  # as results are carried from another machine
    assert merge(small, far, [near]) == 0
    assert merge(small, near, [far]) == 1
    assert [point["step"] for point in read(near).cells[0].points] == [2, 4]


def test_evaluations_that_came_without_checkpoints_are_not_made_again(tmp_path):
    """As results are carried from another machine: nothing is left to be done up to there, and what was found must not be lost."""
    small = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,))
    list(compare(small, tmp_path, device="cpu", until=2))
    cell, before = tmp_path / "cells" / small.cells()[0].slug, points(tmp_path)
    shutil.rmtree(cell / "checkpoints")
    assert [event.record for event in compare(small, tmp_path, device="cpu", until=2)] == [None]
    assert points(tmp_path) == before
    assert not checkpoint.steps(cell)


def test_a_training_that_changes_machines_has_the_times_of_none(tmp_path, monkeypatch):
    """Its seconds are some of one and some of another, and are not to be compared with those of either."""
    small = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,))
    seen = []
    for machine, until in (("first", 2), ("second", 2), ("second", None), ("third", None)):
        monkeypatch.setattr(lab_compare, "surroundings", lambda *_, machine=machine: {"machine": machine})
        list(compare(small, tmp_path, device="cpu", until=until))
        found = read(tmp_path).cells[0]
        seen.append((found.made_with["machine"], same_machine(found, found)))
    # no update was made in the second run, nor in the fourth
    assert seen == [("first", True), ("first", True), ("first, then second", False), ("first, then second", False)]


def test_a_training_that_had_company_for_a_while_has_the_times_of_a_shared_machine(tmp_path):
    small, notes = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,)), []
    for jobs, until in ((1, 2), (3, None), (1, None)):
        list(compare(small, tmp_path, device="cpu", until=until, jobs=jobs))
        results = read(tmp_path)
        notes.append([note for note in table(results, "validation").notes if "beside each other" in note])
    assert [len(found) for found in notes] == [0, 1, 1]
    (tmp_path / "costs.json").write_text('{"milliseconds": {"uniform": 10}}')  # timed alone
    assert not any("beside each other" in note for note in table(read(tmp_path), "validation").notes)
    (tmp_path / "costs.json").unlink()
    path = next((tmp_path / "cells").glob("*/cell.json"))
    for jobs in (None, "many", -3, True, 1e300):  # damaged, or of an earlier version
        about = json.loads(path.read_text())
        path.write_text(json.dumps({**about, "made with": {**about["made with"], "jobs": jobs}}))
        assert not any("beside each other" in note for note in table(read(tmp_path), "validation").notes)


def test_a_training_that_goes_on_is_not_replaced(tmp_path):
    """It would save its next checkpoint beside those that came further, and remove them as left by a run before it."""
    small = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,))
    mine, far = tmp_path / "mine", tmp_path / "far"
    list(compare(small, mine, device="cpu", until=2))
    list(compare(small, far, device="cpu"))
    before = content(mine / "cells")
    with lock(mine / "locks" / small.cells()[0].slug), pytest.raises(Busy, match=f"is in use by process {os.getpid()}"):
        merge(small, mine, [far])
    assert content(mine / "cells") == before
    assert merge(small, mine, [far]) == 1


def test_a_copy_that_does_not_fit_on_the_disk_is_a_sentence_and_leaves_what_is_there(tmp_path, monkeypatch):
    small = plan(samples=0, vlb_images=0, methods=("uniform",), seeds=(0,))
    mine, far = tmp_path / "mine", tmp_path / "far"
    list(compare(small, mine, device="cpu", until=2))
    list(compare(small, far, device="cpu"))
    before = points(mine)

    def full(source, target):
        raise shutil.Error([(source, target, "[Errno 28] No space left on device")])

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(Failure, match=r"could not copy .* No space left on device"):
        merge(small, mine, [far])
    assert points(mine) == before


def test_workers_share_the_cells(tmp_path, monkeypatch):
    """Forked ones, which start at once; those that a command starts afresh are in test_cli_results.py."""
    monkeypatch.setattr(lab_compare.multiprocessing, "get_context", lambda _: forked.SERVER)
    small = plan(samples=0, vlb_images=0)
    events = finished(by_workers(small, tmp_path, 2, device="cpu"))
    assert set(events) == set(small.cells())
    assert all(cell.finished for cell in read(tmp_path).cells)
    assert json.loads((tmp_path / "compare.json").read_text())["seeds"] == [0, 1]


def test_workers_share_the_cores_that_they_may_use(tmp_path, monkeypatch):
    """Not all that the machine has: in a container of two of 64 each of two workers would start 32 threads."""
    monkeypatch.setattr(lab_compare.multiprocessing, "get_context", lambda _: forked.SERVER)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    finished(by_workers(plan(samples=0, vlb_images=0, methods=("uniform",)), tmp_path, 2, device="cpu"))
    results = read(tmp_path)
    assert {cell.made_with["machine"].rpartition(", ")[2] for cell in results.cells} == {"1 thread"}
    assert {cell.made_with["jobs"] for cell in results.cells} == {2}
    assert "Up to 2 trainings ran beside each other, so times are those of a shared machine." in table(results, "validation").notes


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("until", [2, None])
def test_a_signal_in_the_last_evaluation_of_a_training_ends_the_comparison(tmp_path, monkeypatch, number, error, until):
    """Its training is over, and has no update left after which to stop."""
    small = plan(samples=0, vlb_images=0)
    last, evaluate = until or 4, lab_compare.evaluate

    def interrupted(plan, folder, step, *rest):
        if step == last:
            os.kill(os.getpid(), number)
        return evaluate(plan, folder, step, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(lab_compare, "evaluate", interrupted)
        with pytest.raises(error):
            list(compare(small, tmp_path, device="cpu", until=until))
    (only,) = read(tmp_path, at=last).cells
    assert only.finished
    list(compare(small, tmp_path, device="cpu"))
    assert [cell.finished for cell in read(tmp_path).cells] == [True] * 4


def test_a_signal_before_the_first_update_of_a_training_is_not_forgotten(tmp_path, monkeypatch):
    """As it is built, which may take a minute."""
    small = plan(samples=0, vlb_images=0)

    def interrupted(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        return train(*args, **options)

    monkeypatch.setattr(lab_compare, "train", interrupted)
    with pytest.raises(SystemExit, match="143"):
        list(compare(small, tmp_path, device="cpu"))
    assert checkpoint.steps(tmp_path / "cells" / small.cells()[0].slug) == [1]


def test_a_method_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    from noiseclock.lab import compare as module

    def training(recipe, folder, **options):
        if recipe.sampler == "loss-second-moment":
            raise Failure("the gradient was not finite for 10 updates in a row")
        return train(recipe, folder, **options)

    monkeypatch.setattr(module, "train", training)
    small = plan(samples=0, vlb_images=0)
    events = list(compare(small, tmp_path, device="cpu"))
    assert [event.cell.method for event in events if event.failure] == ["lsm+min-snr"] * 2
    results = read(tmp_path)
    assert {cell.method: cell.finished for cell in results.cells} == {"uniform": True, "lsm+min-snr": False}
    # the report, too, tells a training that failed from one that may go on
    why = "the gradient was not finite for 10 updates in a row"
    assert {cell.failed for cell in results.of("lsm+min-snr")} == {why}
    assert f"2 of 4 trainings failed: lsm+min-snr, lr 0.001, seed 0 (at update 0: {why}); " in "\n".join(results.problems)
    monkeypatch.setattr(module, "train", train)
    assert not [event.failure for event in compare(small, tmp_path, device="cpu") if event.failure]
    assert read(tmp_path).problems == []
