"""GradientVariance against the closed form of test_measure's linear model, and held to the samplers' contract."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import torch
import torch.distributed as dist
from torch import nn

import noiseclock as nc
from forked import on_two
from noiseclock.core.gradient_variance import GradientVariance, gradient_moments
from test_measure import FOUR_STEPS, STEPS, Disturbable, Separate, closed_form, data

VALUES = (0.1, 0.4, 0.7, 1.0)


def train(clock, model, optimizer, steps, x0, label=None):
    times = []
    for _ in range(steps):
        b = clock.draw(x0, predict=model, cond=label)
        times.append(b.time)
        clock.loss(b, model(b.x_t, b.t) if label is None else model(b.x_t, b.t, label)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return times


def still(sampler, model, **place):
    """A clock whose optimiser does not move the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return nc.Clock(FOUR_STEPS, sampler, **place).attach(optimizer), optimizer


def expected(floor: float) -> np.ndarray:
    variance = closed_form(FOUR_STEPS, np.array(VALUES))[1]
    return (1 - floor) * variance / variance.sum() + floor / STEPS


def test_the_density_becomes_the_variance_of_separate_parameters():
    """Theorem 1's setting: p is the analytic variance, not its root, above the floor."""
    clock, optimizer = still(GradientVariance(bins=STEPS, samples=3200, pairs=100, every=3, floor=0.1), model := Separate(VALUES))
    assert not clock.corrected
    assert clock.plot_data().p.tolist() == [1.0] * STEPS
    found = []
    for i in range(5):
        train(clock, model, optimizer, 1 if i == 0 else 3, data(512))
        found.append(clock.plot_data().p / STEPS)
        # 2 % as in test_measure, and twice that between two bins; with 512 samples 32 at a time each is seen six times: κ's part is larger
        assert np.abs(found[-1] / expected(0.1) - 1).max() < 0.15
    assert not np.array_equal(found[0], found[1])  # other noise each time
    assert np.abs(np.mean(found, 0) / expected(0.1) - 1).max() < 0.10


class Small(Separate):
    """With memory for the gradients of four samples."""

    def __init__(self) -> None:
        super().__init__(VALUES)
        self.sizes: list[int] = []

    def forward(self, x_t, t):
        if not self.training:
            self.sizes.append(len(x_t))
            if len(x_t) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return super().forward(x_t, t)


@pytest.mark.parametrize("rows", [None, 4, 3])
def test_no_more_rows_than_memory_has_and_the_same_variance(rows):
    """Rows that memory lacks were asked for, whatever `probe_rows` was: training stopped at the first estimate."""
    sampler = GradientVariance(bins=STEPS, samples=1600, pairs=50, every=1, floor=0.1)
    clock, optimizer = still(sampler, model := Small(), probe_rows=rows)
    if rows is None:
        with pytest.warns(UserWarning, match="ran out of memory; it continues with [84] samples at a time") as told:
            train(clock, model, optimizer, 1, data(512))
        assert (len(told), clock.probe_rows, model.sizes[:3]) == (2, 4, [16, 8, 4])
        model.sizes.clear()
    train(clock, model, optimizer, 1, data(512))  # warnings are errors here
    least = rows or 4
    assert set(model.sizes) == {least}
    assert len(model.sizes) * least == pytest.approx(1600 * STEPS, rel=0.01)  # as many samples as with enough memory
    # κ's part as in the density's test: the mean of half as many samples
    assert np.abs(clock.plot_data().p / STEPS / expected(0.1) - 1).max() < 0.15 * math.sqrt(2)


def test_refreshed_every_so_many_updates():
    clock, optimizer = still(GradientVariance(bins=4, samples=8, every=3), model := Separate(VALUES))
    seen = [clock.plot_data().p]
    for _ in range(7):
        train(clock, model, optimizer, 1, data(32))
        seen.append(clock.plot_data().p)
    assert [i for i in range(7) if not np.array_equal(seen[i], seen[i + 1])] == [0, 3, 6]


