"""What a training of ImageNet latents takes on 1, 8 and 64 GPUs: memory, time, probes and messages, as arithmetic. Nothing here is timed.

    python benchmarks/scaling.py             prints the tables of docs/scaling.md; a test compares the page with them

Parameters and operations are counted on networks of the real size on torch's meta device, without memory. The activations that a sample keeps for
the backward pass are counted on the CPU, byte by byte, in networks of the real width and two depths, and extrapolated linearly to the real depth.
The rest are the assumptions below, which the page repeats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import noiseclock as nc
from noiseclock.core.policy import Policy
from noiseclock.lab.models import DIT, UVIT, build
from noiseclock.lab.shards import blocks

LATENTS, CLASSES, STEPS = (4, 32, 32), 1000, 1000
GPUS, BATCHES = (1, 8, 64), (256, 1024)
NODE = 8  # GPUs that are joined by fast links

RATE = 790e12 * 0.4  # FLOP/s in bf16: what docs/performance.md takes for an H200's matrix rate, at an assumed utilisation of 40 %
INSIDE, BETWEEN = 300e9, 40e9  # bytes/s of a collective operation for each GPU, within a node and across nodes: assumed
# How much slower a forward pass in float32 is than one in bf16: VarianceOptimal's measured cost of 1.041, with 64 of 128 samples every 40 updates, is
# (1.041 - 1)·120 forward passes of a batch; in bf16 it would be one.
EXACT = 4.9


@dataclass(frozen=True)
class Network:
    """One network, counted. images: how many its paper trains on. per_sample, once: bytes kept for the backward pass; spare: if checkpointed."""

    name: str
    images: float
    parameters: int
    block: int  # parameters of the largest block
    forward: float  # FLOP an image
    backward: float
    per_sample: float
    once: float
    spare: float


def counted(name: str, kind: str, size: dict[str, int], images: float) -> Network:
    """The network of one paper."""
    with torch.device("meta"):
        net = _built(kind, size)
        given = _inputs(1)
        with FlopCounterMode(display=False) as forward:
            out = net(*given)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
    parameters = [sum(p.numel() for p in part.parameters()) for part in (net, *blocks(net))]
    depths = (2, 4)
    kept = {}
    for depth, way in product(depths, (False, True)):
        with torch.device("meta"):
            thin = _built(kind, {**size, "blocks": depth}, checkpointing=way)
        thin.to_empty(device="cpu")  # any numbers will do
        kept.update({(depth, way, batch): _kept(thin, batch) for batch in (1, 2)})

    def at_depth(found: list[float]) -> float:
        """Linear extrapolation from the two depths to the real one."""
        return found[0] + (found[1] - found[0]) * (size["blocks"] - depths[0]) / (depths[1] - depths[0])

    per_sample, spare = (at_depth([kept[depth, way, 2] - kept[depth, way, 1] for depth in depths]) for way in (False, True))
    once = at_depth([2 * kept[depth, False, 1] - kept[depth, False, 2] for depth in depths])
    # while one block is recomputed, its activations are in memory too
    spare += (per_sample - spare) / size["blocks"]
    return Network(
        name, images, parameters[0], max(parameters[1:]), float(forward.get_total_flops()), float(backward.get_total_flops()), per_sample, once, spare
    )


def _built(kind: str, size: dict[str, int], checkpointing: bool = False) -> Any:
    return build(kind, LATENTS, classes=CLASSES, patch=2, checkpointing=checkpointing, **size)


def _inputs(batch: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(batch, *LATENTS), torch.zeros(batch), torch.zeros(batch, dtype=torch.long)


def _kept(net: Any, batch: int) -> int:
    """Bytes that a forward pass in bf16 autocast keeps for the backward pass, beside the parameters."""
    held = {p.untyped_storage().data_ptr(): 0 for p in net.parameters()}

    def keep(x: torch.Tensor) -> torch.Tensor:
        held.setdefault(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes())
        return x

    # without autocast's cache, so that memory is kept for the backward pass only
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), saved_tensors_hooks(keep, lambda x: x):
        out = net(*_inputs(batch))
    del out  # not earlier: it holds the graph, whose memory must not be reused during the count
    return sum(held.values())


# --- memory -------------------------------------------------------------------------------------------------------------------------------


def state(net: Network, gpus: int, way: str) -> float:
    """Bytes on each GPU that do not depend on the batch. Weights, gradients and EMA take 4 per parameter each, Adam's moments 8."""
    if way == "alone":  # plus, in the CUDA graph, the cast weights and their gradients
        return 24 * net.parameters
    if way == "DDP":  # plus the cast weights and the buckets of gradients
        return 26 * net.parameters
    # a shard; the cast weights, which autocast keeps whole until the backward pass; the current and the next block, and one block's gradient
    return 20 * net.parameters / gpus + 2 * net.parameters + 3 * 4 * net.block


