"""Probes: a model seen before and after an update, and left exactly as it was."""

import copy
import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import noiseclock as nc
from forked import on_two
from noiseclock.core.conditioning import take_rows
from noiseclock.core.gradient_variance import gradient_moments
from small_loops import Denoiser, Probing, data, train


def test_probes_come_before_and_after_the_update_and_leave_no_trace():
    model = Denoiser()
    twin = copy.deepcopy(model)
    runs = []
    for net, sampler in ((model, Probing()), (twin, nc.Uniform())):
        torch.manual_seed(0)
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        clock = nc.Clock("linear", sampler).attach(optimizer)
        train(clock, net, optimizer, steps=7)
        runs.append(net.state_dict())
        assert net.training
        assert all(module.training for module in net.modules())
    # same draws, same dropout, same batch-norm buffers: the probed run is the other one, bit for bit
    for name, value in runs[0].items():
        assert torch.equal(value, runs[1][name]), name


def test_probes_are_due_every_so_many_updates_with_shared_noise():
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    due = []
    for _ in range(8):
        due.append(clock.due)
        train(clock, model, optimizer, steps=1, accumulate=2)
    assert due == [True, False, False, True, False, False, True, False]
    names = [entry[0] for entry in clock.sampler.seen]
    assert names == ["before", "after"] * 3
    for before, after in zip(clock.sampler.seen[::2], clock.sampler.seen[1::2], strict=True):
        assert torch.equal(before[1], before[2])  # measured twice before the update: the same number, without dropout
        assert not torch.equal(before[1], after[1])


def test_explicit_probes_for_captured_graphs():
    model = Denoiser()
    clock = nc.Clock("linear", Probing())
    clock.draw(data(), predict=model)
    clock.updated()
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"]
    buffer = data()
    clock.probe(buffer, model)
    batch = clock.draw(buffer, predict=model)
    seen = clock.sampler.seen[-1]
    buffer.zero_()  # a replay writes the next batch into the same memory
    clock.updated()
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * 2
    assert torch.equal(clock.sampler.seen[-1][1], seen[1])  # nothing was trained, so the model's loss on the probe's data is unchanged
    assert clock.sampler.seen[-1][2] is batch
    clock.probe(buffer, model)
    clock.updated(skipped=True)
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"] * 2 + ["before"]


def test_an_explicit_probe_waits_for_the_batch_that_is_drawn_after_it():
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    clock.probe(data(), model)
    batch = clock.draw(data())  # no gradient yet, and no model to be probed again
    clock.loss(batch, model(batch.x_t, batch.t)).mean().backward()
    optimizer.step()
    assert [entry[0] for entry in clock.sampler.seen] == ["before", "after"]
    assert clock.sampler.seen[-1][2] is batch


def test_a_model_that_fails_in_a_probe_is_probed_anew():
    """By a user who leaves such a batch out and goes on. Adaptive took the measure of one batch for another's."""
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.Adaptive(every=1, stride=100)).attach(optimizer, model=model)

    def fails(x_t, t):
        raise RuntimeError("mine")

    clock.draw(data(16), predict=model)  # of which no update is made
    with pytest.raises(RuntimeError, match="mine"):
        clock.draw(data(8), predict=fails)
    b = clock.draw(data(8), predict=model)
    clock.loss(b, model(b.x_t, b.t)).mean().backward()
    optimizer.step()
    assert clock.sampler.probes == 1


def test_a_probing_sampler_without_a_model_says_so():
    with pytest.raises(ValueError, match=r"Probing probes the model: pass it as clock.draw\(x0, predict=model\)"):
        nc.Clock("linear", Probing()).draw(data())
    with pytest.raises(ValueError, match=r"cannot find the trained model in predict=.*pass it: clock\.attach"):
        nc.Clock("linear", Probing()).draw(data(), predict=torch.add)
    with pytest.raises(ValueError, match=r"in predict=Sequential\(\.\.\.\); pass it") as refused:  # a U-Net has a thousand lines
        nc.Clock("linear", Probing()).attach(torch.optim.Adam(nn.Linear(2, 2).parameters())).draw(data(), predict=nn.Sequential(nn.Linear(2, 2)))
    assert "\n" not in str(refused.value)
    # and no call has moved the clock
    clock, twin = nc.Clock("linear", Probing()), nc.Clock("linear", Probing())
    with pytest.raises(ValueError, match="probes the model"):
        clock.draw(data())
    model = Denoiser()
    assert torch.equal(clock.draw(data(), predict=model).time, twin.draw(data(), predict=model).time)


