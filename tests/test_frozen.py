"""A model of which only adapters are trained: probes leave the frozen rest alone, bit for bit, and price what is trained by itself."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import noiseclock as nc
from gaussians import Denoiser, ring
from noiseclock.core.batch import noised
from noiseclock.core.directions import ALONG, derivative, normal
from noiseclock.core.lookahead import TARGETS
from noiseclock.core.objectives import squared_error
from noiseclock.core.optimizers import metric, trained
from noiseclock.core.priced import evenly

BINS = 4


class LowRank(nn.Module):
    """A linear layer with an adapter beside it, which starts at zero (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / math.sqrt(layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def adapted(freeze: bool = True) -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
    """A model in float64, its adapters, and the rest: frozen, or only kept from the optimiser."""
    torch.manual_seed(0)
    model = Denoiser(width=24)
    rest = list(model.parameters())
    if freeze:
        model.requires_grad_(False)
    for i in (0, 2, 4, 6):
        model.net[i] = LowRank(model.net[i])
    model.double()
    return model, [p for name, p in model.named_parameters() if "layer" not in name], rest


def points_of(generator: torch.Generator) -> Tensor:
    return ring().sample(32, generator).double()


def followed(sampler, freeze=True, optimizer=torch.optim.Adam, lr=2e-3, updates=3, watch=None):
    model, adapters, rest = adapted(freeze)
    trains = optimizer(adapters, lr=lr)
    clock = nc.Clock("linear", sampler, seed=1).attach(trains, model=model)
    points = torch.Generator().manual_seed(5)
    if watch is not None:
        model.register_forward_pre_hook(lambda *_: watch(model, adapters, rest))
    for _ in range(updates):
        b = clock.draw(points_of(points), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        trains.step()
        model.zero_grad()
    return model, adapters, rest, clock


SAMPLERS = {
    "adaptive": lambda: nc.Adaptive.scaled(every=1, stride=100),
    "variance-optimal": lambda: nc.VarianceOptimal(every=1, bins=BINS),
    "lookahead": lambda: nc.Lookahead(every=1, bins=BINS),
    "gradient-variance": lambda: nc.GradientVariance(bins=BINS, samples=4, every=1),
}


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "kept from the optimiser"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_not_trained_is_never_perturbed(name, freeze):
    before = copy.deepcopy(adapted(freeze)[2])
    seen = {"passes": 0, "moved": 0}
    last: list[Tensor] = []

    def watch(model, adapters, rest):
        assert all(torch.equal(p, b) for p, b in zip(rest, before, strict=True))
        seen["passes"] += 1
        seen["moved"] += bool(last) and any(not torch.equal(p, q) for p, q in zip(adapters, last, strict=True))
        last[:] = [p.detach().clone() for p in adapters]

    model, _, rest, _ = followed(SAMPLERS[name](), freeze, watch=watch)
    assert seen["passes"] > 6  # of training and of probes
    assert seen["moved"] >= 3  # adapters moved in every update, or between two passes of a probe
    assert all(torch.equal(p, b) for p, b in zip(rest, before, strict=True))
    assert [p.requires_grad for p in rest] == [not freeze] * len(rest)
    assert model.training


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "kept from the optimiser"])
@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop])
def test_the_price_is_that_of_what_is_trained(freeze, optimizer):
    """VarianceOptimal's squared derivative along its own direction is (g·d)², g the gradient of the adapters alone."""
    sampler = nc.VarianceOptimal(every=10**6, bins=BINS)
    if optimizer is torch.optim.RMSprop:  # of which no metric is known: every parameter weighs the same, if it is trained
        with pytest.warns(UserWarning, match="the metric of RMSprop is not known"):
            model, adapters, _, clock = followed(sampler, freeze, optimizer, updates=8)
    else:
        model, adapters, _, clock = followed(sampler, freeze, optimizer, updates=8)
    clock.probe(points_of(torch.Generator().manual_seed(6)), model)
    probe = clock._probe
    time, found = clock.sampler._price(probe, clock.sampler._setting, 7)
    power, _ = metric(clock.optimizers, adapters)
    direction = normal(adapters, power, probe.seed)
    rows = probe.shuffled()
    x_t, target = noised(clock.schedule, clock.objective, probe.x0[rows], probe.noise[rows], time)
    wanted = []
    for loss in squared_error(model(x_t, clock.schedule.condition(time)), target):
        gradient = torch.autograd.grad(loss, adapters, retain_graph=True)
        wanted.append(sum((g * d).sum() for g, d in zip(gradient, direction, strict=True)) ** 2)
    wanted = torch.stack(wanted).detach().double()
    # in float64 what is left is the central difference, of the order of its step, 0.05, squared, and twice that in a square
    assert (found - wanted).abs().max() < 5e-3 * wanted.max()
    assert wanted.max() > 0


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "kept from the optimiser"])
def test_the_utility_is_that_of_what_is_trained(freeze):
    """Lookahead's price of a sample is g_i·P∇J over the adapters alone."""
    model, adapters, _, clock = followed(nc.Lookahead(every=10**6, bins=BINS), freeze, updates=8)
    clock.probe(points_of(torch.Generator().manual_seed(6)), model)
    probe = clock._probe
    time, found = clock.sampler._price(probe, clock.sampler._setting, 7)
    power, _ = metric(clock.optimizers, adapters)

    def losses(rows, at):
        x_t, target = noised(clock.schedule, clock.objective, probe.x0[rows], probe.noise[rows], at)
        return squared_error(model(x_t, clock.schedule.condition(at)), target)

    rows, asked = probe.shuffled(), evenly(16, 7.5, torch.device("cpu"))
    target = TARGETS["simple"]()(clock.schedule, asked, clock.objective)
    whole = torch.autograd.grad((losses(rows[:16], asked) * target).mean(), adapters)
    wanted = []
    for loss in losses(rows[16:], time):
        gradient = torch.autograd.grad(loss, adapters, retain_graph=True)
        wanted.append(sum((g * p * w).sum() for g, p, w in zip(gradient, power, whole, strict=True)))
    wanted = torch.stack(wanted).detach().double()
    assert (found - wanted).abs().max() < 1e-4 * wanted.abs().max()  # as above


