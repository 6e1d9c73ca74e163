import ast
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image

import made_up_results
from made_up_results import HIGHER, HOSTILE, HOSTILES, LOWER, TIMES
from noiseclock.lab import report, report_charts, report_figures, report_markdown, report_page, statistics
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.methods import values
from noiseclock.lab.recipes import Recipe
from noiseclock.lab.results import Cell, Results, read


def cell(method: str, seed: int, values: list[float], *, seconds: float = 1.0, lr: float = 1e-3) -> Cell:
    """Evaluated after 10, 20, ... updates of 4 images."""
    points = [{"step": 10 * i, "images": 40 * i, "seconds": seconds * i, "frechet": value} for i, value in enumerate(values, 1)]
    return Cell(method, lr, seed, points=points, finished=True)


def results_of(*cells: Cell) -> Results:
    return Results({"methods": list(dict.fromkeys(c.method for c in cells)), "baseline": "uniform"}, list(cells), [])


# --- what the files are -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [report, report_charts, report_figures, report_markdown, report_page, statistics])
def test_imports_no_torch(module):
    names = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        names |= {str(node.module)} if isinstance(node, ast.ImportFrom) else set()
    assert not [name for name in names if name.split(".")[0] == "torch"]
    # and nothing of ours that is not about result files
    allowed = {"errors", "results", "statistics", "curves", "ended_early", "report_charts", "report_figures", "report_markdown", "report_page"}
    assert {name.rpartition(".")[2] for name in names if name.startswith("noiseclock")} <= allowed | {"lab"}


# --- numbers behind the charts ------------------------------------------------------------------------------------------------------------


def test_a_curve_is_mean_and_range_over_the_seeds_that_have_a_value():
    curve = report_charts.through_training(
        [cell("a", 0, [8, 4, 2]), cell("a", 1, [6, math.nan]), cell("a", 2, [1, 6, math.inf], seconds=3)], "frechet"
    )
    assert curve == {
        "step": [10, 20, 30], "images": [40, 80, 120], "n": [3, 2, 1],
        "seconds": [5 / 3, 4, 3], "mean": [5, 5, 2], "low": [1, 4, 2], "high": [8, 6, 2],
    }  # fmt: skip
    assert report_charts.through_training([cell("a", 0, [math.nan])], "frechet") is None


def test_a_day_is_when_the_baseline_got_to_its_best():
    """Seed 0 is best at its second evaluation, of 2 s; seed 1 at its third, of 9 s."""
    results = results_of(
        cell("uniform", 0, [8, 4, 5]), cell("uniform", 1, [8, 6, 2], seconds=3), cell("a", 0, [100, 3, 1]), cell("a", 1, [100, 3, 2])
    )
    found = report_charts.quality(results, "frechet")
    assert found["day"] == pytest.approx((2 + 9) / 2)
    assert found["target"] == pytest.approx((4 + 2) / 2)
    assert found["log"]  # from 1 to 100
    assert found["lrs"] == [None, None]


def test_no_day_without_a_baseline_or_its_seconds():
    assert report_charts.quality(results_of(cell("a", 0, [3, 2])), "frechet")["day"] is None
    timeless = cell("uniform", 0, [3, 2])
    for point in timeless.points:
        del point["seconds"]
    found = report_charts.quality(results_of(timeless), "frechet")
    assert found["day"] is None
    assert found["curves"][0]["seconds"] == [None, None]


def test_final_values_by_learning_rate():
    results = results_of(*(cell("a", seed, [9, value + seed], lr=lr) for lr, value in ((1e-3, 4), (2e-3, 2)) for seed in (0, 2)))
    assert report_charts.quality(results, "frechet")["lrs"] == [{"lr": [1e-3, 2e-3], "mean": [5, 3], "low": [4, 2], "high": [6, 4], "n": [2, 2]}]


def test_learning_rates_are_compared_once_a_method_has_finished_at_two(tmp_path):
    """Some trainings are stopped early, to choose: a table and a chart of nothing would follow."""
    folder = made_up_results.write(tmp_path / "r", ["uniform", "speed"], (0,), lrs=(1e-3, 2e-3), updates=200, every=100)
    about = "At the best learning rate of each"
    assert about in report_page.page(read(folder))
    assert "own best" in report_markdown.markdown(read(folder))
    for cell in (folder / "cells").glob("*--lr-0.002--*"):
        (cell / "finished.json").unlink()
    assert about not in report_page.page(read(folder))
    assert "own best" not in report_markdown.markdown(read(folder))


