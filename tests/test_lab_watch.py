"""The live page: what its server gives out and what it refuses, and how the page looks in a browser."""

import errno
import json
import os
import shutil
import socket
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path

import pytest
import torch

from noiseclock.lab import pictures, watch
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import Log, write_json

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
CHROMIUM = next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


def trained(step: int, **other) -> dict:
    loss = 1 / (1 + step / 50)
    record = {"kind": "train", "step": step, "loss": loss, "norm": 2 * loss, "lr": 1e-3, "images": 64 * step, "seconds": 0.1 * step, "skipped": 0}
    return {**record, "sampler": "", **other}


def validated(step: int, points: int = 50, **other) -> dict:
    time = [(i + 0.5) / points for i in range(points)]
    density = [0.5 + u if step < 100 else 1.5 - u for u in time]
    losses = [0.5 / (1 + 5 * u) / (1 + step / 50) for u in time]
    record = {"kind": "validation", "step": step, "seconds": 0.1 * step, "weighted": 0.2, "loss": sum(losses) / points, "time": time}
    return {**record, "loss_by_time": losses, "density_time": time, "density": density, **other}


def config(folder: Path, **settings) -> None:
    write_json(folder / "config.json", {"settings": {"data": "digits", "sampler": "adaptive", "updates": 1000, "betas": [0.9, 0.999]} | settings})


def picture(folder: Path, step: int) -> Path:
    path = folder / "samples" / f"step-{step:08d}.png"
    pictures.save(torch.full((4, 1, 8, 8), step % 256, dtype=torch.uint8), path)
    return path


def add(folder: Path, *records: dict) -> None:
    with Log(folder / "log.jsonl") as log:
        for record in records:
            log.write(record)


