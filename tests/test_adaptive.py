"""The adaptive sampler: what it measures, that it learns where the answer is known, and that it leaves everything else alone."""

import copy
import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import noiseclock as nc
from gaussians import Denoiser, ring
from noiseclock.core.policy import BetaCells
from noiseclock.core.selection import best_by_f, r_squared

VARIANTS = [nc.Adaptive(every=2, count=2), nc.Adaptive.paper(every=2), nc.Adaptive.released(every=2), nc.Adaptive(every=2, select="greedy", stride=7)]
# at the paper's learning rate a fresh policy moves fast, and says so
pytestmark = pytest.mark.filterwarnings("ignore:the sampling", "ignore:.*of the times are drawn less", "ignore:for five probes")
every_variant = pytest.mark.parametrize("sampler", VARIANTS, ids=repr)


def train(clock, model, optimizer, steps, batch=16, seed=0, accumulate=1):
    data = ring()
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            x0 = data.sample(batch, torch.Generator().manual_seed(1000 * (seed + step) + micro))
            b = clock.draw(x0, predict=model, micro=(micro, accumulate))
            loss = clock.loss(b, model(b.x_t, b.t)).mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def started(sampler, schedule="linear", steps=8, make=torch.optim.Adam, objective="eps", **options):
    torch.manual_seed(0)
    model = Denoiser(width=32)
    optimizer = make(model.parameters(), lr=1e-3)
    schedule = nc.schedule(schedule, **({"steps": 100} if schedule == "linear" else {}))
    clock = nc.Clock(schedule, copy.deepcopy(sampler), objective=objective, **options).attach(optimizer)
    train(clock, model, optimizer, steps)
    return clock, model, optimizer


# --- problems with a known answer --------------------------------------------------------------------------------------------------------

T, LOW = 20, 5
SCHEDULE = nc.schedule("linear", steps=T, beta_end=0.3)


class OwnParameters(nn.Module):
    """The paper's section 4: a parameter for every time. Those of the low times are wrong, each costing the bound as much, the others right.

    Three samples of one time nearly mend it and more are wasted, so the best density is spread over the low times.
    """

    objective, lr = "eps", 9.0

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(T, 4))
        self.reset()

    def reset(self) -> None:
        self.theta.data.zero_()
        self.theta.data[:LOW] = SCHEDULE.vlb(SCHEDULE.grid())[:LOW, None].rsqrt()

    def forward(self, x_t, t):
        return self.theta[t]


class SharedParameter(nn.Module):
    """Times that interfere: one parameter, wanted at +1 by the low times and at -1 by the others, whose terms of the bound are smaller."""

    objective, lr = "x0", 0.5

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(4))
        self.register_buffer("sign", torch.where(torch.arange(T) < LOW, 1.0, -1.0))

    def reset(self) -> None:
        self.theta.data.zero_()

    def forward(self, x_t, t):
        return self.theta * self.sign[t][:, None]


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


