"""Against scipy, on curves with known speed-ups, and on results with holes."""

import math
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

import made_up_results
from made_up_cells import EVERY, compared, finals, row_of, training, verdicts
from noiseclock.lab.curves import Ratio, area, curve, overhead, reached, seconds_per_update, speed_up
from noiseclock.lab.errors import Mistake
from noiseclock.lab.results import METRICS, Cell, Results, read
from noiseclock.lab.statistics import BASELINE, BETTER, ONE_SEED, SAME, WORSE, answer, final, holm, measured, paired, summary, table, title

# --- against scipy ------------------------------------------------------------------------------------------------------------------------

samples = st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=2, max_size=10)


@given(samples)
@settings(deadline=None)
def test_mean_spread_and_error_are_scipy_s(pairs):
    x = [a for a, _ in pairs]
    found = summary(x)
    # sums of ten numbers of at most 100: rounding stays far below 1e-10
    assert found.n == len(x)
    assert found.mean == pytest.approx(np.mean(x), abs=1e-10)
    assert found.std == pytest.approx(np.std(x, ddof=1), abs=1e-10)
    assert found.error == pytest.approx(stats.sem(x), abs=1e-10)


def test_a_summary_of_little():
    assert summary([]) == (0, None, None, None)
    assert summary([3.0]) == (1, 3.0, None, None)
    assert (str(summary([])), str(summary([3.0])), str(summary([3.0, 3.0])), str(summary([0.1, 0.1 + 1e-16]))) == ("-", "3", "3", "0.1")
    assert str(summary([1e-10, 3e-10])) == "2e-10 ± 1.4e-10"


@given(samples)
@settings(deadline=None)
def test_the_paired_difference_is_scipy_s(pairs):
    a, b = (np.array(x) for x in zip(*pairs, strict=True))
    found = paired(dict(enumerate(a)), dict(enumerate(b)))
    d = a - b
    assert found.mean == pytest.approx(d.mean(), abs=1e-10)
    if d.std() < 1e-6:  # scipy itself warns of what cancels there
        return
    test = stats.ttest_rel(a, b)
    low, high = stats.t.interval(0.95, len(d) - 1, loc=d.mean(), scale=stats.sem(d))
    # relative: t distributions are good to 1e-10 or so in either implementation, and d cancels at most 100/1e-6 of 16 digits
    assert found.p == pytest.approx(test.pvalue, rel=1e-6)
    assert found.interval == pytest.approx((low, high), rel=1e-6, abs=1e-6)
    assert found.relative == pytest.approx(d.mean() / b.mean(), abs=1e-6)
    assert found.relative_interval == pytest.approx((low / b.mean(), high / b.mean()), rel=1e-6, abs=1e-6)


def test_only_common_seeds_are_paired():
    method, baseline = {0: 1.0, 1: 2.5, 2: 2.0, 7: 99.0}, {1: 3.0, 2: 4.0, 0: 2.0, 5: -99.0}
    found = paired(method, baseline)
    assert found.seeds == (0, 1, 2)
    assert found.p == pytest.approx(stats.ttest_rel([1.0, 2.5, 2.0], [2.0, 3.0, 4.0]).pvalue, rel=1e-10)
    assert found.unit == 3.0
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_the_same_to_the_last_bit_is_no_difference_and_no_spread_is_no_evidence():
    same = paired({0: 0.1, 1: 0.3}, {0: 0.1, 1: 0.3})
    assert (same.mean, same.interval, same.p) == (0.0, (0.0, 0.0), 1.0)
    assert 0.61 - 0.60 != 0.12 - 0.11  # but for rounding; as shares of 100 samples may be by chance, in 2 seeds
    shifted = paired({0: 0.61, 1: 0.12}, {0: 0.60, 1: 0.11})
    assert (shifted.interval, shifted.p) == (None, None)
    single = paired({0: 0.5}, {0: 1.0})
    assert (single.mean, single.relative, single.interval, single.relative_interval, single.p) == (-0.5, -0.5, None, None, None)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(deadline=None)
def test_holm_is_the_closed_test_of_bonferroni_s(p):
    """A hypothesis falls when every intersection with it does: the largest, over sets with it, of size times smallest p (Marcus et al., 1976)."""
    sets = [s for size in range(1, len(p) + 1) for s in combinations(range(len(p)), size)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(len(p))]
    assert holm(p) == pytest.approx(closed, abs=1e-15)


def test_holm_of_nothing():
    assert holm([]) == []


# --- curves -------------------------------------------------------------------------------------------------------------------------------


