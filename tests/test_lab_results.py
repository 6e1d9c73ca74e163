"""Folders that are whole, empty, torn, foreign and hostile."""

import ast
import json
import math
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from PIL import Image

import made_up_results
from noiseclock.lab import results
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import write_json
from noiseclock.lab.report_markdown import facts
from noiseclock.lab.results import CURVES, METRICS, NUMBERS, WORDS, Results, read
from noiseclock.lab.statistics import table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two methods, two seeds, two evaluations."""
    return made_up_results.write(tmp_path / "results", ["uniform", "speed:k=5"], [0, 1], updates=500, every=250)


def cell_of(folder: Path, seed: int = 0, method: str = "uniform") -> Path:
    return next(path for path in (folder / "cells").iterdir() if path.name.startswith(method) and path.name.endswith(f"seed-{seed}"))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True)


# --- what is whole ------------------------------------------------------------------------------------------------------------------------


def test_a_whole_folder_comes_back_as_it_was_written(folder):
    found = read(folder)
    assert found.problems == []
    assert (found.recipe, found.baseline, found.methods, found.seeds, found.lrs, found.lr) == (
        "digits", "uniform", ["uniform", "speed:k=5"], [0, 1], [0.001], 0.001,
    )  # fmt: skip
    assert [(cell.method, cell.lr, cell.seed, cell.finished) for cell in found.cells] == [
        ("speed:k=5", 0.001, 0, True), ("speed:k=5", 0.001, 1, True), ("uniform", 0.001, 0, True), ("uniform", 0.001, 1, True),
    ]  # fmt: skip
    for cell in found.cells:
        assert cell.points == [json.loads(line) for line in lines(cell.folder / "points.jsonl")]
        logged = [json.loads(line) for line in lines(cell.folder / "log.jsonl")]
        assert cell.train == [record for record in logged if record["kind"] == "train"]
        assert cell.validations == [record for record in logged if record["kind"] == "validation"]
        assert cell.settings == json.loads((cell.folder / "cell.json").read_text())["settings"]
        assert cell.made_with["python"] == "3.11.9"
        assert list(cell.pictures) == [250, 500]
        for path in cell.pictures.values():
            with Image.open(path) as picture:
                assert picture.size == (64, 64)
    assert [cell.seed for cell in found.of("uniform")] == [0, 1]
    assert found.of("uniform", 0.5) == []
    assert found.of("nothing") == []


def test_the_order_is_the_baseline_then_that_of_the_config(tmp_path):
    found = read(made_up_results.write(tmp_path, ["b", "a", "uniform"], [0], updates=250, pictures=False))
    assert found.methods == ["uniform", "b", "a"]
    assert Results({}, found.cells, []).methods == ["uniform", "a", "b"]  # without a config: by name


def test_some_methods_are_read_as_if_there_were_no_others_and_the_first_is_the_baseline(tmp_path):
    """Against another baseline the difference is the negative one, taken seed by seed as before."""
    folder = made_up_results.write(tmp_path / "results", ["uniform", "a", "b"], [0, 1, 2], updates=250, pictures=False)
    shutil.rmtree(cell_of(folder, 1, "b"))
    (folder / "costs.json").write_text('{"milliseconds": {"uniform": 10, "a": 12.5}}')
    assert [problem.split()[0] for problem in read(folder).problems] == ["costs.json", "1"]  # both about b
    some = read(folder, methods=("a", "uniform"))
    assert (some.problems, some.baseline, some.methods) == ([], "a", ["a", "uniform"])
    back, there = (table(found, "frechet").rows[1].difference for found in (some, read(folder, methods=("uniform", "a"))))
    assert [back.mean, *back.interval] == pytest.approx([-there.mean, *(-end for end in reversed(there.interval))])
    with pytest.raises(Mistake, match=r"unknown method 'aa' \(did you mean a\?\); known: uniform, a, b"):
        read(folder, methods=("uniform", "aa"))


def test_some_seeds_are_read_as_if_there_were_no_others(tmp_path):
    """A method with one seed beside a baseline with three is compared, and drawn, at the seed that both have."""
    folder = made_up_results.write(tmp_path / "results", ["uniform", "a"], [0, 1, 2], updates=250, pictures=False)
    for seed in (0, 2):
        shutil.rmtree(cell_of(folder, seed, "a"))
    some = read(folder, seeds=(1,))
    assert (some.problems, some.seeds, [cell.method for cell in some.cells]) == ([], [1], ["a", "uniform"])
    whole, alone = (table(found, "frechet").rows for found in (read(folder), some))
    assert [row.final.n for row in whole] == [3, 1]
    assert [row.final.n for row in alone] == [1, 1]
    assert alone[1].difference.mean == whole[1].difference.mean  # differences are of the same seeds anyway
    with pytest.raises(Mistake, match="unknown seed '7'; known: 0, 1, 2"):
        read(folder, seeds=(7,))


def test_the_common_learning_rate_is_the_recipe_s_then_the_first_then_the_smallest(tmp_path):
    found = read(made_up_results.write(tmp_path, ["uniform"], [0], lrs=(2e-3, 1e-3, 4e-3), updates=250, pictures=False))

    def with_config(**config):
        return Results(config, found.cells, []).lr

    assert with_config(settings={"lr": 4e-3}, lrs=[2e-3]) == 4e-3
    assert with_config(settings={"lr": 7.0}, lrs=[9.0, 2e-3]) == 2e-3
    assert with_config() == 1e-3
    assert Results({}, [], []).lr is None


def test_numbers_that_are_not_finite_come_back(folder):
    path = cell_of(folder) / "points.jsonl"
    path.write_text('{"step": 1, "frechet": "NaN", "kernel": "Infinity", "bits": "-Infinity", "validation": 1e300, "recall": null}\n')
    point = next(cell for cell in read(folder).of("uniform") if cell.seed == 0).points[0]
    assert math.isnan(point["frechet"])
    # beyond 1e100 squares overflow, and statistics are made of squares
    assert (point["kernel"], point["bits"], point["validation"]) == (math.inf, -math.inf, math.inf)
    assert "recall" not in point


# --- what is missing ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: None, lambda path: path.write_text("a file")])
def test_a_folder_that_is_empty_or_none(tmp_path, make):
    path = tmp_path / "nothing"
    make(path)
    found = read(path)
    assert (found.config, found.cells, found.methods, found.seeds, found.lr) == ({}, [], [], [], None)
    assert found.recipe == "an unknown recipe"
    assert len(found.problems) == 2
    assert "compare.json" in found.problems[0]
    assert "nothing to compare" in found.problems[1]


def test_without_compare_json_the_cells_are_shown(folder):
    (folder / "compare.json").unlink()
    found = read(folder)
    assert found.problems == ["compare.json is missing"]
    assert (len(found.cells), found.recipe, found.baseline) == (4, "digits", "uniform")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"text"', "\udcff", "[" * 100_000])
def test_a_compare_json_that_is_no_object(folder, text):
    (folder / "compare.json").write_bytes(text.encode(errors="surrogateescape"))
    found = read(folder)
    assert found.problems == ["compare.json does not hold a JSON object"]
    assert len(found.cells) == 4


@pytest.mark.parametrize("version", [2, "1", None, {"a": "b" * 1000}])
def test_another_version_is_named_and_the_rest_shown(folder, version):
    config = json.loads((folder / "compare.json").read_text())
    write_json(folder / "compare.json", {**config, "version": version})
    found = read(folder)
    assert len(found.problems) == 1
    assert found.problems[0].startswith("compare.json has version ")
    assert "this reads version 1" in found.problems[0]
    assert len(found.problems[0]) < 200
    assert (len(found.cells), found.recipe) == (4, "digits")


def test_malformed_parts_of_the_config_are_named_and_left_out(folder):
    config = json.loads((folder / "compare.json").read_text())
    wrong = {
        "methods": "uniform",
        "seeds": [True],
        "lrs": [0],
        "baseline": ["uniform"],
        "settings": [],
        "every": -1,
        "samples": 1.5,
        "recipe": "a\nb",
    }
    write_json(folder / "compare.json", {**config, **wrong})
    found = read(folder)
    assert set(found.config) == {"version", "made with"}
    (problem,) = found.problems
    assert problem.startswith("compare.json: malformed ")
    assert all(name in problem for name in wrong)
    assert (found.methods, found.lr, found.recipe) == (["uniform", "speed:k=5"], 0.001, "digits")


def test_cells_that_are_missing_unfinished_or_not_evaluated_are_named(tmp_path):
    folder = made_up_results.write(tmp_path, ["uniform", "p2"], [0, 1, 2], updates=500, stopped={("p2", 1): 250, ("p2", 2): 0}, pictures=False)
    shutil.rmtree(cell_of(folder, 2))
    found = read(folder)
    assert found.problems == [
        "1 of 6 trainings not begun: uniform, lr 0.001, seed 2",
        "2 of 6 trainings not finished: p2, lr 0.001, seed 1 (at update 250); p2, lr 0.001, seed 2 (at update 0)",
        "1 of 6 trainings without an evaluation: p2, lr 0.001, seed 2",
    ]
    assert [cell.finished for cell in found.of("p2")] == [True, False, False]


def test_a_training_that_failed_says_why_unless_asked_of_before(tmp_path):
    folder = made_up_results.write(tmp_path, ["uniform", "p2"], [0], updates=500, stopped={("p2", 0): 250}, pictures=False)
    (cell,) = (folder / "cells").glob("p2*")
    write_json(cell / "failed.json", {"why": "the loss was not finite"})
    assert read(folder).problems == ["1 of 2 trainings failed: p2, lr 0.001, seed 0 (at update 250: the loss was not finite)"]
    assert {cell.method: cell.failed for cell in read(folder).cells} == {"uniform": "", "p2": "the loss was not finite"}
    assert read(folder, at=250).problems == []
    (cell / "failed.json").write_text('{"why": 3}')
    assert read(folder).problems[0].endswith("/failed.json: malformed why; left out")
    assert read(folder).of("p2")[0].failed == "for an unknown reason"


def test_many_of_a_kind_are_counted_and_some_named(folder):
    config = json.loads((folder / "compare.json").read_text())
    write_json(folder / "compare.json", {**config, "seeds": list(range(100))})
    (problem,) = read(folder).problems
    assert problem.startswith("196 of 200 trainings not begun: ")
    assert problem.endswith("; and 193 more")


def test_a_cell_without_a_usable_cell_json_is_left_out(folder):
    (cell_of(folder, 0) / "cell.json").unlink()
    (cell_of(folder, 1) / "cell.json").write_text('{"method": 3, "lr": "NaN", "seed": -1, "settings": []}')
    (cell_of(folder, 0, "speed") / "cell.json").write_text("[")
    found = read(folder)
    assert [(cell.method, cell.seed) for cell in found.cells] == [("speed:k=5", 1)]
    told = "\n".join(found.problems)
    assert "seed-0/cell.json is missing" in told
    assert "seed-1/cell.json: malformed method, lr, seed, settings; left out" in told
    assert "seed-1/cell.json: without method and lr and seed the cell is left out" in told
    assert "seed-0/cell.json does not hold a JSON object" in told
    assert "3 of 4 trainings not begun" in told


def test_a_file_among_the_cells_and_a_folder_in_place_of_a_file(folder):
    (folder / "cells" / "notes.txt").write_text("mine")
    (folder / "cells" / ".lock").write_text("hidden")
    path = cell_of(folder) / "points.jsonl"
    path.unlink()
    path.mkdir()
    found = read(folder)
    assert len(found.cells) == 4
    assert [problem for problem in found.problems if "notes.txt" in problem] == ["notes.txt/cell.json cannot be read (Not a directory)"]
    assert any("points.jsonl cannot be read (Is a directory)" in problem for problem in found.problems)
    assert not any(".lock" in problem for problem in found.problems)


# --- lines --------------------------------------------------------------------------------------------------------------------------------


def test_malformed_lines_are_counted_and_named(folder):
    path = cell_of(folder) / "points.jsonl"
    whole = lines(path)
    bad = [
        "{\n",
        "\n",
        "[1]\n",
        "7\n",
        '{"frechet": 1}\n',
        '{"step": 1.5}\n',
        '{"step": true}\n',
        '{"step": -1}\n',
        "\x00\n",
        '{"step": 9' + "9" * 5000 + "}\n",
    ]
    path.write_text(whole[0] + "".join(bad) + whole[1] + whole[1][:40])  # the last is torn
    found = read(folder)
    assert found.of("uniform")[0].points == [json.loads(line) for line in whole]
    assert found.problems == [f"{path.parent.name}/points.jsonl: {len(bad) + 1} malformed lines; left out"]


def test_a_line_torn_in_the_middle_of_a_character_and_one_nested_too_deep(folder):
    path = cell_of(folder) / "points.jsonl"
    torn = '{"step": 1, "solver": "é'.encode()[:-1]
    path.write_bytes(torn + b"\n" + b"[" * 200_000 + b"\n" + path.read_bytes())
    assert read(folder).problems == [f"{path.parent.name}/points.jsonl: 2 malformed lines; left out"]


def test_fields_that_are_not_of_their_kind_are_counted_and_left_out(folder):
    path = cell_of(folder) / "points.jsonl"
    path.write_text(
        json.dumps({"step": 5, "frechet": "low", "kernel": [1], "bits": True, "validation": 10**400, "recall": 0.5, "solver": 3, "own": [1]}) + "\n"
    )
    found = read(folder)
    assert found.of("uniform")[0].points == [{"step": 5, "recall": 0.5, "own": [1]}]
    assert found.problems == [f"{path.parent.name}/points.jsonl: 5 malformed fields; left out"]


@pytest.mark.parametrize(
    "curves",
    [
        {"time": [0.1, 0.2], "loss_by_time": [1.0]},
        {"time": [0.1, 0.2], "loss_by_time": [1.0, None]},
        {"time": [0.1, 0.2]},
        {"time": "text", "loss_by_time": [1.0]},
        {"time": [[0.1]], "loss_by_time": [1.0]},
    ],
)
def test_a_curve_without_its_other_half_is_left_out(folder, curves):
    path = cell_of(folder) / "log.jsonl"
    density = {"density_time": [0.5, 0.6], "density": ["NaN", 2]}
    path.write_text(json.dumps({"kind": "validation", "step": 5, **curves, **density}) + "\n")
    found = read(folder)
    (record,) = found.of("uniform")[0].validations
    assert set(record) == {"kind", "step", "density_time", "density"}
    assert math.isnan(record["density"][0])
    assert record["density"][1] == 2
    assert found.problems == [f"{path.parent.name}/log.jsonl: 1 malformed fields; left out"]


def test_of_two_records_of_a_step_the_later_counts_and_steps_are_in_order(folder):
    path = cell_of(folder) / "points.jsonl"
    path.write_text('{"step": 9, "bits": 1}\n{"step": 3, "bits": 2}\n{"step": 9, "bits": 3}\n')
    found = read(folder)
    assert found.of("uniform")[0].points == [{"step": 3, "bits": 2}, {"step": 9, "bits": 3}]
    assert found.problems == [f"{path.parent.name}/points.jsonl: 1 lines for a step that comes again; left out"]
    # a train and a validation record of one step are two things: the log that was written has both, and nothing was said of it
    assert len(found.of("uniform")[0].train) == len(found.of("uniform")[0].validations) == 2


@given(st.binary(max_size=300) | st.lists(st.text(max_size=30), max_size=5).map(lambda parts: "\n".join(parts).encode(errors="replace")))
@settings(max_examples=100, deadline=None)
def test_no_bytes_make_it_raise(tmp_path_factory, content):
    folder = tmp_path_factory.mktemp("fuzz")
    for name in ("a", "b"):
        (folder / "cells" / name).mkdir(parents=True)
    (folder / "cells" / "a" / "cell.json").write_text('{"method": "m", "lr": 1, "seed": 0}')
    for name in ("compare.json", "cells/b/cell.json", "cells/a/points.jsonl", "cells/a/log.jsonl"):
        (folder / name).write_bytes(content)
    found = read(folder)
    assert found.cells[0].method == "m"
    shutil.rmtree(folder)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["NaN", "Infinity", "x", "\ud800", "\x1b[2J"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["time", "density", "a"]), inner, max_size=3), max_leaves=6,
)  # fmt: skip
fields = st.sampled_from(["step", "kind", *NUMBERS, *WORDS, *CURVES[0], *CURVES[1]])


@given(st.lists(st.dictionaries(fields, values, max_size=6), max_size=6))
@settings(max_examples=100, deadline=None)
def test_whatever_comes_back_is_of_its_kind(tmp_path_factory, records):
    folder = tmp_path_factory.mktemp("fuzz")
    cell = folder / "cells" / "a"
    cell.mkdir(parents=True)
    (cell / "cell.json").write_text('{"method": "m", "lr": 1, "seed": 0}')
    for name in ("points.jsonl", "log.jsonl"):
        (cell / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    (found,) = read(folder).cells
    for record in [*found.points, *found.train, *found.validations]:
        assert type(record["step"]) is int
        assert all(type(record[name]) in (int, float) for name in NUMBERS if name in record)
        assert all(type(record[name]) is str and record[name].isprintable() for name in WORDS if name in record)
        for a, b in CURVES:
            assert (a in record) == (b in record)
            assert a not in record or (len(record[a]) == len(record[b]) and all(type(x) in (int, float) for x in record[a] + record[b]))
    steps = [point["step"] for point in found.points]
    assert steps == sorted(steps)
    shutil.rmtree(folder)


# --- the whole ----------------------------------------------------------------------------------------------------------------------------


def test_of_a_training_that_is_there_twice_the_one_that_got_further_counts(folder):
    first = cell_of(folder)
    shutil.copytree(first, folder / "cells" / "copy")
    (folder / "cells" / "copy" / "finished.json").unlink()
    found = read(folder)
    assert len(found.cells) == 4
    assert found.of("uniform")[0].folder == first
    assert found.problems == [f"cells/copy and cells/{first.name} are the same training; the one that got further counts"]


def test_settings_that_differ_between_cells_are_named(folder):
    path = cell_of(folder) / "cell.json"
    about = json.loads(path.read_text())
    write_json(path, {**about, "settings": {**about["settings"], "batch": 128, "weighting": "min-snr"}})  # a weighting is part of a method
    assert read(folder).problems == ["the trainings have different settings, 'batch' is 64 in 3; 128 in 1"]


HOSTILE = [
    "<script>alert(1)</script>",
    "'\"><img src=x onerror=alert(1)>",
    "../../etc/passwd",
    "{{7*7}}",
    "[red]bold[/]",
    "$(rm -rf .)",
    "=1+1",
    "ünïcödé ∀",
]


def test_hostile_names_are_data(tmp_path):
    folder = made_up_results.write(tmp_path, ["uniform", *HOSTILE], [0], updates=250, pictures=False)
    found = read(folder)
    assert found.problems == []
    assert found.methods == ["uniform", *HOSTILE]


@pytest.mark.parametrize("name", ["\x1b[2Jgone", "two\nlines", "\u202egnp.exe", "half \ud800"])
def test_names_that_could_drive_a_terminal_are_refused(folder, name):
    path = cell_of(folder) / "cell.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "method": name}))
    found = read(folder)
    if name == "half \ud800":  # no file could hold it
        assert "half ?" in found.methods
    else:
        assert len(found.cells) == 3
    assert all(problem.isprintable() for problem in found.problems)


def test_names_of_files_that_could_drive_a_terminal_are_told_in_letters(folder):
    for name in (b"\x1b[2J", b"\xff\xfe"):
        os.mkdir(os.fsencode(folder / "cells") + b"/" + name)
    found = read(folder)
    assert len(found.problems) == 2
    assert all(problem.isprintable() and problem.encode() for problem in found.problems)


def test_settings_can_always_be_written_down(folder):
    path = cell_of(folder) / "cell.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, "settings": {"\udc80": "\ud800", "é": ["\udfff"]}}))
    assert read(folder).of("uniform")[0].settings == {"?": "?", "é": ["?"]}


def test_times_come_from_the_costs_of_updates_where_those_are_there(folder):
    (folder / "costs.json").write_text('{"milliseconds": {"uniform": 10, "speed:k=5": 12.5}}')
    results = read(folder)
    assert results.problems == []
    assert [point["seconds"] for point in results.of("uniform")[0].points] == [2.5, 5.0]
    assert [point["seconds"] for point in results.of("speed:k=5")[1].points] == [3.125, 6.25]
    for cell in results.cells:
        assert all(
            record["seconds"] == record["step"] * (0.01 if cell.method == "uniform" else 0.0125) for record in (*cell.train, *cell.validations)
        )
    assert "time per update measured for each method alone" in facts(results)
    assert "time per update measured for each method alone" not in facts(read(folder.parent / "elsewhere"))


def test_times_from_the_costs_are_compared_wherever_the_trainings_ran(folder):
    (folder / "costs.json").write_text('{"milliseconds": {"uniform": 10, "speed:k=5": 12.5}}')
    for i, path in enumerate(sorted(folder.glob("cells/*/cell.json"))):
        path.write_text(json.dumps({**json.loads(path.read_text()), "made with": {"machine": f"number {i}"}}))
    found = table(read(folder), "frechet")
    assert {row.method: str(row.overhead) for row in found.rows}["speed:k=5"] == "1.25"
    assert "machines" not in " ".join(found.notes)
    (folder / "costs.json").unlink()
    found = table(read(folder), "frechet")
    assert {row.method: str(row.overhead) for row in found.rows}["speed:k=5"] == "-"
    assert "machines" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        '{"milliseconds": {"uniform": 10}}': ["costs.json has no milliseconds for speed:k=5; their times are left out"],
        '{"milliseconds": {"uniform": 10, "speed:k=5": -1}}': [
            "costs.json: malformed speed:k=5; left out", "costs.json has no milliseconds for speed:k=5; their times are left out",
        ],
    }.items(),
)  # fmt: skip
def test_a_method_without_a_cost_has_no_times(folder, text, said):
    (folder / "costs.json").write_text(text)
    results = read(folder)
    assert results.problems == said
    assert all("seconds" in point for point in results.of("uniform")[0].points)
    assert not any("seconds" in record for cell in results.of("speed:k=5") for record in (*cell.points, *cell.train, *cell.validations))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"milliseconds": 3}'])
def test_damaged_costs_are_named_and_leave_no_time_standing(folder, text):
    (folder / "costs.json").write_text(text)
    results = read(folder)
    assert any("costs.json" in problem for problem in results.problems)
    assert not any("seconds" in point for cell in results.cells for point in cell.points)


def test_pictures_are_files_of_the_folder_with_a_step_in_their_name(folder, tmp_path):
    samples = cell_of(folder) / "samples"
    outside = tmp_path / "secret.png"
    outside.write_bytes(b"secret")
    (samples / "step-00000750.png").symlink_to(outside)
    (samples / "step-00001000.png").mkdir()
    for name in ("step-.png", "step-1.png.tmp", "step--1.png", ".step-00002000.png", f"step-{'9' * 30}.png"):
        (samples / name).write_bytes(b"")
    assert list(read(folder).of("uniform")[0].pictures) == [250, 500]


def test_no_torch_here():
    """The package's own __init__ imports torch; these files, which a reader of results needs, do not."""
    allowed = {"results", "curves", "statistics", "errors"}
    for name in allowed:
        tree = ast.parse((Path(results.__file__).parent / f"{name}.py").read_text())
        for node in ast.walk(tree):
            named = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
            )
            for module in named:
                first, *rest = module.split(".")
                assert first in {
                    "__future__",
                    "collections",
                    "dataclasses",
                    "difflib",
                    "itertools",
                    "json",
                    "math",
                    "pathlib",
                    "re",
                    "typing",
                    "numpy",
                    "scipy",
                } or (first == "noiseclock" and rest[0] == "lab" and rest[1] in allowed), f"{name}.py imports {module}"


def test_the_metrics_are_numbers():
    assert set(METRICS) < set(NUMBERS)
