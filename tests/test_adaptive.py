"""The adaptive sampler: what it measures, that it learns where the answer is known, and that it keeps the contract of samplers."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import noiseclock as nc
from gaussians import Denoiser, ring, started, train
from known_densities import LOW, SCHEDULE, OwnParameters, SharedParameter, T, best_density, distance
from noiseclock.core.selection import best_by_f, r_squared

VARIANTS = [
    nc.Adaptive(every=2),
    nc.Adaptive.scaled(every=2, count=2),
    nc.Adaptive.released(every=2),
    nc.Adaptive.scaled(every=2, select="greedy", stride=7),
]
# at the paper's learning rate a fresh policy moves fast, and says so
pytestmark = pytest.mark.filterwarnings("ignore:the sampling", "ignore:.*of the times are drawn less", "ignore:for five probes")
every_variant = pytest.mark.parametrize("sampler", VARIANTS, ids=repr)

# --- problems with a known answer --------------------------------------------------------------------------------------------------------


def learned_density(problem, sampler, seed, probes=150, batch=16) -> np.ndarray:
    """(T,) after so many probes of the first update from the same start: a stationary problem, one probe an update."""
    model = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=model.lr)
    clock = nc.Clock(SCHEDULE, sampler, objective=model.objective, seed=seed).attach(optimizer)
    for k in range(probes):
        x0 = 1 + 0.3 * torch.randn(batch, 4, generator=torch.Generator().manual_seed(seed * 100_000 + k))
        b = clock.draw(x0, predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.reset()
    return clock.plot_data().p / T


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("problem", [OwnParameters, SharedParameter])
def test_it_moves_towards_the_best_density_by_direct_search(problem):
    """Three seeds, 150 probes. The authors' released reward, with fresh noise, learns too, but less surely: one of three seeds may stay."""
    best = best_density(problem)

    def distances(make):
        return [distance(learned_density(problem, make(every=1, lr=0.003, hidden=32), seed), best) for seed in range(3)]

    uniform, found, released = distance(np.full(T, 1 / T), best), distances(nc.Adaptive.scaled), distances(nc.Adaptive.released)
    show = lambda values: ", ".join(f"{value:.2f}" for value in values)  # noqa: E731
    print(f"{problem.__name__}: distance from the best density: uniform {uniform:.2f}; scaled {show(found)}; released {show(released)}")
    assert uniform > 0.35
    assert max(found) < 0.75 * uniform
    assert np.mean(found) < 0.6 * uniform
    assert sorted(released)[1] < 0.75 * uniform


def test_stratified_batches_would_hide_what_is_to_be_learned():
    """The composition of a batch must vary for its reward to say anything: stratified, the share of low times is the same in every batch."""
    shares = {}
    for name, sampler in (("independent", nc.Adaptive()), ("stratified", nc.Uniform())):
        clock = nc.Clock(SCHEDULE, sampler)
        model = OwnParameters()
        shares[name] = np.std([(clock.draw(torch.zeros(16, 4), predict=model).t < LOW).float().mean().item() for _ in range(200)])
    assert shares["stratified"] == 0
    assert shares["independent"] == pytest.approx(math.sqrt(0.25 * 0.75 / 16), rel=0.2)


@pytest.fixture
def policy_gradient(monkeypatch):
    """The gradient of the gain in the last layer's bias, from one policy step on `n` equal samples with the given rewards, none of which moves it."""

    def measure(sampler, adaptive, n, reward):
        x0 = torch.zeros(n, 4)
        policy, found = adaptive._policy_for(x0), []
        with torch.no_grad():
            policy.net[-1].bias.copy_(torch.tensor([2.95, 0.54]))  # about Beta(3, 1)
        monkeypatch.setattr(adaptive._optimizer, "step", lambda: found.append(-policy.net[-1].bias.grad))
        draw = sampler.sample(n, x0=x0, generator=torch.Generator().manual_seed(0))
        adaptive._learn(x0, draw, reward, torch.ones(n, dtype=torch.bool), torch.tensor(False))
        return draw, found[0]

    return measure


BLENDS = {"mixture": lambda s: nc.Mixture(s, floor=0.5), "annealed": lambda s: nc.Annealed(s, start=0, stop=10)}


