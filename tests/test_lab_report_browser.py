"""The report in a browser: charts, choices, keyboard, paper and phone, with results that are good, hostile and damaged."""

import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import made_up_results
from made_up_results import HOSTILE, HOSTILES
from noiseclock.lab import report, report_charts
from noiseclock.lab.results import read
from pages import until


def opened(browser: Any, path: Path, **options: Any) -> Any:
    """A page that is watched: `page.wrong` collects what a good one does not do."""
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options}).new_page()
    page.wrong = []
    page.on("console", lambda message: page.wrong.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (page.wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: page.wrong.append(f"request: {request.url}") if not request.url.startswith(("data:", "file:")) else None)
    page.goto(path.as_uri())
    return page


@pytest.fixture(scope="module")
def made_up(tmp_path_factory) -> Path:
    return made_up_results.five_methods(tmp_path_factory.mktemp("made") / "results")


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> tuple[Path, Path]:
    return made_up_results.hostile_and_plain(tmp_path_factory.mktemp("hostile"))


@pytest.fixture(scope="module")
def written(made_up, tmp_path_factory) -> Path:
    return report.write(made_up, tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def desktop(browser, written) -> Any:
    return opened(browser, written)


@pytest.fixture
def page(desktop) -> Iterator[Any]:
    """The page as it was opened, as far as a reader can tell."""
    yield desktop
    assert desktop.wrong == []
    for box in desktop.locator(".methods input").all():
        box.check()
    desktop.select_option("#metric", "frechet")
    desktop.locator("#step").focus()
    desktop.keyboard.press("End")


CHARTS = "[...document.querySelectorAll('.chart')]"
IMAGES = "document.querySelector('.chart[data-by=images]')"


def drawn(page: Any) -> list[tuple[str, set[int]]]:
    """The methods in every chart that is visible; maps of density are one method each."""
    kinds = page.evaluate(
        f"{CHARTS}.filter(c => !c.closest('[hidden]')).map(c => [c.dataset.chart, c.dataset.method ?? null, c.data.map(t => t.meta ?? null)])"
    )
    return [(kind, {int(method)} if method is not None else set(methods)) for kind, method, methods in kinds]


def test_charts_are_drawn(page, made_up):
    kinds = [kind for kind, _ in drawn(page)]
    assert {kind: kinds.count(kind) for kind in kinds} == {"quality": 3, "lr": 1, "sweep": 1, "loss": 2, "utility": 1, "density": 5, "overhead": 1}
    marks = "path.js-line, path.point, .hm image, .bars path"
    assert min(page.evaluate(f"{CHARTS}.map(c => [...c.querySelectorAll('{marks}')].filter(m => m.getBoundingClientRect().width > 0).length)")) >= 1
    trace = page.evaluate(f"{IMAGES}.data.filter(t => t.meta === 1 && t.hovertext)[0]")
    curve = report_charts.quality(read(made_up), "frechet")["curves"][1]
    assert trace["x"] == curve["images"]
    assert trace["y"] == pytest.approx(curve["mean"], rel=1e-5)  # six digits travel


def test_a_method_can_be_hidden_everywhere_by_keyboard(page):
    visible = "document.querySelectorAll('figure:not([hidden])').length"
    before, figures = drawn(page), page.evaluate(visible)
    page.locator(".methods input").nth(1).focus()
    page.keyboard.press("Space")
    assert [kind for kind, methods in drawn(page) if 1 in methods] == []
    assert page.evaluate(visible) == figures - 2  # its density and its samples
    assert "speed" not in page.evaluate("document.querySelector('.chart[data-chart=overhead] .main-svg').textContent")
    page.keyboard.press("Space")
    assert drawn(page) == before


def test_the_name_at_the_end_of_a_line_hides_it(page):
    page.locator(".chart[data-by=images] .annotation-text-g", has_text="min-snr").click(force=True)
    until(page, "!document.querySelectorAll('.methods input')[4].checked")
    assert [kind for kind, methods in drawn(page) if 4 in methods] == []


def test_names_of_many_lines_that_end_together_stay_inside_the_chart(browser, tmp_path):
    """At the top, where lines of a share end, names that are pushed apart would leave the chart, which cuts off what is outside."""
    methods = ["uniform", *(f"speed:k={k}" for k in range(2, 15))]
    folder = made_up_results.write(tmp_path / "results", methods, (0,), effect={"speed:k=2": 20.0}, updates=200, every=100, pictures=False)
    page = opened(browser, report.write(folder))
    for metric in ("recall", "frechet"):
        page.select_option("#metric", metric)
        page.wait_for_timeout(200)
        box, *names = page.evaluate(
            f"[{IMAGES}, ...{IMAGES}.querySelectorAll('.annotation-text-g')].map(e => e.getBoundingClientRect()).map(b => [b.top, b.bottom])"
        )
        assert len(names) == len(methods)
        assert box[0] <= min(top for top, _ in names)
        assert max(bottom for _, bottom in names) <= box[1]
        middles = sorted((top + bottom) / 2 for top, bottom in names)
        assert min(b - a for a, b in itertools.pairwise(middles)) > 12  # of 16 pixels that are asked for, at letters of 12.5
    assert page.wrong == []


def test_what_ended_early_can_be_ticked(browser, tmp_path):
    methods = ["uniform", *(f"speed:k={k}" for k in range(1, 14))]
    stopped = {(method, 0): 100 for method in methods[5:]}
    page = opened(browser, report.write(made_up_results.write(tmp_path, methods, (0,), updates=200, every=100, stopped=stopped)))
    late = set(range(5))
    assert all(methods - {None} <= late for kind, methods in drawn(page) if kind not in ("sweep", "quality"))
    assert [methods for kind, methods in drawn(page) if kind == "quality"] == [late, late, set(range(14))]  # the last is of the sweep alone
    page.locator(".methods input").nth(7).check()
    assert 7 in next(methods for kind, methods in drawn(page) if kind == "quality")
    assert ("density", {7}) in drawn(page)
    assert page.wrong == []


def test_the_metric_can_be_chosen(page, made_up):
    first = page.inner_text("#answer")
    page.select_option("#metric", "recall")
    assert "recall" in page.inner_text("#answer")
    assert page.inner_text("#answer") != first
    values = page.evaluate(f"{IMAGES}.data.filter(t => t.meta === 0 && t.hovertext)[0].y")
    assert values == pytest.approx(report_charts.quality(read(made_up), "recall")["curves"][0]["mean"], rel=1e-5)


def test_samples_through_training(page):
    seen = "[...document.querySelectorAll('#samples img')].filter(i => i.offsetWidth && i.naturalWidth).map(i => i.dataset.step)"
    assert page.evaluate(seen) == ["400"] * 5
    page.locator("#step").focus()
    page.keyboard.press("Home")
    assert page.evaluate(seen) == ["100"] * 5
    assert page.inner_text("#step-shown") == "update 100"


def test_tooltips_have_numbers(page):
    chart = page.locator(".chart[data-by=seconds]").first
    chart.scroll_into_view_if_needed()
    chart.locator("path.point").last.hover(force=True)
    page.wait_for_selector(".chart[data-by=seconds] .hovertext")
    said = chart.locator(".hovertext").text_content()
    assert re.search(r"from [\d.]+ to [\d.]+ over 3 seeds", said)
    assert re.search(r"[\d,]+ images · [\d.]+ s · [\d.]+D", said)


def test_dark_mode_reaches_page_and_charts(page):
    look = f"[getComputedStyle(document.body).backgroundColor, {IMAGES}.layout.font.color, {IMAGES}.data.at(-1).line.color]"
    light = page.evaluate(look)
    page.emulate_media(color_scheme="dark")
    until(page, f"{IMAGES}.layout.font.color !== '{light[1]}'")
    dark = page.evaluate(look)
    page.emulate_media(color_scheme="light")
    until(page, f"{IMAGES}.layout.font.color === '{light[1]}'")
    assert all(a != b for a, b in zip(dark, light, strict=True))
    shades = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (dark[0], light[0])]
    assert shades[0] < 100
    assert shades[1] > 700


def test_on_paper(page):
    ink = page.evaluate(f"{IMAGES}.layout.font.color")
    page.emulate_media(media="print", color_scheme="dark")
    until(page, "[...document.querySelectorAll('details')].every(d => d.open)")
    assert not page.is_visible(".controls")
    assert not page.is_visible(".slider")
    widths = page.evaluate("[...document.querySelectorAll('.chart .main-svg')].map(c => c.getBoundingClientRect().width)")
    assert 200 < min(widths) < max(widths) <= 210 / 25.4 * 96 - 2 * 14 / 25.4 * 96  # A4 less its margins of 14 mm, in pixels
    assert page.evaluate(f"{IMAGES}.layout.font.color") == ink  # on paper, whatever the screen
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="screen", color_scheme="light")
    until(page, f"{CHARTS}.every(c => Math.abs(c.querySelector('.main-svg').getBoundingClientRect().width - c.clientWidth) < 2)")
    assert page.is_visible(".controls")


