"""The optimiser's metric, and derivatives of losses along a direction of the parameters."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forked import on_two
from noiseclock.core.directions import ALONG, derivative, normal
from noiseclock.core.optimizers import metric, no_gradients, trained


def stepped(make, steps=3):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model)
    for _ in range(steps):
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(
    ("gradient", "none"),
    [
        (None, True),
        (torch.zeros(4), True),
        (torch.tensor([1.0, math.inf, 1.0, 1.0]), True),
        (torch.tensor([1.0, math.nan, 1.0, 1.0]), True),
        (torch.tensor([0.0, 1e-30, 0.0, 0.0]), False),
        (torch.full((4,), 6e4, dtype=torch.float16), False),  # whose sum is infinite in float16
        (torch.tensor([-1.0, 1.0, 0.0, 0.0]).to_sparse(), False),
        (torch.zeros(4).to_sparse(), True),
    ],
)
def test_an_optimiser_without_gradients(gradient, none):
    weight, unused = (nn.Parameter(torch.zeros(4, dtype=torch.float32 if gradient is None else gradient.dtype)) for _ in range(2))
    weight.grad = gradient
    assert no_gradients([torch.optim.SGD([{"params": [unused]}, {"params": [weight]}], lr=0.1)], torch.device("cpu")) == none


def _answer(rank: int, port: int, gradients, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for number, pair in enumerate(gradients):
            weight.grad = None if pair[rank] is None else torch.tensor([pair[rank]])
            results[rank, number] = no_gradients([optimizer], torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_two_ranks_agree_on_whether_there_are_gradients(free_port):
    """Before gradients are averaged, one rank alone may have an infinite one; of a sharded model, one may hold zeros only."""
    gradients = [(1.0, math.inf), (0.0, 1.0), (None, 1.0), (None, 0.0), (-1.0, 1.0)]
    found = on_two(_answer, free_port, gradients)
    for rank in (0, 1):
        assert [found[rank, number] for number in range(5)] == [True, False, False, True, False]


def test_the_metric_of_adam_is_what_it_divides_by():
    """Adam's next step is lr·m̂/(√v̂+ε): with betas (0, b) m̂ is the gradient itself, so P·gradient can be seen."""
    model, optimizer = stepped(lambda m: torch.optim.Adam(m.parameters(), lr=0.01, betas=(0.0, 0.9), eps=1e-3))
    model(torch.randn(4, 3)).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    moved = [b - p for b, p in zip(before, model.parameters(), strict=True)]
    power, unknown = metric([optimizer], list(model.parameters()))
    assert unknown == ""
    for scale, gradient, change in zip(power, gradients, moved, strict=True):
        assert torch.allclose(scale * gradient, change, rtol=1e-4, atol=1e-8)


def test_the_metric_of_a_parameter_that_was_frozen_at_first():
    """It has had fewer updates than the rest of its group, so its v̂ is less far from v."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(200):
        model.bias.requires_grad_(step >= 197)
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    power, _ = metric([optimizer], list(model.parameters()))
    for p, scale, updates in zip(model.parameters(), power, (200, 3), strict=True):
        assert optimizer.state[p]["step"] == updates
        wanted = 0.01 / ((optimizer.state[p]["exp_avg_sq"] / (1 - 0.999**updates)).sqrt() + 1e-8)
        assert torch.allclose(scale, wanted, rtol=1e-4)  # 1 - 0.999³ has lost four digits in float32; the other's count would be 7 times off


def test_the_metric_of_others():
    model, optimizer = stepped(lambda m: torch.optim.SGD([{"params": [m.weight], "lr": 0.1}, {"params": [m.bias], "lr": 0.3}], momentum=0.9))
    assert metric([optimizer], list(model.parameters())) == (pytest.approx([1.0, 3.0]), "")  # of all the steps in which momentum keeps a gradient
    model, optimizer = stepped(lambda m: torch.optim.RMSprop(m.parameters()))
    assert metric([optimizer], list(model.parameters())) == ([1.0, 1.0], "the metric of RMSprop is not known")
    assert metric([], list(model.parameters())) == ([1.0, 1.0], "no optimiser is known (attach one to the clock)")
    # before its first update Adam has none; what it does not train does not move
    model, optimizer = stepped(lambda m: torch.optim.Adam([m.weight]), steps=0)
    assert metric([optimizer], list(model.parameters())) == ([1.0, 1.0], "")
    model, optimizer = stepped(lambda m: torch.optim.Adam([m.weight]))
    assert metric([optimizer], list(model.parameters()))[0][1] == 0.0


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (1, 6)])
@pytest.mark.parametrize("rule", [None, "match_rms_adamw"])
def test_the_metric_of_muon_is_its_mean_response_to_a_change_of_the_momentum(shape, rule):
    """The trace of the derivative of UVᵀ by UΣVᵀ, where all singular values are alike; UVᵀ by Newton's iteration, which can be differentiated."""
    torch.manual_seed(0)
    rows, columns = shape
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    momentum = 0.37 * u @ v

    def orthogonal(matrix):
        x = matrix / torch.linalg.matrix_norm(momentum)
        for _ in range(12):  # from 1/3 it has converged after seven
            x = 1.5 * x - 0.5 * x @ x.mT @ x
        return x

    assert torch.allclose(orthogonal(momentum), u @ v, atol=1e-12)
    response = torch.autograd.functional.jacobian(orthogonal, momentum).reshape(rows * columns, -1)
    weight = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    optimizer = torch.optim.Muon([weight], lr=0.02, adjust_lr_fn=rule, weight_decay=0.0)
    optimizer.state[weight]["momentum_buffer"] = momentum
    ((power,), unknown) = metric([optimizer], [weight])
    lr = 0.02 * (0.2 * max(shape) ** 0.5 if rule else max(1, rows / columns) ** 0.5)
    assert unknown == ""
    assert math.isclose(power, lr * response.trace() / response.shape[0], rel_tol=1e-9)
    # the learning rate of the shape is torch's own: a step has the norm lr·√min(shape), up to Newton-Schulz's singular values between 0.7 and 1.2
    weight.grad, before = momentum.clone(), weight.detach().clone()
    optimizer.step()
    assert 0.7 < torch.linalg.matrix_norm(weight.detach() - before) / (lr * min(shape) ** 0.5) < 1.2


