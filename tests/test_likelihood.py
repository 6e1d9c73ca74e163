"""The bound against closed forms: for Gaussian data the exact denoiser is linear and the whole chain is one joint Gaussian."""

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch

import noiseclock as nc
from gaussians import GaussianMixture, ring
from noiseclock.core.likelihood import bits, bound, decoder_term, kl_term, prior_term
from noiseclock.core.schedules import Discrete

STD = 0.15  # so that nothing lies beyond ±1, where the decoder's end cells are open


def exact_eps(schedule: Discrete):
    """The best prediction of the noise for x0 ~ N(0, STD²)."""

    def predict(x_t, t):
        a, s = (c.reshape(-1, 1).to(x_t) for c in schedule(schedule.time_of(t)))
        return s * x_t / ((a * STD) ** 2 + s**2)

    return predict


def chain_bound(schedule: Discrete, sigma2: np.ndarray) -> float:
    """E[log q(x_1..x_T|x0) - log p(x_1..x_T)] - E[log p(x0|x_1)] with a Gaussian decoder, from the covariances of the forward chain alone.

    p(x_prev|x_t) = N(m·x_t, σ²) with m·x_t = E[x_prev|x_t]; nothing of the library's posterior coefficients is used.
    """
    variance = np.append(STD**2, schedule.alpha_bar * STD**2 + 1 - schedule.alpha_bar)  # Var x_0, x_1, ... x_T
    total = 0.5 * math.log(2 * math.pi) + variance[-1] / 2  # -log p(x_T)
    for t, beta in enumerate(schedule.betas):
        total -= 0.5 * math.log(2 * math.pi * beta) + 0.5  # + log q(x_{t+1}|x_t)
        covariance = math.sqrt(1 - beta) * variance[t]
        left = variance[t] - covariance**2 / variance[t + 1]  # Var(x_t | x_{t+1})
        total += 0.5 * math.log(2 * math.pi * sigma2[t]) + left / (2 * sigma2[t])  # -log p(x_t|x_{t+1})
    return total


@pytest.mark.parametrize("variance", ["fixed-large", "fixed-small"])
@pytest.mark.parametrize("schedule", [nc.schedule("linear", steps=50, beta_start=0.01, beta_end=0.3), nc.schedule("cosine", steps=30)], ids=repr)
def test_bound_of_the_exact_denoiser_on_a_gaussian_is_the_closed_form(schedule, variance):
    """Levels so fine that the discretised decoder is the Gaussian density times the width of a level, 2/(levels-1)."""
    n, levels = 100_000, 2**20
    generator = torch.Generator().manual_seed(0)
    x0 = STD * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    result = bound(schedule, nc.objective("eps"), exact_eps(schedule), x0, variance=variance, levels=levels, generator=generator)
    beta, before = schedule.betas, np.append(1, schedule.alpha_bar[:-1])
    sigma2 = beta if variance == "fixed-large" else beta * (1 - before) / (1 - schedule.alpha_bar)
    sigma2 = np.where(np.arange(schedule.steps) == 0, sigma2[1] if variance == "fixed-small" else sigma2[0], sigma2)
    expected = (chain_bound(schedule, sigma2) - math.log(2 / (levels - 1))) / math.log(2)
    per_sample = result.bits_per_dim
    tolerance = 5 * per_sample.std().item() / math.sqrt(n)  # five standard errors of the mean
    assert per_sample.mean().item() == pytest.approx(expected, abs=tolerance)
    assert tolerance < 0.05


def test_the_bound_is_tight_in_the_limit_of_many_steps():
    """With ever finer steps the bound of the exact denoiser falls to the entropy of the data, ½·ln(2πe·STD²), from above."""
    gaps = []
    for steps in (100, 1000, 10_000):
        schedule = nc.schedule("linear", steps=steps, beta_start=0.1 / steps, beta_end=20 / steps)
        assert isinstance(schedule, Discrete)
        gaps.append(chain_bound(schedule, schedule.betas) - 0.5 * math.log(2 * math.pi * math.e * STD**2))
    assert gaps[0] > gaps[1] > gaps[2] > 0
    assert gaps[2] < 0.01


