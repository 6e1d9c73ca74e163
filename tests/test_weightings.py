import dataclasses
import math

import numpy as np
import pytest
import scipy.integrate
import torch
from hypothesis import given, settings, strategies as st

import noiseclock as nc
from noiseclock.core.batch import column
from noiseclock.core.objectives import OBJECTIVES, squared_error
from noiseclock.core.weightings import CAP, WEIGHTINGS

LINEAR, COSINE, EDM, FLOW = (nc.schedule(name) for name in ("linear", "cosine", "edm", "flow"))
ZERO = nc.schedule("linear", zero_terminal_snr=True)
EPS = nc.objective("eps")
X0 = nc.objective("x0")

WEIGHTS = [
    *(make() for make in WEIGHTINGS.values()),
    *(nc.Constant(on=on) for on in OBJECTIVES),
    nc.MinSNR(1.0),
    nc.P2(k=2.0, gamma=0.5),
    nc.P2(gamma=1.7),
    nc.Sigmoid(per="time"),
    nc.VLB("fixed-small"),
    nc.ChangeAware(lam=1.0),
]
every_weight = pytest.mark.parametrize("weight", WEIGHTS, ids=repr)

# the ε form of each weight as the table of the literature gives it, from SNR alone
EPS_FORM = {
    nc.Constant(on="eps"): lambda snr: np.ones_like(snr),
    nc.MinSNR(): lambda snr: np.minimum(snr, 5) / snr,
    nc.SoftMinSNR(): lambda snr: 4 / (snr + 4),
    nc.P2(): lambda snr: 1 / (1 + snr),
    nc.P2(k=2.0, gamma=0.5): lambda snr: 1 / (2 + snr) ** 0.5,
    nc.Debiased(): lambda snr: 1 / np.sqrt(np.minimum(snr, 1000)),
    nc.TruncatedSNR(): lambda snr: np.maximum(1, 1 / snr),
    nc.Sigmoid(per="time"): lambda snr: 1 / (1 + np.exp(np.log(snr) - 2)),
    nc.EDMWeight(): lambda snr: (snr + 4) / snr,
    nc.Constant(on="x0"): lambda snr: 1 / snr,
    nc.Constant(on="v"): lambda snr: (snr + 1) / snr,
}


@pytest.mark.parametrize("weight", EPS_FORM, ids=repr)
def test_each_weight_is_its_formula(weight):
    time = LINEAR.grid()
    snr = LINEAR.snr(time).numpy()
    expected = np.minimum(EPS_FORM[weight](snr), CAP)
    assert np.allclose(weight(LINEAR, time, EPS).numpy(), expected, rtol=1e-10)
    assert np.allclose(weight(LINEAR, time, X0).numpy(), np.minimum(EPS_FORM[weight](snr) * snr, CAP), rtol=1e-10)


def test_weights_that_follow_the_schedule():
    time = LINEAR.grid()
    assert torch.equal(nc.VLB()(LINEAR, time, EPS), LINEAR.vlb(time))
    slope = LINEAR.slope(time)
    assert torch.allclose(nc.Sigmoid()(LINEAR, time, EPS), nc.Sigmoid(per="time")(LINEAR, time, EPS) * slope, rtol=1e-12)


@pytest.mark.parametrize("lam", [0.5, 0.6, 1.0])
def test_change_aware_runs_from_one_minus_lambda_to_lambda(lam):
    weight = nc.ChangeAware(lam)(LINEAR, LINEAR.grid(), EPS)
    assert weight.max().item() == pytest.approx(lam, abs=1e-12)
    assert weight.min().item() == pytest.approx(1 - lam, abs=1e-12)
    if lam > 0.5:
        assert weight.argmax().item() == 219


def test_edm_weight_is_the_published_one_in_sigma():
    sigma = torch.tensor([0.002, 0.1, 1.0, 80.0], dtype=torch.float64)
    time = EDM.inverse(-2 * sigma.log())
    expected = (sigma**2 + 0.25) / (sigma * 0.5) ** 2
    assert torch.allclose(nc.EDMWeight()(EDM, time, X0), expected, rtol=1e-9)
    assert torch.allclose(nc.EDMWeight()(EDM, time, nc.objective("edm")), torch.ones(4, dtype=torch.float64), rtol=1e-12)


