"""The documentation is held to the code: what it shows runs, what it names exists, what it links to is there."""

import importlib.util
import inspect
import json
import re
import shlex
import subprocess
import sys
import unicodedata
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import yaml

import noiseclock as nc
from noiseclock.core.names import SAMPLERS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w-]*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
# what a comment on the line before a block may say
COMMENT = re.compile(r"<!-- (?P<kind>not run|needs): (?P<what>[^>]+?) -->\s*$")


class Block:
    """One fenced block: its language, its text, the line it starts at and the comment before it."""

    def __init__(self, text: str, found: re.Match[str]) -> None:
        before = text[: found.start()]
        self.language, self.line = found["language"], before.count("\n") + 2
        self.code = re.sub(rf"^{found['indent']}", "", found["code"], flags=re.MULTILINE)
        said = COMMENT.search(before)
        self.kind, self.what = (said["kind"], said["what"]) if said else ("", "")


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    return [block for found in FENCE.finditer(text) if (block := Block(text, found)).language in languages]


def prose(page: Path) -> str:
    """The page without its blocks and its inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))


# --- Python ---------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nobody_else(tmp_path, monkeypatch, free_port):
    """accelerate keeps its state for the process, and W&B files in the home folder; torchrun would say that this is the only process."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port}.items():
        monkeypatch.setenv(name, str(value))
    for name, value in {"SILENT": "true", "CACHE_DIR": str(tmp_path), "CONFIG_DIR": str(tmp_path), "DATA_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield
    if "accelerate" in sys.modules:
        for name in ("AcceleratorState", "GradientState", "PartialState"):
            getattr(sys.modules["accelerate.state"], name)._reset_state()


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec", "ignore:.*does not have many workers", "ignore:.*number of training batches")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, nobody_else):
    run(page, tmp_path, monkeypatch)


def run(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Its blocks, top to bottom in one namespace, which is given back; warnings are errors."""
    monkeypatch.chdir(folder)
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")  # a dataclass looks its module up
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    for block in blocks(page, "python"):
        if block.kind == "not run" or (block.kind == "needs" and importlib.util.find_spec(block.what) is None):
            continue
        # padded, so that a traceback names the line of the page
        code = compile("\n" * (block.line - 1) + block.code, str(page), "exec")
        with patch.dict(SAMPLERS):  # a page may add to them
            exec(code, module.__dict__)
    return module


def test_blocks_run_together_unless_a_comment_says_why_not(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    parts = [
        "```python\nx = 1\n```",
        "- a list\n\n  ```python\n  x += 1\n  ```",
        "<!-- not run: it would fail at once -->\n```python\nx / 0\n```",
        "<!-- needs: no_such_package -->\n\n```python\nimport no_such_package\n```",
        "<!-- needs: torch -->\n```python\nx += 1\n```",
        "```text\nno Python\n```\n",
    ]
    page.write_text("\n\n".join(parts))
    assert run(page, tmp_path, monkeypatch).x == 3
    page.write_text("# Title\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as failed:
        run(page, tmp_path, monkeypatch)
    assert failed.traceback[-1].lineno == 4  # from 0: the line of the page


def test_a_block_is_left_out_for_a_reason_only():
    for page in PAGES:
        for block in blocks(page, "python"):
            assert block.kind != "not run" or len(block.what) > 10, f"{page.name}:{block.line} does not say why it is not run"
            assert block.kind != "needs" or re.fullmatch(r"\w+", block.what), f"{page.name}:{block.line} needs the name of one package"


# --- commands -------------------------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[str]:
    """The command lines of a page, less what is said of them after two spaces or more."""
    found = []
    for block in blocks(page, "", "console", "sh", "bash"):
        for line in re.sub(r"\s*\\\n\s*", " ", block.code).splitlines():
            line = line.strip().removeprefix("$ ").replace("torchrun --nproc-per-node 8 -m noiseclock.cli", "noiseclock")
            if line.startswith("noiseclock "):
                found.append(re.split(" {2,}", line)[0])
    return found


def arguments(command: str) -> list[str]:
    """Its arguments, with something for what the page leaves open."""
    words = shlex.split(command)[1:]
    if words[-1] == "...":
        words[-1:] = ["something", "--out", "folder"] if words[-2].startswith("--") else ["--out", "folder"]
    return ["digits" if word == "RECIPE" else word for word in words]


class UnderstoodError(Exception):
    """The command line was read; what follows would run."""


COMMANDS = {f"{page.relative_to(ROOT)}: {command}": command for page in PAGES for command in commands(page)}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_every_command_is_understood(command, monkeypatch, capsys):
    """By the real parser. `train` and `compare` go on as far as the recipe and the methods, whose names may be wrong too."""
    from noiseclock import cli, cli_latents, cli_results

    parsed = cli._parsed

    def read(kind: type[Any], argv: list[str], program: str, default: Any = None) -> Any:
        options = parsed(kind, argv, program, default)
        if kind.__name__ in ("Train", "Recipe"):
            return options
        raise UnderstoodError

    def understood(name: str | None) -> str:
        raise UnderstoodError

    for module, name in ((cli, "_parsed"), (cli_results, "parsed"), (cli_latents, "parsed")):
        monkeypatch.setattr(module, name, read)
    for module, name in ((cli, "_check_device"), (cli_results, "check_device")):
        monkeypatch.setattr(module, name, understood)
    try:
        status = cli.main(arguments(command))
    except UnderstoodError:
        return
    except SystemExit as end:
        status = end.code
    pytest.fail(f"`{command}` ends with {status}: {''.join(capsys.readouterr())}")


def test_commands_are_found_and_mistakes_in_them_too(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(
        "```\nnoiseclock train digits --smapler adaptive    what it does\nnoiseclock compare digits \\\n    --samplers uniform unifrom\n```\n"
    )
    assert commands(page) == ["noiseclock train digits --smapler adaptive", "noiseclock compare digits --samplers uniform unifrom"]
    for command in commands(page):
        with pytest.raises(pytest.fail.Exception, match=r"smapler|unifrom"):
            test_every_command_is_understood(command, monkeypatch, capsys)


# --- links ----------------------------------------------------------------------------------------------------------------------------


def anchor(heading: str) -> str:
    """As Python-Markdown makes it."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def anchors(page: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ +(.+?) *$", FENCE.sub("", page.read_text()), re.MULTILINE)}