def test_loss_by_noise_level_and_its_ratio_are_as_written(made_up):
    """The generator's loss at time u is 3·loss·(1-u)² of one seed, so that the ratio of two methods is that of their mean losses everywhere."""
    results = read(made_up)
    found = report_charts.loss(results)
    assert found["step"] == 400
    losses = {method: np.mean([c.points[-1]["validation"] for c in results.of(method, results.lr)]) for method in results.methods}
    for method, entry in zip(results.methods, found["methods"], strict=True):
        assert entry["mean"] == pytest.approx((losses[method] * 3 * (1 - TIMES) ** 2).tolist(), rel=1e-12)
        assert entry["ratio"] == pytest.approx([losses[method] / losses["uniform"]] * 50, rel=1e-12)


def test_loss_by_noise_level_is_of_the_end_though_a_method_was_stopped_early(tmp_path):
    stopped = {("p2", 0): 100, ("speed", 1): 100}
    folder = made_up_results.write(tmp_path, ["uniform", "speed", "p2"], (0, 1), updates=200, every=100, stopped=stopped, pictures=False)
    shutil.rmtree(next((folder / "cells").glob("p2*seed-1")))
    results = read(folder)
    found = report_charts.loss(results)
    assert (found["step"], [entry and entry["n"] for entry in found["methods"]]) == (200, [2, 1, None])
    assert "after 200 updates; methods that did not get so far are left out." in report_page.page(results)
    under_way = Results(results.config, [replace(cell, finished=False) for cell in results.cells], [])
    assert report_charts.loss(under_way)["step"] == 100  # that all have


def test_densities_are_as_written(made_up):
    """uniform is 1 all along; the generator ends its fifth method, number 4, at Beta(2, 5)."""
    results = read(made_up)
    found = report_charts.density(results)
    assert np.array(found["methods"][0]["density"]) == pytest.approx(np.ones((50, 4)))
    last = np.array(found["methods"][4]["density"])[:, -1]
    beta = 30 * TIMES * (1 - TIMES) ** 4
    # the generator makes the mean of the 50 points 1; by the midpoint rule it is that already, up to (1/50)²/24·max|f''| with |f''| <= 240
    assert last == pytest.approx(beta, rel=(1 / 50) ** 2 / 24 * 240, abs=1e-12)
    assert found["most"] > 2


def test_utility_is_a_share_of_the_loss_at_the_last_evaluation(made_up):
    """The generator writes level·1e-4·(1 - 2t), so every method's curve falls through 0 in the middle; cells that were stopped early have none."""
    results = read(made_up)
    found = report_charts.utility(results)
    assert found["step"] == max(point["step"] for cell in results.cells for point in cell.points)
    for method, curve in zip(results.methods, found["methods"], strict=True):
        done = [cell for cell in results.of(method, results.lr) if cell.finished]
        ratios = [np.array(cell.points[-1]["utility"]) / cell.points[-1]["validation"] for cell in done]
        assert curve["n"] == len(done)
        assert curve["mean"] == pytest.approx(np.mean(ratios, axis=0))
        assert curve["mean"][0] > 0 > curve["mean"][-1]
    # an evaluation without a loss has nothing to be a share of
    for cell in results.cells:
        cell.points[-1].pop("validation")
    assert report_charts.utility(results) is None


def test_overhead_is_the_ratio_of_paces(made_up):
    assert [entry["ratio"] for entry in report_charts.overhead(read(made_up))] == pytest.approx([1, 1, 1.1, 1.25, 1])


def test_sweeps_are_methods_that_differ_in_one_option():
    methods = [
        "uniform",
        "adaptive:count=10",
        "adaptive:count=1",
        "speed:k=5,tau=600",
        "speed:k=5,tau=700",
        "speed:k=9,tau=600",
        "adaptive:count=3@importance",
    ]
    found = {sweep["title"]: sweep for sweep in report_charts.sweeps(methods, {})}
    assert {title: sweep["points"] for title, sweep in found.items()} == {
        "adaptive:count=…": [(2, 1.0), (1, 10.0)],
        "speed:k=5,tau=…": [(3, 600.0), (4, 700.0)],
        "speed:k=…,tau=600": [(3, 5.0), (5, 9.0)],
    }
    assert found["adaptive:count=…"]["label"].startswith("|S|")
    assert [sweep["log"] for sweep in found.values()] == [True, False, False]
    words = report_charts.sweeps(["adaptive:select=f+min-snr:gamma=5", "adaptive:select=greedy+min-snr:gamma=5"], {})
    assert [(sweep["label"], sweep["points"], sweep["numeric"]) for sweep in words] == [("select of adaptive", [(0, "f"), (1, "greedy")], False)]
    [gamma] = report_charts.sweeps(["adaptive+min-snr:gamma=1", "adaptive+min-snr:gamma=5"], {})
    assert gamma["label"] == "gamma of min-snr"
    for odd in ("", ":", "a:=", "a:b=", "=,:+@", "a:b=c=d", ":b=1", ",b=1"):
        report_charts.sweeps([odd, odd + "1"], {odd: {odd: odd}})


