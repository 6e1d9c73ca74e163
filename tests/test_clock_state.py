"""The state of a clock: what is saved goes on bit for bit, what is copied goes on by itself, and what belongs to another is refused."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch

import noiseclock as nc
from noiseclock.core.later import Later
from small_loops import FIXED, LEARNED, Denoiser, Probing, data, train


@pytest.mark.parametrize("sampler", FIXED, ids=repr)
@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
def test_resuming_is_bit_exact(sampler, schedule):
    """2N steps are N, saved, loaded into a new clock, and N more: times, noise, losses and record."""

    def make():
        fresh = eval(repr(sampler), {**vars(nc.schedules), **vars(nc)})
        return nc.Clock(schedule, fresh, nc.MinSNR(normalize=True), correct="none", seed=3)

    def run(clock, steps):
        out = []
        for _ in range(steps):
            b = clock.draw(data())
            out.append(torch.stack([b.time.float(), b.noise[:, 0], clock.loss(b, b.noise * 0.9)]))
            clock.updated()
        return out

    whole = make()
    expected = run(whole, 10)
    first = make()
    part = run(first, 5)
    state = first.state_dict()
    second = make()
    second.load_state_dict(copy.deepcopy(state))
    assert second.state_dict()["updates"] == 5
    part += run(second, 5)
    assert all(torch.equal(x, y) for x, y in zip(part, expected, strict=True))
    assert second.updates == whole.updates == 10
    for x, y in zip(second.record.by_time(), whole.record.by_time(), strict=True):
        assert np.array_equal(x, y, equal_nan=True)


@pytest.mark.parametrize("name", ["adaptive", "gradient-variance"])
def test_a_probe_right_after_resuming_looks_in_the_precision_of_training(name):
    """Autocast is around the model alone, so a clock knows of it from the predictions, and the first probe of a resumed run comes before any."""
    options = {"adaptive": {"every": 4, "stride": 100}, "gradient-variance": {"every": 4, "bins": 4, "samples": 8}}

    def made():
        torch.manual_seed(0)
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        return model, optimizer, nc.Clock("linear", nc.sampler(name, **options[name])).attach(optimizer)

    def run(model, optimizer, clock, steps):
        for step in steps:
            torch.manual_seed(step)  # dropout too
            b = clock.draw(torch.randn(32, 2), predict=model)
            with torch.autocast("cpu", torch.bfloat16):
                prediction = model(b.x_t, b.t)
            clock.loss(b, prediction).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return clock.sampler.state_dict()

    whole = made()
    run(*whole, range(8))  # the next probe is due at once
    saved = copy.deepcopy([part.state_dict() for part in whole])
    assert saved[2]["autocast"] == "bfloat16"
    resumed = made()
    for part, state in zip(resumed, saved, strict=True):
        part.load_state_dict(state)
    wanted, found = run(*whole, range(8, 10)), run(*resumed, range(8, 10))
    assert str(found) == str(wanted)
    assert all(torch.equal(x, y) for x, y in zip(resumed[0].parameters(), whole[0].parameters(), strict=True))


def test_a_state_of_before_autocast_was_saved_is_read():
    clock = nc.Clock("linear", "uniform")
    old = {name: part for name, part in clock.state_dict().items() if name != "autocast"}
    clock.load_state_dict(old)
    assert clock.state_dict()["autocast"] == ""


@pytest.mark.parametrize("changed", [{}, {"zero_terminal_snr": True}, {"beta": 500}, {"beta": 999}])
def test_of_two_schedules_with_many_betas_the_difference_is_shown(changed):
    """A thousand numbers are no sentence, and their beginnings may be alike."""
    betas = torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64)
    state = nc.Clock(nc.schedule("betas", betas=betas), "uniform").state_dict()
    if not changed:
        nc.Clock(nc.schedule("betas", betas=betas), "uniform").load_state_dict(state)
        return
    if "beta" in changed:
        betas[changed["beta"]] *= 1.01
    other = nc.Clock(nc.schedule("betas", betas=betas, zero_terminal_snr="beta" not in changed), "uniform")
    with pytest.raises(ValueError, match="the state belongs to another clock: its schedule is") as refused:
        other.load_state_dict(state)
    theirs, mine = str(refused.value).split("its schedule is ")[1].split(", this one's is ")
    assert theirs != mine
    assert len(str(refused.value)) < 500


def test_betas_that_another_processor_rounded_otherwise_are_the_same():
    """A diffusers scheduler computes them in float32, whose last digits depend on the processor's vector instructions."""
    betas = torch.linspace(1e-4, 0.02, 1000)
    state = nc.Clock(nc.schedule("betas", betas=betas), "uniform").state_dict()
    other = betas * (1 + 2e-7 * torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    assert not torch.equal(betas, other)
    nc.Clock(nc.schedule("betas", betas=other), "uniform").load_state_dict(state)
    with pytest.raises(ValueError, match="its seed is 1234567, this one's is 1234568"):  # whole numbers are exact
        nc.Clock("linear", "uniform", seed=1234568).load_state_dict(nc.Clock("linear", "uniform", seed=1234567).state_dict())


def test_a_damaged_density_is_refused():
    clock = nc.Clock("linear", "loss-second-moment")
    state = clock.state_dict()
    state["sampler"]["pmf"] = torch.zeros(64, dtype=torch.float64)
    with pytest.raises(ValueError, match="LossSecondMoment: the state is damaged: its probabilities add up to 0"):
        clock.load_state_dict(state)


def test_state_survives_torch_save_and_a_second_save_before_any_draw(tmp_path):
    clock = nc.Clock("linear", "speed")
    clock.draw(data())
    torch.save(clock.state_dict(), tmp_path / "state.pt")
    again = nc.Clock("linear", "speed")
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    third = nc.Clock("linear", "speed")
    third.load_state_dict(again.state_dict())
    b, c = clock.draw(data()), third.draw(data())
    assert torch.equal(b.time, c.time)
    assert torch.equal(b.noise, c.noise)


def test_a_state_resumes_on_another_number_of_ranks():
    saved = []
    for rank in range(2):
        clock = nc.Clock("linear", "uniform", rank=rank, world_size=2)
        clock.draw(data(8))
        saved.append((clock, clock.state_dict()))
    one = nc.Clock("linear", "uniform")
    one.load_state_dict(saved[0][1])
    union = torch.cat([clock.draw(data(8)).time for clock, _ in saved]).sort().values
    assert torch.equal(one.draw(data(16)).time.sort().values, union)
    # every rank may load rank 0's state: the noise streams still differ
    resumed = [nc.Clock("linear", "uniform", rank=rank, world_size=2) for rank in range(2)]
    for clock in resumed:
        clock.load_state_dict(saved[0][1])
    noises = [clock.draw(data(8)).noise for clock in resumed]
    assert not (noises[0] == noises[1]).any()


def test_a_foreign_or_truncated_state_is_refused_and_nothing_changes():
    clock = nc.Clock("linear", "speed", nc.MinSNR(5.0), seed=1)
    clock.draw(data())
    good = clock.state_dict()
    clock = nc.Clock("linear", "speed", nc.MinSNR(5.0), seed=1)
    cases = [
        ({k: v for k, v in good.items() if k != "draws"}, "not a complete state of a Clock: draws missing"),
        ({**good, "version": 99}, "version 99, but this library reads version 1 only"),
        ({**good, "sampler": {"x": 1}}, "has no state, got"),
        ({**good, "record": {}}, "50 bins"),
        ({**good, "noise": {"rank": 0}}, "noise is incomplete"),
        ({**good, "noise": {**good["noise"], "state": good["noise"]["state"].float()}}, "noise is incomplete"),  # all tensors cast, as of a model
        ({**good, "noise": {**good["noise"], "state": good["noise"]["state"][:100]}}, "noise is damaged"),
        ({**good, "record": {"sums": torch.full((3, 50), math.nan)}}, "record of losses in the state holds values that are not finite"),
        ({**good, "setup": None}, "not a complete state of a Clock: its setup is None"),
        ({**good, "record": [1]}, r"not a complete state of a Clock: its record is \[1\]"),
        ({**good, "draws": "x"}, "invalid literal"),
        ({**good, "autocast": "int8"}, "unknown autocast of the state 'int8'"),
        (None, "not a complete state of a Clock: it is None"),
        (nc.Clock("cosine", "speed", nc.MinSNR(5.0), seed=1).state_dict(), "its schedule is Cosine"),
        (nc.Clock("linear", "uniform", nc.MinSNR(5.0), seed=1).state_dict(), r"its sampler is Uniform\(\)"),
        (nc.Clock("linear", "speed", nc.MinSNR(4.0), seed=1).state_dict(), "its weighting is MinSNR.*gamma=4.0"),
        (nc.Clock("linear", "speed", nc.MinSNR(5.0), seed=2).state_dict(), "its seed is 2, this one's is 1"),
    ]
    twin = nc.Clock("linear", "speed", nc.MinSNR(5.0), seed=1)
    for used in (clock, twin):  # past the state, so that a part of it would show
        b = used.draw(data())
        used.loss(b, b.noise)
        used.updated()
    for state, message in cases:
        with pytest.raises(ValueError, match=message):
            clock.load_state_dict(state)
    assert clock.updates == twin.updates == 1
    assert np.array_equal(clock.record.by_time().drawn, twin.record.by_time().drawn)
    assert torch.equal(clock.draw(data()).noise, twin.draw(data()).noise)


def test_loading_into_a_used_clock_goes_on_from_the_state():
    clock = nc.Clock("linear", "speed")
    clock.draw(data())
    state = copy.deepcopy(clock.state_dict())
    expected = clock.draw(data())
    generator = clock.generator(torch.device("cpu"))
    clock.draw(data())
    clock.load_state_dict(state)
    again = clock.draw(data())
    assert torch.equal(again.noise, expected.noise)
    assert torch.equal(again.time, expected.time)
    assert clock.generator(torch.device("cpu")) is generator  # a captured graph may hold it


OFTEN = {  # options with which each learns within a dozen updates of 16 samples
    "adaptive": {"every": 2, "stride": 100, "queue": 3, "variant": "scaled"},
    "gradient-variance": {"every": 2, "pairs": 1, "bins": 4},
    "loss-ema": {},
    "loss-history": {"length": 1},
    "loss-second-moment": {"bins": 4, "warmup": 1},
    "lookahead": {"every": 2, "bins": 4, "warmup": 1},
    "variance-optimal": {"every": 2, "bins": 4, "warmup": 1},
}


def plain(state):
    """What a state holds, of tensors their values."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state.tolist() if isinstance(state, torch.Tensor) else state


@pytest.mark.parametrize("name", sorted(LEARNED))
def test_a_state_stays_what_it_was_while_its_clocks_go_on(name):
    """Neither the clock that gave it nor one that took it writes into it: torch's own optimisers do, which take tensors as they are."""
    assert set(OFTEN) == LEARNED
    clocks = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        clocks.append((nc.Clock("linear", nc.sampler(name, **OFTEN[name]), seed=1).attach(optimizer, model=model), model, optimizer))
    giver, taker = clocks
    train(*giver, 12)
    train(*taker, 3)  # so that it has tensors of its own to be loaded into
    state = giver[0].state_dict()
    before = plain(state)
    assert before["sampler"] != plain(nc.Clock("linear", nc.sampler(name, **OFTEN[name]), seed=1).state_dict())["sampler"]
    taker[0].load_state_dict(state)
    train(*giver, 12)
    train(*taker, 12)
    assert plain(taker[0].state_dict()) != before
    assert plain(state) == before


def test_inference_mode_leaves_the_clock_usable():
    """A validation pass before training must not turn the clock's counters into tensors that can never be written again."""
    with torch.inference_mode():
        clock = nc.Clock("linear", nc.Annealed(nc.LogitNormal(), start=0, stop=4), nc.MinSNR(normalize=True))
        clock.draw(data())
        clock.draw(torch.empty(4, 2, device="meta"), noise=torch.empty(4, 2, device="meta"))
    for _ in range(3):
        b = clock.draw(torch.empty(4, 2, device="meta"), noise=torch.empty(4, 2, device="meta"))
        clock.loss(b, b.noise)
        clock.updated()
    assert clock.sampler.share == 0.75


def test_a_probe_begun_in_inference_mode_can_be_learned_from():
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=5, stride=100)).attach(optimizer)
    with torch.inference_mode():
        clock.draw(data(), predict=model)  # as a look at the model before training does
    with clock.step(model, data()) as losses:
        losses.mean().backward()
        optimizer.step()
    assert clock.sampler.probes == 1


