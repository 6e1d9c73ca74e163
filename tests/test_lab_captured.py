"""Updates as one CUDA graph: the same as updates without. What only a CUDA device can show is skipped elsewhere."""

import math
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import noiseclock.lab.train as lab_train
from noiseclock.core.lookahead import gradient_of_sum
from noiseclock.lab import checkpoint
from noiseclock.lab.built import sampled
from noiseclock.lab.captured import CapturedForward
from noiseclock.lab.ema import EMA
from noiseclock.lab.errors import Failure
from noiseclock.lab.models import build
from noiseclock.lab.recipes import Recipe
from noiseclock.lab.shards import spread
from noiseclock.lab.train import train, why_not_captured
from noiseclock.lab.trained import opened
from small_runs import TINY, UNET, lines

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_averages_move_alike_by_a_number_and_by_a_tensor():
    torch.manual_seed(0)
    nets = [nn.Linear(3, 3) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    by_number, by_tensor = (EMA(net, 0.9) for net in nets)
    for step in range(1, 6):
        for net in nets:
            for p in net.parameters():
                p.data += step / 10
        by_number.towards(by_number.weight(step))
        by_tensor.towards(torch.tensor(by_tensor.weight(step)))
    for a, b in zip(by_number.state_dict().values(), by_tensor.state_dict().values(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-7)  # one rounds once where the other rounds twice
    before = by_tensor.state_dict()["weight"].clone()
    by_tensor.towards(torch.tensor(0.0))  # an update that was lost
    assert torch.equal(before, by_tensor.state_dict()["weight"])


def test_moments_come_back_in_the_order_of_memory_of_their_parameters():
    """A fused optimiser on a GPU refuses others."""
    like = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    value = torch.arange(48.0).view(4, 3, 2, 2)
    assert spread(value, like).stride() == like.stride()
    assert torch.equal(spread(value, like), value)
    assert spread(torch.tensor(3.0), like) == 3.0  # a count of steps


@pytest.mark.parametrize(
    ("recipe", "device", "world", "shard", "reason"),
    [
        (Recipe(), "cuda", 1, False, ""),
        (Recipe(), "cpu", 1, False, "this runs on cpu"),
        (Recipe(), "cuda", 2, False, "there are several processes, which wait for each other between forward and step"),
        (Recipe(), "cuda", 1, True, "there are several processes, which wait for each other between forward and step"),
        (Recipe(accumulate=2), "cuda", 1, False, "an update has 2 micro-batches"),
    ],
)
def test_what_cannot_be_captured_has_a_reason(recipe, device, world, shard, reason):
    assert why_not_captured(recipe, torch.device(device), world, shard) == reason


# --- on a GPU -----------------------------------------------------------------------------------------------------------------------------

METHODS = {
    "uniform": {},
    "speed": {"sampler": "speed", "weighting": "change-aware"},
    "lsm": {"sampler": "loss-second-moment:bins=5,warmup=1,refresh=7"},
    "published": {"sampler": "loss-history:length=2"},
    "adaptive": {"sampler": "adaptive.scaled:every=10,stride=2,floor=0.2"},
    "gradient variance": {"sampler": "gradient-variance:bins=4,samples=8,every=20"},
    "variance-optimal": {"sampler": "variance-optimal:every=10,bins=4,warmup=2,gain=1.0"},
    "lookahead": {"sampler": "lookahead:every=10,bins=4,warmup=2"},
    "annealed": {"sampler": "annealed:sampler=logit-normal,start=5,stop=60"},
    "uncertainty": {"weighting": "uncertainty"},
    "classes": {"conditional": True},
}


def both(settings, folder, monkeypatch):
    """The same training, captured and not: records, and the logged lines."""
    found = []
    for how in ("captured", "plain"):
        if how == "plain":
            monkeypatch.setattr(lab_train, "why_not_captured", lambda *_: "this is a test")
        records = list(train(settings, folder / how, device="cuda"))
        found.append((records, lines(folder / how)))
    return found


@on_cuda
@pytest.mark.filterwarnings("ignore:the sampling", "ignore:for five probes")
@pytest.mark.parametrize("method", METHODS)
def test_a_captured_training_is_the_plain_one(method, tmp_path, monkeypatch):
    settings = replace(TINY, updates=200, log_every=1, dropout=0.0, **METHODS[method])
    (fast, fast_log), (plain, plain_log) = both(settings, tmp_path, monkeypatch)
    assert fast_log[0]["note"] == "updates are captured as one CUDA graph"
    assert plain_log[0]["note"] == "updates are not captured: this is a test"
    apart = [abs(a.loss - b.loss) / b.loss for a, b in zip(fast, plain, strict=True)]
    # The same times and noise. Adam rounds otherwise with its rate on the device; where a gradient is mere rounding, it makes a whole step of that.
    assert max(apart[:2]) < 1e-6, apart[:10]
    assert max(apart[:10]) < 1e-3, apart[:10]
    assert sum(apart) / len(apart) < 0.02, apart[::10]
    states = [checkpoint.load(tmp_path / how)[1] for how in ("captured", "plain")]
    drawn = [state["ranks"][0]["clock"]["record"]["sums"][0] for state in states]
    if method not in ("adaptive", "lsm", "published", "gradient variance", "variance-optimal", "lookahead"):  # which draw by what they have learned
        assert torch.equal(drawn[0], drawn[1])
    assert [state["ranks"][0]["clock"]["draws"] for state in states] == [200, 200]
    assert [state["ranks"][0]["clock"]["updates"] for state in states] == [200, 200]
    for name, mean in states[0]["ema"].items():
        assert torch.allclose(mean, states[1]["ema"][name], rtol=0.05, atol=0.02), name


@on_cuda
@pytest.mark.parametrize("settings", [TINY, UNET, replace(TINY, precision="bf16")], ids=["dit", "unet", "bf16"])
def test_a_captured_update_may_recompute(settings, tmp_path):
    runs = [list(train(replace(settings, updates=10, checkpointing=yes), tmp_path / str(yes), device="cuda")) for yes in (False, True)]
    assert lines(tmp_path / "True")[0]["note"] == "updates are captured as one CUDA graph"
    for plain, spare in zip(*runs, strict=True):
        assert spare.loss == pytest.approx(plain.loss, rel=1e-2 if settings.precision == "bf16" else 1e-3)  # as above


@on_cuda
def test_in_bf16_with_a_unet_the_losses_agree_to_its_precision(tmp_path, monkeypatch):
    settings = replace(UNET, updates=200, log_every=1, precision="bf16", dropout=0.0)
    (fast, _), (plain, _) = both(settings, tmp_path, monkeypatch)
    apart = [abs(a.loss - b.loss) / b.loss for a, b in zip(fast, plain, strict=True)]
    assert max(apart[:10]) < 0.01  # 8 bits of mantissa
    assert sum(apart) / len(apart) < 0.02


@on_cuda
def test_numbers_are_read_when_somebody_looks(tmp_path):
    settings = replace(TINY, updates=20, log_every=5)
    records = list(train(settings, tmp_path, device="cuda"))
    logged = {line["step"]: line["loss"] for line in lines(tmp_path) if line["kind"] == "train"}
    assert set(logged) == {1, 5, 10, 15, 20}
    for record in records:
        assert record.loss == logged[max(step for step in logged if step <= record.step)]


@on_cuda
def test_lost_updates_are_counted_change_nothing_and_end_the_run(tmp_path):
    settings = replace(TINY, updates=60, log_every=1, lr=1e38, patience=5, warmup=0)
    with pytest.raises(Failure, match=r"not finite for [0-9]+ updates in a row"):
        list(train(settings, tmp_path, device="cuda"))


@on_cuda
@pytest.mark.parametrize("small", [TINY, UNET], ids=["dit", "unet"])  # the second with its weights, but not its checkpoints, in channels-last order
def test_a_captured_training_resumes(small, tmp_path):
    settings = replace(small, updates=60, log_every=1, save_every=30, dropout=0.0)
    whole = [record.loss for record in train(settings, tmp_path / "whole", device="cuda")]
    for record in train(settings, tmp_path / "run", device="cuda"):
        if record.step == 30:
            break
    again = [record.loss for record in train(settings, tmp_path / "run", device="cuda")]
    assert len(again) == 30
    assert all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(whole[30:], again, strict=True))


@on_cuda
def test_micro_batches_are_not_captured_and_the_log_says_so(tmp_path):
    list(train(replace(TINY, updates=3, accumulate=2), tmp_path, device="cuda"))
    assert re.search("not captured: an update has 2 micro-batches", lines(tmp_path)[0]["note"])


@on_cuda
@pytest.mark.parametrize("classes", [None, 10])
def test_a_captured_network_predicts_the_same(classes):
    torch.manual_seed(0)
    net = build("unet", (3, 8, 8), classes=classes, channels=16, multipliers=(1, 2), blocks=1, attention=(4,)).cuda().eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)
    fast = CapturedForward(net)
    for size in (4, 7, 4):
        x, t = torch.randn(size, 3, 8, 8, device="cuda"), torch.randint(0, 1000, (size,), device="cuda")
        labels = () if classes is None else (torch.randint(0, classes, (size,), device="cuda"),)
        with torch.no_grad():
            assert torch.allclose(fast(x, t, *labels), net(x, t, *labels), rtol=1e-4, atol=1e-4)
    assert len(fast._graphs) == 2


