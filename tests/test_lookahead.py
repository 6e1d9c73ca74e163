"""The first-order utility of times: against exact gradients, its bias where it prices what it asked, and the density that follows from it."""

import copy
import re
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import noiseclock as nc
from forked import on_two
from gaussians import Denoiser, ring
from noiseclock.core.batch import noised
from noiseclock.core.directions import ALONG, derivative
from noiseclock.core.lookahead import TARGETS, _gradient, utility
from noiseclock.core.objectives import squared_error
from noiseclock.core.priced import evenly
from noiseclock.lab.captured import CapturedForward

BINS = 5


def trained_a_little(sampler="uniform", weighting="constant"):
    """A denoiser of the ring after ten updates, when gradients still have a mean, and a clock whose SGD makes the metric plain."""
    torch.manual_seed(0)
    model, data = Denoiser(width=24), ring()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    clock = nc.Clock("linear", "uniform", seed=1)
    points = torch.Generator().manual_seed(5)
    for _ in range(10):
        b = clock.draw(data.sample(64, points))
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    clock = nc.Clock("linear", sampler, weighting, seed=2).attach(torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    return model, data, clock


def gradient_at(model, data, clock, time, weighting, generator):
    """The gradient of the mean weighted loss of fresh samples at times (n,)."""
    x0 = data.sample(len(time), generator)
    x_t, target = noised(clock.schedule, clock.objective, x0, torch.randn(x0.shape, generator=generator), time)
    loss = squared_error(model(x_t, clock.schedule.condition(time)), target) * weighting(clock.schedule, time, clock.objective)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss.mean(), list(model.parameters()))])


def probes_of(clock, model, data, count, size=64):
    points = torch.Generator().manual_seed(7)
    for _ in range(count):
        clock._updates += 1  # by which a probe draws its noise
        clock.probe(data.sample(size, points), model)
        yield clock._probe


@pytest.mark.parametrize(("weighting", "target"), [("constant", "simple"), ("min-snr", "min-snr")])
def test_the_utility_is_the_gradient_along_that_of_the_target(weighting, target):
    """E u at t is E g_t · P∇J, both of them means over fresh samples: the two halves of a batch know nothing of each other."""
    model, data, clock = trained_a_little(weighting=weighting)
    parameters = list(model.parameters())
    generator, many = torch.Generator().manual_seed(9), 40_000
    whole = gradient_at(model, data, clock, evenly(many, 0.3, torch.device("cpu")), TARGETS[target](), generator)
    wanted = []
    for b in range(BINS):
        time = (b + evenly(many // 4, 0.3, torch.device("cpu"))) / BINS
        wanted.append(float(gradient_at(model, data, clock, time, clock.weighting, generator) @ whole))
    wanted = torch.tensor(wanted, dtype=torch.float64)
    sums, squares, count = torch.zeros(BINS).double(), torch.zeros(BINS).double(), 1400
    for number, probe in enumerate(probes_of(clock, model, data, count)):
        time, found = utility(probe, clock.weighting, TARGETS[target](), [1.0] * len(parameters), number=number)
        mean = torch.stack([found[(time * BINS).long() == b].mean() for b in range(BINS)])
        sums, squares = sums + mean, squares + mean.square()
    mean, error = sums / count, ((squares / count - (sums / count).square()) / count).sqrt()
    # within three standard errors, which are small; the last part is the error of `wanted` itself
    assert ((mean - wanted).abs() < 3 * error + 0.05 * wanted.abs().max()).all(), (mean, wanted, error)
    assert error.max() < 0.1 * wanted.abs().max()


def test_samples_that_gave_the_gradient_are_priced_too_high():
    """By ‖g_i‖²/n each: a sample is a part of what it is compared with."""
    model, data, clock = trained_a_little()
    simple, parameters = TARGETS["simple"](), list(model.parameters())
    unit = [1.0] * len(parameters)
    same, apart, own = 0.0, 0.0, 0.0
    for number, probe in enumerate(probes_of(clock, model, data, 200, size=32)):
        rows, time = torch.arange(16), evenly(16, number, torch.device("cpu"))
        direction = _gradient(probe, parameters, simple, time, rows)
        same += float(derivative([model], parameters, unit, direction, lambda p=probe, t=time, r=rows: p.losses(t, r), step=ALONG).mean())
        apart += float(derivative([model], parameters, unit, direction, lambda p=probe, t=time, r=rows + 16: p.losses(t, r), step=ALONG).mean())
        x_t, target = noised(clock.schedule, clock.objective, probe.x0[:16], probe.noise[:16], time)
        for loss in squared_error(model(x_t, clock.schedule.condition(time)), target):
            own += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, parameters, retain_graph=True)) / 16 / 16
    assert same - apart == pytest.approx(own, rel=0.2)  # 200 probes; the parts in common differ by chance
    assert same > 1.5 * apart


