"""The adaptive sampler in other people's loops, in trouble and on many processes: it leaves alone what is not its own."""

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
from gaussians import Denoiser, ring, started, train
from known_densities import SCHEDULE
from noiseclock.core.probes import Probe
from noiseclock.core.selection import r_squared

# at the paper's learning rate a fresh policy moves fast, and says so
pytestmark = pytest.mark.filterwarnings("ignore:the sampling", "ignore:.*of the times are drawn less", "ignore:for five probes")

# --- other people's loops ----------------------------------------------------------------------------------------------------------------


def test_rewards_in_bfloat16_are_those_of_float32():
    """Probes run under autocast as the training does. An update moves the weights along their gradients, and so the losses by more than rounding."""
    torch.manual_seed(0)
    model = Denoiser(width=128)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = nc.Clock(SCHEDULE, "uniform").attach(optimizer)
    rewards = {None: [], torch.bfloat16: []}
    for update in range(60):
        x0 = ring().sample(256, torch.Generator().manual_seed(update))
        noise, time = torch.randn_like(x0), (torch.arange(256) + 0.5) / 256
        seen = rewards if update >= 50 else ()
        probes = {dtype: Probe(model, clock.schedule, clock.objective, x0, noise=noise, modules=[model], autocast=dtype) for dtype in seen}
        before = {dtype: probe.losses(time) for dtype, probe in probes.items()}
        b = clock.draw(x0)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for dtype, probe in probes.items():
            rewards[dtype].append(before[dtype] - probe.losses(time))
    exact, rounded = (torch.cat(found).double() for found in rewards.values())
    # measured: 10 %; on digits with a U-Net 4 to 9 %. Less than 0.1 % would mean that nothing was rounded
    assert 1e-3 < (rounded - exact).norm() / exact.norm() < 0.2


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("weighting", ["constant", "min-snr"])
def test_optimisers_and_weightings(make, weighting):
    clock, _, _ = started(nc.Adaptive.scaled(every=2), make=make, weighting=weighting)
    assert clock.sampler.probes == 4
    assert np.isfinite(clock.plot_data().effective).all()


def test_probes_do_not_touch_training_but_through_the_times():
    """With the density held at uniform by a policy that cannot move, training with and without probes is the same, bit for bit."""
    runs = []
    for every in (2, 1000):
        clock, model, _ = started(nc.Adaptive.scaled(every=every, lr=1e-30, floor=0.999), steps=7)
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
        clock = nc.Clock("cosine", nc.Adaptive.scaled(every=2, stride=50)).attach(optimizer)
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


@pytest.mark.parametrize(("beta_schedule", "rate"), [("linear", 0.01), ("scaled_linear", 0.001), ("squaredcos_cap_v2", 0.001)])
def test_the_policy_learns_as_fast_on_the_linear_schedule_of_diffusers(beta_schedule, rate):
    scheduler = pytest.importorskip("diffusers").DDPMScheduler(beta_schedule=beta_schedule)
    assert nc.Clock(scheduler, nc.Adaptive()).sampler.learning_rate == rate


def test_accumulation_probes_the_first_micro_batch():
    torch.manual_seed(0)
    model = Denoiser(width=16)
    optimizer = torch.optim.Adam(model.parameters())
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=2, stride=100)).attach(optimizer)
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
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=1, stride=100)).attach(optimizer)
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
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=2, stride=37)).attach(optimizer)
    train(clock, model, optimizer, steps=1)
    first = len(compiled)
    train(clock, model, optimizer, steps=6)
    assert clock.sampler.probes == 4
    assert len(compiled) == first


def test_a_default_dtype_of_the_users_changes_no_probe():
    torch.set_default_dtype(torch.float64)
    try:
        clock, _, _ = started(nc.Adaptive.scaled(every=1, stride=10), steps=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert clock.sampler.probes == 2
    assert {p.dtype for p in clock.sampler._policy.parameters()} == {torch.float32}


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
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=1, stride=100)).attach(optimizer)
    train(clock, model, optimizer, steps=3)
    model.broken = True
    train(clock, model, optimizer, steps=2)
    assert clock.sampler.skipped == 6
    assert all(p.isfinite().all() for p in clock.sampler._policy.parameters())
    assert np.isfinite(clock.plot_data().p).all()