def broken_links(page: Path, root: Path) -> list[str]:
    bad = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, part = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        inside = not page.is_relative_to(root / "docs") or file.is_relative_to(root / "docs")  # the site has no other files
        if not file.is_file() or not inside or (part and part not in anchors(file)):
            bad.append(target)
    return bad


@every_page
def test_links_lead_somewhere(page):
    assert broken_links(page, ROOT) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("# Read me\n")
    page = tmp_path / "docs" / "page.md"
    page.write_text("# One `two`\n[a](#one-two) [b](#three) [c](no.md) ![d](no.png) [e](../README.md) `[f](code.md)`\n")
    assert broken_links(page, tmp_path) == ["#three", "no.md", "no.png", "../README.md"]
    (tmp_path / "README.md").write_text("[a](docs/page.md#one-two) [b](docs/page.md#one)\n")
    assert broken_links(tmp_path / "README.md", tmp_path) == ["docs/page.md#one"]


def uneven_rows(text: str) -> list[str]:
    """Rows of tables with other cells than their heading: a | in a sentence, also in code, ends a cell."""
    tables = re.findall(r"(?:^\|.*\n)+", FENCE.sub("", text), re.MULTILINE)
    cells = [[(row, len(re.findall(r"(?<!\\)\|", row))) for row in table.splitlines()] for table in tables]
    return [row for table in cells for row, count in table if count != table[0][1]]


@every_page
def test_every_row_of_a_table_has_the_cells_of_its_heading(page):
    assert uneven_rows(page.read_text() + "\n") == []


def test_uneven_rows_are_found():
    assert uneven_rows("| a | b |\n|---|---|\n| |S| | 1 |\n| `x\\|y` | 2 |\n\n| c |\n|---|\n") == ["| |S| | 1 |"]


# --- nothing is missing ---------------------------------------------------------------------------------------------------------------


def nav() -> list[str]:
    def files(item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [file for part in (item.values() if isinstance(item, dict) else item) for file in files(part)]

    return files(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])