NO_SCROLL = "[document.documentElement.scrollWidth, document.body.scrollWidth, Math.max(390, ...RIGHT)]".replace(
    "RIGHT", "[...document.querySelectorAll('.chart .main-svg')].map(c => Math.round(c.getBoundingClientRect().right))"
)


@pytest.fixture(scope="module")
def phone(browser, written) -> Any:
    return opened(browser, written, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)


def test_a_phone_has_no_horizontal_scroll(phone):
    assert phone.evaluate(NO_SCROLL) == [390, 390, 390]
    assert phone.evaluate("document.querySelector('.scroll').scrollWidth > document.querySelector('.scroll').clientWidth")  # the table does
    assert phone.wrong == []


def test_on_a_phone_methods_have_one_line_and_their_column_stays_with_its_head(phone):
    heights = phone.evaluate("[...document.querySelectorAll('.methods .name')].map(e => e.getBoundingClientRect().height)")
    assert max(heights) < 1.5 * min(heights)
    heads = "[...document.querySelectorAll('#answer tr > th:first-child')].filter(e => e.offsetWidth)"
    left = f"{heads}.map(e => Math.round(e.getBoundingClientRect().left))"
    before = phone.evaluate(left)
    phone.evaluate("document.querySelector('.scroll').scrollLeft = 9999")
    assert phone.evaluate(left) == before
    phone.evaluate("document.querySelector('.scroll').scrollLeft = 0")


