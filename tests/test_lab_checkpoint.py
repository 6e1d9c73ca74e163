import copy
import json
import math
import os
import pickle
import random
import shutil
import struct
import subprocess
import tempfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import noiseclock as nc
from noiseclock.core.names import SAMPLERS
from noiseclock.lab.checkpoint import load, save, steps
from small_states import same, state_of

# --- what goes in comes out ---------------------------------------------------------------------------------------------------------------

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 3), max_size=3))
    if dtype == torch.bool:
        flat = torch.tensor(draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))), dtype=dtype)
    else:  # any bits: NaNs with a payload and subnormal numbers too
        size = math.prod(shape) * dtype.itemsize
        flat = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8).view(dtype)
    tensor = flat.reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and tensor.ndim else tensor


numbers = st.integers(-(2**200), 2**200) | st.floats()
# "." joins places into names, "$" marks what JSON lacks, and "__metadata__" belongs to safetensors
words = st.text(max_size=4) | st.sampled_from(["a", "a.b", "b", "$tensor", "$pairs", "$", "__metadata__", "\ud800", ""])
states = st.recursive(
    st.none() | st.booleans() | numbers | words | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(words, inner, max_size=3)
        | st.dictionaries(words | st.integers() | st.floats() | st.booleans() | st.none(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(states)
@settings(max_examples=80, deadline=None)
def test_any_nested_state_comes_back_bit_for_bit(state):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # for speed
        save(folder, 7, {"state": state})
        step, back = load(folder)
    assert step == 7
    assert same(back, {"state": state})


def test_two_places_of_one_name_and_reserved_names_stay_apart(tmp_path):
    state = {"a": {"b": torch.tensor(1)}, "a.b": torch.tensor(2), 0: torch.tensor(3), "0": torch.tensor(4), "__metadata__": torch.tensor(5)}
    save(tmp_path, 0, state)
    assert same(load(tmp_path)[1], state)


def test_views_and_shared_tensors_are_saved_by_value_and_come_back_apart(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    state = {"whole": whole, "again": whole, "row": whole[1], "column": whole[:, 2], "t": whole.T, "one": whole[0, 3], "wide": whole[:1].expand(5, 4)}
    state["parameter"] = nn.Parameter(whole)
    save(tmp_path, 0, state)
    _, back = load(tmp_path)
    assert same(back, state)
    expected = copy.deepcopy(back)
    back["whole"].zero_()
    back["parameter"].zero_()
    assert same(
        {k: v for k, v in back.items() if k not in ("whole", "parameter")}, {k: v for k, v in expected.items() if k not in ("whole", "parameter")}
    )


def test_what_is_loaded_outlives_the_files(tmp_path):
    save(tmp_path, 0, state_of(0))
    _, back = load(tmp_path)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path) not in maps.read_text()
    shutil.rmtree(tmp_path / "checkpoints")
    assert same(back, state_of(0))


def test_random_generators_go_on(tmp_path):
    torch_generator, python_generator = torch.Generator().manual_seed(3), random.Random(3)
    save(tmp_path, 0, {"torch": torch_generator.get_state(), "python": python_generator.getstate()})
    expected = torch.randn(5, generator=torch_generator), python_generator.random()
    _, state = load(tmp_path)
    torch_generator.set_state(state["torch"])
    python_generator.setstate(state["python"])
    assert same((torch.randn(5, generator=torch_generator), python_generator.random()), expected)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "adam, lr as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-2), foreach=False),
    "adamw, amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
    "two groups": lambda p: torch.optim.Adam([{"params": list(p)[:1]}, {"params": list(p)[1:], "lr": 1e-3}], lr=1e-2),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, generator: torch.Generator) -> None:
    for _ in range(count):
        x = torch.randn(8, 3, generator=generator)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimiser_goes_on_bit_for_bit(name, tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.SiLU(), nn.Linear(4, 3))
        optimizer = OPTIMIZERS[name](model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), torch.Generator().manual_seed(0)

    model, optimizer, schedule, generator = make()
    train(model, optimizer, 3, generator)
    schedule.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict(), "data": generator.get_state()}
    save(tmp_path, 3, state)
    expected = copy.deepcopy(state)
    train(model, optimizer, 3, generator)

    _, back = load(tmp_path)
    assert same(back, {**expected, "model": dict(expected["model"])})
    again, optimizer, schedule, generator = make()
    again.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    schedule.load_state_dict(back["schedule"])
    generator.set_state(back["data"])
    train(again, optimizer, 3, generator)
    assert same(again.state_dict(), model.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [{"capturable": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_an_optimiser_on_a_gpu_goes_on_bit_for_bit(kind, tmp_path):
    def make():
        torch.manual_seed(0)
        model = nn.Linear(3, 3, bias=False).cuda()
        return model, torch.optim.Adam(model.parameters(), lr=1e-2, **kind)

    def run(model, optimizer):
        for _ in range(3):
            model.weight.grad = model.weight.detach().sin()
            optimizer.step()

    model, optimizer = make()
    run(model, optimizer)
    save(tmp_path, 3, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "view": model.weight.detach().T})
    run(model, optimizer)
    again, optimizer = make()
    _, back = load(tmp_path)
    assert {tensor.device.type for tensor in (*back["model"].values(), back["view"])} == {"cpu"}
    again.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    run(again, optimizer)
    assert torch.equal(again.weight, model.weight)
    assert load(tmp_path, device="cuda")[1]["view"].is_cuda


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.Linear(8, 4))

    def forward(self, x, t):
        return self.net(torch.cat([x, t[:, None] / 1000], 1))


# small ones, so that each has learned something within a few steps
SMALL = {"adaptive": {"every": 2, "queue": 3, "count": 2, "variant": "scaled"}, "gradient-variance": {"every": 2}}
WRAPPERS = {"shifted", "truncated", "mixture", "annealed"}


@pytest.mark.filterwarnings("ignore::UserWarning:noiseclock")
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_clock_of_every_sampler_goes_on_bit_for_bit(name, tmp_path):
    def make():
        torch.manual_seed(0)
        model = Denoiser()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        options = {"sampler": nc.LogitNormal()} if name in WRAPPERS else SMALL.get(name, {})
        return model, optimizer, nc.Clock("linear", nc.sampler(name, **options), seed=1).attach(optimizer)

    def run(model, optimizer, clock, first, last):
        drawn = []
        for i in range(first, last):
            b = clock.draw(torch.randn(16, 4, generator=torch.Generator().manual_seed(i)), predict=model)
            clock.loss(b, model(b.x_t, b.t)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            drawn.append((b.time, b.noise))
        return drawn

    model, optimizer, clock = make()
    run(model, optimizer, clock, 0, 6)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "clock": clock.state_dict()}
    save(tmp_path, 6, state)
    expected = copy.deepcopy(state["clock"])
    drawn = run(model, optimizer, clock, 6, 10)

    _, back = load(tmp_path)
    assert same(back["clock"], expected)
    again = make()
    for thing, part in zip(again, ("model", "optimizer", "clock"), strict=True):
        thing.load_state_dict(back[part])
    assert same(again[2].state_dict(), expected)
    assert same(run(*again, 6, 10), drawn)


def test_only_plain_types_are_taken_and_the_place_of_any_other_is_named(tmp_path):
    for state, message in [
        ({"ema": {"decay": [object()]}}, "ema.decay.0 is a object; a checkpoint holds dicts, .* and None"),
        ({"net": {"w": torch.eye(2).to_sparse()}}, "net.w is no ordinary tensor .*sparse_coo"),
        ({"net": {"w": torch.zeros(2, device="meta")}}, "net.w is no ordinary tensor .*meta"),
        ({"net": {"w": torch.zeros(2).as_subclass(type("Odd", (torch.Tensor,), {}))}}, r"net.w is no ordinary tensor \(Odd"),
        ({"opt": {(1, 2): 3}}, "opt has a key that is neither a string nor a number"),
    ]:
        with pytest.raises(TypeError, match=message):
            save(tmp_path, 1, state)
    assert list(tmp_path.iterdir()) == []
    for arguments in [{"step": -1}, {"step": 1, "keep": 0}]:
        with pytest.raises(ValueError, match="step must be at least 0 and keep at least 1"):
            save(tmp_path, **arguments, state={})


def test_subclasses_come_back_as_the_plain_type(tmp_path):
    save(tmp_path, 0, {"od": OrderedDict(a=1), "size": torch.Size([2, 3])})
    assert same(load(tmp_path)[1], {"od": {"a": 1}, "size": (2, 3)})


def test_nothing_is_pickled_and_other_tools_read_the_files(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("pickle")

    for module, names in ((pickle, ("load", "loads", "dump", "dumps", "Pickler", "Unpickler")), (torch, ("load", "save"))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    path = save(tmp_path, 12, {**state_of(12), "lr": math.inf})
    assert same(load(tmp_path), (12, {**state_of(12), "lr": math.inf}))
    assert path == tmp_path / "checkpoints" / "step-00000012"
    # safetensors: the length of a header in JSON, the header, the bytes
    raw = (path / "tensors.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert set(json.loads(raw[8 : 8 + length])) == {"model.weight", "model.half", "optimizer.state.0.step"}

    def refuse_constant(name):
        raise AssertionError(name)  # NaN and Infinity are not JSON

    content = json.loads((path / "state.json").read_text(), parse_constant=refuse_constant)
    assert content["state"]["model"] == {"weight": {"$tensor": "model.weight"}, "half": {"$tensor": "model.half"}}
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=path, check=True, capture_output=True)


# --- which ones stay ----------------------------------------------------------------------------------------------------------------------


def test_the_last_ones_are_kept_and_the_newest_is_loaded(tmp_path):
    assert steps(tmp_path) == []
    for step in (5, 10, 123456789, 123456790):
        save(tmp_path, step, state_of(step))
    assert steps(tmp_path) == [123456789, 123456790]
    assert same(load(tmp_path), (123456790, state_of(123456790)))
    assert same(load(tmp_path, 123456789), (123456789, state_of(123456789)))
    save(tmp_path, 123456791, state_of(1), keep=3)
    assert steps(tmp_path) == [123456789, 123456790, 123456791]
    save(tmp_path, 123456792, state_of(2), keep=1)
    assert steps(tmp_path) == [123456792]


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 5, state_of(5))
    save(tmp_path, 5, state_of(6))
    assert same(load(tmp_path), (5, state_of(6)))
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000005"]


def test_leftovers_of_crashes_go_and_what_is_not_ours_stays(tmp_path):
    save(tmp_path, 5, state_of(5))
    parent = tmp_path / "checkpoints"
    for name in ("tmp-00000007", "tmp-00000009", "tmp-step-00000001"):
        (parent / name).mkdir()
        (parent / name / "tensors.safetensors").write_bytes(b"torn")
    shutil.copytree(parent / "step-00000005", parent / "old-00000005")  # killed just after it was replaced
    for name in ("step-best", "notes", "step-00000005-copy"):
        (parent / name).mkdir()
    assert steps(tmp_path) == [5]
    save(tmp_path, 5, state_of(6))
    assert sorted(p.name for p in parent.iterdir()) == ["notes", "step-00000005", "step-00000005-copy", "step-best"]
    assert same(load(tmp_path), (5, state_of(6)))


def test_one_that_was_being_replaced_counts_until_it_is(tmp_path):
    save(tmp_path, 5, state_of(5))
    parent = tmp_path / "checkpoints"
    (parent / "step-00000005").rename(parent / "old-00000005")  # killed between the two renames
    assert same(load(tmp_path), (5, state_of(5)))
    save(tmp_path, 6, state_of(6))
    assert steps(tmp_path) == [5, 6]
    save(tmp_path, 7, state_of(7))
    assert sorted(p.name for p in parent.iterdir()) == ["step-00000006", "step-00000007"]


def test_a_run_that_went_back_leaves_the_later_steps_behind(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, state_of(step), keep=3)
    load(tmp_path, 10)
    save(tmp_path, 15, state_of(15))
    assert steps(tmp_path) == [10, 15]