def test_edm_weight_has_the_sigma_data_of_the_objective_unless_it_is_given_one():
    sigma = torch.tensor([0.002, 0.1, 1.0, 80.0], dtype=torch.float64)
    time, objective = EDM.inverse(-2 * sigma.log()), nc.objective("edm", sigma_data=1.0)
    ones = torch.ones(4, dtype=torch.float64)
    assert torch.allclose(nc.EDMWeight()(EDM, time, objective), ones, rtol=1e-12)
    assert torch.allclose(nc.EDMWeight(1.0)(EDM, time, objective), ones, rtol=1e-12)
    # one that is given counts: c_out² of the objective times the weight on x0
    assert torch.allclose(nc.EDMWeight(0.5)(EDM, time, objective), sigma**2 / (sigma**2 + 1) * (1 / sigma**2 + 4), rtol=1e-9)


# Constant() is 1 on whatever is trained: five objectives by intention
@pytest.mark.parametrize("weight", [w for w in WEIGHTS if w != nc.Constant()], ids=repr)
@pytest.mark.parametrize("schedule", [LINEAR, COSINE, FLOW], ids=["linear", "cosine", "flow"])
def test_weight_times_loss_is_one_number_in_every_target(weight, schedule):
    """One denoiser, the same error of x0 read through five targets: on a VP schedule and on flow. Where a weight is capped they must differ."""
    generator = torch.Generator().manual_seed(0)
    time = schedule.grid()[3:-3:7]
    n = len(time)
    x0, noise, error = (torch.randn(n, 3, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    a, s = (column(c, x0) for c in schedule(time))
    x_t = a * x0 + s * noise
    x0_predicted = x0 + 0.1 * error
    eps_predicted = (x_t - a * x0_predicted) / s
    products, capped = {}, torch.zeros(n, dtype=torch.bool)
    for name, make in OBJECTIVES.items():
        objective = make()
        # every target is linear in (x0, noise), so the prediction of this denoiser is the target at its own x0 and noise
        prediction = objective.target(x0_predicted, eps_predicted, a, s)
        w = weight(schedule, time, objective)
        capped |= w >= CAP
        products[name] = w * squared_error(prediction, objective.target(x0, noise, a, s))
    assert capped.float().mean() < 0.2
    for name, product in products.items():
        assert torch.allclose(product[~capped], products["x0"][~capped], rtol=1e-5, atol=0), name


@every_weight
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_weights_are_finite_and_not_negative_at_snr_0_and_infinity(weight, objective):
    for schedule in (ZERO, FLOW, LINEAR, EDM):
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
        for time in (ends, ends.float(), schedule.grid()):
            w = weight(schedule, time, nc.objective(objective))
            assert w.isfinite().all()
            assert (w >= 0).all()
            assert (w <= CAP).all()


@every_weight
def test_weights_on_two_steps(weight):
    for zero in (False, True):
        schedule = nc.schedule("linear", steps=2, zero_terminal_snr=zero)
        w = weight(schedule, schedule.grid(), EPS)
        assert w.isfinite().all()
        assert (w > 0).any()


@pytest.mark.parametrize("weight", [nc.Sigmoid(normalize=True), nc.VLB(normalize=True), nc.Debiased(normalize=True)], ids=repr)
@pytest.mark.parametrize("name", ["eps", "v", "flow"])
def test_normalized_weights_that_are_steep_at_the_ends_of_a_flow(weight, name):
    """Against adaptive quadrature in logit(u), where these weights are smooth up to the cap."""
    clock = nc.Clock(FLOW, "uniform", weight, name)

    def integrand(x):
        u = torch.sigmoid(torch.tensor([x], dtype=torch.float64))
        return (clock.at(torch.zeros(1, 1), u.clamp(max=1 - 1e-16)).weight * u * (1 - u)).item()

    cap = [-math.log(1e6), math.log(1e6)]
    mean, _ = scipy.integrate.quad(integrand, -35, 35, points=cap, limit=500)
    assert mean == pytest.approx(1, abs=2e-3)


@settings(max_examples=60, deadline=None)
@given(st.floats(0, 1), st.floats(0.01, 100), st.sampled_from(sorted(OBJECTIVES)))
def test_min_snr_never_exceeds_the_simple_loss(u, gamma, name):
    time = torch.tensor([u], dtype=torch.float64)
    simple = nc.Constant(on="eps")(FLOW, time, nc.objective(name))
    assert nc.MinSNR(gamma)(FLOW, time, nc.objective(name)).item() <= simple.item() * (1 + 1e-12)


@pytest.mark.parametrize("sampler", [nc.Uniform(), nc.LogitNormal(), nc.SpeeD()], ids=repr)
@pytest.mark.parametrize("schedule", [LINEAR, FLOW], ids=["linear", "flow"])
@pytest.mark.parametrize("correct", ["none", "importance"])
def test_normalized_weights_have_mean_one_under_the_sampler_in_use(sampler, schedule, correct):
    """Exact on steps; in continuous time by a grid in logit(u) there and an even one here, which agree to 1e-4 for this weight."""
    clock = nc.Clock(schedule, sampler, nc.MinSNR(5.0, normalize=True), correct=correct)
    data = clock.plot_data(20_000)
    # effective = p·w, or base·w when corrected; its mean over time is the mean loss weight
    assert data.effective.mean() == pytest.approx(1, abs=1e-9 if schedule is LINEAR else 1e-4)
    plain = nc.Clock(schedule, sampler, nc.MinSNR(5.0), correct=correct).plot_data(20_000)
    assert abs(plain.effective.mean() - 1) > 0.01  # so that there was something to do
    assert np.allclose(data.w / data.w[50], plain.w / plain.w[50])


def test_normalized_weights_follow_an_annealed_sampler():
    clock = nc.Clock(LINEAR, nc.Annealed(nc.Truncated(nc.Uniform(), 0.0, 0.2), start=0, stop=4), nc.P2(normalize=True), correct="none")
    for _ in range(5):
        data = clock.plot_data()
        assert data.effective.mean() == pytest.approx(1, abs=1e-9)
        clock.updated()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nc.weighting("min-snrr"), ValueError, "unknown weighting 'min-snrr'; known: change-aware, constant"),
        (lambda: nc.weighting("min-snr", k=1), TypeError, "takes no option 'k'; allowed: gamma, normalize"),
        (lambda: nc.weighting(nc.MinSNR(5.0), gamma=3.0), TypeError, "options go with the name of a weighting"),
        (lambda: nc.MinSNR("5"), TypeError, "gamma must be a number, got '5'"),
        (lambda: nc.Sigmoid(bias=math.nan), ValueError, "bias must be finite"),
        (lambda: nc.weighting(5), TypeError, "got int"),
        (lambda: nc.MinSNR(0.0), ValueError, "MinSNR: gamma must be positive, got 0"),
        (lambda: nc.MinSNR(-1.0), ValueError, "got -1"),
        (lambda: nc.SoftMinSNR(math.nan), ValueError, "got nan"),
        (lambda: nc.P2(gamma=0.0), ValueError, "P2: gamma must be positive"),
        (lambda: nc.P2(k=0.0), ValueError, "P2: k must be positive"),
        (lambda: nc.ChangeAware(0.4), ValueError, r"lam must lie in \[0.5, 1\], got 0.4"),
        (lambda: nc.ChangeAware(1.1), ValueError, "got 1.1"),
        (lambda: nc.VLB("learned"), ValueError, "known: fixed-large, fixed-small"),
        (lambda: nc.Sigmoid(per="step"), ValueError, "known: log-snr, time"),
        (lambda: nc.Constant(on="w"), ValueError, "unknown target 'w'; known: edm, eps, flow, v, x0"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_reprs_rebuild():
    for weight in WEIGHTS:
        assert eval(repr(weight), vars(nc)) == weight
        assert dataclasses.replace(weight, normalize=True).normalize
