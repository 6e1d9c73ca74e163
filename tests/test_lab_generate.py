"""Solvers against closed forms, diffusers' schedulers and EDM's own algorithm.

For data N(m, c) the best denoiser is x0 = m + a·c/(a²c+s²)·(x - a·m), and the flow that it drives keeps each point at its quantile: x at level (a, s)
ends in m + √c·(x - a·m)/√(a²c+s²). So every deterministic solver is checked point by point, without statistics.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from scipy import stats
from torch import Tensor

import noiseclock as nc
from gaussians import ring
from noiseclock.core.objectives import Objective
from noiseclock.core.schedules import Discrete, Schedule
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.generate import generate, grid, noise_of, solve
from noiseclock.lab.recipes import Recipe

MEAN, VARIANCE = 0.1, 0.04
SCHEDULES = {
    "linear": nc.schedule("linear"),
    "cosine": nc.schedule("cosine"),
    "quadratic": nc.schedule("quadratic"),
    "zero terminal": nc.schedule("linear", zero_terminal_snr=True),
    "edm": nc.schedule("edm"),
    "flow": nc.schedule("flow"),
}
# steps so fine that rounding to them does not show
FINE = nc.schedule("linear", steps=20000, beta_start=5e-6, beta_end=1e-3)
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def best_x0(x: Tensor, a: Tensor | float, s: Tensor | float, mean: Tensor | float = MEAN) -> Tensor:
    return mean + a * VARIANCE / (a**2 * VARIANCE + s**2) * (x - a * mean)


def exact(schedule: Schedule):
    return lambda x, time: best_x0(x, *schedule(time))


def last(walk):
    *_, x = walk
    return x


def destination(schedule: Schedule, solver: str, steps: int, noise: Tensor, mean: Tensor | float = MEAN) -> Tensor:
    """Where the exact flow takes the start that `noise` gives."""
    a, s = schedule(grid(schedule, solver, steps)[0])
    x = noise * (a**2 + s**2).sqrt()
    return mean + math.sqrt(VARIANCE) * (x - a * mean) / (a**2 * VARIANCE + s**2).sqrt()


def error(schedule: Schedule, solver: str, steps: int) -> float:
    points = torch.linspace(-3, 3, 31, dtype=torch.float64)[:, None]
    x = last(solve(exact(schedule), schedule, lambda _: points, solver=solver, steps=steps))
    return float((x - destination(schedule, solver, steps, points)).abs().max())


# --- deterministic solvers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [SCHEDULES["edm"], SCHEDULES["flow"], FINE], ids=["edm", "flow", "fine linear"])
@pytest.mark.parametrize(("solver", "order"), [("ddim", 1), ("euler", 1), ("heun", 2), ("dpm++", 2)])
def test_the_error_falls_with_the_solvers_order(schedule, solver, order):
    # the next term of the error is of the relative size 1/steps times a constant: it moves the orders measured here by up to 0.3
    steps = 256 if solver == "dpm++" and schedule == SCHEDULES["flow"] else 32
    slope = math.log2(error(schedule, solver, steps) / error(schedule, solver, 4 * steps)) / 2
    assert abs(slope - order) < 0.35


@every_schedule
@pytest.mark.parametrize("solver", ["ddim", "heun", "dpm++"])
def test_many_steps_lead_to_the_right_place(name, solver):
    """On a table the walk ends with a jump from its last level to s = 0, which costs s²/(2√c) of the standard deviation, at three of them here."""
    schedule, steps = SCHEDULES[name], 400
    last_s = float(schedule(grid(schedule, solver, steps)[-1])[1])
    jump = 3 * last_s**2 / (2 * math.sqrt(VARIANCE)) if isinstance(schedule, Discrete) else 0
    # the curvature of the path in σ is 1/√c = 5 at most, and half of the longest step, in σ up to 1/100 where it bends, makes 0.025 to first order;
    # to second order the square of it
    assert error(schedule, solver, steps) < jump + (0.025 if solver == "ddim" else 0.025**2)


@every_schedule
@pytest.mark.parametrize("solver", ["ddim", "heun", "dpm++"])
def test_a_mixture_of_gaussians_comes_out_in_equal_parts(name, solver):
    """Nonlinear and two-dimensional: eight clusters, each with its share and its spread."""
    schedule, data, steps = SCHEDULES[name], ring(8), 64
    start = torch.randn(1000, 2, generator=torch.Generator().manual_seed(0))

    def denoise(x: Tensor, time: Tensor) -> Tensor:
        a, s = (c.float().expand(len(x), 1) for c in schedule(time))
        return data.posterior(x, a, s)[0]

    x = last(solve(denoise, schedule, lambda _: start, solver=solver, steps=steps))
    distance, nearest = torch.cdist(x, data.means).min(1)
    # a share of 1/8 has the standard error √(1/8·7/8/1000) = 0.0105; the largest of eight stays within 3.5 of them
    shares = torch.bincount(nearest, minlength=8) / len(x)
    assert (shares - 1 / 8).abs().max() < 3.5 * 0.0105
    # E‖x - centre‖² = 2·std², known to 3/√1000 = 9.5 % from so many points; the last jump, from s, takes s²/(std²+s²) of it, and the longest step
    # where clusters form, in σ about std·10/steps, is 15 % of std to first order and 2 % to second
    last_s = float(schedule(grid(schedule, solver, steps)[-1])[1])
    margin = 0.095 + last_s**2 / (data.std**2 + last_s**2) + (0.15 if solver == "ddim" else 0.02)
    assert distance.square().mean() == pytest.approx(2 * data.std**2, rel=margin)


def test_heun_on_edm_is_algorithm_1_of_the_paper():
    """2206.00364, Algorithm 1 with the grid of equation 5, written out."""
    schedule, n = SCHEDULES["edm"], 18
    i = np.arange(n)
    sigma = np.append((80 ** (1 / 7) + i / (n - 1) * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7, 0)
    x = torch.linspace(-2, 2, 9, dtype=torch.float64) * math.sqrt(1 + 80**2)
    start = x / math.sqrt(1 + 80**2)
    for i in range(n):
        d = (x - best_x0(x, 1.0, sigma[i])) / sigma[i]
        end = x + (sigma[i + 1] - sigma[i]) * d
        if sigma[i + 1] > 0:
            d_end = (end - best_x0(end, 1.0, sigma[i + 1])) / sigma[i + 1]
            end = x + (sigma[i + 1] - sigma[i]) * (d + d_end) / 2
        x = end
    ours = last(solve(exact(schedule), schedule, lambda _: start, solver="heun", steps=n))
    assert (ours - x).abs().max() < 1e-10  # float64 at values of up to 160


def test_euler_on_flow_follows_the_velocity():
    schedule, n = SCHEDULES["flow"], 10
    x = start = torch.linspace(-2, 2, 9, dtype=torch.float64)
    for i in range(n):
        u = torch.tensor(1 - i / n, dtype=torch.float64)
        x0 = best_x0(x, 1 - u, u)
        x = x - (x - x0) / u / n
    assert (last(solve(exact(schedule), schedule, lambda _: start, solver="euler", steps=n)) - x).abs().max() < 1e-12


# --- against diffusers --------------------------------------------------------------------------------------------------------------------

BETAS = nc.schedule("linear", steps=100, beta_start=1e-3, beta_end=0.2)


def in_float64(scheduler):
    scheduler.betas = torch.tensor(BETAS.betas)
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    scheduler.alpha_t, scheduler.sigma_t = scheduler.alphas_cumprod.sqrt(), (1 - scheduler.alphas_cumprod).sqrt()
    return scheduler


def rough_eps(x: Tensor, t: Tensor | int) -> Tensor:
    """Any function that is not linear will do."""
    return torch.tanh(x) * (0.5 + t / 200)


def rough_x0(x: Tensor, time: Tensor) -> Tensor:
    a, s = BETAS(time)
    return nc.objective("eps").to_x0(rough_eps(x, BETAS.step(time)), x, a, s)


def points() -> Tensor:
    return torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(3, 4)


@pytest.mark.parametrize("steps", [100, 20, 7])
@pytest.mark.parametrize("variance", ["fixed-large", "fixed-small"])
def test_ancestral_steps_are_those_of_diffusers(steps, variance):
    generator = torch.Generator().manual_seed(0)
    draws = [points()] + [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(steps)]
    scheduler = in_float64(DDPMScheduler(100, clip_sample=False, variance_type=variance.replace("-", "_"), timestep_spacing="trailing"))
    scheduler.set_timesteps(steps)
    walk = solve(rough_x0, BETAS, lambda i: draws[i], solver="ddpm", steps=steps, variance=variance)
    x = draws[0]
    generator = torch.Generator().manual_seed(0)
    for i, (t, ours) in enumerate(zip(scheduler.timesteps, walk, strict=True)):
        x = scheduler.step(rough_eps(x, t), t, x, generator=generator).prev_sample
        if i == steps - 1 and t > 0 and variance == "fixed-large":
            break  # diffusers adds noise to the finished picture here
        # betas and ᾱ agree to 1e-16, and 100 steps, most of them contracting, add up; step 0 divides by 1-ᾱ = 1e-3
        assert (ours - x).abs().max() < 1e-8


@pytest.mark.parametrize("steps", [100, 20])
def test_ddim_steps_are_those_of_diffusers(steps):
    scheduler = in_float64(DDIMScheduler(100, clip_sample=False, timestep_spacing="trailing"))
    scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    scheduler.set_timesteps(steps)
    x = points()
    for t, ours in zip(scheduler.timesteps, solve(rough_x0, BETAS, lambda _: points(), solver="ddim", steps=steps), strict=True):
        x = scheduler.step(rough_eps(x, t), t, x).prev_sample
        assert (ours - x).abs().max() < 1e-8


@pytest.mark.parametrize("steps", [5, 20])
def test_dpm_steps_are_those_of_diffusers(steps):
    scheduler = in_float64(DPMSolverMultistepScheduler(100, algorithm_type="dpmsolver++", solver_order=2, final_sigmas_type="zero"))
    scheduler.set_timesteps(timesteps=BETAS.step(grid(BETAS, "dpm++", steps)).tolist())
    x = points()
    for t, ours in zip(scheduler.timesteps, solve(rough_x0, BETAS, lambda _: points(), solver="dpm++", steps=steps), strict=True):
        x = scheduler.step(rough_eps(x, t), t, x).prev_sample
        # diffusers keeps its sigmas in float32, rounded at 6e-8, and x0 = (x - s·eps)/a magnifies by 1/a = 150 at the noisy end
        assert (ours - x).abs().max() < 1e-4


@pytest.mark.parametrize(("steps", "shift"), [(28, 3.0), (5, 1.15), (10, 0.5), (1, 3.0), (28, 1.0)])
def test_shifted_steps_of_flow_are_those_of_diffusers(steps, shift):
    schedule, solver = SCHEDULES["flow"], f"euler:shift={shift}"
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / steps, steps))  # even before the shift, as Flux's pipeline asks for them
    # diffusers keeps its sigmas in float32, where numbers below 1 are rounded by up to 3e-8; a shift takes five roundings
    assert (grid(schedule, solver, steps) - scheduler.sigmas[:-1]).abs().max() < 5 * 3e-8
    velocity = lambda x, u: torch.tanh(x) * (0.5 + u)  # noqa: E731
    walk = solve(lambda x, u: x - u * velocity(x, u), schedule, lambda _: points(), solver=solver, steps=steps)
    x = points()
    for t, ours in zip(scheduler.timesteps, walk, strict=True):
        x = scheduler.step(velocity(x, t.double() / 1000), t, x).prev_sample.double()
        # diffusers computes a step in float32, where numbers of up to 4 are rounded by 2e-7; the slope of the velocity, at most 1.5 over a time
        # of 1, magnifies by e^1.5 = 4.5 at most
        assert (ours - x).abs().max() < steps * 3 * 2e-7 * 4.5


def test_a_shift_moves_every_solver_of_flow_and_leads_to_the_same_place():
    schedule = SCHEDULES["flow"]
    assert grid(schedule, "heun:shift=3", 4).tolist() == pytest.approx([1, 0.9, 0.75, 0.5], abs=1e-15)  # of 1, 3/4, 1/2, 1/4
    assert grid(schedule, "heun:shift=1", 7).equal(grid(schedule, "heun", 7))
    for solver in ("ddim", "heun", "dpm++"):
        # steps are three times as long at the clean end, where `test_many_steps_lead_to_the_right_place` allows 0.025
        assert error(schedule, f"{solver}:shift=3", 400) < 3 * 0.025


@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun", "dpm++"])
def test_a_solver_can_start_below_the_noisiest_step(solver):
    schedule = SCHEDULES["cosine"]
    sigma = (-schedule.log_snr(schedule.grid()) / 2).exp()
    below = schedule.step(grid(schedule, f"{solver}:sigma_max=30", 50))
    assert len(below.unique()) == 50  # 50 steps all the same
    assert sigma[below[0]] <= 30 < sigma[below[0] + 1]
    assert schedule.step(grid(schedule, f"{solver}:sigma_max=1e9", 50)).equal(schedule.step(grid(schedule, solver, 50)))
    every = schedule.step(grid(schedule, f"{solver}:sigma_max=30", int(below[0]) + 1))
    assert every.tolist() == list(range(int(below[0]), -1, -1))
    if solver != "ddpm":
        # the data are N(0.1, 0.04), so from σ = 30 the start N(0, a²+s²) lies within (0.1 + 0.96/60)/30 = 0.004 of what belongs there, and the solver
        # errs as it does from the last step, by 0.025 (`test_many_steps_lead_to_the_right_place`)
        assert error(schedule, f"{solver}:sigma_max=30", 400) < 0.025


OPTIONS = {
    ("cosine", "ddim:sigma_max=0"): "solver 'ddim:sigma_max=0': sigma_max must be a positive number, got 0",
    (
        "cosine",
        "ddim:sigma_max=0.001",
    ): "solver 'ddim:sigma_max=0.001': the least noisy step of the schedule has σ = 0.0064, so sigma_max must be larger",
    ("flow", "euler:sigma_max=80"): "solver 'euler:sigma_max=80': only schedules of discrete steps can be cut at sigma_max; give 'euler' without it",
    ("linear", "heun:shift=3"): "solver 'heun:shift=3': only the schedule flow has a grid to shift; give 'heun' without a shift",
    ("edm", "heun:shift=1"): "solver 'heun:shift=1': only the schedule flow has a grid to shift; give 'heun' without a shift",
    ("flow", "euler:shift=0"): "solver 'euler:shift=0': shift must be a positive number, got 0",
    ("flow", "euler:shift=nan"): "solver 'euler:shift=nan': shift must be a positive number, got nan",
    ("flow", "euler:shift=inf"): "solver 'euler:shift=inf': shift must be a positive number, got inf",
    ("flow", "euler:shift=true"): "solver 'euler:shift=true': shift must be a positive number, got True",
    ("flow", "euler:shift=much"): "solver 'euler:shift=much': shift must be a positive number, got much",
    ("flow", "euler:shft=3"): "unknown option of the solver euler 'shft' (did you mean shift?); known: shift, sigma_max",
    ("flow", "euler:3"): "'euler:3': '3' is not option=value",
}


@pytest.mark.parametrize(("case", "message"), OPTIONS.items(), ids=map(str, OPTIONS))
def test_an_option_that_cannot_be_is_refused(case, message):
    name, solver = case
    steps = {"steps": None} if name in ("edm", "flow") else {}
    objective = name if steps else "eps"
    for attempt in (lambda: grid(SCHEDULES[name], solver, 4), lambda: Recipe(schedule=name, objective=objective, solver=solver, **steps)):
        with pytest.raises(Mistake) as caught:
            attempt()
        assert str(caught.value) == message


# --- ancestral sampling -------------------------------------------------------------------------------------------------------------------


def ancestral_moments(schedule: Schedule, steps: int, variance: str) -> tuple[float, float]:
    """Mean and variance of the last x, by their recursion: each step is linear in x."""
    times = grid(schedule, "ddpm", steps)
    a, s = schedule(times[0])
    mean, spread = torch.zeros(()), a**2 + s**2
    for now, then in itertools.pairwise(times):
        posterior = schedule.posterior(now, then)
        a, s = schedule(now)
        gain = posterior.x0 * a * VARIANCE / (a**2 * VARIANCE + s**2) + posterior.x_t
        offset = posterior.x0 * best_x0(torch.zeros(()), a, s)
        mean, spread = offset + gain * mean, gain**2 * spread + (posterior.large if variance == "fixed-large" else posterior.variance)
    a, s = schedule(times[-1])
    gain = a * VARIANCE / (a**2 * VARIANCE + s**2)
    return float(best_x0(mean, a, s)), float(gain**2 * spread)


@every_schedule
def test_ancestral_chains_tend_to_the_data_from_both_sides(name):
    """Of a chain with the exact denoiser: the large variance is too much, the small one too little, both by an amount that falls as 1/steps."""
    schedule = SCHEDULES[name]
    for variance, sign in (("fixed-large", 1), ("fixed-small", -1)):
        (mean, few), (_, many) = (ancestral_moments(schedule, steps, variance) for steps in (100, 400))
        assert mean == pytest.approx(MEAN, abs=1e-3)
        assert 0 < sign * (many / VARIANCE - 1) < 0.1  # a share of the longest step's β/c
        assert math.log((few - VARIANCE) / (many - VARIANCE), 4) == pytest.approx(1, abs=0.25)


@every_schedule
@pytest.mark.parametrize("variance", ["fixed-large", "fixed-small"])
def test_ancestral_samples_follow_the_chain(name, variance):
    schedule, steps, n = SCHEDULES[name], 50, 5000
    mean, spread = ancestral_moments(schedule, steps, variance)
    generator = torch.Generator().manual_seed(0)
    noise = lambda _: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    x = last(solve(exact(schedule), schedule, noise, solver="ddpm", steps=steps, variance=variance))
    # four standard errors
    assert abs(float(x.mean()) - mean) < 4 * math.sqrt(spread / n)
    assert abs(float(x.var()) - spread) < 4 * spread * math.sqrt(2 / n)


# --- times --------------------------------------------------------------------------------------------------------------------------------


@every_schedule
@pytest.mark.parametrize("solver", ["ddim", "heun"])
@pytest.mark.parametrize("steps", [1, 2, 18, 333, 1000])
def test_grids_fall_from_the_noisiest_level_and_never_repeat(name, solver, steps):
    schedule = SCHEDULES[name]
    times = grid(schedule, solver, steps)
    assert times.shape == (steps,)
    assert times.dtype == torch.float64
    assert (times.diff() < 0).all()
    if isinstance(schedule, Discrete):
        step = schedule.step(times)
        assert step[0] == 999
        assert step.unique().shape == (steps,)
        if steps == 1000 or (steps > 1 and solver == "heun"):
            assert step[-1] == 0
    else:
        assert times[0] == 1
        assert (schedule(times)[1] > 0).all()


def test_grids_by_hand():
    schedule = nc.schedule("linear", steps=10)
    assert schedule.step(grid(schedule, "ddim", 5)).tolist() == [9, 7, 5, 3, 1]
    assert schedule.step(grid(schedule, "ddpm", 4)).tolist() == [9, 7, 4, 1]  # 10, 7.5, 5, 2.5 rounded (half to even), less one
    sigma = (-SCHEDULES["edm"].log_snr(grid(SCHEDULES["edm"], "heun", 3)) / 2).exp()
    middle = ((80 ** (1 / 7) + 0.002 ** (1 / 7)) / 2) ** 7
    assert sigma.tolist() == pytest.approx([80, middle, 0.002])
    assert grid(SCHEDULES["flow"], "heun", 4).tolist() == [1, 0.75, 0.5, 0.25]


# --- generate -----------------------------------------------------------------------------------------------------------------------------


def model_of(schedule: Schedule, objective: Objective, means: Tensor | None = None):
    """The best model for N(m, c) under any objective: it knows of the level what t tells it, and sees what the objective shows it."""

    def predict(seen: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        if isinstance(schedule, Discrete):
            assert t.dtype == torch.int64
            a, s = schedule(schedule.time_of(t))
        else:
            a, s = (1 - t, t) if schedule == SCHEDULES["flow"] else (torch.ones_like(t), (4 * t.double()).exp())
        a, s = (c.double().reshape(-1, 1, 1, 1) for c in (a, s))
        # model_input is linear in x, so its factor can be read off
        x = seen.double() / objective.model_input(torch.ones_like(a), a, s)
        mean = MEAN if labels is None or means is None else means[labels].reshape(-1, 1, 1, 1)
        x0 = best_x0(x, a, s, mean)
        return objective.target(x0, (x - a * x0) / s, a, s).float()

    return predict


def in_bytes(x: Tensor) -> Tensor:
    return ((x.double() + 1) * 127.5).clamp(0, 255)


@every_schedule
@pytest.mark.parametrize("objective", ["eps", "x0", "v", "flow", "edm"])
@pytest.mark.parametrize("solver", ["ddpm", "ddim", "heun", "dpm++"])
def test_pictures_of_the_best_model(name, objective, solver):
    schedule = SCHEDULES[name]
    target = nc.objective(objective)
    if objective == "eps" and name in ("zero terminal", "flow"):
        with pytest.raises(Mistake, match="ends in pure noise"):
            generate(model_of(schedule, target), schedule, target, (1, 4, 4), 2, solver=solver, steps=10)
        return
    options = {"solver": solver, "steps": 12}
    images = generate(model_of(schedule, target), schedule, target, (1, 4, 4), 6, seed=3, batch=4, **options)
    noise = noise_of(3, range(6), (1, 4, 4), "cpu")
    expected = last(solve(lambda x, time: exact(schedule)(x, time).clamp(-1, 1), schedule, lambda i: noise(i).double(), **options))
    assert images.dtype == torch.uint8
    # half a level for rounding, and float32, in which eps makes an x0 of (x - s·eps)/a with 1/a up to 20,000 on cosine: 0.1 where it is seen
    assert (in_bytes(expected) - images).abs().max() < 0.6


@pytest.mark.parametrize("solver", ["ddpm", "ddim"])
def test_a_picture_depends_on_the_seed_and_its_number_alone(solver):
    schedule, target = nc.schedule("linear", steps=50), nc.objective("eps")
    make = model_of(schedule, target)

    def run(n: int, **options) -> Tensor:
        return generate(make, schedule, target, (3, 4, 4), n, solver=solver, steps=25, **options)

    images = run(7)
    assert torch.equal(images, run(7, batch=3))
    assert torch.equal(images[:5], run(5, batch=1))
    assert (images != run(7, seed=1)).any((1, 2, 3)).all()
    assert len({image.numpy().tobytes() for image in images}) == 7


@pytest.mark.parametrize("guidance", [0.0, 1.0, 2.5])
def test_guidance_moves_the_mean_and_nothing_else(guidance):
    """Of Gaussians that differ in their means, the guided prediction is the best one for the mean null + g·(label - null)."""
    schedule, target = nc.schedule("cosine"), nc.objective("v")
    means = torch.tensor([0.3, -0.2, 0.05], dtype=torch.float64)  # the last one stands for none
    labels = torch.tensor([0, 1, 1, 0, 0])
    seen = []

    def predict(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        seen.append(len(x))
        return model_of(schedule, target, means)(x, t, y)

    images = generate(predict, schedule, target, (1, 4, 4), 5, solver="heun", steps=60, labels=labels, guidance=guidance, null=2, batch=3)
    mean = (means[2] + guidance * (means[labels] - means[2])).reshape(-1, 1, 1, 1)
    expected = destination(schedule, "heun", 60, noise_of(0, range(5), (1, 4, 4), "cpu")(0), mean)
    assert (in_bytes(expected) - images).abs().max() < 1  # rounding, and 0.002 of the solver at 60 steps, a quarter of a level
    assert set(seen) == ({3, 2} if guidance == 1 else {6, 4})


def test_predictions_are_clipped_to_the_range_of_pictures():
    schedule, target = nc.schedule("linear", steps=20), nc.objective("x0")
    images = generate(lambda x, t: torch.full_like(x, 5.0), schedule, target, (1, 2, 2), 1, steps=5)
    assert images.unique().tolist() == [255]
    shade = torch.tensor([-1.0, -0.5, 0.0, 0.998]).reshape(1, 1, 2, 2)
    images = generate(lambda x, t: shade.expand_as(x), schedule, target, (1, 2, 2), 1, solver="dpm++", steps=5)
    assert images.flatten().tolist() == [0, 64, 128, 255]  # (x+1)·127.5 = 0, 63.75, 127.5 (half to even), 254.7


def test_progress_counts_every_step_of_every_picture():
    schedule, target = nc.schedule("linear", steps=20), nc.objective("x0")
    told: list[int] = []
    generate(lambda x, t: x, schedule, target, (1, 2, 2), 5, steps=4, batch=3, progress=told.append)
    assert told == [3, 6, 9, 12, 14, 16, 18, 20]


def test_no_gradient_is_kept():
    schedule, target = nc.schedule("linear", steps=20), nc.objective("x0")
    weight = torch.ones((), requires_grad=True)
    x = last(solve(lambda x, _: x, schedule, noise_of(0, range(2), (2,), "cpu"), steps=3))
    assert not x.requires_grad
    generate(lambda x, t: x * weight, schedule, target, (1, 2, 2), 1, steps=3)  # fails at .byte().cpu() into the pictures otherwise
    assert weight.grad is None


# --- noise --------------------------------------------------------------------------------------------------------------------------------


def test_the_noise_is_normal_and_independent():
    draw = noise_of(0, range(400), (1, 16, 16), "cpu")
    first, second = draw(0), draw(1)
    n = first.numel()
    assert stats.kstest(first.numpy().ravel(), "norm").pvalue > 0.001
    neighbours = {"draws": (first, second), "pictures": (first[1:], first[:-1]), "pixels": (first[..., 1:], first[..., :-1])}
    for a, b in neighbours.values():
        assert abs(float((a * b).mean())) < 4 / math.sqrt(n)
    # the largest of 102,400 normals: above 3.6 but for e^-16, below 6.5 but for 1e-5
    assert 3.6 < float(first.abs().max()) < 6.5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_noise_is_the_same_on_a_gpu():
    host, device = (noise_of(5, range(3), (3, 8, 8), kind)(2).cpu() for kind in ("cpu", "cuda"))
    assert (host - device).abs().max() < 1e-6  # the same bits; erfinv in float64 on both, then float32


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "plms"}, r"unknown solver 'plms'; known: ddpm, ddim, euler, heun, dpm\+\+"),
        ({"variance": "learned"}, "unknown variance 'learned'; known: fixed-large, fixed-small"),
        ({"steps": 0}, "steps must be at least 1 and at most 20"),
        ({"steps": 21}, "at most 20, the steps that there are, got 21"),
        ({"n": 0}, "the number of pictures and the batch must be at least 1"),
        ({"batch": 0}, "the batch must be at least 1"),
        ({"guidance": 2.0}, "guidance=2 needs a model with classes"),
        ({"guidance": float("nan")}, "guidance must be finite, got nan"),
        ({"guidance": 2.0, "labels": torch.zeros(2, dtype=torch.long)}, "guidance=2 needs a model with classes"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "one for each of the 2 pictures"),
    ],
)
def test_mistakes_are_named(options, message):
    arguments = {"shape": (1, 2, 2), "n": 2, "steps": 5, **options}
    with pytest.raises(Mistake, match=message):
        generate(lambda x, t, y=None: x, nc.schedule("linear", steps=20), nc.objective("x0"), **arguments)


def test_a_broken_model_is_a_failure():
    with pytest.raises(Failure, match="not finite"):
        generate(lambda x, t: x * math.nan, nc.schedule("linear", steps=20), nc.objective("x0"), (1, 2, 2), 1, steps=2)
