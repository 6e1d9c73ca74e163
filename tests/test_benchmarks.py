"""The benchmarks run, at a size that says nothing about speed."""

import json
import math
import os
import runpy
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch

import noiseclock.lab.compare as lab_compare
from noiseclock.core.directions import ACROSS
from noiseclock.lab.compare import Plan, compare
from noiseclock.lab.folder import lock, plain
from noiseclock.lab.recipes import completed
from noiseclock.lab.results import OF_THE_CELL, read
from small_runs import TINY, UNET, trained

ROOT = Path(__file__).parents[1] / "benchmarks"
# what a part of the queue changes in its recipe
SMALL = {name: value for name, value in TINY.settings().items() if name not in ("seed", "lr", "sampler")} | {"updates": 4, "precision": "fp32"}


@pytest.fixture
def overhead(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)  # the small U-Net of the script, for speed
    return runpy.run_path(str(ROOT / "overhead.py"))


def test_overhead_writes_what_it_measured(overhead, tmp_path, capsys):
    out = tmp_path / "results" / "overhead.json"
    tiny = "--steps 40 80 --batch 8 --size 4 --rounds 1 --block 1 --channels 8 --device cpu"
    overhead["main"]([*tiny.split(), "--samplers", *overhead["SAMPLERS"], "--out", str(out)])
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    setup = found["setup"]
    assert setup["torch"] == torch.__version__
    assert setup["model"] == "SmallUNet"
    assert {"date", "device", "seed", "rounds", "block", "channels", "compile", "bf16", "noiseclock"} <= set(setup)
    assert [(case["steps"], case["batch"], case["size"]) for case in found["cases"]] == [(40, 8, 4), (80, 8, 4)]
    first, second = (case["samplers"] for case in found["cases"])
    assert list(first) == list(overhead["SAMPLERS"])
    assert not set(second) & set(overhead["FIXED"])
    for name, cost in [*first.items(), *second.items()]:
        assert name in printed
        low, high = cost["spread"]
        assert all(math.isfinite(x) and x > 0 for x in (cost["ratio"], cost["plain"], low, high)), name
        assert (cost["probe"] is not None) == (cost["every"] > 0), name


def test_a_step_is_priced_with_its_share_of_a_probe(overhead):
    cost = overhead["cost"](40, [1.0, 1.0, 9.0], [5.0, 5.0, 45.0], [1.0, 1.0, 9.0], [0.1, 0.02, 0.03], None)
    assert cost.ratio == pytest.approx((39 + 5) / 40)
    assert cost.added == pytest.approx(0.03)
    assert (cost.plain, cost.probe) == (1.0, 5.0)


def test_step_measures_the_trainer(tmp_path, capsys):
    out = tmp_path / "step.json"
    words = "--channels 8 --batch 4 --size 8 --rounds 1 --block 5 --device cpu --samplers uniform adaptive:every=5,stride=300"
    runpy.run_path(str(ROOT / "step.py"))["main"]([*words.split(), "--out", str(out)])
    found = json.loads(out.read_text())
    assert [(cost["how"], cost["sampler"]) for cost in found["costs"]] == [("plain", "uniform"), ("plain", "adaptive:every=5,stride=300")]
    for cost in found["costs"]:
        assert cost["images_a_second"] == pytest.approx(4000 / cost["milliseconds"])
        assert cost["spread"] == [cost["milliseconds"]] * 2
    assert "this/uniform" in capsys.readouterr().out


def test_generate_measures_every_batch(tmp_path, capsys):
    out = tmp_path / "generate.json"
    words = "--channels 8 --samples 4 --batch 2 4 --steps 2 --size 8 --device cpu"
    runpy.run_path(str(ROOT / "generate.py"))["main"]([*words.split(), "--out", str(out)])
    costs = json.loads(out.read_text())["costs"]
    assert [cost["batch"] for cost in costs] == [2, 4]
    assert all(cost["samples_a_second"] == pytest.approx(4 / cost["seconds"]) for cost in costs)
    assert "4 samples in 2 DDIM steps" in capsys.readouterr().out


