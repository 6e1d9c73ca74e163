import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import noiseclock as nc
from noiseclock.core.names import SCHEDULES
from noiseclock.core.schedules import Areas, Betas, Discrete, Flow

NAMES = ["linear", "quadratic", "cosine", "scaled-linear"]
ALL = [nc.schedule(name) for name in [*NAMES, "edm", "flow"]] + [nc.schedule("linear", zero_terminal_snr=True), Betas([0.1, 0.2, 0.3])]


def discrete(name: str, **options) -> Discrete:
    schedule = nc.schedule(name, **options)
    assert isinstance(schedule, Discrete)
    return schedule


@pytest.mark.parametrize("name", NAMES)
def test_a_discrete_schedule_is_its_table_at_floor_u_t(name):
    schedule = discrete(name)
    time = torch.cat([torch.rand(10_000, dtype=torch.float64), torch.tensor([0.0, 1.0, math.nextafter(1, 0)], dtype=torch.float64)])
    step = np.minimum(np.floor(time.numpy() * 1000).astype(int), 999)
    level = schedule.level(time)
    assert np.array_equal(level.a2.numpy(), schedule.alpha_bar[step])
    assert np.array_equal(level.s2.numpy(), 1 - schedule.alpha_bar[step])
    a, s = schedule(time)
    # torch's and numpy's square roots differ in the last bit
    assert np.allclose(a.numpy(), np.sqrt(schedule.alpha_bar)[step], rtol=3e-16, atol=0)
    assert np.allclose(s.numpy(), np.sqrt(1 - schedule.alpha_bar)[step], rtol=3e-16, atol=0)
    assert np.array_equal(schedule.condition(time).numpy(), step)