def decay(rate: float, n: int = 20, factor: float = 1.0) -> list[float]:
    """factor·exp(-rate·step) at the evaluations."""
    return [factor * math.exp(-rate * EVERY * (i + 1)) for i in range(n)]


@pytest.mark.parametrize(("times", "pace"), [(2.0, 0.01), (4.0, 0.03), (1.0, 0.02)])
def test_a_training_that_improves_twice_as_fast_is_twice_as_fast(times, pace):
    rate = 1e-3
    results = compared([training(m, s, decay(r), pace=p) for s in (0, 1) for m, r, p in (("uniform", rate, 0.01), ("fast", times * rate, pace))])
    row = row_of(results, "fast")
    # it gets there at update 2000/times, which was evaluated: nothing is interpolated but rounding
    assert row.speed_up_images.mean == pytest.approx(times, rel=1e-9)
    assert row.speed_up_seconds.mean == pytest.approx(times * 0.01 / pace, rel=1e-9)
    assert row.overhead.mean == pytest.approx(pace / 0.01, rel=1e-12)
    assert row_of(results, "uniform").speed_up_seconds.by_seed == {0: 1.0, 1: 1.0}


@given(st.floats(1.05, 15))
@settings(deadline=None)
def test_between_evaluations_a_speed_up_is_understated_by_little(times):
    rate = 1e-3
    found = speed_up(training("fast", 0, decay(times * rate)), training("uniform", 0, decay(rate)), "frechet", 2000, "images")
    # a chord of width h lies at most h²/8·max|v''| = h²·r²·v/8 above the curve, v its left end, and falls with at least r·v·exp(-rh), so the goal
    # is met late by at most h²·r/8·exp(rh) updates; before the first evaluation nothing is seen at all
    r = times * rate
    late = EVERY**2 * r / 8 * math.exp(r * EVERY)
    exact = 2000 / times
    assert 2000 / (exact + late) <= found * (1 + 1e-9)
    assert found <= times * (1 + 1e-9)


def test_a_curve_that_never_gets_there():
    uniform, half = decay(1e-3), decay(0.5e-3)
    results = compared(
        [training("uniform", s, uniform) for s in (0, 1)] + [training("slow", s, half) for s in (0, 1)]
        + [training("mixed", 0, half), training("mixed", 1, decay(2e-3))]
    )  # fmt: skip
    slow, mixed = row_of(results, "slow"), row_of(results, "mixed")
    assert slow.speed_up_images == Ratio({0: None, 1: None})
    assert (str(slow.speed_up_images), slow.speed_up_images.mean) == ("not reached", None)
    # the seed that got there says nothing of the one that did not
    assert (str(mixed.speed_up_images), mixed.speed_up_images.mean) == ("not reached in 1 of 2 seeds", None)


def test_the_goal_is_the_best_so_far_of_the_same_seed():
    uniform = training("uniform", 0, [9.0, 5.0, 7.0, 6.0])  # at its best after 200 updates
    assert speed_up(uniform, uniform, "frechet", 400, "images") == 1.0
    assert speed_up(training("m", 0, [8.0, 7.0, 6.0, 4.0]), uniform, "frechet", 400, "images") == pytest.approx(200 / 350)
    assert speed_up(training("m", 0, [8.0, 7.0, 6.0, 5.1]), uniform, "frechet", 400, "images") == 0
    assert speed_up(training("m", 0, [4.0, 99.0, 99.0, 99.0]), uniform, "frechet", 400, "images") == 2.0  # no earlier than it was looked at
    # after a setback the goal is on the line from there, (12 - 5)/(12 - 2) of the way, not on one from the best so far
    assert speed_up(training("m", 0, [6.0, 12.0, 2.0]), uniform, "frechet", 400, "images") == pytest.approx(200 / 270)
    # of what the baseline did later nothing is asked
    assert speed_up(training("m", 0, [9.0, 5.0]), training("uniform", 0, [9.0, 6.0, 1.0]), "frechet", 200, "images") == pytest.approx(200 / 175)


def test_where_the_baseline_was_best_when_it_was_first_looked_at_there_is_no_speed_up():
    """A single evaluation does not tell when either got there: a method far ahead would read 1.0, and less in time."""
    for looked in ([5.0], [5.0, 6.0]):
        uniform = training("uniform", 0, looked)
        assert math.isnan(speed_up(training("m", 0, [3.0, 2.0]), uniform, "frechet", 200, "images"))
        assert speed_up(uniform, uniform, "frechet", 200, "images") == 1.0
        assert speed_up(training("m", 0, [7.0, 6.0]), uniform, "frechet", 200, "images") == 0