@pytest.fixture(scope="module")
def learned():
    clock, optimizer = still(GradientVariance(bins=7, samples=16, floor=0.05), model := Separate(VALUES))
    train(clock, model, optimizer, 1, data(64))
    assert clock.sampler.variance.min() > 0
    return clock.sampler


def test_contract_of_a_density(learned):
    for steps in (2, 7, 37, 1000):
        pmf = learned.log_pmf(torch.arange(steps), steps).exp()
        assert pmf.sum().item() == pytest.approx(1, abs=1e-12)
        assert (pmf >= 0.05 / steps - 1e-15).all()
    cells = learned.log_pmf(torch.arange(7), 7).exp()
    middles = learned.log_prob((torch.arange(7) + 0.5).double() / 7).exp() / 7
    assert torch.allclose(cells, middles, rtol=1e-12)
    assert not learned.log_prob(torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64)).isinf().any()
    assert eval(repr(learned), {"GradientVariance": GradientVariance}) == learned


def test_draws_follow_the_density(learned):
    n = 100_000
    first, second = (learned.sample(n, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first.time, second.time)
    assert torch.equal(first.log_prob, learned.log_prob(first.time))
    cdf = np.append(0, learned.log_pmf(torch.arange(7), 7).exp().cumsum(0))
    assert scipy.stats.kstest(first.time.numpy(), lambda u: np.interp(u, np.arange(8) / 7, cdf)).pvalue > 0.001
    ends = learned.sample(2, uniforms=torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64)).time
    assert ((ends >= 0) & (ends < 1)).all()


def test_two_clocks_learn_apart_and_a_corrected_one_is_unbiased():
    sampler = GradientVariance(bins=4, samples=8)
    clock, optimizer = still(sampler, model := Separate(VALUES), correct="importance")
    other = nc.Clock(FOUR_STEPS, sampler)
    train(clock, model, optimizer, 1, data(32))
    assert other.plot_data().p.tolist() == [1.0] * 4
    assert not np.array_equal(clock.plot_data().p, other.plot_data().p)
    b = clock.draw(data(4096))
    # E_p[base/p] = 1, stratified: off by one draw in each cell at most
    assert b.correction.mean().item() == pytest.approx(1, abs=4 * b.correction.max().item() / 4096)


def test_resuming_is_bit_exact():
    x0, label = torch.randn(32, 2, generator=torch.Generator().manual_seed(0)), torch.zeros(32, 1)

    def make():
        torch.manual_seed(0)
        model = Disturbable()
        model.net[3].p = 0.0  # torch's own random state is the loop's to save
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
        return nc.Clock("linear", GradientVariance(bins=8, samples=16, every=4)).attach(optimizer), model, optimizer

    whole = make()
    times = train(*whole, 12, x0, label)
    first = make()
    part = train(*first, 6, x0, label)
    states = [copy.deepcopy(thing.state_dict()) for thing in first]
    second = make()
    for thing, state in zip(second, states, strict=True):
        thing.load_state_dict(state)
    part += train(*second, 6, x0, label)
    assert all(torch.equal(a, b) for a, b in zip(times, part, strict=True))
    assert torch.equal(whole[0].sampler.variance, second[0].sampler.variance)
    assert all(torch.equal(a, b) for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True))


def test_a_foreign_state_is_refused():
    state = nc.Clock("linear", GradientVariance()).sampler.state_dict()
    sampler = GradientVariance(bins=16)
    with pytest.raises(ValueError, match=r"shape \(16,\)"):
        sampler.load_state_dict(state)
    del state["variance"]
    with pytest.raises(ValueError, match="its state must hold estimates, pmf, skipped, variance"):
        GradientVariance().load_state_dict(state)


def test_the_estimate_leaves_no_trace_on_the_model():
    torch.manual_seed(0)
    model = Disturbable()
    model.net[3].eval()  # flags that differ
    clock = nc.Clock("linear", GradientVariance(bins=4, samples=8))
    x0, label = torch.randn(16, 2), torch.rand(16, 1)
    b = clock.draw(x0, predict=model, cond=label)
    clock.loss(b, model(b.x_t, b.t, b.cond)).mean().backward()
    flags, random = [m.training for m in model.modules()], torch.get_rng_state()
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    clock.updated()
    assert clock.sampler.variance.min() > 0
    assert flags == [m.training for m in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is g and (g is None or torch.equal(g, bits)) for p, g, bits in gradients)


