import math
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import noiseclock as nc
from noiseclock.core.objectives import OBJECTIVES
from noiseclock.core.record import Record
from noiseclock.core.streams import independent, places
from noiseclock.core.weightings import WEIGHTINGS
from small_loops import FIXED, Denoiser, Probing, data

# that a correction to uniform rests on a few huge weights does not make it wrong
pytestmark = pytest.mark.filterwarnings("ignore:.*less than a hundredth as often")

# --- draw and loss -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["linear", "flow", "edm"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_batch_is_what_its_formulas_say(schedule, objective):
    clock = nc.Clock(schedule, "uniform", objective=objective)
    x0 = torch.randn(32, 3, 4, 4)
    b = clock.draw(x0)
    a, s = (c.float().reshape(-1, 1, 1, 1) for c in clock.schedule(b.time))
    x_t = a * x0 + s * b.noise
    assert torch.allclose(b.x_t, clock.objective.model_input(x_t, a, s), rtol=1e-5, atol=1e-6)
    assert torch.allclose(b.target, clock.objective.target(x0, b.noise, a, s), rtol=1e-5, atol=1e-6)
    assert torch.equal(b.t, clock.schedule.condition(b.time))
    prediction = torch.randn_like(x0)
    expected = ((prediction - b.target) ** 2).flatten(1).mean(1)
    assert torch.allclose(clock.loss(b, prediction), expected, rtol=1e-6)


def test_gradients_flow_through_the_loss_and_not_into_the_clock():
    clock = nc.Clock("linear", "uniform", "min-snr")
    b = clock.draw(data())
    prediction = torch.zeros(16, 2, requires_grad=True)
    clock.loss(b, prediction).mean().backward()
    expected = -2 * b.target * b.weight[:, None] / (2 * 16)
    assert torch.allclose(prediction.grad, expected.float(), rtol=1e-5)
    assert not b.weight.requires_grad
    assert clock.record.by_time().drawn.sum() == 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_dtype_of_data(dtype):
    clock = nc.Clock("linear", "logit-normal", "p2")
    b = clock.draw(data().to(dtype))
    assert b.x_t.dtype == dtype
    assert b.time.dtype == torch.float64
    assert b.target.dtype == torch.promote_types(dtype, torch.float32)
    # all 1000 steps can be reached whatever the data's dtype
    steps = torch.cat([clock.draw(torch.zeros(1000, 1, dtype=dtype)).t for _ in range(20)])
    assert len(steps.unique()) > 900


def test_vectors_images_and_volumes():
    for shape in [(4, 5), (4, 3, 8, 8), (4, 1, 4, 4, 4), (1, 7)]:
        b = nc.Clock("cosine", "uniform").draw(torch.zeros(shape))
        assert b.x_t.shape == b.target.shape == shape
        assert b.t.shape == b.weight.shape == shape[:1]


def test_given_noise_is_used():
    noise = torch.randn(16, 2)
    assert torch.equal(nc.Clock("linear", "uniform").draw(data(), noise=noise).target, noise)


def test_same_seed_same_batches_and_another_seed_others():
    first, second, other = (nc.Clock("linear", "speed", seed=seed).draw(data()) for seed in (1, 1, 2))
    assert torch.equal(first.time, second.time)
    assert torch.equal(first.noise, second.noise)
    assert not torch.equal(first.time, other.time)
    assert not torch.equal(first.noise, other.noise)


@pytest.mark.parametrize("sampler", [nc.Uniform(), nc.Independent()], ids=repr)
def test_ranks_and_micro_batches_may_be_numpy_numbers(sampler):
    def times(number):
        clock = nc.Clock("linear", sampler, rank=number(1), world_size=number(2))
        return torch.cat([clock.draw(data(), micro=(number(i), number(2))).time for i in range(2)])

    assert torch.equal(times(np.int64), times(int))
    with pytest.raises(TypeError, match=r"must be whole numbers, got rank=0\.0, world_size=2"):
        nc.Clock("linear", sampler, rank=0.0, world_size=2)


