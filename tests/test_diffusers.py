"""The core's coefficients against diffusers' schedulers: same betas, same ancestral and DDIM updates."""

import numpy as np
import pytest
import torch

import noiseclock as nc
from noiseclock.core.schedules import Discrete

diffusers = pytest.importorskip("diffusers")

CASES = {
    "linear": {"beta_schedule": "linear"},
    "quadratic": {"trained_betas": np.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=np.float32) ** 2},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "scaled-linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
}
every_case = pytest.mark.parametrize("name", CASES)


def ours(name: str) -> Discrete:
    schedule = nc.schedule(name)
    assert isinstance(schedule, Discrete)
    return schedule


def sample(seed: int) -> torch.Tensor:
    return torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@every_case
def test_betas_and_alphas(name):
    scheduler = diffusers.DDPMScheduler(clip_sample=False, **CASES[name])
    for mine in (ours(name), nc.schedule(scheduler)):
        assert isinstance(mine, Discrete)
        assert np.abs(mine.betas - scheduler.betas.numpy()).max() < 1e-6
        assert np.abs(mine.alphas - scheduler.alphas.numpy()).max() < 1e-6
        # theirs is a product of up to 1000 float32 factors, each rounded at 6e-8
        assert np.abs(mine.alpha_bar - scheduler.alphas_cumprod.numpy()).max() < 1e-6


def in_float64(scheduler):
    """Their formulas on their own betas, without the rounding of float32.

    As shipped, ᾱ is rounded at 6e-8 and 1-ᾱ at the first steps is 1e-4, so their updates are off by up to 7e-4; the betas and ᾱ themselves
    are compared as shipped above.
    """
    scheduler.betas = scheduler.betas.double()
    scheduler.alphas = 1 - scheduler.betas
    scheduler.alphas_cumprod = scheduler.alphas.cumprod(0)
    return scheduler


@every_case
@pytest.mark.parametrize("t", [0, 1, 10, 500, 999])
@pytest.mark.parametrize("variance", ["fixed_large", "fixed_small"])
def test_ancestral_update(name, t, variance):
    scheduler = in_float64(diffusers.DDPMScheduler(clip_sample=False, variance_type=variance, **CASES[name]))
    x_t, eps = sample(0), sample(1)
    theirs = scheduler.step(eps, t, x_t, generator=torch.Generator().manual_seed(2)).prev_sample

    schedule = nc.schedule(scheduler)
    assert isinstance(schedule, Discrete)
    time = schedule.time_of(torch.tensor([t]))
    a, s = (c.reshape(1, 1, 1, 1) for c in schedule(time))
    posterior = schedule.posterior(time)
    mine = posterior.x0 * nc.objective("eps").to_x0(eps, x_t, a, s) + posterior.x_t * x_t
    if t > 0:
        noise = torch.randn(x_t.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        mine = mine + (posterior.large if variance == "fixed_large" else posterior.variance).sqrt() * noise
    assert (mine - theirs).abs().max() < 1e-6


@every_case
@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_ddim_update(name, prediction_type):
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, prediction_type=prediction_type, **CASES[name])
    in_float64(scheduler).set_timesteps(50)
    x_t, output = sample(0), sample(1)
    schedule = nc.schedule(scheduler)
    assert isinstance(schedule, Discrete)
    objective = nc.objective({"epsilon": "eps", "sample": "x0", "v_prediction": "v"}[prediction_type])
    for t in (20, 480, 960):
        theirs = scheduler.step(output, t, x_t).prev_sample
        a, s = (c.reshape(1, 1, 1, 1) for c in schedule(schedule.time_of(torch.tensor([t]))))
        b, r = (c.reshape(1, 1, 1, 1) for c in schedule(schedule.time_of(torch.tensor([t - 20]))))
        x0 = objective.to_x0(output, x_t, a, s)
        mine = b * x0 + r * (x_t - a * x0) / s
        assert (mine - theirs).abs().max() < 1e-6


