"""Samplers that learn from losses: the contract of every sampler, cold and warm, and their closed forms."""

import math
import warnings
from collections import defaultdict
from functools import partial

import numpy as np
import pytest
import torch

import noiseclock as nc
from made_up_losses import COSINE, FLOW, LINEAR, SMALL, T, caught, error_level, log_pmf
from noiseclock.core import loss_based
from noiseclock.core.batch import Batch
from noiseclock.core.learned import running_sum
from noiseclock.core.loss_based import LossEMA, LossHistory, LossSecondMoment
from noiseclock.core.record import Record
from noiseclock.core.samplers import Setting

BELOW_ONE = math.nextafter(1, 0)
NAMES = {**vars(nc.schedules), **vars(nc), **vars(loss_based)}


def batch_at(time: torch.Tensor, weight: torch.Tensor | None = None) -> Batch:
    """A batch of which only times and weights matter."""
    ones = torch.ones_like(time)
    return Batch(ones, ones, ones, ones, ones, time, ones if weight is None else weight, ones)


def bound(sampler: nc.Sampler, schedule: nc.Schedule = LINEAR, base: nc.Sampler | None = None) -> nc.Sampler:
    return sampler.bind(Setting(schedule, nc.objective("eps"), nc.Constant(), base or nc.Uniform()))


def warm(sampler: nc.Sampler, updates: int = 60, n: int = 1000) -> nc.Sampler:
    """The sampler after some updates with losses that scatter around `error_level`."""
    generator = torch.Generator().manual_seed(0)
    for update in range(updates):
        time = sampler.sample(n, uniforms=(torch.arange(n, dtype=torch.float64) + torch.rand(n, dtype=torch.float64, generator=generator)) / n).time
        losses = error_level(time) * torch.empty(n, dtype=torch.float64).exponential_(generator=generator)
        sampler.update(batch_at(time), losses)
        sampler.advance(update + 1)
    return sampler


