"""Scores of pictures, the classifier behind those of digits, the bound on the likelihood and the loss over time."""

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import noiseclock as nc
from noiseclock.core.likelihood import bound
from noiseclock.core.measure import loss_over_time
from noiseclock.core.schedules import Discrete
from noiseclock.lab import classifier, inception
from noiseclock.lab.data import Files, Images, load, scaled
from noiseclock.lab.errors import Mistake
from noiseclock.lab.evaluate import (
    Scores,
    bits_per_dim,
    compare_images,
    features_of,
    inception_score,
    loss_curve,
    network_for,
    reference,
    strided_bound,
)
from noiseclock.lab.inception import Inception
from noiseclock.lab.metrics import Moments, Spread, frechet
from noiseclock.lab.sources import Folder


def images(name: str, split: str) -> Images:
    data = load(name, split=split)
    assert isinstance(data, Images)
    return data


TRAIN, TEST = images("digits", "train"), images("digits", "test")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A home that has the digits classifier already."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOISECLOCK_HOME", str(home))
        network_for("digits")
    return home


@pytest.fixture
def home(kept, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(kept))
    return kept


class Small(Inception):
    """An Inception network of its own kind: sixteen random features, and known logits."""

    def __init__(self, resize: str = "pytorch") -> None:
        nn.Module.__init__(self)
        self.resize = resize
        self.fc = nn.Linear(16, 4, bias=False)
        self.calls = 0
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(4, 16))
        self.mix = nn.Buffer(torch.randn(64, 16, generator=torch.Generator().manual_seed(0)))

    def forward(self, pixels: Tensor) -> Tensor:
        self.calls += 1
        seen = nn.functional.adaptive_avg_pool2d(pixels.float().mean(1, keepdim=True), 8)
        return seen.flatten(1) / 255 @ self.mix


# --- the classifier -----------------------------------------------------------------------------------------------------------------------


def test_the_classifier_knows_digits_it_has_not_seen(home):
    """294 of 300; the bar of 97 % leaves it three more mistakes."""
    assert (home / "classifiers" / "digits-v1.safetensors").is_file()
    network = classifier.load("digits")
    assert classifier.accuracy(network, TEST) > 0.97
    assert network.title == "digits classifier"
    features = network(TEST.pixels)
    assert features.shape == (300, 64)
    assert (features.std(0) > 0.1).all()  # none of them dead
    assert classifier.features(network, TRAIN).var(0).mean().item() == pytest.approx(1, abs=1e-5)  # in float32


def test_training_the_classifier_is_a_pure_function():
    """Bit for bit, whatever the global generator, the gradient mode and the threads, and it leaves them alone."""
    before, threads = torch.random.get_rng_state(), torch.get_num_threads()
    one = classifier.train(TRAIN, steps=30).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    try:
        torch.manual_seed(5)
        torch.set_num_threads(2)
        with torch.no_grad():
            two = classifier.train(TRAIN, steps=30).state_dict()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    other = classifier.train(TRAIN, steps=30, seed=1).state_dict()
    for name, value in one.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, two[name]), name
        assert not torch.equal(value, other[name]), name


def test_rounding_errors_do_not_change_the_classifier(monkeypatch):
    """As another processor might make them: a nudge of all weights by a few float64 ε at the start moves hardly any float32 at the end.

    After n steps the nudge has grown to g·1e-15, and a float32 weight flips with probability g·1e-15/6e-8: below 1 in 1,000 while g < 6e4.
    """

    class Nudged(classifier.Classifier):
        def double(self):
            super().double()
            generator = torch.Generator().manual_seed(0)
            with torch.no_grad():
                for p in self.parameters():
                    p *= 1 + 1e-15 * torch.randn(p.shape, generator=generator, dtype=torch.float64)
            return self

    plain = classifier.train(TRAIN, steps=50).state_dict()
    monkeypatch.setattr(classifier, "Classifier", Nudged)
    nudged = classifier.train(TRAIN, steps=50).state_dict()
    same = torch.cat([(plain[name] == nudged[name]).flatten() for name in plain])
    assert same.double().mean() > 0.999
    torch.testing.assert_close(nudged, plain, rtol=1e-6, atol=1e-8)