def test_a_sample_that_is_no_number_is_drawn_for_and_breaks_nothing_else():
    """With normalize=True a mean density that is no number would make that of every loss until the next probe."""
    torch.manual_seed(0)
    model = Denoiser(width=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=1, stride=100), nc.MinSNR(normalize=True)).attach(optimizer)
    train(clock, model, optimizer, steps=2)
    x0 = torch.randn(8, 2)
    x0[0], x0[1, 0] = torch.nan, torch.inf
    b = clock.draw(x0, predict=model)
    losses = clock.loss(b, model(b.x_t, b.t))
    assert losses.isfinite().tolist() == [False, False, *[True] * 6]
    optimizer.step()  # without a gradient, as of a loop that leaves such a batch out
    assert clock.sampler.skipped == 2
    assert np.isfinite(clock.plot_data().effective).all()


def test_an_update_that_only_the_device_knows_was_lost_teaches_nothing():
    clock, model, optimizer = started(nc.Adaptive.scaled(every=1, stride=10), steps=4)
    sampler = clock.sampler
    policy = [p.detach().clone() for p in sampler._policy.parameters()]
    rows, reward, skipped, updates = sampler._queue.rows.clone(), sampler._reward.clone(), sampler.skipped, clock.updates
    b = clock.draw(ring().sample(32), predict=model)
    clock.loss(b, model(b.x_t, b.t))
    with torch.no_grad():
        next(model.parameters()).add_(0.1)  # so that there would be something to learn
    optimizer.found_inf = torch.tensor(1.0)  # as a GradScaler tells a fused one
    optimizer.step()
    assert sampler.probes == 5
    assert sampler.skipped == skipped + 32
    assert torch.equal(sampler._queue.rows, rows)
    assert torch.equal(sampler._reward, reward)
    assert clock.updates == updates
    assert all(torch.equal(a, p) for a, p in zip(policy, sampler._policy.parameters(), strict=True))


def test_warnings_are_given_once_with_advice():
    clock, _, _ = started(nc.Adaptive.scaled(every=2), steps=0)
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
    assert "The policy's learning rate is too high: lower `lr`, now 0.01" in messages[1]


def test_a_small_effective_sample_size_is_said_where_the_loss_is_corrected():
    """Beta(30, 1) over a uniform base: E_p[(base/p)²] is nearly 1/floor, so the effective size is nearly the floor."""
    for correct in ("none", "importance"):
        model = Denoiser()
        clock = nc.Clock(nc.schedule("linear", steps=100), nc.Adaptive.scaled(every=1, lr=1e-9, floor=0.02), correct=correct)
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
    with pytest.warns(UserWarning, match="40% of the times are drawn less than 2% as often as under uniform sampling: .* Raise `floor`"):
        clock.sampler._look(starved, 1.0)


