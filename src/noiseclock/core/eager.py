"""Python that torch.compile should not trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """A function that runs as plain Python inside a compiled step, which is cut there.

    torch.compiler.disable does this, but as a decorator it imports the whole compiler with this library.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return run