def test_the_step_of_a_probe_suits_convolutions_in_tf32_too(tmp_path, capsys):
    """A much smaller one makes prices of rounding errors, on a GPU above all, whose convolutions are in TF32."""
    out = tmp_path / "derivative.json"
    small = ACROSS / 100
    words = f"--updates 10 46 --probes 2 --precisions fp32 tf32 --steps {small} {ACROSS} --device cpu"
    runpy.run_path(str(ROOT / "derivative.py"))["main"]([*words.split(), "--out", str(out)])
    found = json.loads(out.read_text())
    errors = {(row["updates"], row["precision"], row["step"]): row["error"] for row in found["rows"]}
    assert found["setup"]["parameters"] == 176849
    for updates in (10, 46):
        for precision in ("fp32", "tf32"):
            assert errors[updates, precision, ACROSS] < 0.1  # measured: 0.01 to 0.06; a square that is wrong by 10 % needs an error of 0.3
        assert errors[updates, "tf32", small] > 0.5  # measured: 2.5 and 5.4
    assert "10 updates  tf32  step 0.005   error 0.0" in capsys.readouterr().out


def test_signals_are_described_by_their_bins(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / "signals.py"))
    bins = np.repeat(np.arange(10), 50)
    noise = np.random.default_rng(0).normal(size=500)
    clear = script["described"](bins, bins + noise, np.arange(10.0))
    assert clear["F"] == pytest.approx(scipy.stats.f_oneway(*(bins + noise).reshape(10, 50)).statistic)
    assert clear["rank"] == pytest.approx(1)
    assert clear["R2"] == pytest.approx(np.var(np.arange(10)) / (np.var(np.arange(10)) + 1), abs=0.03)
    assert script["described"](bins, noise, np.arange(10.0))["F"] < 3
    # sin(x)/x at 5, 1.25, 0.31 and 0.08: only the last two agree to 2 %, and what is left of 0.08²/6 is a thousandth
    assert script["in_the_linear_range"](lambda length: np.sin(5e4 * length) / (1e4 * length)) == pytest.approx(5, rel=2e-3)
    same = script["against"](np.array([1.0, 2.0, 4.0]), np.array([2.0, 4.0, 8.0]))
    assert (same["rank"], same["worst"], same["times"]) == pytest.approx((1.0, 0.0, 0.25), abs=1e-12)
    out = tmp_path / "signals.json"
    script["main"](["--updates", "2", "--probes", "4", "--samples", "8", "--truth", "32", "--batch", "32", "--channels", "4", "--out", str(out)])
    found = json.loads(out.read_text())
    assert set(found["signals"]) == {"released", "paper", "utility"}
    assert [len(t) for t in (*found["truths"], found["exact"])] == [10, 10, 10]
    assert "rank with the truth" in capsys.readouterr().out
    trained(replace(UNET, updates=2), tmp_path / "run")
    script["main"](["--run", str(tmp_path / "run"), "--probes", "4", "--samples", "8", "--truth", "32", "--batch", "32"])
    assert "run after 2 updates, 4 probes of 32" in capsys.readouterr().out


def test_the_page_on_scaling_shows_what_the_script_prints(capsys):
    script = runpy.run_path(str(ROOT / "scaling.py"))
    script["main"]()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (ROOT.parent / "docs" / "scaling.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("|")] == printed
    # the papers' own counts: 675 M and 118.6 G multiplications (2212.09748, Table 4), 501 M (2209.12152, Table 1)
    assert "| DiT-XL/2 | 674.8 M | 237.2 GFLOP |" in page
    assert "| U-ViT-H/2 | 500.8 M |" in page
    # a probe by hand: 2·3 forwards, and 2·ceil(125/32) for the 125 of 1000 times that each of 8 ranks with 32 images has
    assert script["adaptive"](script["nc"].Adaptive(), 256, 8) == 14
    assert script["adaptive"](script["nc"].Adaptive(), 128, 1) == pytest.approx(21.6, abs=0.05)


@pytest.fixture
def queue(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))  # as for a script: it has its neighbour at hand
    return runpy.run_path(str(ROOT / "cifar10.py"))


