import pytest
import torch
from rich.console import Console

import noiseclock as nc
from noiseclock.lab import demo
from noiseclock.lab.toy import GaussianMixture, ring


def test_training_closes_most_of_the_gap_and_the_best_model_has_none():
    data = ring()
    torch.manual_seed(0)
    untrained = sum(demo.excess(data, demo.Denoiser(), samples=100))
    model, seconds = demo.train(data, nc.Uniform(), nc.Constant(), steps=400, seed=0)
    assert sum(demo.excess(data, model, samples=100)) < untrained / 4
    assert seconds > 0

    class Exact(torch.nn.Module):
        def forward(self, x_t, t):
            a, s = (c.reshape(-1, 1) for c in nc.schedule("linear")((t.double() + 0.5) / 1000))
            return GaussianMixture(data.means.double(), data.std).eps(x_t.double(), a, s)

    # x_t reaches the model in float32: 6e-8 divided by s = 0.01, squared
    assert max(demo.excess(data, Exact(), samples=100)) < 1e-9


def test_excess_is_the_loss_above_its_optimum():
    """E‖eps - f‖² - E‖eps - best‖² = E‖f - best‖², here with the zero prediction, whose loss is 1."""
    data = ring()

    class Zero(torch.nn.Module):
        def forward(self, x_t, t):
            return torch.zeros_like(x_t)

    for shown, bottom in zip(demo.excess(data, Zero(), samples=2000), demo.least(data), strict=True):
        assert abs(shown - (1 - bottom)) < 0.02  # 20 levels × 2000 points, and 10 levels for 20


def test_main_prints_every_method_within_80_columns(monkeypatch, capsys):
    monkeypatch.setattr(demo, "Console", lambda: Console(width=80, force_terminal=False))
    demo.main(steps=3)
    out = capsys.readouterr().out
    for name in (*demo.SAMPLERS, *(n for n in demo.WEIGHTINGS if n != "constant"), "uniform", "least possible loss"):
        assert name in out, name
    assert "…" not in out
    assert max(len(line) for line in out.splitlines()) <= 80


def test_same_seed_same_run():
    models = [demo.train(ring(), nc.SpeeD(), nc.MinSNR(), steps=5, seed=1)[0] for _ in range(2)]
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.slow
def test_the_demo_shows_what_the_readme_says_of_it():
    """Over three seeds at full length: EDM's log-normal wins at low noise and loses at high noise, P2 the other way round."""
    data = ring()

    def bands(sampler, weighting):
        runs = [demo.excess(data, demo.train(data, sampler, weighting, steps=800, seed=seed)[0]) for seed in range(3)]
        return torch.tensor(runs)

    uniform = bands(nc.Uniform(), nc.Constant())
    log_normal, p2 = bands(nc.LogNormal(), nc.Constant()), bands(nc.Uniform(), nc.P2(normalize=True))
    assert log_normal[:, 0].max() < uniform[:, 0].min() / 2
    assert log_normal[:, -1].min() > 10 * uniform[:, -1].max()
    assert p2[:, 0].min() > uniform[:, 0].max()
    assert p2[:, -1].max() < uniform[:, -1].min()