def test_more_is_better_for_shares():
    uniform, fast = ([1 - math.exp(-r * EVERY * (i + 1)) for i in range(20)] for r in (1e-3, 2e-3))
    cells = [training("uniform", 0, uniform, metric="recall"), training("fast", 0, fast, metric="recall")]
    assert speed_up(cells[1], cells[0], "recall", 2000, "images") == pytest.approx(2.0, rel=1e-9)
    assert speed_up(cells[0], cells[1], "recall", 2000, "images") == 0
    results = finals({"uniform": [0.5, 0.6, 0.55], "more": [0.6, 0.71, 0.64], "less": [0.4, 0.49, 0.46]}, metric="recall")
    assert verdicts(results, "recall") == {"uniform": BASELINE, "more": BETTER, "less": WORSE}
    assert table(results, "recall").higher_is_better


def test_the_area_is_the_mean_factor():
    uniform = decay(1e-3)
    assert area(training("m", 0, [0.8 * v for v in uniform]), training("uniform", 0, uniform), "frechet", 2000) == pytest.approx(0.8, rel=1e-12)
    # log(method/uniform) = -1e-3·step is linear, for which trapezoids are exact: exp of its mean between updates 100 and 2000
    assert area(training("m", 0, decay(2e-3)), training("uniform", 0, uniform), "frechet", 2000) == pytest.approx(math.exp(-1.05), rel=1e-12)
    # up to update 1100 only
    assert area(training("m", 0, decay(2e-3)), training("uniform", 0, uniform), "frechet", 1100) == pytest.approx(math.exp(-0.6), rel=1e-12)
    # only where both were evaluated: 100 and 300, with the factors 1/2 and 1/8
    holes = training("m", 0, [1.0, None, 1.0, 5.0]), training("uniform", 0, [2.0, 3.0, 8.0])
    assert area(*holes, "frechet", 400) == pytest.approx(1 / 4, rel=1e-12)
    assert area(training("m", 0, [1.0]), training("uniform", 0, [2.0]), "frechet", 100) == 0.5
    for value in (0.0, -1.0, math.nan, math.inf):
        assert math.isnan(area(training("m", 0, [1.0, value]), training("uniform", 0, [1.0, 1.0]), "frechet", 200))
    assert math.isnan(area(training("m", 0, []), training("uniform", 0, [1.0]), "frechet", 100))


def test_time_is_compared_on_one_machine_only():
    slow, fast = training("m", 0, [2.0, 1.0], machine="slow", pace=1.0), training("uniform", 0, [2.0, 1.0])
    assert math.isnan(overhead(slow, fast))
    assert math.isnan(speed_up(slow, fast, "frechet", 200, "seconds"))
    assert speed_up(slow, fast, "frechet", 200, "images") == 1.0
    results = compared([slow, fast, training("m", 1, [1.0], pace=0.02), training("uniform", 1, [1.0])])
    assert row_of(results, "m").overhead == Ratio({1: 2.0})
    assert "Trainings ran on 2 machines" in table(results, "frechet").notes[-1]


def test_seconds_an_update_are_those_of_the_last_record_that_has_them():
    cell = training("m", 0, [1.0, 1.0])
    assert seconds_per_update(cell) == pytest.approx(0.01)
    assert seconds_per_update(Cell("m", 1.0, 0, points=cell.points, train=[{"step": 1000, "seconds": 30.0}])) == pytest.approx(0.03)
    assert math.isnan(seconds_per_update(Cell("m", 1.0, 0, points=[{"step": 5}, {"step": 0, "seconds": 1.0}])))


def test_a_curve_is_what_was_evaluated():
    found = curve(training("m", 0, [3.0, None, math.nan, 4.0, 2.0, math.inf]), "frechet")
    assert found.step.tolist() == [100, 300, 400, 500, 600]
    assert found.images.tolist() == [6400, 19200, 25600, 32000, 38400]
    assert found.best.tolist() == [3.0, 3.0, 3.0, 2.0, 2.0]
    assert len(curve(training("m", 0, []), "frechet").best) == 0
    late = curve(training("m", 0, [math.nan, 1.0]), "frechet")
    assert reached(late, late.images, 1.5) == 12800  # no straight line leads there from no number


def test_ratios_in_words():
    assert str(Ratio()) == "-"
    assert str(Ratio({0: 2.0})) == "2.00"
    assert str(Ratio({0: 4.0, 1: 1.0})) == "2.00 (1.00–4.00)"  # the geometric mean
    assert str(Ratio({0: 1.0, 1: 1.001})) == "1.00"