def test_kl_and_prior_terms_are_exact_kl_divergences():
    schedule = nc.schedule("linear", steps=50, beta_end=0.3)
    assert isinstance(schedule, Discrete)
    step = torch.tensor([1, 17, 49])
    x0, predicted = torch.tensor([[0.3], [-0.8], [0.5]]), torch.tensor([[0.1], [-0.7], [0.9]])
    posterior = schedule.posterior(schedule.time_of(step))
    for variance, sigma2 in (("fixed-large", posterior.large), ("fixed-small", posterior.variance)):
        kl = kl_term(schedule, step, x0, predicted, variance=variance)
        for i in range(3):
            q = torch.distributions.Normal(posterior.x0[i] * x0[i, 0].double(), posterior.variance[i].sqrt())
            p = torch.distributions.Normal(posterior.x0[i] * predicted[i, 0].double(), sigma2[i].sqrt())
            assert kl[i].item() == pytest.approx(torch.distributions.kl_divergence(q, p).item(), rel=1e-6)
    a, s = schedule(1.0)
    normal = torch.distributions.Normal
    expected = [torch.distributions.kl_divergence(normal(a * x, s), normal(a * 0, s * 0 + 1)).item() for x in x0.flatten().double()]
    assert prior_term(schedule, x0.double()).tolist() == pytest.approx(expected, rel=1e-9)


def test_decoder_is_the_mass_of_the_cell():
    schedule = nc.schedule("linear")
    assert isinstance(schedule, Discrete)
    sigma = math.sqrt(1e-4)
    values = torch.tensor([[-1.0], [-0.2], [0.0], [1.0], [1.0]], dtype=torch.float64)
    predicted = values + torch.tensor([[0.004], [-0.01], [0.0], [0.001], [-0.05]], dtype=torch.float64)
    nats = decoder_term(schedule, values, predicted)
    for x, mean, value in zip(values.flatten().tolist(), predicted.flatten().tolist(), nats.tolist(), strict=True):
        low, high = (-np.inf if x <= -1 else x - 1 / 255), (np.inf if x >= 1 else x + 1 / 255)
        mass, _ = scipy.integrate.quad(scipy.stats.norm(mean, sigma).pdf, max(low, mean - 1), min(high, mean + 1), points=[mean], epsabs=1e-14)
        assert value == pytest.approx(-math.log(mass), rel=1e-6, abs=1e-9)


def test_masses_of_all_levels_sum_to_one():
    schedule = nc.schedule("linear")
    assert isinstance(schedule, Discrete)
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)[:, None]
    for mean in (-1.2, -0.3, 0.999):
        mass = (-decoder_term(schedule, levels, torch.full_like(levels, mean))).exp()
        assert mass.sum().item() == pytest.approx(1, abs=1e-9)


def test_step_0_is_the_decoders():
    with pytest.raises(ValueError, match="KL terms exist for steps from 1 on"):
        kl_term(nc.schedule("linear"), torch.tensor([0]), torch.zeros(1, 2), torch.zeros(1, 2))


def test_bound_needs_steps_and_bits_are_bits():
    with pytest.raises(TypeError, match="Flow has none"):
        bound(nc.schedule("flow"), nc.objective("flow"), lambda x, t: x, torch.zeros(1, 2))
    assert bits(torch.tensor(3 * math.log(2))).item() == pytest.approx(3)


# --- a mixture of Gaussians ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear", "flow", "edm"])
def test_loss_of_the_exact_denoiser_on_a_mixture_is_the_integral_at_every_level(name):
    """The Clock's own loss, by Monte Carlo, against numerical integration, at 20 noise levels."""
    data, schedule = ring(), nc.schedule(name)
    clock = nc.Clock(schedule, "uniform", objective="eps")
    generator = torch.Generator().manual_seed(0)
    for u in torch.linspace(0.025, 0.975, 20, dtype=torch.float64):
        batch = clock.at(data.sample(20_000, generator).double(), u, generator=generator)
        a, s = (c.reshape(-1, 1) for c in schedule(batch.time))
        exact = GaussianMixture(data.means.double(), data.std)
        losses = clock.loss(batch, exact.eps(batch.x_t, a, s))
        error = 5 * losses.std().item() / math.sqrt(len(losses))
        assert losses.mean().item() == pytest.approx(data.least_loss(a[0].item(), s[0].item()), abs=error)


def test_least_loss_agrees_with_one_gaussian_and_a_finer_grid():
    single = GaussianMixture(torch.tensor([[0.5, -0.5]]), 0.3)
    a, s = 0.8, 0.6
    # x0 given x_t has variance σ²s²/(a²σ²+s²) in each dimension
    expected = (a / s) ** 2 * 0.09 * s**2 / (0.09 * a**2 + s**2)
    assert single.least_loss(a, s) == pytest.approx(expected, rel=1e-12)
    assert ring().least_loss(a, s) == pytest.approx(ring().least_loss(a, s, points=501), rel=1e-10)
    with pytest.raises(ValueError, match="two dimensions, got 3"):
        GaussianMixture(torch.zeros(1, 3), 1.0).least_loss(a, s)
