"""A loop as the flow_matching package's examples write it: the conditional optimal-transport path, a velocity field, an ODE solved at the end.

    python examples/flow_matching_style.py                 # ten seconds on one core

In that package x_0 is noise, x_1 is data and t runs from noise to data; a clock's time runs from data to noise, and its velocity is noise - data. So

    theirs                                                  here
    t = torch.rand(len(x_1))                                b = clock.draw(x_1), t = 1 - b.t
    path.sample(x_0=x_0, x_1=x_1, t=t).x_t                  b.x_t
    path.sample(x_0=x_0, x_1=x_1, t=t).dx_t                 -b.target
    vf(x_t, t) should be dx_t                               -vf(b.x_t, 1 - b.t) should be b.target
"""

import argparse

import torch
from torch import Tensor, nn

import noiseclock as nc


class Velocity(nn.Module):
    """(B, 2) points and (B,) times in the package's direction to (B, 2) velocities."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        inner = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.SiLU())]
        self.layers = nn.Sequential(nn.Linear(3, width), nn.SiLU(), *inner, nn.Linear(width, 2))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layers(torch.cat([x, t[:, None]], 1))


def blobs(n: int) -> Tensor:
    """(n, 2) points in eight heaps on a circle."""
    angle = torch.randint(0, 8, (n,)) * torch.pi / 4
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.2 * torch.randn(n, 2)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=2000)
args = parser.parse_args()

torch.manual_seed(0)
vf = Velocity()
optimizer = torch.optim.Adam(vf.parameters(), 3e-3)
clock = nc.Clock("flow", nc.LossSecondMoment(), objective="flow").attach(optimizer)
for _ in range(args.updates):
    b = clock.draw(blobs(256))
    clock.loss(b, -vf(b.x_t, 1 - b.t)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
x = torch.randn(2000, 2)
with torch.no_grad():
    for i in range(50):  # from noise at t = 0 to data at t = 1
        x += vf(x, torch.full((len(x),), i / 50)) / 50
angle = torch.atan2(x[:, 1], x[:, 0]) * 4 / torch.pi
away = (x - 2 * torch.stack([(angle.round() * torch.pi / 4).cos(), (angle.round() * torch.pi / 4).sin()], 1)).norm(dim=1)
print(f"of 2000 points {float((away < 0.6).float().mean()):.0%} lie within three standard deviations of a heap, where 99 % of the data lie")