class Broken(nn.Module):
    """Separate parameters that give no number at chosen steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.at = Separate(VALUES), []

    def forward(self, x_t, t):
        bad = sum((t == step for step in self.at), torch.zeros_like(t)).bool()
        return torch.where(bad[:, None], math.nan, 1.0) * self.inner(x_t, t)


def test_gradients_that_are_not_finite_are_skipped_and_counted():
    model = Broken()
    model.at = [1]
    clock, optimizer = still(GradientVariance(bins=STEPS, samples=8, pairs=2, every=1), model)
    x0 = data(32)

    def step():
        b = clock.draw(x0, predict=model)
        clock.loss(b, b.noise.requires_grad_())
        optimizer.step()

    with pytest.warns(UserWarning, match="2 gradients were not finite and were skipped"):
        step()
    assert clock.sampler.skipped == 2
    p, variance = clock.plot_data().p, clock.sampler.variance
    assert np.isfinite(p).all()
    assert variance[1] == 0
    # never known: between its neighbours
    assert p[1] == pytest.approx((p[0] + p[2]) / 2, rel=1e-9)
    model.at = [0, 1, 2, 3]
    step()
    assert clock.sampler.skipped == 10
    assert torch.equal(clock.sampler.variance, variance)
    assert np.array_equal(clock.plot_data().p, p)


def _learn(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        results[rank] = _alone(rank, 2)
        model = nn.parallel.DistributedDataParallel(Separate(VALUES))
        clock, optimizer = still(GradientVariance(bins=STEPS, samples=16, every=2), model)
        x0 = data(64)[32 * rank :][:32]
        train(clock, model, optimizer, 3, x0)  # DDP's reductions still pair up
        results[rank + 2] = clock.sampler.variance, clock.plot_data().p
    finally:
        dist.destroy_process_group()


def _alone(rank: int, world_size: int):
    """What one rank finds by itself at its third update."""
    clock, optimizer = still(GradientVariance(bins=STEPS, samples=16, every=2), model := Separate(VALUES), rank=rank, world_size=world_size)
    found = []
    clock.sampler.after = lambda probe, batch, after=clock.sampler.after: (found.append(probe), after(probe, batch))
    x0 = data(64)[32 * rank :][:32]
    train(clock, model, optimizer, 3, x0)
    time = (torch.arange(2 * STEPS).double() + 0.5) / (2 * STEPS)
    return gradient_moments(found[-1], time, 4)[0].reshape(STEPS, 2).mean(1)


def test_two_processes_share_one_density(free_port):
    results = on_two(_learn, free_port)
    alone, together = [results[i] for i in range(2)], [results[i] for i in (2, 3)]
    assert torch.equal(together[0][0], together[1][0])
    assert np.array_equal(together[0][1], together[1][1])
    assert not torch.equal(alone[0], alone[1])
    assert torch.allclose(together[0][0], (alone[0] + alone[1]) / 2, rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GradientVariance(bins=1), "bins must be a whole number of at least 2"),
        (lambda: GradientVariance(samples=4, pairs=4), "a pair takes at least two samples"),
        (lambda: GradientVariance(every=0), "every must be a whole number"),
        (lambda: GradientVariance(floor=0.0), "floor must lie between 0 and 1"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_copy_of_the_model_is_told_of():
    model, copied = (nn.Linear(2, 2) for _ in range(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", nc.GradientVariance(bins=2, samples=8, every=1)).attach(optimizer, model=model)
    clock.draw(torch.zeros(8, 2), predict=lambda x, t: copied(x))
    sum(p.sum() for p in model.parameters()).backward()
    with pytest.warns(UserWarning, match="GradientVariance: no loss depends on the trained parameters"):
        optimizer.step()
