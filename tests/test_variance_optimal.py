"""The variance-optimal density: its estimate against exact gradients of single samples, its formulas, and that looking changes nothing."""

import copy
import math
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, vmap

import noiseclock as nc
from forked import on_two
from gaussians import Denoiser, ring
from known_densities import SCHEDULE, OwnParameters, SharedParameter, T, best_density, distance
from noiseclock.core.batch import noised
from noiseclock.core.directions import ACROSS, derivative, normal
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import metric, trained
from noiseclock.core.ranks import local
from test_measure import FOUR_STEPS, STEPS, Separate, closed_form, data

# --- the estimate -------------------------------------------------------------------------------------------------------------------------


def adam(model, lr=2e-3):
    return [torch.optim.Adam(model.parameters(), lr=lr)]


def muon_and_adamw(model):
    """Muon for the matrices and AdamW for the rest, as both are used."""
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=2e-3)]


def partly_trained(sampler, weighting="constant", steps=200, optimizers=adam):
    """A denoiser of the ring, its data, its optimisers, and a clock that has followed it."""
    torch.manual_seed(0)
    model, data = Denoiser(width=32), ring()
    made = optimizers(model)
    clock = nc.Clock("linear", sampler, weighting, seed=1).attach(*made, model=model)
    points = torch.Generator().manual_seed(5)
    for _ in range(steps):
        b = clock.draw(data.sample(64, points), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        for each in made:
            each.step()
            each.zero_grad()
    return model, data, made, clock


def exact(model, data, clock, bins, samples=400):
    """(bins,) E‖w·∇ℓ‖²_P by the gradient of each sample."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    power, unknown = metric(clock.optimizers, list(model.parameters()))
    assert unknown == ""

    def loss(weights, x_t, t, target, weight):
        return squared_error(functional_call(model, weights, (x_t[None], t[None])), target[None])[0] * weight

    gradients = vmap(grad(loss), (None, 0, 0, 0, 0))
    generator = torch.Generator().manual_seed(8)
    found = torch.zeros(bins)
    for b in range(bins):
        time = (b + torch.rand(samples, generator=generator, dtype=torch.float64)) / bins
        x0 = data.sample(samples, generator)
        x_t, target = noised(clock.schedule, clock.objective, x0, torch.randn(x0.shape, generator=generator), time)
        weight = clock.weighting(clock.schedule, time, clock.objective)
        each = gradients(parameters, x_t, clock.schedule.condition(time), target, weight)
        found[b] = sum(float((p * g.square()).sum()) for p, g in zip(power, each.values(), strict=True)) / samples
    return found


@pytest.mark.parametrize(("weighting", "optimizers"), [("constant", adam), ("min-snr", adam), ("constant", muon_and_adamw)])
def test_the_estimate_is_the_mean_squared_gradient_of_single_samples(weighting, optimizers):
    bins, probes = 6, 400
    sampler = nc.VarianceOptimal(every=10**6, bins=bins, decay=0.9999, warmup=10**6)
    model, data, _, clock = partly_trained(sampler, weighting, optimizers=optimizers)
    wanted = exact(model, data, clock, bins)
    points = torch.Generator().manual_seed(9)
    clock.sampler._begin(clock.base, 1000)  # forget the probe of the untrained model
    for _ in range(probes):
        clock._updates += 1  # by which a probe draws its noise
        clock.probe(data.sample(64, points), model)
        clock.sampler.after(clock._probe, None)
    found = clock.sampler.curve[0]
    # √s: half the relative error of s, which is about √(2/probes) = 7 % from the directions and 4.5 % from the 400 samples of `exact`
    ratio = (found / wanted).sqrt()
    assert ratio.min() > 0.9
    assert ratio.max() < 1.1
    assert wanted.max() > 5 * wanted.min()  # and there was something to see


def test_looking_changes_nothing():
    class Odd(nn.Module):
        """With all that could be disturbed: dropout, running statistics, a frozen part."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(0.5), nn.Linear(16, 2))
            self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

        def forward(self, x_t, t):
            return self.frozen * self.net(torch.cat([x_t, t[:, None] / 1000], 1))

    torch.manual_seed(0)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.VarianceOptimal(every=10**6)).attach(optimizer, model=model)
    model(torch.randn(8, 2), torch.arange(8)).square().mean().backward()
    optimizer.step()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    state, moments, random = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    clock.probe(torch.randn(32, 2, generator=torch.Generator().manual_seed(1)), model)
    clock.sampler.after(clock._probe, None)
    assert clock.sampler.probes == 1
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    for (_, mine), (_, theirs) in zip(moments["state"].items(), optimizer.state_dict()["state"].items(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for gradient, p in zip(gradients, model.parameters(), strict=True):
        assert (gradient is None and p.grad is None) or torch.equal(gradient, p.grad)
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert model.net[1].training


# --- the density --------------------------------------------------------------------------------------------------------------------------


def fed(s, probes, *, scatter=0.0, base="uniform", seed=0, **options):
    """A sampler that was shown squared gradients with the means s (bins,), whose probes scatter."""
    generator = torch.Generator().manual_seed(seed)
    clock = nc.Clock("linear", nc.VarianceOptimal(bins=len(s), **options), base=base, correct="importance")
    sampler = clock.sampler
    time = (torch.arange(len(s), dtype=torch.float64) + 0.5) / len(s)
    for _ in range(probes):
        noise = 1 + scatter * torch.randn(len(s), generator=generator, dtype=torch.float64)
        sampler._fold(time, torch.tensor(s, dtype=torch.float64) * noise.abs())
    return sampler


def test_conditioning_with_as_many_rows_as_are_measured_is_no_samples_own():
    """A table of 8 rows that all of 16 samples share, of which 8 are measured, 4 at a time."""
    seen = []

    class Watched(Denoiser):
        def forward(self, x, t, table):
            seen.append((len(x), table))
            return super().forward(x, t)

    model, table = Watched(width=8), torch.randn(8, 2)
    clock = nc.Clock("linear", nc.VarianceOptimal(samples=8), probe_rows=4).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    b = clock.draw(ring().sample(16), predict=model, cond={"table": table})
    clock.loss(b, model(b.x_t, b.t, table)).mean().backward()
    clock.optimizers[0].step()
    assert [rows for rows, _ in seen] == [16, *[4] * 4]
    assert all(torch.equal(given, table) for _, given in seen)


def test_the_density_is_the_root_with_a_floor():
    s = [16.0, 4.0, 1.0, 1.0]
    sampler = fed(s, 10, floor=0.1)
    root = torch.tensor(s, dtype=torch.float64).sqrt()
    wanted = 0.9 * root / root.sum() + 0.1 / 4
    assert torch.allclose(sampler.log_pmf(torch.arange(4), 4).exp(), wanted, rtol=1e-12)
    assert sampler.rho == pytest.approx(2.0**2 / 5.5)  # (mean of 4, 2, 1, 1)² over the mean of s
    assert sampler.ess() == pytest.approx(1 / float((1 / 16 / wanted).sum()))
    assert set(sampler.info) == {"probes", "rho", "held_out_rho", "ess", "skipped"}


def test_the_base_counts():
    s = [16.0, 4.0, 1.0, 1.0]
    sampler = fed(s, 10, base=nc.Beta(2.0, 5.0))
    base = nc.Beta(2.0, 5.0).log_pmf(torch.arange(4), 4).exp()
    price = base * torch.tensor(s, dtype=torch.float64).sqrt()
    assert torch.allclose(sampler.log_pmf(torch.arange(4), 4).exp(), 0.9 * price / price.sum() + 0.1 * base, rtol=1e-9)


@pytest.mark.parametrize(
    ("s", "probes", "options"),
    [
        ([16.0, 4.0, 1.0, 1.0], 9, {}),  # too few probes
        ([1.5, 1.2, 1.0, 1.0], 50, {}),  # little to gain
        ([16.0, 4.0, 1.0, 1.0], 50, {"gain": 0.5}),
    ],
)
def test_it_stays_at_the_base_where_nothing_is_to_be_gained(s, probes, options):
    assert torch.allclose(fed(s, probes, **options).log_pmf(torch.arange(4), 4).exp(), torch.full((4,), 0.25, dtype=torch.float64))


def test_it_does_not_move_for_noise():
    """Probes that scatter as (g·ξ)² of one direction does, and bins that are all alike: seen so often, few samplers leave the base."""
    moved = 0
    for seed in range(60):
        sampler = fed([1.0] * 8, 12, scatter=1.4, seed=seed)
        moved += not torch.allclose(sampler.log_pmf(torch.arange(8), 8).exp(), torch.full((8,), 0.125, dtype=torch.float64))
    assert moved <= 6
    assert not torch.allclose(fed([30.0, 9.0, 3.0, 1, 1, 1, 1, 1], 30, scatter=0.5).log_pmf(torch.arange(8), 8).exp(), torch.tensor(0.125).double())


def test_each_probe_judges_the_density_of_those_before_it():
    """Two bins, three probes, the numbers by hand."""
    sampler = fed([1.0, 1.0], 0, decay=0.5, floor=0.2)
    assert sampler.held_out_rho == 1
    time, judged = torch.tensor([0.25, 0.75], dtype=torch.float64), np.zeros(2)
    seen = np.array([[4.0, 1.0], [9.0, 1.0], [1.0, 4.0]])
    for number, price in enumerate(seen):
        sampler._fold(time, torch.tensor(price))
        if number:
            faded = 0.5 ** np.arange(number)[::-1]
            root = np.sqrt(faded @ seen[:number] / faded.sum())
            p = 0.8 * root / root.sum() + 0.2 / 2
            judged = 0.5 * judged + faded.sum() * np.array([(0.25 / p * price).sum(), price.mean()])
            assert sampler.held_out_rho == pytest.approx(judged[0] / judged[1], rel=1e-12)
    assert sampler.rho < 1 < sampler.held_out_rho  # the last probe contradicts the others


def test_prices_too_small_for_a_density_are_no_judgement():
    sampler = fed([1e-300, 1e-300], 3)
    assert sampler.held_out_rho == 1
    sampler._fold(torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([9.0, 1.0], dtype=torch.float64))
    sampler.load_state_dict(sampler.state_dict())  # which would refuse what is not finite


def test_one_bin_with_a_heavy_tail_does_not_hold_it_back():
    """As with the weights of the bound on flow: nearly all variance is at the first times, where few probes find most of it."""

    def probe(generator):
        rare = torch.rand((), generator=generator) < 0.05
        return torch.tensor([30.0 + 3e5 * rare, *[1.0] * 7], dtype=torch.float64) * (1 + 0.3 * torch.rand(8, generator=generator))

    sampler, generator = fed([1.0] * 8, 0), torch.Generator().manual_seed(0)
    time = (torch.arange(8, dtype=torch.float64) + 0.5) / 8
    moved = 0
    for number in range(200):
        sampler._fold(time, probe(generator))
        moved += number >= 50 and sampler.log_pmf(torch.tensor([0]), 8).exp().item() > 0.5
    assert moved >= 140  # of 150; a rule that compares raw prices with their errors left the base in half of these


def test_estimates_that_are_not_finite_are_skipped_and_counted():
    sampler = fed([16.0, 4.0, 1.0, 1.0], 20)
    before = sampler.log_pmf(torch.arange(4), 4)
    time = torch.tensor([0.1, 0.9], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler._fold(time, torch.tensor([math.nan, math.inf], dtype=torch.float64))
    assert sampler.skipped == 2
    assert torch.allclose(sampler.log_pmf(torch.arange(4), 4), before)


@pytest.mark.parametrize("optimizers", [adam, muon_and_adamw])
def test_a_resumed_run_goes_on_alike(optimizers):
    def go_on(model, data, made, clock, steps, seed):
        points = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            b = clock.draw(data.sample(64, points), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            for each in made:
                each.step()
                each.zero_grad()
        return clock.sampler._buffers["pmf"].clone()

    sampler = nc.VarianceOptimal(every=4, bins=8, warmup=3)
    model, data, made, clock = partly_trained(sampler, "vlb", steps=80, optimizers=optimizers)
    assert clock.sampler.probes == 22  # at 0, 1, 3, 6, 10, 14, ...
    assert clock.sampler.rho < 0.9
    assert clock.sampler.ess() < 0.99  # it has moved
    state, weights, moments = copy.deepcopy([clock.state_dict(), model.state_dict(), [each.state_dict() for each in made]])
    wanted = go_on(model, data, made, clock, 10, seed=3)
    again = Denoiser(width=32)
    again.load_state_dict(weights)
    others = optimizers(again)
    for other, held in zip(others, moments, strict=True):
        other.load_state_dict(held)
    resumed = nc.Clock("linear", sampler, "vlb", seed=1).attach(*others, model=again)
    resumed.load_state_dict(state)
    assert torch.equal(go_on(again, data, others, resumed, 10, seed=3), wanted)
    assert resumed.state_dict()["sampler"].keys() == state["sampler"].keys()


def test_the_first_probes_follow_one_another_quickly_also_after_resuming():
    def probed(clock, model, optimizer, steps):
        found = []
        for i in range(steps):
            due = clock.due
            b = clock.draw(data(16), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            found += [i] * due
        return found

    model = Separate((0.1, 0.4, 0.7, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for sampler in (nc.VarianceOptimal(every=5), nc.Mixture(nc.VarianceOptimal(every=5)), nc.Annealed(nc.VarianceOptimal(every=5), start=2, stop=99)):
        clock = nc.Clock(FOUR_STEPS, sampler).attach(optimizer)
        assert probed(clock, model, optimizer, 8) == [0, 1, 3, 6]
        other = nc.Clock(FOUR_STEPS, sampler)
        other.load_state_dict(clock.state_dict())
        assert probed(other.attach(optimizer), model, optimizer, 14) == [2, 7, 12]  # at updates 10, 15 and 20 in all
    # what the docs say of the default: ten probes, and the density may move, after 46 updates
    assert probed(nc.Clock(FOUR_STEPS, "variance-optimal").attach(optimizer), model, optimizer, 47)[9] == 45


def test_where_the_answer_is_known_it_is_found():
    """Four steps with a parameter each, whose E‖g‖² has a closed form: the density is its root, above the floor."""
    model = Separate(values := (0.1, 0.4, 0.7, 1.0))
    clock = nc.Clock(FOUR_STEPS, nc.VarianceOptimal(every=1, bins=STEPS, decay=0.99, floor=0.1, gain=1.0))
    clock.attach(torch.optim.SGD(model.parameters(), lr=1e-12))  # too little to move it; at 0 nothing is priced
    root = np.sqrt(closed_form(FOUR_STEPS, np.array(values))[2])
    wanted = 0.9 * root / root.sum() + 0.1 / STEPS
    apart = []
    for _ in range(200):
        b = clock.draw(data(256), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        clock.optimizers[0].step()
        apart.append(np.abs(clock.plot_data().p / STEPS - wanted).sum() / 2)
    uniform = np.abs(0.25 - wanted).sum() / 2
    assert apart[0] == pytest.approx(uniform, rel=1e-6)  # it waits
    assert uniform > 0.05
    # a direction has 64 numbers for each step, so a probe knows s to √(2/64), and the last hundred its root to 1 %
    assert np.mean(apart[20:40]) < uniform / 4
    assert apart[-1] < uniform / 8


def test_of_two_that_probe_the_later_one_learns_before_its_turn_and_the_earlier_one_stops_after_its_own():
    model = Separate((0.1, 0.4, 0.7, 1.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock(FOUR_STEPS, nc.Annealed(nc.VarianceOptimal(every=5), nc.Lookahead(every=5), start=20, stop=30)).attach(optimizer)
    probes, least = [], []
    for _ in range(60):
        b = clock.draw(data(16), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        probes.append((clock.sampler.sampler.probes, clock.sampler.other.probes))
        least.append(clock.sampler.least_batch)
    # at the updates 0, 1, 3, 6, 10 and then every 5th: 25 is the last before the 30th
    assert probes[19] == (6, 6)
    assert probes[29] == (8, 8)
    assert probes[59] == (8, 14)
    assert least == [4] * 60
    assert clock.corrected  # by VarianceOptimal's wish, to the end: the objective does not change on the way
    assert clock.sampler.corrects


def test_an_annealed_sampler_that_was_left_learns_from_no_loss_and_asks_for_no_batch():
    sampler = nc.Annealed(nc.Lookahead(every=5), nc.VarianceOptimal(every=5), start=0, stop=2)
    assert sampler.least_batch == 4
    sampler.advance(2)
    assert sampler.least_batch == 1
    clock = nc.Clock(FOUR_STEPS, nc.Annealed(nc.LossSecondMoment(), nc.LossEMA(), start=0, stop=2))
    for updates in (0, 2):
        clock.sampler.advance(updates)
        b = clock.draw(data(8))
        clock.loss(b, torch.full_like(b.x_t, torch.nan))
    assert (clock.sampler.sampler.skipped, clock.sampler.other.skipped) == (8, 16)


def test_it_can_be_annealed_to_the_base():
    model, data, (optimizer,), clock = partly_trained(nc.Annealed(nc.VarianceOptimal(every=4, bins=8, warmup=3), start=80, stop=120), "vlb", steps=80)
    assert np.abs(clock.plot_data().p - 1).mean() > 0.1
    points = torch.Generator().manual_seed(6)
    for _ in range(40):
        b = clock.draw(data.sample(64, points), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert np.allclose(clock.plot_data().p, 1)
    assert clock.sampler.sampler.ess() < 0.99  # it has not forgotten
    probes = clock.sampler.sampler.probes
    for _ in range(10):  # nor does it look any more
        b = clock.draw(data.sample(64, points))
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clock.sampler.sampler.probes == probes
    assert not clock.due


def in_use(clock):
    """The density over steps that times are drawn from."""
    return clock.plot_data().p / T


def learned(clock):
    """The density over steps that VarianceOptimal knows, whether it uses it or not."""
    sampler = clock.sampler
    return np.repeat(sampler._mixed(sampler._density(sampler._prices())).numpy(), T // sampler.bins) * sampler.bins / T


def settled(problem, sampler, best, seed, probes, density=in_use) -> int:
    """Probes after which the density stays within a tenth of the best, in total variation, on a stationary problem with a probe in every update."""
    model = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=model.lr)
    clock = nc.Clock(SCHEDULE, sampler, objective=model.objective, seed=seed).attach(optimizer)
    far = 0
    for k in range(1, probes + 1):
        x0 = 1 + 0.3 * torch.randn(16, 4, generator=torch.Generator().manual_seed(seed * 100_000 + k))
        b = clock.draw(x0, predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.reset()
        far = k if distance(density(clock), best) > 0.1 else far
    return far


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_knows_the_best_density_after_ten_times_fewer_probes_than_the_papers_policy():
    """On the known-answer problems of the adaptive sampler; the best density is each method's own: of a corrected loss here, of a plain one there.

    With a parameter of its own for each time, the gradient of (θ_t - eps)² averaged over four numbers has E‖g‖² = 1 + θ_t². Where the times share
    one, it is the same for all of them, and the best density is the base.
    """
    theta = OwnParameters().theta.detach()[:, 0].double().numpy()
    root = np.sqrt(1 + theta**2)
    own = 0.9 * root / root.sum() + 0.1 / T
    ours = [settled(OwnParameters, nc.VarianceOptimal(every=1, bins=10, decay=0.99), own, seed, 60, learned) for seed in range(15)]
    best = best_density(OwnParameters)
    theirs = [settled(OwnParameters, nc.Adaptive.paper(every=1, lr=0.003, hidden=32), best, seed, 150) for seed in range(3)]
    print(f"probes until the density stays within 0.1 of the best: VarianceOptimal {ours}, Adaptive.paper() {theirs}, where 150 means not yet")
    assert distance(np.full(T, 1 / T), own) > 0.13
    assert np.median(ours) <= 15
    assert np.median(theirs) >= 10 * np.median(ours)
    assert [settled(SharedParameter, nc.VarianceOptimal(every=1, bins=10, decay=0.99), np.full(T, 1 / T), seed, 60) for seed in range(3)] == [0] * 3


def test_every_probe_and_every_seed_looks_in_directions_of_its_own():
    """Otherwise trainings that differ in their seed alone would err alike, and their spread would say too little."""
    directions = []

    def noted(parameters, power, seed):
        directions.append(torch.cat([d.flatten() for d in normal(parameters, power, seed)]))
        return normal(parameters, power, seed)

    with patch("noiseclock.core.variance_optimal.normal", noted):
        for seed in (0, 1):
            priced(told(), 0, seed=seed)
    assert len(directions) == 6  # three probes of each seed
    assert not any((x == y).any() for i, x in enumerate(directions) for y in directions[:i])


# --- several processes --------------------------------------------------------------------------------------------------------------------


def priced(model, half: int, seed: int = 2, **place):
    """(bins,) what three probes find on a rank's own half of the data."""
    clock = nc.Clock("linear", nc.VarianceOptimal(bins=4), seed=seed, **place).attach(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
    x0 = ring().sample(64, torch.Generator().manual_seed(4))[32 * half :][:32]
    for _ in range(3):
        clock._updates += 1
        clock.probe(x0, model)
        clock.sampler.after(clock._probe, None)
    return clock.sampler.curve[0]


def told(seed: int = 0) -> Denoiser:
    torch.manual_seed(seed)
    return Denoiser(width=16)


def _together(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        results["shared", rank] = priced(nn.parallel.DistributedDataParallel(told()), rank)
        model = told()
        for layer in (*model.net, model):
            if list(layer.parameters()):
                fully_shard(layer)
        before = [local(p).detach().clone() for p in model.parameters()]
        parameters = trained([model])
        power = [1.0] * len(parameters)
        direction = normal(parameters, power, seed=7)
        whole = [DTensor.from_local(d, p.device_mesh, p.placements).full_tensor() for d, p in zip(direction, parameters, strict=True)]
        x, t = torch.linspace(-1, 1, 16).reshape(8, 2), torch.arange(0, 800, 100)
        results["sharded", rank] = derivative([model], parameters, power, direction, lambda: model(x, t).square().mean(1), step=ACROSS)
        results["whole", rank] = derivative([alone := told()], trained([alone]), power, whole, lambda: alone(x, t).square().mean(1), step=ACROSS)
        results["restored", rank] = all(torch.equal(a, local(p)) for a, p in zip(before, model.parameters(), strict=True))
    finally:
        dist.destroy_process_group()


def test_two_processes(free_port):
    """With DDP the density is one, of all data; with FSDP2 each holds a part of the parameters, and the derivative is that of the whole."""
    found = on_two(_together, free_port)
    alone = []
    for rank in range(2):
        # each looks in a direction of its own, at its own half of the times
        with patch("noiseclock.core.ranks.mine", return_value=rank), patch("noiseclock.core.ranks.count", return_value=2):
            alone.append(priced(told(), rank, rank=rank, world_size=2))
    assert torch.equal(found["shared", 0], found["shared", 1])
    assert torch.allclose(found["shared", 0], (alone[0] + alone[1]) / 2, rtol=1e-4)
    assert not torch.allclose(alone[0], alone[1], rtol=0.01)
    for rank in range(2):
        assert found["restored", rank]
        assert torch.allclose(found["sharded", rank], found["whole", rank], rtol=2e-3, atol=1e-3)
    assert found["whole", 0].abs().max() > 0.05


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nc.VarianceOptimal(every=0), "every must be a whole number of at least 1"),
        (lambda: nc.VarianceOptimal(bins=1), "bins must be a whole number of at least 2"),
        (lambda: nc.VarianceOptimal(decay=1.0), r"decay must lie in \[0, 1\)"),
        (lambda: nc.VarianceOptimal(gain=0.0), r"gain must lie in \(0, 1\]"),
        (lambda: nc.VarianceOptimal(floor=0.0), "floor must lie between 0 and 1"),
    ],
)
def test_mistakes_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
