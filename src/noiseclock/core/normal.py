"""The normal distribution, at full precision in both tails."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def normal_mass(z_lo: Tensor, z_hi: Tensor) -> Tensor:
    """Φ(z_hi) - Φ(z_lo) without cancellation: the upper tail is mirrored to the lower one."""
    flip = z_lo > 0
    lo, hi = torch.where(flip, -z_hi, z_lo), torch.where(flip, -z_lo, z_hi)
    # not torch.special.ndtr: it is 0 below -8.3
    return (torch.erfc(-hi / math.sqrt(2)) - torch.erfc(-lo / math.sqrt(2))) / 2


def normal_log_prob(z: Tensor, std: float) -> Tensor:
    """The log density of a normal distribution with standard deviation `std`, at z standard deviations from its mean."""
    return -0.5 * z**2 - math.log(std * math.sqrt(2 * math.pi))
