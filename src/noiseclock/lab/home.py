"""Where data and weights are kept."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """`$NOISECLOCK_HOME`, or `~/.cache/noiseclock`."""
    return Path(os.environ.get("NOISECLOCK_HOME") or Path.home() / ".cache" / "noiseclock").expanduser()