def test_no_other_script_runs(phone):
    """Should a tag get through all the same, the page's policy does not run it. (The refusal is a message on the console.)"""
    phone.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    phone.evaluate("() => { const s = document.createElement('script'); s.textContent = 'window.ran = 2'; document.body.append(s); }")
    phone.wait_for_timeout(200)
    assert phone.evaluate("window.ran") is None
    assert any("Content Security Policy" in message for message in phone.wrong)


def test_hostile_names_stay_names(browser, hostile, tmp_path):
    page = opened(browser, report.write(hostile[0], tmp_path / "hostile.html"))
    assert page.evaluate("document.querySelectorAll('img[src=x], [onload], [onerror], [onmouseover], .chart a').length") == 0
    assert page.evaluate("document.scripts.length") == 3
    assert page.inner_text("h1").startswith(HOSTILE)
    names = page.evaluate(f"[...{IMAGES}.querySelectorAll('.annotation-text')].map(t => t.textContent)")
    assert sorted(names) == sorted(name if len(name) <= 24 else name[:23] + "…" for name in HOSTILES if name.isprintable())
    page.locator(".chart[data-by=images] path.point").first.hover(force=True)
    page.wait_for_selector(".hovertext")
    bars = page.evaluate("[...document.querySelectorAll('.chart[data-chart=overhead] .ytick')].map(t => t.textContent)")
    assert sorted(bars) == sorted(name if len(name) <= 40 else name[:39] + "…" for name in HOSTILES if name.isprintable())
    page.locator(".methods input").nth(1).uncheck()
    assert 1 not in set.union(*(methods for _, methods in drawn(page)))
    page.set_viewport_size({"width": 390, "height": 844})
    until(page, f"{CHARTS}.every(c => c.closest('[hidden]') || c.querySelector('.main-svg').getBoundingClientRect().right <= 390)")
    assert page.evaluate(NO_SCROLL) == [390, 390, 390]
    assert page.wrong == []
    page.context.close()


@pytest.mark.parametrize("lost", ["cells", "compare.json", "cells/*/points.jsonl"])
def test_a_damaged_folder_opens_as_well(browser, tmp_path, lost):
    folder = made_up_results.write(tmp_path / "r", updates=200, every=100)
    for path in folder.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = opened(browser, report.write(folder))
    assert "missing" in page.inner_text("#problems")
    assert page.wrong == []
    page.context.close()
