"""Imports go one way, and the core is light."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import noiseclock

ROOT = Path(noiseclock.__file__).parent
# what each room may import of ours; the package's own __init__ opens the door to the core
ALLOWED = {
    "core": {"core"},
    "lab": {"core", "integrations", "lab"},
    "integrations": {"core", "integrations"},
    "cli.py": {"core", "lab"},
    "cli_latents.py": {"core", "lab", "cli"},
    "cli_results.py": {"core", "lab", "cli"},
    "__main__.py": {"cli"},
    "__init__.py": {"core"},
}
CORE_OUTSIDE = {"torch", "numpy"}


def imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            # `from noiseclock.core import names` names a module too
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        assert parts[0] != "torchvision"
        if name == "noiseclock":
            assert room not in ("core", "__init__.py"), f"{path.name} imports the whole package"
        elif parts[0] == "noiseclock":
            assert parts[1] in ALLOWED[room], f"{path.name} imports {name}"
        elif room in ("core", "__init__.py"):
            assert parts[0] in CORE_OUTSIDE or parts[0] in sys.stdlib_module_names, f"{path.name} imports {name}"


# what can be imported and used without any other package
LIGHT = {
    "noiseclock": 'noiseclock.Clock("linear", "uniform").draw(torch.zeros(2, 2))',
    "noiseclock.integrations": "",
    "noiseclock.integrations.trackers": 'noiseclock.integrations.trackers.curves(noiseclock.Clock("linear", "uniform"))',
}


def test_import_loads_nothing_but_torch_numpy_and_what_they_bring():
    """One after the other in one process, as each takes the one before along."""
    script = """
import importlib, json, sys
import torch, numpy, torch.distributed
before, new = {name.split(".")[0] for name in sys.modules}, {}
import noiseclock
for name, used in json.loads(sys.argv[1]).items():
    importlib.import_module(name)
    exec(used)
    new[name] = sorted({name.split(".")[0] for name in sys.modules} - before)
print(json.dumps(new))
"""
    result = subprocess.run([sys.executable, "-c", script, json.dumps(LIGHT)], capture_output=True, text=True, check=True)
    for name, new in json.loads(result.stdout).items():
        assert set(new) - set(sys.stdlib_module_names) == {"noiseclock"}, name


def test_each_integration_is_imported_by_itself():
    """Whoever uses one needs none of the others' libraries."""
    assert imports(ROOT / "integrations" / "__init__.py") == []
    for path in (ROOT / "integrations").glob("*.py"):
        others = [name for name in imports(path) if name.startswith("noiseclock.integrations")]
        assert not [name for name in others if not name.startswith("noiseclock.integrations.trackers")], path.name  # which needs none
    outside = {name.split(".")[0] for name in imports(ROOT / "integrations" / "diffusers.py")} - set(sys.stdlib_module_names)
    assert outside == {"diffusers", "torch", "noiseclock"}


def test_everything_exported_exists_and_is_documented():
    for name in noiseclock.__all__:
        assert getattr(noiseclock, name).__doc__, name
    assert sorted(noiseclock.__all__) == sorted(set(noiseclock.__all__))