def test_a_sweep_has_the_default_of_its_option():
    methods = ["speed+change-aware", "speed:k=10+change-aware", "speed:k=1+change-aware", "speed:tau=500+change-aware", "speed:tau=800+change-aware"]
    more = ["adaptive.paper", "adaptive.paper:select=greedy", "adaptive.paper:count=1,stride=9", "adaptive.paper:stride=9"]
    options = {method: values(method, Recipe()) for method in (*methods, *more)}
    found = {sweep["title"]: sweep["points"] for sweep in report_charts.sweeps([*methods, *more], options)}
    assert found == {
        "speed:k=…+change-aware": [(2, 1.0), (0, 5.0), (1, 10.0)],
        "speed:tau=…+change-aware": [(3, 500.0), (4, 800.0)],  # its default, "auto", is no place on an axis of numbers
        "adaptive.paper:select=…": [(6, "greedy"), (5, "f")],
        "adaptive.paper:count=…,stride=9": [(7, 1.0), (8, 3.0)],
        "adaptive.paper:stride=…": [(5, 1.0), (8, 9.0)],
    }


def test_a_sweep_ends_where_all_its_methods_are_on_seeds_that_all_have():
    """Stopped early, they would be points nowhere; and beside another seed of the baseline, 7 would seem better than uniform, which it is not."""
    cells = [cell("uniform", 0, [6, 1]), cell("uniform", 1, [10, 1]), *(cell(f"speed:k={k}", 0, [7 + k]) for k in (0, 1))]
    (sweep,) = report_charts.quality(results_of(*cells), "frechet")["sweeps"]
    assert sweep["step"] == 10
    assert [value["mean"] for value in sweep["values"]] == [6, 7, 8]
    assert [line["mean"] for line in sweep["curves"]] == [[6, 1], [7], [8]]  # where the chart of all seeds has 8 for the baseline
    assert sweep["by"] == "seconds"
    del cells[-1].points[0]["seconds"]
    assert report_charts.quality(results_of(*cells), "frechet")["sweeps"][0]["by"] == "images"
    # without a common seed, what there is
    (apart,) = report_charts.quality(results_of(*cells[1:]), "frechet")["sweeps"]
    assert [value["mean"] for value in apart["values"]] == [10, 7, 8]


def ended_early(folder: Path) -> Results:
    """Of 14 methods five have reached the end."""
    methods = ["uniform", *(f"m{i}" for i in range(13))]
    stopped = {(method, seed): 100 for method in methods[5:] for seed in (0, 1)}
    return read(made_up_results.write(folder, methods, (0, 1), updates=200, every=100, stopped=stopped, pictures=False))


def test_what_ended_early_has_a_table_of_its_own(tmp_path):
    results = ended_early(tmp_path / "r")
    page, text = report_page.page(results), report_markdown.markdown(results)
    numbers, early = (re.search(rf'<section id="{name}".*?</section>', page, re.DOTALL)[0] for name in ("answer", "early"))
    assert ('title="m3"' in numbers, 'title="m4"' in numbers) == (True, False)
    assert ('title="m3"' in early, 'title="m4"' in early) == (False, True)
    assert "| ended early | learning rate | updates |" in text
    table = statistics.table(results, "frechet")
    (m4, *_) = found = report_page.ended_early(results, table)
    assert [(row.method, row.lr, row.step, set(row.values)) for row in found] == [(f"m{i}", 1e-3, 100, {0, 1}) for i in range(4, 13)]
    theirs = {cell.seed: cell.points[0]["frechet"] for cell in results.of("uniform")}
    assert m4.difference.mean == pytest.approx(sum(m4.values[seed] - theirs[seed] for seed in (0, 1)) / 2)
    # where all got to the end there is no such table
    assert 'id="early"' not in report_page.page(read(made_up_results.write(tmp_path / "all", ["uniform", "m"], (0,), updates=200, every=100)))