def make_contract() -> dict[str, nc.Sampler]:
    base = nc.LogitNormal(std=1.5)
    kinds = {
        "second moment": lambda: bound(LossSecondMoment()),
        "second moment, 7 bins": lambda: bound(LossSecondMoment(bins=7, floor=0.02)),
        "second moment, base": lambda: bound(LossSecondMoment(bins=50, refresh=3), FLOW, base),
        "ema": lambda: bound(LossEMA()),
        "published": lambda: bound(LossSecondMoment.published()),
        "history of 3, 20 steps": lambda: bound(LossHistory(length=3, floor=0.05, refresh=2), SMALL),
        "mixture": lambda: nc.Mixture(bound(LossSecondMoment()), nc.LogitNormal(), floor=0.2),
        "annealed": lambda: nc.Annealed(bound(LossSecondMoment()), start=0, stop=120),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small effective sample sizes, which are meant
        return {f"{name}, {state}": make() if state == "cold" else warm(make()) for name, make in kinds.items() for state in ("cold", "warm")}


CONTRACT = make_contract()
every_sampler = pytest.mark.parametrize("sampler", CONTRACT.values(), ids=CONTRACT)


# --- the contract -------------------------------------------------------------------------------------------------------------------------


def test_the_warm_ones_have_learned():
    for name, sampler in CONTRACT.items():
        pmf = log_pmf(sampler).exp()
        assert (pmf[:100].sum() > 0.2) == name.endswith("warm"), name


@every_sampler
def test_step_probabilities_sum_to_one(sampler):
    for steps in (2, 20, 37, 64, T, 4001):
        assert log_pmf(sampler, steps).exp().sum().item() == pytest.approx(1, abs=1e-12)


@every_sampler
def test_density_integrates_to_the_step_probabilities(sampler):
    """64,000 midpoints on 1000 steps: cells of 1/64, 1/100, 1/50, 1/20 and 1/1000 have their borders between midpoints; of 7 cells a step that
    a border cuts in two errs by one midpoint in 64; a logit-normal part by the square of the distance, 1e-7 of a step's probability or so."""
    fine = 64
    time = (torch.arange(T * fine, dtype=torch.float64) + 0.5) / (T * fine)
    integral = sampler.log_prob(time).exp().reshape(T, fine).mean(1) / T
    pmf = log_pmf(sampler).exp()
    allowed = torch.full((T,), 1e-9, dtype=torch.float64)
    density = pmf * T
    borders = (torch.arange(1, 7) * T / 7).long()
    if getattr(sampler, "bins", 0) == 7:
        allowed[borders] += (density[borders - 1] - density[borders + 1]).abs() / T / fine
    if isinstance(sampler, nc.Mixture):
        allowed += 1e-6 / T
        allowed[[0, -1]] = 1e-7
    assert ((integral - pmf).abs() <= allowed).all()
    assert integral.sum().item() == pytest.approx(1, abs=1e-4 if allowed.max() > 1e-6 else 1e-6)


@every_sampler
def test_draws_follow_the_density(sampler):
    n = 100_000
    time = sampler.sample(n, generator=torch.Generator().manual_seed(1)).time
    assert time.dtype == torch.float64
    drawn = torch.bincount((time * T).floor().long(), minlength=T).cumsum(0) / n
    distance = (drawn - log_pmf(sampler).exp().cumsum(0)).abs().max().item()
    assert distance * math.sqrt(n) < 1.95  # Kolmogorov: P(√n·D > 1.95) = 0.001


@every_sampler
def test_log_prob_of_a_draw_is_log_prob_at_its_time(sampler):
    draw = sampler.sample(1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(draw.log_prob, sampler.log_prob(draw.time))


@every_sampler
def test_the_ends_of_time_and_everything_between_can_be_drawn(sampler):
    ends = torch.tensor([0.0, BELOW_ONE], dtype=torch.float64)
    drawn = sampler.sample(2, uniforms=ends).time
    assert ((drawn >= 0) & (drawn < 1)).all()
    assert sampler.log_prob(torch.cat([ends, torch.linspace(0, 1, 999, dtype=torch.float64)])).isfinite().all()
    assert (log_pmf(sampler) > math.log(1e-12)).all()


@every_sampler
def test_the_mean_of_base_over_p_is_one(sampler):
    """By quadrature over the uniform, on the steps, as a Clock corrects: the ratio is at most 1/floor = 1000 and its variation over n little."""
    n = 200_000
    draw = sampler.sample(n, uniforms=(torch.arange(n, dtype=torch.float64) + 0.5) / n)
    step = (draw.time * T).floor().long()
    ratio = (nc.Uniform().log_pmf(step, T) - sampler.log_pmf(step, T)).exp()
    assert ratio.mean().item() == pytest.approx(1, abs=4 * ratio.max().item() / n + 1e-3)


@every_sampler
def test_repr_rebuilds_and_state_round_trips(sampler):
    again = eval(repr(sampler), NAMES)
    assert again == sampler
    again.load_state_dict(sampler.state_dict())
    again.advance(60)
    sampler.advance(60)
    uniforms = torch.rand(20, dtype=torch.float64)
    assert torch.equal(again.sample(20, uniforms=uniforms).time, sampler.sample(20, uniforms=uniforms).time)
    with pytest.raises(ValueError, match="state"):
        again.load_state_dict({"nonsense": 1})


@every_sampler
def test_nothing_is_read_from_another_device(sampler):
    """On the meta device there is nothing to read; and a look from there changes nothing here."""
    before = log_pmf(sampler)
    draw = sampler.sample(4, uniforms=torch.empty(4, device="meta", dtype=torch.float64))
    assert draw.time.device.type == draw.log_prob.device.type == "meta"
    assert torch.equal(log_pmf(sampler), before)


@pytest.mark.parametrize("make", [LossSecondMoment, LossEMA, LossSecondMoment.published])
def test_a_whole_step_reads_nothing_from_the_device(make):
    clock = nc.Clock("linear", make(), nc.MinSNR())
    for _ in range(25):
        x0 = torch.empty(4, 2, device="meta")
        b = clock.draw(x0, noise=torch.empty_like(x0))
        clock.loss(b, b.x_t * 2)
        clock.updated()
    assert clock.sampler._buffers.device.type == "meta"


# --- what they learn ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "power", "of_loss"), [(LossSecondMoment, 2, 1), (partial(LossSecondMoment, power=0.5), 2, 0.5), (LossEMA, 1, 1)])
def test_the_warm_density_is_the_closed_form(make, power, of_loss):
    """Losses that take two values in each bin, half of them each: E[(wℓ)²] is known. The base is not even and the weights are not 1."""
    bins, base = 16, nc.LogitNormal(std=1.4)
    sampler = bound(make(bins=bins, refresh=2, warmup=8, floor=0.1), FLOW, base)
    low, high = torch.rand(2, bins, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 0.1
    weight = torch.linspace(0.5, 3, bins, dtype=torch.float64)
    middle = (torch.arange(bins, dtype=torch.float64) + 0.5) / bins
    for update in range(1, 9):
        for losses in (low, high):
            sampler.update(batch_at(middle, weight), losses)
        assert sampler.advance(update) == (update % 2 == 0)
    moment = (weight * low**of_loss) ** power / 2 + (weight * high**of_loss) ** power / 2
    mass = base.pmf(bins)
    best = mass * moment ** (1 / power)
    expected = 0.9 * best / best.sum() + 0.1 * mass
    assert torch.allclose(log_pmf(sampler, bins).exp(), expected, rtol=1e-12, atol=0)
    assert sampler.ess() == pytest.approx(1 / (mass**2 / expected).sum().item(), rel=1e-12)


def test_the_density_is_the_base_until_it_is_known():
    base = nc.LogitNormal()
    sampler = bound(LossSecondMoment(bins=10, refresh=1, warmup=3), FLOW, base)
    middle = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    seen = []
    for update in range(1, 5):
        sampler.update(batch_at(middle), 1 + middle)
        sampler.advance(update)
        seen.append(torch.allclose(log_pmf(sampler, 10).exp(), base.pmf(10), rtol=1e-12))
    assert seen == [True, True, False, False]


def test_a_bin_without_losses_takes_its_neighbours():
    sampler = bound(LossSecondMoment(bins=10, refresh=1, warmup=1))
    middle = (torch.arange(10, dtype=torch.float64) + 0.5) / 10
    reached = middle[middle != middle[4]]
    sampler.update(batch_at(reached), 1 + 10 * reached)
    sampler.advance(1)
    price = 1 + 10 * middle  # a straight line, so what lies between neighbours is on it
    assert torch.allclose(log_pmf(sampler, 10).exp(), 0.9 * price / price.sum() + 0.01, rtol=1e-12)


def test_old_losses_fade():
    """After a change of level from 1 to 3 the second moment is 9 - 8·decay^k, k updates later, as the counts are even (and old ones long gone)."""
    sampler = bound(LossSecondMoment(bins=2, decay=0.9, refresh=1, warmup=1, floor=1e-6))
    time = torch.tensor([0.25, 0.75], dtype=torch.float64)
    for update in range(200):
        sampler.update(batch_at(time), torch.tensor([1.0, 1.0]))
        sampler.advance(update)
    for update in range(5):
        sampler.update(batch_at(time), torch.tensor([1.0, 3.0]))
        sampler.advance(200 + update)
    pmf = log_pmf(sampler, 2).exp()
    assert (pmf[1] / pmf[0]).item() == pytest.approx(math.sqrt(9 - 8 * 0.9**5), rel=1e-5)


def test_an_annealed_base_is_followed():
    base = nc.Annealed(nc.LogitNormal(), start=0, stop=10)
    clock = nc.Clock("flow", LossSecondMoment(refresh=1, warmup=10**6), base=base)
    for _ in range(5):
        b = clock.draw(torch.zeros(8, 2))
        clock.loss(b, b.noise)
        clock.updated()
    clock.sampler.advance(6)  # a base moves after the sampler
    assert torch.allclose(log_pmf(clock.sampler, 64).exp(), clock.base.log_pmf(torch.arange(64), 64).exp(), rtol=1e-9)


def reference(stream, steps, length=10, q=0.001):
    """improved-diffusion's formula, sample by sample."""
    history = defaultdict(list)
    for t, loss in stream:
        history[t] = [*history[t], loss][-length:]
    if any(len(history[t]) < length for t in range(steps)):
        return np.full(steps, 1 / steps)
    weights = np.array([math.sqrt(sum(x**2 for x in history[t]) / length) for t in range(steps)])
    return weights / weights.sum() * (1 - q) + q / steps


@pytest.mark.parametrize("refresh", [1, 3])
def test_published_is_the_published_formula(refresh):
    """On random batches of 64 over 20 steps, most of them with several losses of one step; one batch holds 64 of one step; some are not finite."""
    published = LossSecondMoment.published()
    assert (published.length, published.floor, published.refresh) == (10, 0.001, 1)
    sampler = bound(LossHistory(refresh=refresh), SMALL)
    generator = torch.Generator().manual_seed(0)
    stream, was_uniform, lost = [], 0, 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for update in range(1, 31):
            step = torch.randint(20, (64,), generator=generator)
            if update == 20:
                step[:] = 7
            losses = torch.rand(64, generator=generator, dtype=torch.float64) * (1 + step)
            if update % 4 == 0:
                losses[::9] = math.nan
                lost += 8
            sampler.update(batch_at(SMALL.time_of(step)), losses)
            stream += [(t, x) for t, x in zip(step.tolist(), losses.tolist(), strict=True) if math.isfinite(x)]
            if sampler.advance(update):
                expected = reference(stream, 20)
                was_uniform += np.ptp(expected) == 0
                assert np.allclose(log_pmf(sampler, 20).exp().numpy(), expected, rtol=1e-12, atol=0)
    assert 0 < was_uniform < 30 // refresh
    assert sampler.skipped == lost


@pytest.mark.parametrize("base", [nc.Truncated(nc.Uniform(), 0.3, 1.0), nc.Beta(4.0, 1.0)], ids=["truncated", "hardly ever drawn"])
def test_a_history_does_not_wait_for_steps_that_the_base_leaves_out(base):
    """Of 20 steps 6 are never drawn, or the first three, which hold 0.05 % of the base, hardly ever. The others have the published density."""
    setting = Setting(SMALL, nc.objective("eps"), nc.Constant(), base, True)
    sampler, generator = LossHistory(length=3).bind(setting), torch.Generator().manual_seed(0)
    mass = setting.base.log_pmf(torch.arange(20), 20).exp()
    for update in range(1, 41):
        step = torch.multinomial(mass, 256, replacement=True, generator=generator)
        sampler.update(batch_at(SMALL.time_of(step)), 1.0 + step)
        sampler.advance(update)
    often = mass > 1e-3
    pmf, price = log_pmf(sampler, 20).exp(), 1.0 + torch.arange(20)
    learned = (pmf - sampler.floor * mass)[often]
    assert torch.allclose(learned / learned.sum(), (mass * price)[often] / (mass * price)[often].sum(), rtol=1e-9)
    assert (pmf[mass == 0] < 1e-12).all()


def test_errors_in_a_buffer_that_is_filled_anew_are_kept():
    """A captured or compiled model may give its output in the same memory every time, and losses wait on the clock."""
    clocks = [nc.Clock("linear", LossSecondMoment(refresh=5, warmup=1)) for _ in range(2)]
    buffer = torch.zeros(64, requires_grad=True).clone()
    for _ in range(5):
        for clock, reused in zip(clocks, (False, True), strict=True):
            b = clock.draw(torch.zeros(64, 2))
            errors = (1 - b.time).float()
            with torch.no_grad():
                buffer.copy_(errors)
            clock.weigh(b, buffer if reused else errors)
            if reused:
                buffer.detach().zero_()
            clock.updated()
    assert torch.equal(*(clock.sampler.state_dict()["pmf"] for clock in clocks))


@pytest.mark.parametrize("make", [LossSecondMoment, LossEMA, LossSecondMoment.published])
def test_corrected_losses_stay_unbiased(make):
    """While the density changes, the mean of corrected losses is the objective's: within five standard errors, over 150 batches of 256."""
    schedule = FLOW if make is LossSecondMoment else nc.schedule("linear", steps=100)
    clock = nc.Clock(schedule, make(), nc.MinSNR(), base=nc.Mixture(nc.LogitNormal(), floor=0.3))
    noise = torch.Generator().manual_seed(0)
    means = []
    for _ in range(150):
        b = clock.draw(torch.zeros(256, 1))
        size = (error_level(b.time) * 2 * torch.rand(256, dtype=torch.float64, generator=noise)).sqrt()  # ℓ uniform around its level
        means.append(clock.loss(b, b.target + size[:, None].float()).double().mean().item())
        clock.updated()
    grid = clock.schedule.grid(100_000)
    discrete = clock.schedule.steps is not None
    base = clock.base.log_pmf(torch.arange(100), 100).exp() * 100 if discrete else clock.base.log_prob(grid).exp()
    weight = clock.weighting(clock.schedule, grid, clock.objective)
    # on discrete steps a loss level varies within the step, so it is averaged there
    level = error_level((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000).reshape(len(grid), -1).mean(1)
    truth = (base * weight * level).mean().item()
    assert np.mean(means) == pytest.approx(truth, abs=5 * np.std(means) / math.sqrt(150))
    assert clock.sampler.ess() < 0.9  # it has learned something


def test_the_variance_of_the_gradient_falls_to_the_theoretical_ratio():
    """One gradient g = √s(t)·z per sample, z standard normal, and a loss of the same size: E‖base/p·g‖² falls to ρ = (∫√s)²/∫s of the uniform's.

    s is constant on the bins and the floor is tiny, so ρ is reached but for the error of the estimated √s: 64 bins with some 2000 samples of
    ℓ = √s·|z| each, whose second moment has a relative standard deviation √2/√2000 = 3 %, half of that in the root; its square is 2e-4. Monte
    Carlo error of the two second moments over 400,000 draws: the uniform's has E s²·3/(E s)² - 1 = 11 or so, √(11/4e5) = 0.5 %.
    """
    bins = 64
    sampler = bound(LossSecondMoment(decay=0.999, refresh=1, floor=1e-3), FLOW)
    s = torch.exp(-8 * (torch.arange(bins, dtype=torch.float64) + 0.5) / bins)
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        time = sampler.sample(n, generator=generator).time
        gradient = s[(time * bins).long()].sqrt() * torch.randn(n, dtype=torch.float64, generator=generator)
        return time, gradient

    uniform = draw(400_000)[1].square().mean()
    for update in range(1, 201):
        time, gradient = draw(1024)
        sampler.update(batch_at(time), gradient.abs())
        sampler.advance(update)
    time, gradient = draw(400_000)
    corrected = (gradient * (-sampler.log_prob(time)).exp()).square().mean()
    rho = (s.sqrt().mean() ** 2 / s.mean()).item()
    assert rho == pytest.approx(0.482, abs=0.001)
    assert (corrected / uniform).item() == pytest.approx(rho, rel=0.03)


# --- signs of trouble ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [LossSecondMoment, LossEMA, LossHistory])
def test_losses_that_are_not_finite_are_skipped_and_counted(make):
    options = {"length": 2, "floor": 0.2} if make is LossHistory else {"bins": 20, "warmup": 2}
    clean, broken = (bound(make(refresh=1, **options), SMALL) for _ in range(2))
    generator = torch.Generator().manual_seed(0)

    def learn():
        for update in range(1, 11):
            time = torch.rand(200, dtype=torch.float64, generator=generator)
            losses = error_level(time)
            clean.update(batch_at(time), losses)
            bad = torch.tensor([math.nan, math.inf, -math.inf], dtype=torch.float64)
            broken.update(batch_at(torch.cat([torch.tensor([0.1, 0.5, 0.9]), time])), torch.cat([bad, losses]))
            clean.advance(update)
            broken.advance(update)

    assert caught(learn) == [f"{make.__name__}: 3 losses were not finite and were skipped; check the model and its precision"]
    assert (clean.skipped, broken.skipped) == (0, 30)
    assert torch.equal(log_pmf(clean, 20), log_pmf(broken, 20))
    assert (log_pmf(clean, 20).exp() - 0.05).abs().max() > 0.01


def test_a_small_effective_sample_size_is_warned_of_once():
    sampler = bound(LossSecondMoment(bins=100, refresh=1, warmup=1, floor=0.001))
    time = (torch.arange(100, dtype=torch.float64) + 0.5) / 100

    def learn():
        for update in range(1, 5):
            sampler.update(batch_at(time), torch.where(time < 0.01, 1e6, 1.0))
            sampler.advance(update)

    (message,) = caught(learn)
    assert f"effective sample size of {sampler.ess():.1%} of the batch" in message
    assert "raise floor (now 0.001" in message
    assert 0.001 <= sampler.ess() < 0.1


def test_losses_that_are_all_zero_leave_the_base():
    sampler = bound(LossSecondMoment(bins=4, refresh=1, warmup=1))
    time = (torch.arange(4, dtype=torch.float64) + 0.5) / 4
    sampler.update(batch_at(time), torch.zeros(4))
    sampler.advance(1)
    assert torch.allclose(log_pmf(sampler, 4).exp(), torch.full((4,), 0.25, dtype=torch.float64), rtol=1e-12)
    assert sampler.ess() == pytest.approx(1)


# --- bad input ----------------------------------------------------------------------------------------------------------------------------


def test_losses_with_a_gradient_do_not_keep_their_graph():
    """Batches wait to be added up together; with their graphs the activations of twenty updates would wait with them."""
    sampler = bound(LossSecondMoment())
    sampler.update(batch_at(torch.rand(4)), torch.rand(4, requires_grad=True) * 2)
    assert not any(losses.requires_grad for _, _, losses in sampler._waiting)
    sampler.state_dict()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: LossSecondMoment(bins=1), ValueError, "LossSecondMoment: bins must be a whole number of at least 2, got 1"),
        (lambda: LossSecondMoment(decay=1.0), ValueError, r"decay must lie in \[0, 1\), got 1.0"),
        (lambda: LossSecondMoment(power=0.0), ValueError, r"LossSecondMoment: power must lie in \(0, 1\], got 0.0"),
        (lambda: LossEMA(floor=0.0), ValueError, "LossEMA: floor must lie between 0 and 1, got 0.0"),
        (lambda: LossEMA(refresh=0), ValueError, "refresh must be a whole number of at least 1"),
        (lambda: LossEMA(warmup=0), ValueError, "warmup must be a whole number of at least 1"),
        (lambda: LossHistory(length=0), ValueError, "length must be a whole number of at least 1"),
        (lambda: LossHistory(floor=2.0), ValueError, "LossHistory: floor must lie between 0 and 1"),
        (lambda: nc.Clock("flow", LossSecondMoment.published()), ValueError, r"keeps a history for every discrete step, and Flow.*has none; in cont"),
        (lambda: LossSecondMoment.published().sample(3), ValueError, "LossHistory needs a noise schedule"),
        (lambda: nc.Clock(COSINE, LossHistory(schedule=LINEAR)), ValueError, "was made for Linear"),
        (lambda: nc.Truncated(LossSecondMoment(), 0.1, 0.9), TypeError, "Truncated needs a fixed density with an inverse CDF, got LossSecondMoment"),
        (lambda: LossSecondMoment().log_prob(torch.tensor(1.5)), ValueError, r"must lie in \[0, 1\]"),
        (
            lambda: LossEMA().update(batch_at(torch.rand(4)), torch.tensor(0.5)),
            ValueError,
            r"losses must be of shape \(4,\), one for each sample and not their mean, got \(\)",
        ),
        (lambda: Record().add(torch.rand(4), torch.rand(4, 2)), ValueError, r"losses must be of shape \(4,\), .* got \(4, 2\)"),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_running_sum_is_cumsum():
    for n in (1, 2, 7, 64, 1000):
        x = torch.rand(n, dtype=torch.float64)
        assert torch.allclose(running_sum(x), x.cumsum(0), rtol=1e-13)
