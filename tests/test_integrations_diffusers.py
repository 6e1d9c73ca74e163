"""Clocks from diffusers' schedulers against the schedulers' own functions, its training utilities against ours, adapters, and accelerate."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    EDMDPMSolverMultistepScheduler,
    EDMEulerScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DConditionModel,
    training_utils as upstream,
)
from torch import nn

import noiseclock as nc
from noiseclock.integrations import diffusers as ours
from noiseclock.integrations.diffusers import clock_from

OBJECTIVES = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}
DOCS = Path(__file__).parents[1] / "docs"


def pair(n, shape=(2, 3, 3), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, *shape, generator=generator), torch.randn(n, *shape, generator=generator)


# --- clocks -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [DDPMScheduler, DDIMScheduler])
@pytest.mark.parametrize("said", OBJECTIVES)
def test_a_clock_of_steps_tells_the_timestep_and_noises_as_the_scheduler_does(kind, said):
    scheduler = kind(num_train_timesteps=200, beta_schedule="scaled_linear", prediction_type=said)
    scheduler.set_timesteps(10)  # somebody drew samples before
    clock = clock_from(scheduler, "uniform", "min-snr", seed=3)
    assert (clock.objective.name, clock.seed, clock.weighting) == (OBJECTIVES[said], 3, nc.MinSNR())
    steps = torch.arange(200)
    x0, noise = pair(200)
    b = clock.at(x0, clock.schedule.time_of(steps), noise=noise)
    assert b.t.dtype == torch.int64
    assert torch.equal(b.t, steps)
    # theirs keeps ᾱ in float32: 1-ᾱ of the first steps, about 1e-4, is off by 6e-8, its root by 3e-6, times a normal of up to 4
    assert (b.x_t - scheduler.add_noise(x0, noise, steps)).abs().max() < 2e-5
    wanted = {"epsilon": noise, "sample": x0, "v_prediction": scheduler.get_velocity(x0, noise, steps)}[said]
    assert (b.target - wanted).abs().max() < 2e-5
    drawn = torch.cat([clock.draw(x0).t for _ in range(10)])
    assert torch.equal(drawn.bincount(minlength=200), torch.full((200,), 10))  # a batch of 200 has one time in each of 200 strata, its steps


@pytest.mark.parametrize("kind", [EDMEulerScheduler, EDMDPMSolverMultistepScheduler])
def test_a_clock_of_edm_is_preconditioned_as_the_scheduler_does(kind):
    scheduler = kind(sigma_min=0.01, sigma_max=50.0, sigma_data=0.7)
    sigma, told = scheduler.sigmas[:-1], scheduler.timesteps
    assert len(sigma) == len(told) >= 1000
    clock = clock_from(scheduler)
    x0, noise = pair(len(sigma))
    b = clock.at(x0, clock.schedule.inverse(-2 * sigma.double().log()), noise=noise)
    assert (b.t - told).abs().max() < 1e-6  # |ln σ|/4 is below 1.2, in float32
    column = sigma.reshape(-1, 1, 1, 1)
    x = x0 + column * noise
    assert (b.x_t - scheduler.precondition_inputs(x, column)).abs().max() < 5e-6  # normals of up to 5, in float32
    # a network that hits the target is a perfect denoiser
    assert (scheduler.precondition_outputs(x, b.target, column) - x0).abs().max() < 5e-6


@pytest.mark.parametrize(("shift", "steps"), [(1.0, 1000), (3.0, 1000), (0.5, 400)])
def test_a_clock_of_flow_matching_tells_a_thousand_sigma_and_shifts(shift, steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift, num_train_timesteps=steps)
    clock = clock_from(scheduler, nc.LogitNormal(0.3, 0.8))
    x0, noise = pair(steps)
    b = clock.at(x0, scheduler.sigmas, noise=noise)
    assert torch.allclose(b.t, scheduler.timesteps, rtol=2e-7)  # one rounding of float32 each
    assert (b.x_t - scheduler.scale_noise(x0, scheduler.timesteps, noise)).abs().max() < 2e-6
    assert torch.equal(b.target, noise - x0)
    # diffusers picks the place k/T and shifts it; k = T, where σ = 1, is never reached by a density below 1
    place = torch.arange(1, steps, dtype=torch.float64) / steps
    assert (clock_from(scheduler).sampler.icdf(place) - scheduler.sigmas.flip(0)[:-1]).abs().max() < 1e-6
    unshifted = nc.LogitNormal(0.3, 0.8).icdf(place)
    assert torch.allclose(clock.sampler.icdf(place), shift * unshifted / (1 + (shift - 1) * unshifted), rtol=1e-12)


def test_a_shift_keeps_the_objective_of_a_learned_sampler():
    """Corrected to uniform places, shifted: ∫ base·loss is the mean over diffusers' own noise levels."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    clock = clock_from(scheduler, nc.LossSecondMoment())
    assert clock.base == nc.Shifted(nc.Uniform(), 3.0)
    assert clock.corrected
    clock = clock_from(scheduler, nc.Mode(), correct="importance", seed=2)
    assert (clock.base, clock.sampler) == (nc.Shifted(nc.Uniform(), 3.0), nc.Shifted(nc.Mode(), 3.0))
    x0 = torch.zeros(4096, 1)
    found = np.mean([(b.correction * b.time).mean() for b in (clock.draw(x0) for _ in range(20))])
    # 80,000 stratified draws leave less than what a thousand steps miss of an integral, half a step
    assert math.isclose(found, scheduler.sigmas.double().mean(), abs_tol=1e-3)
    assert clock_from(FlowMatchEulerDiscreteScheduler(), "adaptive").sampler.every == 40
    with pytest.raises(ValueError, match="Adaptive chooses its own times and its loss is not corrected, so shift=3 would have no effect"):
        clock_from(scheduler, "adaptive")
    with pytest.raises(ValueError, match=r"shift=3 cannot be applied to Mixture as a whole; .* nc.Mixture\(nc.Shifted\(nc.LogitNormal\(\), 3\)\)"):
        clock_from(scheduler, nc.Mixture(nc.LogitNormal()))
    assert clock_from(scheduler, "adaptive", correct="importance").base == nc.Shifted(nc.Uniform(), 3.0)


