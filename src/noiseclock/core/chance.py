"""The random numbers of a clock: its rank, the uniforms of its times, and its noise stream.

Times are a pure function of (seed, draw, place), so a checkpoint stores one counter and resumes on any number of ranks. Noise comes from a torch
generator, because hashing every pixel would be slow. A resumed run continues its noise stream exactly on the same rank, world size and device type;
otherwise it starts a new stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from noiseclock.core.streams import finalize, independent, places, stratified
from noiseclock.core.table import Table, lasting

PURPOSES = ("noise", "probe", "sampler")


class Chance:
    """The random numbers of one clock on one rank. rank, world_size: those of torch.distributed if None."""

    def __init__(self, seed: int, rank: int | None, world_size: int | None) -> None:
        self.seed, self._place = seed, _check_place(rank, world_size)
        with lasting():
            self.draws = torch.zeros((), dtype=torch.int64, device="cpu")  # number of draws so far, on the device of the data
        self._starts: dict[tuple[int, int, int, int], Table] = {}
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
        """(n,) uniforms in [0, 1) for the times of a batch; evenly: stratified over all ranks and micro-batches; micro: (i, how many)."""
        rank, world_size = self.place()
        part, parts = micro[0] * world_size + rank, micro[1] * world_size
        number = self._next_draw(device, first=micro[0] == 0)
        seed = self.seed
        if not evenly:
            # Each part has its own stream: places in a common one are counted in units of n, and parts of different sizes would share some of them.
            seed, part, parts = finalize(finalize(seed) + 1 + part) if part > 0 else seed, 0, 1
        key = (seed, n, part, parts)
        if key not in self._starts:
            self._starts[key] = Table(places(seed, n, part=part, parts=parts))
        start = self._starts[key].on(device)
        return stratified(start, number, n, part=part, parts=parts) if evenly else independent(start, number, n)

    def _next_draw(self, device: torch.device, *, first: bool) -> Tensor:
        """The number of this draw, the same on every rank. Micro-batches of one update share it: only the first increments it."""
        if self.draws.device != device:
            with lasting():
                self.draws = self.draws.to(device)
        if first:
            self.draws += 1
        return self.draws

    def generator(self, device: torch.device) -> torch.Generator:
        """This rank's noise generator."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # the device of a tensor always has an index
        if self._noise is None or self._noise.device != device:
            self._noise = torch.Generator(device)
            self._seed(self._noise)
        return self._noise

    def seed_of(self, purpose: str, count: int) -> int:
        """A seed for this rank, this purpose and this count."""
        word = self.seed
        for part in (PURPOSES.index(purpose), self.place()[0], count):
            word = finalize(word) + 1 + part
        return finalize(word) // 2

    def _seed(self, generator: torch.Generator) -> None:
        """Restore the saved stream if device type, rank and world size match, else start a new one for this rank."""
        saved, self._saved_noise = self._saved_noise, None
        if saved is not None and (saved["device"], saved["rank"], saved["world_size"]) == (generator.device.type, *self.place()):
            generator.set_state(saved["state"].cpu())
        else:
            generator.manual_seed(self.seed_of("noise", int(self.draws)))

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The number of draws and the state of the noise generator."""
        if self._noise is None:
            return {"draws": int(self.draws), "noise": dict(self._saved_noise or {})}
        rank, world_size = self.place()
        noise = {"device": self._noise.device.type, "rank": rank, "world_size": world_size, "state": self._noise.get_state()}
        return {"draws": int(self.draws), "noise": noise}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless the state fits."""
        int(state["draws"])
        noise = state["noise"]
        if noise and (set(noise) != {"device", "rank", "world_size", "state"} or getattr(noise["state"], "dtype", None) is not torch.uint8):
            raise ValueError("the state of the noise is incomplete: it must hold device, rank, world_size and a state of bytes")
        if noise and (noise["device"] == "cpu" or torch.cuda.is_available()):
            try:
                torch.Generator(noise["device"]).set_state(noise["state"].cpu())
            except RuntimeError as error:
                raise ValueError(f"the state of the noise is damaged: {error}") from error

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.draws.fill_(int(state["draws"]))
        self._saved_noise = state["noise"] or None
        if self._noise is not None:
            self._seed(self._noise)  # in place: a captured graph may hold the generator

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a generator cannot be copied, but its state can."""
        return {**self.__dict__, "_noise": None, "_saved_noise": self.state_dict()["noise"] or None}


def _check_place(rank: int | None, world_size: int | None) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ValueError(f"rank and world_size go together, got rank={rank}, world_size={world_size}")
    if not hasattr(rank, "__index__") or not hasattr(world_size, "__index__"):
        raise TypeError(f"rank and world_size must be whole numbers, got rank={rank!r}, world_size={world_size!r}")
    rank, world_size = index(rank), index(world_size)  # numpy's numbers would overflow in the hashes of streams
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in 0..{world_size - 1}, got {rank}")
    return rank, world_size
