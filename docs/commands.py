"""The help of every command as a page, docs/commands.md, to which a test holds the command line.

python docs/commands.py
"""

import io
import os
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

from noiseclock import cli

PAGE = Path(__file__).with_name("commands.md")
WIDTH = 100
TOP = """# Commands

What every command says of itself; `python docs/commands.py` writes this page. The defaults of `train` are those of the recipe `digits`.
"""


def help_of(*words: str) -> str:
    """What a command prints when it is asked for its options."""
    shown, plain = io.StringIO(), {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    # the parser ends with SystemExit after its help
    with patch.dict(os.environ, plain), patch.object(cli.console, "_width", WIDTH), redirect_stdout(shown), suppress(SystemExit):
        cli.main([*words, "--help"])
    return "\n".join(line.rstrip() for line in shown.getvalue().strip().splitlines())


def page() -> str:
    """The whole page."""
    parts = [f"```text\n{help_of()}\n```"]
    for name in cli.COMMANDS:
        words = (name, "digits") if name == "train" else (name,)
        parts.append(f"## {name}\n\n```text\n{help_of(*words)}\n```")
    return TOP + "\n" + "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
