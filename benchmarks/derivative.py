"""How exact is the derivative that a probe takes of the losses, by the size of its step and the precision of the network?

    python benchmarks/derivative.py                                                              # digits, two minutes on one core
    python benchmarks/derivative.py --data cifar10 --channels 64 --batch 32 --lr 4e-4 --probes 4 # the 9.0 M U-Net; hours on a CPU

A U-Net learns with uniform draws. After so many updates the derivative of 64 losses along P^½ξ is taken by each step in each precision, for several
ξ, and compared with that of the same network in float64. "Error" is the root mean square of the difference, relative to that of the derivative;
"price" is the mean square relative to the true one, by eighths of time, since the mean square is what VarianceOptimal learns from. tf32 concerns
convolutions: on a GPU torch's own switch, on a CPU their operands are rounded to TF32's ten bits. bf16 is autocast.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import noiseclock as nc
from noiseclock.core.directions import derivative, normal
from noiseclock.core.optimizers import metric
from noiseclock.core.priced import evenly
from noiseclock.core.probes import Probe
from noiseclock.lab.data import load
from noiseclock.lab.models import build, count
from noiseclock.lab.surroundings import surroundings

PRECISIONS = ("fp32", "tf32", "bf16")
PLACES = 8  # parts of time


class Rounded(torch.autograd.Function):
    """float32 rounded to ten bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ((x.contiguous().view(torch.int32) + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@contextmanager
def tf32(device: torch.device, allowed: bool = True) -> Iterator[None]:
    """Convolutions in TF32, or not."""
    if device.type == "cuda" or not allowed:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            yield
        return
    plain: Any = functional.conv2d

    def rounded(x: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
        return plain(Rounded.apply(x), Rounded.apply(weight), *rest, **named)  # type: ignore[no-untyped-call, no-any-return]

    def of_a_module(module: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return rounded(x, weight, bias, module.stride, module.padding, module.dilation, module.groups)

    with patch.object(nn.Conv2d, "_conv_forward", of_a_module), patch.object(functional, "conv2d", rounded):
        yield


def compared(
    net: nn.Module, optimizer: Any, clock: nc.Clock, batches: Sequence[Tensor], precisions: Sequence[str], steps: Sequence[float], seed: int
) -> list[dict[str, Any]]:
    """The error and the price of every precision and step, with one ξ for each batch of images."""
    net.eval()
    exact, parameters = deepcopy(net).double(), list(net.parameters())
    power, _ = metric([optimizer], parameters)
    found: dict[tuple[str, float], list[Tensor]] = {}
    true = []
    for number, x0 in enumerate(batches):
        noise = torch.randn(x0.shape, generator=torch.Generator(x0.device).manual_seed(seed + number), device=x0.device)
        direction, moments = normal(parameters, power, seed + number), evenly(len(x0), number, x0.device)
        probe = Probe(exact, clock.schedule, clock.objective, x0.double(), noise=noise.double(), modules=[exact])
        true.append(
            derivative([exact], list(exact.parameters()), power, [part.double() for part in direction], partial(probe.losses, moments), step=1e-6)
        )
        for precision in precisions:
            autocast = torch.bfloat16 if precision == "bf16" else None
            probe = Probe(net, clock.schedule, clock.objective, x0, noise=noise, modules=[net], autocast=autocast)
            with tf32(x0.device, precision == "tf32"):
                for step in steps:
                    slope = derivative([net], parameters, power, direction, partial(probe.losses, moments), step=step)
                    found.setdefault((precision, step), []).append(slope.double())
    net.train()
    wanted = torch.stack(true)
    rows = []
    for (precision, step), slopes in found.items():
        got = torch.stack(slopes)
        error, price = float((got - wanted).norm() / wanted.norm()), _by_time(got) / _by_time(wanted)
        rows.append({"precision": precision, "step": step, "error": error, "price": price.tolist()})
    return rows


def _by_time(slopes: Tensor) -> Tensor:
    """(places,) the mean square of slopes (ξ, samples in the order of time)."""
    return slopes.square().mean(0).unflatten(0, (PLACES, -1)).mean(1).cpu()


def main(argv: list[str] | None = None) -> None:
    """Train, compare, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--updates", type=int, nargs="+", default=[2, 10, 46, 300, 1000, 5000])
    parser.add_argument("--steps", type=float, nargs="+", default=[1e-4, 1e-3, 5e-3, 2e-2])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--probes", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    pixels = torch.as_tensor(load(args.data, split="train").pixels)  # type: ignore[union-attr]
    shape: Any = tuple(pixels.shape[1:])
    torch.manual_seed(0)
    levels: Any = {"multipliers": (1, 2, 2, 2), "blocks": 2} if shape[1] > 8 else {"multipliers": (1, 2), "blocks": 1}
    net = build("unet", shape, channels=args.channels, attention=(shape[1] // 2,), **levels).to(args.device)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    clock = nc.Clock("linear", nc.Uniform()).attach(optimizer)
    generator, begun, rows = torch.Generator().manual_seed(0), time.monotonic(), []

    def images(n: int) -> Tensor:
        return (pixels[torch.randint(len(pixels), (n,), generator=generator)].float() / 127.5 - 1).to(args.device)

    for updates in args.updates:
        while clock.updates < updates:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, (clock.updates + 1) / 500)
            b = clock.draw(images(args.batch))
            clock.loss(b, net(b.x_t, b.t)).mean().backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        for row in compared(net, optimizer, clock, [images(64) for _ in range(args.probes)], args.precisions, args.steps, 1000 * updates):
            price = " ".join(f"{ratio:.2f}" for ratio in row["price"])
            print(f"{updates:>5} updates  {row['precision']}  step {row['step']:<6g}  error {row['error']:.3f}  price {price}", flush=True)
            rows.append({"updates": updates, **row})
        if args.out:
            setup = {name: value for name, value in vars(args).items() if name != "out"} | {"parameters": count(net)}
            made = surroundings(torch.device(args.device), 1)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"setup": setup, "made with": made, "seconds": time.monotonic() - begun, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
