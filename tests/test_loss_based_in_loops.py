"""Samplers that learn from losses in training loops: what a clock saves of them, when they stand still, and processes that share one density."""

import copy
import math

import pytest
import torch
import torch.distributed as dist

import noiseclock as nc
from forked import on_two
from made_up_losses import LINEAR, SMALL, T, caught, error_level, log_pmf
from noiseclock.core.loss_based import LossEMA, LossHistory, LossSecondMoment

LEARNERS = [
    LossSecondMoment(refresh=3, warmup=2),
    LossEMA(bins=20, refresh=4, warmup=2),
    LossHistory(length=2, refresh=2, floor=0.2),
    nc.Annealed(LossSecondMoment(bins=8, refresh=3, warmup=2), start=4, stop=30),
    nc.Mixture(LossEMA(bins=8, refresh=3, warmup=2)),
]


def run(clock, steps, n=32):
    out = []
    for _ in range(steps):
        for micro in range(2):
            b = clock.draw(torch.zeros(n, 2), micro=(micro, 2))
            losses = clock.loss(b, b.noise + (error_level(b.time).sqrt() * (1 + b.noise[:, 0].double().abs()))[:, None].float())
            out.append(torch.stack([b.time, b.correction, losses.double()]))
        clock.updated()
    return out


@pytest.mark.parametrize("sampler", LEARNERS, ids=repr)
def test_resuming_is_bit_exact(sampler, tmp_path):
    schedule = SMALL if "History" in repr(sampler) else LINEAR
    make = lambda: nc.Clock(schedule, sampler, nc.MinSNR(normalize=True), seed=3)  # noqa: E731
    whole = make()
    expected = run(whole, 20)
    first = make()
    part = run(first, 11)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = make()
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    part += run(second, 9)
    assert all(torch.equal(x, y) for x, y in zip(part, expected, strict=True))
    assert whole.corrected
    assert not torch.allclose(expected[-1][1], torch.ones_like(expected[-1][1]), atol=0.05)  # the density has changed


def test_two_clocks_do_not_share_what_one_sampler_learns():
    sampler = LossSecondMoment(refresh=1, warmup=1, bins=4)
    first, second = nc.Clock("linear", sampler), nc.Clock("linear", sampler)
    run(first, 5)
    assert not torch.equal(log_pmf(first.sampler), log_pmf(second.sampler))
    assert torch.equal(log_pmf(second.sampler), log_pmf(sampler))
    again = copy.deepcopy(first)
    assert torch.equal(run(again, 3)[-1], run(first, 3)[-1])


def test_a_bad_state_is_refused_and_nothing_changes():
    clock, twin = (nc.Clock(SMALL, LossSecondMoment(bins=8, refresh=3, warmup=2)) for _ in range(2))
    for each in (clock, twin):
        run(each, 4)
    good = clock.state_dict()
    mine = good["sampler"]
    other = nc.Clock(SMALL, LossHistory()).state_dict()["sampler"]
    cases = [
        ({}, "its state must hold count, faded, pending, pmf, seen, since, skipped, got nothing"),
        ({k: v for k, v in mine.items() if k != "faded"}, "got count, pending"),
        (other, "LossSecondMoment: its state must hold"),
        ({**mine, "pmf": mine["pmf"][:4]}, r"'pmf' of the state must be torch.float64 of shape \(8,\), got torch.float64 of shape \(4,\)"),
        ({**mine, "faded": mine["faded"].long()}, "'faded' of the state must be torch.float64"),
        ({**mine, "faded": mine["faded"] * math.nan}, "'faded' of the state holds values that are not finite"),
        ({**mine, "pmf": "x"}, "got 'x'"),
        ({**mine, "since": 1.5}, "'since' of the state must be a whole number, got 1.5"),
    ]
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict({**good, "sampler": state})
    assert all(torch.equal(x, y) for x, y in zip(run(clock, 7), run(twin, 7), strict=True))


def test_a_sampler_that_sees_no_updates_says_so_once():
    clock = nc.Clock("linear", LossSecondMoment())
    (message,) = caught(lambda: [clock.draw(torch.zeros(1, 1)) for _ in range(2500)])
    assert "no optimiser update was seen, so the density of LossSecondMoment does not change; call clock.attach" in message


@pytest.mark.parametrize("make", [LossSecondMoment, LossHistory])
def test_a_sampler_that_hears_of_no_loss_says_so_once(make):
    def learn(loss):
        clock = nc.Clock("linear", make())
        for _ in range(300):
            b = clock.draw(torch.ones(2, 1))
            loss(clock, b)
            clock.updated()

    (message,) = caught(lambda: learn(lambda clock, b: (b.x_t - b.target).square().mean() * b.weight))
    assert message.startswith(f"{make.__name__} has seen no loss, so it cannot learn; use clock.loss(b, prediction)")
    assert caught(lambda: learn(lambda clock, b: clock.loss(b, b.x_t))) == []


def test_validation_inside_inference_mode_leaves_it_usable():
    clock = nc.Clock(LINEAR, LossSecondMoment(refresh=2, warmup=1))
    with torch.inference_mode(), pytest.warns(UserWarning, match="without gradients is taken for a validation"):
        run(clock, 3)
    run(clock, 3)
    assert clock.updates == 6


def test_a_blend_tells_of_both_parts_and_how_far_it_is():
    clock = nc.Clock("linear", nc.Annealed(nc.LossSecondMoment(), nc.LossEMA(), stop=4))
    b = clock.draw(torch.zeros(8, 2))
    clock.loss(b, torch.full((8, 2), torch.nan))
    clock.updated()
    # both see every loss; nothing is known, so both draw from the base, whose effective sample size is the batch
    assert clock.sampler.info == pytest.approx({"ess": 1, "skipped": 8, "other_ess": 1, "other_skipped": 8, "share": 0.25}, abs=1e-12)


# --- ranks --------------------------------------------------------------------------------------------------------------------------------


def _learn(rank, world_size, port, results):
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        found = []
        for sampler, schedule in ((LossSecondMoment(bins=16, refresh=3, warmup=2), LINEAR), (LossHistory(length=4, floor=0.1, refresh=2), SMALL)):
            clock = nc.Clock(schedule, sampler, seed=5)
            for _ in range(24):
                b = clock.draw(torch.zeros(32 // world_size, 1))
                # the loss depends on the time alone, so that it does not matter who drew it; squares of float32 are what is learned from
                clock.loss(b, b.noise + (0.1 + b.time).sqrt()[:, None].float())
                clock.updated()
            found.append(clock.sampler.log_pmf(torch.arange(T), T))
        results[rank] = found
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def test_two_processes_share_one_density_which_is_that_of_one_process(free_port):
    results = on_two(_learn, 2, free_port)
    first, second = results[0], results[1]
    alone = {}
    _learn(0, 1, 0, alone)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
        assert one.exp().std() > 1e-4
    # of a step's last four losses different ones may stay, as ranks join theirs in another order, so the history is compared by its level only;
    # binned sums differ by float32 noise, of which a loss keeps seven digits
    assert torch.allclose(first[0], alone[0][0], rtol=0, atol=1e-5)
    assert torch.allclose(first[1], alone[0][1], rtol=0, atol=0.1)
