"""Is our FID correct? That of CIFAR-10's training images against its test images is known: 3.15 with 50,000 and 10,000.

    python benchmarks/fid_ruler.py --precision fp32 tf32 fp16 bf16 --out fid.json      # all images: a minute on a GPU, hours on a CPU
    python benchmarks/fid_ruler.py --train 200 --test 200                              # a look at whether it runs

The training images against themselves must give 0. With several precisions, the table shows what each does to FID and how
long its features take. The statistics of the training images are cached in $NOISECLOCK_HOME for the next run.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import noiseclock as nc
from noiseclock.lab import inception
from noiseclock.lab.data import Images, load
from noiseclock.lab.evaluate import PRECISIONS, compare_images, features_of, precision_on, reference
from noiseclock.lab.inception import RESIZES
from noiseclock.lab.metrics import frechet

KNOWN = 3.152  # pytorch-fid's own network on these files


def main(argv: list[str] | None = None) -> None:
    """Measure, print one table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=int, default=50_000, help="number of training images")
    parser.add_argument("--test", type=int, default=10_000, help="number of test images")
    parser.add_argument("--resize", choices=RESIZES, default="pytorch")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help="precisions of the convolutions; the others are compared with the first")
    parser.add_argument("--batch", type=int, nargs="+", default=[250], help="batch sizes; scores use the first, and all are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args(argv)
    train, test = load("cifar10"), load("cifar10", split="test")
    assert isinstance(train, Images)
    assert isinstance(test, Images)
    fake, network = test.pixels[: args.test], inception.load(resize=args.resize)
    setup = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "torch": torch.__version__, "noiseclock": nc.__version__,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine(),
        "train": args.train, "test": args.test, "resize": args.resize,
    }  # fmt: skip
    results: list[dict[str, Any]] = []
    print("precision  FID       apart     " + "  ".join(f"features at {batch}" for batch in args.batch) + "  train against itself")
    for precision in args.precision or [precision_on(args.device)]:
        how = {"device": args.device, "precision": precision}
        seconds = []
        for batch in args.batch:
            features_of(fake[: 2 * batch], network, batch=batch, **how)  # warm-up: chooses kernels
            start = time.perf_counter()
            features_of(fake, network, batch=batch, **how)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        known = reference(train, network, count=args.train, batch=args.batch[0], **how)
        scores = compare_images(fake, train, network=network, solver="real test images", count=args.train, batch=args.batch[0], **how)
        whole = time.perf_counter() - start
        itself = frechet(known.moments, known.moments)
        results.append(
            {**asdict(scores), "kernel": scores.kernel._asdict(), "precision_of_features": precision, "train_itself": itself,
             "seconds_of_features": dict(zip(args.batch, seconds, strict=True)), "seconds": whole}
        )  # fmt: skip
        apart = scores.frechet - results[0]["frechet"]
        times = "  ".join(f"{second:>11.2f} s{'':>{len(str(batch))}}" for second, batch in zip(seconds, args.batch, strict=True))
        print(f"{precision:<9}  {scores.frechet:.5f}  {apart:+.5f}  {times}  {itself:.1e}", flush=True)
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps({"setup": setup, "known": KNOWN, "scores": results}, indent=1) + "\n")
    whole_sets = (args.train, args.test) == (50_000, 10_000)
    told = "" if whole_sets else f"; these are {args.train:,} and {args.test:,}"
    print(f"Features of {args.test:,} images. FID is known to be {KNOWN} for all images (resize pytorch){told}.")


if __name__ == "__main__":
    main()
