"""What `noiseclock train digits` reaches on a CPU, and how long it takes: Fréchet distance, bits per dimension and held-out loss over seeds.

    python benchmarks/digits.py --out benchmarks/results/digits.json        # the recipe as it is, three seeds: 10 to 20 minutes on 2 cores
    python benchmarks/digits.py --updates 50 --seeds 1 --samples 100        # a look at whether it runs

The time is that of the updates alone, as the trainer measures it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, stdev

import torch

from noiseclock.lab.pictures import save
from noiseclock.lab.recipes import recipe
from noiseclock.lab.surroundings import surroundings
from noiseclock.lab.train import sampled, train
from noiseclock.lab.trained import evaluated, opened


def main(argv: list[str] | None = None) -> None:
    """Train and evaluate, print one table, write the JSON after every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, help="the recipe's unless given")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    parser.add_argument("--picture", type=Path, help="where to write samples of the first seed")
    args = parser.parse_args(argv)
    base = recipe("digits")
    base = replace(base, updates=args.updates or base.updates, sample_every=0, track=())
    found = []
    print(f"{base.updates} updates of {base.batch} on {os.cpu_count()} cores, {torch.get_num_threads()} threads; {args.samples} samples")
    print("seed  minutes  Fréchet distance  precision  recall  bits/dim        held-out loss")
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for record in train(replace(base, seed=seed), folder, device="cpu"):  # noqa: B007
                pass
            run = opened(folder)
            if args.picture and seed == 0:
                save(sampled(run.net, run.recipe, run.clock, run.data, 64), args.picture)
            result = evaluated(run, samples=args.samples, vlb_images=300, vlb_steps=100)
        s, b, loss = result.scores, result.bits, float(result.curve.loss.mean())
        assert s is not None
        assert b is not None
        figures = f"{s.frechet:16.2f}  {s.precision:9.3f}  {s.recall:6.3f}  {b.mean:.3f} ± {b.error:.3f}   {loss:.4f}"
        print(f"{seed:4}  {record.seconds / 60:7.1f}  {figures}", flush=True)
        found.append({"seed": seed, "seconds": record.seconds, "scores": asdict(s), "bits": asdict(b), "held_out_loss": loss})
        if args.out:
            date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            setup = {"date": date, "cores": os.cpu_count(), **surroundings(torch.device("cpu"), 1)}
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"setup": setup, "recipe": base.settings(), "seeds": found}, indent=1) + "\n")
    if len(found) > 1:
        for name, values in {
            "Fréchet distance": [f["scores"]["frechet"] for f in found],
            "bits/dim": [f["bits"]["mean"] for f in found],
            "minutes": [f["seconds"] / 60 for f in found],
        }.items():
            print(f"{name}: {fmean(values):.3g} ± {stdev(values):.2g} over {len(values)} seeds")


if __name__ == "__main__":
    main()
