"""Sounds: a Clock is not limited to images. A second of plucked strings, (B, 1, 256), and a small 1-D network; does the choice of times pay?

    python examples/audio.py                 # a few minutes on one core; for a quick look: --updates 20 --seeds 1

All samplers train from the same weights on the same sounds. The script prints the held-out loss of the plain objective, uniform in time.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import noiseclock as nc


def strings(n: int, generator: torch.Generator) -> Tensor:
    """(n, 1, 256) fading harmonics of a random pitch, plucked at a random moment."""
    pitch, start, decay = (torch.rand(n, 1, generator=generator) * width + least for width, least in ((12, 4), (0.5, 0), (8, 2)))
    since = (torch.arange(256) / 256 - start).clamp(min=0)
    return sum(torch.sin(2 * math.pi * pitch * k * since) * torch.exp(-decay * k * since) / k for k in (1, 2, 3))[:, None]


class Net(nn.Module):
    """Dilated convolutions, conditioned on the time at every layer."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 5, padding=2), nn.Conv1d(width, 1, 5, padding=2)
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, 6 * width))
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * 2**i, dilation=2**i) for i in range(6))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] / 1000 * math.pi * 2 ** torch.arange(8)
        h = self.first(x)
        for layer, shift in zip(self.layers, self.time(torch.cat([angles.sin(), angles.cos()], 1)).chunk(6, 1), strict=True):
            h = h + layer(nn.functional.silu(h + shift[:, :, None]))
        return self.last(nn.functional.silu(h))


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=400)
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()
for sampler in (nc.Uniform(), nc.LossSecondMoment(), nc.VarianceOptimal(), nc.Adaptive.scaled()):
    losses = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        net, sounds = Net(), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(net.parameters(), 2e-3)
        clock = nc.Clock("cosine", sampler, seed=seed).attach(optimizer)
        for _ in range(args.updates):
            b = clock.draw(strings(64, sounds), predict=net)
            clock.loss(b, net(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held_out = strings(128, torch.Generator().manual_seed(10**6))
        losses.append(nc.measure.loss_over_time(clock, net, held_out).loss.mean())
    print(f"{type(sampler).__name__:<20} held-out loss {sum(losses) / len(losses):.4f}, {min(losses):.4f} to {max(losses):.4f}", flush=True)
