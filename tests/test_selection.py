import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings, strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from noiseclock.core.selection import Queue, best_by_f, best_by_greed, evenly, f_statistic, r_squared


def rows(n: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("n", [3, 5, 20])
def test_f_statistics_are_scipys(n):
    x = rows(n, 50)
    y = x[:, :7].mean(1) + 0.3 * rows(n, 1, seed=1)[:, 0]
    for column, f in enumerate(f_statistic(x, y).tolist()):
        fit = scipy.stats.linregress(x[:, column].numpy(), y.numpy())
        # the F of a regression on one variable is the square of its t
        expected = (fit.slope / fit.stderr) ** 2
        assert f == pytest.approx(expected, rel=1e-8)


def test_constant_and_broken_columns_are_never_selected():
    x = rows(10, 6)
    x[:, 1] = 3.7
    x[4, 2] = math.nan
    x[5, 3] = math.inf
    f = f_statistic(x, rows(10, 1, seed=2)[:, 0])
    assert f.isinf().tolist() == [False, True, True, True, False, False]
    for select in (best_by_f, best_by_greed):
        assert sorted(select(x, 6).tolist()) == [0, 4, 5]
    assert len(best_by_f(torch.ones(5, 4), 3)) == len(best_by_greed(torch.ones(5, 4), 3)) == 0


def test_a_perfect_predictor_comes_first():
    x = rows(8, 5)
    x[:, 3] = x[:, [0, 1, 2, 4]].mean(1)  # then it is also the mean of all five
    assert best_by_f(x, 1).tolist() == best_by_greed(x, 1).tolist() == [3]
    assert r_squared(x, torch.tensor([3])) == pytest.approx(1)


def test_greedy_selection_does_not_repeat_itself():
    """Two signals make up the mean, the stronger one in 40 columns: the largest F values repeat it, forward selection finds the other too."""
    n = 20
    strong, weak = rows(n, 2).unbind(1)
    x = torch.cat([1.2 * strong[:, None].repeat(1, 40), weak[:, None].repeat(1, 40)], 1) + 0.01 * rows(n, 80, seed=3)
    by_f, by_greed = best_by_f(x, 2), best_by_greed(x, 2)
    assert {int(i) // 40 for i in by_f} == {0}
    assert {int(i) // 40 for i in by_greed} == {0, 1}
    assert r_squared(x, by_greed) > r_squared(x, by_f)


def test_greedy_selection_is_least_squares_forward_selection():
    x = rows(15, 12)
    y = x.mean(1).numpy()
    chosen: list[int] = []
    for _ in range(3):
        left = {}
        for column in set(range(12)) - set(chosen):
            design = np.column_stack([np.ones(15), x[:, [*chosen, column]].numpy()])
            left[column] = np.square(y - design @ np.linalg.lstsq(design, y, rcond=None)[0]).sum()
        chosen.append(min(left, key=left.__getitem__))
    assert best_by_greed(x, 3).tolist() == chosen


def test_before_three_rows_the_times_are_evenly_spaced():
    queue = Queue(20, 1000, 3, "f")
    assert queue.selected.tolist() == [166, 500, 833]
    for i in range(2):
        queue.push(rows(1, 1000, seed=i)[0])
        assert queue.selected.tolist() == [166, 500, 833]
        assert math.isnan(queue.r_squared)
    queue.push(rows(1, 1000, seed=2)[0])
    assert sorted(queue.selected.tolist()) == sorted(best_by_f(queue.rows, 3).tolist())
    assert len(set(queue.selected.tolist())) == 3


def test_the_queue_forgets_the_oldest_row_and_all_means_all():
    queue = Queue(4, 10, 2, "f")
    pushed = rows(7, 10)
    for row in pushed:
        queue.push(row)
    assert torch.equal(queue.rows, pushed[-4:])
    every = Queue(4, 10, 2, "all")
    every.push(pushed[0])
    assert every.selected.tolist() == list(range(10))


def test_a_row_of_a_broken_sample_is_left_out():
    queue, pushed = Queue(4, 10, 2, "f"), rows(6, 10)
    for row in pushed[:4]:
        queue.push(row)
    queue.push(torch.full((10,), math.nan))
    assert torch.equal(queue.rows, pushed[:4])
    assert math.isfinite(queue.r_squared)
    # a number or two are missing: then it is these columns alone that cannot be selected
    partly = pushed[4].clone()
    partly[queue.selected] = math.nan
    before = set(queue.selected.tolist())
    queue.push(partly)
    assert len(queue.selected) == 2
    assert before.isdisjoint(queue.selected.tolist())


def test_a_queue_that_was_read_onto_a_gpu_is_back_on_the_host():
    """As by torch.load(..., map_location="cuda"). A row on the host could not be joined to it. Fake tensors need no such device."""
    with FakeTensorMode():
        queue = Queue(size=4, columns=10, count=3, select="f")
        queue.load_state_dict({"rows": torch.zeros(3, 10, device="cuda"), "selected": torch.zeros(3, dtype=torch.long, device="cuda")})
        assert queue.rows.device.type == queue.selected.device.type == "cpu"


def test_queue_state():
    queue, other = Queue(5, 10, 2, "greedy"), Queue(5, 10, 2, "greedy")
    for row in rows(4, 10):
        queue.push(row)
    other.load_state_dict(queue.state_dict())
    assert torch.equal(other.rows, queue.rows)
    assert torch.equal(other.selected, queue.selected)
    for bad in ({}, {"rows": queue.rows[:, :9], "selected": queue.selected}, {"rows": queue.rows, "selected": queue.selected[:1]}):
        with pytest.raises(ValueError, match="up to 5 rows of 10 times"):
            other.load_state_dict(bad)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 50), st.integers(1, 2000))
def test_evenly_spaced_columns_exist_and_differ(count, columns):
    if count <= columns:
        chosen = evenly(columns, count).tolist()
        assert len(set(chosen)) == count
        assert min(chosen) >= 0
        assert max(chosen) < columns
