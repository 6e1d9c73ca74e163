"""A whole update, or a forward pass, as one CUDA graph: the GPU does not wait for Python, which takes longer than the arithmetic.

    update = CapturedUpdate(losses, net, optimizer, ema, ...)      draw, noise, forward, backward, clip, Adam, averages
    predict = CapturedForward(net)                                 for probes and samples: predict(x, t, labels)

A graph replays the kernel launches of one run on the same memory. So everything that changes between updates is written in place into fixed tensors:
images, learning rate, weight of the averages, the sampler's tables. The random stream continues from replay to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from noiseclock.core.batch import call
from noiseclock.core.lookahead import gradient_of_sum
from noiseclock.core.probes import autocast_dtype
from noiseclock.lab.ema import EMA
from noiseclock.lab.half import HalfWeights
from noiseclock.lab.moments import by_size
from noiseclock.lab.recipes import Recipe

WARMUP = 3  # runs before a capture: they compile, choose kernels and create the optimiser's state


def why_not_captured(recipe: Recipe, device: torch.device, world: int, shard: bool) -> str:
    """The reason why an update cannot be one CUDA graph; empty if it can."""
    reasons = {
        f"this runs on {device.type}": device.type != "cuda",
        "there are several processes, which wait for each other between forward and step": world > 1 or shard,
        f"an update has {recipe.accumulate} micro-batches": recipe.accumulate > 1,
        "dropout is recomputed, and a graph cannot go back to earlier random numbers": recipe.checkpointing and recipe.dropout > 0,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


class Numbers(NamedTuple):
    """Of the last update, read from the device. lost_in_a_row: updates up to this one, in a row, that were not finite; skipped: all such updates."""

    loss: float
    norm: float
    lost_in_a_row: int
    skipped: int


class CapturedUpdate:
    """Updates of a network, one per call: the first few run without a graph, then one is captured, and the rest are replays.

    losses: maps images and labels to their mean loss, and draws times and noise. generator: of the noise. replayed: called after each replay with
    a 0-d tensor on the device, 1 if the update was not finite; a replay does not run the optimiser's hooks. half: the copy that `losses` runs
    instead of `net`, if any. An update whose loss or gradient is not finite changes neither weights nor averages. skipped: such updates so far.
    """

    def __init__(
        self,
        losses: Callable[[Tensor, Tensor | None], Tensor],
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        ema: EMA,
        *,
        clip: float,
        generator: torch.Generator,
        replayed: Callable[[Tensor], None],
        half: HalfWeights | None = None,
        skipped: int = 0,
    ) -> None:
        self._losses, self._optimizer, self._ema, self._clip, self._replayed = losses, optimizer, ema, clip, replayed
        self._parameters = list(by_size(net).values())
        self._generator, self._half = generator, half
        self._images: Tensor | None = None
        self._labels: Tensor | None = None
        self._runs = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        device = self._parameters[0].device
        self._weight = torch.zeros((), device=device)  # of the new parameters in the averages
        self._seen = torch.tensor([0.0, 0.0, 0.0, float(skipped)], dtype=torch.float64, device=device)
        self._lost = torch.zeros((), device=device)  # 1 if the last update was not finite
        optimizer.found_inf = self._lost  # type: ignore[attr-defined]  # a fused optimiser reads this, and skips its step if it is 1
        if half is not None:
            half.refresh()  # a checkpoint may have been loaded since the copy was made

    def __call__(self, images: Tensor, labels: Tensor | None, *, lr: float, averaging: float) -> None:
        """One update on images (B, ...) and their labels or captions. lr: the learning rate. averaging: the weight of new parameters in the EMA."""
        if self._images is None:
            self._images = torch.empty_like(images, memory_format=torch.channels_last if images.ndim == 4 else torch.contiguous_format)
            self._labels = None if labels is None else torch.empty_like(labels)
        self._images.copy_(images)
        if self._labels is not None and labels is not None:
            self._labels.copy_(labels)
        for group in self._optimizer.param_groups:
            group["lr"].fill_(lr)
        self._weight.fill_(averaging)
        if self._graph is None:
            self._optimizer.zero_grad()  # before the capture too, so that the graph allocates the gradients
        if self._runs < WARMUP:
            _apart(self._update)
            self._runs += 1
            return
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            self._graph.register_generator_state(self._generator)
            with torch.cuda.graph(self._graph):
                self._update()  # only recorded, nothing runs yet
        self._graph.replay()
        self._replayed(self._lost)

    @property
    def ready(self) -> bool:
        """Is the update captured? Before that, updates also compile and choose kernels."""
        return self._graph is not None

    def read(self) -> Numbers:
        """The numbers of the last update. This waits for the device."""
        loss, norm, in_a_row, skipped = self._seen.tolist()
        return Numbers(loss, norm, int(in_a_row), int(skipped))

    def _update(self) -> None:
        assert self._images is not None
        loss = self._losses(self._images, self._labels)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._half is not None:
            self._half.collect()
        with torch.no_grad():
            norm = nn.utils.clip_grad_norm_(self._parameters, self._clip)
            lost = ~(loss.detach().isfinite() & norm.isfinite())
            self._lost.copy_(lost)
            self._optimizer.step()
            if self._half is not None:
                self._half.refresh()
            self._ema.towards(torch.where(lost, 0.0, self._weight))
            in_a_row = torch.where(lost, self._seen[2] + 1, 0.0)
            self._seen.copy_(torch.stack([loss.detach().double(), norm.double(), in_a_row, self._seen[3] + lost]))


class CapturedForward:
    """A network in evaluation mode, without gradients, as one CUDA graph for each input shape. An output is valid until the next call.

    net: may be compiled; the compiled network runs under autocast only. Calls outside autocast, for exact numbers, are rare and compiling takes a
    minute, so they run the plain network. exact: the network for calls outside autocast, if it is another one (`lab/half.py`). Autocast must run
    without its cache, because a graph outlives the cached casts.
    """

    def __init__(self, net: nn.Module, exact: nn.Module | None = None) -> None:
        self.net = net
        self._orig_mod = getattr(net, "_orig_mod", net) if exact is None else exact  # torch.compile's name: probes look for it
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, list[Tensor | None], Any]] = {}

    @torch.no_grad()
    def __call__(self, x: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        """The prediction for x (B, ...) at t (B,)."""
        net = self._orig_mod if autocast_dtype(x.device) is None else self.net
        out: Tensor = self._replayed(lambda x, t, labels: call(net, x, t, labels), x, t, labels)
        return out

    def replayed_gradient(
        self, parameters: Sequence[Tensor], x: Tensor, t: Tensor, labels: Tensor | None, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, ...]:
        """See `gradient_of_sum`."""
        net = self._orig_mod

        def run(*given: Any) -> tuple[Tensor, ...]:
            names = {id(p): name for name, p in net.named_parameters()}
            # detached aliases of the parameters: autograd's own nodes for the parameters are bound to the stream of the updates
            leaves = {names[id(p)]: p.detach().requires_grad_() for p in parameters}
            return gradient_of_sum(lambda *seen: functional_call(net, leaves, seen), list(leaves.values()), *given)

        found: tuple[Tensor, ...] = self._replayed(run, x, t, labels, target, weight)
        return found

    def _replayed(self, run: Callable[..., Any], *inputs: Tensor | None) -> Any:
        """`run(*inputs)`, captured the first time that these shapes and dtypes occur."""
        device = next(given.device for given in inputs if given is not None)
        key = *(None if given is None else (given.shape, given.dtype) for given in inputs), autocast_dtype(device)
        if key not in self._graphs:
            static, training = [None if given is None else _copy(given) for given in inputs], self.net.training
            graph = torch.cuda.CUDAGraph()
            try:
                self.net.eval()  # the caller has set eval mode on the trained network, which may be another module
                for _ in range(WARMUP):
                    _apart(lambda: run(*static))
                with torch.cuda.graph(graph):
                    out = run(*static)
            finally:
                self.net.train(training)
            self._graphs[key] = graph, static, out
        graph, static, out = self._graphs[key]
        for mine, given in zip(static, inputs, strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)
        graph.replay()
        return out


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.channels_last if x.ndim == 4 else torch.contiguous_format)


def _apart(run: Callable[[], Any]) -> None:
    """Run something on a side stream, as a capture does, so that its allocations stay apart from all others."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