@pytest.mark.parametrize("blend", BLENDS)
@pytest.mark.parametrize("variant", ["paper", "released"])
def test_a_constant_reward_teaches_nothing_inside_a_blend(variant, blend, policy_gradient):
    """The times come from p = π/2 + 1/2, so the score ∂ln π has mean 0 only after multiplication by π/p; without it, half its mean over all times."""
    n, reward = 20_000, 1e-3  # small, so that the gradient's norm is not clipped
    clock = nc.Clock("linear", BLENDS[blend](nc.Adaptive(variant=variant, entropy=0.0)))
    clock.sampler.advance(5)
    adaptive = clock.sampler.sampler
    _, gradient = policy_gradient(clock.sampler, adaptive, n, torch.full((n,), reward))
    bias = adaptive._policy.net[-1].bias.detach()
    log_pi = lambda raw: ((1 - adaptive.floor) * adaptive._beta.mass(nn.functional.softplus(raw)[None])[0] + adaptive.floor / 1000).log()  # noqa: E731
    score, pi = torch.autograd.functional.jacobian(log_pi, bias).double(), log_pi(bias).exp()  # (1000, 2) and (1000,)
    p = (pi + 1 / 1000) / 2
    # the mean of n draws, exactly: its variance is E_p[(π/p·score)²]/n, as the mean is 0. Four standard errors: P = 6e-5 for each of two numbers
    error = (p[:, None] * (pi[:, None] / p[:, None] * score).square()).sum(0).div(n).sqrt()
    uncorrected = (p[:, None] * score).sum(0)
    print("in standard errors:", gradient / reward / error, "without π/p:", uncorrected / error)
    assert ((gradient / reward).abs() < 4 * error).all()
    assert (uncorrected.abs() > 20 * error).all()  # the test can tell


def test_the_released_entropy_term_leads_back_to_uniform(policy_gradient):
    """Inside the reward it is (β·H)·ln π of the density. Its mean gradient, with that of the draws, is -β·H·∇H, so H rises to 0."""
    n, beta = 20_000, 0.01
    clock = nc.Clock("linear", nc.Adaptive.released(entropy=beta))
    _, gradient = policy_gradient(clock.sampler, clock.sampler, n, torch.zeros(n))
    adaptive, bias = clock.sampler, clock.sampler._policy.net[-1].bias.detach()
    log_pi = lambda raw: ((1 - adaptive.floor) * adaptive._beta.mass(nn.functional.softplus(raw)[None])[0] + adaptive.floor / 1000).log()  # noqa: E731
    entropy = lambda raw: -(log_pi(raw).exp() * (log_pi(raw) + math.log(1000))).sum()  # noqa: E731
    h, slope = entropy(bias), torch.autograd.functional.jacobian(entropy, bias).double()
    density, score = log_pi(bias) + math.log(1000), torch.autograd.functional.jacobian(log_pi, bias).double()
    each = beta * (slope * density[:, None] + h * score)  # (1000, 2) what a draw of each step adds
    pi = log_pi(bias).exp()[:, None]
    mean = (pi * each).sum(0)
    assert torch.allclose(mean, -beta * h * slope, rtol=1e-5)  # float32 in softplus
    error = ((pi * each.square()).sum(0) - mean.square()).div(n).sqrt()
    print(f"entropy {h:.2f}; gradient", gradient, "expected", mean, "+-", error)
    assert h < -0.3
    assert ((gradient - mean).abs() < 4 * error).all()  # P = 6e-5 for each of two numbers
    assert gradient.double() @ slope > 0  # ascent raises the entropy


def test_alone_times_come_from_the_policy_and_the_gradient_is_the_plain_one(policy_gradient):
    adaptive = nc.Clock("linear", nc.Adaptive(entropy=0.0)).sampler
    reward = 1e-3 * torch.randn(500, generator=torch.Generator().manual_seed(0))
    draw, gradient = policy_gradient(adaptive, adaptive, 500, reward)
    log_p = adaptive._pmf(torch.zeros(500, 4)).gather(1, (draw.time * 1000).long()[:, None])[:, 0].log()
    (expected,) = torch.autograd.grad((reward * log_p).mean(), adaptive._policy.net[-1].bias)
    assert torch.equal(gradient, expected)  # to the last bit: the ratio is exactly 1


