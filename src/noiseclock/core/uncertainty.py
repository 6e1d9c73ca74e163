"""EDM2's learned weighting: the loss at each noise level, divided by its expected value there (Karras et al., 2312.02696).

    loss = w·err/e^u + u,   u = linear(Fourier(ln σ/4)),   ln σ = -½·ln SNR

At the minimum over u, e^u is the mean of w·err at that noise level, so that every level contributes equally to the loss, whatever w is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from noiseclock.core.batch import Batch
from noiseclock.core.health import warn
from noiseclock.core.objectives import Objective
from noiseclock.core.schedules import Schedule
from noiseclock.core.table import lasting, widen
from noiseclock.core.weightings import Constant, Weighting

FEATURES = 128
# Beyond σ = e^±10 a sample is all data or all noise; ln σ of some schedules is ±∞ at their ends.
LOG_SIGMA = 10.0
PATIENCE = 100  # updates after which parameters that have not moved are nobody's


class LogError(nn.Module):
    """u(ln σ), a linear function of 128 waves √2·cos(2π(f·ln σ/4 + φ)) with fixed f ~ N(0, 1) and φ uniform; initially 0.

    With Adam one update moves u by up to 128·√2 times the learning rate: the model's learning rate suits it.
    """

    frequency: Tensor
    phase: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the same waves on every rank, and no draw from the user's generator
        self.register_buffer("frequency", torch.randn(FEATURES, generator=generator, device="cpu", dtype=torch.float32))
        self.register_buffer("phase", torch.rand(FEATURES, generator=generator, device="cpu", dtype=torch.float32))
        self.weight = nn.Parameter(torch.zeros(FEATURES, device="cpu", dtype=torch.float32))
        self.bias = nn.Parameter(torch.zeros((), device="cpu", dtype=torch.float32))

    def forward(self, log_sigma: Tensor) -> Tensor:
        """u (B,) at ln σ (B,), float32."""
        waves = math.sqrt(2) * torch.cos(2 * math.pi * (log_sigma[..., None] / 4 * self.frequency + self.phase))
        return (waves * self.weight).sum(-1) + self.bias  # not a matmul: autocast would lower its precision


@dataclass(frozen=True)
class Uncertainty(Weighting):
    """w·err/e^u + u, with u learned together with the model and w another weighting. Importance correction multiplies the sum.

    Give its parameters to the optimiser, after moving it to the model's device:

        weighting = nc.Uncertainty(nc.EDMWeight()).to("cuda")
        optimizer = Adam([*model.parameters(), *weighting.parameters()])

    Initially u = 0, so the loss is w·err. Samplers and plots use the multiplier w/e^u. With several ranks, make it a submodule of the model before
    the model is wrapped, so that its gradients are averaged too: `model.uncertainty = weighting.net`. The clock's state includes its state.
    """

    weighting: Weighting = Constant()

    def __post_init__(self) -> None:
        if not isinstance(self.weighting, Weighting):
            raise TypeError(f"Uncertainty learns on top of a Weighting, got {self.weighting!r}")
        if self.normalize or self.weighting.normalize:
            raise ValueError("Uncertainty learns the scale of the weights itself: leave out normalize=True")
        with lasting():
            object.__setattr__(self, "_net", LogError())

    @property
    def net(self) -> LogError:
        """The learned module."""
        net: LogError = self.__dict__["_net"]
        return net

    def parameters(self) -> Iterator[nn.Parameter]:
        """The learned parameters, for the optimiser."""
        return self.net.parameters()

    def to(self, device: torch.device | str) -> Self:
        """Move the learned parameters; call this before the optimiser is made."""
        self.net.to(device)
        return self

    def log_error(self, schedule: Schedule, time: Tensor) -> Tensor:
        """u (B,) at each time (B,), with gradients, on the device of `time`."""
        device = self.net.bias.device
        if time.device not in (device, torch.device("cpu")):
            raise ValueError(f"Uncertainty is on {device} and the data on {time.device}; move it with .to(device) before you make the optimiser")
        level = schedule.level(widen(time))
        log_sigma = ((level.s2.log() - level.a2.log()) / 2).clamp(-LOG_SIGMA, LOG_SIGMA)
        u: Tensor = self.net(log_sigma.to(device, self.net.bias.dtype))
        return u.to(time.device)

    def __call__(self, schedule: Schedule, time: Tensor, objective: Objective) -> Tensor:
        """w/e^u, without gradients."""
        with torch.no_grad():
            u = widen(self.log_error(schedule, time))
        return self.weighting(schedule, time, objective) * (-u).exp()

    def apply(self, error: Tensor, batch: Batch, schedule: Schedule, objective: Objective) -> Tensor:
        # not batch.weight, which has the u of the draw: a closure may take several steps with one batch
        u, w = self.log_error(schedule, batch.time), self.weighting(schedule, batch.time, objective)
        return (error * w.to(error.dtype) * (-u).exp() + u) * batch.correction.to(error.dtype)

    def updated(self, updates: int) -> None:
        if updates == PATIENCE and not any(bool(p.detach().any()) for p in self.parameters()):  # waits for the device, once
            warn(f"Uncertainty: u is still 0 after {PATIENCE} updates, so it does not learn; give its .parameters() to the optimiser")

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.net.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mine = self.net.state_dict()
        if set(state) != set(mine):
            raise ValueError(f"Uncertainty: its state must hold {', '.join(sorted(mine))}, got {', '.join(sorted(map(str, state))) or 'nothing'}")
        for name, value in mine.items():
            theirs = state[name]
            if not isinstance(theirs, Tensor) or theirs.shape != value.shape or not bool(theirs.isfinite().all()):
                raise ValueError(f"Uncertainty: {name!r} of the state must be finite, of shape {tuple(value.shape)}")
        self.net.load_state_dict(dict(state))