def test_lines_that_ended_early_are_hidden_where_there_are_too_many(tmp_path):
    results = ended_early(tmp_path)
    assert [look["early"] for look in report_charts.looks(results)] == [False] * 5 + [True] * 9
    few = replace(results, cells=[cell for cell in results.cells if cell.method in ("uniform", "m0", "m8")])
    assert not any(look["early"] for look in report_charts.looks(few))
    running = replace(results, cells=[replace(cell, finished=False, points=[]) for cell in results.cells])
    assert not any(look["early"] for look in report_charts.looks(running))


def test_every_method_looks_different():
    many = Results({}, [cell(f"m{i}", 0, [1]) for i in range(25)] + [cell("uniform", 0, [1])], [])
    looks = [(look["colour"], look["dash"]) for look in report_charts.looks(many)]
    assert len(set(looks)) == 26
    assert [look["name"] for look in report_charts.looks(many) if look["colour"] == 0] == ["uniform"]


# --- the page, without a browser ----------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """What a parser makes of a page: its elements, the text of each section, and the JSON in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words, self.data, self._inside = "", "", ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = "data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.words += data.replace("\N{NO-BREAK SPACE}", " ")


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    return made_up_results.five_methods(tmp_path_factory.mktemp("made") / "results")


def test_it_opens_with_the_answer_and_says_the_verdicts(made_up):
    results = read(made_up)
    page = Elements(report.page(results))
    first, _, rest = statistics.answer(results).partition(". ")
    assert "speed" in first
    assert page.words.index(first) < page.words.index(rest) < page.words.index("The numbers")
    table = page.words[page.words.index("The numbers") : page.words.index("Quality through training")]
    for word in ("better", "worse", "no significant difference", "Speed-up", "Time per", "1.25×", "Seeds"):
        assert word in table
    for metric in (*LOWER, *HIGHER):
        assert sum(attrs.get("data-metric") == metric for tag, attrs in page.tags if tag == "div") == 2  # at the common and at its own learning rate
    for section in ("answer", "quality", "learning-rate", "sweeps", "samples", "loss", "utility", "density", "overhead", "repeat"):
        assert ("section", {"id": section, "aria-labelledby": f"{section}-title"}) in page.tags
    assert (
        "noiseclock compare digits --samplers uniform speed adaptive:count=1 adaptive:count=3 min-snr --seeds 3 --lr 0.001 0.002 --every 100"
        in page.words
    )
    for setting in ("2.13.0", "x86_64, 2 threads", "3.11.9", "updates"):
        assert setting in page.words


def test_captions_say_only_what_the_charts_have(made_up, tmp_path):
    def quality(results):
        words = Elements(report.page(results)).words
        return words[words.index("Quality through training") :].partition("against images")[0]

    level, unit = "The dotted level is the best value of uniform", "Its unit, 1D, is the time that uniform took to its best value."
    several = quality(read(made_up))
    assert "Each line is the mean over seeds, and its band reaches from the lowest seed to the highest." in several
    assert "dotted where only some" not in several
    assert level in several
    assert unit in several
    one = quality(read(made_up_results.write(tmp_path / "one", ["uniform", "p2"], (0,), updates=200, every=100, pictures=False)))
    assert "Each line is one training." in one
    assert "seeds" not in one
    folder = made_up_results.write(tmp_path / "some", ["uniform", "p2"], (0, 1), updates=200, every=100, stopped={("p2", 1): 100}, pictures=False)
    assert "A line is dotted where only some of its seeds have a value." in quality(read(folder))
    without = quality(results_of(cell("p2", 0, [3, 2])))
    assert level not in without
    assert unit not in without


def test_settings_that_differ_from_the_recipe_are_said(tmp_path):
    folder = made_up_results.write(tmp_path, ["uniform", "p2"], (0,), updates=200, every=100, pictures=False)
    config = json.loads((folder / "compare.json").read_text())
    settings = {**config["settings"], "schedule": "cosine", "solver_steps": 20, "flip": True}
    (folder / "compare.json").write_text(json.dumps({**config, "settings": settings, "changed": ["schedule", "solver_steps", "flip"]}))
    for text in (Elements(report.page(read(folder))).words, report.markdown(read(folder))):
        assert "with schedule cosine, flip true · 200 updates" in text  # steps of the solver are said elsewhere


