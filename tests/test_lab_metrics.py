"""Distances between sets of features against closed forms, direct sums and other implementations."""

import math

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings, strategies as st

from noiseclock.lab.metrics import Moments, frechet, inception_score, kid, precision_recall, squared_mmd

seeds = st.integers(0, 2**32 - 1)
EPS = torch.finfo(torch.float64).eps


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gaussian(mean: torch.Tensor, covariance: torch.Tensor) -> Moments:
    return Moments(11, mean.double(), covariance.double() * 10)


def some_covariance(dimensions: int, seed: int) -> torch.Tensor:
    x = normal(2 * dimensions, dimensions, seed=seed)
    return x.T @ x / dimensions


def turn(dimensions: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix."""
    return torch.linalg.qr(normal(dimensions, dimensions, seed=seed)).Q


# --- moments ------------------------------------------------------------------------------------------------------------------------------


def test_moments_are_those_of_numpy_even_far_from_the_origin():
    """Float64 has 16 digits: a spread of 1 around 1e4 keeps 12 of them, and Σxxᵀ - N·μμᵀ would keep 8."""
    x = normal(500, 7) + 1e4
    moments = Moments.of(x, batch=33)
    assert moments.count == 500
    np.testing.assert_allclose(moments.mean.numpy(), x.numpy().mean(0), rtol=1e-14)
    np.testing.assert_allclose(moments.covariance.numpy(), np.cov(x.numpy(), rowvar=False), atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(seed=seeds, n=st.integers(2, 400), batch=st.integers(1, 400), shift=st.floats(-10, 10))
def test_batches_do_not_matter(seed, n, batch, shift):
    """The stated 1e-12: N additions of rounding ε/2 at random are √N·ε ≈ 5e-15, at worst N·ε ≈ 1e-13, and up to ten times that for the shift."""
    x = (normal(n, 5, seed=seed) + shift).float()
    whole, parts = Moments.of(x, batch=n), Moments.of(x, batch=batch)
    assert (whole.mean - parts.mean).abs().max() <= 1e-12 * whole.mean.abs().max()
    assert (whole.scatter - parts.scatter).abs().max() <= 1e-12 * whole.scatter.abs().max()


def test_one_sample_has_no_covariance():
    with pytest.raises(ValueError, match="at least two"):
        _ = Moments.of(torch.ones(1, 3)).covariance


# --- the Fréchet distance -----------------------------------------------------------------------------------------------------------------


def test_frechet_of_independent_coordinates_is_a_sum_over_them():
    """In each: (μ1-μ2)² + (σ1-σ2)²."""
    mean, std = normal(2, 30, seed=1), normal(2, 30, seed=2).abs()
    expected = (mean[0] - mean[1]).square().sum() + (std[0] - std[1]).square().sum()
    got = frechet(gaussian(mean[0], std[0].square().diag()), gaussian(mean[1], std[1].square().diag()))
    assert got == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_frechet_in_the_plane_has_a_closed_form(seed):
    """For 2x2 matrices that need not commute tr √(S1·S2) = √(tr(S1·S2) + 2·√(det S1·det S2))."""
    one, other = some_covariance(2, seed), some_covariance(2, 100 + seed)
    overlap = ((one @ other).trace() + 2 * (one.det() * other.det()).sqrt()).sqrt()
    expected = (4 + one.trace() + other.trace() - 2 * overlap).item()
    assert frechet(gaussian(torch.tensor([2.0, 1.0]), one), gaussian(torch.tensor([0.0, 1.0]), other)) == pytest.approx(expected, rel=1e-12)


def test_frechet_agrees_with_the_matrix_square_root_of_scipy():
    """Which loses half of the digits of small eigenvalues: 50·√ε·λ ≈ 1e-6 at worst, far less where, as here, none is small."""
    one, other = some_covariance(50, 0), some_covariance(50, 1)
    root = scipy.linalg.sqrtm((one @ other).numpy())
    expected = one.trace().item() + other.trace().item() - 2 * np.trace(root).real
    assert frechet(gaussian(torch.zeros(50), one), gaussian(torch.zeros(50), other)) == pytest.approx(expected, abs=1e-9)


def test_frechet_of_samples_approaches_that_of_their_gaussians():
    """D·N^-½ is the order of the error: the means' share is D/N·2 and a covariance entry is off by √(2/N) ≈ 0.003, over 3 dimensions."""
    n, root = 200_000, some_covariance(3, 4)
    x, y = normal(n, 3, seed=5), 1 + normal(n, 3, seed=6) @ root
    expected = frechet(gaussian(torch.zeros(3), torch.eye(3)), gaussian(torch.ones(3), root.T @ root))
    assert frechet(Moments.of(x), Moments.of(y)) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("n", [20, 64, 500])
def test_frechet_to_itself_is_zero(n):
    """Singular covariances (n ≤ 64) too. Eigenvalues and singular values are exact to about D·ε of the largest, which the trace bounds."""
    moments = Moments.of(normal(n, 64) * torch.logspace(-4, 1, 64))
    assert frechet(moments, moments) <= 64 * 4 * EPS * moments.covariance.trace().item()


@settings(max_examples=25, deadline=None)
@given(seed=seeds, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
def test_frechet_turns_moves_and_scales_with_its_sets(seed, scale, shift):
    """The tolerance: 1e-12 of the traces, which is what `frechet` states, times ten for the products made here."""
    x, y = normal(40, 6, seed=seed), 0.5 + 2 * normal(30, 6, seed=seed + 1)
    before = frechet(Moments.of(x), Moments.of(y))
    q = turn(6, seed)
    after = frechet(Moments.of(scale * x @ q + shift), Moments.of(scale * y @ q + shift))
    assert after == pytest.approx(scale**2 * before, abs=1e-11 * scale**2 * 6 * 5)
    assert frechet(Moments.of(y), Moments.of(x)) == pytest.approx(before, rel=1e-11)


# --- the kernel distance ------------------------------------------------------------------------------------------------------------------


def test_squared_mmd_is_the_direct_sum():
    x, y = normal(9, 4, seed=0), 0.3 + normal(7, 4, seed=1)

    def k(a, b):
        return (float(a @ b) / 4 + 1) ** 3

    within_x = sum(k(x[i], x[j]) for i in range(9) for j in range(9) if i != j) / (9 * 8)
    within_y = sum(k(y[i], y[j]) for i in range(7) for j in range(7) if i != j) / (7 * 6)
    across = sum(k(a, b) for a in x for b in y) / 63
    assert squared_mmd(x, y) == pytest.approx(within_x + within_y - 2 * across, rel=1e-12)


@pytest.mark.parametrize(("shift", "expected"), [(0.0, 0.0), (0.5, 3 * 0.5**2 + 3 * 0.25**2 + 1.625**2)])
def test_squared_mmd_is_unbiased(shift, expected):
    """(xy+1)³ = 1 + 3xy + 3x²y² + x³y³ compares moments: 3Δm1² + 3Δm2² + Δm3², and N(½, 1) has 1/2, 5/4, 13/8 where N(0, 1) has 0, 1, 0.

    Within four standard errors of 500 independent estimates; the biased one, with the diagonal, would be off by many.
    """
    n, pairs = 20, 500
    x, y = normal(pairs, n, 1, seed=1), shift + normal(pairs, n, 1, seed=2)
    values = np.array([squared_mmd(a, b) for a, b in zip(x, y, strict=True)])
    error = values.std(ddof=1) / math.sqrt(pairs)
    assert abs(values.mean() - expected) < 4 * error
    # what the diagonal adds: (E[k(x, x)] - E[k(x, x')])/n for each side, E[(x²+1)³] - E[(xx'+1)³] = 28 - 4 for N(0, 1)
    assert 2 * (28 - 4) / n > 6 * error


def test_kid_averages_over_subsets_and_keeps_to_its_seed():
    x, y = normal(300, 5, seed=1), normal(200, 5, seed=2)
    state = torch.random.get_rng_state()
    first = kid(x, y, subsets=20, size=50, seed=3)
    assert first == kid(x, y, subsets=20, size=50, seed=3)
    assert first != kid(x, y, subsets=20, size=50, seed=4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert first.std > 0
    # the mean over all subsets is the statistic of the whole sets; over 2,000 of them, to four standard errors
    many = kid(x, y, subsets=2000, size=10)
    assert abs(many.mean - squared_mmd(x, y)) < 4 * many.std / math.sqrt(2000)
    # subsets of everything are all the same set, in another order
    whole = kid(x[:200], y, subsets=5, size=1000)
    assert whole.mean == pytest.approx(squared_mmd(x[:200], y), rel=1e-9)
    assert whole.std < 1e-12


# --- precision and recall -----------------------------------------------------------------------------------------------------------------


def by_hand(real: np.ndarray, fake: np.ndarray, k: int) -> tuple[float, float]:
    def reach(x):
        return [sorted(np.linalg.norm(x[i] - x[j]) for j in range(len(x)) if j != i)[k - 1] for i in range(len(x))]

    def share(inside, around, reaches):
        return np.mean([any(np.linalg.norm(p - c) <= r for c, r in zip(around, reaches, strict=True)) for p in inside])

    return share(fake, real, reach(real)), share(real, fake, reach(fake))


@pytest.mark.parametrize("k", [1, 3])
def test_precision_and_recall_are_those_of_the_definition(k):
    real, fake = normal(40, 3, seed=1), 1.5 + 0.7 * normal(30, 3, seed=2)
    expected = by_hand(real.numpy(), fake.numpy(), k)
    assert all(0 < share < 1 for share in expected)
    assert expected[0] != expected[1]
    for chunk in (1, 100, 2**20):
        assert precision_recall(real, fake, k=k, chunk=chunk) == pytest.approx(expected, abs=1e-12)


def test_precision_and_recall_of_sets_apart_alike_and_one_in_the_other():
    real = torch.cat([torch.arange(10.0), 100 + torch.arange(10.0)])[:, None]
    assert precision_recall(real, real) == (1, 1)
    assert precision_recall(real, real + 1000) == (0, 0)
    assert precision_recall(real, real[:10]) == (1, 0.5)  # good pictures of half of what there is
    assert precision_recall(real[:10], real) == (0.5, 1)
    assert precision_recall(real, torch.zeros(5, 1) + 3.5) == (1, 0)  # one picture, over and over


@settings(max_examples=25, deadline=None)
@given(seed=seeds, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
def test_precision_and_recall_do_not_depend_on_place_size_direction_or_order(seed, scale, shift):
    """The points are random, so no distance is within rounding (1e-12) of a radius."""
    real, fake = normal(30, 4, seed=seed), 0.5 + normal(20, 4, seed=seed + 1)
    before = precision_recall(real, fake)
    q, order = turn(4, seed), torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    assert precision_recall(scale * real[order] @ q + shift, scale * fake @ q + shift) == before
    assert precision_recall(fake, real) == before[::-1]


# --- the Inception Score ------------------------------------------------------------------------------------------------------------------


def test_inception_score_runs_from_one_to_the_number_of_classes():
    sure = 200 * torch.eye(7).repeat(30, 1)  # every class alike and without doubt
    assert inception_score(sure, splits=10) == pytest.approx((7, 0), abs=1e-9)
    assert inception_score(torch.ones(40, 7), splits=4) == pytest.approx((1, 0), abs=1e-12)
    assert inception_score(200 * torch.eye(7)[:1].repeat(40, 1)).mean == pytest.approx(1, abs=1e-12)  # without doubt, but always the same


def test_inception_score_is_the_mean_over_parts():
    logits = 2 * normal(21, 5)
    p = logits.softmax(1).numpy()
    parts = [np.exp((q * np.log(q / q.mean(0))).sum(1).mean()) for q in (p[:10], p[10:20])]
    assert inception_score(logits, splits=2) == pytest.approx((np.mean(parts), np.std(parts)), rel=1e-12)


# --- bad input ----------------------------------------------------------------------------------------------------------------------------


def test_bad_features_are_refused():
    good = normal(5, 3)
    with pytest.raises(ValueError, match="uint8"):
        Moments.of(torch.zeros(3, 3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="shape"):
        Moments.of(torch.zeros(3))
    with pytest.raises(ValueError, match="finite"):
        Moments.of(torch.tensor([[1.0, math.nan]]))
    with pytest.raises(ValueError, match="3 and of 4"):
        frechet(Moments.of(good), Moments.of(normal(5, 4)))
    with pytest.raises(ValueError, match="3 and of 4"):
        kid(good, normal(5, 4))
    with pytest.raises(ValueError, match="at least 2"):
        squared_mmd(good, good[:1])
    with pytest.raises(ValueError, match="at least 4"):
        precision_recall(good, good[:3])


@pytest.mark.parametrize("chunk", [37, 2**26])
def test_copies_of_a_picture_are_at_its_very_place(chunk):
    """Balls around copies have radius 0, and the rounding of a distance must not put the same picture outside."""
    points = torch.rand(10, 2048, generator=torch.Generator().manual_seed(0)) * 7 + 3
    real = points.repeat_interleave(10, 0)
    assert precision_recall(real, real[::2].clone(), chunk=chunk) == (1.0, 1.0)
    constant = torch.full((20, 5), 3.3)
    assert precision_recall(constant, constant, chunk=chunk) == (1.0, 1.0)
    assert precision_recall(constant, constant + 1e-4, chunk=chunk) == (0.0, 0.0)