def test_a_selection_no_better_than_chance_is_said():
    clock, _, _ = started(nc.Adaptive.scaled(every=2, queue=5, count=1), steps=0)
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
        (lambda: nc.Adaptive(variant="ours"), ValueError, "known: paper, released, scaled"),
        (lambda: nc.Adaptive(floor=0.0), ValueError, "so that every time can be drawn, got 0"),
        (lambda: nc.Adaptive(lr=-1.0), ValueError, "lr must be positive"),
        (lambda: nc.Adaptive().sample(3), ValueError, "learns from a Clock"),
        (lambda: nc.Clock(nc.schedule("linear", steps=2), "adaptive"), ValueError, "at least three times, but the schedule has only 2 steps; use"),
        (lambda: nc.Clock("linear", nc.Adaptive(stride=500)), ValueError, "leaves fewer than three of 1000 times"),
        (lambda: nc.Clock(SCHEDULE, nc.Adaptive(count=25)), ValueError, "count is 25, but the probe grid has only 20 times"),
        (lambda: nc.Clock("linear", "adaptive").draw(torch.zeros(4, 2)), ValueError, "Adaptive probes the model"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


# --- many processes ----------------------------------------------------------------------------------------------------------------------


EVERY = {"ddp": 2, "fsdp": 2, "fsdp of the root": 1}


def _rank(rank: int, port: int, wrapped: str, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = Denoiser(width=16)
        if wrapped == "ddp":
            model = DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in model.net:
                if isinstance(layer, nn.Linear) and wrapped == "fsdp":
                    fully_shard(layer)
            fully_shard(model)  # which stays gathered after a forward pass alone, such as that of the last probe
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        clock = nc.Clock(nc.schedule("linear", steps=99), nc.Adaptive.scaled(every=EVERY[wrapped])).attach(optimizer)
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


@pytest.mark.parametrize("wrapped", EVERY)
def test_ranks_share_queue_selection_and_policy_and_draw_different_times(wrapped, free_port):
    results = on_two(_rank, free_port, wrapped)
    (queue, policy, mean, times, probes), (queue2, policy2, mean2, times2, probes2) = results[0], results[1]
    assert probes == probes2 == (7 if EVERY[wrapped] == 1 else 4)
    assert torch.equal(queue["rows"], queue2["rows"])
    assert torch.equal(queue["selected"], queue2["selected"])
    assert all(torch.equal(policy[name], policy2[name]) for name in policy)
    assert torch.equal(mean, mean2)
    assert not any((a[:, None] == b).any() for a, b in zip(times, times2, strict=True))
    # and that state resumes on one process
    model = Denoiser(width=16)
    clock = nc.Clock(nc.schedule("linear", steps=99), nc.Adaptive.scaled(every=EVERY[wrapped]))
    clock.sampler.load_state_dict({**clock.sampler.state_dict(), "queue": queue, "mean": mean, "policy": policy, "shape": [2]})
    clock.draw(ring().sample(16), predict=model)
    assert torch.equal(clock.sampler._policy.state_dict()["net.1.weight"], policy["net.1.weight"])


def test_every_rank_and_seed_measures_after_the_update_with_its_own_fresh_noise():
    """That of the released code: the same on all ranks, it would not average out over them."""
    noises = []
    for seed, rank in ((0, 0), (0, 1), (1, 0)):
        torch.manual_seed(0)
        model = Denoiser(width=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = nc.Clock(nc.schedule("linear", steps=9), nc.Adaptive.released(every=1), seed=seed, rank=rank, world_size=2).attach(optimizer)
        for _ in range(2):
            b = clock.draw(ring().sample(16, torch.Generator().manual_seed(0)), predict=model)
            probe, before = clock._probe, clock._probe.noise
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            noises += [before, probe.noise]
    assert not any((x == y).any() for i, x in enumerate(noises) for y in noises[:i])


@pytest.mark.parametrize("place", [(None, None), (1, 2), (0, 4)], ids=["its own", "both the second", "of four"])
def test_two_ranks_probe_what_one_would(place, free_port):
    """The row of differences of rank 0's x0 is the same whether its times are shared out or not.

    And whatever place the clock was told: with a model that is split over ranks too, data ranks are not the ranks that talk to each other.
    """
    rows = on_two(_row, free_port, place)
    assert torch.equal(rows[0], rows[1])
    clock, probe = _probe_of(0)
    alone = clock.sampler._whole_grid(probe)
    # another grouping into chunks, so another order of float32 sums
    assert torch.allclose(rows[0], alone, rtol=1e-5)


def test_two_ranks_probe_with_the_caption_of_the_one_sample(free_port):
    """It is rank 0's, as strings or as tokens that every rank pads to its own longest."""
    rows = on_two(_captioned_row, free_port)
    clock, probe = _captioned(0)
    alone = clock.sampler._whole_grid(probe)
    for rank in (0, 1):  # another grouping into chunks, so another order of float32 sums
        assert torch.allclose(rows[rank], alone, rtol=1e-5)


def _captioned(rank: int):
    clock, probe = _probe_of(rank)
    net = probe.predict

    def predict(x_t, t, text, tokens):
        said = torch.tensor([float(caption) for caption in text])
        return net(x_t, t) + (said + tokens.sum((1, 2)))[:, None]

    cond = {"text": [str(rank + i) for i in range(8)], "tokens": torch.full((8, 2 + rank, 1), 0.1 + rank)}
    return clock, nc.Probe(predict, clock.schedule, clock.objective, probe.x0, cond, noise=probe.noise, modules=probe.modules)


def _captioned_row(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        clock, probe = _captioned(rank)
        results[rank] = clock.sampler._whole_grid(probe)
    finally:
        dist.destroy_process_group()


def _probe_of(rank: int, place=(None, None)):
    torch.manual_seed(0)
    model = Denoiser(width=16)
    clock = nc.Clock(nc.schedule("linear", steps=101), nc.Adaptive.scaled(every=2), rank=place[0], world_size=place[1])
    x0, noise = (torch.randn(8, 2, generator=torch.Generator().manual_seed(10 * rank + i)) for i in range(2))
    return clock, nc.Probe(model, clock.schedule, clock.objective, x0, noise=noise, modules=[model])


def _row(rank: int, port: int, place, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        clock, probe = _probe_of(rank, place)
        results[rank] = clock.sampler._whole_grid(probe)
    finally:
        dist.destroy_process_group()


def test_a_copy_of_the_model_is_told_of():
    """Its losses never change, which is no lack of S: no times would predict the mean over all."""
    model, copied = (Denoiser() for _ in range(2))
    points = torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock(nc.schedule("linear", steps=20), nc.Adaptive(every=1, queue=3)).attach(optimizer, model=model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(9):
            b = clock.draw(ring().sample(16, points), predict=copied)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [str(one.message).partition(",")[0] for one in told] == ["Adaptive: in 3 probes the optimiser's updates changed no loss"]