# --- what is not there --------------------------------------------------------------------------------------------------------------------


def test_the_last_step_is_that_of_all_finished_cells():
    cells = [training("uniform", 0, [4, 3, 2, 1]), training("m", 0, [4, 3, 2.5]), training("m", 1, [4, 3], finished=False)]
    found = final(cells, "frechet")
    assert (found.step, found.lost) == (300, {("m", 1e-3, 1)})
    assert found.values == {("uniform", 1e-3, 0): 2, ("m", 1e-3, 0): 2.5}
    # an unfinished one that got there counts
    assert final([*cells, training("m", 2, [5, 4, 3, 2], finished=False)], "frechet").values["m", 1e-3, 2] == 3
    # until one is finished: what all have; one that was not evaluated at all yet is lost
    running = [training("uniform", 0, [4, 3, 2], finished=False), training("m", 0, [4, 3], finished=False), training("m", 1, [], finished=False)]
    found = final(running, "frechet")
    assert (found.step, found.lost, len(found.values)) == (200, {("m", 1e-3, 1)}, 2)
    # a hole is no value
    assert final([training("uniform", 0, [4, 3, 2]), training("m", 0, [4, 3, None])], "frechet").step == 200
    assert final([training("uniform", 0, [1, None]), training("m", 0, [None, 1])], "frechet").step is None
    assert final([], "frechet") == (None, {}, {}, set())
    # what was never measured does not hold up the rest
    assert final([training("uniform", 0, [1, 2]), training("m", 0, [None, None])], "frechet").step == 200


def test_best_so_far_is_the_lowest_yet():
    found = final([training("uniform", 0, [4.0, 2.0, 3.0])], "frechet")
    assert found.best == {("uniform", 1e-3, 0): 2.0}
    row = row_of(finals({"uniform": [1.0]}), "uniform")
    assert row.best.mean == 1.0


def test_one_seed_cannot_tell():
    results = finals({"uniform": [10.0], "m": [1.0]})
    row = row_of(results, "m")
    assert row.verdict == ONE_SEED == "cannot tell (one seed)"
    assert (row.difference.relative, row.difference.interval, row.difference.p) == (-0.9, None, None)
    assert answer(results) == (
        "On made up, after 100 updates, one seed cannot tell whether a method is better than uniform in Fréchet distance: uniform 10, m 1; "
        "run more seeds."
    )


def test_of_many_methods_with_one_seed_the_answer_names_the_best():
    results = finals({"uniform": [10.0], **{f"m{i}": [float(i)] for i in range(1, 7)}})
    assert ": uniform 10, m1 1, m2 2, m3 3, m4 4 and 2 more; run more seeds." in answer(results)


def test_two_seeds_can_hardly_tell():
    row = row_of(finals({"uniform": [10.0, 12.0], "m": [9.0, 10.0]}), "m")
    assert row.verdict == SAME
    assert row.difference.interval == pytest.approx((-1.5 - 12.706 * 0.5, -1.5 + 12.706 * 0.5), abs=1e-3)  # t(1, 97.5 %) = 12.706


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_method_that_fails_on_a_seed_is_not_better(value):
    results = finals({"uniform": [10.0, 11.0, 12.0, 10.5], "m": [1.0, 2.0, 3.0, value]})
    row = row_of(results, "m")
    assert row.verdict == "cannot tell (not finite in 1 of 4 seeds)"
    assert (row.seeds, row.final.mean) == ((0, 1, 2), 2.0)
    assert answer(results).endswith("nothing can be told: m (not finite in 1 of 4 seeds).")
    assert str(row.area) == "-"
    # nor is it where the baseline has no such seed
    alone = compared([cell for cell in results.cells if (cell.method, cell.seed) != ("uniform", 3)])
    assert verdicts(alone)["m"] == "cannot tell (not finite in 1 of 4 seeds)"


