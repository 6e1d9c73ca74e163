"""Loops as others write them: the examples run, and compute what k-diffusion and flow_matching compute."""

import importlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import noiseclock as nc

pytestmark = pytest.mark.integrations

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an example in a folder of its own; gives the lines that it prints and its names. Not as a process: imports take longer than the run."""
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)

    def main(name, *options):
        monkeypatch.setattr(sys, "argv", [name, *options])
        capsys.readouterr()
        scope = runpy.run_path(str(EXAMPLES / f"{name}.py"))
        return capsys.readouterr().out.splitlines(), scope

    return main


# --- plain PyTorch ------------------------------------------------------------------------------------------------------------------------


def test_the_plain_loop_resumes_bit_for_bit(run, tmp_path):
    whole, _ = run("plain", "--updates", "60", "--checkpoint", "whole.pt")
    run("plain", "--updates", "30", "--checkpoint", "parts.pt")
    half = torch.load(tmp_path / "parts.pt")
    assert run("plain", "--updates", "60", "--checkpoint", "parts.pt")[0] == whole
    states = [torch.load(tmp_path / name) for name in ("whole.pt", "parts.pt")]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name])
        assert not torch.equal(value, half["model"][name])
    assert states[0]["clock"]["updates"] == states[1]["clock"]["updates"] == 60
    assert torch.equal(states[0]["clock"]["sampler"]["pending"], states[1]["clock"]["sampler"]["pending"])
    told = [float(number) for line in whole for number in re.findall(r"\d\.\d{4}", line)]
    assert len(told) == 8
    assert all(0 < number < 3 for number in told)  # v has a variance of about 1, of which a new network predicts nothing


# --- k-diffusion --------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def k_diffusion(monkeypatch):
    """k-diffusion's own `utils` and `layers`, without the rest of the package, and with what these two do not use here left out."""
    spec = importlib.util.find_spec("k_diffusion")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("k-diffusion is not installed")
    package = ModuleType("k_diffusion")
    package.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "k_diffusion", package)
    for name in ("torchvision", "torchvision.transforms", "torchsde", "torchdiffeq", "dctorch", "einops"):
        left_out = ModuleType(name)
        left_out.functional = left_out.odeint = left_out.rearrange = left_out.repeat = None
        monkeypatch.setitem(sys.modules, name, left_out)
    for name in ("utils", "sampling", "layers"):
        monkeypatch.delitem(sys.modules, f"k_diffusion.{name}", raising=False)
        try:
            setattr(package, name, importlib.import_module(f"k_diffusion.{name}"))
        except ImportError as error:
            pytest.skip(f"k_diffusion.{name} cannot be imported: {error}")
    yield package
    for name in ("utils", "sampling", "layers"):
        sys.modules.pop(f"k_diffusion.{name}", None)


def test_the_k_diffusion_loop_runs(run):
    lines, _ = run("k_diffusion_style", "--updates", "5")
    sigmas = [float(re.search(r"σ = (\S+)", line)[1]) for line in lines]
    # six times in the middle of equal parts of ln σ from ln 0.01 to ln 80
    assert sigmas == pytest.approx([0.01 * 8000 ** ((i + 0.5) / 6) for i in range(6)], rel=0.01)


def test_our_density_is_k_diffusions_log_normal(k_diffusion):
    """Their draws of σ, from uniforms that we know, are the same quantiles of our density."""
    wide = nc.schedule("edm", sigma_min=1e-5, sigma_max=1e3)  # beyond which one draw in 10^11 lies
    density = nc.LogNormal(-1.2, 1.2, schedule=wide)
    torch.manual_seed(0)
    theirs = k_diffusion.utils.rand_log_normal((4096,), loc=-1.2, scale=1.2).double().log()
    torch.manual_seed(0)
    ours = wide.log_sigma(density.icdf(torch.rand(4096).double()))
    # their uniforms are float32 moved by up to 1e-7, and a normal quantile moves by that over φ(z): 2e-6 within two deviations, 1e-3 in the tails
    middle = ((ours + 1.2) / 1.2).abs() < 2
    assert (ours - theirs)[middle].abs().max() < 5e-6
    assert (ours - theirs).abs().max() < 2e-3
    assert theirs.std() > 1  # there is something to compare