MODEL = Denoiser()


@pytest.mark.parametrize("kind", ["module", "lambda", "global", "method", "partial", "decorated", "compiled", "named"])
def test_the_model_is_found_behind_any_predict_and_left_as_it_was(kind):
    model = MODEL if kind == "global" else Denoiser()
    predict = {
        "module": model,
        "lambda": lambda x, t: model(x, t),
        "global": lambda x, t: MODEL(x, t),
        "method": model.forward,
        "partial": functools.partial(Denoiser.forward, model),
        "decorated": torch.autocast("cpu", enabled=False)(lambda x, t: model(x, t)),
        "compiled": torch.compile(lambda x, t: model(x, t), backend="eager"),
        "named": Opaque(model),
    }[kind]
    model.train()
    model.net[3].eval()  # a flag that differs from its parent's must come back too
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", Probing()).attach(optimizer, model=model if kind == "named" else None)
    clock.draw(data(), predict=predict)
    assert torch.equal(clock.sampler.seen[0][1], clock.sampler.seen[0][2])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.net[3].training
    assert all(p.grad is None for p in model.parameters())


class Opaque:
    """A callable that does not show what it calls."""

    def __init__(self, model):
        self.get = [model].__getitem__  # a function of Python's own, whose owner nobody looks at

    def __call__(self, x, t):
        return self.get(0)(x, t)


def test_a_predict_that_shows_another_model_only_is_refused():
    other, hidden = Denoiser(), Opaque(Denoiser())
    predict = lambda x, t: hidden(x, t) + 0 * other(x, t)  # noqa: E731
    optimizer = torch.optim.SGD(hidden.get(0).parameters(), lr=0.1)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    with pytest.raises(ValueError, match="cannot find the trained model"):
        clock.draw(data(), predict=predict)


def test_a_probe_sees_the_updated_weights_under_autocast():
    """Autocast keeps reduced copies of the weights for as long as its block lasts; a probe inside it must not read them."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    predict = lambda x, t: model(x)  # noqa: E731
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = clock.draw(data(), predict=predict)
        clock.loss(b, predict(b.x_t, b.t)).mean().backward()
        optimizer.step()
    before, after = clock.sampler.seen
    assert not torch.equal(before[1], after[1])


def test_a_probe_runs_in_the_precision_of_training():
    dtypes = []

    class Watched(nn.Linear):
        def forward(self, x, t):
            out = super().forward(x)
            dtypes.append(out.dtype)
            return out

    model = Watched(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", Probing()).attach(optimizer)
    for _ in range(4):
        b = clock.draw(data(), predict=model)  # outside the block, as in most loops
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = clock.loss(b, model(b.x_t, b.t)).mean()
        loss.backward()
        optimizer.step()
    # the first probe begins before any training step has shown its precision, and ends as it began
    assert dtypes[:4] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]
    assert set(dtypes[4:]) == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["variance-optimal", "lookahead", "adaptive", "gradient-variance"])
def test_float32_layers_are_probed_with_half_precision_latents_and_embeddings(name, inside, dtype):
    """Autocast converts them in training, and stored latents and embeddings often are half precision; a probe may run without autocast."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.embed = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(4, 2)

        def forward(self, x, t, text, pooled):
            return self.conv(x[:, None])[:, 0] + self.embed(text) + self.embed(pooled["mean"])

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    clock = nc.Clock("linear", nc.sampler(name, every=1)).attach(optimizer)
    start = clock.sampler.state_dict()
    for _ in range(2):
        text = torch.randn(16, 4).to(dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=inside):
            b = clock.draw(data(16).to(dtype), predict=model, cond={"text": text, "pooled": {"mean": text}})
        with torch.autocast("cpu", dtype=dtype):
            loss = clock.loss(b, model(b.x_t, b.t, **b.cond)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert str(clock.sampler.state_dict()) != str(start)  # it has learned something


def test_probes_of_many_times_come_in_chunks_of_the_batch():
    shapes = []

    class Watched(nn.Linear):
        def forward(self, x, t, label):
            shapes.append((x.shape, label.shape))
            return super().forward(x) + label

    model = Watched(2, 2)
    x0, noise, label = (torch.randn(8, 2, generator=torch.Generator().manual_seed(i)) for i in range(3))
    schedule, objective = nc.schedule("linear"), nc.objective("eps")
    probe = nc.Probe(model, schedule, objective, x0, {"label": label}, noise=noise, modules=[model])
    time = schedule.grid()[::50]  # 20 times of one sample: three chunks, the last one filled up
    rows, noise_rows = torch.full((20,), 3), torch.arange(20) % 8
    losses = probe.losses(time, rows, noise_rows)
    assert shapes == [((8, 2), (8, 2))] * 3
    for i in (0, 7, 19):
        a, s = schedule(time[i])
        x_t = (a * x0[3] + s * noise[noise_rows[i]]).float()
        expected = ((nn.functional.linear(x_t, model.weight, model.bias) + label[3] - noise[noise_rows[i]]) ** 2).mean()
        assert losses[i].item() == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ValueError, match="must have the same length, got 3, 8 and 8"):
        probe.losses(time[:3])


