"""What a training measures of itself as it goes: the loss by noise level on held-out images, and the density that its sampler draws from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from noiseclock.core.clock import Clock
from noiseclock.core.measure import loss_over_time
from noiseclock.lab.data import Data, head
from noiseclock.lab.recipes import Recipe

IMAGES, TIMES = 128, 50  # held-out images, and times at which their loss is measured


def validation(recipe: Recipe, clock: Clock, net: Any, held_out: Data, device: torch.device) -> dict[str, Any]:
    """A record for the log: the loss by noise level with fixed noise, its mean under the density `base`, and the sampler's current density."""
    x0, labels = head(held_out, IMAGES, device)
    with recipe.autocast(device):
        found = loss_over_time(clock, net, x0, cond=labels if recipe.conditional else None, times=TIMES, seed=recipe.seed)
    curves = clock.plot_data()
    # means over intervals of time: picked points would give the peak of a single step to its neighbours too
    density = {
        name: [float(part.mean()) for part in np.array_split(values, min(TIMES, len(values)))]
        for name, values in (("density_time", curves.time), ("density", curves.p))
    }
    meant = recipe.meant(found.time)
    weighted, loss = (float(np.average(by_time, weights=meant)) for by_time in (found.weighted, found.loss))
    return {"weighted": weighted, "loss": loss, "time": found.time.tolist(), "loss_by_time": found.loss.tolist(), **density}
