"""The two errors that end a run with a message, and the check for the most frequent one: an unknown name."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Mistake(Exception):
    """Something that the user can put right: a bad setting, a missing file. The command line prints it and exits with 2.

    Not a ValueError: tyro catches one that is raised while options become a recipe, and wraps it in a message of its own.
    """


class Failure(RuntimeError):
    """A run that cannot go on: a full disk, a loss that stays infinite. The command line prints it and exits with 1."""


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """`name` if it is known, or a mistake that lists the known names and shows the nearest."""
    known = list(known)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise Mistake(f"unknown {kind} {name!r}{f' (did you mean {near[0]}?)' if near else ''}; known: {', '.join(known)}")
    return name
