"""Is the ruler straight? The FID of CIFAR-10's training images against its test images, which is known: 3.15 with 50,000 and 10,000.

    python benchmarks/fid_ruler.py --out benchmarks/results/fid-ruler.json       # all images: minutes on a GPU, hours on a CPU
    python benchmarks/fid_ruler.py --train 200 --test 200                        # a look at whether it runs

The training images against themselves must give 0. The statistics of the training images stay in $NOISECLOCK_HOME for the next run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

import noiseclock as nc
from noiseclock.lab import inception
from noiseclock.lab.data import Images, load
from noiseclock.lab.evaluate import Scores, compare_images, reference, table
from noiseclock.lab.inception import RESIZES
from noiseclock.lab.metrics import frechet

KNOWN = 3.152  # pytorch-fid's own network on these files


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50_000, help="how many images of the training set")
    parser.add_argument("--test", type=int, default=10_000, help="how many of the test set")
    parser.add_argument("--resize", nargs="+", choices=RESIZES, default=["pytorch"])
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    train, test = load("cifar10"), load("cifar10", split="test")
    assert isinstance(train, Images)
    assert isinstance(test, Images)
    found: list[Scores] = []
    results = []
    for resize in args.resize:
        network = inception.load(resize=resize)
        start = time.perf_counter()
        known = reference(train, network, count=args.train, batch=args.batch, device=args.device)
        scores = compare_images(
            test.pixels[: args.test], train, network=network, solver="real test images", count=args.train, batch=args.batch, device=args.device
        )
        found.append(scores)
        seconds = time.perf_counter() - start
        results.append(
            {**asdict(scores), "kernel": scores.kernel._asdict(), "train_itself": frechet(known.moments, known.moments), "seconds": seconds}
        )
    Console().print(table(found))
    whole = (args.train, args.test) == (50_000, 10_000)
    print(f"FID is known to be {KNOWN} for all images (resize pytorch)" + ("." if whole else f"; these are {args.train:,} and {args.test:,}."))
    print("Train against itself: " + ", ".join(f"{r['train_itself']:.1e} ({r['resize']})" for r in results))
    if args.out:
        setup = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "noiseclock": nc.__version__,
            "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine(),
            "batch": args.batch,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"setup": setup, "known": KNOWN, "scores": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