def test_no_line_ends_between_a_number_and_its_unit(made_up):
    page = report.page(read(made_up))
    answer = page.partition('<p class="answer">')[2].partition("</p>")[0]
    assert re.search(r"\d\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}\d", answer)
    assert re.search(r"\d\N{NO-BREAK SPACE}%", answer)
    assert not re.search(r"\d [±%]|± \d", answer)


def test_twice_the_same_is_no_difference(tmp_path):
    """ "again" is uniform under another name: its numbers are copies."""
    folder = made_up_results.write(tmp_path / "r", ["uniform", "again"], metrics=["frechet"], updates=200, every=100, pictures=False)
    for path in (folder / "cells").glob("again*"):
        twin = folder / "cells" / path.name.replace("again", "uniform", 1)
        shutil.copy(twin / "points.jsonl", path / "points.jsonl")
    words = Elements(report.page(read(folder))).words
    table = words[words.index("The numbers") :]
    assert "no significant difference" in table[: table.index("Quality")]
    assert "again did not differ significantly from uniform" in words
    assert "better" not in re.findall(r"again(.*?)Values are", table, re.S)[0]


def test_pictures_and_charts_have_words(made_up):
    page = Elements(report.page(read(made_up)))
    images = [attrs for tag, attrs in page.tags if tag == "img"]
    assert len(images) == 5 * 4  # methods and steps
    assert all(attrs["alt"].startswith("Samples from ") and attrs["src"].startswith("data:image/png;base64,") for attrs in images)
    assert sum("hidden" not in attrs for attrs in images) == 5
    assert all(attrs["aria-label"] for tag, attrs in page.tags if attrs.get("role") == "img")


def test_nothing_in_the_files_becomes_html(hostile):
    """The elements of a page with hostile names are those of one with plain names."""
    bad, good = (Elements(report.page(read(folder))) for folder in hostile)
    # but for where a name may be broken over lines, which is by its characters
    assert [tag for tag, _ in bad.tags if tag != "wbr"] == [tag for tag, _ in good.tags if tag != "wbr"]
    attributes = {name for _, attrs in bad.tags for name in attrs}
    assert attributes == {name for _, attrs in good.tags for name in attrs}
    assert not [name for name in attributes if name.startswith("on")]
    assert [tag for tag, _ in bad.tags if tag == "script"] == ["script"] * 3
    data = json.loads(bad.data)
    assert {method["name"] for method in data["methods"]} >= set(HOSTILES[:8])
    assert not set(bad.data) & set("<>&\u2028\u2029")
    assert HOSTILE in bad.words  # as text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, Path]:
    return made_up_results.hostile_and_plain(tmp_path_factory.mktemp("hostile"))


def test_what_is_missing_is_said_and_the_rest_shown(tmp_path):
    empty = tmp_path / "empty"
    (empty / "cells").mkdir(parents=True)
    page = Elements(report.write(empty).read_text())
    assert "There is nothing to compare" in page.words
    assert "compare.json is missing" in page.words

    folder = made_up_results.write(tmp_path / "half", updates=300, every=100, stopped={("speed:k=5", 1): 100})
    (folder / "compare.json").write_text(json.dumps({**json.loads((folder / "compare.json").read_text()), "version": 99}))
    [broken] = (folder / "cells").glob("uniform*seed-2")
    (broken / "points.jsonl").write_text((broken / "points.jsonl").read_text()[:-30])
    [picture] = (folder / "cells").glob("uniform*seed-0/samples/step-00000300.png")
    picture.write_bytes(picture.read_bytes()[:-20])
    [other] = (folder / "cells").glob("adaptive*seed-0/samples/step-00000300.png")
    other.write_text("<svg onload='alert(1)'>")
    page = Elements(report.write(folder).read_text())
    for problem in ("version 99", "1 malformed lines", "not finished", "samples of uniform, seed 0, at update 300: not a whole PNG file"):
        assert problem in page.words
    assert len([tag for tag, _ in page.tags if tag == "img"]) == 3 * 3 - 2
    assert "cannot tell" in page.words
    assert ("section", {"id": "quality", "aria-labelledby": "quality-title"}) in page.tags