def test_looking_changes_nothing():
    model, data, clock = trained_a_little("lookahead")
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()], torch.get_rng_state()
    for probe in probes_of(clock, model, data, 2):
        clock.sampler.after(probe, None)
    assert clock.sampler.probes == 2
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before[0].items())
    assert all(torch.equal(grad, p.grad) for grad, p in zip(before[1], model.parameters(), strict=True))
    assert torch.equal(before[2], torch.get_rng_state())
    assert model.training


def test_a_gradient_that_runs_out_of_memory_is_taken_in_parts_and_the_size_is_remembered():
    class Small(Denoiser):
        def forward(self, x, t):
            if torch.is_grad_enabled() and not self.training and len(x) > 4:  # only gradients keep every layer's output
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x, t)

    found = []
    for kind in (Denoiser, Small):
        torch.manual_seed(0)
        model, data = kind(width=16), ring()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = nc.Clock("linear", nc.Lookahead(every=1, bins=4)).attach(optimizer)
        for step in range(3):
            b = clock.draw(data.sample(32, torch.Generator().manual_seed(step)), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            if kind is Small and step == 0:
                with pytest.warns(UserWarning, match="ran out of memory; it continues with [84] samples at a time") as told:
                    optimizer.step()
                assert len(told) == 2  # of the 16 samples that give the gradient, to 8 and to 4 at a time
            else:
                optimizer.step()
            optimizer.zero_grad()
        found.append((clock.sampler.curve[0], clock.probe_rows))
    assert [rows for _, rows in found] == [None, 4]
    # the parts of a sum in another order: float32, divided by a step of 1e-3 in the difference
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-2)


class Energy(Denoiser):
    def gradient(self, x):
        """A method of the user's own, with a name that we use too."""
        return x


