"""Pictures from a trained model: solvers go from noise down a grid of noise levels, with the model's x0 at each.

With x = a·x0 + s·eps at one level, a' and s' at the next (a' = 1, s' = 0 at the last), and eps = (x - a·x0)/s:

    ddpm     a draw from q(x' | x, x0), with the variance "fixed-large" or "fixed-small"
    ddim     x' = a'·x0 + s'·eps; on EDM and on flow this is Euler's method, so it is also called "euler"
    heun     x' = x + (a'-a)·x0 + (s'-s)·eps with x0 and eps averaged over both ends, so 2·steps - 1 evaluations; EDM's where a = 1
    dpm++    DPM-Solver++ 2M: DDIM with an x0 that is extrapolated from the last two in the log-SNR, one evaluation per step

Solvers need only a, s and x0, so each runs on every schedule and every objective, EDM's preconditioning included. Tests compare them with diffusers'
DDPM, DDIM and DPM-Solver++ schedulers. Unlike those they also run at zero terminal SNR, on flow and EDM, with any number of steps up to T, and
ancestral sampling in few steps leaves no noise in the final picture.

"heun:shift=3" is "heun" on a shifted grid, for a flow that was trained with such a shift (`Shifted`). "ddim:sigma_max=80" starts at the noisiest step
whose σ = s/a is at most 80: the cosine schedule's last step has 20,000, where a young model's x0 is mostly error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from noiseclock.core.batch import Predict, call
from noiseclock.core.objectives import Eps, Objective
from noiseclock.core.schedules import EDM, VARIANCES, Discrete, Flow, Schedule
from noiseclock.core.streams import GOLDEN, finalize, signed, uniform
from noiseclock.lab.errors import Failure, Mistake, choose
from noiseclock.lab.order import normal
from noiseclock.lab.wording import split

Denoise = Callable[[Tensor, Tensor], Tensor]  # x (B, ...) and one time, a float64 tensor on the CPU -> x0 (B, ...)
Noise = Callable[[int], Tensor]  # the number of a draw -> independent normals (B, ...)

RHO = 7  # of Karras' grid
SIGMA_MAX = 80.0  # as in EDM: above it the data are invisible, and a cosine schedule's table goes on to 20,000


def generate(
    predict: Predict,
    schedule: Schedule,
    objective: Objective,
    shape: tuple[int, ...],
    n: int,
    *,
    solver: str = "ddim",
    steps: int = 50,
    seed: int = 0,
    batch: int = 256,
    labels: Tensor | None = None,
    guidance: float = 1.0,
    null: int | Tensor | None = None,
    device: str | torch.device = "cpu",
    variance: str = "fixed-large",
    decode: Callable[[Tensor], Tensor] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """n pictures, uint8 (n, *shape) on the CPU.

    predict: the model in evaluation mode, as predict(x_t, t), or with labels as predict(x_t, t, labels). labels: (n,), or captions
    (n, L, D). guidance: the scale g of classifier-free guidance, null + g·(cond - null), where the null prediction is that for the label or caption
    `null`; 1 is no guidance. variance: for "ddpm" alone. decode: for a model of latents, from clean latents (B, *shape) to uint8 pictures (B, ...),
    which are then returned. progress: called after every step with the number of steps done, summed over pictures; n·steps at the end.

    Picture i depends on (seed, i) alone, not on the batch or the device, up to rounding. Every predicted x0 of a pixel model is clipped to [-1, 1];
    latents have no bounds and are not clipped.
    """
    _check(schedule, objective, n, batch, labels, guidance, null)
    images = torch.empty(0)
    for first in range(0, n, batch):
        members = range(first, min(first + batch, n))
        wanted = None if labels is None else labels[first : members.stop].to(device)
        denoise = _denoiser(predict, schedule, objective, wanted, guidance, null, bounded=decode is None)
        noise = noise_of(seed, members, shape, device)
        for done, x in enumerate(solve(denoise, schedule, noise, solver=solver, steps=steps, variance=variance), 1):  # noqa: B007
            if progress is not None:
                progress(first * steps + len(members) * done)
        if not bool(x.isfinite().all()):
            raise Failure("the model's predictions are not finite, so there are no pictures to show; take an earlier checkpoint")
        made = ((x + 1) * 127.5).round().clamp(0, 255).byte() if decode is None else decode(x)
        images = images if first else torch.empty((n, *made.shape[1:]), dtype=torch.uint8)
        images[first : members.stop] = made.cpu()
    return images


def solve(
    denoise: Denoise, schedule: Schedule, noise: Noise, *, solver: str = "ddim", steps: int = 50, variance: str = "fixed-large"
) -> Iterator[Tensor]:
    """x (B, ...) after each step, the last one clean. It starts from noise(0); ancestral steps take noise(1), noise(2) and so on."""
    name = read_solver(solver, schedule).name
    choose("variance", variance, VARIANCES)
    times = grid(schedule, solver, steps)
    a, s = schedule(times)
    path = Path(schedule, variance, times, torch.cat([a, torch.ones_like(a[:1])]), torch.cat([s, torch.zeros_like(s[:1])]))
    # the variance of x for data of variance 1: N(0, 1) for DDPM, nearly N(0, σ²) for EDM
    start = noise(0) * (a[0] ** 2 + s[0] ** 2).sqrt()
    return SOLVERS[name](path, start, denoise, noise)


def grid(schedule: Schedule, solver: str, steps: int) -> Tensor:
    """(steps,) decreasing times, float64, at which `solver` evaluates the model; the first is the noisiest one.

    EDM: Karras' grid, even in σ^(1/7). Flow: even in u, or even and then moved to k·u/(1+(k-1)·u) for a solver with shift=k. Discrete steps, those up
    to the solver's sigma_max: evenly spaced, from the last one down, for "ddpm" and "ddim" ("trailing" in diffusers); for second-order solvers, which
    lose accuracy by long steps at low noise, the last one and then those nearest to Karras' grid.
    """
    name, shift, _ = read_solver(solver, schedule)
    most = most_steps(solver, schedule)
    if steps < 1 or (most is not None and steps > most):
        raise Mistake(f"steps must be at least 1{'' if most is None else f' and at most {most}, the steps that there are'}, got {steps}")
    if isinstance(schedule, EDM):
        return _karras(schedule, schedule.sigma_max, schedule.sigma_min, steps)
    count = torch.arange(steps, dtype=torch.float64)
    if not isinstance(schedule, Discrete) or most is None:
        u = 1 - count / steps
        return shift * u / (1 + (shift - 1) * u)
    if name not in ("heun", "dpm++"):
        return schedule.time_of((most * (1 - count / steps)).round().long() - 1)
    ends = (-schedule.log_snr(schedule.time_of(torch.tensor([most - 1, 0]))) / 2).exp().tolist()
    step = schedule.step(_karras(schedule, min(SIGMA_MAX, ends[0]), ends[1], steps)).flip(0)
    # where the schedule is coarser than the grid, several points share a step: each moves up to the next free step, those past the top move down
    place = torch.arange(steps)
    step = ((step - place).cummax(0).values + place).minimum(most - steps + place)
    step[-1] = most - 1
    return schedule.time_of(step.flip(0))


class Solver(NamedTuple):
    """A solver's name, the shift of its grid, and the σ from which it starts at most."""

    name: str
    shift: float = 1.0
    sigma_max: float = math.inf