def test_what_is_not_supported_is_said_in_a_sentence():
    cases = [
        (TypeError, "clock_from reads DDPMScheduler, .*, got EulerDiscreteScheduler; train with one of these", EulerDiscreteScheduler()),
        (ValueError, "use_dynamic_shifting makes the noise levels depend on", FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)),
        (ValueError, "invert_sigmas turns noise and data around", FlowMatchEulerDiscreteScheduler(invert_sigmas=True)),
        (ValueError, "a prediction of the noise says nothing of the sample", DDPMScheduler(rescale_betas_zero_snr=True)),
        (ValueError, "unknown prediction_type 'noise'; known: epsilon, sample, v_prediction", DDIMScheduler(prediction_type="noise")),
        (ValueError, "expects the negative of EDM's network; train with", EDMEulerScheduler(prediction_type="v_prediction")),
    ]
    for error, message, scheduler in cases:
        with pytest.raises(error, match=message):
            clock_from(scheduler)
    assert clock_from(DDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction")).objective.name == "v"
    # the core reads more kinds, and is as careful
    with pytest.raises(ValueError, match="expects the negative of EDM's network"):
        nc.Clock(EDMEulerScheduler(prediction_type="v_prediction"), "uniform")
    with pytest.raises(ValueError, match="unknown prediction_type 'trigflow'"):
        nc.Clock(EulerDiscreteScheduler(prediction_type="trigflow"), "uniform")


MEAN, STD = 0.6, 0.3


def best_model(clock):
    """What a network that is perfect on data N(MEAN, STD²) answers, told x_t and t as the clock tells them."""

    def model(x, t):
        if clock.objective.name == "flow":
            time = t.double() / 1000
        else:
            time = clock.schedule.inverse(-8 * t.double()) if clock.objective.name == "edm" else clock.schedule.time_of(t)
        a, s = clock.schedule(time)
        if clock.objective.name == "edm":
            x = x * (s**2 + clock.objective.sigma_data**2).sqrt()
        x0 = MEAN + a * STD**2 / ((a * STD) ** 2 + s**2) * (x - a * MEAN)
        return clock.objective.target(x0, (x - a * x0) / s, a, s)

    return model


@pytest.mark.parametrize(
    "scheduler",
    [
        *(DDPMScheduler(prediction_type=said, clip_sample=False) for said in OBJECTIVES),
        DDIMScheduler(prediction_type="v_prediction", clip_sample=False),
        EDMEulerScheduler(),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
    ],
    ids=lambda s: f"{type(s).__name__}-{s.config.get('prediction_type', '')}",
)
def test_a_model_that_a_clock_would_train_samples_the_data_in_diffusers(scheduler):
    model = best_model(clock_from(scheduler))
    scheduler.set_timesteps(200)
    generator = torch.Generator().manual_seed(0)
    first = getattr(scheduler, "init_noise_sigma", 1.0)
    x = torch.randn(20_000, 1, generator=generator, dtype=torch.float64) * first
    chance = {"generator": generator} if isinstance(scheduler, DDPMScheduler) else {}
    for t in scheduler.timesteps:
        seen = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        x = scheduler.step(model(seen, t), t, x, **chance).prev_sample.double()
    # 200 steps of a first-order solver miss the width by a few per cent; a wrong sign or time misses by far more
    assert math.isclose(x.mean(), MEAN, abs_tol=0.02)
    assert math.isclose(x.std(), STD, rel_tol=0.05)


# --- in place of diffusers.training_utils -------------------------------------------------------------------------------------------------


def both(n=20_000, seed=1, **arguments):
    """diffusers' numbers and ours, from the same stream."""
    draws = (upstream.compute_density_for_timestep_sampling, ours.compute_density_for_timestep_sampling)
    return [draw(batch_size=n, generator=torch.Generator().manual_seed(seed), **arguments) for draw in draws]


def test_densities_that_are_symmetric_are_diffusers_own():
    theirs, mine = both(weighting_scheme="none")
    assert torch.equal(theirs, mine)
    theirs, mine = both(weighting_scheme="mode", mode_scale=1.29)
    assert (theirs - mine).abs().max() < 1e-6  # float32
    theirs, mine = both(weighting_scheme="logit_normal", logit_mean=0.0, logit_std=1.0)
    assert mine.dtype == torch.float32
    assert (1 - theirs - mine).abs().max() < 1e-6


def test_a_positive_mean_is_more_noise_here_and_less_in_diffusers():
    scheduler = FlowMatchEulerDiscreteScheduler()
    theirs, mine = (scheduler.sigmas[(u * 1000).long()] for u in both(weighting_scheme="logit_normal", logit_mean=1.0, logit_std=0.5))
    # SD3: σ = sigmoid(z), z ~ N(1, 0.5²), whose median is sigmoid(1) = 0.731; of 20,000 draws it is known to 0.001, and a step is 0.001
    assert math.isclose(mine.median(), 1 / (1 + math.exp(-1)), abs_tol=3e-3)
    assert math.isclose(theirs.median(), 1 / (1 + math.exp(1)), abs_tol=3e-3)
    # and is what a clock draws
    assert math.isclose(clock_from(scheduler, nc.LogitNormal(1.0, 0.5)).sampler.icdf(torch.tensor(0.5)), 0.731, abs_tol=1e-3)


def test_one_knob_for_two_choices_and_unknown_names_are_errors_here_and_silent_in_diffusers():
    for name in ("sigma_sqrt", "cosmap", "logit-normal"):  # the last with a typo
        uniform = upstream.compute_density_for_timestep_sampling(name, 50, 1.0, 0.5, generator=torch.Generator().manual_seed(1))
        assert torch.equal(uniform, torch.rand(50, generator=torch.Generator().manual_seed(1)))
    with pytest.raises(ValueError, match="'cosmap' is no density of times; pass 'none' for a constant one, or one of: logit_normal, mode"):
        ours.compute_density_for_timestep_sampling("cosmap", 50)
    with pytest.raises(ValueError, match="unknown density of times 'logit-normal'; known: logit_normal, mode, none"):
        ours.compute_density_for_timestep_sampling("logit-normal", 50, 1.0, 0.5)
    sigmas = torch.tensor([0.25, 0.5])
    for name in ("logit_normal", "mode", "cosmop"):
        assert torch.equal(upstream.compute_loss_weighting_for_sd3(name, sigmas), torch.ones(2))
    with pytest.raises(ValueError, match="'mode' is no loss weight; pass 'none' for a constant one, or one of: sigma_sqrt, cosmap"):
        ours.compute_loss_weighting_for_sd3("mode", sigmas)
    with pytest.raises(ValueError, match="unknown loss weight 'cosmop'; known: cosmap, none, sigma_sqrt"):
        ours.compute_loss_weighting_for_sd3("cosmop", sigmas)
    with pytest.raises(TypeError, match="LogitNormal: mean must be a number, got None"):
        ours.compute_density_for_timestep_sampling("logit_normal", 50)


@pytest.mark.parametrize("name", ["sigma_sqrt", "cosmap", "none"])
def test_weights_are_diffusers_own(name):
    sigmas = torch.linspace(0.001, 1, 1000).reshape(-1, 1, 1, 1)
    assert torch.equal(ours.compute_loss_weighting_for_sd3(name, sigmas), upstream.compute_loss_weighting_for_sd3(name, sigmas))
    half = ours.compute_loss_weighting_for_sd3(name, sigmas.bfloat16())
    assert half.dtype == torch.float32
    assert half.shape == sigmas.shape


def test_a_place_is_a_place_of_the_list(monkeypatch):
    """A uniform of exactly 0, one in 17 million, is one step too many in diffusers; too strong a mode counts from the other end."""
    monkeypatch.setattr(torch, "rand", lambda *size, **others: torch.zeros(3))
    timesteps = FlowMatchEulerDiscreteScheduler().timesteps
    with pytest.raises(IndexError):
        timesteps[(upstream.compute_density_for_timestep_sampling("mode", 3, mode_scale=1.29) * 1000).long()]
    assert timesteps[(ours.compute_density_for_timestep_sampling("mode", 3, mode_scale=1.29) * 1000).long()].tolist() == [1.0] * 3
    monkeypatch.setattr(torch, "rand", lambda *size, **others: torch.full((3,), 0.9))
    assert upstream.compute_density_for_timestep_sampling("mode", 3, mode_scale=-1.5).max() < 0
    with pytest.raises(ValueError, match="Mode: scale must lie between"):
        ours.compute_density_for_timestep_sampling("mode", 3, mode_scale=-1.5)


def min_snr_of_the_scripts(scheduler, timesteps, gamma):
    """diffusers' example scripts: the least of SNR and γ, over SNR for epsilon and over SNR+1 for v_prediction."""
    snr = upstream.compute_snr(scheduler, timesteps)
    over = {"epsilon": snr, "sample": 1.0, "v_prediction": snr + 1}[scheduler.config.prediction_type]
    return snr.clamp(max=gamma) / over


@pytest.mark.parametrize("said", OBJECTIVES)
@pytest.mark.parametrize("gamma", [1.0, 5.0])
def test_min_snr_is_that_of_the_scripts_and_of_a_clock(said, gamma):
    scheduler = DDPMScheduler(prediction_type=said)
    steps = torch.arange(1000)
    mine = ours.compute_min_snr_weights(scheduler, steps, gamma)
    # 1-ᾱ of the first step is 1e-4, known to 6e-8 in float32: its SNR is known to 6e-4
    assert torch.allclose(mine, min_snr_of_the_scripts(scheduler, steps, gamma), rtol=1e-3)
    clock = clock_from(scheduler, weighting=nc.MinSNR(gamma))
    of_clock = clock.weighting(clock.schedule, clock.schedule.time_of(steps), clock.objective)
    assert torch.allclose(mine, of_clock.float(), rtol=1e-3)
    if said == "v_prediction":  # the +1
        snr = upstream.compute_snr(scheduler, steps)
        assert torch.allclose(of_clock.float(), torch.minimum(snr, torch.tensor(gamma)) / (snr + 1), rtol=1e-3)


def test_min_snr_at_no_signal_is_a_number_here_and_none_in_the_scripts():
    scheduler, steps = DDPMScheduler(rescale_betas_zero_snr=True), torch.arange(1000)
    assert min_snr_of_the_scripts(scheduler, steps, 5.0)[-1].isnan()
    mine = ours.compute_min_snr_weights(scheduler, steps, 5.0)
    assert mine[-1] == 1
    assert mine.isfinite().all()
    with pytest.raises(TypeError, match=r"FlowMatchEulerDiscreteScheduler has no alphas_cumprod .* weighting=nc.MinSNR\(5\)"):
        ours.compute_min_snr_weights(FlowMatchEulerDiscreteScheduler(), steps)


# --- accelerate, peft, the page ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerate_anew():
    """It keeps its state for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def stepped(clock, model, optimizer, updates, seed):
    """The times of some updates."""
    generator = torch.Generator().manual_seed(seed)
    times = []
    for _ in range(updates):
        b = clock.draw(torch.randn(16, 4, generator=generator), predict=lambda x, t: model(x))
        clock.loss(b, model(b.x_t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(b.time)
    return torch.cat(times)


SAMPLERS = {
    "adaptive": nc.Adaptive.scaled(every=2, stride=50),
    "variance-optimal": nc.VarianceOptimal(every=2, warmup=1, bins=4),
    "loss-second-moment": nc.LossSecondMoment(warmup=1, bins=4),
    "speed": nc.SpeeD(),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_accelerate_saves_a_clock_and_it_goes_on_bit_for_bit(name, tmp_path, monkeypatch, accelerate_anew):
    monkeypatch.chdir(tmp_path)

    def start():
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True)
        model, optimizer = nn.Linear(4, 4), None
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        clock = clock_from(DDPMScheduler(), SAMPLERS[name], seed=4).attach(optimizer)
        accelerator.register_for_checkpointing(clock)
        return accelerator, model, optimizer, clock

    accelerator, model, optimizer, clock = start()
    stepped(clock, model, optimizer, 7, seed=1)
    accelerator.save_state("checkpoint")
    wanted = stepped(clock, model, optimizer, 7, seed=2)
    accelerator, other, optimizer, again = start()
    accelerator.load_state("checkpoint")
    assert again.updates == 7
    assert torch.equal(stepped(again, other, optimizer, 7, seed=2), wanted)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize("name", ["variance-optimal", "lookahead"])
def test_prices_do_not_drown_in_the_precision_that_accelerate_puts_into_the_model(name, accelerate_anew):
    """It wraps the model's own forward in autocast, which no autocast around the call can switch off."""
    prices = []
    for precision in ("no", "bf16"):
        torch.manual_seed(0)
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 4))
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = accelerator.prepare(model, plain)
        clock = clock_from(DDPMScheduler(), nc.sampler(name, bins=4)).attach(optimizer, model=model)
        forward = model.forward
        clock.probe(torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), lambda x, t, model=model: model(x))
        clock.sampler.after(clock._probe, None)
        assert model.forward == forward
        prices.append(clock.sampler.curve[0])
        AcceleratorState._reset_state()
    assert torch.equal(*prices)  # the squares of VarianceOptimal would be two to five times as high in bfloat16