either_copy = pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))], ids=["deepcopy", "pickle"])


@either_copy
def test_a_copy_goes_on_by_itself_and_leaves_the_optimizer_behind(copied):
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", nc.SpeeD(), nc.ChangeAware()).attach(optimizer)
    clock.draw(data())
    again = copied(clock)
    assert torch.equal(again.draw(data()).noise, clock.draw(data()).noise)
    with again.step(model, data()) as losses:
        losses.mean().backward()
    optimizer.step()
    assert (again.updates, clock.updates) == (1, 1)


def test_looking_at_the_updates_of_one_rank_moves_none_of_its_probes():
    """As for a log or a checkpoint, after a step that a fused optimiser may have skipped: ranks that probe at different updates wait forever."""
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def go_on(clock, updates, look=False):
        due = []
        for i in updates:
            due.append(clock.due)
            clock.draw(data(), predict=model)
            clock.updated(skipped=torch.tensor(float(i == 1)))
            if look:
                clock.state_dict()
        return due

    def made():
        return nc.Clock("linear", nc.VarianceOptimal(every=4, bins=4)).attach(optimizer)

    silent, seen, resumed = made(), made(), made()
    due = go_on(silent, range(12))
    assert [i for i in range(12) if due[i]] == [0, 1, 3, 6, 10]
    assert go_on(seen, range(6), look=True) == due[:6]
    resumed.load_state_dict(seen.state_dict())
    for clock in (seen, resumed):
        assert go_on(clock, range(6, 12)) == due[6:]
        assert clock.updates == silent.updates == 11
        assert torch.equal(clock.sampler.curve[0], silent.sampler.curve[0])  # probes draw their noise by the update too


