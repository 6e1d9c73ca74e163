"""Measurements against closed forms, and that nothing shows afterwards that they were made."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.gradient_variance import gradient_moments
from noiseclock.core.measure import gradient_variance, interdependence, loss_over_time
from noiseclock.core.objectives import OBJECTIVES

STEPS, DIM = 4, 64
FOUR_STEPS = nc.schedule("cosine", steps=STEPS)


class Separate(nn.Module):
    """pred = w[t]·x_t with parameters (STEPS, DIM): those of one step are no other's."""

    def __init__(self, values=(0.1, 0.4, 0.7, 1.0)) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values)[:, None].repeat(1, DIM))

    def forward(self, x_t, t):
        return self.w[t] * x_t


class Shared(nn.Module):
    """pred = w·x_t at every time."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((DIM,), 0.5))

    def forward(self, x_t, t):
        return self.w * x_t


class Disturbable(nn.Module):
    """Dropout, batch norm, a frozen layer and conditioning."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(0.5), nn.Linear(16, 2))
        self.frozen = nn.Linear(1, 1).requires_grad_(False)

    def forward(self, x_t, t, label):
        return self.net(torch.cat([x_t, t[:, None].to(x_t) / 1000, self.frozen(label)], 1))


def data(n: int = 4096, std: float = 1.5) -> torch.Tensor:
    return std * torch.randn(n, DIM, generator=torch.Generator().manual_seed(0))


def closed_form(schedule, w, std: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss, Tr Var g and E‖g‖² of pred = w·x, x = a·x0 + s·eps, at each step.

    With r = w·x - eps and v = E x² = a²σ²+s², one dimension has E r² = w²v - 2ws + 1, E rx = wv - s and, all being Gaussian,
    Var(rx) = E r²·E x² + (E rx)². The gradient of the mean over DIM dimensions is 2rx/DIM in each of them, all independent.
    """
    a, s = (c.numpy() for c in schedule(schedule.grid()))
    v = a**2 * std**2 + s**2
    r2, rx = w**2 * v - 2 * w * s + 1, w * v - s
    variance = 4 / DIM * (r2 * v + rx**2)
    return r2, variance, variance + 4 / DIM * rx**2


def test_gradient_variance_of_a_linear_model_is_its_closed_form():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    model = Separate()
    found = gradient_variance(clock, model, data(), bins=STEPS, samples=3200, pairs=100)
    _, variance, squared_norm = closed_form(FOUR_STEPS, np.array([0.1, 0.4, 0.7, 1.0]))
    # docstring of gradient_moments: k = 100 pairs, D = 64, m = 16 and κ < 14/64 (r·x has at most 15 for its kurtosis): 2.0 %; five of these
    assert np.abs(found.variance / variance - 1).max() < 0.10
    assert np.abs(found.squared_norm / squared_norm - 1).max() < 0.10
    # the error that it states is the one that it has
    assert np.all(np.abs(found.variance - variance) < 5 * found.error)
    assert found.error.max() / variance.max() < 0.03
    assert found.time.tolist() == [0.125, 0.375, 0.625, 0.875]


def test_gradient_variance_is_unbiased_however_the_samples_are_halved():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    _, variance, squared_norm = closed_form(FOUR_STEPS, 0.5)
    for pairs in (64, 16, 4):
        means = np.mean(
            [gradient_variance(clock, Shared(), data(1024), bins=STEPS, samples=128, pairs=pairs, seed=seed)[1:3] for seed in range(10)], 0
        )
        # 10 runs with the same data and other noise, at least 40 pairs in all: 2.8 %, at κ = 14/64 another 1.4 %; four of these
        assert np.abs(means / (variance, squared_norm) - 1).max() < 0.13


def test_one_sample_in_each_half_gives_the_mean_of_the_squared_norms():
    """Against autograd, sample by sample, with the very same samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    predict = lambda x_t, t: model(x_t)  # noqa: E731
    clock = nc.Clock("linear", "uniform")
    x0, noise = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    time = torch.tensor([0.3], dtype=torch.float64)
    probe = nc.Probe(predict, clock.schedule, clock.objective, x0, noise=noise, modules=[model])
    variance, squared_norm = gradient_moments(probe, time, 1)[:, 0].tolist()
    gradients = []
    for i in range(2):
        b = clock.at(x0[i : i + 1], time, noise=noise[i : i + 1])
        gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(clock.loss(b, predict(b.x_t, b.t)).mean(), list(model.parameters()))]))
    g, h = gradients
    assert squared_norm == pytest.approx(((g @ g + h @ h) / 2).item(), rel=1e-12)
    assert variance == pytest.approx(((g - h) @ (g - h) / 2).item(), rel=1e-12)


