"""Batches of images: their order, which resumes anywhere and is shared by ranks, how they are scaled, and names of data that are mistakes."""

import itertools

import pytest
import scipy.stats
import torch
from hypothesis import given, settings, strategies as st

from noiseclock.core.streams import finalize
from noiseclock.lab.data import Images, batches, head, load
from noiseclock.lab.errors import Mistake
from noiseclock.lab.order import Order, flips, uniforms


def counted(n: int, channels: int = 1) -> Images:
    """n images of 2 x 2 whose pixels tell their number and their corner."""
    number = torch.arange(n, dtype=torch.uint8)[:, None, None, None].repeat(1, channels, 2, 2)
    return Images("counted", number + torch.tensor([[0, 100], [50, 150]], dtype=torch.uint8), torch.arange(n), n)


# --- the order of the stream --------------------------------------------------------------------------------------------------------------


def test_uniforms_are_splitmix64_of_seed_purpose_and_counter():
    start = finalize(finalize(7) ^ int.from_bytes(b"order", "big"))
    expected = [(finalize(start + (i + 1) * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53 for i in range(2**40, 2**40 + 50)]
    assert uniforms(7, "order", 2**40, 50).tolist() == expected
    assert not torch.equal(uniforms(7, "order", 0, 50), uniforms(7, "flips", 0, 50))


def test_each_epoch_shows_every_image_once_in_an_order_of_its_own():
    order = Order(1000, seed=3)
    epochs = [order(1000 * e, 1000) for e in range(4)]
    assert all(torch.equal(epoch.sort().values, torch.arange(1000)) for epoch in epochs)
    for one, other in itertools.combinations(epochs, 2):
        # the rank correlation of independent permutations has the standard deviation 1/sqrt(n - 1)
        assert abs(scipy.stats.spearmanr(one, other).statistic) < 4 / 999**0.5
    assert not torch.equal(epochs[0], Order(1000, seed=4)(0, 1000))


def test_all_orders_of_three_images_are_equally_frequent():
    order = Order(3, seed=11)
    seen = [tuple(order(3 * e, 3).tolist()) for e in range(3000)]
    counts = [seen.count(permutation) for permutation in itertools.permutations(range(3))]
    assert sum(counts) == 3000
    assert scipy.stats.chisquare(counts).pvalue > 0.001


def test_flips_are_fair_and_independent_of_the_last_epoch():
    n = 100_000
    first, second = flips(5, 0, n).double(), flips(5, n, n).double()
    assert abs(first.mean().item() - 0.5) < 4 * 0.5 / n**0.5
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1].item()) < 4 / n**0.5
    assert torch.equal(flips(5, 40, 60), flips(5, 0, 100)[40:])


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 30),
    batch=st.integers(1, 7),
    world_size=st.integers(1, 4),
    start=st.integers(0, 40),
    seed=st.integers(-(2**70), 2**70),
    flip=st.booleans(),
)
def test_ranks_share_one_stream_that_resumes_anywhere(n, batch, world_size, start, seed, flip):
    """Batch k of W ranks with B images each is batch k of one rank with B·W, for any start, and also where the set is smaller than a batch."""
    data = counted(n)
    whole = list(itertools.islice(batches(data, batch * world_size, seed=seed, flip=flip), start + 3))[start:]
    ranks = [batches(data, batch, seed=seed, start=start, rank=rank, world_size=world_size, flip=flip) for rank in range(world_size)]
    for expected_x0, expected_labels in whole:
        parts = [next(rank) for rank in ranks]
        assert torch.equal(torch.cat([x0 for x0, _ in parts]), expected_x0)
        assert torch.equal(torch.cat([labels for _, labels in parts]), expected_labels)


def test_a_batch_holds_the_images_of_its_places_mirrored_and_scaled():
    """Against the definition, image by image: index perm_e[p mod N], flipped by (seed, p), x/127.5 - 1."""
    data, n, batch, seed = counted(10), 10, 8, 2
    order = Order(n, seed)
    stream = batches(data, batch, seed=seed, start=3, rank=1, world_size=2, flip=True)
    mirrored = 0
    for k in range(3, 8):
        x0, labels = next(stream)
        assert x0.dtype == torch.float32
        for place in range(batch):
            p = k * batch * 2 + batch + place
            index = order(p // n * n, n)[p % n]
            image = data.pixels[index].float() / 127.5 - 1
            if flips(seed, p, 1).item():
                mirrored += 1
                image = image[..., [1, 0]]
            assert labels[place] == index
            assert torch.equal(x0[place], image)
    assert 0 < mirrored < 40


def test_scaling_reaches_both_ends():
    pixels = torch.arange(256, dtype=torch.uint8).reshape(256, 1, 1, 1)
    x0, labels = next(batches(Images("ramp", pixels), 256, seed=0))
    assert labels is None
    values = x0.flatten().sort().values
    assert (values[0].item(), values[-1].item()) == (-1.0, 1.0)
    # a division and a subtraction in float32, each within half an ulp of a value up to 2
    assert torch.allclose(values.double(), torch.linspace(-1, 1, 256, dtype=torch.float64), rtol=0, atol=2 * 2.0**-24)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"batch": 2, "start": -1}, "start must be at least 0, got -1"),
        ({"batch": 2, "world_size": 0}, "world_size must be at least 1, got 0"),
        ({"batch": 2, "rank": 2, "world_size": 2}, r"rank must lie in 0\.\.1, got 2"),
        ({"batch": 2, "workers": -1}, "workers must be at least 0, got -1"),
    ],
)
def test_wrong_batches_are_refused_at_once(options, message):
    with pytest.raises(Mistake, match=message):
        batches(counted(4), seed=0, **options)


def test_head_is_the_first_images():
    data = counted(6)
    x0, labels = head(data, 4)
    assert torch.equal(x0, data.pixels[:4].float() / 127.5 - 1)
    assert labels.tolist() == [0, 1, 2, 3]
    assert len(head(data, 100)[0]) == 6
    assert len(head(data, 0)[0]) == 0


# --- names --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar", r"unknown data 'cifar' \(did you mean cifar10\?\); known: digits, mnist, cifar10, folder:PATH, hf:NAME_OR_PATH"),
        ("zzz", "unknown data 'zzz'; known"),
        ("", "unknown data ''; known"),
        ("folder:", "'folder:' lacks a path"),
        ("folder:/nowhere/at/all", "no folder /nowhere/at/all"),
        ("hf:./nowhere", "no folder nowhere"),
    ],
)
def test_unknown_data_is_a_mistake(name, message):
    with pytest.raises(Mistake, match=message):
        load(name)


def test_wrong_splits_and_sizes_are_mistakes(tmp_path):
    with pytest.raises(Mistake, match=r"unknown split 'tests' \(did you mean test\?\); known: train, test"):
        load("digits", split="tests")
    with pytest.raises(Mistake, match="digits has images of size 8, got size=32"):
        load("digits", size=32)
    with pytest.raises(Mistake, match=f"'{tmp_path}' is a folder; say folder:{tmp_path}"):
        load(str(tmp_path))
    with pytest.raises(Mistake, match="size must be at least 1, got 0"):
        load(f"folder:{tmp_path}", size=0)
    assert load("digits", size=8).shape == (1, 8, 8)
