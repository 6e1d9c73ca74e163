"""A page on this machine that follows a running training: `noiseclock watch FOLDER`.

    with serve("runs/digits") as server:
        print(server.url)
        server.serve_forever()

It reads what the training writes (config.json, log.jsonl, samples/) and never writes. The browser asks every two seconds for what is new, with a
cursor: how far it has read, and a checksum of the bytes just before that place. A resumed training shortens its log; then the checksum no longer
matches, and the page starts again from the first line.

The server listens on 127.0.0.1 alone and answers GET requests whose Host is this machine, so that no web page can reach it under a name of its own
(DNS rebinding). It serves four files of its own, the news, and pictures that lie in the folder's samples/ after symbolic links are resolved.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import socketserver
import sys
import time
import webbrowser
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from plotly.offline import get_plotlyjs

from noiseclock.lab.errors import Mistake

PORT = 8765
PAGE = {"/": ("watch.html", "text/html"), "/watch.js": ("watch.js", "text/javascript"), "/watch.css": ("watch.css", "text/css")}
PICTURE = re.compile(r"step-([0-9]{1,12})\.png")
PIECE = 4_000_000  # bytes of the log in one answer
MARK = 256  # bytes before the cursor that its checksum covers; they include a record's seconds, which differ between all records
HEADERS = {
    # plotly sets styles and draws heat maps as data: pictures; nothing else is inline, and nothing comes from elsewhere
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def watch(folder: str | Path, port: int = PORT, *, open_browser: bool = False, say: Callable[[str], None] = print) -> None:
    """Serve the page of the training in `folder` until Ctrl-C; `say` is called with its address."""
    with serve(folder, port=port, open_browser=open_browser) as server:
        say(f"{folder} is shown at {server.url} (Ctrl-C ends it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def serve(folder: str | Path, *, port: int = PORT, open_browser: bool = False) -> Server:
    """A server for the training in `folder`, bound and not yet serving; port 0 takes any that is free."""
    folder = Path(folder)
    if not folder.is_dir():
        raise Mistake(f"there is no folder {folder}; give the folder of a training")
    if (folder / "compare.json").is_file():
        raise Mistake(f"{folder} holds a comparison; give the folder of one of its trainings, in {folder / 'cells'}")
    if not 0 <= port <= 65535:
        raise Mistake(f"port must lie in 0..65535, got {port}")
    try:
        server = Server(folder, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise Mistake(f"port {port} is in use, perhaps by another watch; choose another, or 0 for any that is free") from error
        raise Mistake(f"port {port} cannot be used ({error.strerror}); choose another, or 0 for any that is free") from error
    if open_browser:
        webbrowser.open(server.url)
    return server


class Server(ThreadingHTTPServer):
    """Serves one folder on 127.0.0.1."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder.resolve()
        super().__init__(("127.0.0.1", port), Handler)

    def server_bind(self) -> None:
        # not HTTPServer's, which looks up this machine's name and may wait for a network to do so
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "127.0.0.1", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that went away is no error."""
        if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"

    @cached_property
    def plotly(self) -> bytes:
        """The charts' library, out of the package that is installed."""
        library: str = get_plotlyjs()
        return library.encode()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        if not all(_is_here(host) for host in self.headers.get_all("Host", [""])):
            return self._refuse(HTTPStatus.MISDIRECTED_REQUEST)
        path, _, query = self.path.partition("?")
        if path in PAGE:
            name, kind = PAGE[path]
            return self._answer(Path(__file__).with_name(name).read_bytes(), f"{kind}; charset=utf-8")
        if path == "/plotly.js":
            return self._answer(self.server.plotly, "text/javascript; charset=utf-8")
        if path == "/news":
            after = parse_qs(query).get("after", [""])[0]
            return self._answer(json.dumps(news(self.server.folder, after), allow_nan=False).encode(), "application/json")
        if path.startswith("/samples/") and (picture := _picture(self.server.folder, path.removeprefix("/samples/"))):
            return self._answer(picture, "image/png")
        return self._refuse(HTTPStatus.NOT_FOUND)

    def _only_get(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _only_get

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(f"{status.value} {status.phrase}\n".encode(), "text/plain; charset=utf-8", status)

    def _answer(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def version_string(self) -> str:
        return "noiseclock"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the user."""


def _is_here(host: str) -> bool:
    """Is it a name that only this machine can have? Any port is allowed, because `ssh -L` may change it."""
    try:
        return urlsplit(f"//{host}").hostname in ("127.0.0.1", "localhost")
    except ValueError:
        return False


def _picture(folder: Path, name: str) -> bytes | None:
    """The grid of that name, if it lies in samples/."""
    if not PICTURE.fullmatch(name):
        return None
    try:
        return _inside(folder / "samples", name).read_bytes()
    except OSError:
        return None


def _inside(folder: Path, name: str) -> Path:
    """The resolved path of a file in a folder; an OSError if the file, or the last part of the folder, is a link that leads elsewhere."""
    path = (folder / name).resolve(strict=True)
    if path.parent != folder:
        raise PermissionError(errno.EPERM, "a link that leads out of the folder", str(path))
    return path


# --- what is new --------------------------------------------------------------------------------------------------------------------------


def news(folder: Path, after: str = "") -> dict[str, Any]:
    """What the page needs: the log's records since the cursor `after`, and the little that is not in the log.

    again: these are the log's first records, and the page must drop earlier ones. more: there are more records already. broken: lines among these
    that are not records. age: seconds since the log was written to, or None. settings: None without a readable config.json.
    """
    try:
        path = _inside(folder, "log.jsonl")
        age = max(0.0, time.time() - path.stat().st_mtime)
        part = _read(path, after)
    except OSError:  # there is no log yet, or no longer
        age, part = None, Part([], 0, "", True, False)
    settings = _settings(folder)
    updates = None if settings is None else _number(settings.get("updates"))
    shown = None if settings is None else {str(name): _text(value) for name, value in settings.items()}
    return {**part._asdict(), "age": age, "settings": shown, "updates": updates, "pictures": _pictures(folder), "folder": folder.name}


class Part(NamedTuple):
    """A piece of a log, and the cursor that asks for the next."""

    records: list[dict[str, Any]]
    broken: int
    cursor: str
    again: bool
    more: bool


def _read(path: Path, after: str) -> Part:
    """The whole lines of a log after a cursor. An incomplete last line is left for the next request."""
    place, _, checksum = after.partition("-")
    offset = int(place) if re.fullmatch("[0-9]{1,15}", place) else 0
    with path.open("rb") as file:

        def mark(end: int) -> str:
            file.seek(max(0, end - MARK))
            return f"{zlib.crc32(file.read(min(end, MARK))):08x}"

        if mark(offset) != checksum:
            offset = 0
        file.seek(offset)
        piece = file.read(PIECE)
        end = piece.rfind(b"\n") + 1
        if end == 0 and len(piece) == PIECE:  # a line longer than PIECE; skipped, or nothing after it would be seen
            end = PIECE
        found = [_record(line) for line in piece[:end].splitlines()]
        good = [record for record in found if record]
        return Part(good, found.count(None), f"{offset + end}-{mark(offset + end)}", offset == 0, len(piece) == PIECE)


def _record(line: bytes) -> dict[str, Any] | None:
    """A record with only the fields that the page expects; None for a line that is not a record, {} for a kind that is not shown."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or _number(record.get("step")) is None:
        return None
    if record.get("kind") == "train":
        numbers = ("step", "loss", "norm", "lr", "images", "seconds", "skipped")
        return {"kind": "train", **{name: _number(record.get(name)) for name in numbers}, "sampler": _text(record.get("sampler", ""))}
    if record.get("kind") == "validation":
        return {
            "kind": "validation",
            **{name: _number(record.get(name)) for name in ("step", "seconds", "weighted", "loss")},
            "loss_by_time": _curve(record.get("time"), record.get("loss_by_time")),
            "density": _curve(record.get("density_time"), record.get("density")),
        }
    return {}


def _number(value: Any) -> float | None:
    """A number that is finite."""
    try:
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
    except OverflowError:
        return None


def _curve(x: Any, y: Any) -> list[list[float | None]] | None:
    """Two lists of numbers of one length, the first without gaps and the second with one number at least; None for anything else."""
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        return None
    places, values = ([_number(value) for value in each] for each in (x, y))
    return [places, values] if None not in places and any(value is not None for value in values) else None


def _settings(folder: Path) -> Mapping[str, Any] | None:
    try:
        config = json.loads(_inside(folder, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    settings = config.get("settings") if isinstance(config, dict) else None
    return settings if isinstance(settings, dict) else None


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else "none" if value is None else str(value)


def _pictures(folder: Path) -> list[tuple[str, int, float]]:
    """Name, update and time of writing of every sample grid, in order. The time, because a resumed training writes some of them again."""
    found = []
    with suppress(OSError):
        for name in os.listdir(folder / "samples"):
            if match := PICTURE.fullmatch(name):
                with suppress(OSError):  # a link that leads out, or a file that is gone
                    found.append((name, int(match[1]), _inside(folder / "samples", name).stat().st_mtime))
    return sorted(found, key=lambda picture: picture[1:])