def ways(gpus: int) -> tuple[str, ...]:
    """The ways to train on that many."""
    return ("alone",) if gpus == 1 else ("DDP", "FSDP2")


def memory(nets: list[Network]) -> Iterator[list[str]]:
    """One row for each network, number of GPUs and way."""
    yield ["network", "GPUs", "way", "state", *(f"batch {batch}{more}" for batch in BATCHES for more in ("", ", checkpointing"))]
    for net in nets:
        for gpus in GPUS:
            for way in ways(gpus):
                fixed = state(net, gpus, way)
                needs = [fixed + batch / gpus * sample for batch in BATCHES for sample in (net.per_sample, net.spare)]
                yield [net.name, str(gpus), way, *(_gigabytes(x) for x in (fixed, *needs))]


# --- time ---------------------------------------------------------------------------------------------------------------------------------


def traffic(net: Network, gpus: int, way: str) -> float:
    """Bytes that each GPU sends in one update, in float32: gradients all-reduced, or weights gathered twice and gradients reduce-scattered."""
    return {"alone": 0, "DDP": 2, "FSDP2": 3}[way] * 4 * net.parameters * (gpus - 1) / gpus


def link(gpus: int) -> float:
    """Bytes per second."""
    return INSIDE if gpus <= NODE else BETWEEN


def seconds(net: Network, gpus: int, batch: int, way: str, checkpointing: bool = False) -> tuple[float, float]:
    """Seconds of an update: arithmetic, and communication."""
    operations = net.forward + net.backward + (net.forward if checkpointing else 0)
    return batch / gpus * operations / RATE, traffic(net, gpus, way) / link(gpus)


def time(nets: list[Network]) -> Iterator[list[str]]:
    """One row for each network, batch, number of GPUs and way."""
    yield ["network", "batch", "GPUs", "way", "arithmetic", "with checkpointing", "messages", "updates", "days", "GPU days"]
    for net in nets:
        for batch in BATCHES:
            for gpus in GPUS:
                for way in ways(gpus):
                    work, messages = seconds(net, gpus, batch, way)
                    updates = net.images / batch
                    days = updates * max(work, messages) / 86400
                    numbers = *(_milliseconds(x) for x in (work, seconds(net, gpus, batch, way, True)[0], messages)), f"{updates / 1e6:.2f} M"
                    yield [net.name, str(batch), str(gpus), way, *numbers, f"{days:.1f}", f"{days * gpus:.0f}"]


# --- probes -------------------------------------------------------------------------------------------------------------------------------


def adaptive(sampler: nc.Adaptive, batch: int, gpus: int) -> float:
    """Forward passes of a rank's batch in a probe, before and after the update: |S| per image, and its share of the time grid, in whole passes."""
    mine, grid = batch // gpus, len(range(sampler.stride // 2, STEPS, sampler.stride))
    if gpus == 1:  # together, in passes of any size
        return 2 * (sampler.count + grid / mine)
    return 2 * (sampler.count + math.ceil(math.ceil(grid / gpus) / mine))


def probes(batch: int, gpus: int) -> dict[str, tuple[float, int]]:
    """The cost of one probe, in bf16 forward passes of a rank's batch, and the updates between two; a backward pass counts as two."""
    mine, dear, cheap, optimal, ahead = batch // gpus, nc.Adaptive(), nc.Adaptive.cheap(), nc.VarianceOptimal(), nc.Lookahead()
    return {
        "Adaptive": (adaptive(dear, batch, gpus), dear.every),
        "Adaptive.cheap()": (adaptive(cheap, batch, gpus), cheap.every),
        "VarianceOptimal": (2 * min(math.ceil(optimal.samples / gpus), mine) / mine * EXACT, optimal.every),
        "Lookahead": ((3 + 2) / 2 * EXACT, ahead.every),  # a gradient on one half of the batch, two forward passes of the other
        "loss-second-moment": (0, nc.LossSecondMoment().refresh),
    }