class Prompt(NamedTuple):
    number: torch.Tensor
    scale: float


@dataclass(frozen=True)
class Caption:
    number: torch.Tensor
    language: str = "en"


@pytest.mark.parametrize(
    ("cond", "number"),
    [
        ([str(i) for i in range(8)], lambda cond: [int(text) for text in cond]),
        (tuple(str(i) for i in range(8)), lambda cond: [int(text) for text in cond]),  # as a DataLoader gives them from (picture, caption)
        ({"cond": {"text": [str(i) for i in range(8)]}}, lambda cond: [int(text) for text in cond["text"]]),
        ([torch.full((i + 5, 2), i) for i in range(8)], lambda cond: [int(tokens[0, 0]) for tokens in cond]),  # the fourth has 8 rows by chance
        (Prompt(torch.arange(8), 7.5), lambda cond: cond.number.tolist()),
        (Caption(torch.arange(8)), lambda cond: cond.number.tolist()),
        ([torch.arange(8)], lambda cond: cond[0].tolist()),
        ([None if i == 5 else str(i) for i in range(8)], lambda cond: [5 if text is None else int(text) for text in cond]),  # as guidance leaves them
        ([None if i == 5 else torch.full((i + 5, 2), i) for i in range(8)], lambda cond: [5 if c is None else int(c[0, 0]) for c in cond]),
        (list(range(8)), lambda cond: cond),
        ({"cond": np.arange(8)}, lambda cond: cond.tolist()),
    ],
    ids=["strings", "tuple of strings", "strings within", "ragged", "named tuple", "dataclass", "batches", "withheld", "partly", "numbers", "array"],
)
def test_every_sample_keeps_its_own_conditioning(cond, number):
    seen = []

    class Watched(nn.Linear):
        def forward(self, x, t, cond):
            seen.extend(number(cond))
            return super().forward(x)

    model = Watched(2, 2)
    probe = nc.Probe(model, nc.schedule("linear"), nc.objective("eps"), data(8), cond, noise=data(8), modules=[model])
    probe.losses(torch.full((8,), 0.5), torch.arange(8).flip(0))
    assert seen == [7, 6, 5, 4, 3, 2, 1, 0]


def test_tensors_that_are_as_many_as_the_samples_are_whole_batches():
    pair = take_rows((torch.arange(2), torch.arange(2) + 5), torch.tensor([1]), 2)
    assert [part.tolist() for part in pair] == [[1], [6]]
    labels, nothing = take_rows((torch.arange(2), None), torch.tensor([1]), 2)
    assert (labels.tolist(), nothing) == ([1], None)


def test_a_size_is_not_taken_for_as_many_labels():
    assert take_rows({"size": (64, 32)}, torch.tensor([1]), 2) == {"size": (64, 32)}


def test_a_blend_shows_the_model_to_its_parts():
    sampler = nc.Mixture(Probing())
    model = Denoiser()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clock = nc.Clock("linear", sampler).attach(optimizer)
    train(clock, model, optimizer, steps=4)
    assert [entry[0] for entry in clock.sampler.sampler.seen] == ["before", "after"] * 2


def test_fewer_rows_at_a_time_give_the_same_losses():
    shapes = []

    class Watched(Denoiser):
        def forward(self, x, t):
            shapes.append(len(x))
            return super().forward(x, t)

    found = []
    for rows in (None, 5):
        torch.manual_seed(0)
        model = Watched()
        clock = nc.Clock("linear", Probing(), probe_rows=rows)
        clock.draw(data(), predict=model)
        found.append(clock.sampler.seen[0][1])
    assert shapes == [16, 16, *[4] * 8]  # not 5, 5, 5, 1: equal parts
    assert torch.allclose(found[0], found[1], rtol=1e-5)