def test_the_classifier_is_trained_once(home, monkeypatch):
    monkeypatch.setattr(classifier, "train", None)
    before = torch.random.get_rng_state()
    assert not classifier.load("digits").training
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_classifier_needs_labels_and_known_data():
    with pytest.raises(ValueError, match="needs labels"):
        classifier.train(Images("x", TRAIN.pixels))
    with pytest.raises(ValueError, match="has no labels"):
        classifier.accuracy(classifier.Classifier(1, 10, "x"), Images("x", TRAIN.pixels))
    with pytest.raises(ValueError, match="known: digits, mnist"):
        classifier.load("cifar10")


# --- features and references --------------------------------------------------------------------------------------------------------------


def test_each_dataset_has_its_network(home, monkeypatch):
    monkeypatch.setattr(inception, "load", lambda *, resize: resize)
    assert network_for("digits").title == network_for("digits test").title == "digits classifier"
    assert network_for("cifar10 train") == "pytorch"
    assert network_for("folder:/my digits train", resize="tensorflow") == "tensorflow"


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_features_do_not_depend_on_the_batch(home, batch):
    """Float32 sums of at most 768 terms in another order: √768·6e-8 ≈ 2e-6 of the largest feature, below 10, in each of two layers."""
    network = classifier.load("digits")
    found = features_of(TEST, network, batch=batch)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, network(TEST.pixels), rtol=0, atol=5e-5)
    torch.testing.assert_close(features_of(TEST.pixels, network, count=10, batch=batch), found[:10], rtol=0, atol=5e-5)


def test_inception_features_do_not_depend_on_the_batch():
    """With weights at random, scaled so that signals keep their size: float32 sums of up to 4,000 terms in 50 layers, to 1e-4 of the largest."""
    with torch.device("meta"):
        network = Inception()
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, value in network.state_dict().items():
        fill = torch.zeros if name.endswith(("bias", "mean", "tracked")) else torch.ones
        random = name.endswith("conv.weight")
        shape = value.shape
        state[name] = torch.randn(shape, generator=generator) * math.sqrt(2 / shape[1:].numel()) if random else fill(shape, dtype=value.dtype)
    network.load_state_dict(state, assign=True)
    pixels = torch.randint(256, (3, 3, 32, 32), generator=generator, dtype=torch.uint8)
    together, alone = (features_of(pixels, network, batch=batch) for batch in (3, 1))
    assert together.shape == (3, 2048)
    assert (together - alone).abs().max() < 1e-4 * together.abs().max()
    assert (together[0] - together[1]).abs().max() > 0.01 * together.abs().max()


def test_autocast_around_it_does_not_reach_the_features(home):
    network = classifier.load("digits")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = features_of(TEST, network)
    assert torch.equal(inside, features_of(TEST, network))


def test_files_give_the_features_of_their_images(tmp_path):
    for i in range(9):
        Image.fromarray(np.full((8, 8, 3), 20 * i, np.uint8)).save(tmp_path / f"{i}.png")
    source = Folder(tmp_path, "train")
    files = Files("folder", source, (3, 8, 8))
    pixels = torch.stack([files[i] for i in range(len(files))])
    network = Small()
    assert torch.equal(features_of(files, network, batch=3), features_of(pixels, network, batch=3))


def test_a_reference_is_computed_once_for_what_it_holds(home):
    network = Small()
    first = reference(TEST, network, count=100, batch=50)
    assert network.calls == 2
    again = reference(TEST, network, count=100, batch=10)
    assert network.calls == 2
    assert torch.equal(first.features, again.features)
    assert torch.equal(first.features, features_of(TEST, network, count=100, batch=50))
    assert frechet(first.moments, again.moments) < 1e-12
    assert (again.moments.count, again.name) == (100, "digits test")
    network.calls = 0
    changed = TEST.pixels.clone()
    changed[50, 0, 3, 3] += 1
    reference(Images("digits test", changed), network, count=100)  # the same name, other images
    reference(TEST, network, count=99)
    other = Small()
    other.mix += 1
    reference(TEST, other, count=100)
    reference(TEST, Small("tensorflow"), count=100)
    assert (network.calls, other.calls) == (4, 2)
    names = sorted(file.name for file in (home / "statistics").iterdir())
    assert len(names) == 5
    assert names[1].startswith("digits_test-1x8x8-100-Inception_2015_12_05-pytorch-")