@pytest.mark.parametrize("steps", [2, 7, 1000, 4000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_step_to_time_and_back_for_every_step(steps, dtype):
    schedule = discrete("linear", steps=steps)
    step = torch.arange(steps)
    assert torch.equal(schedule.step(schedule.time_of(step).to(dtype)), step)


@pytest.mark.parametrize("schedule", ALL, ids=repr)
def test_snr_falls_and_log_snr_and_its_inverse_agree(schedule):
    time = schedule.grid(997)
    log_snr = schedule.log_snr(time)
    assert (log_snr.diff() < 0).all()
    a, s = schedule(time)
    finite = log_snr.isfinite()
    # log_snr is a difference of two logarithms of about 10, each rounded at 1e-16
    assert torch.allclose(log_snr[finite], (a**2 / s**2).log()[finite], rtol=0, atol=1e-10)
    assert torch.equal(schedule.snr(time), a**2 / s**2) or torch.allclose(schedule.snr(time), a**2 / s**2, rtol=1e-12)
    # a step's log-SNR leads back to the middle of the step, a continuous one to the very time (|du/dλ| < 1)
    assert torch.allclose(schedule.inverse(log_snr), time, rtol=0, atol=1e-12)


def test_inverse_finds_the_nearest_step_and_clamps():
    schedule = discrete("linear")
    log_snr = schedule.log_snr(schedule.grid())
    closer_to_400 = 0.6 * log_snr[400] + 0.4 * log_snr[401]
    far = torch.tensor([100.0, -100.0], dtype=torch.float64)
    found = schedule.step(schedule.inverse(torch.cat([closer_to_400[None], far])))
    assert found.tolist() == [400, 0, 999]
    assert nc.schedule("edm").inverse(far).tolist() == [0.0, 1.0]


@pytest.mark.parametrize("schedule", ALL, ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_values_are_computed_in_float64_whatever_the_dtype_of_time(schedule, dtype):
    time = torch.rand(64, generator=torch.Generator().manual_seed(0)).to(dtype)
    a, s = schedule(time)
    exact_a, exact_s = schedule(time.double())
    assert a.dtype == s.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(a, exact_a.to(a.dtype))
    assert torch.equal(s, exact_s.to(s.dtype))


def test_numbers_of_numpy_are_numbers():
    assert nc.schedule("linear", steps=np.int64(1000), beta_end=np.float32(0.02)).steps == 1000
    assert repr(nc.schedule("linear", steps=np.int64(10))) == repr(nc.schedule("linear", steps=10))


def test_edm_slope_is_not_rounded_to_the_dtype_of_time():
    assert nc.schedule("edm").slope(torch.tensor([0.5], dtype=torch.bfloat16)).item() == pytest.approx(2 * math.log(40_000), rel=1e-6)


def test_a_default_device_is_not_asked():
    with torch.device("meta"):
        assert nc.schedule("linear").areas() == Areas(219, 641)
        assert nc.SpeeD(schedule=nc.schedule("linear")).pmf(1000).device.type == "cpu"
        nc.Clock("linear", nc.SpeeD(), nc.ChangeAware(normalize=True)).plot_data()


def test_other_devices_get_their_own_tables():
    for schedule in ALL:
        time = torch.empty(5, device="meta")
        a, _ = schedule(time)
        assert a.device.type == schedule.condition(time).device.type == schedule.vlb(time).device.type == "meta"


def test_vlb_coefficients_are_those_in_the_literature():
    linear = discrete("linear")
    c = linear.vlb(linear.time_of(torch.tensor([0, 500, 999])))
    assert [f"{value:.2g}" for value in c.tolist()] == ["0.5", "0.0055", "0.01"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variance", ["fixed-large", "fixed-small"])
def test_vlb_coefficients_follow_from_the_posterior(name, variance):
    schedule = discrete(name)
    time = schedule.grid()
    posterior = schedule.posterior(time)
    sigma2 = posterior.large.clone() if variance == "fixed-large" else posterior.variance.clone()
    if variance == "fixed-small":
        sigma2[0] = sigma2[1]
    c = schedule.vlb(time, variance=variance)
    beta, alpha, alpha_bar = (torch.as_tensor(x) for x in (schedule.betas, schedule.alphas, schedule.alpha_bar))
    assert torch.allclose(c, beta**2 / (2 * sigma2 * alpha * (1 - alpha_bar)), rtol=1e-9)
    assert torch.allclose(schedule.vlb(time, target="x0", variance=variance), posterior.x0**2 / (2 * sigma2), rtol=1e-9)


def test_posterior_is_bayes_rule():
    """Against the joint Gaussian of (x_prev, x_t) given x0, on every schedule, over one step and over a jump."""
    for schedule in [nc.schedule("linear"), nc.schedule("cosine"), nc.schedule("flow"), nc.schedule("edm")]:
        time, previous = torch.tensor([0.7503], dtype=torch.float64), torch.tensor([0.4007], dtype=torch.float64)
        (a, s), (b, r) = schedule(time), schedule(previous)
        # x_t = (a/b)·x_prev + noise: cov(x_prev, x_t | x0) = (a/b)·r²
        cov, var_t = a / b * r**2, s**2
        posterior = schedule.posterior(time, previous)
        assert torch.allclose(posterior.x_t, cov / var_t, rtol=1e-12)
        assert torch.allclose(posterior.x0, b - cov / var_t * a, rtol=1e-10)
        assert torch.allclose(posterior.variance, r**2 - cov**2 / var_t, rtol=1e-10)
        assert torch.allclose(posterior.large, s**2 - (a / b * r) ** 2, rtol=1e-10)


def test_posterior_of_one_step_is_the_jump_to_the_step_before():
    schedule = discrete("cosine", steps=50)
    step = torch.arange(1, 50)
    one = schedule.posterior(schedule.time_of(step))
    jump = schedule.posterior(schedule.time_of(step), schedule.time_of(step - 1))
    for x, y in zip(one, jump, strict=True):
        assert torch.allclose(x, y, rtol=1e-9)
    first = schedule.posterior(schedule.time_of(torch.tensor([0])))
    assert (first.x0.item(), first.x_t.item(), first.variance.item()) == (pytest.approx(1.0), 0.0, 0.0)


@pytest.mark.parametrize("name", ["edm", "flow"])
def test_slope_is_the_derivative_of_log_snr(name):
    schedule = nc.schedule(name)
    time = torch.linspace(0.05, 0.95, 19, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(schedule.log_snr(time).sum(), time)
    assert torch.allclose(schedule.slope(time), -slope, rtol=1e-10)


def test_discrete_vlb_tends_to_the_continuous_one():
    """T·c_t -> ½|dλ/du|: on linear betas at T = 20,000 the two differ by O(β) = 1e-3."""
    schedule = discrete("linear", steps=20_000, beta_start=5e-6, beta_end=1e-3)
    time = schedule.grid()[200:-1]
    assert torch.allclose(schedule.vlb(time) * 20_000, schedule.slope(time) / 2, rtol=2e-3)


@pytest.mark.parametrize(("name", "peak", "converged"), [("linear", 219, 641), ("quadratic", 411, 828), ("cosine", 495, 958)])
def test_speed_areas(name, peak, converged):
    assert nc.schedule(name).areas() == Areas(peak, converged)


def test_areas_scale_with_the_number_of_steps():
    # the same β(u)·T at 2000 steps: the areas keep their place in time to one step of the coarser grid
    areas = nc.schedule("linear", steps=2000, beta_start=5e-5, beta_end=0.01).areas()
    assert abs(areas.peak / 2 - 219) <= 1
    assert abs(areas.converged / 2 - 641) <= 1


def test_increment_variance_is_the_papers_formula():
    schedule = discrete("linear")
    increments = schedule.increments()
    bar = schedule.alpha_bar
    assert np.allclose(increments.variance[:-1], 2 - bar[:-1] - bar[1:], rtol=0, atol=1e-15)
    # "change" is half the slope of that variance, half a step further on
    assert np.allclose(np.gradient(increments.variance)[1:-2], (increments.change[1:-2] + increments.change[2:-1]), rtol=1e-6, atol=1e-12)


def test_zero_terminal_snr_ends_at_zero_and_starts_where_it_did():
    plain, zero = discrete("linear"), discrete("linear", zero_terminal_snr=True)
    assert zero.alpha_bar[-1] == 0
    assert zero.alpha_bar[0] == pytest.approx(plain.alpha_bar[0], rel=1e-12)
    last = zero.grid()[-1:]
    assert zero.log_snr(last).item() == -math.inf
    assert zero.inverse(torch.tensor([-math.inf])).item() == pytest.approx(last.item())
    assert zero.vlb(last, target="x0").isfinite().all()
    assert zero.slope(zero.grid()).isfinite().all()
    posterior = zero.posterior(last)
    assert all(part.isfinite().all() for part in posterior)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1e-6, 0.5), min_size=2, max_size=60))
def test_any_betas_give_a_falling_snr_that_inverts(betas):
    schedule = Betas(betas)
    time = schedule.grid()
    log_snr = schedule.log_snr(time)
    assert (log_snr.diff() < 0).all()
    assert torch.equal(schedule.step(schedule.inverse(log_snr)), torch.arange(len(betas)))
    a, s = schedule(time)
    # 1-ᾱ is exact to one rounding of 1, relative to 1e-6 at the least
    assert torch.allclose(a**2 + s**2, torch.ones_like(a), rtol=0, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.0005, 0.1), st.floats(1, 500), st.floats(0, 1))
def test_edm_time_is_linear_in_log_sigma(lo, hi, u):
    schedule = nc.schedule("edm", sigma_min=lo, sigma_max=hi)
    time = torch.tensor([u], dtype=torch.float64)
    sigma = lo ** (1 - u) * hi**u
    a, s = schedule(time)
    assert a.item() == 1
    assert s.item() == pytest.approx(sigma, rel=1e-12)
    assert schedule.inverse(schedule.log_snr(time)).item() == pytest.approx(u, abs=1e-12)
    assert schedule.condition(time).item() == pytest.approx(math.log(sigma) / 4, rel=1e-6, abs=1e-6)


class Fake:
    """What a diffusers scheduler looks like from outside."""

    def __init__(self, betas=None, **config):
        if betas is not None:
            self.betas, self.alphas_cumprod = betas, (1 - betas).cumprod(0)
        self.config = type("Config", (), config)()


def test_a_scheduler_object_is_read_without_its_library():
    assert nc.schedule(Fake(torch.tensor([0.1, 0.2]))).steps == 2
    assert nc.schedule(Fake(sigma_min=0.01, sigma_max=10, sigma_data=0.5)) == nc.schedule("edm", sigma_min=0.01, sigma_max=10.0)
    assert nc.schedule(Fake(shift=3.0, num_train_timesteps=1000)) == Flow(condition_scale=1000.0)
    with pytest.raises(TypeError, match="got Fake"):
        nc.schedule(Fake())
    with pytest.raises(TypeError, match=r'got Tensor \(betas of your own: nc.schedule\("betas", betas=...\)\)'):
        nc.schedule(torch.tensor([0.1, 0.2]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nc.schedule("linaer"), ValueError, "unknown schedule 'linaer'; known: betas, cosine, edm"),
        (lambda: nc.schedule("linear", steps=1), ValueError, "at least 2, got 1"),
        (lambda: nc.schedule("linear", steps=10.0), ValueError, "whole number of at least 2, got 10.0"),
        (lambda: nc.schedule("linear", beta=3), TypeError, "takes no option 'beta'; allowed: steps, beta_start"),
        (lambda: nc.schedule("edm", steps=1000), TypeError, "takes no option 'steps'; allowed: sigma_min, sigma_max"),
        (lambda: nc.schedule(Flow(), steps=3), TypeError, "options go with the name of a schedule"),
        (lambda: nc.schedule("linear", beta_start=0.0), ValueError, "Linear: beta_start must be positive, got 0"),
        (lambda: nc.schedule("quadratic", beta_start=-1e-4), ValueError, "Quadratic: beta_start must be positive, got -0.0001"),
        (lambda: nc.schedule("scaled-linear", beta_end=2), ValueError, "noise must increase at every step.*has beta = 1.00"),
        (lambda: nc.schedule("linear", beta_end="2e-2"), TypeError, "Linear: beta_end must be a number, got '2e-2'"),  # as YAML reads it
        (lambda: nc.schedule("betas", betas=[0.1, -0.1]), ValueError, "step 1 has beta = -0.1"),
        (lambda: nc.schedule("betas", betas=[0.1, float("nan")]), ValueError, "step 1 has beta = nan"),
        (lambda: nc.schedule("betas", betas=[1.0, 0.1]), ValueError, "step 0 has beta = 1"),
        (lambda: nc.schedule("betas", betas=[[0.1]]), ValueError, r"one-dimensional, got shape \(1, 1\)"),
        (lambda: nc.schedule("edm", sigma_min=2.0, sigma_max=1.0), ValueError, "noise must increase, but sigma_min = 2.0"),
        (lambda: nc.schedule("edm", sigma_min=0.0), ValueError, "sigma_min must be positive, got 0"),
        (lambda: nc.schedule("flow")(torch.tensor([1.5])), ValueError, r"must lie in \[0, 1\], got values from 1.5"),
        (lambda: nc.schedule("flow")(torch.tensor([float("nan")])), ValueError, "got values from nan"),
        (lambda: nc.schedule("linear").snr(-0.1), ValueError, "got values from -0.1"),
        (lambda: nc.schedule("linear").vlb(torch.tensor([500])), TypeError, "time_of"),
        (lambda: nc.schedule("flow").slope(torch.tensor([1.5])), ValueError, r"must lie in \[0, 1\]"),
        (lambda: nc.schedule("edm").condition(torch.tensor([-1.0])), ValueError, r"must lie in \[0, 1\]"),
        (lambda: nc.schedule("flow").posterior(torch.tensor([0.1]), torch.tensor([0.5])), ValueError, "goes back in time"),
        (lambda: nc.schedule("betas", betas=[0.1]), ValueError, "at least 2 steps are needed, got 1"),
        (lambda: nc.schedule("betas", betas=[1e-17, 0.1]), ValueError, "noise must increase at every step"),
        (lambda: nc.schedule("linear")(torch.tensor([3])), TypeError, "time_of"),
        (lambda: discrete("linear").time_of(torch.tensor([1000])), ValueError, r"0\.\.999"),
        (lambda: discrete("linear").time_of(torch.tensor([0.5])), TypeError, "integer tensor"),
        (lambda: nc.schedule("linear").vlb(torch.tensor([0.5]), variance="learned"), ValueError, "known: fixed-large, fixed-small"),
        (lambda: nc.schedule("flow").posterior(torch.tensor([0.5])), ValueError, "pass the earlier time"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_step_may_be_a_plain_number():
    linear = discrete("linear")
    assert [int(linear.step(linear.time_of(step))) for step in (0, 500, 999)] == [0, 500, 999]


def test_every_name_builds_and_reprs_rebuild():
    for name in SCHEDULES:
        schedule = nc.schedule(name, betas=[0.1, 0.2]) if name == "betas" else nc.schedule(name)
        assert eval(repr(schedule), vars(nc.schedules)) == schedule
