"""Fetching a file whose checksum is known."""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import wrap_file

CHUNK = 2**20
TIMEOUT = 10.0  # seconds without an answer, at the start or in between


def fetch(url: str, path: Path, md5: str) -> None:
    """Download `url` to `path`: under another name until it is complete and its checksum is right. An OSError says what went wrong."""
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.md5(usedforsecurity=False)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download.") as temporary:
        unfinished = Path(temporary, path.name)
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT) as response, unfinished.open("wb") as out:
                total = int(response.headers.get("Content-Length", 0))
                with wrap_file(response, total, description=path.name, console=Console(stderr=True), transient=True) as shown:
                    while chunk := shown.read(CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
        except http.client.HTTPException as error:
            raise OSError(f"the download of {url} broke off: {error!r}") from error
        if digest.hexdigest() != md5:
            raise OSError(f"{url} has the md5 {digest.hexdigest()} and should have {md5}")
        os.replace(unfinished, path)


def fetch_members(url: str, folder: Path, md5: str, members: Iterable[str]) -> None:
    """Download the archive at `url` and put these of its files, by their bare names, into `folder`; an OSError says what went wrong.

    Only plain files are copied, one by one and under the names given here, so that no archive can write anywhere else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = set(members)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack.") as temporary:
        archive = Path(temporary, url.rpartition("/")[2])
        fetch(url, archive, md5)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                content = tar.extractfile(member) if member.isfile() and name in wanted else None
                if content is not None:
                    with content, Path(temporary, f"{name}.new").open("wb") as out:
                        shutil.copyfileobj(content, out)
        missing = sorted(name for name in wanted if not Path(temporary, f"{name}.new").is_file())
        if missing:
            raise OSError(f"{url} holds no {', '.join(missing)}")
        for name in wanted:
            os.replace(Path(temporary, f"{name}.new"), folder / name)