def test_a_method_that_does_not_finish_is_not_better():
    uniform = [training("uniform", s, [20.0 + s, 10.0 + s]) for s in range(3)]
    method = [training("m", 0, [9.0, 1.0]), training("m", 1, [9.0, 2.1]), training("m", 2, [9.0], finished=False)]
    other = [training("o", s, [20.0, 9.0 + s + s / 10]) for s in range(3)]
    results = compared(uniform + method + other)
    row = row_of(results, "m")
    assert (row.verdict, row.final.n, len(row.speed_up_images.by_seed)) == ("cannot tell (not finished in 1 of 3 seeds)", 2, 2)
    assert verdicts(results)["o"] == BETTER
    assert "Cannot tell: m (not finished in 1 of 3 seeds)." in answer(results)
    alone = compared(uniform + [training("m", s, [9.0], finished=False) for s in range(3)])
    assert verdicts(alone)["m"] == "cannot tell (not finished)"
    assert "A speed-up is" not in " ".join(table(alone, "frechet").notes)
    assert "A speed-up is" in " ".join(table(results, "frechet").notes)
    failed = [training("m", 0, [9.0, 1.0]), training("m", 1, [9.0], finished=False), training("m", 2, [9.0], finished=False, failed="not finite")]
    assert verdicts(compared(uniform + failed))["m"] == "cannot tell (failed in 1 of 3 seeds, not finished in 1 of 3 seeds)"
    # once the baseline lacks a seed, nobody can be told by it
    cut = [*uniform[:2], training("uniform", 2, [22.0], finished=False)]
    assert set(verdicts(compared(cut + other)).values()) == {BASELINE, "cannot tell (not finished in 1 of 3 seeds)"}


def test_seeds_that_were_never_begun_are_missing_and_no_failure():
    results = finals({"uniform": [10.0, 11.0, 12.0], "m": [8.0, 9.1]})
    row = row_of(results, "m")
    assert (row.final.n, row.difference.seeds) == (2, (0, 1))
    assert row.verdict == BETTER
    apart = compared([training("uniform", 0, [1.0]), training("m", 1, [1.0])])
    assert verdicts(apart)["m"] == "cannot tell (no seed in common with uniform)"
    assert row_of(apart, "m").difference is None


def test_a_metric_that_was_not_taken():
    results = compared([training(m, s, [None if m == "m" else 1.0 + s]) for m in ("uniform", "m") for s in (0, 1)])
    assert verdicts(results)["m"] == "cannot tell (not measured)"
    assert measured(results) == ["frechet"]
    assert verdicts(results, "bits") == {"uniform": BASELINE, "m": "cannot tell (not measured)"}
    assert table(results, "bits").step is None
    with pytest.raises(Mistake, match=r"unknown metric 'fid'.*known: frechet, kernel"):
        table(results, "fid")


def test_without_the_baseline_there_is_nothing_to_hold_against():
    results = finals({"m": [1.0, 2.0], "o": [3.0, 4.0]})
    assert verdicts(results) == {"m": "cannot tell (no seed in common with uniform)", "o": "cannot tell (no seed in common with uniform)"}
    assert "nothing can be told: m, o (no seed in common with uniform)." in answer(results)


def test_seeds_that_make_no_difference_are_one():
    results = finals({"uniform": [2.0, 2.0, 2.0], "m": [1.0, 1.0, 1.0]})
    assert verdicts(results)["m"] == "cannot tell (seeds make no difference)"


def test_distances_from_other_numbers_of_samples_are_not_compared():
    uniform = [training("uniform", s, [10.0 + s]) for s in range(3)]
    more = [training("m", s, [8.0 + s * 1.1], samples=5000) for s in range(3)]
    assert verdicts(compared(uniform + more))["m"] == "cannot tell (samples of different number or kind)"
    shares = [training(m, s, [0.1 * s + v], metric="precision") for m, v in (("uniform", 0.3), ("m", 0.5)) for s in range(3)]
    for cell in shares:  # seen by another network, which is named once, for all that are of samples
        cell.points[0]["frechet_name"] = cell.method
    assert verdicts(compared(shares), "precision")["m"] == "cannot tell (samples of different number or kind)"
    plain = [
        training(m, s, [v + s * f], metric="validation", samples=k)
        for m, v, f, k in (("uniform", 10, 1, 1000), ("m", 8, 1.1, 5000))
        for s in range(3)
    ]
    assert verdicts(compared(plain), "validation")["m"] == BETTER  # a loss is not of samples


def test_a_distance_around_nought_has_no_relative_difference():
    results = finals({"uniform": [-0.01, 0.005, -0.002], "m": [-0.02, -0.0049, -0.0118]}, metric="kernel")
    row = row_of(results, "m", "kernel")
    assert (row.verdict, row.difference.relative, row.difference.relative_interval, str(row.area)) == (BETTER, None, None, "-")
    assert table(results, "kernel").lines[1][4] == "-0.0099 (-0.01 to -0.0097)"
    assert "better by 0.0099 (95 % interval 0.0097–0.01)" in answer(results)


# --- learning rates -----------------------------------------------------------------------------------------------------------------------


