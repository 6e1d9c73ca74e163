import math

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from noiseclock.core.policy import HIGH, LOW, BetaCells, Bounded, Policy, draw_cells


def exact(a: float, b: float, cells: int) -> np.ndarray:
    borders = np.arange(cells + 1) / cells
    beta = scipy.stats.beta(a, b)
    return np.where(borders[:-1] < 0.5, np.diff(beta.cdf(borders)), -np.diff(beta.sf(borders)))


@pytest.mark.parametrize("cells", [100, 1000, 4000])
@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 5), (0.8, 1), (0.1, 0.1), (0.3, 5), (20, 0.5), (20, 20)])
def test_cell_masses_are_scipys(a, b, cells):
    """Four nodes a cell: 1e-5 of each mass up to parameters of 20, wherever there is any."""
    mass = BetaCells(cells).mass(torch.tensor([[a, b]], dtype=torch.float64))[0]
    assert mass.sum().item() == pytest.approx(1, abs=1e-12)
    masses = exact(a, b, cells)
    there = masses > 1e-12
    assert np.abs(mass.numpy()[there] / masses[there] - 1).max() < 1e-5


def test_extreme_parameters_stay_finite_and_close():
    for a, b in ((LOW, HIGH), (HIGH, LOW), (HIGH, HIGH), (7.0, HIGH)):
        mass = BetaCells(1000).mass(torch.tensor([[a, b]], dtype=torch.float64))[0]
        assert mass.isfinite().all()
        masses = exact(a, b, 1000)
        assert np.abs(mass.numpy() - masses).sum() < 2e-4


def test_gradients_of_log_probabilities_and_entropy_match_closed_forms():
    """Against the Beta's density, ∂ln p/∂a = ln u - ψ(a) + ψ(a+b), and its entropy, both of which the cells approach as they get finer."""
    parameters = torch.tensor([[2.0, 5.0]], dtype=torch.float64, requires_grad=True)
    cells = 4000
    log_mass = BetaCells(cells).mass(parameters)[0].log()
    index = torch.tensor([100, 1500, 3000])
    u = (index + 0.5) / cells
    for i, time in zip(index, u, strict=True):
        (gradient,) = torch.autograd.grad(log_mass[i], parameters, retain_graph=True)
        digamma = torch.special.digamma(torch.tensor([2.0, 5.0, 7.0], dtype=torch.float64))
        expected = torch.stack([time.log() - digamma[0] + digamma[2], (1 - time).log() - digamma[1] + digamma[2]])
        assert torch.allclose(gradient[0], expected, atol=1e-5)
    entropy = -(log_mass.exp() * log_mass).sum() - math.log(cells)
    (gradient,) = torch.autograd.grad(entropy, parameters)
    reference = torch.tensor([[2.0, 5.0]], dtype=torch.float64, requires_grad=True)
    theirs = torch.distributions.Beta(reference[0, 0], reference[0, 1]).entropy()
    (expected,) = torch.autograd.grad(theirs, reference)
    assert entropy.item() == pytest.approx(theirs.item(), abs=1e-6)
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 64, 64), (4, 32, 32), (7,), (2, 100), (1, 5, 6, 7), (3, 1, 1)])
def test_any_shape_of_data_starts_uniform(shape):
    torch.manual_seed(0)
    policy = Policy(shape)
    x0 = torch.randn(5, *shape)
    assert torch.allclose(policy(x0), torch.ones(5, 2))
    for p in policy.parameters():
        torch.nn.init.normal_(p, std=0.1)
    out = policy(x0)
    assert ((out >= LOW) & (out <= HIGH)).all()
    assert out.std(0).min() > 0  # it reads x0


