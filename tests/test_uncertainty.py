"""The learned weighting: its formula, its gradient and what it converges to."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import noiseclock as nc
from forked import on_two
from noiseclock.core.loss_based import LossSecondMoment
from noiseclock.core.uncertainty import Uncertainty


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are small: on a busy machine threads would spend twenty times as long waiting for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def stirred(weighting: nc.Weighting = nc.Constant()) -> Uncertainty:
    """One whose u is not 0."""
    made = Uncertainty(weighting)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    return made


@pytest.mark.parametrize("given", [True, False])
def test_parameters_that_no_optimiser_has_are_told_of(given):
    model, weighting = nn.Linear(2, 2), Uncertainty()
    optimizer = torch.optim.SGD([*model.parameters(), *(weighting.parameters() if given else ())], 1e-3)
    clock = nc.Clock("linear", "uniform", weighting).attach(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(102):
            b = clock.draw(torch.randn(4, 2))
            clock.loss(b, model(b.x_t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [str(w.message) for w in told if "u is still 0 after 100 updates" in str(w.message)] == [str(w.message) for w in told]
    assert len(told) == (not given)


def test_a_batch_that_is_used_for_several_steps_is_weighted_by_the_present_u():
    weighting = stirred(nc.MinSNR(5))
    clock = nc.Clock("linear", "uniform", weighting)
    b = clock.draw(torch.randn(64, 2, generator=torch.Generator().manual_seed(0)))
    with torch.no_grad():
        weighting.net.bias += 3.0
    again = clock.at(b.x0, b.time, noise=b.noise)
    assert torch.equal(clock.loss(b, b.x_t), clock.loss(again, b.x_t))
    assert torch.allclose(again.weight, b.weight * math.exp(-3))


def plain_u(weighting: Uncertainty, schedule: nc.Schedule, time: torch.Tensor) -> np.ndarray:
    """u in numpy, float64, from the state."""
    f, phi, w, b = (weighting.state_dict()[name].double().numpy() for name in ("frequency", "phase", "weight", "bias"))
    log_sigma = np.clip(-schedule.log_snr(time).double().numpy() / 2, -10, 10)
    return (np.sqrt(2) * np.cos(2 * np.pi * (log_sigma[:, None] / 4 * f + phi)) * w).sum(1) + b


@pytest.mark.parametrize("schedule", ["linear", "edm", "flow"])
def test_at_first_the_loss_is_that_of_the_weighting(schedule):
    clock, plain = (nc.Clock(schedule, "uniform", w) for w in (Uncertainty(nc.MinSNR()), nc.MinSNR()))
    b, c = clock.draw(torch.zeros(64, 2)), plain.draw(torch.zeros(64, 2))
    prediction = torch.randn(64, 2)
    assert torch.equal(clock.loss(b, prediction), plain.loss(c, prediction))
    assert sum(p.numel() for p in clock.weighting.parameters()) == 129


@pytest.mark.parametrize("schedule", ["linear", "edm", "flow"])
def test_the_loss_is_its_formula(schedule):
    """(w·err/e^u + u)·base/p, with u from float32 waves: 128 terms of 0.1 with phases that hold 7 digits of at most 100, so u to 1e-4."""
    weighting = stirred(nc.P2())
    clock = nc.Clock(schedule, nc.Beta(1.5, 1.0), weighting, correct="importance")
    b = clock.draw(torch.zeros(64, 2))
    prediction = torch.randn(64, 2)
    error = (prediction - b.target).square().mean(1).double().numpy()
    u = plain_u(weighting, clock.schedule, b.time)
    assert np.abs(u).max() > 0.5
    w = nc.P2()(clock.schedule, b.time, clock.objective).numpy()
    expected = (w * error / np.exp(u) + u) * b.correction.numpy()
    assert np.allclose(clock.loss(b, prediction).detach().numpy(), expected, rtol=1e-3, atol=1e-3)
    assert np.allclose(b.weight.numpy(), w / np.exp(u), rtol=1e-3)
    assert not b.weight.requires_grad


def test_gradients_reach_the_model_and_u():
    """∂/∂prediction carries w/e^u, ∂/∂u is 1 - w·err/e^u; both times the correction."""
    weighting = stirred(nc.MinSNR())
    clock = nc.Clock("linear", nc.Beta(1.5, 1.0), weighting, correct="importance")
    b = clock.draw(torch.zeros(64, 2))
    prediction = torch.randn(64, 2, requires_grad=True)
    loss = clock.loss(b, prediction)
    loss.sum().backward()
    factor = (b.weight * b.correction)[:, None]
    assert torch.allclose(prediction.grad, ((prediction - b.target) * factor).detach().float(), rtol=1e-4, atol=1e-6)
    error = (prediction - b.target).square().mean(1).detach()
    of_u = (1 - b.weight * error) * b.correction
    assert weighting.net.bias.grad.item() == pytest.approx(of_u.sum().item(), rel=1e-4)
    # and by differences, along a random direction of the weights
    direction = torch.randn(128, generator=torch.Generator().manual_seed(2))
    values = []
    for h in (1e-2, -1e-2):
        other = copy.deepcopy(weighting)
        with torch.no_grad():
            other.net.weight += h * direction
        again = nc.Clock("linear", nc.Beta(1.5, 1.0), other, correct="importance")
        values.append(again.loss(again.draw(torch.zeros(64, 2), noise=b.noise), prediction.detach()).double().sum().item())
    slope = (weighting.net.weight.grad * direction).sum().item()
    # central differences of e^-u with steps of h·|∂u| = 0.1: relative error 0.1²/6
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(slope, rel=0.02)


@pytest.mark.parametrize(("schedule", "sampler"), [("edm", nc.LogNormal()), ("linear", LossSecondMoment())])
def test_u_becomes_the_logarithm_of_the_error(schedule, sampler):
    """A model with errors e(σ)·χ²₁, e over a factor of about ten: the minimum is at u = ln e(σ), w = 1.

    400 updates of 1024 with a falling rate; the last hundred or so average 1e5 samples of variance 2 over some 20 waves that the range can tell
    apart: √(2·20/1e5) = 0.02, and a little for what 400 updates leave. Asserted: 0.1 over 90 % of what is drawn.
    """
    weighting = Uncertainty()
    optimizer = torch.optim.Adam(weighting.parameters(), lr=1e-2, betas=(0.9, 0.99))
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: (1 - i / 400) ** 1.5)
    clock = nc.Clock(schedule, sampler, weighting).attach(optimizer)
    level = lambda time: torch.exp(1.5 * torch.tanh(clock.schedule.log_snr(time) / 4) - 1)  # noqa: E731
    noise = torch.Generator().manual_seed(0)
    for _ in range(400):
        b = clock.draw(torch.zeros(1024, 1))
        error = level(b.time).sqrt() * torch.randn(1024, dtype=torch.float64, generator=noise)
        clock.loss(b, b.target + error[:, None].float()).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        decay.step()
    time = clock.base.icdf(torch.linspace(0.05, 0.95, 200, dtype=torch.float64)) if clock.corrected else sampler_times(clock)
    u = weighting.log_error(clock.schedule, time).detach().double()
    assert (level(time).log().max() - level(time).log().min()) > 1.5
    assert (u - level(time).log()).abs().max().item() < 0.1
    # as a multiplier it is 1/e^u, which is what plots show
    assert np.allclose(clock.plot_data().w, np.exp(-weighting.log_error(clock.schedule, clock.schedule.grid()).detach().double().numpy()), rtol=1e-5)


def sampler_times(clock):
    return clock.sampler.icdf(torch.linspace(0.05, 0.95, 200, dtype=torch.float64))


def test_ends_of_schedules_without_noise_or_signal_are_finite():
    for schedule in (nc.schedule("linear", zero_terminal_snr=True), nc.schedule("flow")):
        weighting = stirred()
        u = weighting.log_error(schedule, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64))
        assert u.isfinite().all()
        u.sum().backward()
        assert all(p.grad.isfinite().all() for p in weighting.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_it_is_float32_whatever_the_default_dtype_is(dtype):
    torch.set_default_dtype(dtype)
    try:
        made = Uncertainty()
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = Uncertainty().state_dict()
    assert all(value.dtype == torch.float32 and torch.equal(value, wanted[name]) for name, value in made.state_dict().items())


def test_autocast_does_not_round_it():
    weighting, time = stirred(), torch.rand(50, dtype=torch.float64)
    schedule = nc.schedule("edm")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = weighting.log_error(schedule, time)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, weighting.log_error(schedule, time))


def test_chosen_times_are_weighted_alike():
    clock = nc.Clock("linear", "uniform", stirred())
    b = clock.at(torch.zeros(8, 2), 0.3)
    u = plain_u(clock.weighting, clock.schedule, b.time)
    assert np.allclose(clock.loss(b, b.target + 1).detach().numpy(), np.exp(-u) + u, rtol=1e-3)


def test_resuming_is_bit_exact(tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        weighting = Uncertainty(nc.MinSNR())
        optimizer = torch.optim.SGD([*model.parameters(), *weighting.parameters()], lr=1e-2)
        return nc.Clock("linear", LossSecondMoment(bins=8, refresh=2, warmup=2), weighting).attach(optimizer), model, optimizer

    def run(clock, model, optimizer, steps):
        out = []
        for _ in range(steps):
            b = clock.draw(torch.ones(32, 2))
            loss = clock.loss(b, model(b.x_t))
            loss.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            out.append(torch.stack([b.time, b.weight, b.correction, loss.detach().double()]))
        return out

    whole = make()
    expected = run(*whole, 12)
    first = make()
    part = run(*first, 6)
    torch.save({"clock": first[0].state_dict(), "model": first[1].state_dict()}, tmp_path / "state.pt")
    saved = torch.load(tmp_path / "state.pt", weights_only=True)
    second = make()
    second[1].load_state_dict(saved["model"])
    second[0].load_state_dict(saved["clock"])
    part += run(*second, 6)
    assert all(torch.equal(x, y) for x, y in zip(part, expected, strict=True))


def test_a_bad_state_is_refused_and_nothing_changes():
    clock = nc.Clock("linear", LossSecondMoment(bins=4), stirred())
    good = clock.state_dict()
    mine = good["weighting"]
    cases = [
        ({}, "Uncertainty: its state must hold bias, frequency, phase, weight, got nothing"),
        ({**mine, "more": 1}, "got bias, frequency, more"),
        ({**mine, "weight": mine["weight"][:5]}, r"'weight' of the state must be finite, of shape \(128,\)"),
        ({**mine, "bias": mine["bias"] * math.nan}, "'bias' of the state must be finite"),
    ]
    changed = {**good["sampler"], "count": good["sampler"]["count"] + 1}
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict({**good, "weighting": state, "sampler": changed})
    with pytest.raises(ValueError, match="got nothing"):
        clock.load_state_dict({name: value for name, value in good.items() if name != "weighting"})
    after = clock.state_dict()
    assert all(torch.equal(after["weighting"][name], value) for name, value in mine.items())
    assert torch.equal(after["sampler"]["count"], good["sampler"]["count"])
    # a weighting without a state refuses one; a clock saved before there were such states is read
    plain = nc.Clock("linear", "uniform")
    with pytest.raises(ValueError, match="has no state, got"):
        plain.load_state_dict({**plain.state_dict(), "weighting": mine})
    plain.load_state_dict({name: value for name, value in plain.state_dict().items() if name != "weighting"})


def test_repr_rebuilds_copies_are_their_own_and_errors_are_named():
    weighting = stirred(nc.MinSNR(4.0))
    assert eval(repr(weighting), {**vars(nc), "Uncertainty": Uncertainty}) == weighting
    again = copy.deepcopy(weighting)
    with torch.no_grad():
        again.net.bias += 1
    assert again.net.bias != weighting.net.bias
    random = torch.get_rng_state()
    Uncertainty()
    assert torch.equal(torch.get_rng_state(), random)
    with pytest.raises(ValueError, match="learns the scale of the weights itself"):
        Uncertainty(nc.MinSNR(normalize=True))
    with pytest.raises(TypeError, match="on top of a Weighting, got 'min-snr'"):
        Uncertainty("min-snr")
    with pytest.raises(ValueError, match=r"is on cpu and the data on meta; move it with .* before you make the optimiser"):
        nc.Clock("linear", "uniform", Uncertainty()).draw(torch.empty(4, 2, device="meta"), noise=torch.empty(4, 2, device="meta"))
    moved = Uncertainty().to("meta")
    clock = nc.Clock("linear", "uniform", moved)
    b = clock.draw(torch.empty(4, 2, device="meta"), noise=torch.empty(4, 2, device="meta"))
    assert clock.loss(b, b.noise).device.type == "meta"


def _train(rank, world_size, port, results):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        torch.manual_seed(0)
        weighting = Uncertainty()
        model = nn.Linear(2, 2)
        model.uncertainty = weighting.net
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=1e-2)
        clock = nc.Clock("linear", "uniform", weighting).attach(optimizer)
        for _ in range(5):
            b = clock.draw(torch.ones(16, 2))
            clock.loss(b, wrapped(b.x_t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[rank] = weighting.state_dict()
    finally:
        dist.destroy_process_group()


def test_ranks_agree_when_the_model_owns_it(free_port):
    results = on_two(_train, 2, free_port)
    first, second = results[0], results[1]
    assert first["bias"] != 0
    assert all(torch.equal(first[name], second[name]) for name in first)