def test_every_page_is_in_the_navigation():
    assert sorted(nav()) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_every_picture_is_shown():
    shown = {(page.parent / target).resolve() for page in PAGES for target in re.findall(r"!\[[^]]+\]\(([^)]+)\)", page.read_text())}
    assert {path.resolve() for path in (DOCS / "pictures").iterdir() if path.suffix in (".svg", ".png")} <= shown


def test_every_sampler_and_weighting_has_its_place_in_a_method_page():
    text = "".join(page.read_text() for page in (DOCS / "methods").glob("*.md"))
    for name in nc.__all__:
        thing = getattr(nc, name)
        if inspect.isclass(thing) and issubclass(thing, (nc.Sampler, nc.Weighting)) and not inspect.isabstract(thing):
            assert f"nc.{name}(" in text, name


def test_every_method_page_tells_the_same_things():
    for page in (DOCS / "methods").glob("*.md"):
        if page.stem != "index":
            headings = re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE)
            assert headings == TOLD, page.name
            assert re.search(r"!\[[^]]+\]\(\.\./pictures/[\w-]+\.svg\)", page.read_text()), page.name


TOLD = ["Formula", "Usage", "Cost", "Correction", "Results", "Pitfalls", "Paper"]


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    for name in nc.__all__:
        thing = getattr(nc, name)
        path = f"noiseclock.{name}" if not inspect.ismodule(thing) else thing.__name__
        assert re.search(rf"^::: {re.escape(path)}$", text, re.MULTILINE), name


def test_the_cifar_table_is_the_logs():
    """It is quoted, so that the two cannot tell different numbers."""
    choose, log = (DOCS / "choose.md").read_text(), (DOCS / "log.md").read_text()
    quoted = re.search(r"<!-- begin: CIFAR-10 table[^>]*-->(.*)<!-- end: CIFAR-10 table -->", choose, re.DOTALL)
    assert quoted
    rows = [line for line in quoted[1].splitlines() if re.search(r"\d", line) and line.startswith("|")]
    assert len(rows) >= 3
    assert [row for row in rows if row not in log.splitlines()] == []


def test_the_tables_of_the_results_are_those_of_the_raw_files():
    module = loaded(DOCS / "results.py")
    text = module.PAGE.read_text()
    assert module.page(text) == text, "run python docs/results.py"
    assert "| fp32 | 3.152 | 0 |" in text
    # by hand from points.jsonl: 21.73, 22.50, 21.21 after 20,000 updates, 27.05, 26.06, 28.59 after 15,000;
    # 20,000/1.0494 are 19,058 of them: 22.73, 23.17, 22.60
    assert re.search(r"^\| `variance-optimal` .* \| 22\.84 ± 0\.30 \|", text, re.MULTILINE)


def test_the_help_of_every_command_is_the_one_that_is_checked_in():
    module = loaded(DOCS / "commands.py")
    assert module.PAGE.read_text() == module.page(), "run python docs/commands.py"


# --- pictures -------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def densities():
    return loaded(DOCS / "pictures" / "densities.py")


def loaded(script: Path) -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_show_what_the_library_does(densities):
    """The stored curves have five digits; a rounding may fall to either side."""
    stored, now = json.loads(densities.STORED.read_text()), densities.fixed()
    assert {name: {panel: list(curves) for panel, curves in panels.items()} for name, panels in stored.items()} == {
        name: {panel: list(curves) for panel, curves in panels.items()} for name, panels in now.items()
    }
    for name, panels in now.items():
        for panel, curves in panels.items():
            for label, curve in curves.items():
                assert np.allclose(curve, stored[name][panel][label], rtol=2e-5, atol=1e-9), (name, panel, label)


def test_the_pictures_were_drawn_from_the_stored_curves(densities):
    for name, panels in json.loads(densities.STORED.read_text()).items():
        assert f"<dc:description>{densities.checksum(panels)}</dc:description>" in (DOCS / "pictures" / f"{name}.svg").read_text(), name


def test_the_pictures_are_small():
    for path in (DOCS / "pictures").glob("*.svg"):
        assert path.stat().st_size < 60_000, path.name


# --- the site -------------------------------------------------------------------------------------------------------------------------


def test_the_site_builds_and_asks_nobody_for_anything(tmp_path):
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.rglob("*.html"):
        fetched = re.findall(r"<(?:script|img|link|iframe)[^>]+(?:src|href)=\"?(?:https?:)?//[^\" >]+", page.read_text())
        assert fetched == [], page.name