def rates() -> Results:
    """m is better at the common learning rate, uniform at its own: another rate, at which m cannot follow."""
    values = {
        ("uniform", 1e-3): [10.0, 11.0, 12.0], ("uniform", 2e-3): [8.0, 9.0, 10.0],
        ("m", 1e-3): [8.2, 9.9, 10.4], ("m", 2e-3): [9.0, 9.5, 1.0 + 10.0],
    }  # fmt: skip
    return compared(
        [training(m, s, [v], lr=lr) for (m, lr), row in values.items() for s, v in enumerate(row)], settings={"lr": 1e-3}, lrs=[2e-3, 1e-3]
    )


def test_each_at_its_own_best_learning_rate():
    results = rates()
    common, own = table(results, "frechet"), table(results, "frechet", own_lr=True)
    assert [(row.method, row.lr, row.lrs, row.final.mean) for row in common.rows] == [("uniform", 1e-3, 1, 11.0), ("m", 1e-3, 1, 9.5)]
    assert [(row.method, row.lr, row.lrs, row.final.mean) for row in own.rows] == [("uniform", 2e-3, 2, 9.0), ("m", 1e-3, 2, 9.5)]
    assert [row.verdict for row in common.rows] == [BASELINE, BETTER]
    assert [row.verdict for row in own.rows] == [BASELINE, SAME]
    assert own.rows[1].difference.p == pytest.approx(stats.ttest_rel([8.2, 9.9, 10.4], [8.0, 9.0, 10.0]).pvalue, rel=1e-9)
    assert "the best of 2 learning rates, which flatters every method alike" in " ".join(own.notes)
    said = answer(results)
    assert "m reached 9.5 ± 1.2 in Fréchet distance, uniform 11.0 ± 1.0, over 3 seeds: better by 14 %" in said
    assert "With each at its own best of 2 learning rates, m did not differ significantly from uniform, at 9.0 ± 1.0" in said


def test_a_learning_rate_at_which_a_seed_fails_is_not_the_best():
    cells = [training("uniform", s, [v], lr=lr) for lr, row in ((1e-3, [5.0, 6.0]), (2e-3, [1.0, math.nan])) for s, v in enumerate(row)]
    assert row_of(compared(cells), "uniform", own_lr=True).lr == 1e-3


def test_more_learning_rates_than_the_baseline_had_are_no_fair_choice():
    cells = [cell for cell in rates().cells if (cell.method, cell.lr) != ("uniform", 2e-3)]
    assert verdicts(compared(cells), own_lr=True)["m"] == "cannot tell (different learning rates were tried)"
    # a learning rate that was stopped early had no chance of being the best
    stopped = [training("uniform", s, [], lr=2e-3, finished=False) for s in range(3)]
    assert verdicts(compared(cells + stopped), own_lr=True)["m"] == "cannot tell (different learning rates were tried)"
    # one at which it failed had
    failed = [training("uniform", s, [], lr=2e-3, finished=False, failed="not finite") for s in range(3)]
    assert verdicts(compared(cells + failed), own_lr=True)["m"] == BETTER


# --- in words -----------------------------------------------------------------------------------------------------------------------------


def test_the_answer_tells_who_was_better_by_how_much_and_how_sure_that_is():
    uniform = [13.0, 13.5, 14.0]
    values = {"uniform": uniform, "good": [11.4, 11.9, 12.5], "fine": [12.5, 13.02, 13.49], "bad": [15.0, 15.4, 16.1], "same": [13.1, 13.4, 14.1]}
    results = compared([training(m, s, [50.0, v]) for m, row in values.items() for s, v in enumerate(row)])
    assert [row_of(results, m).verdict for m in ("good", "fine", "bad", "same")] == [BETTER, BETTER, WORSE, SAME]
    # the goal is uniform's own last value, on the line from 50 to the method's: after 100 + 100·(50 - goal)/(50 - value) updates of 200
    needed = [(1 + (50 - u) / (50 - v)) / 2 for u, v in zip(uniform, values["good"], strict=True)]
    mean = math.exp(np.log(needed).mean())
    spread = f"{mean:.2f} ({min(needed):.2f}–{max(needed):.2f})" if f"{min(needed):.2f}" != f"{max(needed):.2f}" else f"{mean:.2f}"

    def by(method):
        d = np.array(values[method]) - uniform
        ends = sorted(abs(end) / 13.5 * 100 for end in stats.t.interval(0.95, 2, d.mean(), stats.sem(d)))
        size, low, high = (f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in (abs(d.mean()) / 13.5 * 100, *ends))
        return f"by {size} % (95 % interval {low}–{high} %)"

    assert answer(results) == (
        f"On made up, after 200 updates, good reached 11.93 ± 0.55 in Fréchet distance, uniform 13.50 ± 0.50, over 3 seeds: better {by('good')}, "
        f"and it needed {spread} times uniform's training time to get as far. Also better: fine, {by('fine')}. Worse: bad, {by('bad')}. "
        "No significant difference: same."
    )