def test_a_probe_that_runs_out_of_memory_halves_its_rows_warns_and_remembers():
    class Small(Denoiser):
        def forward(self, x, t):
            if len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x, t)

    torch.manual_seed(0)
    model = Small()
    clock = nc.Clock("linear", Probing())
    with pytest.warns(UserWarning, match="ran out of memory; it continues with [84] samples at a time"):
        clock.draw(data(), predict=model)
    assert clock.probe_rows == 4
    torch.manual_seed(0)
    plenty = nc.Clock("linear", Probing())
    plenty.draw(data(), predict=Denoiser())
    assert torch.allclose(clock.sampler.seen[0][1], plenty.sampler.seen[0][1], rtol=1e-5)
    clock.updated()
    for _ in range(3):  # warnings are errors here: there is no second one
        clock.draw(data(), predict=model)
        clock.updated()

    class Never(nn.Linear):
        def forward(self, x, t):
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError), pytest.warns(UserWarning, match="out of memory"):
        nc.Clock("linear", Probing()).draw(data(), predict=Never(2, 2))


@pytest.mark.parametrize("samples", [16, 10])
def test_a_probe_after_the_update_that_runs_out_of_memory_is_remembered_too(samples):
    """VarianceOptimal measures copies of its probe, in float32 and with fewer samples."""

    class Small(Denoiser):
        def forward(self, x, t):
            if not self.training and len(x) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().forward(x, t)

    model = Small()
    optimizer = torch.optim.Adam(model.parameters())
    clock = nc.Clock("linear", nc.VarianceOptimal(every=1, samples=samples)).attach(optimizer)
    with pytest.warns(UserWarning, match="ran out of memory") as told:
        train(clock, model, optimizer, steps=4)
    assert len(told) == 2  # both in the first probe: to 8 or 5 rows, then to 4 or 3
    assert clock.probe_rows == {16: 4, 10: 3}[samples]
    assert clock.sampler.probes == 4


class Recomputing(Denoiser):
    """Recomputes activations in training mode only, as most models do: with gradients in evaluation mode memory is for a few samples."""

    def __init__(self, memory, least=1):
        super().__init__()
        self.memory, self.least, self.sizes = memory, least, []

    def forward(self, x, t):
        if torch.is_grad_enabled() and not self.training:
            self.sizes.append((len(x), t.unique().numel()))
            if len(x) > self.memory:
                raise torch.OutOfMemoryError("CUDA out of memory")
        if len(x) < self.least:
            raise ValueError("too few")
        return super().forward(x, t)


