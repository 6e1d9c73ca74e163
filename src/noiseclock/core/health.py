"""Warnings that something is in trouble, with advice."""

from __future__ import annotations

import sys
import warnings

LEAST_ESS = 0.1  # warn below this effective sample size of the importance weights, as a share of the batch


def warn(message: str) -> None:
    """Warn at the line of the user's own code, however deep in this library and in torch the reason was found."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).split(".")[0] in ("noiseclock", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


class Health:
    """Warnings of one sampler; each kind is given once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """Give this warning unless one of its kind was given before."""
        if kind not in self.said:
            self.said.add(kind)
            warn(message)
