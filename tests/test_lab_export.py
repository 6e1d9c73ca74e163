"""Exported pipelines: diffusers loads them and draws what `generate` draws."""

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DDIMPipeline, DiffusionPipeline
from diffusers.pipelines.ddim import pipeline_ddim
from diffusers.pipelines.ddpm import pipeline_ddpm
from diffusers.schedulers import scheduling_ddpm
from torch import nn

import noiseclock as nc
from noiseclock.core.schedules import Discrete
from noiseclock.lab.errors import Mistake
from noiseclock.lab.export import export
from noiseclock.lab.generate import generate, noise_of
from noiseclock.lab.models import build

SHAPE = (1, 8, 8)
STEPS = 20


def model_of(kind="unet", **options):
    """Random throughout: a fresh model predicts zero."""
    torch.manual_seed(0)
    sizes = {"channels": 16, "blocks": 1} if kind in ("dit", "uvit") else {"channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,)}
    model = build(kind, SHAPE, **sizes, **options).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def schedule_of(name="linear", **options) -> Discrete:
    schedule = nc.schedule(name, steps=STEPS, **({"beta_start": 5e-3, "beta_end": 0.5} if name == "linear" else {}), **options)
    assert isinstance(schedule, Discrete)
    return schedule


@pytest.fixture
def same_noise(monkeypatch):
    """Give diffusers the noise of `generate`, draw by draw, and none of its progress bars."""
    draw, count = noise_of(0, range(4), SHAPE, "cpu"), iter(range(10**6))

    def randn_tensor(shape, **_):
        assert tuple(shape) == (4, *SHAPE)
        return draw(next(count))

    for module in (pipeline_ddpm, pipeline_ddim, scheduling_ddpm):
        monkeypatch.setattr(module, "randn_tensor", randn_tensor)


def images_of(pipeline, **options) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(batch_size=4, output_type="np", **options).images.transpose(0, 3, 1, 2) * 255


CASES = {
    "linear, eps": (schedule_of(), "eps"),
    "cosine, x0": (schedule_of("cosine"), "x0"),
    "zero terminal, v": (schedule_of(zero_terminal_snr=True), "v"),
    "quadratic, v": (schedule_of("quadratic"), "v"),
}


@pytest.mark.parametrize(("case", "variance"), list(zip(CASES, ["fixed-large", "fixed-large", "fixed-small", "fixed-small"], strict=True)))
def test_all_ancestral_steps_are_the_same(tmp_path, same_noise, case, variance):
    schedule, objective = CASES[case]
    model, target = model_of(), nc.objective(objective)
    export(model, schedule, target, tmp_path / "pipeline", variance)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "pipeline")
    assert type(pipeline) is diffusers.DDPMPipeline
    expected = generate(model, schedule, target, SHAPE, 4, solver="ddpm", steps=STEPS, variance=variance)
    # half a level for rounding; float32 in both, with x0 = (x - s·eps)/a clipped, leaves less than a tenth
    assert np.abs(images_of(pipeline, num_inference_steps=STEPS) - expected.numpy()).max() < 0.6


@pytest.mark.parametrize(("case", "steps"), list(zip(CASES, [5, STEPS, 5, 10], strict=True)))
def test_ddim_from_the_same_folder_is_the_same(tmp_path, same_noise, case, steps):
    schedule, objective = CASES[case]
    model, target = model_of(), nc.objective(objective)
    export(model, schedule, target, tmp_path / "pipeline")
    pipeline = DDIMPipeline.from_pretrained(tmp_path / "pipeline")
    expected = generate(model, schedule, target, SHAPE, 4, solver="ddim", steps=steps)
    images = images_of(pipeline, num_inference_steps=steps, eta=0.0, use_clipped_model_output=True)
    assert np.abs(images - expected.numpy()).max() < 0.6


def test_an_adm_is_exported_too(tmp_path, same_noise):
    model, schedule, target = model_of("adm"), schedule_of(), nc.objective("eps")
    export(model, schedule, target, tmp_path / "pipeline")
    images = images_of(DiffusionPipeline.from_pretrained(tmp_path / "pipeline"), num_inference_steps=STEPS)
    assert np.abs(images - generate(model, schedule, target, SHAPE, 4, solver="ddpm", steps=STEPS).numpy()).max() < 0.6


def test_the_weights_and_betas_survive(tmp_path):
    model, schedule = model_of(), schedule_of()
    model.to(memory_format=torch.channels_last)  # as a trainer may keep them; safetensors takes contiguous tensors only
    export(model, schedule, nc.objective("eps"), tmp_path / "deep" / "pipeline")
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "deep" / "pipeline")
    for name, tensor in model.net.state_dict().items():
        assert torch.equal(pipeline.unet.state_dict()[name], tensor), name
    assert np.abs(pipeline.scheduler.betas.numpy() - schedule.betas).max() < 1e-7  # float32 there
    read = nc.schedule(pipeline.scheduler)
    assert isinstance(read, Discrete)
    assert read.steps == STEPS


@pytest.mark.parametrize(
    ("model", "schedule", "objective", "message"),
    [
        (model_of("dit"), schedule_of(), "eps", "no pipeline for a DiT without a VAE"),
        (model_of("uvit"), schedule_of(), "eps", "no pipeline for a UViT without a VAE"),
        (model_of(classes=3), schedule_of(), "eps", r"take no labels; save the network alone with model\.net\.save_pretrained"),
        (model_of(), nc.schedule("edm"), "edm", r"not EDM with edm; save the network alone with model\.net\.save_pretrained"),
        (model_of(), nc.schedule("flow"), "flow", "not Flow with flow"),
        (model_of(), schedule_of(), "flow", "not Linear with flow"),
    ],
)
def test_what_diffusers_cannot_hold_is_said(tmp_path, model, schedule, objective, message):
    with pytest.raises(Mistake, match=message):
        export(model, schedule, nc.objective(objective), tmp_path / "pipeline")
    assert not list(tmp_path.iterdir())


def test_other_mistakes(tmp_path):
    with pytest.raises(Mistake, match="unknown variance 'learned'"):
        export(model_of(), schedule_of(), nc.objective("eps"), tmp_path / "pipeline", "learned")
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(Mistake, match="a folder that is not empty"):
        export(model_of(), schedule_of(), nc.objective("eps"), tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
