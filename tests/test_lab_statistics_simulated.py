"""By simulation: intervals hold the truth as often as they say, equal methods are seldom told apart, and a known effect is found."""

import math

import numpy as np
import pytest
from scipy import stats

import made_up_results
from made_up_cells import EVERY, compared, finals, row_of, training, verdicts
from noiseclock.lab.curves import speed_up
from noiseclock.lab.results import METRICS, read
from noiseclock.lab.statistics import BASELINE, BETTER, SAME, WORSE, answer, paired, table


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_interval_holds_the_truth_95_times_of_100(n):
    random, times, true = np.random.default_rng(n), 4000, -1.0
    held = 0
    for _ in range(times):
        seeds = random.normal(20, 3, n)  # shared, and larger than all else
        a, b = seeds + true + random.normal(0, 0.5, n), seeds + random.normal(0, 0.5, n)
        low, high = paired(dict(enumerate(a)), dict(enumerate(b))).interval
        held += low <= true <= high
    # four standard deviations of a binomial share: 4·√(0.95·0.05/4000) = 0.0138
    assert held / times == pytest.approx(0.95, abs=0.0138)


def nulls(seed: int, times: int, methods: int, n: int, lrs: int = 1):
    """Results in which every method is uniform under another name."""
    random = np.random.default_rng(seed)
    names = ["uniform", *(f"also uniform {i}" for i in range(methods))]
    for _ in range(times):
        luck = random.normal(20, 2, n)
        yield compared([
            training(name, s, [luck[s] + random.normal()], lr=1e-3 * (k + 1)) for name in names for k in range(lrs) for s in range(n)
        ])  # fmt: skip


@pytest.mark.parametrize(("methods", "n"), [(1, 3), (5, 3), (3, 2)])
def test_uniform_against_uniform_differs_5_times_of_100_at_most(methods, n):
    times = 400
    called = [set(verdicts(results).values()) - {BASELINE, SAME} for results in nulls(methods, times, methods, n)]
    rate = sum(map(bool, called)) / times
    # four standard deviations: 4·√(0.05·0.95/400) = 0.0436. With one method the rate is 0.05 itself; Holm's is an upper bound where they share
    # a baseline, and a test that never rejects would be none
    assert rate <= 0.05 + 0.0436
    assert rate >= (0.05 - 0.0436 if methods == 1 else 0.005)
    assert set().union(*called) <= {BETTER, WORSE}


def test_the_best_of_several_learning_rates_against_the_best_of_several_is_no_unfair_comparison():
    times = 400
    called = [set(verdicts(results, own_lr=True).values()) & {BETTER, WORSE} for results in nulls(9, times, 1, 3, lrs=3)]
    # 4·√(0.05·0.95/400) = 0.0436
    assert sum(map(bool, called)) / times <= 0.05 + 0.0436


def test_a_null_comparison_announces_nobody():
    for results in nulls(4, 100, 4, 3):
        said = answer(results)
        if set(verdicts(results).values()) == {BASELINE, SAME}:
            assert "no method differed significantly from uniform" in said
            assert "reached" not in said
            assert "Worse" not in said


def test_one_training_under_two_names_is_the_same(tmp_path):
    values = [13.1, 12.7, 13.9]
    results = finals({"uniform": values, "uniform again": values})
    row = row_of(results, "uniform again")
    assert (row.verdict, row.difference.mean, row.difference.corrected, str(row.area)) == (SAME, 0.0, 1.0, "1.00")
    assert answer(results) == (
        "On made up, after 100 updates, uniform again did not differ significantly from uniform, at 13.23 ± 0.61 in Fréchet distance, over 3 seeds."
    )


def test_a_known_effect_is_found_with_its_size(tmp_path):
    folder = made_up_results.write(
        tmp_path, ["uniform", "good", "same", "bad"], range(5), effect={"good": 0.9, "bad": 1.1}, noise=0.01, spread=0.2, pictures=False
    )
    results = read(folder)
    for metric in METRICS:
        t = table(results, metric)
        assert {row.method: row.verdict for row in t.rows} == {"uniform": BASELINE, "good": BETTER, "same": SAME, "bad": WORSE}
        for method, effect in (("good", 0.9), ("bad", 1.1), ("same", 1.0)):
            factor = 1 / effect if t.higher_is_better else effect
            row = row_of(results, method, metric)
            # of the log of a ratio 0.01·√2 by seed, over √5 seeds: four of them are 0.0253
            assert row.difference.relative == pytest.approx(factor - 1, abs=0.0253 * factor)
            # all eight evaluations count: over another √8, with half a weight at the ends √7
            assert row.area.mean == pytest.approx(factor, abs=0.0253 / math.sqrt(7) * factor)


@pytest.mark.parametrize("evaluations", [4, 20])
@pytest.mark.parametrize("true", [1.5, 2.0])
def test_a_known_speed_up_is_not_overstated_by_noise(true, evaluations):
    """Noise lowers the baseline's best, which is the goal, and between evaluations straight lines lie above the curve: both cost the method."""
    random, times, noise = np.random.default_rng(evaluations), 400, 0.01
    done, found = (np.arange(evaluations) + 1) / evaluations, []
    for _ in range(times):
        theirs, mine = ((20 + 80 * np.exp(-4 * done * speed)) * np.exp(noise * random.normal(size=evaluations)) for speed in (1.0, true))
        cells = [training(name, 0, values.tolist()) for name, values in (("m", mine), ("uniform", theirs))]
        found.append(speed_up(*cells, "frechet", EVERY * evaluations, "images"))
    assert min(found) > 0
    logs = np.log(found)
    # not above the truth by four errors of the mean, nor below it by a tenth
    assert math.log(0.9 * true) < logs.mean() < math.log(true) + 4 * logs.std() / math.sqrt(times)


def test_pairing_takes_out_what_seeds_have_in_common():
    seeds = np.array([10.0, 20.0, 40.0])
    row = row_of(finals({"uniform": list(seeds), "better": list(seeds - [1.0, 1.1, 0.9])}), "better")
    assert row.verdict == BETTER
    assert stats.ttest_ind(seeds, seeds - 1).pvalue > 0.9  # which unpaired nobody would see


def test_several_methods_are_corrected_for():
    uniform, better = [10.0, 11.0, 12.0], [9.5, 10.4, 11.6]
    p = stats.ttest_rel(better, uniform).pvalue
    assert 0.0125 < p < 0.05
    others = {f"same {i}": [10.5, 10.6, 12.2 - i / 10] for i in range(3)}
    assert verdicts(finals({"uniform": uniform, "better": better}))["better"] == BETTER
    crowd = row_of(finals({"uniform": uniform, "better": better, **others}), "better")
    assert (crowd.verdict, crowd.difference.corrected) == (SAME, pytest.approx(4 * p, rel=1e-9))