def test_the_queue_of_trainings_goes_on_where_it_was_and_leaves_alone_what_is_known(queue, tmp_path, capsys):
    part = partial(queue["Part"], recipe="digits", changes=SMALL, lrs=(0.001,), every=2, samples=0)
    first, second = part("a", ("uniform", "min-snr"), until=2), part("b", ("uniform",), seeds=(0, 1), until=4)
    here, known = tmp_path / "here", tmp_path / "known"
    done = known / "b" / "cells" / second.plan().cells()[1].slug
    done.mkdir(parents=True)
    (done / "points.jsonl").write_text('{"step": 2}\n{"step": 4}\n')

    def todo(parts):
        return [(part.name, cell.method, cell.seed) for part, _, cell in queue["left"](parts, here, known)]

    assert todo([first, second]) == [("a", "uniform", 0), ("a", "min-snr", 0), ("b", "uniform", 0)]
    assert queue["take"]([first, second], here, known, set(), "cpu")
    assert todo([first, second]) == [("a", "min-snr", 0), ("b", "uniform", 0)]
    with lock(here / "a" / "locks" / first.plan().cells()[1].slug):  # as another job would
        queue["work"]([first, second], here, known, 1, "cpu")
    assert todo([first, second]) == [("a", "min-snr", 0)]
    queue["work"]([replace(first, until=4), second], here, known, 1, "cpu")
    steps = [[point["step"] for point in cell.points] for cell in read(here / "a").cells]
    assert steps == [[2, 4], [2, 4]]
    assert [(cell.method, cell.seed, cell.finished) for cell in read(here / "b").cells] == [("uniform", 0, True)]
    begun = part("c", ("uniform",))
    (here / "c" / "cells" / begun.plan().cells()[0].slug).mkdir(parents=True)  # not evaluated yet: nothing to be told
    queue["collect"]([first, second, begun], here, known)
    assert {cell.slug for part in (first, second) for cell in part.plan().cells()} == {path.name for path in known.glob("*/cells/*")}
    assert {path.name for path in known.glob("*/cells/*/*")} == {"cell.json", "finished.json", "log.jsonl", "points.jsonl"}
    assert json.loads((done / "points.jsonl").read_text().splitlines()[0]) == {"step": 2}  # as it was
    printed = [line.split()[1:] for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in printed if words[-1] == "begins"] == ["uniform", "uniform", "uniform", "min-snr"]


def test_the_queue_begins_what_can_end_on_this_machine(queue, tmp_path):
    part = partial(queue["Part"], recipe="digits", changes=SMALL, lrs=(0.001,), every=2, samples=0)
    parts = [part("long", ("uniform",), until=4), part("short", ("uniform", "min-snr"), until=2)]
    assert not queue["take"](parts, tmp_path, tmp_path / "known", set(), "cpu", within=1.9)
    assert queue["take"](parts, tmp_path, tmp_path / "known", set(), "cpu", within=2)
    assert [path.name for path in tmp_path.glob("*/cells")] == ["cells"]
    assert len(list((tmp_path / "short" / "cells").iterdir())) == 1
    assert queue["take"]([replace(parts[0], until=2)], tmp_path, tmp_path / "known", set(), "cpu")  # half of the long one
    assert queue["take"](parts, tmp_path, tmp_path / "known", set(), "cpu", within=2)  # its other half fits
    assert [cell.finished for cell in read(tmp_path / "long").cells] == [True]
    queue["work"](parts, tmp_path, tmp_path / "known", 1, "cpu", end=0.0, pace=1.0)  # too late for anything
    assert len(list((tmp_path / "short" / "cells").iterdir())) == 1


def test_a_training_of_the_queue_that_diverges_is_recorded_and_the_others_go_on(queue, tmp_path, capsys):
    part = queue["Part"]("a", ("uniform",), (0,), (1e30, 0.001), 4, "digits", {**SMALL, "warmup": 1, "patience": 1}, 2, 0)
    queue["work"]([part], tmp_path, tmp_path / "known", 1, "cpu", jobs=3)
    good, bad = read(tmp_path / "a").cells
    assert (good.finished, good.failed, bad.finished) == (True, "", False)
    assert (good.jobs, bad.jobs) == (3, 3)
    assert bad.failed.startswith("the loss or its gradient was not finite for 1 updates in a row")
    assert bad.failed in capsys.readouterr().out


