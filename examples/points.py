"""Point clouds, like small molecules: 12 atoms in space on a ring with a tail, (B, 12, 3), and a permutation-equivariant network.

    python examples/points.py                 # a few minutes on one core; for a quick look: --updates 20 --seeds 1

All samplers train from the same weights on the same clouds. The script prints the held-out loss of the plain objective, uniform in time.
"""

import argparse
import math

import torch
from torch import Tensor, nn

import noiseclock as nc


def molecules(n: int, generator: torch.Generator) -> Tensor:
    """(n, 12, 3): a ring of five to nine atoms, the others a chain from it; turned at random, with a little vibration."""
    size = torch.randint(5, 10, (n, 1), generator=generator)
    place, radius = torch.arange(12), 0.5 / torch.sin(math.pi / size)
    angle, tail = 2 * math.pi * place / size, (place - size + 1).clamp(min=0)
    flat = torch.stack([radius * torch.where(tail > 0, 1, angle.cos()) + tail, torch.where(tail > 0, 0, radius * angle.sin()), 0.4 * (tail % 2)], 2)
    turn, _ = torch.linalg.qr(torch.randn(n, 3, 3, generator=generator))
    return (flat - flat.mean(1, keepdim=True)) @ turn / 2 + 0.02 * torch.randn(n, 12, 3, generator=generator)


class Net(nn.Module):
    """A transformer over atoms without positional encoding, with the time as one more token."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.last, self.time = nn.Linear(3, width), nn.Linear(width, 3), nn.Linear(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] / 1000 * math.pi * 2 ** torch.arange(8)
        told = self.time(torch.cat([angles.sin(), angles.cos()], 1))[:, None]
        return self.last(self.layers(torch.cat([told, self.first(x) + told], 1))[:, 1:])


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=1000)
parser.add_argument("--seeds", type=int, default=3)
args = parser.parse_args()
for sampler in (nc.Uniform(), nc.LossSecondMoment(), nc.VarianceOptimal(), nc.Adaptive.scaled()):
    losses = []
    for seed in range(args.seeds):
        torch.manual_seed(seed)
        net, clouds = Net(), torch.Generator().manual_seed(seed)
        optimizer = torch.optim.Adam(net.parameters(), 1e-3)
        clock = nc.Clock("cosine", sampler, seed=seed).attach(optimizer)
        for _ in range(args.updates):
            b = clock.draw(molecules(64, clouds), predict=net)
            clock.loss(b, net(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(nc.measure.loss_over_time(clock, net, molecules(128, torch.Generator().manual_seed(10**6))).loss.mean())
    print(f"{type(sampler).__name__:<20} held-out loss {sum(losses) / len(losses):.4f}, {min(losses):.4f} to {max(losses):.4f}", flush=True)