@contextmanager
def served(folder: Path):
    with watch.serve(folder, port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path: str, *, method: str = "GET", host: str | None = "localhost"):
    """The status, the headers and the body; the path goes out as it is, which urllib would tidy up."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


# --- what is new --------------------------------------------------------------------------------------------------------------------------


def test_only_what_is_new_is_told(tmp_path):
    add(tmp_path, trained(1), trained(10))
    first = watch.news(tmp_path)
    assert [record["step"] for record in first["records"]] == [1, 10]
    assert first["again"]
    assert watch.news(tmp_path, first["cursor"])["records"] == []
    add(tmp_path, validated(20))
    second = watch.news(tmp_path, first["cursor"])
    assert [record["step"] for record in second["records"]] == [20]
    assert not second["again"]
    assert second["records"][0]["density"] == [validated(20)["density_time"], validated(20)["density"]]
    assert second["records"][0]["loss_by_time"] == [validated(20)["time"], validated(20)["loss_by_time"]]


def test_a_line_that_is_still_being_written_waits(tmp_path):
    log = tmp_path / "log.jsonl"
    line = json.dumps(trained(10)) + "\n"
    log.write_text(json.dumps(trained(1)) + "\n" + line[:30])
    first = watch.news(tmp_path)
    assert [record["step"] for record in first["records"]] == [1]
    assert first["broken"] == 0
    log.write_text(json.dumps(trained(1)) + "\n" + line)
    second = watch.news(tmp_path, first["cursor"])
    assert [record["step"] for record in second["records"]] == [10]


def test_a_resumed_training_starts_the_page_again_where_its_log_was_shortened(tmp_path):
    add(tmp_path, *(trained(step) for step in range(10, 110, 10)))
    early = watch._read(tmp_path / "log.jsonl", "").cursor
    add(tmp_path, trained(110))
    with Log(tmp_path / "log.jsonl") as log:
        log.truncate_after(50)
    assert [record["step"] for record in watch.news(tmp_path, early)["records"]] == [10, 20, 30, 40, 50]
    # as long as before, byte for byte but for the seconds, of which a run never has the same twice
    add(tmp_path, *(trained(step, seconds=0.1 * step + 0.01) for step in range(60, 110, 10)))
    again = watch.news(tmp_path, early)
    assert again["again"]
    assert [record["seconds"] for record in again["records"][-2:]] == pytest.approx([9.01, 10.01])
    # what lies before the place where it was cut is not told twice
    with Log(tmp_path / "log.jsonl") as log:
        log.truncate_after(50)
        kept = watch.news(tmp_path)["cursor"]
        log.write(trained(60))
    assert [record["step"] for record in watch.news(tmp_path, kept)["records"]] == [60]


@pytest.mark.parametrize("cursor", ["", "x", "-1-0", "5", "99999-abc", "9" * 400, "0-", "1e3-0", "٣-0"])
def test_a_cursor_that_means_nothing_starts_again(tmp_path, cursor):
    add(tmp_path, trained(1))
    found = watch.news(tmp_path, cursor)
    assert found["again"]
    assert len(found["records"]) == 1


def test_an_empty_folder_and_one_that_vanishes(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    nothing = {"records": [], "broken": 0, "cursor": "", "again": True, "more": False, "age": None, "settings": None, "updates": None, "pictures": []}
    assert watch.news(folder) == {**nothing, "folder": "run"}
    folder.rmdir()
    assert watch.news(folder, "12-0") == {**nothing, "folder": "run"}


def test_lines_that_are_no_records_are_counted_and_numbers_that_are_none_left_out(tmp_path):
    bad = ["{", "[]", "7", "null", '{"kind": "train"}', '{"kind": "train", "step": "10"}', '{"kind": "train", "step": true}', "[" * 100_000, "\x00"]
    odd = [
        {"kind": "train", "step": 1, "loss": "NaN", "norm": "Infinity", "images": [1], "sampler": {"a": 1}},
        {"kind": "validation", "step": 2, "time": [0.1], "loss_by_time": [1, 2], "density_time": "x", "density": ["x"]},
        {"kind": "validation", "step": 3, "time": [0.1, "x"], "loss_by_time": [1, 2], "density_time": [0.1, 0.2], "density": ["NaN", 1]},
        {"kind": "validation", "step": 4, "time": [0.1], "loss_by_time": ["NaN"], "density_time": [], "density": []},
        {"kind": "later", "step": 4},
    ]
    lines = [*bad, *map(json.dumps, odd), '{"kind": "train", "step": 5, "loss": NaN, "lr": 1e999, "images": 1' + "0" * 400 + "}"]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    found = watch.news(tmp_path)
    assert found["broken"] == len(bad)
    assert [record["step"] for record in found["records"]] == [1, 2, 3, 4, 5]
    none = dict.fromkeys(("loss", "norm", "lr", "images", "seconds", "skipped"))
    assert found["records"][0] == {"kind": "train", "step": 1, **none, "sampler": "{'a': 1}"}
    assert (found["records"][1]["loss_by_time"], found["records"][1]["density"]) == (None, None)
    assert (found["records"][2]["loss_by_time"], found["records"][2]["density"]) == (None, [[0.1, 0.2], [None, 1]])
    assert (found["records"][3]["loss_by_time"], found["records"][3]["density"]) == (None, None)
    assert found["records"][4]["loss"] is found["records"][4]["images"] is None
    json.dumps(found, allow_nan=False)


def test_a_long_log_comes_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "PIECE", 1000)
    add(tmp_path, *(trained(step) for step in range(1, 30)))
    steps, cursor, more = [], "", True
    while more:
        found = watch.news(tmp_path, cursor)
        assert found["again"] == (not steps)
        steps += [record["step"] for record in found["records"]]
        cursor, more = found["cursor"], found["more"]
    assert steps == list(range(1, 30))
    # a line longer than a piece is no record, and what follows it is seen
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write("x" * 2500 + "\n" + json.dumps(trained(30)) + "\n")
    broken, more = 0, True
    while more:
        found = watch.news(tmp_path, cursor)
        cursor, more, broken = found["cursor"], found["more"], broken + found["broken"]
        steps += [record["step"] for record in found["records"]]
    assert steps[-1] == 30
    assert broken >= 1


def test_settings_pictures_and_age(tmp_path):
    config(tmp_path, size=None)
    add(tmp_path, trained(1))
    for step in (500, 1000, 20):
        picture(tmp_path, step)
    (tmp_path / "samples" / f"step-1{HOSTILE.replace('/', '')}.png").write_bytes(b"")
    os.utime(tmp_path / "log.jsonl", (time.time() - 90, time.time() - 90))
    found = watch.news(tmp_path)
    assert found["settings"] == {"data": "digits", "sampler": "adaptive", "updates": "1000", "betas": "0.9, 0.999", "size": "none"}
    assert found["updates"] == 1000
    assert [name for name, _, _ in found["pictures"]] == ["step-00000020.png", "step-00000500.png", "step-00001000.png"]
    assert [step for _, step, _ in found["pictures"]] == [20, 500, 1000]
    assert found["age"] == pytest.approx(90, abs=5)  # seconds that a busy machine may take between the two lines


@pytest.mark.parametrize("text", ["", "{", "[]", '{"settings": []}', '{"settings": {"updates": "many"}}', "[" * 100_000])
def test_a_damaged_config_is_none(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    assert watch.news(tmp_path)["updates"] is None


# --- the server ---------------------------------------------------------------------------------------------------------------------------


def test_what_is_served(tmp_path):
    add(tmp_path, trained(1))
    config(tmp_path)
    grid = picture(tmp_path, 500)
    with served(tmp_path) as server:
        assert server.server_address[0] == "127.0.0.1"
        for path, kind in {
            "/": "text/html; charset=utf-8", "/watch.js": "text/javascript; charset=utf-8", "/watch.css": "text/css; charset=utf-8",
            "/plotly.js": "text/javascript; charset=utf-8", "/news": "application/json", "/samples/step-00000500.png?1234": "image/png",
        }.items():  # fmt: skip
            status, headers, body = get(server, path)
            assert (status, headers["Content-Type"]) == (200, kind)
            assert int(headers["Content-Length"]) == len(body) > 0
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy  # nothing inline, nothing evaluated
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Access-Control-Allow-Origin"] is None
        assert body == grid.read_bytes()
        cursor = json.loads(get(server, "/news")[2])["cursor"]
        assert json.loads(get(server, f"/news?after={cursor}")[2])["records"] == []


def test_the_page_asks_nothing_of_other_machines():
    for name in ("watch.html", "watch.css", "watch.js"):
        text = Path(watch.__file__).with_name(name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "//" not in text.replace("\n//", "").replace(" // ", "")
        for danger in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("):
            assert danger not in text


@pytest.mark.parametrize(
    "host", [None, "", "evil.example", "evil.example:8765", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "[::1", "x@evil"]
)
def test_a_name_that_is_not_this_machine_s_is_refused(tmp_path, host):
    with served(tmp_path) as server:
        for path in ("/", "/news", "/plotly.js"):
            status, _, body = get(server, path, host=host)
            assert status == 421
            assert len(body) < 100


def test_a_forwarded_port_is_this_machine(tmp_path):
    with served(tmp_path) as server:
        assert get(server, "/", host="localhost:9000")[0] == get(server, "/", host="127.0.0.1:9000")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get(tmp_path, method):
    with served(tmp_path) as server:
        status, headers, _ = get(server, "/news", method=method)
        assert (status, headers["Allow"]) == (405, "GET")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A folder with secrets around it and links that lead to them."""
    root = tmp_path_factory.mktemp("guarded")
    folder = root / "run"
    picture(folder, 1)
    (root / "secret.png").write_bytes(b"secret")
    (root / "step-00000009.png").write_bytes(b"secret")
    (folder / "step-00000008.png").write_bytes(b"secret")
    (folder / "samples" / "notes.txt").write_text("secret")
    (folder / "samples" / "step-00000002.png").symlink_to(root / "secret.png")
    (folder / "samples" / "step-00000003.png").symlink_to("../step-00000008.png")
    (folder / "samples" / "step-00000004.png").symlink_to("nothing")
    (folder / "samples" / "step-00000005.png").symlink_to("step-00000001.png")
    (folder / "samples" / "step-00000006.png").mkdir()
    with served(folder) as server:
        yield server


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.png", "/samples/../../secret.png", "/samples/../step-00000008.png", "/samples/..%2Fstep-00000008.png",
        "/samples/%2e%2e/secret.png",
        "/samples/%2e%2e%2f%2e%2e%2fsecret.png", "/samples/..\\..\\secret.png", "/samples//etc/passwd", "/samples//step-00000001.png",
        "//samples/step-00000001.png/", "/etc/passwd", "//etc/passwd", "/samples/step-00000001.png/..", "/samples/./step-00000001.png",
        "/samples/step-00000001.png%00.txt", "/samples/step-%30.png", "/samples/", "/samples", "/samples/notes.txt", "/config.json", "/log.jsonl",
        "/watch.py", "/watch.html", "http://localhost/samples/step-00000001.png", "/samples/step-00000002.png", "/samples/step-00000003.png",
        "/samples/step-00000004.png", "/samples/step-00000006.png", "/samples/step-00000007.png", "/samples/step-00000009.png",
        "/samples/step-00000001.PNG", "/samples/step-00000001.png\t", "/<script>",
    ],
)  # fmt: skip
def test_nothing_outside_is_given_out(guarded, path):
    if "\t" in path:
        path = path.replace("\t", "%09")
    status, headers, body = get(guarded, path)
    assert status == 404
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert body == b"404 Not Found\n"  # and says nothing back


