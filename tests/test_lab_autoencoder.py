"""Autoencoders: diffusers' own numbers, and folders that are wrong."""

import json

import pytest
import torch

from noiseclock.lab import autoencoder
from noiseclock.lab.errors import Mistake
from small_autoencoders import KINDS, made, saved


def pictures(n: int = 5, channels: int = 1, size: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, size, size), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_pictures_are_diffusers_own(tmp_path, kind):
    theirs, mine = made(kind).requires_grad_(False), autoencoder.load(saved(tmp_path, kind))
    x = pictures().float() / 127.5 - 1
    with torch.no_grad():
        found = theirs.encode(x)
        mean = found.latent_dist.mean if kind == "AutoencoderKL" else found.latents
        back = theirs.decode(mean).sample
    # the same numbers, because it is the same computation on the same batch
    latents = mine.encode(pictures())
    assert torch.equal(latents.mean, mean)
    assert latents.mean.dtype == torch.float32
    if kind == "AutoencoderKL":
        assert torch.equal(latents.std, found.latent_dist.std)
    else:
        assert latents.std is None
    decoded = mine.decode(latents.mean)
    assert decoded.dtype == torch.uint8
    assert torch.equal(decoded, ((back + 1) * 127.5).round().clamp(0, 255).byte())
    # in parts too, but for rounding; a difference of one in 255 is where rounding tips over
    assert (mine.encode(pictures(), batch=2).mean - mean).abs().max() < 1e-5
    assert (mine.decode(mean, batch=2).int() - decoded.int()).abs().max() <= 1
    assert mine.latent_shape((1, 8, 8)) == (2, 4, 4)


def test_a_decoder_of_quantised_latents_quantises(tmp_path):
    mine = autoencoder.load(saved(tmp_path, "VQModel"))
    latents = mine.encode(pictures()).mean
    codes = mine.net.quantize(latents)[0]
    assert not torch.equal(latents, codes)
    assert torch.equal(mine.decode(latents), mine.decode(codes))


def test_it_computes_in_float32_whatever_it_is_called_in_and_leaves_random_numbers_alone(tmp_path):
    saved(tmp_path)
    before = torch.get_rng_state()
    mine = autoencoder.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    alone = mine.encode(pictures()).mean
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mine.encode(pictures()).mean, alone)
    assert not mine.net.training
    assert not any(p.requires_grad for p in mine.net.parameters())


def test_its_digest_tells_weights_apart(tmp_path):
    one, same, other = (autoencoder.load(saved(tmp_path / str(i), seed=seed)) for i, seed in enumerate((0, 0, 1)))
    assert one.digest == same.digest != other.digest


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 8, 8), "the pictures have 3 channels and the AutoencoderKL sees 1"), ((1, 9, 9), "pictures of 1x9x9 come back .* as 1x8x8; give a size")],
)
def test_pictures_that_do_not_fit_are_named(tmp_path, shape, message):
    with pytest.raises(Mistake, match=message):
        autoencoder.load(saved(tmp_path)).latent_shape(shape)


def test_a_wrong_folder_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(Mistake, match="there is no autoencoder in .*nowhere: it has no config.json; give the folder that diffusers'"):
        autoencoder.load(tmp_path / "nowhere")
    saved(tmp_path / "pipeline" / "vae")
    with pytest.raises(Mistake, match="it has no config.json; give .*pipeline/vae"):
        autoencoder.load(tmp_path / "pipeline")
    config = tmp_path / "config.json"
    for text in ("{", "[]", "{}"):
        config.write_text(text)
        with pytest.raises(Mistake, match=r"config\.json does not name a class of diffusers"):
            autoencoder.load(tmp_path)
    config.write_text(json.dumps({"_class_name": "UNet2DModel"}))
    with pytest.raises(Mistake, match=r"unknown class of autoencoder in .* 'UNet2DModel'; known: AutoencoderKL, VQModel, AutoencoderTiny"):
        autoencoder.load(tmp_path)
    config.write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(Mistake, match="cannot load the AutoencoderKL in") as found:
        autoencoder.load(tmp_path)
    assert "\n" not in str(found.value)
    weights = saved(tmp_path / "cut") / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(Mistake, match="cannot load the AutoencoderKL in"):
        autoencoder.load(tmp_path / "cut")