def test_a_seed_may_be_a_numpy_number():
    clock, twin = (nc.Clock("linear", "uniform", seed=seed) for seed in (np.int64(7), 7))
    assert torch.equal(clock.draw(data()).noise, twin.draw(data()).noise)
    twin.load_state_dict(clock.state_dict())
    assert type(clock.state_dict()["setup"]["seed"]) is int  # torch.load(weights_only=True) knows no numpy numbers


def test_torch_random_state_is_left_alone():
    before = torch.get_rng_state()
    nc.Clock("linear", "uniform").draw(data())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "sampler",
    [nc.Adaptive(every=1, queue=3, stride=100), nc.VarianceOptimal(every=1, bins=4, warmup=2), nc.Annealed(nc.LossEMA(refresh=1), start=1, stop=3)],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_default_device_of_the_users_changes_nothing(sampler):
    """As `torch.set_default_device("cuda")` with data on the CPU; the meta device, which holds no numbers, tells at once what was put there."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model, x0 = Denoiser(), data()
        optimizer = torch.optim.Adam(model.parameters())
        with torch.device(device):
            clock = nc.Clock("linear", sampler).attach(optimizer)
            for _ in range(5):
                b = clock.draw(x0, predict=model)
                clock.loss(b, model(b.x_t, b.t)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            clock.load_state_dict(clock.state_dict())
            losses = nc.measure.loss_over_time(clock, model, x0, times=[0.1, 0.7]).loss
            gradients = nc.measure.gradient_variance(clock, model, x0, bins=2, samples=8).variance
            found.append(np.concatenate([clock.plot_data().p, losses, gradients, clock.at(x0, 0.3, noise=x0).x_t.flatten().numpy()]))
    assert (found[0] == found[1]).all()


def test_micro_batches_share_the_strata_of_one_update():
    clock = nc.Clock("flow", "uniform")
    for _ in range(3):
        times = torch.cat([clock.draw(data(8), micro=(i, 4)).time for i in range(4)])
        assert (times.sort().values * 32).floor().tolist() == list(range(32))


def test_a_short_last_batch_is_drawn_as_well():
    clock = nc.Clock("linear", "uniform")
    clock.draw(data(16), micro=(0, 2))
    assert len(clock.draw(data(3), micro=(1, 2)).time) == 3


@pytest.mark.parametrize(
    ("first", "second"),
    [((4, 3), (4, 3)), ((8, 8, 8, 5), (8, 8, 8, 5)), ((8, 4, 3), (8, 4, 3)), ((8,), (5,)), ((5,), (8,)), ((8, 8), (5, 8)), ((6, 8), (8, 3))],
)
def test_independent_times_of_batches_of_any_sizes_do_not_repeat(first, second):
    """Over micro-batches and ranks, whose batches may differ in size from the first one on."""
    clocks = [nc.Clock("flow", nc.Independent(), rank=rank, world_size=2) for rank in range(2)]
    for _ in range(2):
        drawn = zip(clocks, (first, second), strict=True)
        times = torch.cat([clock.draw(data(n), micro=(i, len(sizes))).time for clock, sizes in drawn for i, n in enumerate(sizes)])
        assert len(times.unique()) == len(times)


def test_independent_times_of_one_process_are_those_of_the_seeds_own_stream():
    """However the update is divided after its first micro-batch: what was drawn before with this seed is drawn again."""
    clock, divided = (nc.Clock("flow", nc.Independent(), seed=7) for _ in range(2))
    for update in (1, 2):
        expected = independent(places(7, 5), torch.tensor(update), 5)
        assert torch.equal(clock.draw(data(5)).time, expected)
        assert torch.equal(divided.draw(data(5), micro=(0, 2)).time, expected)
        divided.draw(data(3), micro=(1, 2))


# --- base and correction -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", FIXED, ids=repr)
@pytest.mark.parametrize("schedule", ["linear", "flow"])
def test_importance_weights_are_base_over_p(sampler, schedule):
    clock = nc.Clock(schedule, sampler, correct="importance")
    b = clock.draw(torch.zeros(500, 2))
    log_p = clock.sampler.log_pmf(b.t, 1000) + math.log(1000) if schedule == "linear" else clock.sampler.log_prob(b.time)
    assert torch.allclose(b.correction, (-log_p).exp(), rtol=1e-9)
    assert torch.allclose(clock.loss(b, b.noise + 1), b.correction.float(), rtol=1e-5)  # a loss of 1 everywhere, but for rounding
    assert (nc.Clock(schedule, sampler, correct="none").draw(torch.zeros(500, 2)).correction == 1).all()


@pytest.mark.parametrize(("schedule", "objective"), [("linear", "eps"), ("cosine", "eps"), ("flow", "flow"), ("edm", "edm")])
def test_the_objective_is_the_usual_one_of_the_schedule_unless_given(schedule, objective):
    assert nc.Clock(schedule, "uniform").objective == nc.objective(objective)
    assert nc.Clock(nc.schedule(schedule), "uniform", objective="x0").objective == nc.objective("x0")


@pytest.mark.parametrize("sampler", [nc.Uniform(), nc.LossSecondMoment(refresh=1, warmup=1, bins=4)])
def test_errors_of_your_own_are_weighed_recorded_and_learned_from_as_the_squared_ones(sampler):
    x0, model = torch.randn(64, 3), nn.Linear(3, 3)
    usual, own = (nc.Clock("cosine", sampler, nc.MinSNR(5), "v") for _ in range(2))
    for _ in range(5):
        b, c = usual.draw(x0), own.draw(x0)
        losses = usual.loss(b, model(b.x_t)), own.weigh(c, (model(c.x_t) - c.target).square().mean(1))
        assert torch.equal(*losses)
    assert torch.equal(usual.sampler.log_prob(torch.linspace(0, 0.99, 9)), own.sampler.log_prob(torch.linspace(0, 0.99, 9)))
    assert np.array_equal(usual.record.by_time().loss, own.record.by_time().loss, equal_nan=True)
    half = own.weigh(c, torch.full((64,), 1.0, dtype=torch.bfloat16))
    assert torch.equal(half, (c.weight * c.correction).float())  # bfloat16 would round the weights to three digits
    (absolute,) = torch.autograd.grad(own.weigh(c, (model(c.x_t) - c.target).abs().mean(1)).sum(), model.bias)
    by_hand = ((model(c.x_t) - c.target).sign() / 3 * (c.weight * c.correction).float()[:, None]).sum(0)
    assert torch.allclose(absolute, by_hand, rtol=1e-5, atol=1e-6)  # 64 summands of float32


def test_corrected_losses_estimate_the_objective_that_is_meant():
    """The mean of w·base/p·ℓ under p is the mean of w·ℓ under the base: here ℓ depends on time alone, so the truth is a sum over the steps."""
    base = nc.Mixture(nc.LogitNormal(), floor=0.2)
    for sampler in (nc.Uniform(), nc.SpeeD(), nc.Beta(1.5, 1.0), nc.Mixture(nc.LogitNormal(-1.0), floor=0.3)):
        clock = nc.Clock("linear", sampler, "min-snr", base=base, correct="importance")
        level = torch.arange(1000)
        weight = clock.weighting(clock.schedule, clock.schedule.grid(), clock.objective)
        truth = (base.log_pmf(level, 1000).exp() * weight * (1 + level)).sum().item()
        b = clock.draw(torch.zeros(200_000, 1))
        losses = clock.loss(b, b.noise + (1.0 + b.t[:, None]).sqrt()).double()
        # stratified draws err less than independent ones, whose standard error this is
        assert losses.mean().item() == pytest.approx(truth, abs=5 * losses.std().item() / math.sqrt(200_000))


def test_auto_follows_the_sampler():
    class Corrects(Probing):
        @property
        def corrects(self):
            return True

    for fixed in FIXED:
        assert not nc.Clock("linear", fixed).corrected
    shifted = nc.Clock("flow", nc.Shifted(nc.Uniform(), k=3.0))
    assert np.allclose(shifted.plot_data().effective, shifted.plot_data().p)  # what a user who shifts means to train
    assert nc.Clock("linear", Corrects()).corrected
    assert nc.Clock("linear", nc.Mixture(Corrects())).corrected
    assert nc.Clock("linear", nc.Mixture(nc.SpeeD(), Corrects())).corrected
    assert nc.Clock("linear", nc.Annealed(nc.Uniform(), nc.VarianceOptimal())).corrected  # uniform first, then the learned one
    assert not nc.Clock("linear", nc.Annealed(nc.SpeeD(), nc.Uniform())).corrected
    assert not nc.Clock("linear", Corrects(), correct="none").corrected
    assert nc.Clock("linear", "speed", correct="importance").corrected


# --- validation --------------------------------------------------------------------------------------------------------------------------


def test_chosen_times_are_neither_drawn_nor_recorded_nor_learned():
    clock, twin = (nc.Clock("linear", nc.SpeeD(), nc.MinSNR(5.0), correct="importance") for _ in range(2))
    noise = torch.randn(16, 2)
    for time in (0.3, torch.full((16,), 0.3)):
        b = clock.at(data(), time, noise=noise)
        assert (b.t == 300).all()
        a, s = clock.schedule(0.3)
        assert torch.allclose(b.x_t, (a * data() + s * noise).float(), atol=1e-6)
        losses = clock.loss(b, noise + 1)
        snr = clock.schedule.snr(0.3).item()
        assert torch.allclose(losses, torch.full((16,), min(snr, 5) / snr), rtol=1e-5)
    # in the precision of drawn times, which a device without float64 can hold too, whatever was given
    assert {clock.at(data(), torch.tensor(0.5, dtype=kind)).time.dtype for kind in (torch.float32, torch.float64)} == {torch.float64}
    first, second = (clock.at(data(), 0.5, generator=torch.Generator().manual_seed(1)).noise for _ in range(2))
    assert torch.equal(first, second)
    assert clock.record.by_time().drawn.sum() == 0
    assert torch.equal(clock.draw(data()).noise, twin.draw(data()).noise)
    with pytest.raises(ValueError, match=r"one number or have shape \(16,\), got \(3,\)"):
        clock.at(data(), torch.zeros(3))
    with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
        clock.at(data(), 1.2)


def test_conditioning_reaches_the_model_in_draw_step_and_probe():
    label = torch.randn(16, 3)
    model = Denoiser(conditions=3)
    for cond in (label, {"label": label}):
        clock = nc.Clock("linear", Probing())
        b = clock.draw(data(), predict=model, cond=cond)
        assert b.cond is cond
        assert clock.sampler.seen[0][1].shape == (16,)
    with nc.Clock("linear", "uniform").step(model, data(), label=label) as losses:
        assert losses.shape == (16,)


# --- what it shows -----------------------------------------------------------------------------------------------------------------------


def test_record_of_times_and_unweighted_losses():
    clock = nc.Clock("linear", nc.Truncated(nc.Uniform(), 0.0, 0.5), "min-snr", correct="none")
    for _ in range(50):
        b = clock.draw(torch.zeros(100, 1))
        # a model whose error is the time itself, so the unweighted loss is time²
        clock.loss(b, b.noise + b.time[:, None].float())
    levels = clock.record.by_time()
    assert levels.drawn.sum() == 5000
    assert (levels.drawn[25:] == 0).all()
    assert np.isnan(levels.loss[25:]).all()
    assert np.allclose(levels.density[:25], 2, rtol=0.02)  # 100 strata on 25 bins: four draws in each, every time
    assert np.allclose(levels.loss[:25], levels.time[:25] ** 2, atol=0.01**2 + 0.01 * 2 * levels.time[:25])


def test_record_forgets_old_losses_and_skips_broken_ones():
    record = Record(bins=2)
    time = torch.tensor([0.25, 0.75])
    for _ in range(3000):
        record.add(time, torch.tensor([1.0, 1.0]))
    for _ in range(3000):
        record.add(time, torch.tensor([2.0, math.nan]))
    levels = record.by_time()
    assert levels.loss[0] == pytest.approx(2 - math.exp(-3), abs=0.01)
    assert levels.loss[1] == 1
    assert levels.drawn.tolist() == [6000, 6000]


def test_plot_data_of_a_known_case():
    clock = nc.Clock("linear", nc.Beta(2.0, 5.0), nc.MinSNR(5.0))
    data = clock.plot_data()
    time = data.time
    assert np.allclose(data.p[5:-5], 30 * time[5:-5] * (1 - time[5:-5]) ** 4, rtol=1e-2)  # the mean over a step of Beta(2, 5)
    snr = np.exp(data.log_snr)
    assert np.allclose(data.w, np.minimum(snr, 5) / snr)
    assert np.allclose(data.effective, data.p * data.w)
    assert data.p.mean() == pytest.approx(1, abs=1e-12)
    corrected = nc.Clock("linear", nc.Beta(2.0, 5.0), nc.MinSNR(5.0), correct="importance").plot_data()
    assert np.allclose(corrected.effective, corrected.w)


# --- ready for capture -------------------------------------------------------------------------------------------------------------------


# a sampler knows nothing of the weighting, nor that of a sampler: each once is all
@pytest.mark.parametrize(
    ("sampler", "weighting"), [*((sampler, nc.VLB()) for sampler in FIXED), *((nc.LogitNormal(), make()) for make in WEIGHTINGS.values())], ids=repr
)
def test_nothing_is_read_from_the_device_between_draw_and_loss(sampler, weighting):
    """On the meta device there is no data to read: `.item()` and boolean indexing raise. (tests/test_cuda.py watches a real device.)"""
    for schedule in ("linear", "flow"):
        clock = nc.Clock(schedule, sampler, weighting, correct="importance")
        x0 = torch.empty(4, 2, device="meta")
        b = clock.draw(x0, noise=torch.empty_like(x0))
        loss = clock.loss(b, b.x_t * 2)
        assert loss.device.type == "meta"


# --- bad input ---------------------------------------------------------------------------------------------------------------------------

CLOCK = nc.Clock("linear", "uniform")
EARLY, LATE = nc.Truncated(nc.Uniform(), 0.0, 0.5), nc.Truncated(nc.Uniform(), 0.7, 1.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: nc.Clock("linaer", "uniform"), ValueError, "unknown schedule 'linaer'"),
        (lambda: nc.Clock("linear", "unifrom"), ValueError, "unknown sampler 'unifrom'"),
        (lambda: nc.Clock("linear", "uniform", "snr"), ValueError, "unknown weighting 'snr'"),
        (lambda: nc.Clock("linear", "uniform", objective="epsilon"), ValueError, "unknown objective 'epsilon'"),
        (lambda: CLOCK.weigh(CLOCK.draw(torch.zeros(4, 2)), torch.tensor(1.0)), ValueError, r"one number per sample, of shape \(4,\), got \(\)"),
        (lambda: CLOCK.weigh(torch.zeros(4), torch.zeros(4)), TypeError, "clock.weigh takes a batch and then the errors, got Tensor first"),
        (lambda: nc.Clock("linear", "uniform", correct="yes"), ValueError, "unknown correction 'yes'; known: auto, importance, none"),
        (lambda: nc.Clock("linear", "speed", base="logit-normal"), ValueError, "has no effect without importance correction"),
        (lambda: nc.Clock("flow", nc.Truncated(nc.Uniform(), 0.5, 0.50001), nc.MinSNR(normalize=True)), ValueError, "narrow; leave normalize out"),
        (
            lambda: nc.Clock("linear", nc.Truncated(nc.Uniform(), 0.2, 1.0), correct="importance"),
            ValueError,
            r"needs a sampler that covers the base: .* covers \[0.2, 1\] only",
        ),
        (  # nothing is drawn between 0.2 and 0.7
            lambda: nc.Clock("flow", nc.Mixture(nc.Truncated(nc.Uniform(), 0.0, 0.2), LATE), correct="importance"),
            ValueError,
            r"needs a sampler that covers the base: .* covers \[0.7, 1\] only",
        ),
        (  # a base that the sampler covers at first, and then no longer
            lambda: nc.Clock("flow", EARLY, base=nc.Annealed(EARLY, nc.Uniform()), correct="importance"),
            ValueError,
            r"covers \[0, 0.5\] only, .* reaches over \[0, 1\]",
        ),
        (
            lambda: nc.Clock("flow", LATE, base=nc.Mixture(nc.Truncated(nc.Uniform(), 0.0, 0.2), LATE), correct="importance"),
            ValueError,
            r"covers \[0.7, 1\] only, .* reaches over \[0, 1\]",
        ),
        (
            lambda: nc.Clock("linear", "uniform", base="loss-second-moment", correct="importance"),
            ValueError,
            r"the base is the density that the objective means, which cannot be learned, got LossSecondMoment\(",
        ),
        (
            lambda: nc.Clock("linear", "uniform", base=nc.Mixture(nc.Uniform(), nc.VarianceOptimal()), correct="importance"),
            ValueError,
            r"which cannot be learned, got Mixture\(",
        ),
        (lambda: nc.Clock("cosine", nc.SpeeD(schedule=nc.schedule("linear"))), ValueError, "was made for Linear"),
        (lambda: nc.Clock("linear", "uniform").draw(torch.zeros(4, 2, dtype=torch.uint8)), TypeError, "scaled to .* got torch.uint8"),
        (lambda: nc.Clock("linear", "uniform").draw([data(), 1]), TypeError, "got list; take the data out of it"),
        (lambda: nc.Clock("linear", "uniform").draw({"images": data()}), TypeError, "got dict; take the data out of it"),
        (lambda: nc.Clock("linear", "uniform").draw(data().numpy()), TypeError, "got ndarray$"),
        (lambda: nc.Clock("linear", "uniform").at(data(), 500), ValueError, r"from 500 to 500; for integer steps use schedule.time_of\(step\)"),
        (lambda: nc.Clock("linear", "uniform").draw(torch.zeros(4)), ValueError, r"at least one sample, got shape \(4,\)"),
        (lambda: nc.Clock("linear", "uniform").draw(torch.zeros(0, 3)), ValueError, r"at least one sample, got shape \(0, 3\)"),
        (
            lambda: nc.Clock("linear", "uniform").draw(data(), noise=torch.zeros(3, 2)),
            ValueError,
            r"shape \(16, 2\), got torch.float32 of shape \(3, 2\)",
        ),
        (lambda: nc.Clock("linear", "uniform").draw(data(), noise=torch.zeros(16, 2, dtype=torch.int64)), ValueError, "got torch.int64"),
        (lambda: nc.Clock("linear", "uniform").draw(data(), noise=np.zeros((16, 2))), TypeError, "noise must be a tensor like x0, got ndarray"),
        (lambda: nc.Clock("linear", "uniform").draw(data(), micro=2), ValueError, "got 2"),
        (lambda: nc.Clock("linear", "uniform").draw(data(), micro=[0, 2]), ValueError, r"must be a tuple \(i, n\) of whole numbers .*, got \[0, 2\]"),
        (lambda: nc.Clock("linear", "uniform").draw(data(), micro=(0.5, 2)), ValueError, r"of whole numbers .*, got \(0.5, 2\)"),
        (lambda: nc.Clock("linear", nc.LossSecondMoment), TypeError, r"got the class LossSecondMoment itself: write LossSecondMoment\(\)"),
        (lambda: nc.Clock("linear", "uniform", seed=1.5), TypeError, "seed must be a whole number, got 1.5"),
        (lambda: nc.Clock("linear", "shifted"), TypeError, "sampler 'shifted' needs sampler"),
        (lambda: nc.Clock("linear", "uniform").loss(torch.zeros(2), None), TypeError, "takes a batch and then the prediction"),
        (lambda: nc.Clock("linear", "uniform", base="logit-normal"), ValueError, "has no effect without importance correction"),
        (lambda: nc.Clock("linear", "uniform").draw(data(), micro=(4, 4)), ValueError, r"0 <= i < n, got \(4, 4\)"),
        (
            lambda: nc.Clock("linear", "uniform").attach(torch.optim.SGD(Denoiser().parameters()), model=[Denoiser()]),
            TypeError,
            r"must be an nn.Module, got list; put several into nn.ModuleList",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(
    ("sampler", "share"),
    [(nc.LogNormal(), "26%"), (nc.LogSNRNormal(-6, 0.5), "76%"), (nc.LogitNormal(), None), (nc.Mixture(nc.LogNormal(), floor=0.1), None)],
)
def test_a_correction_that_a_few_huge_weights_decide_is_warned_of(sampler, share):
    """The share of the steps that are drawn less than a hundredth as often as under the base, counted here one by one."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        clock = nc.Clock("linear", sampler, correct="importance")
    log_p = clock.sampler.log_pmf(torch.arange(1000), 1000)
    rare = sum(0.001 / math.exp(each) > 100 for each in log_p.tolist()) / 1000
    assert [f"draws {rare:.0%} of the base, Uniform, less than a hundredth" in str(one.message) for one in told] == ([True] if share else [])
    assert f"{rare:.0%}" == share or rare < 0.05