def read_solver(text: str, schedule: Schedule) -> Solver:
    """A solver with its options on this schedule.

    >>> read_solver("heun:shift=3", Flow())
    Solver(name='heun', shift=3.0, sigma_max=inf)
    """
    name, options = split(text)
    choose("solver", name, SOLVERS)
    for option, value in options.items():
        choose(f"option of the solver {name}", option, Solver._fields[1:])
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise Mistake(f"solver {text!r}: {option} must be a positive number, got {value}")
    if "shift" in options and not isinstance(schedule, Flow):
        raise Mistake(f"solver {text!r}: only the schedule flow has a grid to shift; give {name!r} without a shift")
    if "sigma_max" in options and not isinstance(schedule, Discrete):
        raise Mistake(f"solver {text!r}: only schedules of discrete steps can be cut at sigma_max; give {name!r} without it")
    return Solver(name, **{option: float(value) for option, value in options.items()})


def most_steps(solver: str, schedule: Schedule) -> int | None:
    """The discrete steps that a solver may choose from, up to its sigma_max; None in continuous time."""
    sigma_max = read_solver(solver, schedule).sigma_max
    if not isinstance(schedule, Discrete):
        return None
    sigma = (-schedule.log_snr(schedule.grid()) / 2).exp()
    if sigma_max < sigma[0]:
        raise Mistake(f"solver {solver!r}: the least noisy step of the schedule has σ = {float(sigma[0]):.2g}, so sigma_max must be larger")
    return int((sigma <= sigma_max).sum())


def _karras(schedule: Schedule, most: float, least: float, steps: int) -> Tensor:
    """Times at which σ = s/a is evenly spaced in its 7th root, from `most` to `least` (2206.00364, equation 5)."""
    sigma = torch.linspace(most ** (1 / RHO), least ** (1 / RHO), steps, dtype=torch.float64) ** RHO
    return schedule.inverse(-2 * sigma.log())


class Path(NamedTuple):
    """The noise levels of a solver: times (n,), a and s (n+1,) including the clean end, float64 on the CPU. variance: of ancestral steps."""

    schedule: Schedule
    variance: str
    times: Tensor
    a: Tensor
    s: Tensor

    def eps(self, i: int, x: Tensor, x0: Tensor) -> Tensor:
        """The noise in x at level i if x0 is its data."""
        return (x - self.a[i] * x0) / self.s[i]

    def move(self, i: int, x: Tensor, x0: Tensor) -> Tensor:
        """x from level i to the next one, with the same x0 and eps."""
        return self.a[i + 1] * x0 + self.s[i + 1] * self.eps(i, x, x0)