@pytest.mark.parametrize("name", ["adaptive", "variance-optimal", "lookahead"])
def test_of_a_unet_with_adapters_only_the_adapters_are_probed(name):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
    sizes = {"block_out_channels": (8,), "layers_per_block": 1, "norm_num_groups": 4, "cross_attention_dim": 6, "attention_head_dim": 4}
    unet = UNet2DConditionModel(4, 1, 1, **sizes, **blocks)
    unet.requires_grad_(False)
    unet.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_v"]))
    adapters = [p for p in unet.parameters() if p.requires_grad]
    before = {key: p.detach().clone() for key, p in unet.named_parameters() if not p.requires_grad}
    assert {key.split(".")[-3] for key, p in unet.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}
    seen = []

    def watch(*_):
        assert all(torch.equal(p, before[key]) for key, p in unet.named_parameters() if key in before)
        seen.append(torch.cat([p.detach().flatten() for p in adapters]))

    unet.register_forward_pre_hook(watch)
    optimizer = torch.optim.AdamW(adapters, lr=1e-3)
    sampler = nc.Adaptive.scaled(every=1, stride=250) if name == "adaptive" else nc.sampler(name, every=1, bins=4)
    clock = clock_from(DDPMScheduler(), sampler).attach(optimizer)
    for _ in range(3):
        b = clock.draw(torch.randn(4, 1, 4, 4), predict=lambda x, t, words: unet(x, t, words).sample, cond=torch.randn(4, 3, 6))
        clock.loss(b, unet(b.x_t, b.t, b.cond).sample).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clock.sampler.probes == 3
    assert len({tuple(values.tolist()) for values in seen}) >= (4 if name == "adaptive" else 9)  # moved by updates, and to both sides by a probe