def test_the_answer_names_the_data_where_they_are_not_the_recipe_s():
    cells = [training(method, 0, [value]) for method, value in (("uniform", 10.0), ("m", 1.0))]
    settings = {"data": "folder:my pictures", "batch": 8}
    assert answer(compared(cells, settings=settings, changed=["batch", "data"])).startswith("On folder:my pictures, after 100 updates, ")
    assert answer(compared(cells, settings=settings, changed=["batch"])).startswith("On made up, after 100 updates, ")


def test_the_answer_counts_the_seeds_of_what_it_tells():
    """Not those of another method, and values of these seeds alone."""
    values = {"uniform": [10.0, 12.0, 20.0], "good": [5.0, 7.1], "same": [10.1, 11.8, 20.1]}
    said = answer(compared([training(m, s, [v]) for m, row in values.items() for s, v in enumerate(row)]))
    assert "good reached 6.0 ± 1.5 in Fréchet distance, uniform 11.0 ± 1.4, over 2 seeds: better by" in said
    values["good"] = [9.9, 12.2]
    assert "no method differed significantly from uniform, at 14.0 ± 5.3 in Fréchet distance, over 2 to 3 seeds" in answer(finals(values))


def test_many_methods_without_a_verdict_are_counted():
    cells = [training("uniform", 0, [2.0, 1.0])] + [training(f"m{i}", 0, [2.0], finished=False) for i in range(5)]
    assert answer(compared(cells[:5])).endswith("nothing can be told: m0, m1, m2, m3 (not finished).")
    assert answer(compared(cells)).endswith("nothing can be told: 5 methods (not finished).")


def test_what_an_update_costs_is_known_before_the_end():
    cells = [training("uniform", 0, [2.0, 1.0]), training("slow", 0, [2.0], pace=0.03, finished=False)]
    row = row_of(compared(cells), "slow")
    assert (row.overhead.mean, str(row.speed_up_images), str(row.area)) == (pytest.approx(3.0), "-", "-")


def test_time_is_spoken_of_where_all_seeds_agree():
    def said(paces):
        uniform, good = ([20.0, 10.0], [20.0, 11.5], [20.0, 12.0]), ([20.0, 8.0], [20.0, 9.6], [20.0, 10.0])
        cells = [training("uniform", s, values) for s, values in enumerate(uniform)]
        return answer(compared(cells + [training("good", s, values, pace=p) for s, (values, p) in enumerate(zip(good, paces, strict=True))]))

    # as fast an update gets there in (1 + 10/12)/2 = 0.92 of the time, (1 + 8.5/10.4)/2 = 0.91 and (1 + 8/10)/2 = 0.9
    assert "and it needed 0.91 (0.90–0.92) times uniform's training time" in said([0.01, 0.01, 0.01])
    assert "but it needed 1.82 (1.80–1.83) times uniform's training time" in said([0.02, 0.02, 0.02])
    assert "training time" not in said([0.01, 0.01, 0.02])


def test_the_answer_without_a_better_one():
    said = answer(finals({"uniform": [10.0, 11.0, 12.0], "bad": [12.0, 13.1, 13.9], "same": [10.2, 10.8, 12.1]}))
    assert "no method was significantly better than uniform, at 11.0 ± 1.0 in Fréchet distance, over 3 seeds. Worse: bad, by 18 %" in said
    assert said.endswith("No significant difference: same.")
    said = answer(finals({"uniform": [10.0, 11.0, 12.0], "a": [10.2, 10.8, 12.1], "b": [9.9, 11.4, 12.0]}))
    ends = [x / 11 * 100 for d in ([0.2, -0.2, 0.1], [-0.1, 0.4, 0.0]) for x in stats.t.interval(0.95, 2, np.mean(d), stats.sem(d))]
    assert f"; 95 % intervals reach from {-min(ends):.1f} % better to {max(ends):.1f} % worse." in said