def with_a_learned_weight(model, sampler, predict=None, rows=None):
    """A clock after two updates; its optimiser trains something that is no part of the model, so the first probe looks for what predict uses."""
    weighting = nc.Uncertainty()
    optimizer = torch.optim.Adam([*model.parameters(), *weighting.parameters()])
    clock = nc.Clock("linear", sampler, weighting, probe_rows=rows).attach(optimizer, model=model)
    predict = model if predict is None else predict
    for _ in range(2):
        b = clock.draw(data(), predict=predict)
        clock.loss(b, predict(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert clock.sampler.probes == 2
    return clock


@pytest.mark.parametrize(("memory", "least"), [(4, 1), (2, 2)])
def test_what_the_loss_depends_on_is_seen_in_two_samples_at_two_times(memory, least):
    model = Recomputing(memory, least)
    clock = with_a_learned_weight(model, nc.VarianceOptimal(every=1))  # warnings are errors here
    assert model.sizes == [(2, 2)]
    assert clock.probe_rows is None


def test_memory_for_one_sample_with_gradients_does_not_limit_the_passes_without():
    model = Recomputing(1)
    with pytest.warns(UserWarning, match="ran out of memory; it continues with 1 samples"):
        clock = with_a_learned_weight(model, nc.VarianceOptimal(every=1))
    assert (model.sizes, clock.probe_rows) == ([(2, 2), (1, 1)], None)
    one = Recomputing(1)
    with_a_learned_weight(one, nc.VarianceOptimal(every=1), rows=1)
    assert one.sizes == [(1, 1)]


@pytest.mark.parametrize("how", ["model", "inside"])
def test_two_samples_compile_nothing(how):
    """After another size torch.compile would make the size a variable, in all that it compiles later."""
    torch.compiler.reset()
    compiled, model = [], Denoiser()

    def backend(graph, inputs):
        compiled.append(sorted({str(x.shape[0]) for x in inputs if isinstance(x, torch.Tensor) and x.shape[-1:] == (2,)} - {"2"}))
        return graph

    fast = torch.compile(model, backend=backend)
    with_a_learned_weight(model, nc.VarianceOptimal(every=1, samples=16), fast if how == "model" else lambda x, t: fast(x, t))
    assert compiled == [["16"]] * 2  # in training, and in evaluation mode


def test_a_model_that_takes_a_whole_batch_only_is_probed_with_one():
    model, fill = Denoiser(), torch.zeros(16, 2).copy_
    with_a_learned_weight(model, nc.VarianceOptimal(every=1, samples=16), lambda x, t: model(fill(x).clone(), t))


def _choices(rank: int, port: int, results) -> None:
    """What a model draws in probes, as it is and sharded, when the generators of the ranks differ."""
    from torch.distributed.fsdp import fully_shard

    class Drawing(Denoiser):
        def forward(self, x, t):
            if not self.training:
                seen.append((random.random(), np.random.random(), float(torch.rand(()))))  # noqa: NPY002
            return super().forward(x, t)

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        for how in ("replica", "sharded"):
            torch.manual_seed(0)
            seen: list[tuple[float, ...]] = []
            model = fully_shard(Drawing()) if how == "sharded" else Drawing()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            clock = nc.Clock("linear", Probing()).attach(optimizer)
            for step in range(4):
                random.seed(10 * step + rank)
                np.random.seed(10 * step + rank)  # noqa: NPY002
                torch.manual_seed(10 * step + rank)
                train(clock, model, optimizer, steps=1)
            results[how, rank] = seen
    finally:
        dist.destroy_process_group()


def test_ranks_that_share_a_model_choose_alike(free_port):
    """All of them gather the parameters of a block, or none does. Replicas choose by themselves; each probe chooses anew, once for its passes."""
    results = on_two(_choices, free_port)
    for how in ("replica", "sharded"):
        for rank in range(2):
            first, second = results[how, rank][:3], results[how, rank][3:]
            assert (len(set(first)), len(set(second)), first[0] != second[0]) == (1, 1, True), (how, rank)
    assert results["sharded", 0] == results["sharded", 1]
    assert all(a != b for one, other in zip(results["replica", 0], results["replica", 1], strict=True) for a, b in zip(one, other, strict=True))


def _sharded(rank: int, port: int, results) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        probe, time = _moments_probe()
        model = probe.predict
        fully_shard(model.net)
        fully_shard(model)
        model.eval()(probe.x0, torch.zeros(16).long()).square().mean().backward()  # in training mode batch norm would move
        before = [p.grad.full_tensor() for p in model.parameters()]
        moments = gradient_moments(probe, time, 4)
        assert all(torch.equal(p.grad.full_tensor(), grad) for p, grad in zip(model.parameters(), before, strict=True))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        clock = nc.Clock("linear", nc.GradientVariance(bins=4, samples=8, every=2)).attach(optimizer)
        for step in range(5):
            x0 = data(16 if step < 4 or rank == 0 else 12)  # the last batch of an epoch is uneven
            b = clock.draw(x0, predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results[rank] = moments, clock.sampler.variance
    finally:
        dist.destroy_process_group()


def _moments_probe() -> tuple[nc.Probe, torch.Tensor]:
    torch.manual_seed(0)
    model = Denoiser()
    noise = torch.randn(16, 2)
    return nc.Probe(model, nc.schedule("linear"), nc.objective("eps"), data(), noise=noise, modules=[model]), torch.tensor([0.1, 0.6]).double()


def test_gradient_variance_of_a_sharded_model(free_port):
    """Both ranks hold the same samples, so their mean gradients are those of one process; but they count as twice as many, and m·‖G-H‖² doubles."""
    results = on_two(_sharded, free_port)
    (moments, variance), (moments2, variance2) = results[0], results[1]
    alone = gradient_moments(*_moments_probe(), 4)
    assert torch.equal(moments, moments2)
    assert torch.allclose(moments[0], 2 * alone[0], rtol=1e-5)  # float32 gradients
    assert torch.allclose(moments[1] - moments[0], alone[1] - alone[0], rtol=1e-4)
    assert (variance > 0).all()
    assert torch.equal(variance, variance2)