def test_a_saved_run_with_skipped_steps_resumes_exactly():
    """A fused optimiser under a GradScaler with an annealed sampler: the blend must follow the updates that were made, at once."""

    def run(clock, scaler, model, optimizer, steps):
        times = []
        for step in steps:
            b = clock.draw(data(), predict=model)
            times.append(b.time)
            scaler.scale(clock.loss(b, model(b.x_t, b.t)).mean()).backward()
            if step in (1, 2):
                model.net[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return times

    def make():
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
        clock = nc.Clock("linear", nc.Annealed(nc.LogitNormal(), start=0, stop=8)).attach(optimizer)
        return clock, torch.amp.GradScaler("cpu", init_scale=8.0), model, optimizer

    whole = make()
    expected = run(*whole, range(8))
    parts = make()
    times = run(*parts, range(4))
    second = make()
    second[0].load_state_dict(parts[0].state_dict())
    times += run(second[0], *parts[1:2], *second[2:], range(4, 8))
    assert all(torch.equal(x, y) for x, y in zip(times, expected, strict=True))
    assert whole[0].updates == 6


def test_the_base_may_be_annealed():
    clock = nc.Clock("linear", "uniform", base=nc.Annealed(nc.LogitNormal(), start=0, stop=10), correct="importance")
    for _ in range(5):
        clock.updated()
    assert clock.base.share == 0.5
    again = nc.Clock("linear", "uniform", base=nc.Annealed(nc.LogitNormal(), start=0, stop=10), correct="importance")
    again.load_state_dict(clock.state_dict())
    assert again.base.share == 0.5


def test_equal_settings_are_equal_however_written():
    nc.Clock("linear", "uniform", nc.MinSNR(5)).load_state_dict(nc.Clock("linear", "uniform", nc.MinSNR(5.0)).state_dict())
    for name in ("linear", "quadratic", "scaled-linear"):
        written = nc.schedule(name, beta_start=np.float64(0.0015), beta_end=np.float64(0.0195))
        read = nc.schedule(name, beta_start=0.0015, beta_end=0.0195)
        clock, again = nc.Clock(written, "uniform"), nc.Clock(read, "uniform")
        again.load_state_dict(clock.state_dict())
        assert clock.state_dict()["setup"] == again.state_dict()["setup"]


@pytest.mark.parametrize("wrap", [lambda sampler: sampler, nc.Mixture], ids=["itself", "in a mixture"])
def test_a_sampler_without_a_repr_resumes_in_another_run(wrap):
    """Python then shows where the object lies in memory, which no two runs share."""
    clock, resumed = (nc.Clock("linear", wrap(Probing())) for _ in range(2))
    assert repr(clock.sampler) != repr(resumed.sampler)
    resumed.load_state_dict(clock.state_dict())
    with pytest.raises(ValueError, match=r"its sampler is .*Probing object>"):
        nc.Clock("linear", "uniform").load_state_dict(clock.state_dict())


class Event:
    """In place of a CUDA event, which can be neither copied nor pickled either."""

    def __init__(self) -> None:
        self.waited_for = False

    def synchronize(self) -> None:
        self.waited_for = True

    def __reduce__(self):
        raise TypeError("cannot pickle 'Event' object")


@either_copy
def test_numbers_on_their_way_from_a_gpu_are_waited_for_by_a_copy(copied):
    """After a probe Adaptive has some under way until the next one: a clock must be copied all the same."""
    sent = Later(torch.arange(3.0))
    sent._arrived = event = Event()
    assert torch.equal(copied(sent).read(), torch.arange(3.0))
    assert event.waited_for
