"""Plain PyTorch: a loop with a clock in it that can be stopped and resumed, bit for bit.

    python examples/plain.py                 # ten seconds on one core; run again with --updates 4000 to continue from the checkpoint

The script prints the loss by noise level, for each quarter of time: in the last batches, and on held-out digits.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import noiseclock as nc


class Net(nn.Module):
    """Takes digits as 64 numbers, and a sinusoidal embedding of the time."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] / 1000 * torch.pi * 2 ** torch.arange(8)
        return self.layers(torch.cat([x, angles.sin(), angles.cos()], 1))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=2000)
parser.add_argument("--checkpoint", type=Path, default=Path("plain.pt"))
args = parser.parse_args()

digits = torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32)
train, held_out = digits[200:], digits[:200]
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
clock = nc.Clock("cosine", nc.LossSecondMoment(), nc.MinSNR(5), "v").attach(optimizer)
parts, start = {"model": model, "optimizer": optimizer, "clock": clock}, 0
if args.checkpoint.exists():
    state = torch.load(args.checkpoint)
    start = state.pop("step")
    for name, part in parts.items():
        part.load_state_dict(state[name])
for step in range(start, args.updates):
    x0 = train[torch.randint(len(train), (64,), generator=torch.Generator().manual_seed(step))]
    b = clock.draw(x0)
    clock.loss(b, model(b.x_t, b.t)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save({"step": args.updates, **{name: part.state_dict() for name, part in parts.items()}}, args.checkpoint)
quarters = torch.from_numpy(clock.record.by_time().loss).tensor_split(4)
print("while training  ", *(f"{float(q.nanmean()):.4f}" for q in quarters))
print("on held-out data", *(f"{q.mean():.4f}" for q in torch.from_numpy(nc.measure.loss_over_time(clock, model, held_out).loss).tensor_split(4)))