def test_links_that_stay_inside_are_followed_and_others_not_listed(guarded):
    assert get(guarded, "/samples/step-00000005.png")[2] == get(guarded, "/samples/step-00000001.png")[2]
    listed = [name for name, _, _ in watch.news(guarded.folder)["pictures"]]
    assert listed == ["step-00000001.png", "step-00000005.png", "step-00000006.png"]


def test_samples_log_and_config_that_are_links_out_are_not_read(tmp_path):
    inside, outside = tmp_path / "run", tmp_path / "other"
    inside.mkdir()
    picture(outside, 1)
    add(outside, trained(1))
    config(outside)
    for name in ("samples", "log.jsonl", "config.json"):
        (inside / name).symlink_to(outside / name)
    found = watch.news(inside)
    assert (found["records"], found["settings"], found["pictures"]) == ([], None, [])
    with served(inside) as server:
        assert get(server, "/samples/step-00000001.png")[0] == 404
    # the folder itself may be reached by a link
    (tmp_path / "link").symlink_to(outside)
    with served(tmp_path / "link") as server:
        assert get(server, "/samples/step-00000001.png")[0] == 200
        assert len(json.loads(get(server, "/news")[2])["records"]) == 1


def test_a_browser_that_goes_away_is_not_complained_about(tmp_path, capfd):
    with served(tmp_path) as server:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.server_port)) as line:
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a goodbye
                line.sendall(b"GET /plotly.js HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert get(server, "/")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_mistakes_are_named(tmp_path):
    with pytest.raises(Mistake, match="there is no folder"):
        watch.serve(tmp_path / "nothing")
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(Mistake, match=r"one of its trainings, in .*cells"):
        watch.serve(tmp_path)
    (tmp_path / "compare.json").unlink()
    with pytest.raises(Mistake, match=r"a port lies in 0\.\.65535, got 65536"):
        watch.serve(tmp_path, port=65536)
    with watch.serve(tmp_path, port=0) as server, pytest.raises(Mistake, match=f"port {server.server_port} is in use"):
        watch.serve(tmp_path, port=server.server_port)


def test_a_port_that_is_not_ours_to_take_is_named(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(watch.Server, "server_bind", refuse)
    with pytest.raises(Mistake, match="port 80 cannot be used"):
        watch.serve(tmp_path, port=80)


def test_watch_says_where_and_ends_with_ctrl_c(tmp_path, monkeypatch, free_port):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.Server, "serve_forever", interrupted)
    opened, said = [], []
    monkeypatch.setattr(watch.webbrowser, "open", opened.append)
    watch.watch(tmp_path, free_port, open_browser=True, say=said.append)
    assert opened == [f"http://127.0.0.1:{free_port}/"]
    assert opened[0] in said[0]


# --- in a browser -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def until(page, expression: str, limit: float = 20) -> None:
    """Wait for something true. Not playwright's wait_for_function, which evaluates text in the page, and its policy forbids that."""
    end = time.monotonic() + limit
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"not within {limit} s: {expression}"
        page.wait_for_timeout(50)


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
