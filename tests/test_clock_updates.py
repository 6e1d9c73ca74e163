"""Updates as the clock counts them: hooks, closures, skipped steps, replays, and the warnings around them."""

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch

import noiseclock as nc
from small_loops import Denoiser, Probing, data, train


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_updates_are_counted_under_accumulation(make):
    model = Denoiser()
    optimizer = make(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", "uniform").attach(optimizer)
    train(clock, model, optimizer, steps=5, accumulate=4)
    assert clock.updates == 5


def test_a_closure_that_draws_many_times_is_one_update():
    model = Denoiser()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    clock = nc.Clock("linear", "uniform").attach(optimizer)
    draws = []

    def closure():
        optimizer.zero_grad()
        b = clock.draw(data())
        draws.append(b.time)
        loss = clock.loss(b, model(b.x_t, b.t)).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.step(closure)
    assert clock.updates == 2
    assert len(draws) > 2
    assert not torch.equal(draws[0], draws[1])


class Own(torch.optim.SGD):
    """A user's optimiser: torch runs the hooks once for its step and once for that of its parent class, if there has been one of those too."""

    broken = False

    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("mine")
        return super().step(closure)


def test_a_step_within_a_step_is_one_update():
    model = Denoiser()
    torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Own(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    train(clock, model, optimizer, steps=4)
    assert clock.updates == 4
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * 2


@pytest.mark.parametrize("where", ["step", "closure"])
def test_after_a_step_that_raised_an_error_the_model_is_probed_anew(where):
    """By a user who leaves such a batch out and goes on: the next update belongs to another batch."""
    model = Denoiser()
    optimizer = Own(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    batches = []

    def closure():
        optimizer.zero_grad()
        batches.append(clock.draw(data(), predict=model))
        loss = clock.loss(batches[-1], model(batches[-1].x_t, batches[-1].t)).mean()
        loss.backward()
        if where == "closure" and len(batches) == 1:
            raise RuntimeError("mine")
        return loss

    def update():
        if where == "closure":
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()

    optimizer.broken = where == "step"
    with pytest.raises(RuntimeError, match="mine"):
        update()
    optimizer.broken = False
    for _ in range(2):
        optimizer.zero_grad()
        update()
    assert clock.updates == 2
    seen = [entry[2] for entry in clock.sampler.seen if entry[0] == "after"]
    # in a closure the second batch is probed; outside, it was drawn before the step that tells that the last one has failed
    assert [any(batch is b for b in batches[1:]) for batch in seen] == [True]


def test_a_closure_that_draws_many_times_is_probed_once_before_the_first_of_its_evaluations():
    """Each evaluation clears the gradients, as after a step that a GradScaler has skipped."""
    model = Denoiser()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    probed, before, batches = [], clock.sampler.before, []
    clock.sampler.before = lambda probe: (probed.append(model.net[0].weight.detach().clone()), before(probe))

    def closure():
        optimizer.zero_grad()
        batches.append(clock.draw(data(), predict=model))
        loss = clock.loss(batches[-1], model(batches[-1].x_t, batches[-1].t)).mean()
        loss.backward()
        return loss

    for update in range(4):  # a probe is due at the first and at the last
        start, first = model.net[0].weight.detach().clone(), len(batches)
        optimizer.step(closure)
        assert len(batches) > first + 1
        if update in (0, 3):
            assert torch.equal(probed.pop(), start)
            assert clock.sampler.seen[-1][2] is batches[first]
        assert not probed
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * 2


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("probing", [False, True], ids=["fixed", "probing"])
def test_a_step_skipped_by_a_grad_scaler_does_not_count(fused, probing):
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    clock = nc.Clock("linear", Probing() if probing else nc.Uniform()).attach(optimizer)
    poisoned = {1, 3}
    for step in range(6):
        b = clock.draw(data(), predict=model)
        scaler.scale(clock.loss(b, model(b.x_t, b.t)).mean()).backward()
        if step in poisoned:
            model.net[0].weight.grad[0, 0] = math.inf
        before = copy.deepcopy(model.state_dict())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved = not torch.equal(before["net.0.weight"], model.net[0].weight)
        assert moved == (step not in poisoned)
    assert clock.updates == 4
    if probing:
        # probes are due at updates 0 and 3; nothing is ever seen "after" a step that did not happen
        assert [entry[0] for entry in clock.sampler.seen] == ["before", "after", "before", "after"]


@pytest.mark.parametrize("cleared", ["to none", "to zero", "before the backward pass"])
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_a_skipped_probe_step_is_probed_again(fused, cleared):
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    for step in range(2):
        b = clock.draw(data(), predict=model)
        loss = clock.loss(b, model(b.x_t, b.t)).mean()
        if cleared == "before the backward pass":
            optimizer.zero_grad()
        scaler.scale(loss * math.inf if step == 0 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if cleared != "before the backward pass":
            optimizer.zero_grad(set_to_none=cleared == "to none")
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "before", "after"]
    assert clock.sampler.seen[-1][2] is b  # the batch that the update was made of
    assert clock.updates == 1


def test_wrapped_optimizers_are_unwrapped_and_a_second_attach_replaces_the_first():
    class Wrapper:
        def __init__(self, optimizer):
            self.optimizer = optimizer

    model = Denoiser()
    first, second = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    clock = nc.Clock("linear", "uniform").attach(Wrapper(Wrapper(first)))
    first.step()
    assert clock.updates == 1
    clock.attach(second)
    first.step()
    second.step()
    assert clock.updates == 2
    with pytest.raises(TypeError, match=r"needs a torch optimiser, got dict"):
        clock.attach({})


def halves(model):
    """An optimiser for the first linear layer of a Denoiser, and one for the rest."""
    first = list(model.net[0].parameters())
    return torch.optim.SGD(first, lr=0.1), torch.optim.Adam([p for p in model.parameters() if all(p is not q for q in first)], lr=0.1)


def test_of_several_optimisers_the_last_ends_an_update():
    model = Denoiser()
    first, last = halves(model)
    clock = nc.Clock("linear", Probing()).attach(first, last)
    b = clock.draw(data(), predict=model)
    clock.loss(b, model(b.x_t, b.t)).mean().backward()
    first.step()
    assert (clock.updates, [entry[0] for entry in clock.sampler.seen]) == (0, ["before"])
    last.step()
    assert (clock.updates, [entry[0] for entry in clock.sampler.seen]) == (1, ["before", "after"])
    assert not torch.equal(clock.sampler.seen[0][1], clock.sampler.seen[1][1])
    with pytest.raises(TypeError, match=r"needs a torch optimiser, got list"):
        clock.attach(first, [last])


@pytest.mark.parametrize(("order", "rests"), [("ABC", 1), ("ABC", 2), ("ABC", 4), ("ACB", 1), ("CAB", 1)])
def test_a_last_optimiser_that_steps_rarely_or_too_early_ends_updates_all_the_same(order, rests):
    """The first had begun another update by then, which was taken for an error in the last: no probe was ever completed."""
    model = Denoiser()
    first, rest = halves(model)
    alone = torch.optim.SGD([rest.param_groups[0]["params"].pop()], lr=0.1)
    optimizers = {"A": first, "B": rest, "C": alone}
    clock = nc.Clock("linear", Probing()).attach(first, rest, alone)
    for i in range(24):
        b = clock.draw(data(), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        for name in order:
            if name != "C" or i % rests == rests - 1:
                optimizers[name].step()
                optimizers[name].zero_grad()
    updates = 24 // rests
    assert clock.updates == updates
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * -(-updates // 3)


def test_an_optimiser_that_was_not_attached_is_told_of_once():
    model = Denoiser()
    first, last = halves(model)
    for attached, left_out in (([first], ["4", "net.2.weight"]), ([last], ["2", "net.0.weight"]), ([first, last], [])):
        clock = nc.Clock("linear", Probing()).attach(*attached)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(8):
                b = clock.draw(data(), predict=model)
                clock.loss(b, model(b.x_t, b.t)).mean().backward()
                for optimizer in (first, last):
                    optimizer.step()
                    optimizer.zero_grad()
        found = [
            re.search(r"(\d+) parameters of the model, such as (\S+), are trained by an optimiser that is not attached", str(w.message)) for w in said
        ]
        assert [part for match in found for part in match.groups()] == left_out
        assert clock.updates == 8


def test_an_update_that_the_hook_has_counted_is_not_counted_by_hand_too():
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", "uniform").attach(optimizer)
    clock.updated()  # of a loop whose optimiser runs no hook, as in a graph that was captured before
    optimizer.step()
    for skipped in (False, torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"would count them twice; remove the call"):
            clock.updated(skipped=skipped)
    clock.updated(skipped=True)
    assert clock.updates == 2
    copy.deepcopy(clock).updated()  # which is not attached


def test_replays_are_counted_by_hand_beside_the_hook_of_eager_steps(monkeypatch):
    """As around a CUDA graph: warm-up and an epoch's short last batch run as they are."""
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", "uniform").attach(optimizer)
    optimizer.step()
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        clock._steps._before(optimizer, (), {})
        clock._steps._after(optimizer, (), {})  # what optimizer.step() does in a capture; itself it would ask the device for more
    clock.updated()
    optimizer.step()
    clock.updated(skipped=torch.tensor(1.0))
    clock.updated(skipped=torch.tensor(0.0))
    assert clock.updates == 4


def test_step_is_draw_loss_and_updated_in_one():
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock, plain = nc.Clock("linear", "uniform"), nc.Clock("linear", "uniform")
    model.eval()
    for attached in (False, True):
        if attached:
            clock.attach(optimizer)
        with clock.step(model, data()) as losses:
            b = plain.draw(data())
            assert torch.equal(losses, plain.loss(b, model(b.x_t, b.t)))
            losses.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert clock.updates == 1 + attached


def test_an_error_inside_step_is_not_an_update():
    clock = nc.Clock("linear", "uniform")
    with pytest.raises(RuntimeError, match="mine"), clock.step(Denoiser(), data()):
        raise RuntimeError("mine")
    assert clock.updates == 0


def test_a_sampler_that_waits_for_updates_says_so_once():
    clock = nc.Clock("linear", nc.Annealed(nc.LogitNormal()))
    for _ in range(999):
        clock.draw(torch.zeros(1, 1))
    with pytest.warns(UserWarning, match="no optimiser update was seen, so the density of Annealed does not change"):
        clock.draw(torch.zeros(1, 1))
    for _ in range(1100):
        clock.draw(torch.zeros(1, 1))  # once is enough (warnings are errors here)
    fixed = nc.Clock("linear", "uniform")
    for _ in range(1100):
        fixed.draw(torch.zeros(1, 1))  # needs no update, so no warning


def test_a_warning_names_the_line_of_the_users_code():
    """Not one of ours, nor one of torch's that runs a hook after the optimiser's step."""
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive.scaled(every=1, stride=100, lr=1.0)).attach(optimizer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(8):
            b = clock.draw(data(), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
    assert any("lower `lr`, now 1" in str(w.message) for w in told)
    lines = Path(__file__).read_text().splitlines()
    assert {(w.filename, lines[w.lineno - 1].strip()) for w in told} == {(__file__, "optimizer.step()")}
