"""Fine-tuning: a model of the digits 0 to 4 learns 5 to 9. Which sampler learns the new ones fastest, and what does each forget of the old?

    python examples/fine_tuning.py                 # a few minutes on one core; for a quick look: --updates 20 --seeds 1

The script prints the held-out loss of the plain objective, uniform in time, on new and old digits, before and after.
"""

import argparse
from copy import deepcopy

import torch
from sklearn.datasets import load_digits

import noiseclock as nc
from noiseclock.lab.models import build

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=150, help="of fine-tuning, after four times as many of pretraining")
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()

digits = load_digits()
images, old = torch.tensor(digits.images / 8 - 1, dtype=torch.float32)[:, None], torch.tensor(digits.target < 5)
held_out = torch.arange(len(images)) % 7 == 0


def train(net: torch.nn.Module, sampler: nc.Sampler, of: torch.Tensor, updates: int, lr: float, seed: int) -> None:
    """Any loop with a clock in it."""
    optimizer, order = torch.optim.Adam(net.parameters(), lr), torch.Generator().manual_seed(seed)
    clock = nc.Clock("linear", sampler, seed=seed).attach(optimizer)
    for _ in range(updates):
        b = clock.draw(of[torch.randint(len(of), (32,), generator=order)], predict=net)
        clock.loss(b, net(b.x_t, b.t)).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def losses(net: torch.nn.Module) -> torch.Tensor:
    """(2,) the held-out loss on new digits and on old ones."""
    clock = nc.Clock("linear", "uniform")
    return torch.tensor([nc.measure.loss_over_time(clock, net, images[held_out & which]).loss.mean() for which in (~old, old)])


samplers: dict[str, nc.Sampler] = {"uniform": nc.Uniform(), "loss-second-moment": nc.LossSecondMoment()}
samplers |= {"variance-optimal": nc.VarianceOptimal(), "adaptive": nc.Adaptive.scaled(every=10, stride=10)}  # there are few updates
found: dict[str, list[torch.Tensor]] = {name: [] for name in ("before", *samplers)}
for seed in range(args.seeds):
    torch.manual_seed(seed)
    first = build("unet", (1, 8, 8), channels=16, multipliers=(1, 2), blocks=1, attention=(4,))
    train(first, nc.Uniform(), images[old & ~held_out], 4 * args.updates, 2e-3, seed)
    found["before"].append(losses(first))
    for name, sampler in samplers.items():
        net = deepcopy(first)
        train(net, sampler, images[~old & ~held_out], args.updates, 1e-3, seed + 100)
        found[name].append(losses(net))
for name, each in found.items():
    (new, known), spread = torch.stack(each).mean(0), torch.stack(each).std(0, correction=min(args.seeds - 1, 1))
    print(f"{name:<20} new {new:.4f} ± {spread[0]:.4f}   old {known:.4f} ± {spread[1]:.4f}")