@pytest.mark.parametrize("raw", [(-2.4, 0.54), (0.54, -2.4), (-2.4, -2.4), (-2.4, 6.0)], ids=str)
def test_a_policy_beyond_its_bounds_comes_back(raw):
    """softplus(-2.4) is 0.087, below the least 0.1, for every x0: the entropy alone must lead back to its largest value, that of (1, 1)."""
    torch.manual_seed(0)
    policy, x0, cells = Policy((7,)), torch.randn(16, 7), BetaCells(100)
    with torch.no_grad():
        policy.net[-1].bias.copy_(torch.tensor(raw))
    assert (policy(x0) == LOW).any(1).all()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    for _ in range(600):
        mass = cells.mass(policy(x0))
        (mass * mass.log()).sum(1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # near its top the entropy is flat, and Adam wavers: parameters that are 0.02 off cost less than 0.001 of it
    assert (policy(x0) - 1).abs().max() < 0.02


def test_however_far_beyond_a_bound_the_way_back_is_as_steep():
    """Adam's momentum can carry a policy hundreds beyond, where the gradient of softplus alone would be 0."""
    policy, x0, cells, gradients = Policy((7,)), torch.randn(4, 7), BetaCells(100), []
    for raw in (-2.3, -200.0):
        with torch.no_grad():
            policy.net[-1].bias.fill_(raw)
        mass = cells.mass(policy(x0))
        gradients += torch.autograd.grad((mass * mass.log()).sum(1).mean(), policy.net[-1].bias)
    assert (gradients[0] < 0).all()
    assert torch.equal(*gradients)


def test_beyond_a_bound_only_a_gradient_that_leads_farther_out_is_dropped():
    x = torch.tensor([0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0], requires_grad=True)
    gradient = torch.tensor([2.0, -2.0] * 5)  # descent lowers x where it is positive
    bounded = Bounded.apply(x, 1.0, 3.0)
    assert torch.equal(bounded, x.clamp(1, 3))
    bounded.backward(gradient)
    assert x.grad.tolist() == [0.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, -2.0, 2.0, 0.0]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 12), (2, 100), (3, 1, 8), (3, 1, 1), (7,)])
def test_nothing_in_it_is_refused_in_deterministic_mode(shape, monkeypatch):
    """On CUDA `torch.use_deterministic_algorithms(True)` refuses the cumulative sum and the gradient of adaptive pooling."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)

    class Called(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    names: set[str] = set()
    policy = Policy(shape)
    with Called():
        pmf = BetaCells(50).mass(policy(torch.randn(4, *shape)))
        _, mass = draw_cells(pmf, torch.rand(4, dtype=torch.float64))
        mass.log().sum().backward()
    assert {"gather", "searchsorted"} <= names
    assert not [name for name in names if name.startswith("cumsum") or ("adaptive" in name and "backward" in name)]


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 12), (2, 100), (3, 1, 8), (1, 9, 16), (1, 4, 8, 6)])
def test_its_pooling_is_that_of_adaptive_pooling(shape):
    policy, x = Policy(shape), torch.randn(5, *shape)
    adaptive = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[len(shape) - 2]
    for stage, pool in ((1, policy.net[2]), (2, policy.net[5]), (3, policy.net[8])):
        size = tuple(max(extent >> stage, 1) if stage < 3 else 1 for extent in shape[1:])
        pooled, wanted = pool(x), adaptive(size)(x)
        assert torch.equal(pooled, wanted)
        x = pooled
    assert x.shape == (5, shape[0], *[1] * (len(shape) - 1))


def test_too_many_dimensions_are_refused():
    with pytest.raises(ValueError, match="too many dimensions"):
        Policy((3, 2, 2, 2, 2))


def test_draws_follow_each_rows_own_distribution():
    parameters = torch.tensor([[0.5, 2.0], [5.0, 1.0]], dtype=torch.float64)
    pmf = BetaCells(50).mass(parameters)
    n = 100_000
    v = torch.rand(2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = pmf.repeat_interleave(n, 0)
    time, mass = draw_cells(rows, v)
    cell = (time * 50).long()
    assert torch.equal(mass, rows.gather(1, cell[:, None])[:, 0])
    for i, (a, b) in enumerate(parameters.tolist()):
        drawn = torch.bincount(cell[i * n : (i + 1) * n], minlength=50).cumsum(0) / n
        distance = np.abs(drawn.numpy() - np.cumsum(exact(a, b, 50))).max()
        assert distance * math.sqrt(n) < 1.95  # Kolmogorov: P = 0.001


def test_draws_at_the_ends_of_the_uniform():
    pmf = torch.tensor([[0.0, 0.5, 0.5, 0.0]], dtype=torch.float64)
    for v, expected in ((0.0, 1), (math.nextafter(1, 0), 2)):
        time, mass = draw_cells(pmf, torch.tensor([v], dtype=torch.float64))
        assert int(time * 4) == expected
        assert mass.item() == 0.5
