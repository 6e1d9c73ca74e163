"""What all samplers that learn from prices have in common: optimisers that have not moved, models that are not the trained one."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import noiseclock as nc
from gaussians import Denoiser, ring


@pytest.mark.parametrize("kind", [nc.VarianceOptimal, nc.Lookahead])
def test_a_fused_adam_that_has_made_no_step_yet_prices_nothing(kind):
    """A GradScaler whose first scale is too high: the state is there, with a count of 0, and v̂ would be 0/0. Warnings are errors here."""

    def priced(overflows):
        torch.manual_seed(0)
        model = Denoiser(width=8)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
        clock = nc.Clock("linear", kind(every=1, bins=4)).attach(optimizer, model=model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for step in range(4):
            b = clock.draw(ring().sample(16), predict=model)
            scaler.scale(clock.loss(b, model(b.x_t, b.t)).mean()).backward()
            if step < overflows:
                next(model.parameters()).grad[0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return clock.sampler

    none, some, all_ = priced(4), priced(2), priced(0)
    assert none.skipped == some.skipped == all_.skipped == 0
    prices = [sampler._buffers["faded"][0].max().item() for sampler in (none, some, all_)]  # probes that reached the bin, fading by 0.95
    assert prices == pytest.approx([0, 1.95, 1 + 0.95 + 0.95**2 + 0.95**3])


@pytest.mark.parametrize("sampler", [nc.VarianceOptimal(warmup=3), nc.Lookahead(warmup=3)])
@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_of_the_model_in_its_place_is_told_of(sampler, copied):
    """Moving the trained parameters changes no loss of a copy, so every price is 0 and nothing can ever be learned."""
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    averaged = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    clock = nc.Clock("linear", sampler).attach(optimizer, model=model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(12):
            b = clock.draw(torch.randn(16, 2), predict=lambda x, t: (averaged if copied else model)(x))
            clock.loss(b, model(b.x_t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    said = [str(w.message) for w in told if "no loss changed" in str(w.message)]
    assert len(said) == copied
    assert not copied or "3 probes moved the trained parameters" in said[0]


class Own(torch.optim.RMSprop):
    """An optimiser that has no learning rate, or calls it otherwise."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters)
        for group in self.param_groups:
            self.rate = group.pop("lr")

    def step(self, closure=None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(self.rate * p.grad.sign())


@pytest.mark.parametrize("optimizer", [torch.optim.RMSprop, Own])
@pytest.mark.parametrize("kind", [nc.VarianceOptimal, nc.Lookahead])
def test_an_unknown_optimiser_is_said_once(kind, optimizer):
    model = Denoiser(width=8)
    clock = nc.Clock("linear", kind(every=1)).attach(optimizer(model.parameters()), model=model)

    def train():
        for _ in range(3):
            b = clock.draw(ring().sample(16), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            clock.optimizers[0].step()

    with pytest.warns(UserWarning, match=f"{kind.__name__}: the metric of {optimizer.__name__} is not known, .* without preconditioning") as told:
        train()
    assert len(told) == 1
    assert clock.sampler.probes == 3


class ByClass(nn.Module):
    """Predicts nothing but a parameter times the sample: the gradient of its loss depends on the sample alone, not on the time."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.tensor(0.5))

    def forward(self, x_t, t, size):
        return self.theta * size[:, None].expand_as(x_t)


@pytest.mark.parametrize("batch", [64, 128])
def test_the_order_of_a_batch_is_not_mistaken_for_time(batch):
    """A batch sorted by class, of which the last has 100 times the gradient: a row that always met the same time would price that time instead."""
    size = torch.linspace(0, 1, batch).gt(0.9).float() * 9 + 1  # given to the model, so that noise does not matter
    model = ByClass()
    optimizer = torch.optim.SGD(model.parameters(), 1e-9)
    clock = nc.Clock("flow", nc.VarianceOptimal(every=1, bins=4, decay=0.999), objective="x0").attach(optimizer, model=model)
    for _ in range(300):
        b = clock.draw(torch.zeros(batch, 2), predict=model, cond=size)
        clock.loss(b, model(b.x_t, b.t, size)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    price, _ = clock.sampler.curve
    # s is the same at all times; 300 probes of 16 samples in each bin, a tenth of which have 10⁴ times the price of the others: √(9/4800) = 4 %
    assert (price / price.mean() - 1).abs().max() < 0.15
    # and every class was seen: the gradient of θ²·size² at θ = ½ is size²; 300 directions of one number know its mean square to √(2/300) = 8 %
    assert price.mean().item() == pytest.approx(1e-9 * (size**4).mean().item(), rel=0.3)
    assert clock.sampler.ess() == pytest.approx(1)  # it stays at the base
    found = nc.measure.gradient_variance(clock, model, torch.zeros(batch, 2), cond=size, bins=4, samples=256, pairs=64)
    variance = torch.as_tensor(found.variance)
    assert (variance / variance.mean() - 1).abs().max() < 0.5, variance