def best_density(problem, batch=16, trials=400) -> np.ndarray:
    """(T,) by direct search: of a grid of Beta distributions, the one whose batches lower the bound most in one update."""
    parameters = torch.cartesian_prod(*[torch.tensor([0.1, 0.3, 1.0, 3.0, 10.0, 30.0], dtype=torch.float64)] * 2)
    pmfs = BetaCells(T).mass(parameters)
    model = problem()
    weight = nc.VLB()(SCHEDULE, SCHEDULE.grid(), nc.objective(model.objective))
    x0, noise = 1 + 0.3 * torch.randn(512, 4, generator=torch.Generator().manual_seed(0)), torch.randn(512, 4)
    probe = nc.Probe(model, SCHEDULE, nc.objective(model.objective), x0, noise=noise, modules=[model])
    worth = torch.zeros(len(pmfs))
    clock = nc.Clock(SCHEDULE, "uniform", objective=model.objective)
    for i, pmf in enumerate(pmfs):
        generator = torch.Generator().manual_seed(1)
        for _ in range(trials // len(pmfs) + 3):
            model.reset()
            step = torch.multinomial(pmf, batch, replacement=True, generator=generator)
            data = 1 + 0.3 * torch.randn(batch, 4, generator=generator)
            b = clock.at(data, SCHEDULE.time_of(step), generator=generator)
            loss = clock.loss(b, model(b.x_t, b.t)).mean()
            (gradient,) = torch.autograd.grad(loss, [model.theta])
            time = SCHEDULE.grid().repeat_interleave(len(x0) // 16)
            rows = torch.arange(len(x0) // 16).repeat(T)
            before = probe.losses(time, rows)
            model.theta.data -= model.lr * gradient
            fall = (before - probe.losses(time, rows)).view(T, -1).mean(1)
            worth[i] += (fall * weight).mean().item()
    return pmfs[worth.argmax()].numpy()


def distance(p, q) -> float:
    """Total variation."""
    return float(np.abs(p - q).sum() / 2)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("problem", [OwnParameters, SharedParameter])
def test_it_moves_towards_the_best_density_by_direct_search(problem):
    """Five seeds, 150 probes. The authors' released reward, with fresh noise, is farther from the best density than ours on both problems."""
    best = best_density(problem)

    def distances(make):
        return [distance(learned_density(problem, make(every=1, lr=0.003, hidden=32), seed), best) for seed in range(5)]

    uniform, found, released = distance(np.full(T, 1 / T), best), distances(nc.Adaptive), distances(nc.Adaptive.released)
    show = lambda values: ", ".join(f"{value:.2f}" for value in values)  # noqa: E731
    print(f"{problem.__name__}: distance from the best density: uniform {uniform:.2f}; Adaptive {show(found)}; released {show(released)}")
    assert uniform > 0.35
    assert max(found) < 0.75 * uniform
    assert np.mean(found) < 0.6 * uniform
    assert np.mean(released) > np.mean(found)


def test_stratified_batches_would_hide_what_is_to_be_learned():
    """The composition of a batch must vary for its reward to say anything: stratified, the share of low times is the same in every batch."""
    shares = {}
    for name, sampler in (("independent", nc.Adaptive()), ("stratified", nc.Uniform())):
        clock = nc.Clock(SCHEDULE, sampler)
        model = OwnParameters()
        shares[name] = np.std([(clock.draw(torch.zeros(16, 4), predict=model).t < LOW).float().mean().item() for _ in range(200)])
    assert shares["stratified"] == 0
    assert shares["independent"] == pytest.approx(math.sqrt(0.25 * 0.75 / 16), rel=0.2)


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


def test_selected_times_predict_the_whole_better_than_random_ones():
    """On a partly trained model, over five seeds: chosen on 20 probes, judged on those and on the next 40."""
    inside, outside = [], []
    for seed in range(5):
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
            random = [torch.randperm(50, generator=generator)[:3] for _ in range(200)]
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


@every_variant
def test_repr_rebuilds_and_clocks_do_not_share_what_they_learn(sampler):
    again = eval(repr(sampler), vars(nc))
    assert repr(again) == repr(sampler)
    first, _, _ = started(sampler)
    assert first.sampler.probes == 4
    assert nc.Clock("linear", sampler).sampler.probes == 0


@every_variant
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_resuming_is_bit_exact(sampler, schedule, make):
    objective = {"linear": "eps"}.get(schedule, schedule)
    whole = started(sampler, schedule, steps=6, make=make, objective=objective)
    rest = train(*whole, steps=6, seed=50)
    first = started(sampler, schedule, steps=6, make=make, objective=objective)
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict(), first[2].state_dict()))
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


def test_a_foreign_or_truncated_state_is_refused_and_nothing_changes():
    clock, _, _ = started(nc.Adaptive(every=2))
    before = copy.deepcopy(clock.state_dict())
    good = before["sampler"]
    policy = {name: value[:1] for name, value in good["policy"].items()}
    for bad, message in [
        ({k: v for k, v in good.items() if k != "queue"}, "its state has .*'queue'"),
        ({**good, "mean": good["mean"][:5]}, "not one over 100 times"),
        ({**good, "policy": policy}, "not one of this width and shape"),
        ({**good, "queue": {}}, "which the state given does not hold"),
    ]:
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict({**before, "sampler": bad})
        after = clock.state_dict()["sampler"]
        assert torch.equal(after["mean"], good["mean"])
        assert all(torch.equal(after["policy"][name], value) for name, value in good["policy"].items())


# --- other people's loops ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("weighting", ["constant", "min-snr"])
def test_optimisers_and_weightings(make, weighting):
    clock, _, _ = started(nc.Adaptive(every=2), make=make, weighting=weighting)
    assert clock.sampler.probes == 4
    assert np.isfinite(clock.plot_data().effective).all()


def test_probes_do_not_touch_training_but_through_the_times():
    """With the density held at uniform by a policy that cannot move, training with and without probes is the same, bit for bit."""
    runs = []
    for every in (2, 1000):
        clock, model, _ = started(nc.Adaptive(every=every, lr=1e-30, floor=0.999), steps=7)
        runs.append((clock.sampler.probes, [p.clone() for p in model.parameters()]))
    assert [probes for probes, _ in runs] == [4, 1]
    for p, q in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(p, q)


def test_images_latents_and_conditioning():
    class Conditional(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.net, self.embed = nn.Conv2d(channels, channels, 3, padding=1), nn.Embedding(10, channels)

        def forward(self, x_t, t, label):
            return self.net(x_t) + self.embed(label)[:, :, None, None]

    for shape in ((3, 16, 16), (4, 8, 8)):
        model = Conditional(shape[0])
        optimizer = torch.optim.Adam(model.parameters())
        clock = nc.Clock("cosine", nc.Adaptive(every=2, stride=50)).attach(optimizer)
        for _ in range(5):
            x0, label = torch.randn(6, *shape), torch.arange(6)
            b = clock.draw(x0, predict=model, cond={"label": label})
            clock.loss(b, model(b.x_t, b.t, label)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert clock.sampler.probes == 3
        with pytest.raises(ValueError, match="has learned on samples of shape"):
            clock.draw(torch.randn(6, 5, 4, 4), predict=model)
    assert clock.sampler.learning_rate == 0.001
    assert nc.Clock("linear", nc.Adaptive()).sampler.learning_rate == 0.01


def test_accumulation_probes_the_first_micro_batch():
    torch.manual_seed(0)
    model = Denoiser(width=16)
    optimizer = torch.optim.Adam(model.parameters())
    clock = nc.Clock("linear", nc.Adaptive(every=2, stride=100)).attach(optimizer)
    train(clock, model, optimizer, steps=6, accumulate=4)
    assert clock.updates == 6
    assert clock.sampler.probes == 3


def test_a_probe_goes_with_the_batch_that_it_saw_whatever_is_drawn_before_the_update(monkeypatch):
    """A loop that accumulates without saying so, whose last batch is smaller: the reward of x0 belongs to the times that x0 was trained at."""
    torch.manual_seed(0)
    model, pairs = Denoiser(width=16), []
    optimizer = torch.optim.Adam(model.parameters())
    after = nc.Adaptive.after
    monkeypatch.setattr(nc.Adaptive, "after", lambda self, probe, batch: (pairs.append((probe.x0, batch.x0)), after(self, probe, batch)))
    clock = nc.Clock("linear", nc.Adaptive(every=1, stride=100)).attach(optimizer)
    for _ in range(2):
        for size in (8, 6):
            b = clock.draw(torch.randn(size, 2), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
    assert clock.sampler.probes == len(pairs) == 2
    assert all(torch.equal(probed, drawn) and len(drawn) == 8 for probed, drawn in pairs)


def test_a_compiled_model_compiles_no_more_after_the_first_probe():
    compiled = []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    torch.manual_seed(0)
    model = torch.compile(Denoiser(width=8), backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive(every=2, stride=37)).attach(optimizer)
    train(clock, model, optimizer, steps=1)
    first = len(compiled)
    train(clock, model, optimizer, steps=6)
    assert clock.sampler.probes == 4
    assert len(compiled) == first


# --- trouble -----------------------------------------------------------------------------------------------------------------------------


def test_rewards_that_are_no_numbers_are_skipped_and_counted():
    class Breaks(Denoiser):
        broken = False

        def forward(self, x_t, t):
            out = super().forward(x_t, t)
            return torch.where(torch.arange(len(out))[:, None] < 3, torch.nan, out) if self.broken and not self.training else out

    torch.manual_seed(0)
    model = Breaks(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive(every=1, stride=100)).attach(optimizer)
    train(clock, model, optimizer, steps=3)
    model.broken = True
    train(clock, model, optimizer, steps=2)
    assert clock.sampler.skipped == 6
    assert all(p.isfinite().all() for p in clock.sampler._policy.parameters())
    assert np.isfinite(clock.plot_data().p).all()


def test_an_update_that_only_the_device_knows_was_lost_teaches_nothing():
    clock, model, _ = started(nc.Adaptive(every=1, stride=10), steps=4)
    sampler = clock.sampler
    policy = [p.detach().clone() for p in sampler._policy.parameters()]
    rows, reward, skipped, updates = sampler._queue.rows.clone(), sampler._reward.clone(), sampler.skipped, clock.updates
    b = clock.draw(ring().sample(32), predict=model)
    clock.loss(b, model(b.x_t, b.t))
    with torch.no_grad():
        next(model.parameters()).add_(0.1)  # so that there would be something to learn
    clock.updated(skipped=torch.tensor(1.0))
    assert sampler.probes == 5
    assert sampler.skipped == skipped + 32
    assert torch.equal(sampler._queue.rows, rows)
    assert torch.equal(sampler._reward, reward)
    assert clock.updates == updates
    assert all(torch.equal(a, p) for a, p in zip(policy, sampler._policy.parameters(), strict=True))


def test_warnings_are_given_once_with_advice():
    clock, _, _ = started(nc.Adaptive(every=2), steps=0)
    adaptive = clock.sampler
    collapsed = torch.full((100,), adaptive.floor / 100, dtype=torch.float64)
    collapsed[:3] += (1 - adaptive.floor) / 3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            adaptive._look(collapsed, 1.0)
    messages = [str(w.message) for w in caught]
    assert len(messages) == 2
    assert "collapsed: 99 % of its mass lies in 5 % of the times. Raise `entropy`" in messages[0]
    assert "The policy's learning rate, 0.01, is too high" in messages[1]


def test_a_small_effective_sample_size_is_said_where_the_loss_is_corrected():
    """Beta(30, 1) over a uniform base: E_p[(base/p)²] is nearly 1/floor, so the effective size is nearly the floor."""
    for correct in ("none", "importance"):
        model = Denoiser()
        clock = nc.Clock(nc.schedule("linear", steps=100), nc.Adaptive(every=1, lr=1e-9, floor=0.02), correct=correct)
        clock.draw(torch.zeros(8, 2), predict=model)
        last = clock.sampler._policy.net[-1]
        torch.nn.init.zeros_(last.weight)
        with torch.no_grad():
            last.bias.copy_(torch.tensor([30.0, math.log(math.e - 1)]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            clock.updated()
        said = [str(w.message) for w in caught if "effective sample size" in str(w.message)]
        assert len(said) == (correct == "importance")
    assert "of 2." in said[0] or "of 3." in said[0]
    assert "Raise `floor`, now 0.02" in said[0]


def test_starved_times_are_said():
    clock, _, _ = started(nc.Adaptive.paper(every=2), steps=0)
    starved = torch.full((100,), 0.001 / 100, dtype=torch.float64)
    starved[:60] += 0.999 / 60
    clock.sampler._mean.set_(starved)  # no jump
    with pytest.warns(UserWarning, match="40% of the times are drawn less than 2% as often as uniformly: .* Raise `floor`"):
        clock.sampler._look(starved, 1.0)


def test_a_selection_no_better_than_chance_is_said():
    clock, _, _ = started(nc.Adaptive(every=2, queue=5, count=1), steps=0)
    adaptive = clock.sampler
    # one column carries the mean, and the selection is held elsewhere
    rows = 1e-3 * torch.randn(5, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows[:, 7] += torch.arange(5.0) * 100
    worst = min(range(100), key=lambda c: r_squared(rows, torch.tensor([c])))
    adaptive._queue.rows, adaptive._queue.selected = rows, torch.tensor([worst])
    for _ in range(4):
        adaptive._look_at_selection()
    with pytest.warns(UserWarning, match="no better than random ones"):
        adaptive._look_at_selection()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nc.Adaptive(every=0), ValueError, "every must be a whole number of at least 1, got 0"),
        (lambda: nc.Adaptive(queue=2), ValueError, "queue must be a whole number of at least 3, got 2"),
        (lambda: nc.Adaptive(select="best"), ValueError, "known: all, f, greedy"),
        (lambda: nc.Adaptive(variant="ours"), ValueError, "known: noiseclock, paper, released"),
        (lambda: nc.Adaptive(floor=0.0), ValueError, "so that every time stays reachable, got 0"),
        (lambda: nc.Adaptive(lr=-1.0), ValueError, "lr must be positive"),
        (lambda: nc.Adaptive().sample(3), ValueError, "learns from a Clock"),
        (lambda: nc.Clock("linear", nc.Adaptive(stride=500)), ValueError, "leaves fewer than three of 1000 times"),
        (lambda: nc.Clock(SCHEDULE, nc.Adaptive(count=25)), ValueError, "25 times cannot be selected from every 1th of 20"),
        (lambda: nc.Clock("linear", "adaptive").draw(torch.zeros(4, 2)), ValueError, "Adaptive looks at the model"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- many processes ----------------------------------------------------------------------------------------------------------------------


def _rank(rank: int, port: int, wrapped: str, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = Denoiser(width=16)
        if wrapped == "ddp":
            model = DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in model.net:
                if isinstance(layer, nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        clock = nc.Clock(nc.schedule("linear", steps=99), nc.Adaptive(every=2)).attach(optimizer)
        data, times = ring(), []
        for step in range(7):
            # the last batch is uneven, as at the end of an epoch
            size = 16 if step < 6 or rank == 0 else 12
            x0 = data.sample(size, torch.Generator().manual_seed(10 * step + rank))
            b = clock.draw(x0, predict=model)
            times.append(b.time)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = clock.state_dict()["sampler"]
        results[rank] = (state["queue"], state["policy"], state["mean"], times[:6], clock.sampler.probes)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrapped", ["ddp", "fsdp"])
def test_ranks_share_queue_selection_and_policy_and_draw_different_times(wrapped, free_port):
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_rank, args=(free_port, wrapped, results), nprocs=2)
        (queue, policy, mean, times, probes), (queue2, policy2, mean2, times2, probes2) = results[0], results[1]
    assert probes == probes2 == 4
    assert torch.equal(queue["rows"], queue2["rows"])
    assert torch.equal(queue["selected"], queue2["selected"])
    assert all(torch.equal(policy[name], policy2[name]) for name in policy)
    assert torch.equal(mean, mean2)
    assert not any((a[:, None] == b).any() for a, b in zip(times, times2, strict=True))
    # and that state resumes on one process
    model = Denoiser(width=16)
    clock = nc.Clock(nc.schedule("linear", steps=99), nc.Adaptive(every=2))
    clock.sampler.load_state_dict({**clock.sampler.state_dict(), "queue": queue, "mean": mean, "policy": policy, "shape": [2]})
    clock.draw(ring().sample(16), predict=model)
    assert torch.equal(clock.sampler._policy.state_dict()["net.1.weight"], policy["net.1.weight"])


def test_two_ranks_probe_what_one_would(free_port):
    """The row of differences of rank 0's x0 is the same whether its times are shared out or not."""
    with mp.Manager() as manager:
        results = manager.dict()
        mp.spawn(_row, args=(free_port, results), nprocs=2)
        rows = [results[0], results[1]]
    assert torch.equal(rows[0], rows[1])
    clock, probe = _probe_of(0)
    alone = clock.sampler._whole_grid(probe)
    # another grouping into chunks, so another order of float32 sums
    assert torch.allclose(rows[0], alone, rtol=1e-5)


def _probe_of(rank: int):
    torch.manual_seed(0)
    model = Denoiser(width=16)
    clock = nc.Clock(nc.schedule("linear", steps=101), nc.Adaptive(every=2))
    x0, noise = (torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2))
    return clock, nc.Probe(model, clock.schedule, clock.objective, x0, noise=noise, modules=[model])


def _row(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        clock, probe = _probe_of(rank)
        results[rank] = clock.sampler._whole_grid(probe)
    finally:
        dist.destroy_process_group()