# --- scores -------------------------------------------------------------------------------------------------------------------------------


def test_scores_of_digits(home):
    """Real digits are near, shuffled pixels far; a set is at distance 0 from itself, with everything covered."""
    real = compare_images(TEST.pixels, TRAIN, solver="ddim", steps=50)
    itself = compare_images(TRAIN.pixels, TRAIN)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    broken = compare_images(TEST.pixels.flatten(1)[:, order].reshape(-1, 1, 8, 8), TRAIN)
    assert itself.frechet < 1e-9
    assert (itself.precision, itself.recall) == (1, 1)
    assert 0 < real.frechet < broken.frechet / 10
    assert real.kernel.mean < broken.kernel.mean / 10
    assert real.precision > 0.8 > 0.2 > broken.precision
    network = classifier.load("digits")
    expected = frechet(Moments.of(network(TEST.pixels)), Moments.of(network(TRAIN.pixels)))
    assert real.frechet == pytest.approx(expected, rel=1e-5)  # float32 features, in batches of another size


def test_scores_say_what_they_were_measured_on(home):
    scores = compare_images(TEST.pixels, TRAIN, solver="ddim", steps=50)
    assert (scores.count, scores.reference_count, scores.dimensions, scores.resize) == (300, 1497, 64, None)
    lines = str(scores).splitlines()
    where = "(300 samples, DDIM 50, against 1,497 of digits train, digits classifier"
    assert lines[0] == f"Fréchet distance (digits classifier) {scores.frechet:.4g} {where})"
    assert lines[1] == f"kernel distance (digits classifier) {scores.kernel.mean:.3g} ± {scores.kernel.std:.2g} {where}; 100 subsets of 300)"
    assert lines[2].startswith(f"precision {scores.precision:.3f}, recall {scores.recall:.3f} (300 of 300 samples, DDIM 50, against 1,497 of")
    assert "FID" not in str(scores)
    assert "KID" not in str(scores)


INCEPTION = Scores(
    frechet=12.3456,
    kernel=Spread(0.0123, 0.0004),
    precision=0.7,
    recall=0.5,
    count=10_000,
    reference="cifar10 train",
    reference_count=50_000,
    network="Inception 2015-12-05",
    dimensions=2048,
    resize="pytorch",
    solver="ddim",
    steps=50,
)


def test_fid_is_printed_as_is_usual():
    lines = str(INCEPTION).splitlines()
    assert lines[0] == "FID 12.35 (10,000 samples, DDIM 50, against 50,000 of cifar10 train, Inception 2015-12-05)"
    assert lines[1].startswith("KID 0.0123 ± 0.0004 (10,000 samples, DDIM 50, against 50,000 of")
    assert "against 10,000 of cifar10 train" in lines[2]
    other = Scores(**{**INCEPTION.__dict__, "resize": "tensorflow", "count": 2048, "solver": None})
    line = str(other).splitlines()[0]
    assert line.startswith(
        "FID 12.35 (2,048 samples, solver not known, against 50,000 of cifar10 train, Inception 2015-12-05, TensorFlow's resize); "
    )
    assert line.endswith("too few samples: up to 2,048, the dimensions of the features, covariances are singular and the distance too large")
    assert not Scores(**{**INCEPTION.__dict__, "count": 2049}).warning


def test_pictures_must_be_like_the_dataset(home):
    with pytest.raises(Mistake, match=r"digits train has uint8 images of 1x8x8, but the pictures are torch.uint8 of shape \(5, 3, 8, 8\)"):
        compare_images(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), TRAIN)
    with pytest.raises(Mistake, match="float32"):
        compare_images(torch.zeros(5, 1, 8, 8), TRAIN)
    with pytest.raises(Mistake, match="too few"):
        compare_images(TEST.pixels[:3], TRAIN)


