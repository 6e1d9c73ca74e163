"""Every example is short, and runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = [Path(__file__).parents[1] / "examples" / f"{name}.py" for name in ("audio", "fine_tuning", "points")]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_runs(example, tmp_path):
    assert len(example.read_text().splitlines()) < 60
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, example, "--updates", "3", "--seeds", "1"], cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # what each sampler gave, in the same form
    names = {line.split()[0] for line in done.stdout.splitlines()}
    assert {"uniform", "loss-second-moment", "variance-optimal", "adaptive"} <= names
    assert all(re.search(r"\d\.\d{4}", line) for line in done.stdout.splitlines())