@on_cuda
def test_a_captured_gradient_is_the_plain_one():
    torch.manual_seed(0)
    net = build("unet", (3, 8, 8), channels=16, multipliers=(1, 2), blocks=1, attention=(4,)).cuda().eval()
    for p in net.parameters():
        nn.init.normal_(p, std=0.1)
    fast, parameters = CapturedForward(net), list(net.parameters())
    for _ in range(2):
        x, target = torch.randn(2, 4, 3, 8, 8, device="cuda")
        given = x, torch.randint(0, 1000, (4,), device="cuda"), None, target, torch.rand(4, device="cuda")
        found, wanted = (
            torch.cat([g.flatten() for g in gradient])
            for gradient in (fast.replayed_gradient(parameters, *given), gradient_of_sum(net, parameters, *given))
        )
        assert (found - wanted).norm() < 1e-3 * wanted.norm()  # convolutions in TF32 may choose other kernels
    assert len(fast._graphs) == 1


@on_cuda
def test_samples_are_those_of_the_cpu(tmp_path):
    list(train(replace(TINY, updates=30), tmp_path, device="cuda"))
    images = []
    for device in ("cuda", "cpu"):
        run = opened(tmp_path, device=device)
        images.append(sampled(run.net, run.recipe, run.clock, run.data, 6, batch=4, device=device).float())
    assert (images[0] - images[1]).abs().max() <= 2  # of 255: float32 rounding along the path
