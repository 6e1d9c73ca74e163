"""Signs that a learned sampler is in trouble, said once each, with advice."""

from __future__ import annotations

import warnings


class Health:
    """Warnings of one sampler; each kind is given once."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def warn(self, kind: str, message: str) -> None:
        """Say it unless it was said before."""
        if kind not in self.said:
            self.said.add(kind)
            warnings.warn(message, stacklevel=3)
