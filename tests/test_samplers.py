"""One contract, and every sampler held to it."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import assume, given, settings, strategies as st

import noiseclock as nc
from noiseclock.core.contract import PROMISES
from noiseclock.core.names import SHORT
from noiseclock.core.samplers import Cells

T = 1000
LINEAR, COSINE, EDM, FLOW = (nc.schedule(name) for name in ("linear", "cosine", "edm", "flow"))
ZERO = nc.schedule("linear", zero_terminal_snr=True)

CONTRACT = [
    nc.Uniform(),
    nc.LogitNormal(),
    nc.LogitNormal(mean=-1.0, std=0.5),
    nc.Mode(),
    nc.Mode(scale=-0.9),
    nc.CosMap(),
    nc.Beta(),
    nc.Beta(2.0, 5.0),
    nc.Beta(0.5, 0.5),
    nc.LogNormal(schedule=LINEAR),
    nc.LogNormal(schedule=EDM),
    nc.LogNormal(schedule=FLOW),
    nc.LogSNRNormal(schedule=COSINE),
    nc.LogSNRNormal(schedule=ZERO),
    nc.LogSNRNormal(schedule=FLOW),
    nc.LogSNRNormal(mean=8.0, std=1.0, schedule=EDM),
    nc.SpeeD(schedule=LINEAR),
    nc.SpeeD(schedule=FLOW),
    nc.SpeeD(k=10.0, tau=700, schedule=COSINE),
    nc.SpeeD(variant="released", schedule=LINEAR),
    nc.SpeeD(variant="released", schedule=COSINE),
    nc.SpeeD(variant="released", tau=300, k=3.0, schedule=LINEAR),
    nc.Shifted(nc.LogitNormal(), k=3.0),
    nc.Shifted(nc.Uniform(), k=0.3),
    nc.Truncated(nc.LogitNormal(), 0.1, 0.7),
    nc.Truncated(nc.Beta(), 0.0, 0.2),
    nc.Truncated(nc.SpeeD(schedule=LINEAR), 0.5, 1.0),
    nc.Truncated(nc.SpeeD(variant="released", schedule=LINEAR), 0.3, 0.8),
    nc.Shifted(nc.Truncated(nc.Uniform(), 0.25, 1.0), k=2.0),
    nc.Independent(),
    nc.Independent(nc.SpeeD(schedule=LINEAR)),
    nc.Mixture(nc.LogitNormal(mean=2.0, std=0.2)),
    nc.Mixture(nc.Truncated(nc.Uniform(), 0.2, 0.4), nc.LogitNormal(), floor=0.5),
    nc.Annealed(nc.LogitNormal(), nc.Beta(), start=0, stop=10),
    nc.Mixture(nc.Annealed(nc.SpeeD(schedule=LINEAR), nc.Uniform(), start=0, stop=10), floor=0.3),
]
every_sampler = pytest.mark.parametrize("sampler", CONTRACT, ids=repr)


@pytest.fixture(autouse=True)
def _midway():
    """Annealed samplers are held to the contract halfway through, where both parts count."""
    for sampler in CONTRACT:
        sampler.advance(4)


@every_sampler
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_contract(sampler, promise):
    promise(sampler, T)


@pytest.mark.parametrize("sampler", [s for s in CONTRACT if isinstance(s, nc.Density)], ids=repr)
def test_draws_follow_the_density_within_the_steps_too(sampler):
    time = sampler.sample(100_000, generator=torch.Generator().manual_seed(2)).time
    result = scipy.stats.kstest(time.numpy(), lambda u: sampler.cdf(torch.as_tensor(u)).numpy())
    assert result.pvalue > 0.001


@every_sampler
def test_repr_rebuilds_and_state_round_trips(sampler):
    again = eval(repr(sampler), {**vars(nc.schedules), **vars(nc)})
    assert again == sampler
    again.load_state_dict(sampler.state_dict())
    again.advance(4)
    uniforms = torch.rand(20, dtype=torch.float64)
    assert torch.equal(again.sample(20, uniforms=uniforms).time, sampler.sample(20, uniforms=uniforms).time)
    with pytest.raises(ValueError, match="state"):
        again.load_state_dict({"nonsense": 1})


@every_sampler
def test_every_sampler_is_bound_by_a_clock(sampler):
    schedule = next((s for s in (EDM, FLOW, COSINE, ZERO) if repr(s) in repr(sampler)), LINEAR)
    batch = nc.Clock(schedule, sampler, correct="none").draw(torch.zeros(8, 2))
    assert ((batch.time >= 0) & (batch.time < 1)).all()


@dataclass(frozen=True)
class Rising(nc.Density):
    """p(u) = 2u: right as it is, and below with one thing wrong at a time."""

    def icdf(self, v):
        return v.double().sqrt()

    def mass(self, lo, hi):
        return hi**2 - lo**2

    def log_prob(self, time, *, x0=None):
        return (2 * time.double().clamp(min=1e-18)).log()


class Unnormalised(Rising):
    def mass(self, lo, hi):
        return 1.001 * (hi**2 - lo**2)


class OtherDensity(Rising):
    def log_prob(self, time, *, x0=None):
        return torch.zeros_like(time)


class OtherDraws(Rising):
    def icdf(self, v):
        return v.double()


class IgnoresUniforms(Rising):
    def sample(self, n, *, x0=None, uniforms=None, generator=None):
        return super().sample(n, generator=torch.Generator().manual_seed(0) if generator is None else generator)


class WrongAboutItsDraws(Rising):
    def sample(self, n, *, x0=None, uniforms=None, generator=None):
        draw = super().sample(n, uniforms=uniforms, generator=generator)
        return nc.Draw(draw.time, draw.log_prob + 1e-6)


class InfiniteAtZero(Rising):
    def log_prob(self, time, *, x0=None):
        return (2 * time.double()).log()


class WithAGap(Rising):
    """Nothing between 0.4 and 0.6, which its support does not say."""

    def icdf(self, v):
        return torch.where(v < 0.5, 0.8 * v, 0.2 + 0.8 * v)

    def mass(self, lo, hi):
        return sum(hi.clamp(*part) - lo.clamp(*part) for part in ((0.0, 0.4), (0.6, 1.0))) / 0.8

    def log_prob(self, time, *, x0=None):
        return torch.where((time < 0.4) | (time >= 0.6), -math.log(0.8), -math.inf).double()


class OwnChance(Rising):
    def sample(self, n, *, x0=None, uniforms=None, generator=None):
        # right for many draws, which is how the other promises look at it
        return super().sample(n, uniforms=uniforms, generator=generator if n > 50 else None)


class TakesAnyState(Rising):
    def load_state_dict(self, state):
        pass


class OnTheHost(Rising):
    def sample(self, n, *, x0=None, uniforms=None, generator=None):
        return super().sample(n, uniforms=None if uniforms is not None and uniforms.is_meta else uniforms, generator=generator)


def test_a_sampler_of_ones_own_can_be_checked():
    nc.check_sampler(Rising())
    with pytest.raises(ValueError, match="needs a noise schedule"):
        nc.check_sampler(nc.SpeeD())
    nc.check_sampler(nc.Clock("linear", nc.SpeeD()).sampler)
    nc.check_sampler(nc.Clock("linear", nc.LossSecondMoment(bins=50)).sampler)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (Unnormalised, "the probabilities of 2 steps add up to 1.001 and not to 1"),
        (OtherDensity, "log_prob integrated over step 0 of 1000 differs from log_pmf by 0.001"),
        (OtherDraws, "draws deviate from log_pmf"),
        (IgnoresUniforms, "sample must use `uniforms`"),
        (WrongAboutItsDraws, "differs from log_prob at its time by 1e-06"),
        (InfiniteAtZero, "must be finite at both ends of time"),
        (WithAGap, "some steps in it have no probability"),
        (OwnChance, "must depend on the generator"),
        (TakesAnyState, "without an error"),
        (OnTheHost, "must give times and log_prob on that device, got them on cpu"),
    ],
)
def test_a_broken_promise_is_named(sampler, message):
    with pytest.raises(ValueError, match=message):
        nc.check_sampler(sampler())


def test_a_density_in_bins_is_checked_at_their_borders():
    clock = nc.Clock("linear", nc.LossSecondMoment(refresh=1, warmup=1))
    for _ in range(10):
        b = clock.draw(torch.ones(64, 1))
        clock.loss(b, b.target + b.time[:, None])
        clock.updated()
    nc.check_sampler(clock.sampler, steps=64)
    with pytest.raises(ValueError, match=r"of 1000 differs from log_pmf by .*; if the density jumps within a step, as in bins, choose"):
        nc.check_sampler(clock.sampler)


# --- each density against its closed form ----------------------------------------------------------------------------------------------


def test_beta_against_scipy():
    """The stated error of the table, 1e-7, over the stated range of parameters; cdf and density are exact."""
    v = torch.linspace(0.0005, 0.9995, 4000, dtype=torch.float64)
    for a in (0.5, 0.8, 1.0, 2.0, 7.5, 20.0):
        for b in (0.5, 1.0, 3.0, 20.0):
            exact = scipy.stats.beta(a, b)
            beta = nc.Beta(a, b)
            assert np.abs(beta.icdf(v).numpy() - exact.ppf(v.numpy())).max() < 1e-7
            assert np.abs(beta.cdf(v).numpy() - exact.cdf(v.numpy())).max() < 1e-12
            assert np.allclose(beta.log_prob(v).numpy(), exact.logpdf(v.numpy()), rtol=1e-11, atol=1e-11)


def test_beta_tail_keeps_its_digits():
    lo = torch.tensor([1 - 1e-3], dtype=torch.float64)
    mass = nc.Beta(2.0, 9.0).mass(lo, torch.ones_like(lo))
    assert mass.item() == pytest.approx(scipy.stats.beta(2, 9).sf(1 - 1e-3), rel=1e-9)


def test_logit_normal_is_sd3s():
    z = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = nc.LogitNormal(0.3, 1.4).icdf(torch.special.ndtr(z))
    assert torch.allclose(u, torch.sigmoid(0.3 + 1.4 * z), rtol=1e-10)


def test_mode_is_the_published_map_from_the_other_end():
    v = torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    published = 1 - v - 1.29 * (torch.cos(math.pi / 2 * v) ** 2 - 1 + v)
    assert torch.allclose(nc.Mode().icdf(1 - v), published, rtol=0, atol=1e-14)


def test_cosmap_density():
    u = torch.linspace(0, 0.999, 50, dtype=torch.float64)
    assert torch.allclose(nc.CosMap().log_prob(u).exp(), 2 / (math.pi - 2 * math.pi * u + 2 * math.pi * u**2), rtol=1e-13)


def test_edm_log_normal_is_a_normal_in_log_sigma():
    time = nc.LogNormal(schedule=EDM).sample(100_000, generator=torch.Generator().manual_seed(0)).time
    log_sigma = -EDM.log_snr(time).numpy() / 2
    lo, hi = (math.log(0.002) + 1.2) / 1.2, (math.log(80) + 1.2) / 1.2
    assert scipy.stats.kstest(log_sigma, scipy.stats.truncnorm(lo, hi, loc=-1.2, scale=1.2).cdf).pvalue > 0.001


def test_log_snr_normal_far_in_either_tail_is_still_exact():
    """All of the schedule lies 10 or more standard deviations from the mean."""
    for mean in (-30.0, 30.0):
        sampler = nc.LogSNRNormal(mean=mean, std=1.5, schedule=EDM)
        v = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
        assert torch.allclose(sampler.cdf(sampler.icdf(v)), v, rtol=0, atol=1e-6)
        on_steps = nc.LogSNRNormal(mean=mean, std=1.5, schedule=LINEAR).pmf(T)
        assert on_steps.argmax().item() == (999 if mean < 0 else 0)


def test_log_snr_normal_on_steps_gives_each_step_its_nearest_levels():
    sampler = nc.LogSNRNormal(mean=0.0, std=3.0, schedule=COSINE)
    log_snr = COSINE.log_snr(COSINE.grid()).numpy()
    borders = (log_snr[1:] + log_snr[:-1]) / 2
    normal = scipy.stats.norm(0, 3)
    inner = normal.cdf(borders[:-1]) - normal.cdf(borders[1:])
    ends = normal.cdf(2 * log_snr[0] - borders[0]) - normal.cdf(2 * log_snr[-1] - borders[-1])
    assert np.allclose(sampler.pmf(T)[1:-1].numpy(), inner / ends, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("name", "tau"), [("linear", 641), ("quadratic", 828), ("cosine", 958)])
def test_speed_as_the_paper_states_it(name, tau):
    sampler = nc.SpeeD(schedule=nc.schedule(name))
    assert sampler.boundary == tau
    pmf = sampler.pmf(T)
    assert torch.allclose(pmf[:tau], torch.full((tau,), 5 / (T + 4 * tau), dtype=torch.float64), rtol=1e-12)
    assert torch.allclose(pmf[tau:], torch.full((T - tau,), 1 / (T + 4 * tau), dtype=torch.float64), rtol=1e-12)


def test_speed_as_released():
    """11 : 10 : 1 over steps up to 357, up to 638 and in the tail, with 5.1 % of the mass from step 642 on."""
    sampler = nc.SpeeD(variant="released", schedule=LINEAR)
    pmf = sampler.pmf(T).numpy()
    ratio = pmf / pmf[-1]
    assert np.allclose(ratio[10:357], 11, rtol=1e-3)
    assert np.allclose(ratio[358:636], 10, rtol=1e-3)
    assert np.allclose(ratio[650:], 1, rtol=1e-6)
    assert pmf[642:].sum() == pytest.approx(0.051, abs=5e-4)


def test_speed_released_draws_are_steps_and_their_duals():
    sampler = nc.SpeeD(variant="released", schedule=LINEAR)
    v = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 2
    step = (sampler.sample(1000, uniforms=v).time * T).floor()
    dual = (sampler.sample(1000, uniforms=v + 0.5).time * T).floor()
    assert torch.equal(dual, torch.where(step < 642, 642 - step, step - 642))


@settings(max_examples=50, deadline=None)
@given(k=st.floats(0.05, 20), lo=st.floats(0, 0.8), width=st.floats(0.05, 0.2), mean=st.floats(-2, 2), std=st.floats(0.2, 2))
def test_wrappers_keep_the_inverse_the_inverse(k, lo, width, mean, std):
    inner = nc.Shifted(nc.LogitNormal(mean, std), k=k)
    assume(inner.mass(torch.tensor(lo), torch.tensor(lo + width)) > 1e-8)
    sampler = nc.Truncated(inner, lo, lo + width)
    v = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    time = sampler.icdf(v)
    assert ((time >= lo) & (time < lo + width)).all()
    assert (time.diff() >= 0).all()
    below, between = sampler._shares
    # one rounding of the inner CDF, of the size of what lies below lo, is magnified by 1/between
    assert torch.allclose(sampler.cdf(time), v, rtol=0, atol=1e-12 + 1e-14 * (below + 1) / between)


@settings(max_examples=50, deadline=None)
@given(floor=st.floats(0.01, 0.99), v=st.floats(0, 1, exclude_max=True))
def test_a_mixture_draws_the_floor_from_the_lowest_uniforms(floor, v):
    sampler = nc.Mixture(nc.Truncated(nc.Uniform(), 0.5, 1.0), nc.Truncated(nc.Uniform(), 0.0, 0.5), floor=floor)
    time = sampler.sample(1, uniforms=torch.tensor([v], dtype=torch.float64)).time.item()
    assert (time < 0.5) == (v < floor)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=40).filter(lambda w: sum(w) > 1e-3))
def test_cells_draw_what_they_hold(weights):
    cells = Cells(torch.tensor(weights))
    v = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    time = cells.icdf(v)
    share = torch.bincount((time * len(weights)).floor().long(), minlength=len(weights)) / 4000
    assert (share - cells.pmf).abs().max() <= 1 / 4000 + 1e-12
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert cells.mass(ends[:1], ends[1:]).item() == pytest.approx(1, abs=1e-12)


def test_independent_draws_leave_gaps_where_the_others_have_none():
    """Of n cells of equal probability, n independent draws leave (1-1/n)^n empty, nearly 1/e; stratified draws leave none."""
    for sampler in (nc.Uniform(), nc.LogitNormal(), nc.SpeeD()):
        for wrapped in (sampler, nc.Independent(sampler)):
            clock = nc.Clock("linear", wrapped)
            time = torch.stack([clock.draw(torch.zeros(1000, 1)).time for _ in range(20)])
            cells = (clock.sampler.cdf(time) * 1000 + 1e-6).long().clamp(max=999)
            empty = 1 - sum(len(row.unique()) for row in cells) / cells.numel()
            # 20,000 cells: the standard error of their share is under 0.0034
            assert empty == (pytest.approx(math.exp(-1), abs=0.014) if wrapped is not sampler else pytest.approx(0, abs=0.004))


@pytest.mark.parametrize("wrap", [lambda s: nc.Shifted(s), lambda s: nc.Truncated(s, 0.2, 0.9), nc.Mixture, nc.Annealed])
def test_draws_stay_independent_inside_other_wrappers(wrap):
    assert wrap(nc.LogitNormal()).stratified
    assert not wrap(nc.Independent(nc.LogitNormal())).stratified


def test_annealed_goes_from_one_to_the_other():
    sampler = nc.Annealed(nc.Truncated(nc.Uniform(), 0.0, 0.5), start=10, stop=20)
    late = torch.tensor([0.9], dtype=torch.float64)
    densities = []
    for updates in (0, 10, 15, 20, 100):
        sampler.advance(updates)
        densities.append(sampler.log_prob(late).exp().item())
    assert densities == [0, 0, pytest.approx(0.5), 1, 1]


def test_annealed_draws_as_the_other_does_once_it_is_over(monkeypatch):
    """Stratified, and without running the policy it came from."""
    clock = nc.Clock("linear", nc.Annealed(nc.Adaptive(stride=100), nc.Uniform(), 0, 4))
    x0 = torch.zeros(64, 3)

    for updates in (0, 2):
        clock.sampler.advance(updates)
        assert not clock.sampler.stratified
    clock.sampler.advance(4)
    assert clock.sampler.stratified
    monkeypatch.setattr(nc.Adaptive, "_policy_for", lambda self, x0: pytest.fail("the policy was run"))
    draw = clock.draw(x0, predict=lambda x, t: x).draw
    assert (draw.time * 64).long().unique().numel() == 64  # one in each stratum
    assert torch.equal(draw.log_prob, torch.zeros(64, dtype=torch.float64))
    steps = torch.arange(64)
    assert torch.equal(clock.sampler.log_pmf(steps, 1000, x0=x0), nc.Uniform().log_pmf(steps, 1000))
    # an earlier state is drawn from as before
    clock.sampler.advance(2)
    assert not clock.sampler.stratified


PYTHON = {
    "lsm": nc.LossSecondMoment,
    "adaptive.paper": nc.Adaptive.paper,
    "adaptive.scaled": nc.Adaptive.scaled,
    "adaptive.released": nc.Adaptive.released,
    "adaptive.cheap": nc.Adaptive.cheap,
}


@pytest.mark.parametrize("name", SHORT)
def test_a_short_name_means_what_it_does_in_python(name):
    """With its options, and with one of its own replaced; a name that results tables show makes a clock."""
    for options in ({}, {"floor": 0.3}):
        assert repr(nc.sampler(name, **options)) == repr(PYTHON[name](**options))
    assert repr(nc.Clock("linear", sampler=name)) == repr(nc.Clock("linear", PYTHON[name]()))


@dataclass
class NotADensity:
    x: int = 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nc.sampler("unifrom"), ValueError, "unknown sampler 'unifrom'; known: adaptive, adaptive.cheap, .*, lsm, "),
        (lambda: nc.sampler("lsm", k=3), TypeError, "sampler 'loss-second-moment' takes no option 'k'; allowed: bins, "),
        (lambda: nc.sampler("speed", kk=3), TypeError, "takes no option 'kk'; allowed: k, tau, variant, schedule"),
        (lambda: nc.sampler(3), TypeError, "got int"),
        (lambda: nc.LogitNormal(std=0.0), ValueError, "LogitNormal: std must be positive, got 0"),
        (lambda: nc.Mode(scale=2.0), ValueError, "one to one, got 2.0"),
        (lambda: nc.Beta(a=-1.0), ValueError, "Beta: a must be positive"),
        (lambda: nc.Beta(b=math.inf), ValueError, "Beta: b must be finite, got inf"),
        (lambda: nc.SpeeD(k=0), ValueError, "SpeeD: k must be positive"),
        (lambda: nc.SpeeD(variant="papper"), ValueError, "unknown SpeeD variant 'papper'; known: paper, released"),
        (lambda: nc.SpeeD(tau="late"), ValueError, "unknown SpeeD tau 'late'; known: auto"),
        (lambda: nc.SpeeD(tau=2000, schedule=LINEAR), ValueError, "a step from 1 to 1000, got 2000"),
        (lambda: nc.SpeeD().sample(3), ValueError, "needs a noise schedule"),
        (lambda: nc.LogNormal().log_prob(torch.tensor(0.5)), ValueError, "needs a noise schedule"),
        (lambda: nc.Clock(COSINE, nc.Shifted(nc.SpeeD(schedule=LINEAR))), ValueError, "was made for Linear"),
        (lambda: nc.sampler(nc.SpeeD(), k=3.0), TypeError, "options go with the name of a sampler"),
        (lambda: nc.sampler("truncated", lo=0.1), TypeError, "'truncated' needs sampler"),
        (lambda: nc.LogitNormal(mean=math.nan), ValueError, "LogitNormal: mean must be finite, got nan"),
        (lambda: nc.LogitNormal(std="1"), TypeError, "std must be a number, got '1'"),
        (lambda: nc.SpeeD(tau=2.5), ValueError, "whole number of at least 1, got 2.5"),
        (lambda: nc.Shifted(nc.Uniform(), k=-1.0), ValueError, "k must be positive"),
        (lambda: nc.Shifted(NotADensity()), TypeError, "needs a fixed density"),
        (lambda: nc.Truncated(nc.Uniform(), 0.7, 0.2), ValueError, "lo = 0.7, hi = 0.2"),
        (lambda: nc.Truncated(nc.Truncated(nc.Uniform(), 0.0, 0.2), 0.5, 1.0), ValueError, "does not overlap"),
        (lambda: nc.Truncated(nc.LogitNormal(10.0, 0.1), 0.1, 0.2).sample(3), ValueError, r"hardly any probability \(0e\+00\) in \[0.1, 0.2\]"),
        (lambda: nc.LogNormal(mean=200.0, std=0.1, schedule=EDM).sample(3), ValueError, "has no probability on the schedule"),
        (lambda: nc.LogNormal(mean=200.0, std=0.1, schedule=LINEAR).sample(3), ValueError, "has no probability on the schedule"),
        (lambda: nc.Mixture(nc.Uniform(), floor=0.0), ValueError, "floor must lie between 0 and 1"),
        (lambda: nc.Mixture("speed"), TypeError, r"Mixture blends samplers, got 'speed'; make one by its name with nc.sampler\(name\)"),
        (lambda: nc.Independent(nc.LossSecondMoment()), TypeError, "Independent needs a fixed density with an inverse CDF, got LossSecondMoment"),
        (lambda: nc.Annealed(nc.Uniform(), "speed"), TypeError, "Annealed blends samplers, got 'speed'"),
        (lambda: nc.Mixture(nc.Adaptive(), nc.GradientVariance()), ValueError, "every 40 updates, the other every 1000; give both the same `every`"),
        (lambda: nc.Annealed(nc.Uniform(), start=5, stop=5), ValueError, "start = 5, stop = 5"),
        (lambda: nc.Uniform().log_prob(torch.tensor(1.5)), ValueError, r"must lie in \[0, 1\]"),
        (lambda: nc.Shifted(nc.Uniform()).log_prob(torch.tensor(-0.5)), ValueError, r"must lie in \[0, 1\]"),
        (lambda: nc.Uniform().sample(0), ValueError, "at least 1, got 0"),
        (lambda: nc.Uniform().sample(2.5), ValueError, "at least 1, got 2.5"),
        (lambda: nc.Uniform().sample(2, uniforms=torch.rand(3)), ValueError, r"shape \(2,\), got \(3,\)"),
        (lambda: nc.Uniform().sample(1, uniforms=torch.tensor([1.0])), ValueError, r"\[0, 1\), got values from 1"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