def test_a_target_is_float32_at_least():
    b = nc.Clock("linear", "uniform", objective="x0").draw(data().bfloat16())
    assert b.target.dtype == torch.float32
    assert b.x_t.dtype == torch.bfloat16


def test_a_thousand_betas_are_not_said():
    """A sentence has room for the ends of the list; a repr holds them all, because it rebuilds the schedule."""
    schedule = nc.schedule("betas", betas=nc.schedule("linear").betas)
    clock = nc.Clock(schedule, nc.LogNormal())
    assert eval(repr(schedule), {"Betas": nc.schedules.Betas}) == schedule
    assert str(schedule) == "Betas([0.0001, 0.00011991991991991993, ..., 0.02: 1000 numbers], zero_terminal_snr=False)"
    assert repr(clock).startswith(f"Clock({schedule}, LogNormal(mean=-1.2, std=1.2, schedule={schedule}), ")
    with pytest.raises(ValueError, match="has no effect without importance") as refused:
        nc.Clock(schedule, nc.LogNormal(), base=nc.LogNormal())
    assert len(str(refused.value)) < 300
    with pytest.raises(TypeError, match="set steps when you make Betas") as refused:
        nc.schedule(schedule, steps=4)
    assert len(str(refused.value)) < 300


def test_workers_of_a_loader_do_not_draw():
    clock = nc.Clock("linear", "uniform")
    for workers in (0, 2):
        loader = DataLoader(data(), batch_size=4, num_workers=workers, collate_fn=lambda rows: clock.draw(torch.stack(rows)).noise)
        if workers:
            with pytest.raises(ValueError, match=r"would draw the same times and noise in every epoch; call clock.draw in the training loop"):
                list(loader)
        else:
            assert len(torch.cat(list(loader)).unique()) == 32


def test_a_bad_call_draws_nothing():
    clock, twin = nc.Clock("linear", "uniform"), nc.Clock("linear", "uniform")
    with pytest.raises(ValueError, match="noise must be like x0"):
        clock.draw(data(), noise=torch.zeros(1, 1))
    assert torch.equal(clock.draw(data()).time, twin.draw(data()).time)


def test_repr_names_its_parts():
    text = repr(nc.Clock("flow", "logit-normal", "min-snr", "flow"))
    assert text == (
        "Clock(Flow(condition_scale=1.0), LogitNormal(mean=0.0, std=1.0), MinSNR(normalize=False, gamma=5.0), FlowVelocity(), "
        "base=Uniform(), correct='none', seed=0)"
    )


def test_the_noise_does_not_depend_on_when_its_stream_is_asked_for():
    x0 = torch.zeros(4, 3)
    asked, plain = nc.Clock("linear", "uniform", seed=5), nc.Clock("linear", "uniform", seed=5)
    asked.generator(x0.device)  # as one does before a capture
    for _ in range(2):
        assert torch.equal(asked.draw(x0).noise, plain.draw(x0).noise)