def cost(_: list[Network]) -> Iterator[list[str]]:
    """One row for each sampler: the same for every network, because costs are in forward passes."""
    places = [(batch, gpus) for batch in BATCHES for gpus in GPUS]
    yield ["sampler", "every", *(f"{batch} on {gpus}" for batch, gpus in places)]
    for name, (_, every) in probes(BATCHES[0], 1).items():
        cells = []
        for place in places:
            forwards = probes(*place)[name][0]
            cells.append(f"{forwards:.1f}: {forwards / (3 * every):.1%}" if forwards else "0")
        yield [name, str(every), *cells]


def gathers(nets: list[Network]) -> Iterator[list[str]]:
    """FSDP2 gathers all weights for each pass: a probe's passes, relative to the communication of the updates."""
    yield ["network", "GPUs", "one gathering", "Adaptive, a probe", "share of the messages", "Adaptive, DDP: share of an update"]
    batch = BATCHES[0]
    for net in nets:
        for gpus in GPUS[1:]:
            passes, every = probes(batch, gpus)["Adaptive"]
            one = 4 * net.parameters * (gpus - 1) / gpus / link(gpus)
            work, messages = seconds(net, gpus, batch, "DDP")
            share = passes * work / 3 / (every * max(work, messages))
            yield [net.name, str(gpus), _milliseconds(one), f"{passes:.0f} gatherings", f"{passes / (3 * every):.1%}", f"{share:.1%}"]


def messages(nets: list[Network]) -> Iterator[list[str]]:
    """What samplers communicate for one probe or refresh, with the images of a rank at batch 256 on 8 GPUs."""
    yield ["sampler", "every", "bytes for each rank", "of which"]
    sample, mine = math.prod(LATENTS) * 4, BATCHES[0] // NODE
    policy = sum(p.numel() for p in Policy(LATENTS).parameters())
    adaptive, moments, optimal, ahead = nc.Adaptive(), nc.LossSecondMoment(), nc.VarianceOptimal(), nc.Lookahead()
    shown, grid, learned = 2 * (1 + mine) * sample, 2 * STEPS * 4, policy * 4
    parts = f"one image and its noises {_small(shown)}, losses {_small(grid)}, the policy's gradient {_small(learned)}, densities the rest"
    yield ["Adaptive", str(adaptive.every), _small(shown + grid + learned + (STEPS + 1) * 4), parts]
    yield ["VarianceOptimal", str(optimal.every), _small(2 * optimal.bins * 8 + 8), "prices in bins"]
    sizes = ", ".join(f"{net.name} {4 * net.parameters / 1e9:.1f} GB" for net in nets)
    yield ["Lookahead", str(ahead.every), sizes, "one gradient, as in an update; with FSDP2 a part of it"]
    yield ["loss-second-moment", str(moments.refresh), _small(2 * moments.bins * 8), "sums of losses in bins"]


# --- tables -------------------------------------------------------------------------------------------------------------------------------


def counts(nets: list[Network]) -> Iterator[list[str]]:
    """What was counted."""
    yield ["network", "parameters", "forward, an image", "backward / forward", "kept, an image", "with checkpointing", "kept once: cast weights"]
    for net in nets:
        yield [net.name, f"{net.parameters / 1e6:.1f} M", f"{net.forward / 1e9:.1f} GFLOP", f"{net.backward / net.forward:.2f}",
               *(f"{x / 1e6:.1f} MB" for x in (net.per_sample, net.spare)), f"{net.once / 1e9:.2f} GB"]  # fmt: skip


def _gigabytes(x: float) -> str:
    return f"{x / 1e9:.1f} GB"


def _milliseconds(x: float) -> str:
    return f"{x * 1000:.0f} ms"


def _small(x: float) -> str:
    return f"{x / 1e6:.2f} MB" if x >= 1e6 else f"{x / 1e3:.1f} kB"


TABLES = {"counted": counts, "memory": memory, "time": time, "probes": cost, "gathering": gathers, "messages": messages}


def table(rows: Iterator[list[str]]) -> str:
    """As Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * (lines[0].count(" | ") + 1), *lines[1:]])


def main() -> None:
    """Print all tables."""
    nets = [
        counted("DiT-XL/2", "dit", DIT["XL"], 7e6 * 256),  # 2212.09748: 7 M updates of 256
        counted("U-ViT-H/2", "uvit", UVIT["H"], 2.1e6 * 256),  # 2411.09998, Table 9: 2.1 M updates of 256
    ]
    for name, rows in TABLES.items():
        print(f"{name}\n\n{table(rows(nets))}\n")


if __name__ == "__main__":
    main()