def test_the_answer_to_nothing():
    nothing = "There is nothing to compare: "
    assert answer(Results({}, [], [])) == nothing + "no training has been evaluated."
    assert answer(compared([training("uniform", 0, [])])) == nothing + "no training has been evaluated."
    alone = [training("uniform", seed, [1.0]) for seed in (0, 1)]
    assert answer(compared(alone, methods=["uniform"])) == nothing + "uniform is the only method."
    assert answer(compared(alone, methods=["uniform", "m"])) == nothing + "uniform is the only method trained so far."
    assert "nothing can be told: m (not measured)" in answer(compared([training("uniform", 0, [1.0, None]), training("m", 0, [None, 1.0])]))


def test_the_answer_is_of_the_first_metric_that_can_be_compared():
    cells = [training("uniform", s, [1.0 + s]) for s in range(3)]
    losses = [training(m, s, [v + s * f], metric="bits") for m, v, f in (("uniform", 4.0, 1.0), ("m", 3.0, 1.01)) for s in range(3)]
    merged = [Cell(a.method, a.lr, a.seed, points=[{**a.points[0], **b.points[0]}], finished=True) for a, b in zip(cells, losses, strict=False)]
    assert "m reached 4.0 ± 1.0 in bits/dim" in answer(compared(merged + losses[3:]))


def test_names_are_those_of_the_evaluations(tmp_path):
    results = read(made_up_results.write(tmp_path, ["uniform"], [0], updates=250, pictures=False))
    assert title(results, "frechet") == "Fréchet distance (digits classifier)"
    assert title(results, "kernel") == "kernel distance"
    inception = Results({}, [Cell("uniform", 1e-3, 0, points=[{"step": 1, "frechet_name": "FID"}])], [])
    assert (title(inception, "frechet"), title(inception, "kernel")) == ("FID", "KID")
    assert [title(Results({}, [], []), metric) for metric in METRICS] == [
        "Fréchet distance", "kernel distance", "validation loss", "bits/dim", "precision", "recall",
    ]  # fmt: skip


def test_hostile_names_are_data(tmp_path: Path):
    hostile = "<script>alert(1)</script>{0}%s[red]"
    results = read(made_up_results.write(tmp_path, ["uniform", hostile], effect={hostile: 0.5}, pictures=False))
    t = table(results, "frechet")
    assert t.lines[1][0] == hostile
    assert f"after 2,000 updates, {hostile} reached " in answer(results)


def test_a_table_is_ready_to_be_printed():
    t = table(rates(), "frechet")
    assert all(len(line) == len(t.headings) for line in t.lines)
    assert t.headings[2] == "Fréchet distance, lower is better"
    assert t.lines[0] == ["uniform", "0.001", "11.0 ± 1.0", "11.0 ± 1.0", "-", "-", "baseline", "1.00", "1.00", "1.00", "1.00", "3"]
    p, d = stats.ttest_rel([8.2, 9.9, 10.4], [10.0, 11.0, 12.0]).pvalue, [-1.8, -1.1, -1.6]
    low, high = (100 * x / 11 for x in stats.t.interval(0.95, 2, np.mean(d), stats.sem(d)))
    assert t.lines[1][4:7] == [f"-14 % ({low:+.0f} to {high:+.1f})", f"{p:.2g}", "better"]


numbers = st.floats(allow_nan=True) | st.sampled_from([0.0, 1.0, -1.0, 1e-300, 5.0])
points = st.lists(st.dictionaries(st.sampled_from([*METRICS, "images", "seconds"]), numbers, max_size=5), max_size=4)
some_cells = st.lists(
    st.builds(
        lambda method, lr, seed, records, finished: Cell(
            method, lr, seed, points=[{**{k: v if abs(v) < 1e100 else math.inf for k, v in r.items()}, "step": i} for i, r in enumerate(records)],
            finished=finished,
        ),
        st.sampled_from(["uniform", "a", "b"]), st.sampled_from([1e-3, 2e-3]), st.integers(0, 2), points, st.booleans(),
    ),
    max_size=10, unique_by=lambda cell: (cell.method, cell.lr, cell.seed),
)  # fmt: skip


@given(some_cells)
@settings(deadline=None, max_examples=150)
def test_nothing_that_can_be_read_makes_it_raise(cells):
    results = compared(cells)
    answer(results)
    for metric in METRICS:
        for own_lr in (False, True):
            t = table(results, metric, own_lr=own_lr)
            assert [row.method for row in t.rows] == results.methods
            assert all(isinstance(text, str) for line in t.lines for text in line)
            for row in t.rows:
                significant = row.difference is not None and row.difference.corrected is not None and row.difference.corrected <= 0.05
                assert row.verdict not in (BETTER, WORSE) or significant
