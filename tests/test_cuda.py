"""What only a CUDA device can show; skipped elsewhere."""

import pytest
import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.conditioning import map_tensors
from noiseclock.core.later import Later
from noiseclock.core.weightings import WEIGHTINGS
from small_loops import FIXED

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*less than a hundredth as often"),
]

every_sampler = pytest.mark.parametrize("sampler", FIXED, ids=repr)


@every_sampler
@pytest.mark.parametrize("schedule", ["linear", "flow"])
def test_cpu_and_gpu_draw_the_same_times(sampler, schedule):
    cpu, gpu = (nc.Clock(schedule, sampler, correct="importance", seed=7) for _ in range(2))
    for _ in range(3):
        on_cpu, on_gpu = cpu.draw(torch.zeros(64, 2)), gpu.draw(torch.zeros(64, 2, device="cuda"))
        # the uniforms are the same bits; erfinv, tan and friends differ by a few units in the last place
        assert torch.allclose(on_cpu.time, on_gpu.time.cpu(), rtol=0, atol=1e-12)
        assert torch.allclose(on_cpu.weight, on_gpu.weight.cpu(), rtol=1e-9)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@every_sampler
@pytest.mark.parametrize("weighting", [make(normalize=True) for make in WEIGHTINGS.values()], ids=repr)
def test_no_synchronisation_from_draw_to_loss(sampler, weighting):
    x0 = torch.randn(16, 3, 8, 8, device="cuda")
    for schedule in ("linear", "edm"):
        clock = nc.Clock(schedule, sampler, weighting)
        clock.loss(clock.draw(x0), x0)  # tables reach the device once
        clock.updated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            clock.loss(clock.draw(x0), x0)
            clock.updated()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@every_sampler
def test_a_captured_step_draws_and_learns_as_an_eager_one(sampler):
    """Draw, forward, loss, backward and Adam in one graph: the same times, noise and weights as the plain loop, replay after replay."""
    steps, runs = 6, []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(48, 48)).cuda()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True, fused=True)
        clock = nc.Clock("linear", sampler, "min-snr", seed=3)
        x0 = torch.randn(16, 48, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        seen = {}

        def step(clock=clock, model=model, optimizer=optimizer, x0=x0, seen=seen):
            b = clock.draw(x0)
            clock.loss(b, model(b.x_t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seen.update(time=b.time, noise=b.noise)

        for _ in range(3):
            step()
            clock.updated()
        trace = []
        if captured:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(clock.generator(x0.device))
            with torch.cuda.graph(graph):
                step()
        for _ in range(steps):
            if captured:
                graph.replay()
            else:
                step()
            clock.updated()
            trace.append((seen["time"].clone(), seen["noise"].clone()))
        assert clock.record.by_time().drawn.sum() == 16 * (3 + steps)
        assert clock.state_dict()["draws"] == 3 + steps
        runs.append((trace, [p.detach().clone() for p in model.parameters()]))
    for (time, noise), (other_time, other_noise) in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(time, other_time)
        assert torch.equal(noise, other_noise)
    assert len({time[0].item() for time, _ in runs[1][0]}) == steps
    for p, q in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


LEARNING = [
    nc.Adaptive.scaled(every=2, stride=100),
    nc.LossSecondMoment(warmup=1),
    nc.LossSecondMoment.published(),
    nc.LossEMA(warmup=1),
    nc.VarianceOptimal(every=2, bins=4, warmup=2, gain=1.0),
    nc.Lookahead(every=2, bins=4, warmup=2),
]


class Small(nn.Module):
    """A model that is told the step, with dropout."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 2))

    def forward(self, x_t, t):
        return self.net(torch.cat([x_t, t[:, None].to(x_t) / 1000], 1))


@pytest.mark.filterwarnings("ignore:the sampling")
@pytest.mark.parametrize("sampler", LEARNING, ids=repr)
def test_learned_samplers_learn_on_the_device_and_resume_there_and_on_the_cpu(sampler):
    def run(clock, model, optimizer, steps, device):
        for _ in range(steps):
            b = clock.draw(torch.ones(32, 2, device=device), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return b

    torch.manual_seed(0)
    model = Small().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)
    clock = nc.Clock("linear", sampler, "min-snr", seed=3).attach(optimizer)
    run(clock, model, optimizer, 7, "cuda")
    state = clock.state_dict()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.isfinite(torch.as_tensor(clock.plot_data().p)).all()
    expected = run(clock, model, optimizer, 1, "cuda")
    for device, read in (
        ("cuda", state),
        ("cpu", state),
        ("cuda", map_tensors(torch.Tensor.cuda, state)),
        ("cuda", map_tensors(torch.Tensor.cpu, state)),
    ):
        again = Small().to(device)
        again.load_state_dict(weights)
        optimizer = torch.optim.SGD(again.parameters(), lr=1e-2)
        other = nc.Clock("linear", sampler, "min-snr", seed=3).attach(optimizer)
        other.load_state_dict(read)
        b = run(other, again, optimizer, 1, device)
        # the policy's network runs in TF32 or float32 here and in float32 there
        assert torch.allclose(b.time.cpu(), expected.time.cpu(), rtol=0, atol=1e-3)
        run(other, again, optimizer, 2, device)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode", "ignore:.*no optimiser is known")
@pytest.mark.parametrize("sampler", LEARNING, ids=repr)
def test_learned_samplers_do_not_synchronise_between_probes(sampler):
    model, x0 = Small().cuda(), torch.ones(32, 2, device="cuda")
    clock = nc.Clock("linear", sampler)
    for step in range(8):
        quiet = step > 4 and not clock.due and step % 2 == 1
        torch.cuda.set_sync_debug_mode("error" if quiet else "default")
        try:
            b = clock.draw(x0, predict=model)
            clock.loss(b, x0)
            if not quiet or not sampler.every:
                clock.updated()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if quiet and sampler.every:
            clock.updated()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_probe_that_looks_once_does_not_synchronise():
    model, x0 = Small().cuda(), torch.ones(32, 2, device="cuda")
    optimizer = torch.optim.Adam(model.parameters(), fused=True, capturable=True)
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1)).attach(optimizer, model=model)
    for step in range(8):
        torch.cuda.set_sync_debug_mode("error" if step > 3 else "default")
        try:
            b = clock.draw(x0, predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert clock.sampler.probes == 8


def test_a_run_moves_from_gpu_to_cpu():
    gpu = nc.Clock("linear", "speed")
    gpu.loss(gpu.draw(torch.zeros(8, 2, device="cuda")), torch.zeros(8, 2, device="cuda"))
    cpu = nc.Clock("linear", "speed")
    cpu.load_state_dict(gpu.state_dict())
    assert torch.allclose(cpu.draw(torch.zeros(8, 2)).time, gpu.draw(torch.zeros(8, 2, device="cuda")).time.cpu(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_on_the_device(fused):
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.Adam(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    clock = nc.Clock("linear", "uniform").attach(optimizer)
    for step in range(5):
        b = clock.draw(torch.zeros(4, 2, device="cuda"))
        scaler.scale(clock.loss(b, model(b.x_t)).mean()).backward()
        if step == 2:
            model.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert clock.updates == 4


def test_numbers_on_their_way_are_those_of_when_they_were_sent():
    x = torch.arange(1000.0, device="cuda")
    sent = Later(x)
    x.zero_()  # which waits its turn behind the copy
    assert torch.equal(sent.read(), torch.arange(1000.0))
