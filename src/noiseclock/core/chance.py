"""All that a clock draws by: its rank, the uniform numbers of its times, and the stream of its noise.

Times are a pure function of (seed, draw, place), so a checkpoint needs one count and resumes on any number of ranks. Noise is a torch generator,
because hashing every pixel would cost; it goes on exactly where it was on the same rank and kind of device, and starts a new stream elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from noiseclock.core.streams import finalize, independent, places, stratified
from noiseclock.core.table import Table, lasting

PURPOSES = ("noise", "probe")


class Chance:
    """The random numbers of one clock on one rank. place: (rank, world size), where it is not torch.distributed's."""

    def __init__(self, seed: int, place: tuple[int, int] | None) -> None:
        self.seed, self._place = seed, place
        with lasting():
            self.draws = torch.zeros((), dtype=torch.int64, device="cpu")  # batches drawn, on the device of the data
        self._starts: dict[tuple[int, int, int], Table] = {}
        self._noise: torch.Generator | None = None
        self._saved_noise: Mapping[str, Any] | None = None

    def place(self) -> tuple[int, int]:
        """This process's rank and the number of ranks."""
        if self._place is not None:
            return self._place
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def uniforms(self, n: int, device: torch.device, micro: tuple[int, int], *, evenly: bool) -> Tensor:
        """(n,) numbers in [0, 1) for the times of a batch; evenly: one from each of equal intervals, over all ranks and micro-batches (i of n)."""
        rank, world_size = self.place()
        part, parts = micro[0] * world_size + rank, micro[1] * world_size
        number = self._next_draw(device, first=micro[0] == 0)
        key = (n, part, parts)
        if key not in self._starts:
            self._starts[key] = Table(places(self.seed, n, part=part, parts=parts))
        start = self._starts[key].on(device)
        return stratified(start, number, n, part=part, parts=parts) if evenly else independent(start, number, n)

    def _next_draw(self, device: torch.device, *, first: bool) -> Tensor:
        """The number of this draw, the same on every rank. Micro-batches of one update share it: only the first one moves on."""
        if self.draws.device != device:
            with lasting():
                self.draws = self.draws.to(device)
        if first:
            self.draws += 1
        return self.draws

    def generator(self, device: torch.device) -> torch.Generator:
        """This rank's stream of noise."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # as tensors call it
        if self._noise is None or self._noise.device != device:
            self._noise = torch.Generator(device)
            self._seed(self._noise)
        return self._noise

    def seed_of(self, purpose: str, count: int) -> int:
        """A seed of this rank's own, for one purpose from one count on."""
        word = self.seed
        for part in (PURPOSES.index(purpose), self.place()[0], count):
            word = finalize(word) + 1 + part
        return finalize(word) // 2

    def _seed(self, generator: torch.Generator) -> None:
        """Go on where a saved stream was, or start this rank's own."""
        saved, self._saved_noise = self._saved_noise, None
        if saved is not None and (saved["device"], saved["rank"], saved["world_size"]) == (generator.device.type, *self.place()):
            generator.set_state(saved["state"].cpu())
        else:
            generator.manual_seed(self.seed_of("noise", int(self.draws)))

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """How many draws there were, and where the noise is."""
        if self._noise is None:
            return {"draws": int(self.draws), "noise": dict(self._saved_noise or {})}
        rank, world_size = self.place()
        noise = {"device": self._noise.device.type, "rank": rank, "world_size": world_size, "state": self._noise.get_state()}
        return {"draws": int(self.draws), "noise": noise}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state fits."""
        int(state["draws"])
        if state["noise"] and set(state["noise"]) != {"device", "rank", "world_size", "state"}:
            raise ValueError("the state of the noise is incomplete")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.draws.fill_(int(state["draws"]))
        self._saved_noise = state["noise"] or None
        if self._noise is not None:
            self._seed(self._noise)  # in place: a captured graph may hold the generator

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a generator cannot be copied, but where it is can."""
        return {**self.__dict__, "_noise": None, "_saved_noise": self.state_dict()["noise"] or None}
