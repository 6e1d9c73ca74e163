"""Warnings that a learned sampler is in trouble, each given once, with advice."""

from __future__ import annotations

import warnings

LEAST_ESS = 0.1  # warn below this effective sample size of the importance weights, as a share of the batch


class Health:
    """Warnings of one sampler; each kind is given once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """Give this warning unless one of its kind was given before."""
        if kind not in self.said:
            self.said.add(kind)
            warnings.warn(message, stacklevel=3)