@every_case
def test_noised_samples_and_velocity_targets(name):
    scheduler = diffusers.DDPMScheduler(**CASES[name])
    clock = nc.Clock(ours(name), "uniform", objective="v")
    x0 = torch.randn(16, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    batch = clock.draw(x0)
    # √(1-ᾱ) with ᾱ rounded at 6e-8 and 1-ᾱ as small as 4e-5 is off by 6e-8/(2·√4e-5) = 5e-6, times a normal of up to 5
    assert torch.allclose(batch.x_t, scheduler.add_noise(x0, batch.noise, batch.t), rtol=0, atol=2.5e-5)
    assert torch.allclose(batch.target, scheduler.get_velocity(x0, batch.noise, batch.t), rtol=0, atol=2.5e-5)


def test_zero_terminal_snr():
    scheduler = diffusers.DDPMScheduler(rescale_betas_zero_snr=True)
    mine = nc.schedule("linear", zero_terminal_snr=True)
    assert isinstance(mine, Discrete)
    assert np.abs(mine.betas - scheduler.betas.numpy()).max() < 1e-5  # a ratio of two float32 products there
    read = nc.schedule(scheduler)
    assert isinstance(read, Discrete)
    assert read.alpha_bar[-1] < 1e-12


def test_other_families_of_schedulers_are_recognised():
    edm = nc.schedule(diffusers.EDMEulerScheduler(sigma_min=0.01, sigma_max=50.0))
    assert edm == nc.schedule("edm", sigma_min=0.01, sigma_max=50.0)
    flow = nc.schedule(diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))
    assert flow == nc.schedule("flow", condition_scale=1000.0)
    # what its model is told is 1000·σ, and x_t = (1-σ)·x0 + σ·eps
    time = torch.tensor([0.25, 0.5])
    assert flow.condition(time).tolist() == [250.0, 500.0]
    for kind in (diffusers.UniPCMultistepScheduler, diffusers.DPMSolverMultistepScheduler):
        clock = nc.Clock(kind(use_flow_sigmas=True, prediction_type="flow_prediction"), "uniform")
        assert clock.schedule == flow
        assert clock.objective.name == "flow"
    video = diffusers.CogVideoXDDIMScheduler()  # rescales ᾱ and leaves its betas as they were
    assert np.abs(nc.schedule(video).alpha_bar - video.alphas_cumprod.numpy()).max() < 1e-6
    for scheduler in (diffusers.DDIMScheduler(), diffusers.EulerDiscreteScheduler(), diffusers.DPMSolverMultistepScheduler()):
        assert nc.schedule(scheduler).steps == 1000


def test_the_objective_follows_the_scheduler_and_a_contradiction_is_an_error():
    cases = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}
    for theirs, ours_ in cases.items():
        assert nc.Clock(diffusers.DDPMScheduler(prediction_type=theirs), "uniform").objective.name == ours_
    assert nc.Clock(diffusers.FlowMatchEulerDiscreteScheduler(), "uniform").objective.name == "flow"
    assert nc.Clock(diffusers.EDMEulerScheduler(sigma_data=1.0), "uniform").objective == nc.objective("edm", sigma_data=1.0)
    edm = diffusers.EDMEulerScheduler(sigma_data=1.0)
    assert nc.Clock(edm, "uniform", objective="edm").objective == nc.objective("edm", sigma_data=1.0)  # by name: with the scheduler's settings
    with pytest.raises(
        ValueError, match=r"objective=Preconditioned\(sigma_data=0.25\), but the EDMEulerScheduler .* Preconditioned\(sigma_data=1.0\)"
    ):
        nc.Clock(edm, "uniform", objective=nc.objective("edm", sigma_data=0.25))
    with pytest.raises(ValueError, match="objective='eps', but the DDPMScheduler is set to predict 'v'"):
        nc.Clock(diffusers.DDPMScheduler(prediction_type="v_prediction"), "uniform", objective="eps")