def test_weighted_gradients_carry_the_weight():
    clock = nc.Clock(FOUR_STEPS, "uniform", nc.MinSNR(2, normalize=True))
    plain, weighted = (gradient_variance(clock, Separate(), data(), bins=STEPS, samples=16, weighted=w) for w in (False, True))
    w = clock.plot_data().w
    assert np.allclose(weighted.variance, plain.variance * w**2, rtol=1e-12)
    assert np.allclose(weighted.error, plain.error * w**2, rtol=1e-12)


def test_loss_over_time_of_a_linear_model():
    clock = nc.Clock(FOUR_STEPS, "uniform", nc.MinSNR(2))
    model = Separate()
    found = loss_over_time(clock, model, data(1000), times=STEPS, repeats=2, batch=96)
    loss, _, _ = closed_form(FOUR_STEPS, np.array([0.1, 0.4, 0.7, 1.0]))
    assert np.all(np.abs(found.loss - loss) < 5 * found.error)
    assert np.all(found.error < 0.02 * loss)
    assert np.allclose(found.weighted, found.loss * clock.plot_data().w, rtol=1e-12)
    # batches change nothing, and the last one is not counted twice
    whole = loss_over_time(clock, model, data(1000), times=[0.125, 0.375, 0.625, 0.875], repeats=2, batch=1000)
    assert np.allclose(whole.loss, found.loss, rtol=1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_any_schedule_objective_and_shape(schedule, objective):
    model = nn.Conv2d(3, 3, 3, padding=1)
    clock = nc.Clock(schedule, "uniform", objective=objective)
    predict = lambda x_t, t: model(x_t)  # noqa: E731
    x0 = torch.randn(6, 3, 4, 4)
    assert np.isfinite(loss_over_time(clock, predict, x0, times=5, batch=4).loss).all()
    assert np.isfinite(gradient_variance(clock, predict, x0, bins=3, samples=8, pairs=2)[:3]).all()


def test_training_one_interval_moves_nothing_where_parameters_are_separate():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    model = Separate(values=(0.9, 0.9, 0.1, 0.1))
    found = interdependence(clock, model, torch.optim.Adam(model.parameters(), lr=0.01), data(512), interval=(0.0, 0.25), updates=10, times=STEPS)
    # Adam leaves alone what has neither a gradient nor a history
    assert found.change[1:].tolist() == [0, 0, 0]
    assert found.change[0] < -0.02
    assert np.array_equal(found.change, found.after - found.before)


def test_training_one_interval_moves_everything_where_parameters_are_shared():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    model = Shared()
    found = interdependence(clock, model, torch.optim.SGD(model.parameters(), lr=1.0), data(512), interval=(0.75, 1.0), updates=10, times=STEPS)
    assert found.change[3] < -0.02
    # the best w at the noisy end is s/v near 1, and far too large at the clean one
    assert found.change[0] > 0.1


def test_updates_inside_autocast_see_the_weights_of_the_update_before():
    def found(bf16: bool):
        torch.manual_seed(0)
        model, label = Disturbable(), torch.rand(64, 1)
        clock, x0 = nc.Clock("linear", "uniform"), torch.randn(64, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            before = model.eval()(x0, torch.zeros(64), label)
            change = interdependence(clock, model, optimizer, x0, cond=label, interval=(0.0, 1.0), updates=40, times=5).change
            assert torch.equal(model(x0, torch.zeros(64), label), before)
        return change

    exact, rounded = found(False), found(True)
    assert exact.mean() < -0.4
    # bfloat16 has three digits; forty updates along the first one's gradient miss by more than what was learned
    assert np.abs(rounded - exact).max() < 0.02


MEASURE = {
    "loss": lambda clock, predict, optimizer, x0, **more: loss_over_time(clock, predict, x0, times=7, batch=8, **more),
    "variance": lambda clock, predict, optimizer, x0, **more: gradient_variance(clock, predict, x0, bins=3, samples=8, pairs=2, **more),
    "interdependence": lambda clock, predict, optimizer, x0, **more: interdependence(
        clock, predict, optimizer, x0, updates=3, times=7, batch=8, **more
    ),
    "utility": lambda clock, predict, optimizer, x0, **more: nc.measure.utility_over_time(clock, predict, optimizer, x0, bins=2, probes=2, **more),
}
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("measure", MEASURE.values(), ids=MEASURE)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_run_that_was_measured_goes_on_as_if_it_was_not(measure, make, steps_before):
    def run(measured: bool):
        torch.manual_seed(0)
        model = Disturbable()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        clock = nc.Clock("linear", nc.LogitNormal()).attach(optimizer)
        x0, label = torch.randn(20, 2), torch.rand(20, 1)
        for i in range(steps_before + 3):
            b = clock.draw(x0, cond=label)
            clock.loss(b, model(b.x_t, b.t, b.cond)).mean().backward()
            if i == steps_before and measured:  # gradients stand there
                flags = [m.training for m in model.modules()]
                held = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
                assert held
                state = {name: value.clone() for name, value in model.state_dict().items()}
                moments = {id(x) for s in optimizer.state.values() for x in s.values()}
                kept = copy.deepcopy(optimizer.state_dict())
                random = torch.get_rng_state()
                measure(clock, model, optimizer, x0, cond=label)
                assert flags == [m.training for m in model.modules()]
                assert all(p.grad is g and torch.equal(g, bits) for p, g, bits in held)
                assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
                assert moments == {id(x) for s in optimizer.state.values() for x in s.values()}
                assert str(kept) == str(optimizer.state_dict())
                assert torch.equal(random, torch.get_rng_state())
                assert all(p.grad is None for p in model.frozen.parameters())
                assert clock.updates == steps_before
            optimizer.step()
            optimizer.zero_grad()
        return model.state_dict(), clock.state_dict(), optimizer.state_dict()

    def flat(x):
        if isinstance(x, dict):
            return [leaf for value in x.values() for leaf in flat(value)]
        return [leaf for value in x for leaf in flat(value)] if isinstance(x, list) else [x]

    first, second = flat(list(run(True))), flat(list(run(False)))
    assert len(first) == len(second)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(first, second, strict=True))


def test_measurements_repeat_with_their_seed():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    for measure in MEASURE.values():
        model = Shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, again, other = (measure(clock, model, optimizer, data(32), seed=seed) for seed in (1, 1, 2))
        assert np.array_equal(first[1], again[1])
        assert not np.array_equal(first[1], other[1])


def test_an_error_in_the_model_restores_it_too():
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock(FOUR_STEPS, "uniform").attach(optimizer)
    calls = []

    def predict(x_t, t):
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("out of memory")
        return model(x_t, t)

    with pytest.raises(RuntimeError, match="out of memory"):
        interdependence(clock, predict, optimizer, data(16), times=STEPS, model=model)
    assert torch.equal(model.w, torch.full((DIM,), 0.5))
    assert model.w.grad is None
    optimizer.step()
    assert clock.updates == 1  # its hook is back


@pytest.mark.parametrize("name", MEASURE)
def test_what_is_reached_besides_a_named_model_is_restored_too(name):
    """A learned weighting, whose parameters may have an optimiser of their own, what runs beside the model, and the states that it draws from."""
    torch.manual_seed(0)
    model, beside, weighting = nn.Linear(2, 2), nn.BatchNorm1d(2), nc.Uncertainty()

    def predict(x_t, t):
        return model(beside(x_t)) * (1 + random.random() + np.random.rand())  # noqa: NPY002 - as a user's model may

    clock = nc.Clock("linear", "uniform", weighting)
    for measured in (False, True):
        for p in (*weighting.parameters(), *beside.parameters()):
            p.grad = torch.ones_like(p) if measured else None
        state = {name: value.clone() for name, value in beside.state_dict().items()}
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert MEASURE[name](clock, predict, optimizer, torch.randn(16, 2), model=model)[1].all()
        for p in (*weighting.parameters(), *beside.parameters()):
            assert p.grad is None if not measured else torch.equal(p.grad, torch.ones_like(p))
        assert all(torch.equal(value, state[name]) for name, value in beside.state_dict().items())
        assert python == random.getstate()
        assert str(numpy) == str(np.random.get_state())  # noqa: NPY002


def test_measured_under_no_grad_and_bfloat16():
    clock = nc.Clock(FOUR_STEPS, "uniform")
    model = nn.Linear(DIM, DIM)
    predict = lambda x_t, t: model(x_t)  # noqa: E731
    exact = gradient_variance(clock, predict, data(64), bins=STEPS)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        rough = gradient_variance(clock, predict, data(64), bins=STEPS)
    assert not np.array_equal(exact.variance, rough.variance)
    assert np.allclose(exact.variance, rough.variance, rtol=0.02)  # eight bits: 0.4 % in each factor


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c, m, x: gradient_variance(c, m, x, samples=4, pairs=4), ValueError, "a pair takes at least two samples"),
        (lambda c, m, x: gradient_variance(c, m, x[:1]), ValueError, "at least two samples"),
        (lambda c, m, x: gradient_variance(c, m.requires_grad_(False), x), ValueError, "no trained parameter"),
        (lambda c, m, x: gradient_variance(c, lambda x_t, t: x_t, x, model=m), ValueError, "depends on no trained parameter"),
        (lambda c, m, x: loss_over_time(c, torch.sin, x), ValueError, "pass it as model="),
        (lambda c, m, x: gradient_variance(c, m, x, bins=0), ValueError, "at least one time or bin is needed, got 0"),
        (lambda c, m, x: loss_over_time(c, m, x, times=0), ValueError, "at least one time or bin is needed, got 0"),
        (lambda c, m, x: loss_over_time(c, m, x, times=[]), ValueError, r"at least one time or bin is needed, got \[\]"),
        (lambda c, m, x: loss_over_time(c, m, x, times=[1.5]), ValueError, r"must lie in \[0, 1\]"),
        (lambda c, m, x: loss_over_time(c, m, x, repeats=0), ValueError, "must be at least 1"),
        (lambda c, m, x: interdependence(c, m, None, x, interval=(0.5, 0.2)), ValueError, "0 <= lo < hi <= 1"),
        (lambda c, m, x: interdependence(c, m, None, x), ValueError, "interdependence trains the model for a moment, so it needs its optimiser"),
        (lambda c, m, x: interdependence(c, m, [], x), ValueError, "interdependence trains the model for a moment, so it needs its optimiser"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(nc.Clock(FOUR_STEPS, "uniform"), Shared(), data(8))


def test_the_number_of_times_may_be_a_numpy_number():
    clock, model = nc.Clock(FOUR_STEPS, "uniform"), Shared()
    assert np.array_equal(loss_over_time(clock, model, data(8), times=np.int64(2)).time, [0.25, 0.75])


# --- utility ------------------------------------------------------------------------------------------------------------------------------


def test_the_utility_is_the_closed_form_with_the_objective_and_the_weight_that_are_given():
    """With parameters of their own a step at t helps that term of the target alone: by lr·w·v·‖E g_t‖²/T, w of the training, v of the target."""
    values = (0.1, 0.4, 0.7, 1.0)
    _, variance, squared = closed_form(FOUR_STEPS, np.array(values))
    model = Separate(values)
    clock = nc.Clock(FOUR_STEPS, "uniform", "min-snr")
    before = next(model.parameters()).detach().clone()
    found = nc.measure.utility_over_time(clock, model, torch.optim.SGD(model.parameters(), lr=0.5), data(4000), target="vlb", bins=STEPS, probes=8)
    time = FOUR_STEPS.grid()
    w, v = (weighting(FOUR_STEPS, time, clock.objective).numpy() for weighting in (clock.weighting, nc.VLB()))
    wanted = 0.5 * w * v * (squared - variance) / STEPS
    assert (np.abs(found.utility - wanted) < 5 * found.error + 0.01 * wanted).all()
    assert np.abs(found.utility / wanted - 1)[:3].max() < 0.1  # in the last one the mean of the gradient is small beside its scatter
    assert torch.equal(next(model.parameters()), before)


def test_the_utility_is_that_of_the_weight_that_is_trained_with():
    """A normalised one is divided by its mean over the four steps. The prices of a sampler are those of the weight as it is."""
    model, x0 = Separate((0.1, 0.4, 0.7, 1.0)), data(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    utilities, curves = [], []
    for normalize in (False, True):
        clock = nc.Clock(FOUR_STEPS, nc.VarianceOptimal(bins=STEPS), nc.MinSNR(2, normalize=normalize)).attach(optimizer)
        utilities.append(nc.measure.utility_over_time(clock, model, optimizer, x0, bins=STEPS, probes=2).utility)
        clock.probe(x0, model)
        clock.sampler.after(clock._probe, None)
        curves.append(clock.sampler.curve[0])
    mean = nc.MinSNR(2)(FOUR_STEPS, FOUR_STEPS.grid(), clock.objective).mean().item()
    assert abs(mean - 1) > 0.1
    assert np.allclose(utilities[1] * mean, utilities[0], rtol=1e-12)
    assert torch.equal(*curves)


@pytest.mark.filterwarnings("error")
def test_a_wrapped_optimizer_has_the_metric_of_the_one_inside():
    model = Separate((0.1, 0.4, 0.7, 1.0))
    bare = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped = SimpleNamespace(optimizer=bare, param_groups=bare.param_groups)  # as accelerate's
    clock = nc.Clock(FOUR_STEPS, "uniform")
    one, other = (nc.measure.utility_over_time(clock, model, optimizer, data(64), bins=STEPS, probes=2) for optimizer in (bare, wrapped))
    assert np.array_equal(one.utility, other.utility)


def test_utility_says_what_it_cannot_know():
    model = Separate((0.1, 0.4, 0.7, 1.0))
    clock, x0 = nc.Clock(FOUR_STEPS, "uniform"), data(16)
    with pytest.raises(ValueError, match="unknown target 'fid'; known: min-snr, simple, vlb"):
        nc.measure.utility_over_time(clock, model, torch.optim.SGD(model.parameters()), x0, target="fid")
    with pytest.raises(ValueError, match="bins and probes must be at least 1"):
        nc.measure.utility_over_time(clock, model, torch.optim.SGD(model.parameters()), x0, probes=0)
    with pytest.warns(UserWarning, match="the metric of RMSprop is not known, so gradients are measured without preconditioning"):
        nc.measure.utility_over_time(clock, model, torch.optim.RMSprop(model.parameters()), x0, probes=1, bins=2)
