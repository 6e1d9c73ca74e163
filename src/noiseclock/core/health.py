"""Signs that a learned sampler is in trouble, said once each, with advice."""

from __future__ import annotations

import warnings

LEAST_ESS = 0.1  # a smaller effective sample size of importance weights, as a share of the batch, is warned of


class Health:
    """Warnings of one sampler; each kind is given once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """Say it unless it was said before."""
        if kind not in self.said:
            self.said.add(kind)
            warnings.warn(message, stacklevel=3)