def test_the_first_price_of_an_adapter_is_not_that_of_what_cannot_move_yet():
    """`down` has no gradient in the first update, because `up` is 0: Adam's 1/(√v̂+ε) would be 1/ε there, ten thousand times the others'."""
    model, _, _, clock = followed(nc.VarianceOptimal(every=1, bins=BINS, decay=0.0), updates=1)
    power, _ = metric(clock.optimizers, [model.net[2].down, model.net[2].up])
    assert torch.equal(power[0], torch.zeros_like(power[0]))
    assert power[1].max() > 0
    first = clock.sampler.curve[0].sum()
    later = torch.stack([followed(nc.VarianceOptimal(every=1, bins=BINS, decay=0.0), updates=n)[3].sampler.curve[0].sum() for n in (2, 3, 4, 5)])
    # one direction each, so chance alone is a factor of some; 1/ε made it a hundred
    assert first < 10 * later.mean()


@pytest.mark.parametrize("name", ["variance-optimal", "lookahead"])
@pytest.mark.parametrize("none", [0.0, torch.tensor(0.0)], ids=["a number", "a tensor"])
def test_a_warm_up_from_zero_is_waited_for(name, none):
    """At a learning rate of 0 there is no metric: nothing is priced, and nothing is said to be wrong (warnings are errors here)."""
    assert followed(SAMPLERS[name](), lr=none)[3].sampler.probes == 0
    assert followed(SAMPLERS[name](), lr=1e-3)[3].sampler.probes == 3


def test_a_derivative_along_nothing_is_zero():
    model, adapters, _ = adapted()
    x, t = torch.zeros(4, 2).double(), torch.zeros(4)
    nothing = [torch.zeros_like(p) for p in adapters]
    assert derivative([model], adapters, [1.0] * len(adapters), nothing, lambda: model(x, t).square().mean(1), step=ALONG).tolist() == [0.0] * 4


def test_trained_weights_in_half_precision_are_refused_where_they_would_swallow_the_difference():
    model, adapters, _ = adapted()
    for p in adapters:
        p.data = p.data.bfloat16()
    with pytest.raises(ValueError, match=r"torch\.bfloat16 rounds away"):
        derivative([model], adapters, [1.0] * len(adapters), [torch.ones_like(p) for p in adapters], lambda: pytest.fail("not reached"), step=ALONG)


def mixed(part):
    """A float32 network with a part in half precision that only autocast lets it run with, and what to name as the model."""
    net = nn.Linear(2, 2)
    half = nn.Linear(2, 2).bfloat16().requires_grad_(False)
    both = nn.ModuleDict({"net": net, "other": half})
    return {
        "beside": (net, lambda x, t, decode=False: half(net(x)) if decode else net(x), None),
        "in a module": (net, lambda x, t: both["net"](x), None),
        "named": (net, lambda x, t: both["net"](x), net),
        "before": (net, lambda x, t: net(half(x)), None),
    }[part]


@pytest.mark.parametrize("part", ["beside", "in a module", "named", "before"])
@pytest.mark.parametrize("name", ["variance-optimal", "lookahead"])
def test_parts_in_half_precision_are_left_alone_or_told_of(name, part):
    """Under autocast everything runs; the probes' passes without it met torch's error about dtypes."""
    net, predict, model = mixed(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.sampler(name, every=1)).attach(optimizer, **({} if model is None else {"model": model}))

    def train():
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                b = clock.draw(torch.randn(16, 2).bfloat16(), predict=predict)
                loss = clock.loss(b, predict(b.x_t, b.t)).mean()
            loss.backward()
            optimizer.step()

    if part in ("beside", "named"):
        train()
        assert clock.sampler.probes == 3
    else:
        with pytest.raises(ValueError, match=r"without autocast, .* it fails: mat1 and mat2 .* clock\.attach\(optimizer, model=model\)"):
            train()


@pytest.mark.parametrize("name", ["lookahead", "gradient-variance"])
def test_a_model_without_gradients_is_told_of(name):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.sampler(name, every=1)).attach(optimizer)
    b = clock.draw(torch.randn(16, 2), predict=torch.no_grad()(lambda x, t: model(x)))
    clock.loss(b, model(b.x_t)).mean().backward()
    with pytest.raises(ValueError, match="the loss depends on no trained parameter; predict must not disable gradients"):
        optimizer.step()


def test_nothing_to_train_is_an_error():
    model, _, rest = adapted()
    with pytest.raises(ValueError, match="the model has no trained parameter"):
        trained([model], [torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)])
    assert len(trained([model])) == len(list(model.parameters())) - len(rest)