def test_a_job_that_is_ended_in_the_last_evaluation_of_a_training_begins_no_other(queue, tmp_path, monkeypatch):
    evaluate, part = lab_compare.evaluate, queue["Part"]("a", ("uniform", "min-snr"), (0,), (0.001,), 4, "digits", SMALL, 2, 0)

    def interrupted(plan, folder, step, *rest):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(plan, folder, step, *rest)

    monkeypatch.setattr(lab_compare, "evaluate", interrupted)
    with pytest.raises(SystemExit, match="143"):
        queue["work"]([part], tmp_path, tmp_path / "known", 1, "cpu")
    assert [(cell.method, cell.finished) for cell in read(tmp_path / "a").cells] == [("uniform", True)]


def test_what_the_queue_has_trained_is_solved_in_other_ways_too(queue, tmp_path):
    import solvers

    part = queue["Part"]("a", ("uniform",), (0,), (0.001,), 2, "digits", {**SMALL, "updates": 2}, 2, 0, ("ddim:2:8", "dpm++:3:8"))
    here, known = tmp_path / "here", tmp_path / "known"
    queue["work"]([replace(part, solvers=())], here, known, 1, "cpu")
    assert list(queue["left"]([replace(part, solvers=())], here, known)) == []
    assert len(list(queue["left"]([part], here, known))) == 1  # trained, and not solved
    queue["work"]([part], here, known, 1, "cpu")
    assert list(queue["left"]([part], here, known)) == []
    queue["collect"]([part], here, known)
    (cell,) = (known / "a" / "cells").iterdir()
    assert [(row["solver"], row["samples"]) for row in solvers.known(cell)] == [("ddim", 8), ("dpm++", 8)]


def test_solvers_of_a_training_that_the_results_have_already_are_added_to_it(queue, tmp_path):
    import solvers

    part = queue["Part"]("a", ("uniform",), (0,), (0.001,), 2, "digits", {**SMALL, "updates": 2}, 2, 0)
    here, known, again = tmp_path / "here", tmp_path / "known", replace(part, solvers=("ddim:2:8",))
    queue["work"]([part], here, known, 1, "cpu")
    queue["collect"]([part], here, known)
    (cell,) = (known / "a" / "cells").iterdir()
    before = (cell / "points.jsonl").read_bytes()
    queue["work"]([again], here, known, 1, "cpu")
    queue["collect"]([again], here, known)
    assert ([row["solver"] for row in solvers.known(cell)], (cell / "points.jsonl").read_bytes()) == (["ddim"], before)
    shutil.rmtree(here)
    assert list(queue["left"]([again], here, known)) == []  # on the next machine
    (cell / "points.jsonl").write_text('{"step": 4}\n')  # further than the machine got, whose measurements are of another model then
    (cell / "solvers.jsonl").unlink()
    queue["work"]([again], here, tmp_path / "others", 1, "cpu")
    assert queue["solved"](here / "a", known / "a") == 0
    assert not (cell / "solvers.jsonl").exists()


def test_the_solver_of_the_last_evaluation_is_not_measured_again(queue, tmp_path):
    import solvers

    settings = {**SMALL, "updates": 4, "solver": "ddim", "solver_steps": 2}
    part = queue["Part"]("a", ("uniform",), (0,), (0.001,), 4, "digits", settings, 2, 8, ("ddim:2:8", "ddim:3:8"))
    queue["work"]([part], tmp_path, tmp_path / "known", 1, "cpu")
    (cell,) = (tmp_path / "a" / "cells").iterdir()
    last, measured = solvers.known(cell)
    assert (last["step"], last["solver"], last["steps"], measured["steps"]) == (4, "ddim", 2, 3)
    (cell / "points.jsonl").unlink()
    solvers.measure(cell, ("ddim:2:8",), device="cpu")
    assert solvers.known(cell)[-1]["frechet"] == last["frechet"]  # what was left out would have given the same pictures


