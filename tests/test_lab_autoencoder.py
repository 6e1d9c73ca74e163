"""Autoencoders: diffusers' own numbers, folders that are wrong, and training a small one."""

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file, save_file

import noiseclock.lab.train_autoencoder as lab_train_autoencoder
import small_runs
from noiseclock.lab import autoencoder, checkpoint
from noiseclock.lab.autoencoder import Autoencoder, psnr
from noiseclock.lab.compare import Plan, compare
from noiseclock.lab.data import batches, load_images
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.order import normals
from noiseclock.lab.pictures import whole
from noiseclock.lab.train_autoencoder import Progress, Settings, publish, train_autoencoder
from noiseclock.lab.trained import opened
from small_autoencoders import KINDS, encoded, made, saved
from small_runs import content, differing


def pictures(n: int = 5, channels: int = 1, size: int = 8) -> torch.Tensor:
    return torch.randint(0, 256, (n, channels, size, size), generator=torch.Generator().manual_seed(n), dtype=torch.uint8)


@pytest.mark.parametrize("kind", KINDS)
def test_latents_and_pictures_are_diffusers_own(tmp_path, monkeypatch, kind):
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
    monkeypatch.setattr(autoencoder, "AT_A_TIME", 2 * 32 * 32)  # two at a time, because latents of 4x4 are taken for pictures of 32x32
    assert (mine.decode(mean).int() - decoded.int()).abs().max() <= 1
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
    [((3, 8, 8), "the pictures have 3 channels, but the AutoencoderKL takes 1"), ((1, 9, 9), "returns pictures of 1x9x9 as 1x8x8; give a size")],
)
def test_pictures_that_do_not_fit_are_named(tmp_path, shape, message):
    with pytest.raises(Mistake, match=message):
        autoencoder.load(saved(tmp_path)).latent_shape(shape)


def test_a_wrong_folder_is_one_sentence(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(Mistake, match=r"there is no autoencoder in .*nowhere: it has no config\.json; give the folder that diffusers'"):
        autoencoder.load(tmp_path / "nowhere")
    saved(tmp_path / "pipeline" / "vae")
    with pytest.raises(Mistake, match=r"it has no config\.json; give .*pipeline/vae"):
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


@pytest.mark.parametrize("kind", KINDS)
def test_an_autoencoder_without_all_its_weights_is_refused(tmp_path, kind):
    file = saved(tmp_path, kind) / "diffusion_pytorch_model.safetensors"
    autoencoder.load(tmp_path)
    weights = load_file(file)
    lost = min(weights)
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(Mistake, match=f"the {kind} in .* lacks 1 of its weights, the first is {lost}; save it again"):
        autoencoder.load(tmp_path)


# --- training one -------------------------------------------------------------------------------------------------------------------------

SMALL = Settings("digits", channels=8, factor=2, latent_channels=2, lr=3e-3, updates=60, save_every=20)


def trained(settings: Settings, folder: Path, stop: int | None = None) -> list[Progress]:
    found, updates = [], train_autoencoder(settings, folder)
    for record in updates:
        found.append(record)
        if record.step == stop:
            updates.close()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, list[Progress]]:
    folder = tmp_path_factory.mktemp("trained") / "digits"
    return folder, trained(SMALL, folder)


def test_training_brings_pictures_nearer(run):
    folder, records = run
    held_out = load_images("digits", split="test").pixels[:256]
    torch.manual_seed(0)
    start = psnr(Autoencoder(SMALL.network((1, 8, 8))), held_out)
    end = psnr(autoencoder.load(folder), held_out)
    # 7.2 dB at the start, 14.4 after 60 updates; every pixel at its mean over the pictures would be 11.4
    assert start < 8
    assert end > start + 5
    assert [record.step for record in records if record.psnr is not None] == [20, 40, 60]
    assert records[-1].psnr == pytest.approx(end, abs=1e-3)
    assert records[-1].l1 < 0.5 * records[0].l1
    logged = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["psnr"], line["seconds"]) for line in logged] == [(r.step, r.psnr, r.seconds) for r in records if r.psnr is not None]


def test_what_was_trained_is_loaded_by_diffusers(run):
    folder, _ = run
    theirs = AutoencoderKL.from_pretrained(str(folder), local_files_only=True)
    assert theirs.config.block_out_channels == [8, 16]
    assert theirs.config.latent_channels == 2
    spread = autoencoder.load(folder).encode(load_images("digits", split="test").pixels[:256]).mean.std()
    assert theirs.config.scaling_factor == pytest.approx(1 / float(spread), rel=1e-5)


