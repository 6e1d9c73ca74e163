"""Batches that are too small for a probe: it waits for the next one that is not, on all ranks alike."""

import itertools

import pytest
import torch
import torch.distributed as dist

import noiseclock as nc
from forked import on_two
from gaussians import Denoiser

SAMPLERS = {
    "lookahead": lambda: nc.Lookahead(every=1, bins=4, warmup=1),
    "gradient-variance": lambda: nc.GradientVariance(every=1, bins=4, samples=8),
    "mixture": lambda: nc.Mixture(nc.Uniform(), nc.Lookahead(every=1, bins=4, warmup=1)),
    "variance-optimal": lambda: nc.VarianceOptimal(every=1, bins=4, warmup=1, gain=1.0),
    "adaptive": lambda: nc.Adaptive.scaled(every=1, queue=3, stride=100),
}
LEAST = {"lookahead": 4, "gradient-variance": 2, "mixture": 4, "variance-optimal": 1, "adaptive": 1}


def probed(name, sizes, updates, accumulate=1):
    """The sizes of the batches that were looked at in so many updates, and the clock; sizes: of the batches, over and over."""
    torch.manual_seed(0)
    model = Denoiser(width=8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", SAMPLERS[name]()).attach(optimizer)
    looked, after = [], clock.sampler.after
    object.__setattr__(clock.sampler, "after", lambda probe, batch: (looked.append((len(probe.x0), len(batch.time))), after(probe, batch)))
    generator, size = torch.Generator().manual_seed(1), itertools.cycle(sizes)
    for _ in range(updates):
        for micro in range(accumulate):
            b = clock.draw(torch.randn(next(size), 2, generator=generator), predict=model, micro=(micro, accumulate))
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(of_probe == of_batch for of_probe, of_batch in looked)
    return [of_probe for of_probe, _ in looked], clock


@pytest.mark.filterwarnings("ignore:the sampling density moved")  # a policy that is shown one sample at a time
@pytest.mark.parametrize("short", [1, 2, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_short_last_batch_of_an_epoch_is_left_out_where_it_is_too_small(name, short):
    looked, clock = probed(name, [8, 8, short], 6)
    assert looked == [size for size in [8, 8, short] * 2 if size >= LEAST[name]]
    assert clock.updates == 6
    # of two micro-batches the first is looked at
    assert probed(name, [short, 8, 8, 8], 4, accumulate=2)[0] == [size for size in [short, 8] * 2 if size >= LEAST[name]]


@pytest.mark.parametrize("name", [name for name, least in LEAST.items() if least > 1])
def test_batches_that_are_always_too_small_are_an_error(name):
    small = LEAST[name] - 1
    with pytest.raises(
        ValueError, match=rf"needs batches of at least {LEAST[name]} samples on every rank .* the last 20 were smaller; use larger batches"
    ):
        probed(name, [small], 20)
    assert probed(name, [*[small] * 19, 8], 40)[0] == [8, 8]


SIZES = [[8, 8, 2], [8, 1, 8]]  # of each rank


def _uneven(rank: int, port: int, results) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for name in SAMPLERS:
            looked, clock = probed(name, SIZES[rank], 6)
            results[name, rank] = looked, torch.tensor(clock.plot_data().p)
    finally:
        dist.destroy_process_group()


def test_ranks_whose_batches_differ_decide_alike(free_port):
    results = on_two(_uneven, free_port)
    for name, least in LEAST.items():
        wanted = [sizes * 2 for sizes in SIZES]
        both = [min(sizes) >= least for sizes in zip(*wanted, strict=True)]
        for rank in range(2):
            looked, density = results[name, rank]
            assert looked == list(itertools.compress(wanted[rank], both)), name
            assert torch.equal(density, results[name, 0][1]), name