def test_their_log_uniform_is_our_uniform(k_diffusion):
    schedule = nc.schedule("edm", sigma_min=0.01, sigma_max=80.0)
    torch.manual_seed(0)
    theirs = k_diffusion.utils.rand_log_uniform((4096,), 0.01, 80.0).double().log()
    torch.manual_seed(0)
    ours = schedule.log_sigma(nc.Uniform().icdf(torch.rand(4096).double()))
    assert (ours - theirs).abs().max() < 2e-6  # float32 of numbers up to 4.6


WEIGHTS = {"karras": nc.Constant(), "soft-min-snr": nc.SoftMinSNR(4.0), "snr": nc.Constant(on="eps")}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("sigma_data", [0.5, 1.0])
def test_our_loss_is_the_denoisers(name, sigma_data, k_diffusion, run):
    """The same data, noise, σ and inner model, the example's: the same (B,) losses, for each of k-diffusion's weightings."""
    _, scope = run("k_diffusion_style", "--updates", "2")
    inner, edm = scope["inner"].double(), scope["edm"]
    weighting = nc.SoftMinSNR(1 / sigma_data**2) if name == "soft-min-snr" else WEIGHTS[name]
    clock = nc.Clock(edm, scope["clock"].sampler, weighting, nc.objective("edm", sigma_data=sigma_data))
    b = clock.draw(scope["digits"][:32].double())
    sigma = edm.log_sigma(b.time).exp()
    theirs = k_diffusion.layers.Denoiser(inner, sigma_data, weighting=name).loss(b.x0, b.noise, sigma)
    ours = clock.loss(b, inner(b.x_t, sigma))
    # float64 but for the angles, of which a few digits are lost
    assert (ours / theirs - 1).abs().max() < 1e-9
    assert theirs.max() / theirs.min() > 1.1  # not all alike
    # what the model is told is ln σ/4, in float32
    assert ((4 * b.t).exp() / sigma - 1).abs().max() < 1e-6


def test_the_example_trains_with_these(run):
    clock = run("k_diffusion_style", "--updates", "2")[1]["clock"]
    assert clock.sampler == nc.LogNormal(-1.2, 1.2, schedule=clock.schedule)
    assert clock.weighting == WEIGHTS["soft-min-snr"]
    assert clock.objective.sigma_data == 0.5
    assert not clock.corrected
    assert clock.updates == 2


# --- flow matching ------------------------------------------------------------------------------------------------------------------------


def test_the_flow_matching_loop_learns(run):
    (line,), _ = run("flow_matching_style", "--updates", "600")
    share = int(re.search(r"(\d+)%", line)[1])
    assert share > 60  # a new network leaves the noise as it is, of which a fifth lies in a heap


@pytest.mark.parametrize("kind", ["CondOTProbPath", "AffineProbPath"])
def test_our_batch_is_the_sample_of_their_path(kind, run):
    path = pytest.importorskip("flow_matching.path")
    made = path.CondOTProbPath() if kind == "CondOTProbPath" else path.AffineProbPath(path.scheduler.CondOTScheduler())
    _, scope = run("flow_matching_style", "--updates", "1")
    clock, vf = scope["clock"], scope["vf"].double()
    b = clock.draw(scope["blobs"](64).double())
    theirs = made.sample(x_0=b.noise, x_1=b.x0, t=1 - b.time)  # their time 1 is data, ours is noise
    # float64 throughout, with sums in another order
    assert (theirs.x_t - b.x_t).abs().max() < 1e-14
    assert (theirs.dx_t + b.target).abs().max() < 1e-14
    loss = (vf(theirs.x_t, theirs.t) - theirs.dx_t).square().mean(1)
    assert (clock.loss(b, -vf(b.x_t, 1 - b.time)) / (loss * b.weight * b.correction) - 1).abs().max() < 1e-12
    assert b.t.min() < 0.1 < 0.9 < b.t.max()  # times of both ends were compared


# --- Lightning ----------------------------------------------------------------------------------------------------------------------------


def test_the_lightning_loop_runs_and_goes_on(tmp_path):
    pytest.importorskip("lightning")
    pytest.importorskip("sklearn")

    def said(epochs):
        command = [sys.executable, "-W", "ignore", EXAMPLES / "lightning_loop.py", "--epochs", epochs]
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    # 1797 digits are 57 batches, two to an update, and one update for the last
    assert said("1").startswith("29 updates; ")
    second = said("2")
    assert second.startswith("58 updates; ")
    probes, rho = (float(re.search(rf"{name} (\S+?)(,|$)", second)[1]) for name in ("probes", "rho"))
    assert probes == 11  # at updates 0, 1, 3, 6, 10, 15, 21, 28, 36, 45 and 55
    assert 0 < rho <= 1