# --- what it measures --------------------------------------------------------------------------------------------------------------------


def test_differences_with_shared_noise_vary_ten_times_less_than_with_fresh_noise():
    clock, model, optimizer = started(nc.Uniform(), steps=50)
    schedule, objective = clock.schedule, clock.objective
    x0 = ring().sample(64, torch.Generator().manual_seed(0))
    noise, other = (torch.randn(64, 2, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    before, after = (nc.Probe(model, schedule, objective, x0, noise=n, modules=[model]) for n in (noise, other))
    time = torch.full((64,), 0.3)
    first = before.losses(time)
    train(clock, model, optimizer, steps=1)
    shared, fresh = first - before.losses(time), first - after.losses(time)
    assert fresh.var() / shared.var() > 10


def test_delta_is_in_bits_of_the_bound():
    """c_τ·L_τ/ln 2 with c_τ for the objective that is trained: the same reward whether the model predicts eps or x0."""
    time = SCHEDULE.grid()
    for name in ("eps", "v", "x0"):
        clock = nc.Clock(SCHEDULE, nc.Adaptive(), objective=name)
        expected = nc.VLB()(SCHEDULE, time, nc.objective(name)) / math.log(2)
        assert torch.allclose(clock.sampler._bits.values, expected)


def test_delta_has_the_same_unit_on_a_schedule_and_on_its_continuous_counterpart():
    """Per step, or the same entropy coefficient would mean a thousandth in continuous time. The steps have the middles of EDM's as their levels.

    λ falls by d a step. The discrete coefficient is (e^d - 1)/2·(1+S)/(1+S·e^d) with S the SNR, the continuous one per step is d/2, and their ratio
    lies between (1-e^-d)/d and (e^d-1)/d, at most d/2 + d²/5 away from 1. The first step, which comes from the data itself, has no counterpart.
    """
    edm = nc.schedule("edm")
    levels = edm.level((torch.arange(1000, dtype=torch.float64) + 0.5) / 1000)
    alpha_bar = (levels.snr / (1 + levels.snr)).numpy()
    steps = nc.schedule("betas", betas=1 - alpha_bar / np.append(1.0, alpha_bar[:-1]))
    d = 2 * math.log(edm.sigma_max / edm.sigma_min) / 1000
    discrete, continuous = (nc.Clock(schedule, nc.Adaptive(), objective="eps").sampler._bits.values for schedule in (steps, edm))
    assert (discrete / continuous - 1)[1:].abs().max() < d / 2 + d**2 / 5  # 0.011


def test_selected_times_predict_the_whole_better_than_random_ones():
    """On a partly trained model, over three seeds: chosen on 20 probes, judged on those and on the next 40."""
    inside, outside = [], []
    for seed in range(3):
        torch.manual_seed(seed)
        model = Denoiser(width=32)
        fast = torch.optim.Adam(model.parameters(), lr=2e-3)
        train(nc.Clock("linear", "uniform", seed=seed), model, fast, steps=300, batch=64, seed=seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        clock = nc.Clock("linear", nc.Adaptive(every=1, queue=100, stride=20, lr=1e-9), seed=seed).attach(optimizer)
        train(clock, model, optimizer, steps=80, batch=32, seed=seed)
        rows = clock.sampler._queue.rows
        assert rows.shape == (80, 50)
        generator = torch.Generator().manual_seed(seed)
        for end in (20, 40):
            chosen_on, judged_on = rows[end - 20 : end], rows[end : end + 40]
            chosen = best_by_f(chosen_on, 3)
            random = [torch.randperm(50, generator=generator)[:3] for _ in range(50)]
            for gains, window in ((inside, chosen_on), (outside, judged_on)):
                gains.append(r_squared(window, chosen) - float(np.mean([r_squared(window, s) for s in random])))
    print("R² above random times, on the rows chosen from:", np.round(inside, 2), "and on later ones:", np.round(outside, 2))
    assert min(inside) > 0
    assert np.mean(outside) > 0.1


def test_all_times_give_the_exact_change():
    clock, model, _ = started(nc.Adaptive(every=2, select="all", stride=25), steps=0)
    probe = nc.Probe(model, clock.schedule, clock.objective, torch.randn(4, 2), noise=torch.randn(4, 2), modules=[model])
    batch, row = clock.sampler._measure(probe)
    assert batch.shape == (4, 4)  # steps 12, 37, 62, 87 for four samples
    assert len(row) == 0
    for i, step in enumerate((12, 37, 62, 87)):
        time = clock.schedule.time_of(torch.full((4,), step))
        expected = probe.losses(time) * clock.schedule.vlb(time) / math.log(2)
        assert torch.allclose(batch[i], expected, rtol=1e-6)


def test_one_forward_for_each_loss():
    calls = []

    class Counted(Denoiser):
        def forward(self, x_t, t):
            calls.append(len(x_t))
            return super().forward(x_t, t)

    torch.manual_seed(0)
    model = Counted(width=8)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive(every=40)).attach(optimizer)
    train(clock, model, optimizer, steps=1, batch=128)
    # the paper's own count: 2·|S| + 2·T/B = 21.6 forwards of a batch, here with whole chunks, and the training step itself
    assert calls == [128] * (2 * 3 + 2 * 8 + 1)
    train(clock, model, optimizer, steps=39, batch=128)
    assert len(calls) == 2 * 3 + 2 * 8 + 40


# --- the contract ------------------------------------------------------------------------------------------------------------------------


@every_variant
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_density_probabilities_and_draws_agree(sampler, schedule):
    objective = {"linear": "eps"}.get(schedule, schedule)
    clock, _, _ = started(sampler, schedule, steps=12, objective=objective)
    adaptive, cells = clock.sampler, clock.sampler.cells
    x0 = ring().sample(3, torch.Generator().manual_seed(5))
    n = 20_000 if cells == 100 else 4000
    for which in (None, x0[:1]):
        many = None if which is None else which.expand(n, -1)
        for steps in (7, cells):
            rows = None if which is None else which.expand(steps, -1)
            pmf = adaptive.log_pmf(torch.arange(steps), steps, x0=rows).exp()
            # rows of one x0 leave a float32 network with slightly different parameters
            assert pmf.sum().item() == pytest.approx(1, abs=1e-12 if which is None else 1e-6)
        draw = adaptive.sample(n, x0=many, generator=torch.Generator().manual_seed(0))
        drawn = torch.bincount((draw.time * cells).floor().long(), minlength=cells).cumsum(0) / n
        assert (drawn - pmf.cumsum(0)).abs().max() * math.sqrt(n) < 1.95
        rows = None if many is None else many[:500]
        assert torch.allclose(draw.log_prob[:500], adaptive.log_prob(draw.time[:500], x0=rows), atol=1e-9 if which is None else 1e-5)
        assert (-draw.log_prob).exp().mean().item() == pytest.approx(1, abs=5 * (-draw.log_prob).exp().std().item() / math.sqrt(n))
        ends = torch.tensor([0.0, math.nextafter(1, 0)], dtype=torch.float64)
        at_ends = adaptive.sample(2, x0=None if which is None else which.expand(2, -1), uniforms=ends).time
        assert ((at_ends >= 0) & (at_ends < 1)).all()
    assert not np.allclose(clock.plot_data().p, 1)  # it has moved at all


ALONE = {
    "sample": lambda s: s.sample(3),
    "log_prob": lambda s: s.log_prob(torch.tensor([0.5])),
    "log_pmf": lambda s: s.log_pmf(torch.tensor([5]), 10),
    "info": lambda s: s.info,
    "selected": lambda s: s.selected,
    "skipped": lambda s: s.skipped,
    "state_dict": lambda s: s.state_dict(),
    "load_state_dict": lambda s: s.load_state_dict({}),
    "in a mixture": lambda s: nc.Mixture(s).log_prob(torch.tensor([0.5])),
}


@pytest.mark.parametrize("ask", ALONE.values(), ids=ALONE)
def test_alone_it_says_that_it_needs_a_clock(ask):
    with pytest.raises(ValueError, match=r"Adaptive learns from a Clock: use it as nc\.Clock\(schedule, nc\.Adaptive\(\)"):
        ask(nc.Adaptive())


@every_variant
def test_repr_rebuilds_and_clocks_do_not_share_what_they_learn(sampler):
    again = eval(repr(sampler), vars(nc))
    assert repr(again) == repr(sampler)
    first, _, _ = started(sampler)
    assert first.sampler.probes == 4
    assert nc.Clock("linear", sampler).sampler.probes == 0


@every_variant
# what an optimiser keeps is its own, whatever the schedule
@pytest.mark.parametrize(("schedule", "make"), [("linear", torch.optim.Adam), ("flow", torch.optim.Adam), ("edm", torch.optim.SGD)])
def test_resuming_is_bit_exact(sampler, schedule, make):
    objective = {"linear": "eps"}.get(schedule, schedule)
    whole = started(sampler, schedule, steps=6, make=make, objective=objective)
    saved = copy.deepcopy(tuple(thing.state_dict() for thing in whole))
    rest = train(*whole, steps=6, seed=50)
    second = started(sampler, schedule, steps=0, make=make, objective=objective)
    for thing, state in zip(second, saved, strict=True):
        thing.load_state_dict(state)
    assert second[0].state_dict()["sampler"]["policy"].keys() == saved[0]["sampler"]["policy"].keys()  # saved again before any draw
    assert train(*second, steps=6, seed=50) == rest
    for p, q in zip(second[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(p, q)
    assert np.array_equal(second[0].plot_data().p, whole[0].plot_data().p)
    assert second[0].sampler.info == whole[0].sampler.info


def test_state_is_plain_and_survives_a_safe_load(tmp_path):
    clock, _, _ = started(nc.Adaptive(every=2))
    torch.save(clock.state_dict(), tmp_path / "state.pt")
    other, _, _ = started(nc.Adaptive(every=2), steps=0)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert np.array_equal(other.plot_data().p, clock.plot_data().p)


def test_a_state_learned_on_samples_of_another_shape_is_refused():
    state = started(nc.Adaptive(every=2))[0].state_dict()
    fresh, used = (started(nc.Adaptive(every=2), steps=0)[0] for _ in range(2))
    model = nn.Linear(3, 3)
    for clock in (fresh, used):
        clock.attach(torch.optim.Adam(model.parameters()), model=model)
    used.draw(torch.zeros(4, 3), predict=lambda x, t: model(x))
    with pytest.raises(ValueError, match=r"has learned on samples of shape \(3,\), the state's on \(2,\)"):
        used.load_state_dict(state)
    fresh.load_state_dict(state)  # the shape of the samples shows at the first draw, and then at every one
    for _ in range(2):
        with pytest.raises(ValueError, match=r"has learned on samples of shape \(2,\), got \(3,\)"):
            fresh.draw(torch.zeros(4, 3), predict=lambda x, t: model(x))


def test_a_state_of_before_the_first_draw_takes_a_used_sampler_back_to_the_start():
    beginning = copy.deepcopy(started(nc.Adaptive.scaled(every=2), steps=0)[0].state_dict())
    fresh, used = (started(nc.Adaptive.scaled(every=2), steps=steps) for steps in (0, 6))
    used[0].load_state_dict(beginning)
    used[1].load_state_dict(fresh[1].state_dict())
    used[2].load_state_dict(fresh[2].state_dict())
    assert train(*used, steps=6, seed=50) == train(*fresh, steps=6, seed=50)


def test_a_foreign_or_truncated_state_is_refused_and_nothing_changes():
    clock, _, _ = started(nc.Adaptive(every=2))
    before = copy.deepcopy(clock.state_dict())
    good = before["sampler"]
    policy = {name: value[:1] for name, value in good["policy"].items()}
    for bad, message in [
        ({k: v for k, v in good.items() if k != "queue"}, "its state must hold .*'queue'"),
        ({**good, "mean": good["mean"][:5]}, "must have 100 times"),
        ({**good, "policy": policy}, "has other layer sizes"),
        ({**good, "queue": {}}, "queue in the state must hold"),
    ]:
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict({**before, "sampler": bad})
        after = clock.state_dict()["sampler"]
        assert torch.equal(after["mean"], good["mean"])
        assert all(torch.equal(after["policy"][name], value) for name, value in good["policy"].items())
