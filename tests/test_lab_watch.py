"""The live page: what its server tells of a training, what it gives out and what it refuses."""

import errno
import json
import os
import socket
import time
from http.client import HTTPConnection
from pathlib import Path

import pytest

from made_up_runs import HOSTILE, add, config, picture, served, trained, validated
from noiseclock.lab import watch
from noiseclock.lab.errors import Mistake
from noiseclock.lab.folder import Log


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
    with pytest.raises(Mistake, match=r"port must lie in 0\.\.65535, got 65536"):
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