def test_training_resumes_to_the_bit(tmp_path, run):
    whole, records = run
    assert len(trained(SMALL, tmp_path, stop=33)) == 33
    autoencoder.load(tmp_path)  # what was reached can be used
    rest = trained(SMALL, tmp_path)
    assert [record.step for record in rest] == list(range(34, 61))
    assert [(r.l1, r.kl, r.psnr) for r in rest if r.step not in (33, 40)] == [(r.l1, r.kl, r.psnr) for r in records[33:] if r.step != 40]
    mine, theirs = (checkpoint.load(folder)[1] for folder in (tmp_path, whole))
    assert not differing(mine["model"], theirs["model"])
    assert not differing(mine["optimizer"], theirs["optimizer"])
    assert (tmp_path / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert trained(SMALL, tmp_path) == []
    assert [r.step for r in trained(replace(SMALL, updates=61), tmp_path)] == [61]


def test_what_was_killed_between_its_last_checkpoint_and_the_autoencoder_is_made_good(tmp_path, monkeypatch, run):
    whole, _ = run

    def killed(net, folder):
        raise KeyboardInterrupt

    trained(SMALL, tmp_path, stop=40)
    with monkeypatch.context() as patch:
        patch.setattr(lab_train_autoencoder, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(SMALL, tmp_path / "none")  # at the first of all checkpoints
        patch.setattr(lab_train_autoencoder, "publish", lambda net, folder: killed(net, folder) if checkpoint.steps(folder)[-1] == 60 else None)
        with pytest.raises(KeyboardInterrupt):
            trained(SMALL, tmp_path)
    assert trained(SMALL, tmp_path) == []  # nothing is left to be trained
    assert trained(SMALL, tmp_path / "none")[-1].step == 60
    for folder in (tmp_path, tmp_path / "none"):
        assert autoencoder.load(folder).digest == autoencoder.load(whole).digest
        assert [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()] == [20, 40, 60]


def test_an_autoencoder_that_does_not_fit_on_the_disk_is_a_sentence(tmp_path, run):
    net = autoencoder.load(run[0]).net
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, before[1]))  # Python ignores the signal, and the write fails
    try:
        with pytest.raises(Failure, match=r"could not write the autoencoder into .*File too large"):
            publish(net, tmp_path)
        with pytest.raises(Failure, match=r"could not be written: .*File too large"):
            whole(tmp_path / "copy", lambda new: net.save_pretrained(str(new)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_between_two_updates_ends_it_with_a_checkpoint_of_all(tmp_path):
    def stopped() -> None:
        for record in train_autoencoder(SMALL, tmp_path):
            if record.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="143"):
        stopped()
    assert checkpoint.steps(tmp_path) == [4]


def test_l1_and_kl_are_what_they_are_called(tmp_path):
    """The first update's, by hand."""
    x0, _ = next(batches(load_images("digits"), 32, seed=0))
    torch.manual_seed(0)
    net = SMALL.network((1, 8, 8))
    with torch.no_grad():
        posterior = net.encode(x0).latent_dist
        mean, logvar = posterior.mean.double(), posterior.logvar.double()
        z = posterior.mean + posterior.std * normals(0, "posterior", 0, 32, (2, 4, 4), "cpu")
        l1 = (net.decode(z).sample - x0).abs().mean()
    kl = 0.5 * (mean**2 + logvar.exp() - 1 - logvar).sum() / x0.numel()
    first = trained(replace(SMALL, updates=1), tmp_path)[0]
    assert first.l1 == pytest.approx(float(l1), rel=1e-5)
    assert first.kl == pytest.approx(float(kl), rel=1e-5)


def test_the_default_halves_faces_three_times():
    net = Settings("folder:faces", size=128).network((3, 128, 128))
    assert list(net.config.block_out_channels) == [32, 64, 128, 128]
    assert Autoencoder(net).latent_shape((3, 128, 128)) == (4, 16, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factor": 3}, "factor must be 2, 4, 8 or another power of 2, got 3"),
        ({"channels": 6}, "channels must be a multiple of 4, got 6"),
        ({"updates": 0}, "updates must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"factor": 16}, "pictures of 8x8 cannot be halved 4 times; give a smaller factor"),
        ({"data": "nothing"}, "unknown data 'nothing'"),
    ],
)
def test_mistakes_in_settings_are_named(tmp_path, changes, message):
    with pytest.raises(Mistake, match=message):
        trained(replace(SMALL, **changes), tmp_path / "new")
    assert not (tmp_path / "new" / "checkpoints").exists()


def test_folders_of_others_are_left_alone(tmp_path, run):
    folder, _ = run
    with pytest.raises(Mistake, match=r"holds another training; .*\nlr: 0\.1 here, 0\.003 in the checkpoint"):
        trained(replace(SMALL, lr=0.1), folder)
    saved(tmp_path / "autoencoder")
    small_runs.trained(replace(small_runs.TINY, updates=1), tmp_path / "diffusion")
    for other in ("autoencoder", "diffusion"):
        before = content(tmp_path / other)
        with pytest.raises(Mistake, match="holds something that was not trained by this command; choose another folder"):
            trained(SMALL, tmp_path / other)
        assert content(tmp_path / other) == before
    with pytest.raises(Mistake, match=r"config.json is damaged or is not that of a training; choose another folder"):
        small_runs.trained(small_runs.TINY, tmp_path / "autoencoder")


def test_an_autoencoder_is_not_taken_for_a_diffusion_model(tmp_path, run):
    folder, _ = run
    message = "holds an autoencoder; give the folder of a diffusion training"
    with pytest.raises(Mistake, match=message):
        opened(folder)
    with pytest.raises(Mistake, match=f"cannot start from .*digits: it {message}"):
        small_runs.trained(replace(small_runs.TINY, pretrained=str(folder)), tmp_path)


def test_no_training_goes_into_a_folder_of_latents(tmp_path, run):
    folder, _ = run
    encoded(tmp_path, folder)
    before = content(tmp_path)
    for start in (lambda: trained(SMALL, tmp_path), lambda: small_runs.trained(small_runs.TINY, tmp_path)):
        with pytest.raises(Mistake, match="holds latents or embedded captions; choose another folder"):
            start()
    plan = Plan("digits", small_runs.TINY, ("uniform",), (0,), (1e-3,), 8, samples=0)
    with pytest.raises(Mistake, match="holds latents or embedded captions; choose another folder"):
        next(compare(plan, tmp_path, device="cpu"))
    assert content(tmp_path) == before


def test_a_loss_that_is_not_finite_ends_it(tmp_path):
    with pytest.raises(Failure, match=r"the loss was not finite at update \d+; there is no checkpoint yet; lower lr"):
        trained(replace(SMALL, lr=1e30), tmp_path)