def _ddim(path: Path, x: Tensor, denoise: Denoise, _: Noise) -> Iterator[Tensor]:
    for i, time in enumerate(path.times):
        x = path.move(i, x, denoise(x, time))
        yield x


def _heun(path: Path, x: Tensor, denoise: Denoise, _: Noise) -> Iterator[Tensor]:
    a, s = path.a, path.s
    for i, time in enumerate(path.times):
        x0 = denoise(x, time)
        end = path.move(i, x, x0)
        if s[i + 1] > 0:
            x0_end = denoise(end, path.times[i + 1])
            eps, eps_end = path.eps(i, x, x0), path.eps(i + 1, end, x0_end)
            end = x + (a[i + 1] - a[i]) * (x0 + x0_end) / 2 + (s[i + 1] - s[i]) * (eps + eps_end) / 2
        x = end
        yield x


def _dpm(path: Path, x: Tensor, denoise: Denoise, _: Noise) -> Iterator[Tensor]:
    log_ratio = path.a.log() - path.s.log()  # half of the log-SNR
    before: Tensor | None = None
    for i, time in enumerate(path.times):
        x0 = ahead = denoise(x, time)
        if before is not None and path.s[i + 1] > 0:
            # extrapolate to the middle of the step; after a start at SNR 0 the last step was infinitely long, and the correction is 0
            ahead = x0 + (log_ratio[i + 1] - log_ratio[i]) / (log_ratio[i] - log_ratio[i - 1]) / 2 * (x0 - before)
        x, before = path.move(i, x, ahead), x0
        yield x


def _ddpm(path: Path, x: Tensor, denoise: Denoise, noise: Noise) -> Iterator[Tensor]:
    for i, time in enumerate(path.times[:-1]):
        posterior = path.schedule.posterior(time, path.times[i + 1])
        spread = (posterior.large if path.variance == "fixed-large" else posterior.variance).sqrt()
        x = posterior.x0 * denoise(x, time) + posterior.x_t * x + spread * noise(i + 1)
        yield x
    yield denoise(x, path.times[-1])  # the last step ends without noise


SOLVERS: dict[str, Callable[[Path, Tensor, Denoise, Noise], Iterator[Tensor]]] = {
    "ddpm": _ddpm,
    "ddim": _ddim,
    "euler": _ddim,
    "heun": _heun,
    "dpm++": _dpm,
}


def noise_of(seed: int, members: range, shape: tuple[int, ...], device: str | torch.device) -> Noise:
    """Normals (B, *shape), float32 on `device`, that depend on (seed, picture, draw) alone: the same on every device and in every batch."""
    own = [signed(finalize(finalize(seed) + (picture + 1) * GOLDEN)) for picture in members]
    place = torch.arange(1, math.prod(shape) + 1, device=device) * signed(GOLDEN)
    start = torch.tensor(own, device=device)[:, None] + place

    def draw(number: int) -> Tensor:
        return normal(uniform(start, torch.tensor(number))).reshape(len(own), *shape)

    return draw


def _denoiser(
    predict: Predict, schedule: Schedule, objective: Objective, labels: Tensor | None, guidance: float, null: int | Tensor | None, *, bounded: bool
) -> Denoise:
    """From a model's prediction to x0, with classifier-free guidance in one batch of twice the size."""
    copies = 1
    if guidance != 1 and labels is not None and null is not None:
        without_any = torch.as_tensor(null, dtype=labels.dtype, device=labels.device).expand_as(labels)
        copies, labels = 2, torch.cat([labels, without_any])

    @torch.no_grad()
    def denoise(x: Tensor, time: Tensor) -> Tensor:
        a, s = schedule(time)
        seen = objective.model_input(x, a, s)
        t = schedule.condition(time).to(x.device).repeat(copies * len(x))
        prediction = call(predict, torch.cat([seen] * copies), t, labels).to(x.dtype)
        if copies == 2:
            with_label, without = prediction.chunk(2)
            prediction = without + guidance * (with_label - without)
        x0 = objective.to_x0(prediction, seen, a, s)
        return x0.clamp(-1, 1) if bounded else x0

    return denoise


def _check(schedule: Schedule, objective: Objective, n: int, batch: int, labels: Tensor | None, guidance: float, null: int | Tensor | None) -> None:
    if n < 1 or batch < 1:
        raise Mistake(f"the number of pictures and the batch must be at least 1, got {n=} and {batch=}")
    if labels is not None and (labels.ndim not in (1, 3) or len(labels) != n):
        raise Mistake(f"labels must be one for each of the {n} pictures, got shape {tuple(labels.shape)}")
    if not math.isfinite(guidance):
        raise Mistake(f"guidance must be finite, got {guidance}")
    if guidance != 1 and (labels is None or null is None):
        raise Mistake(f"guidance={guidance:g} needs a model with classes or captions, labels for the pictures, and a null label that stands for none")
    if isinstance(objective, Eps) and float(schedule(1.0)[0]) == 0:
        raise Mistake("this schedule ends in pure noise, where predicting the noise says nothing about the picture; train with objective v or x0")