def test_the_queue_on_cifar10_can_be_trained_as_it_is_written(queue, capsys, tmp_path):
    queue["main"]([str(tmp_path), "--list", "--results", str(tmp_path)])
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(set(printed)) == sum(len(part.plan().cells()) for part in queue["QUEUE"])
    for part in queue["QUEUE"]:
        assert part.until % part.every == 0
        if (compared := ROOT / "results" / part.name / "compare.json").exists():  # the settings of what is there, so that results can be merged
            theirs, mine = completed(json.loads(compared.read_text())["settings"]), plain(part.plan().config()["settings"])
            assert {name for name in mine if mine[name] != theirs[name]} <= set(OF_THE_CELL), part.name


def test_a_solver_is_given_with_its_options_steps_and_pictures():
    named = runpy.run_path(str(ROOT / "solvers.py"))["named"]
    assert named("ddim:50", 8) == {"solver": "ddim", "steps": 50, "samples": 8}
    assert named("ddim:sigma_max=80:50:2000", 8) == {"solver": "ddim:sigma_max=80", "steps": 50, "samples": 2000}
    with pytest.raises(SystemExit, match="'ddim' is not name:steps"):
        named("ddim", 8)


def test_solvers_are_measured_on_the_models_of_a_comparison(tmp_path, capsys):
    plan = Plan("digits", replace(TINY, updates=2), ("uniform", "min-snr"), (0,), (0.001,), 2, 0, 0)
    list(compare(plan, tmp_path / "models", device="cpu"))
    script = runpy.run_path(str(ROOT / "solvers.py"))
    words = [str(tmp_path / "models"), "--samples", "8", "--device", "cpu"]
    script["main"]([*words, "--methods", "uniform", "--solvers", "ddim:2"])
    uniform, min_snr = (tmp_path / "models" / "cells" / cell.slug for cell in plan.cells())
    (first,) = script["known"](uniform)
    assert script["known"](min_snr) == []
    script["main"]([*words, "--solvers", "ddim:2", "dpm++:3:6"])
    rows = [row for cell in (uniform, min_snr) for row in script["known"](cell)]
    assert rows[0] == first  # as it was
    assert [(row["solver"], row["steps"], row["samples"]) for row in rows] == 2 * [("ddim", 2, 8), ("dpm++", 3, 6)]
    assert len({row["frechet"] for row in rows}) == 4
    assert f"{rows[3]['frechet']:.2f}" in capsys.readouterr().out.splitlines()[-1]


def test_the_prediction_is_compared_with_the_truth(tmp_path, capsys):
    out = tmp_path / "prediction.json"
    small = "--seeds", "1", "--updates", "50", "--samples", "8", "--out", str(out)
    runpy.run_path(str(ROOT / "prediction.py"))["main"]([*small, "--cases", "linear", "flow, VLB"])
    found = json.loads(out.read_text())
    assert [(row["case"], row["probes"]) for row in found["rows"]] == [("linear", 10), ("flow, VLB", 10)]
    assert all(0 < row["best"] <= row["true"] for row in found["rows"])  # no density has less variance than the best one
    assert [row["moves"] for row in found["rows"]] == [False, True]
    assert "flow, VLB" in capsys.readouterr().out


def test_samplers_are_compared_under_muon(tmp_path, capsys):
    script = runpy.run_path(str(ROOT / "muon.py"))
    script["RATES"].update(adamw=(1e-3,), muon=(1e-2,))
    script["main"](["--seeds", "1", "--updates", "3", "--samples", "16", "--samplers", "variance-optimal", "--out", str(tmp_path / "muon.json")])
    rows = json.loads((tmp_path / "muon.json").read_text())["rows"]
    assert [(row["optimizer"], row["lr"]) for row in rows] == [("adamw", 1e-3), ("muon", 1e-2)]
    assert rows[0]["validation"] != rows[1]["validation"]
    assert all(0 < row["rho"] <= 1 for row in rows)  # prices were found, and no warning said that an optimiser was left out
    assert f"{rows[1]['frechet']:.4g}" in capsys.readouterr().out.splitlines()[-1]
