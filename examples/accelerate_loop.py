"""A plain loop in several processes: accelerate splits the data, the clock splits the times, and its sampler learns the same in every process.

    accelerate launch --multi_gpu --num_processes 2 examples/accelerate_loop.py     # run again with more --updates to continue

On CPUs use the same command: without --multi_gpu accelerate starts a single process.

Times are stratified over all processes: [0, 1] has as many equal parts as an update has samples, and each process draws from its own parts.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from sklearn.datasets import load_digits
from torch import Tensor, nn

import noiseclock as nc


class Net(nn.Module):
    """A network for digits (B, 64), conditioned on the time."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.time, self.first = nn.Embedding(1000, width), nn.Linear(64, width)
        self.rest = nn.Sequential(nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        return self.rest(self.first(x_t) + self.time(t))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=1000)
parser.add_argument("--sampler", default="loss-second-moment")
parser.add_argument("--checkpoint", type=Path, default=Path("runs/accelerate_loop"))
args = parser.parse_args()
accelerator = Accelerator(cpu=not torch.cuda.is_available())
set_seed(0, device_specific=True)
net, images = Net(), torch.tensor(load_digits().data / 8 - 1, dtype=torch.float32, device=accelerator.device)
net, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-3))
clock = nc.Clock("cosine", args.sampler).attach(optimizer)
accelerator.register_for_checkpointing(clock)
if args.checkpoint.exists():
    accelerator.load_state(str(args.checkpoint))
for _ in range(clock.updates, args.updates):
    x0 = images[torch.randint(len(images), (32,), device=images.device)]
    # noise from torch's generator: accelerate saves its state for every process, but the clock's state for the first one only
    b = clock.draw(x0, predict=net, noise=torch.randn_like(x0))
    accelerator.backward(clock.loss(b, net(b.x_t, b.t)).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.save_state(str(args.checkpoint))
density = [tuple(p.round(decimals=12).tolist()) for p in gather_object([torch.tensor(clock.plot_data(100).p)])]
accelerator.print(f"{accelerator.num_processes} processes, {clock.updates} updates, densities alike: {len(set(density)) == 1}")
accelerator.print(f"the density lies between {min(density[0]):.4f} and {max(density[0]):.4f} of the uniform one")
accelerator.end_training()