@pytest.mark.parametrize("lost", ["points.jsonl", "log.jsonl", "samples", "cell.json"])
def test_any_file_may_be_missing(tmp_path, lost):
    folder = made_up_results.write(tmp_path / "r", seeds=(0, 1), updates=200, every=100, metrics=["frechet", "validation"])
    for path in (folder / "cells").glob(f"*/{lost}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    sections = {attrs["id"] for tag, attrs in Elements(report.write(folder).read_text()).tags if tag == "section"}
    absent = {"points.jsonl": {"answer", "quality", "utility", "overhead"}, "log.jsonl": {"loss", "density"}, "samples": {"samples"}}
    everything = {"answer", "quality", "samples", "loss", "utility", "density", "overhead", "repeat", "problems"}
    assert sections == (everything - absent.get(lost, set()) if lost != "cell.json" else {"repeat", "problems"}) - (
        {"problems"} if lost == "samples" else set()
    )
    assert report.write(folder, format="markdown").read_text()
    if lost in ("log.jsonl", "cell.json"):
        assert report.write(folder, format="png").is_dir()


def test_too_many_bytes_of_pictures_leave_the_last_ones(made_up, monkeypatch):
    sizes = {
        step: sum(path.stat().st_size for path in (made_up / "cells").glob(f"*lr-0.001--seed-0/samples/*{step}.png")) for step in (200, 300, 400)
    }
    monkeypatch.setattr(report_page, "MOST_BYTES", sum(sizes.values()) - 1)
    page = Elements(report.page(read(made_up)))
    assert sorted(attrs["data-step"] for tag, attrs in page.tags if tag == "img") == ["300"] * 5 + ["400"] * 5
    monkeypatch.setattr(report_page, "MOST_BYTES", 10)
    page = Elements(report.page(read(made_up)))
    assert "samples of speed, seed 0, at update 400: larger than 0 MB; left out" in page.words
    assert not [tag for tag, _ in page.tags if tag == "img"]


# --- Markdown and figures -----------------------------------------------------------------------------------------------------------------


def test_markdown_has_the_tables(made_up):
    results = read(made_up)
    tokens = MarkdownIt("commonmark").enable("table").parse(report.markdown(results))
    cells = [t.content for t in tokens if t.type == "inline"]
    assert sum(t.type == "table_open" for t in tokens) == 2 * 6 + 1  # metrics at two kinds of learning rate, settings
    t = statistics.table(results, "frechet")
    for line in t.lines:
        assert f"`{line[0]}`" in cells
        assert line[2] in cells
    assert "**better**" in cells
    assert "**no significant difference**" in cells


def test_markdown_of_hostile_names_is_text(hostile):
    """Rendered with raw HTML allowed, as GitHub does before it cleans up."""
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table").render(report.markdown(read(hostile[0])))
    tags = {tag for tag, _ in Elements(rendered).tags}
    assert tags <= {"h1", "h2", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "pre", "strong", "ul", "li"}
    assert HOSTILE in Elements(rendered).words


def test_figures_are_for_papers(tmp_path):
    folder = made_up_results.write(
        tmp_path / "r", ["uniform", "a$b$", "speed:k=1", "speed:k=9", "名"], metrics=["frechet"], lrs=(1e-3, 2e-3), updates=200, every=100
    )
    found = report.figures(read(folder), tmp_path / "figures")
    names = {path.name for path in found}
    assert names == {"quality-frechet.png", "learning-rate-frechet.png", "sweep-speed_k-frechet.png", "loss.png", "density.png", "overhead.png"}
    for path in found:
        with Image.open(path) as image:
            assert image.info["dpi"] == pytest.approx((200, 200), abs=0.1)  # PNG holds dots a metre, as a whole number
            assert len(image.convert("RGB").getcolors(1 << 24)) > 20  # more than paper


# --- where it goes ------------------------------------------------------------------------------------------------------------------------


def test_write(made_up, tmp_path):
    path = report.write(made_up, tmp_path / "new" / "page.html")
    assert path == tmp_path / "new" / "page.html"
    assert [p.name for p in path.parent.iterdir()] == ["page.html"]
    assert report.write(str(made_up), format="markdown") == made_up / "report.md"
    with pytest.raises(Mistake, match=r"there is no folder .*nowhere; give the one that `noiseclock compare` has written"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(Mistake, match=r"unknown format 'htm'.*did you mean html"):
        report.write(made_up, format="htm")
    with pytest.raises(Mistake, match="must not replace the one on all; say with --out"):
        report.write(made_up, methods=("uniform",))
    with pytest.raises(Failure, match="could not be written"):
        report.write(made_up, tmp_path)  # a folder
    assert not list(tmp_path.parent.glob(".*.tmp"))
