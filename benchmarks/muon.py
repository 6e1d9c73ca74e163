"""Does a sampler pay under Muon too? A small DiT on digits, its matrices trained by Muon and the rest by AdamW, beside AdamW alone.

    python benchmarks/muon.py --out muon.json                               # 25 minutes on one core
    python benchmarks/muon.py --without-metric --samplers variance-optimal  # as if Muon's metric were not known
    python benchmarks/muon.py --updates 20 --seeds 1 --samples 64           # a look at whether it runs

Each learning rate is tried with each sampler; the table has Fréchet distances and held-out losses, mean and standard deviation over seeds.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.optimizers import METRICS
from noiseclock.lab.built import network, sampled
from noiseclock.lab.data import load, scaled
from noiseclock.lab.ema import EMA
from noiseclock.lab.evaluate import compare_images, loss_curve
from noiseclock.lab.recipes import recipe
from noiseclock.lab.statistics import summary
from noiseclock.lab.surroundings import surroundings

BASE = replace(recipe("digits"), model="dit", channels=64, blocks=4, head_channels=16, patch=2, batch=32, warmup=50, ema=0.98, solver_steps=20)
RATES = {"adamw": (2e-3, 4e-3, 8e-3), "muon": (2.5e-3, 5e-3, 1e-2)}  # of Muon's matrices; the rest of the network has AdamW's 2e-3
SAMPLERS = ("uniform", "variance-optimal")


@dataclass(frozen=True)
class Row:
    """One training. rho: VarianceOptimal's at the end."""

    optimizer: str
    lr: float
    sampler: str
    seed: int
    frechet: float
    validation: float
    rho: float | None


def optimizers(name: str, net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW alone; or Muon for the matrices within the blocks, as is usual, and AdamW for embeddings, biases and the output."""
    if name == "adamw":
        return [torch.optim.AdamW(net.parameters(), lr, weight_decay=0.0)]
    matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]
    rest = [p for p in net.parameters() if all(p is not matrix for matrix in matrices)]
    return [torch.optim.Muon(matrices, lr, weight_decay=0.0), torch.optim.AdamW(rest, 2e-3, weight_decay=0.0)]


def trained(name: str, lr: float, sampler: str, seed: int, updates: int, samples: int) -> Row:
    """Train and evaluate one network."""
    data, held_out = load("digits"), load("digits", split="test")
    pixels = scaled(torch.stack([data[i] for i in range(len(data))]))
    torch.manual_seed(seed)
    clock = nc.Clock("linear", sampler, seed=seed)
    net = network(BASE, data, clock)
    made, ema = optimizers(name, net, lr), EMA(net, BASE.ema)
    clock.attach(*made, model=net)
    rates = [[group["lr"] for group in each.param_groups] for each in made]
    order = torch.Generator().manual_seed(seed)
    for update in range(updates):
        for each, full in zip(made, rates, strict=True):
            for group, rate in zip(each.param_groups, full, strict=True):
                group["lr"] = rate * min(1.0, (update + 1) / BASE.warmup)
        x0 = pixels[torch.randint(len(pixels), (BASE.batch,), generator=order)]
        b = clock.draw(x0, predict=net)
        clock.loss(b, net(b.x_t, b.t)).mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), BASE.clip)
        for each in made:
            each.step()
            each.zero_grad()
        ema.towards(ema.weight(update + 1))
    averaged = copy.deepcopy(net)
    averaged.load_state_dict({**net.state_dict(), **ema.state_dict()})
    averaged.eval()
    with torch.no_grad():
        images = sampled(averaged, BASE, clock, data, samples)
        loss = float(loss_curve(clock, averaged, held_out).loss.mean())
    rho = clock.sampler.info.get("rho")
    return Row(name, lr, sampler, seed, compare_images(images, data).frechet, loss, rho)


def table(rows: Sequence[Row]) -> str:
    """A line for each optimiser, rate and sampler."""
    lines = [f"{'optimiser':<9}  {'rate':>6}  {'sampler':<18}  {'Fréchet distance':>18}  {'held-out loss':>20}  {'ρ':>6}"]
    for key in dict.fromkeys((row.optimizer, row.lr, row.sampler) for row in rows):
        mine = [row for row in rows if (row.optimizer, row.lr, row.sampler) == key]
        rho = summary(row.rho for row in mine if row.rho is not None)
        frechet, loss = summary(row.frechet for row in mine), summary(row.validation for row in mine)
        lines.append(f"{key[0]:<9}  {key[1]:>6g}  {key[2]:<18}  {frechet!s:>18}  {loss!s:>20}  {'' if rho.mean is None else f'{rho.mean:.2f}':>6}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Train all, print one table, write the JSON after every training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--samplers", nargs="+", default=SAMPLERS)
    parser.add_argument("--without-metric", action="store_true", help="under Muon, measure gradients without preconditioning")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.without_metric:
        METRICS.pop(torch.optim.Muon)
        RATES.pop("adamw")
    setup: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    setup |= {"updates": args.updates, "samples": args.samples, "recipe": BASE.settings(), **surroundings(torch.device("cpu"), 1)}
    rows: list[Row] = []
    for seed in range(args.seeds):
        for name, rates in RATES.items():
            for lr in rates:
                for sampler in args.samplers:
                    rows.append(trained(name, lr, sampler, seed, args.updates, args.samples))
                    if args.out:
                        args.out.write_text(json.dumps({"setup": setup, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
