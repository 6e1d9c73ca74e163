"""A loop as k-diffusion's train.py writes it: a density of σ, Karras preconditioning around an inner model that takes σ, an EMA copy.

    python examples/k_diffusion_style.py                 # ten seconds on one core

k-diffusion                                    here
rand_log_normal(loc, scale)                    nc.LogNormal(loc, scale)
rand_log_uniform(min_value, max_value)         nc.Uniform() on nc.schedule("edm", sigma_min=min_value, sigma_max=max_value)
Denoiser(model, sigma_data, "karras")          objective nc.objective("edm", sigma_data=sigma_data)
Denoiser(..., "soft-min-snr"), (..., "snr")    the same with nc.SoftMinSNR(1 / sigma_data**2), nc.Constant(on="eps")
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import noiseclock as nc


class Inner(nn.Module):
    """F of Karras et al.: takes c_in·x and σ, and embeds ln σ/4."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor, sigma: Tensor) -> Tensor:
        angles = sigma.log()[:, None] / 4 * torch.pi * 2 ** (torch.arange(8) / 2)
        return self.layers(torch.cat([x.flatten(1), angles.sin(), angles.cos()], 1)).view_as(x)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--updates", type=int, default=2000)
args = parser.parse_args()

digits = torch.tensor(load_digits().images / 8 - 1, dtype=torch.float32)[:, None]
torch.manual_seed(0)
inner, sigma_data, images = Inner(), 0.5, torch.Generator().manual_seed(0)
inner_ema = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(inner.parameters(), 1e-3, weight_decay=1e-3)
edm = nc.schedule("edm", sigma_min=0.01, sigma_max=80.0)
clock = nc.Clock(edm, nc.LogNormal(-1.2, 1.2), nc.SoftMinSNR(1 / sigma_data**2), nc.objective("edm", sigma_data=sigma_data)).attach(optimizer)
for _ in range(args.updates):
    reals = digits[200:][torch.randint(len(digits) - 200, (64,), generator=images)]
    b = clock.draw(reals)  # sigma = sample_density([len(reals)]), noise, c_in·(reals + σ·noise) and the target
    losses = clock.loss(b, inner(b.x_t, (4 * b.t).exp()))  # losses = model.loss(reals, noise, sigma)
    losses.mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    inner_ema.update_parameters(inner)
found = nc.measure.loss_over_time(clock, lambda x, t: inner_ema(x, (4 * t).exp()), digits[:200], times=6)
for time, loss in zip(torch.from_numpy(found.time), found.loss, strict=True):
    print(f"σ = {float(edm.log_snr(time).exp().rsqrt()):<8.3g} held-out loss of the averaged network {loss:.4f}")