def test_the_metric_of_several_optimisers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    matrices, rest = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
    several = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    assert metric(several, list(model.parameters())) == ([1.0] * 4, "")  # before their first update
    model(torch.randn(8, 3)).square().sum().backward()
    for optimizer in several:
        optimizer.step()
    power, _ = metric(several, list(model.parameters()))
    for i, optimizer in enumerate(several):  # each as if it were alone
        alone, _ = metric([optimizer], list(model.parameters()))
        assert all(torch.equal(alone[j], power[j]) for j in range(i, 4, 2))
        assert [alone[j] for j in range(1 - i, 4, 2)] == [0.0, 0.0]
    # the scale of an unknown metric beside a known one is unknown too
    assert metric([several[1], torch.optim.RMSprop(matrices)], list(model.parameters())) == ([1.0] * 4, "the metric of RMSprop is not known")


def test_a_derivative_is_the_gradient_along_the_direction_and_restores_every_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, 3))
    x = torch.randn(10, 4)
    parameters = trained([model])
    before = [p.detach().clone() for p in parameters]
    power = [1.0] * len(parameters)
    direction = normal(parameters, power, seed=3)
    found = derivative([model], parameters, power, direction, lambda: model(x).square().mean(1), step=ALONG)
    for i in range(10):
        gradient = torch.autograd.grad(model(x[i : i + 1]).square().mean(), parameters)
        along = sum(float((g * d).sum()) for g, d in zip(gradient, direction, strict=True))
        assert math.isclose(found[i], along, rel_tol=5e-3, abs_tol=1e-3)  # float32: losses of order 1 to seven digits, over h·d of about 1e-2
    assert all(torch.equal(a, p) for a, p in zip(before, parameters, strict=True))

    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        derivative([model], parameters, power, direction, broken, step=ALONG)
    assert all(torch.equal(a, p) for a, p in zip(before, parameters, strict=True))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 rounds away"):
        derivative([half := nn.Linear(2, 2).to(torch.bfloat16)], trained([half]), [1.0, 1.0], [torch.ones(2, 2), torch.ones(2)], broken, step=ALONG)


def test_a_derivative_along_parameters_that_are_nearly_zero_is_no_rounding_error():
    """As those of an adapter that has only begun: a thousandth of their own norm moved no loss by more than float32's last digits."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4, bias=False), torch.randn(10, 8)
    frozen = model(x).detach() + 1
    nn.init.normal_(model.weight, std=1e-5)
    direction = normal([model.weight], [1.0], seed=3)
    found = derivative([model], [model.weight], [1.0], direction, lambda: (frozen + model(x)).square().mean(1), step=ALONG)
    wanted = (2 * (frozen + model(x)) * (x @ direction[0].T)).mean(1).detach()
    # losses of order 1 are known to 6e-8, their difference over 2·h·d of about 2e-5 to 6e-3
    assert (found - wanted).abs().max() < 2e-2 * wanted.abs().max()


@pytest.mark.parametrize(("dead", "moves"), [(1e8, True), (torch.full((50, 20), 1e8), True), (0.0, False), (torch.zeros(50, 20), False)])
def test_parameters_without_influence_do_not_shorten_the_step_of_the_others(dead, moves):
    """A bias before a group norm has gradients of rounding errors, so Adam's metric is huge there: it would take all of a plain norm of the step."""
    torch.manual_seed(0)
    live, idle = nn.Parameter(torch.randn(50, 20)), nn.Parameter(torch.randn(50, 20))
    model, power = nn.ParameterList([live, idle]), [torch.ones(50, 20), dead]
    before, moved = live.detach().clone(), []

    def losses():
        moved.append(float((live - before).norm() / before.norm()))
        return live.sum().expand(4)

    derivative([model], [live, idle], power, normal([live, idle], power, seed=3), losses, step=0.01)
    # both have as many numbers, and so as long a part of ξ; one of a thousand normal numbers has a norm that is known to 1/√2000
    assert moved == pytest.approx([0.01 * (0.5**0.5 if moves else 1.0)] * 2, rel=0.07)
