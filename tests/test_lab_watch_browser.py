"""The live page in a browser: what it draws, how it follows a training, and what it does with hostile names."""

from contextlib import contextmanager

import pytest

from made_up_runs import HOSTILE, add, config, picture, served, trained, validated
from noiseclock.lab.folder import Log
from pages import until


@contextmanager
def page_of(browser, server, **context):
    """A page that has asked once, and a check that nothing was complained about on its console."""
    complaints = []
    with browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context}) as window:
        page = window.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(server.url)
        until(page, "document.getElementById('status').textContent !== 'connecting'")
        yield page
        assert complaints == []


def paths(page, figure: str) -> int:
    """How many lines with something in them a chart has."""
    return page.locator(f"#{figure} .scatterlayer path.js-line").evaluate_all("lines => lines.filter(l => l.getAttribute('d').includes('L')).length")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    config(folder)
    add(folder, *(trained(step) for step in range(10, 110, 10)), validated(50), validated(100))
    picture(folder, 50)
    picture(folder, 100)
    with served(folder) as server:
        yield folder, server


def test_the_page_draws_follows_and_forgets_what_a_resume_took_back(browser, run):
    folder, server = run
    with page_of(browser, server) as page:
        assert page.inner_text("#status") == "training"
        assert page.inner_text("#name") == "run"
        assert {name: paths(page, name) for name in ("loss", "levels", "density", "speed", "norm")} == {
            "loss": 3, "levels": 2, "density": 2, "speed": 1, "norm": 2,
        }  # fmt: skip
        drawn = page.locator("#history .heatmaplayer image").get_attribute("href")
        assert len(drawn) > 200  # a picture as a data: address
        tiles = dict(page.locator("#tiles div").evaluate_all("tiles => tiles.map(t => [t.children[0].textContent, t.children[1].textContent])"))
        # 64 images in 0.1 s, 900 updates of 0.1 s to go; ½·ln 6/5/3 is the mean of validated's losses
        assert tiles == {
            "updates": "100 of 1,000", "training loss": "0.333", "held-out loss": "0.0597 update 100", "images per second": "640",
            "training time": "10 s", "left, about": "2 min",
        }  # fmt: skip
        assert float(page.locator("progress").evaluate("p => p.value / p.max")) == pytest.approx(0.1)
        assert page.locator("#grid").evaluate("img => img.complete && img.naturalWidth > 0")
        assert "update 100" in page.locator("#grid").get_attribute("alt")
        labels = page.locator(".chart").evaluate_all("all => all.map(c => c.getAttribute('aria-label'))")
        assert all(labels)
        assert len(set(labels)) == 6
        # more happens
        page.evaluate("window.same = true")
        add(folder, trained(110, sampler="3 probes"), validated(150), trained(1000, skipped=2))
        picture(folder, 150)
        until(page, "document.getElementById('status').textContent === 'finished'")
        assert page.evaluate("window.same")  # no reload
        assert paths(page, "levels") == 3
        assert "update 150" in page.locator("#grid").get_attribute("alt")
        assert "updates skipped" in page.inner_text("#tiles")
        # an earlier grid is looked at, and stays when the next one comes
        page.locator("#which").fill("0")
        assert "update 50" in page.locator("#grid").get_attribute("alt")
        assert page.locator("#grid").get_attribute("src").startswith("/samples/step-00000050.png")
        picture(folder, 200)
        until(page, "document.getElementById('which').max === '3'")
        assert "update 50" in page.locator("#grid").get_attribute("alt")
        # a resume takes back what was not saved
        with Log(folder / "log.jsonl") as log:
            log.truncate_after(50)
            log.write(trained(60, seconds=6.5))
        until(page, "document.querySelector('#tiles dd').textContent.startsWith('60 ')")
        assert paths(page, "levels") == 1
        assert page.evaluate("document.querySelector('#loss .chart').data[0].x") == [10, 20, 30, 40, 50, 60]


def test_a_folder_with_nothing_in_it_yet_waits(browser, tmp_path):
    with served(tmp_path) as server, page_of(browser, server) as page:
        assert page.inner_text("#status") == "waiting for the first update"
        assert page.locator("#tiles").is_hidden()
        assert page.locator("#loss .chart").get_attribute("aria-label") == "waiting for the first update"
        assert page.locator(".main-svg").count() == 0
        add(tmp_path, trained(1))
        with (tmp_path / "log.jsonl").open("a") as log:
            log.write("{\n")
        page.wait_for_selector("#loss .main-svg")
        assert page.inner_text("#status") == "training"
        assert page.inner_text("#notice") == (
            "1 line of log.jsonl could not be read; config.json is missing or cannot be read, so the settings are not shown"
        )


def test_hostile_names_are_shown_as_they_are(browser, tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    config(folder, data=HOSTILE, sampler=HOSTILE, schedule="<b>x</b>", **{HOSTILE: HOSTILE})
    add(folder, trained(10, sampler=HOSTILE), trained(20, sampler=HOSTILE), validated(20))
    (folder / "samples").mkdir()
    (folder / "samples" / f"step-1.png{HOSTILE.replace('/', '')}").write_bytes(b"")
    with served(folder) as server, page_of(browser, server) as page:
        page.locator("summary").click()
        assert page.inner_text("#name") == folder.name
        assert page.title() == f"{folder.name} · Noiseclock"
        assert HOSTILE in page.inner_text("#method")
        assert HOSTILE in page.inner_text("#tiles")
        assert page.locator("#settings").inner_text().count("onerror") == 4
        assert page.locator("img:not(#grid), table script, header script, dl script").count() == 0


def test_a_phone_scrolls_one_way_only(browser, run):
    folder, server = run
    config(folder, sampler="adaptive:" + "x" * 300, data="folder:/" + "y" * 300)
    add(folder, trained(120, sampler="z" * 300))
    with page_of(browser, server, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True) as page:
        page.locator("summary").click()
        for width in (390, 320):
            page.set_viewport_size({"width": width, "height": 844})
            until(page, f"Math.max(...[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().right)) < {width}")
            assert page.evaluate("document.documentElement.scrollWidth") == width


def test_dark_mode(browser, run):
    _, server = run
    # of the page, of a line, of the words at an axis
    colours = """[getComputedStyle(document.body).backgroundColor, document.querySelector('#density .js-line').style.stroke,
                  document.querySelector('#density .xtick text').style.fill]"""
    with page_of(browser, server) as page:
        assert page.evaluate(colours) == ["rgb(252, 252, 251)", "rgb(0, 114, 178)", "rgb(99, 99, 106)"]
        page.emulate_media(color_scheme="dark")
        until(page, "document.querySelector('#density .js-line').style.stroke !== 'rgb(0, 114, 178)'")
        assert page.evaluate(colours) == ["rgb(19, 20, 22)", "rgb(90, 169, 230)", "rgb(160, 161, 168)"]