def test_a_method_of_the_users_called_gradient_is_left_alone():
    found = []
    for kind in (Denoiser, Energy):
        torch.manual_seed(0)
        model, points = kind(width=16), torch.Generator().manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        clock = nc.Clock("linear", nc.Lookahead(every=1, bins=4)).attach(optimizer)
        for _ in range(3):
            b = clock.draw(ring().sample(32, points), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        measured = nc.measure.utility_over_time(clock, model, optimizer, ring().sample(16, points), bins=2, probes=2)
        found.append((clock.sampler.curve[0].tolist(), measured.utility.tolist()))
    assert found[0] == found[1]
    assert all(value != 0 for values in found[0] for value in values)


def test_our_own_graphs_are_asked_for_their_gradient(monkeypatch):
    """Without a GPU nothing can be captured, so the captured function itself is run."""
    asked = []
    monkeypatch.setattr(CapturedForward, "_replayed", lambda self, run, *inputs: asked.append(len(inputs)) or run(*inputs))
    model, data, clock = trained_a_little("lookahead")
    probe = next(probes_of(clock, model, data, 1))
    parameters, given = list(model.parameters()), (TARGETS["simple"](), evenly(8, 0.5, torch.device("cpu")), torch.arange(8))
    wanted = _gradient(probe, parameters, *given)
    assert not asked
    probe.predict = CapturedForward(model)
    assert all(torch.equal(a, b) for a, b in zip(_gradient(probe, parameters, *given), wanted, strict=True))
    assert asked == [5]  # x_t, t, cond, target and weight


def fed(c, probes, **options):
    sampler = nc.Clock("linear", nc.Lookahead(bins=len(c), **options)).sampler
    for _ in range(probes):
        sampler._fold((torch.arange(len(c)).double() + 0.5) / len(c), torch.tensor(c, dtype=torch.float64))
    return sampler


def test_the_density_is_a_power_of_what_helps_above_a_floor():
    sampler = fed([4.0, 1.0, 0.0, -2.0], 20, floor=0.2, power=0.5)
    wanted = 0.8 * torch.tensor([2.0, 1.0, 0.0, 0.0]).double() / 3 + 0.05
    assert torch.allclose(sampler.log_pmf(torch.arange(4), 4).exp(), wanted, rtol=1e-9)
    assert not nc.Clock("linear", nc.Lookahead()).corrected
    mean, error = sampler.curve
    assert torch.allclose(mean, torch.tensor([4.0, 1.0, 0.0, -2.0]).double())
    assert error.max() < 1e-6
    for still in (fed([4.0, 1.0, 0.0, -2.0], 19), fed([-1.0, -1.5, -2.0, -1.0], 30)):  # too early; nothing helps
        assert torch.allclose(still.log_pmf(torch.arange(4), 4).exp(), torch.full((4,), 0.25).double())


@pytest.mark.parametrize("probes", [2, 10, 200])
def test_the_standard_error_is_that_of_the_fading_mean(probes):
    """4000 bins that are priced alike but for noise: their means differ by it. The variance of 4000 numbers is known to √(2/4000) = 2.2 %, four times
    that; and so is the mean of the claimed ones, but of two probes, where each is that of one number, squared: √2/√4000 = 2.2 % again."""
    sampler = nc.Clock("linear", nc.Lookahead(bins=4000)).sampler
    sampler._prices = lambda: torch.ones(4000, dtype=torch.float64)  # what the density is made of, by a table of 4000 × 4000: not asked for here
    generator = torch.Generator().manual_seed(0)
    for _ in range(probes):
        sampler._fold((torch.arange(4000).double() + 0.5) / 4000, torch.randn(4000, generator=generator, dtype=torch.float64))
    mean, error = sampler.curve
    assert error.square().mean().item() == pytest.approx(mean.var().item(), rel=0.09 * 2**0.5)


def test_one_probe_has_no_standard_error():
    assert fed([4.0, 1.0, 0.0, -2.0], 1).curve[1].tolist() == [0, 0, 0, 0]
    assert fed([4.0, 1.0, 0.0, -2.0], 3, decay=0.0).curve[1].tolist() == [0, 0, 0, 0]  # all but the last are forgotten


def test_it_learns_in_a_loop_and_is_saved():
    torch.manual_seed(0)
    model, data = Denoiser(width=16), ring()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    clock = nc.Clock("linear", nc.Lookahead(target=nc.MinSNR(5), every=2, bins=6, warmup=5), seed=4).attach(optimizer, model=model)
    for _ in range(60):
        b = clock.draw(data.sample(32), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clock.sampler.info["probes"] == 31  # at 0, 1, 3, 5, ...
    assert clock.sampler.curve[0].max() > 0
    other = nc.Clock("linear", nc.Lookahead(target=nc.MinSNR(5), every=2, bins=6, warmup=5), seed=4)
    other.load_state_dict(clock.state_dict())
    assert torch.equal(other.sampler._buffers["pmf"], clock.sampler._buffers["pmf"])


# --- several processes ----------------------------------------------------------------------------------------------------------------------


def asked(model, half: int):
    """The gradient that a rank's probe takes on its own half of the data, and the clock."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", nc.Lookahead(bins=4, every=1), seed=2, rank=half, world_size=2).attach(optimizer, model=model)
    x0 = ring().sample(64, torch.Generator().manual_seed(4))[32 * half :][:32]
    clock.probe(x0, model)
    rows = torch.arange(16)
    return _gradient(clock._probe.exact(), list(model.parameters()), TARGETS["simple"](), evenly(16, 0.3, x0.device), rows), clock


def direction_of(model, half: int):
    """The direction in which a rank's probe measures its own half of the data."""
    _, clock = asked(model, half)
    directions = []
    taken = lambda modules, parameters, power, direction, losses, **_: directions.extend(direction) or torch.ones(16)  # noqa: E731
    with patch("noiseclock.core.lookahead.derivative", taken):
        clock.sampler.after(clock._probe, None)
    return torch.cat([d.flatten() for d in directions])


def _together(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(0)
        model = Denoiser(width=16)
        results["direction", rank] = direction_of(model, rank)
        for layer in (*model.net, model):
            if list(layer.parameters()):
                fully_shard(layer)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        found, clock = asked(model, rank)
        whole = [DTensor.from_local(g, p.device_mesh, p.placements).full_tensor() for g, p in zip(found, model.parameters(), strict=True)]
        results["gradient", rank] = torch.cat([g.flatten() for g in whole])
        results["kept", rank] = all(bool((p.grad.full_tensor() == 1).all()) for p in model.parameters())
        clock.sampler.after(clock._probe, None)
        results["curve", rank] = clock.sampler.curve[0]
    finally:
        dist.destroy_process_group()


def test_two_processes_that_share_a_model_take_the_gradient_of_both_halves(free_port):
    found = on_two(_together, free_port)
    halves = []
    for rank in range(2):
        torch.manual_seed(0)
        halves.append(torch.cat([g.flatten() for g in asked(Denoiser(width=16), rank)[0]]))
    wanted = (halves[0] + halves[1]) / 2
    for rank in range(2):
        assert found["kept", rank]
        assert torch.allclose(found["gradient", rank], wanted, rtol=1e-4, atol=1e-6)
    # of replicas too each rank measures along the gradient of both halves
    torch.manual_seed(0)
    model = Denoiser(width=16)
    mean = (direction_of(model, 0) + direction_of(model, 1)) / 2
    assert torch.equal(found["direction", 0], found["direction", 1])
    assert torch.allclose(found["direction", 0], mean, rtol=1e-4, atol=1e-7)
    assert torch.equal(found["curve", 0], found["curve", 1])
    assert found["curve", 0].isfinite().all()
    assert found["curve", 0].abs().max() > 0
    assert (halves[0] - halves[1]).norm() > 0.1 * wanted.norm()


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="unknown target 'fid'; known: min-snr, simple, vlb"):
        nc.Lookahead(target="fid")
    for wrong, got in ((nc.MinSNR, "the class MinSNR itself: write MinSNR()"), (5, "int")):
        with pytest.raises(TypeError, match=re.escape(f"target must be a name or an object of Weighting, got {got}")):
            nc.Lookahead(target=wrong)
    with pytest.raises(ValueError, match=r"power must lie in \[0, 1\]"):
        nc.Lookahead(power=2.0)
    model, _, clock = trained_a_little("lookahead")
    clock.probe(torch.zeros(4, 2), model)
    few = nc.Probe(model, clock.schedule, clock.objective, torch.zeros(3, 2), noise=torch.zeros(3, 2), modules=[model], optimizers=clock.optimizers)
    with pytest.raises(ValueError, match="at least four samples"):
        clock.sampler.after(few, None)
    sampler = nc.Lookahead()
    with pytest.raises(ValueError, match="Lookahead learns from a Clock"):
        sampler.after(clock._probe, None)
    assert isinstance(model, nn.Module)