def test_inception_score_of_known_logits_or_a_reason():
    network = Small()
    score = inception_score(TEST.pixels, network, batch=100)
    p = network(TEST.pixels)[:, :4].double().softmax(1).detach().reshape(10, 30, 4)
    parts = (p * (p / p.mean(1, keepdim=True)).log()).sum(2).mean(1).exp()
    assert score == pytest.approx((parts.mean().item(), parts.std(correction=0).item()), rel=1e-5)
    with torch.no_grad():
        network.fc.weight.zero_()
    network.calls = 0
    with pytest.raises(Mistake, match="classifier layer"):
        inception_score(TEST.pixels, network)
    assert network.calls == 0  # refused before the work, not after


# --- the bound and the loss ---------------------------------------------------------------------------------------------------------------

SCHEDULE = nc.schedule("linear", steps=60, beta_end=0.2)
assert isinstance(SCHEDULE, Discrete)


class Guess(nn.Module):
    """A model with dropout and a preference: some of its input, scaled by the step and, where it is told, by the label."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x_t: Tensor, t: Tensor, labels: Tensor | None = None) -> Tensor:
        told = 1 if labels is None else 1 + labels.reshape(-1, 1, 1, 1) / 20
        return self.drop(x_t) * (0.5 + t.reshape(-1, 1, 1, 1) / 200) * told


def test_bits_per_dim_is_the_mean_of_the_bound():
    """One batch: the same noise, so the same figure. In evaluation mode, from which the model comes back."""
    model = Guess().train()
    found = bits_per_dim(model, SCHEDULE, "eps", TEST, n=40, batch=40, seed=3, variance="fixed-small")
    assert model.training
    x0 = scaled(TEST.pixels[:40])
    values = bound(SCHEDULE, "eps", Guess().eval(), x0, variance="fixed-small", generator=torch.Generator().manual_seed(3)).bits_per_dim
    assert found.mean == pytest.approx(values.mean().item(), rel=1e-6)
    assert found.error == pytest.approx(values.std().item() / math.sqrt(40), rel=1e-6)
    assert str(found) == f"VLB {found.mean:.4g} ± {found.error:.2g} bits/dim (40 images of digits test, all 60 steps, variance fixed-small)"
    one = bits_per_dim(model, SCHEDULE, "eps", TEST, n=1, seed=3)
    assert str(one) == f"VLB {one.mean:.4g} bits/dim (1 image of digits test, all 60 steps, variance fixed-large)"  # one has no spread
    # in other batches the noise is other noise: within five of the errors
    parts = bits_per_dim(model, SCHEDULE, "eps", TEST, n=40, batch=15, seed=3, variance="fixed-small")
    assert parts.count == 40
    assert abs(parts.mean - found.mean) < 5 * found.error


def nothing(x_t: Tensor, t: Tensor) -> Tensor:
    """Predicts x0 = 0 whatever the noise, so that every term of the bound is a function of x0 and the step alone."""
    return torch.zeros_like(x_t)


def test_a_strided_bound_of_all_steps_is_the_bound():
    x0 = scaled(TEST.pixels[:20])
    whole = bound(SCHEDULE, "x0", nothing, x0).bits_per_dim
    strided = strided_bound(SCHEDULE, "x0", nothing, x0, steps=60)
    torch.testing.assert_close(strided, whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("steps", [2, 5, 13])
def test_a_strided_bound_is_unbiased(steps):
    """Over 50,000 draws for one image, whose bound is exact here: within four standard errors, and those are small enough to tell a wrong weight."""
    x0 = scaled(TEST.pixels[:1]).expand(50_000, -1, -1, -1)
    whole = bound(SCHEDULE, "x0", nothing, x0[:1])
    values = strided_bound(SCHEDULE, "x0", nothing, x0, steps=steps, generator=torch.Generator().manual_seed(steps))
    error = values.std().item() / math.sqrt(50_000)
    assert abs(values.mean().item() - whole.bits_per_dim.item()) < 4 * error
    # a weight of T/m in place of (T-1)/(m-1) would be off by this much
    wrong = abs(60 / steps / (59 / (steps - 1)) - 1) * whole.kl.sum().item() / math.log(2)
    assert wrong > 10 * error


def test_a_strided_estimate_agrees_with_the_whole_on_a_model():
    model = Guess()
    whole = bits_per_dim(model, SCHEDULE, "eps", TEST, n=300)
    some = bits_per_dim(model, SCHEDULE, "eps", TEST, n=300, steps=12)
    assert (some.steps, some.of_steps) == (12, 60)
    assert "12 of 60 steps" in str(some)
    assert abs(some.mean - whole.mean) < 4 * math.hypot(some.error, whole.error)
    assert whole.error < some.error < 0.2 * whole.mean
    assert bits_per_dim(model, SCHEDULE, "eps", TEST, n=10, steps=1000) == bits_per_dim(model, SCHEDULE, "eps", TEST, n=10)


def test_labels_reach_the_model_where_they_are_asked_for():
    for steps in (None, 10):
        plain, told = (bits_per_dim(Guess(), SCHEDULE, "eps", TEST, n=30, steps=steps, conditional=c) for c in (False, True))
        assert plain.mean != told.mean
    zeros = Images("zeros", TEST.pixels, torch.zeros_like(TEST.labels), 10)
    without = bits_per_dim(Guess(), SCHEDULE, "eps", Images("zeros", TEST.pixels), n=30)
    assert without == bits_per_dim(Guess(), SCHEDULE, "eps", zeros, n=30, conditional=True)
    with pytest.raises(Mistake, match="no labels"):
        bits_per_dim(Guess(), SCHEDULE, "eps", Images("x", TEST.pixels), conditional=True)


def test_the_bound_needs_a_chain():
    with pytest.raises(Mistake, match="Flow has none"):
        bits_per_dim(nothing, nc.schedule("flow"), "flow", TEST)
    with pytest.raises(Mistake, match="at least 2 steps"):
        bits_per_dim(nothing, SCHEDULE, "x0", TEST, steps=1)


def test_the_loss_curve_is_that_of_the_core_on_the_first_images():
    clock = nc.Clock(SCHEDULE, "uniform")
    found = loss_curve(clock, Guess(), TEST, n=32, times=7, seed=2)
    expected = loss_over_time(clock, Guess(), scaled(TEST.pixels[:32]), times=7, seed=2)
    for mine, known in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, known)
    told = loss_curve(clock, Guess(), TEST, n=32, times=7, seed=2, conditional=True)
    assert (told.loss != found.loss).all()


# --- the benchmark ------------------------------------------------------------------------------------------------------------------------


def test_the_ruler_script_runs(home, tmp_path, monkeypatch, capsys):
    """On digits and the small network, which says nothing about FID but all about the script."""
    monkeypatch.setattr(inception, "load", lambda *, resize: Small(resize))
    monkeypatch.setattr("noiseclock.lab.data.load", lambda name, split="train": {"train": TRAIN, "test": TEST}[split])
    script = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "fid_ruler.py"))
    out = tmp_path / "results" / "ruler.json"
    script["main"](["--train", "200", "--test", "100", "--precision", "fp32", "bf16", "--batch", "50", "--device", "cpu", "--out", str(out)])
    printed = capsys.readouterr().out
    found = json.loads(out.read_text())
    assert [s["precision_of_features"] for s in found["scores"]] == ["fp32", "bf16"]
    assert found["scores"][0]["frechet"] != found["scores"][1]["frechet"]
    for score in found["scores"]:
        assert (score["count"], score["reference_count"]) == (100, 200)
        assert 0 <= score["train_itself"] < 1e-9 < score["frechet"]
        assert f"{score['frechet']:.5f}" in printed
    assert found["setup"]["torch"] == torch.__version__
