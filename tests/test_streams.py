import math

import pytest
import scipy.stats
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st

import noiseclock as nc
from forked import on_two
from noiseclock.core.streams import finalize, in_unit, places, stratified, uniform

SEED = 1234567


def splitmix64(state: int) -> int:
    """The published generator's output for one state, in Python integers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
    return state ^ (state >> 31)


def draw(number: int) -> torch.Tensor:
    return torch.tensor(number)


def share(seed: int, number: int, n: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    return stratified(places(seed, n, part=part, parts=parts), draw(number), n, part=part, parts=parts)


def test_uniforms_are_splitmix64():
    """The first n places of a draw are n consecutive outputs of the published generator, whose known first output for state 0 is checked too."""
    assert finalize(0x9E3779B97F4A7C15) == splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    start = (finalize(SEED) + 5 * 2**32 * 0x9E3779B97F4A7C15) % 2**64
    expected = [(splitmix64((start + (i + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) * 2.0**-53 for i in range(300)]
    assert uniform(places(SEED, 100), draw(5)).tolist() == expected


def test_uniforms_are_uniform_and_uncorrelated_between_draws_seeds_and_neighbours():
    n = 200_000
    start = places(SEED, n)
    first, second = uniform(start, draw(1))[:n], uniform(start, draw(2))[:n]
    third = uniform(places(SEED + 1, n), draw(1))[:n]
    for values in (first, second, third):
        assert scipy.stats.kstest(values.numpy(), "uniform").pvalue > 0.001
    for x, y in ((first, second), (first, third), (first[1:], first[:-1])):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) < 4 / math.sqrt(n)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(-(2**70), 2**70), st.integers(0, 2**31))
def test_parts_share_the_strata_of_one_global_draw(n, parts, seed, number):
    together = torch.cat([share(seed, number, n, part, parts) for part in range(parts)])
    alone = share(seed, number, n * parts)
    assert torch.equal(together.sort().values, alone.sort().values)
    # one value in each stratum of the whole, and in each part one in each of its own n strata
    assert (alone.sort().values * n * parts).floor().tolist() == list(range(n * parts))
    last = share(seed, number, n, parts - 1, parts)
    assert (last.sort().values * n).floor().tolist() == list(range(n))


def test_every_place_and_every_part_sees_all_times():
    """Over 1500 draws each place of each of 3 parts is uniform on [0, 1), low and high ends of its cells alike."""
    draws = torch.stack([torch.stack([share(SEED, i, 4, part, 3) for part in range(3)]) for i in range(1500)])
    for part in range(3):
        for place in range(4):
            assert scipy.stats.kstest(draws[:, part, place].numpy(), "uniform").pvalue > 0.001


def test_the_last_stratum_stays_below_one():
    """(i + U)/n rounds to 1 in floating point when U is close enough to 1."""
    assert (2 + math.nextafter(1, 0)) / 3 == 1.0
    for dtype in (torch.float32, torch.float64):
        assert in_unit(torch.tensor([1.0, 2.0, -1.0], dtype=dtype)).tolist() == [1 - torch.finfo(dtype).eps / 2] * 2 + [0.0]
    assert (share(SEED, 0, 100_000) < 1).all()


def _times(rank: int, world_size: int, batch: int, micros: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        clock = nc.Clock("linear", "speed", seed=5)
        batches = [clock.draw(torch.zeros(batch, 2), micro=(i, micros)) for _ in range(3) for i in range(micros)]
        results[rank] = (torch.stack([b.time for b in batches]), torch.stack([b.noise for b in batches]))
    finally:
        dist.destroy_process_group()


def test_two_processes_draw_disjoint_strata_of_the_single_process_draw(free_port):
    """Over gloo, with two micro-batches each: the union of 2 ranks × 2 micro-batches of 8 is what one process draws at once for 32."""
    results = on_two(_times, 2, 8, 2, free_port)
    times, noises = zip(*(results[rank] for rank in range(2)), strict=True)
    alone = nc.Clock("linear", "speed", seed=5)
    for update in range(3):
        union = torch.cat([rank[2 * update : 2 * update + 2].flatten() for rank in times]).sort().values
        assert torch.equal(union, alone.draw(torch.zeros(32, 2)).time.sort().values)
    assert not (noises[0] == noises[1]).any()


def test_rank_and_world_size_can_be_given():
    ranks = [nc.Clock("flow", "uniform", rank=rank, world_size=2).draw(torch.zeros(8, 2)) for rank in range(2)]
    union = torch.cat([batch.time for batch in ranks]).sort().values
    assert torch.equal(union, nc.Clock("flow", "uniform").draw(torch.zeros(16, 2)).time.sort().values)
    assert not (ranks[0].noise == ranks[1].noise).any()
    with pytest.raises(ValueError, match="go together"):
        nc.Clock("flow", "uniform", rank=1)
    with pytest.raises(ValueError, match=r"rank must lie in 0\.\.1, got 2"):
        nc.Clock("flow", "uniform", rank=2, world_size=2)
