"""Models that are told captions: the network, trainings on pictures and on latents, samples that are asked for, and mistakes in all of it."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import small_autoencoders
from noiseclock.core.probes import Probe
from noiseclock.lab.built import network, sampled
from noiseclock.lab.captions import EmbeddedSet, embed, prompted
from noiseclock.lab.data import batches, head, load
from noiseclock.lab.encoder import Encoder
from noiseclock.lab.errors import Mistake
from noiseclock.lab.generate import generate, noise_of
from noiseclock.lab.models import UVIT, build, count
from noiseclock.lab.models.dit import CrossAttention
from noiseclock.lab.trained import opened
from shapes import CAPTIONS, KINDS, LENGTH, WORDINGS, judged, write_embedded, write_encoder, write_shapes
from small_runs import TINY, differing, run_of, said, state_of, trained


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_embedded(tmp_path_factory.mktemp("captions"))


@pytest.fixture
def settings(place):
    return replace(TINY, data=f"captions:{place / 'embedded'}", conditional=True, model="uvit", batch=8, patch=8)


def model(kind="uvit", length=LENGTH, blocks=2):
    """A network that is far from its start, so that every part of it counts."""
    torch.manual_seed(0)
    net = build(kind, (3, 8, 8), channels=32, blocks=blocks, head_channels=16, empty=torch.zeros(length, 16, dtype=torch.float16))
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3 if kind == "uvit" else 0.15)  # a U-ViT's signal passes the weights of every norm
    return net


both = pytest.mark.parametrize("kind", ["uvit", "dit"])


# --- the network --------------------------------------------------------------------------------------------------------------------------


def test_u_vit_s_with_clip_has_the_45_million_of_the_paper():
    """2209.12152: U-ViT-S on MS-COCO, latents 32×32×4 and 77 tokens of 768, without encoder and autoencoder."""
    with torch.device("meta"):
        net = build("uvit", (4, 32, 32), empty=torch.zeros(77, 768, dtype=torch.float16), **UVIT["S"])
    assert abs(count(net) / 1e6 - 45) <= 0.5


@both
@torch.no_grad()
def test_a_token_of_zeros_is_as_good_as_none(kind):
    """A network of 5 tokens with the same weights gives the same for captions of 5."""
    net, short = model(kind, 8), model(kind, 5)
    state = net.state_dict()
    if kind == "uvit":  # words have places of their own there
        state["positions"] = torch.cat([state["positions"][:6], state["positions"][9:]])
    state["null"] = state["null"][:5]
    short.load_state_dict(state)
    generator = torch.Generator().manual_seed(0)
    x, text = torch.randn(3, 3, 8, 8, generator=generator), torch.randn(3, 5, 16, generator=generator)
    filled = torch.cat([text, torch.zeros(3, 3, 16)], 1)
    wanted = short(x, torch.tensor([1, 2, 3]), text)
    # some tens of float32 operations on values of order one to ten, each rounded at 6e-8
    assert (net(x, torch.tensor([1, 2, 3]), filled) - wanted).abs().max() < 1e-5
    filled[:, 6] = 1
    assert (net(x, torch.tensor([1, 2, 3]), filled) - wanted).abs().max() > 0.01


@torch.no_grad()
def test_cross_attention_is_that_of_torch():
    torch.manual_seed(0)
    mine, theirs = CrossAttention(32, 2, 0.0), nn.MultiheadAttention(32, 2, batch_first=True)
    theirs.in_proj_weight.copy_(torch.cat([mine.q.weight, mine.kv.weight]))
    theirs.in_proj_bias.copy_(torch.cat([mine.q.bias, mine.kv.bias]))
    theirs.out_proj.load_state_dict(mine.mix.state_dict())
    h, words, seen = torch.randn(3, 7, 32), torch.randn(3, 5, 32), torch.rand(3, 5) < 0.6
    seen[:, 0] = True
    wanted = theirs(h, words, words, key_padding_mask=~seen, need_weights=False)[0]
    assert (mine(h, words, seen[:, None, None]) - wanted).abs().max() < 1e-6  # sums of 32 products of order 0.1, rounded at 6e-8


@torch.no_grad()
def test_a_new_dit_ignores_its_captions_and_a_caption_of_padding_alone_is_no_nan():
    net = build("dit", (3, 8, 8), channels=32, blocks=2, head_channels=16, empty=torch.zeros(5, 16, dtype=torch.float16))
    for layer in (net.modulation, net.out, *(block.modulation for block in net.blocks)):  # so that it predicts something
        nn.init.normal_(layer.weight, std=0.2)
    x, t, text = torch.randn(2, 3, 8, 8), torch.tensor([5, 6]), torch.randn(2, 5, 16)
    assert net(x, t, text).abs().max() > 0.01
    assert torch.equal(net(x, t, text), net(x, t, text.flip(0)))
    assert net(x, t, torch.zeros_like(text)).isfinite().all()
    nn.init.normal_(net.blocks[0].read.mix.weight, std=0.2)
    assert not torch.equal(net(x, t, text), net(x, t, text.flip(0)))
    assert net(x, t, torch.zeros_like(text)).isfinite().all()


@both
@torch.no_grad()
def test_padded_tokens_change_nothing(place, kind):
    net, x, t = model(kind), torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([5, 6])
    embedded = Encoder(place / "encoder")(["a red circle", "this circle is red"])
    other = embedded._replace(tokens=torch.where(embedded.mask[..., None], embedded.tokens, 7))
    assert not torch.equal(embedded.tokens, other.tokens)
    assert torch.equal(net(x, t, embedded.seen()), net(x, t, other.seen()))
    assert not torch.equal(net(x, t, embedded.seen()), net(x, t, embedded.seen().flip(0)))


@both
@torch.no_grad()
def test_without_a_caption_it_is_told_the_empty_one(place, settings, kind):
    data = load(settings.data)
    net = network(replace(settings, model=kind), data, settings.clock())
    x, t = torch.randn(2, 3, 16, 16), torch.tensor([5, 6])
    assert torch.equal(net.null, EmbeddedSet(place / "embedded").empty)
    assert torch.equal(net(x, t), net(x, t, net.null.expand(2, -1, -1)))


# --- training -----------------------------------------------------------------------------------------------------------------------------


def test_a_share_of_the_captions_is_withheld(settings, tmp_path):
    run = run_of(replace(settings, drop_labels=0.25, batch=32), tmp_path / "run")
    stream, dropped = run._stream(), 0
    for _ in range(100):
        _, text = next(stream)
        cond = run._condition(text, 0)
        without = (cond == run.net.null).flatten(1).all(1)
        assert torch.equal(cond[~without], text[~without])
        dropped += int(without.sum())
        run.step += 1
    # 3,200 draws: 800 ± 24.5, four times that
    assert abs(dropped - 800) < 98


@both
@torch.no_grad()
def test_probes_see_every_row_with_its_caption(place, kind):
    net = model(kind, blocks=1)
    generator = torch.Generator().manual_seed(0)
    x0, noise = torch.randn(4, 3, 8, 8, generator=generator), torch.randn(4, 3, 8, 8, generator=generator)
    text = Encoder(place / "encoder")([WORDINGS[i % 3].format(*KINDS[i]) for i in range(4)]).seen()
    clock = TINY.clock()
    probe = Probe(net, clock.schedule, clock.objective, x0, text, noise=noise, modules=[net], rows=3)
    rows, time = torch.tensor([2, 0, 3, 3, 1]), torch.tensor([0.1, 0.9, 0.5, 0.2, 0.7])
    found = probe.losses(time, rows)
    a, s = (part.view(-1, 1, 1, 1).float() for part in clock.schedule(time))
    wanted = (net(a * x0[rows] + s * noise[rows], clock.schedule.condition(time), text[rows]) - noise[rows]).square().flatten(1).mean(1)
    assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-4)
    swapped = Probe(net, clock.schedule, clock.objective, x0, text.flip(0), noise=noise, modules=[net], rows=3).losses(time, rows)
    assert (swapped - found).abs().min() > 1e-4


@pytest.mark.parametrize(("kind", "sampler"), [("uvit", "uniform"), ("uvit", "adaptive:every=2"), ("dit", "variance-optimal:every=2,warmup=1")])
def test_a_stopped_training_goes_on_to_the_bit(settings, tmp_path, kind, sampler):
    settings = replace(settings, model=kind, sampler=sampler, validate_every=4, accumulate=2)
    trained(settings, tmp_path / "whole")
    trained(settings, tmp_path / "parts", stop=3)
    trained(settings, tmp_path / "parts")
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts")) == []


def test_guidance_leads_away_from_the_empty_caption(settings, tmp_path):
    trained(settings, tmp_path / "run")
    run = opened(tmp_path / "run")
    run.net.requires_grad_(False)
    nn.init.normal_(run.net.smooth.weight, std=0.2)  # so that it predicts something
    text, null = run.data.texts.held_out(3), run.net.null
    for guidance in (1.0, 2.5):
        found = generate(run.net, run.clock.schedule, run.clock.objective, (3, 16, 16), 3, steps=1, labels=text, guidance=guidance, null=null)
        x, t = noise_of(0, range(3), (3, 16, 16), "cpu")(0), torch.full((3,), 19)
        with_text, without = run.net(x, t, text), run.net(x, t, null.expand(3, -1, -1))
        eps = without + guidance * (with_text - without)
        a, s = (float(part) for part in run.clock.schedule(torch.tensor(0.99)))
        start = x * (a**2 + s**2) ** 0.5
        wanted = (((start - s * eps) / a).clamp(-1, 1) + 1) * 127.5
        assert (with_text - without).abs().max() > 1e-4
        assert (found - wanted).abs().max() < 0.51  # rounded to whole numbers
    mine = sampled(run.net, run.recipe, run.clock, run.data, 3, steps=1, guidance=2.5)
    assert torch.equal(mine, found)


# --- latents ------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def latents(place, tmp_path_factory):
    """The latents of the pictures, made by an autoencoder of random weights."""
    root = tmp_path_factory.mktemp("latents")
    coder = small_autoencoders.saved(root / "coder", channels=3)
    return small_autoencoders.encoded(root / "latents", coder, f"captions:{place / 'embedded'}", batch=16, shard_size=32)


@pytest.mark.parametrize("split", ["train", "test"])
def test_latents_come_with_the_captions_of_their_pictures(place, latents, split):
    """In the same order and with the same draws as the pictures themselves."""
    pictures, encoded = load(f"captions:{place / 'embedded'}", split=split), load(f"latents:{latents}", split=split)
    assert encoded.classes is None
    of_pictures, of_latents = (batches(data, 8, seed=3) for data in (pictures, encoded))
    for _ in range(12):
        (_, told), (z, mine) = next(of_pictures), next(of_latents)
        assert torch.equal(mine, told)
        assert z.shape == (8, 2, 8, 8)
    assert torch.equal(head(encoded, 3)[1], head(pictures, 3)[1])
    assert torch.equal(encoded.texts.empty, pictures.texts.empty)
    assert encoded.texts.held_out_words(2) == pictures.texts.held_out_words(2)


def test_a_training_on_latents_is_told_captions_and_goes_on_to_the_bit(place, latents, settings, tmp_path, capsys, elsewhere):
    settings = replace(settings, data=f"latents:{latents}", patch=4, validate_every=4, sampler="variance-optimal:every=2,warmup=1")
    trained(settings, tmp_path / "whole")
    trained(settings, tmp_path / "parts", stop=3)
    trained(settings, tmp_path / "parts")
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts")) == []
    asked = ("sample", str(tmp_path / "whole"), "--count", "2", "--device", "cpu", "--prompt", "a red circle", "--encoder", str(place / "encoder"))
    said(capsys, *asked, "--out", "asked.npz")
    assert np.load("asked.npz")["arr_0"].shape == (2, 16, 16, 3)


@pytest.mark.parametrize("change", ["a picture", "a caption"])
def test_captions_that_changed_or_went_are_named(place, latents, tmp_path, change):
    moved = shutil.copytree(place, tmp_path / "moved")
    again = (small_autoencoders.saved(tmp_path / "coder", channels=3), f"captions:{moved / 'embedded'}")
    made = small_autoencoders.encoded(tmp_path / "latents", *again, batch=16, shard_size=32)
    assert torch.equal(head(load(f"latents:{made}"), 3)[1], head(load(f"latents:{latents}"), 3)[1])
    file = moved / "pictures" / "captions.jsonl"
    if change == "a picture":  # as many as before, in another order
        (moved / "pictures" / "0.png").rename(moved / "pictures" / "renamed.png")
        file.write_text(file.read_text().replace('"0.png"', '"renamed.png"'))
    else:
        file.write_text(file.read_text().replace("red circle", "blue square"))
    shutil.rmtree(moved / "embedded")
    with pytest.raises(Mistake, match="holds no embedded captions"):
        head(load(f"latents:{made}"), 3)
    embed(moved / "pictures", moved / "encoder", moved / "embedded")
    with pytest.raises(Mistake, match=r"has other pictures or captions than when .* was made of it"):
        head(load(f"latents:{made}"), 3)
    with pytest.raises(Mistake, match="holds other latents"):
        small_autoencoders.encoded(made, *again, batch=16, shard_size=32)


# --- the command line ---------------------------------------------------------------------------------------------------------------------


def test_from_pictures_to_pictures(place, tmp_path, capsys, elsewhere):
    text = said(capsys, "embed", str(place / "pictures"), "--encoder", str(place / "encoder"), "--out", "embedded", "--device", "cpu")
    assert "180 embedded captions" in text
    options = ["--conditional", "--model", "uvit", "--channels", "16", "--head-channels", "8", "--blocks", "1", "--patch", "8"]
    options += ["--batch", "8", "--updates", "2", "--steps", "20", "--solver-steps", "2"]
    train = ("train", "digits", "--data", "captions:embedded", "--out", "run", "--device", "cpu", *options)
    assert "uvit, " in said(capsys, *train, "--dry-run")
    shown = said(capsys, *train)
    assert "2 updates" in shown
    sample = ("sample", "run", "--count", "5", "--device", "cpu", "--guidance", "2")
    said(capsys, *sample, "--prompt", "a red circle", "this square is blue", "--encoder", str(place / "encoder"), "--out", "asked.npz")
    said(capsys, *sample, "--out", "held-out.npz")
    assert np.load("asked.npz")["arr_0"].shape == np.load("held-out.npz")["arr_0"].shape == (5, 16, 16, 3)
    evaluated = said(capsys, "evaluate", "run", "--samples", "0", "--vlb-images", "3", "--vlb-steps", "2", "--device", "cpu")
    assert "bits/dim" in evaluated
    run = opened("run")
    prompts = prompted(run.net, ["a red circle", "this square is blue"], str(place / "encoder"))
    assert prompts.shape == (2, 8, 16)


# --- mistakes -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unet", "adm"])
def test_u_nets_read_no_captions(settings, tmp_path, kind):
    with pytest.raises(Mistake, match="take model dit or uvit"):
        run_of(replace(settings, model=kind), tmp_path / "run")


def test_mistakes_in_prompts_are_named(place, settings, tmp_path, capsys, elsewhere):
    trained(replace(settings, updates=1), tmp_path / "run")
    trained(replace(TINY, updates=1), tmp_path / "digits")
    write_encoder(tmp_path / "other", seed=1)
    ask, red = ("sample", "--count", "1", "--device", "cpu"), ("--prompt", "a red circle")
    encoder = ("--encoder", str(place / "encoder"))
    assert "not trained on captions" in said(capsys, *ask, "digits", *red, *encoder, status=2)
    assert "--encoder FOLDER" in said(capsys, *ask, "run", *red, status=2)
    assert "--encoder needs a prompt" in said(capsys, *ask, "run", *encoder, status=2)
    assert "is not the encoder" in said(capsys, *ask, "run", *red, "--encoder", "other", status=2)


def test_captions_that_another_encoder_embedded_anew_are_refused(place, tmp_path, settings):
    shutil.copytree(place, tmp_path / "set")
    settings = replace(settings, data=f"captions:{tmp_path / 'set' / 'embedded'}")
    trained(settings, tmp_path / "run", stop=2)
    shutil.rmtree(tmp_path / "set" / "embedded")
    embed(tmp_path / "set" / "pictures", write_encoder(tmp_path / "other", seed=1), tmp_path / "set" / "embedded")
    tuned = replace(settings, pretrained=str(tmp_path / "run"))
    for again in (lambda: trained(settings, tmp_path / "run"), lambda: opened(tmp_path / "run"), lambda: trained(tuned, tmp_path / "tuned")):
        with pytest.raises(Mistake, match="embedded anew"):
            again()


# --- does it follow? ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@both
def test_samples_show_what_the_caption_says(tmp_path, kind):
    """Twelve kinds of pictures in three wordings, two minutes of one core. Shapes are decided in much noise, so that is drawn."""
    embed(write_shapes(tmp_path / "pictures", 480), write_encoder(tmp_path / "encoder"), tmp_path / "embedded")
    settings = replace(
        TINY, data=f"captions:{tmp_path / 'embedded'}", conditional=True, model=kind, channels=64, head_channels=16, blocks=4, patch=4, batch=32,
        updates=1200, lr=2e-3, betas=(0.9, 0.99), warmup=50, ema=0.99, schedule="cosine", steps=1000, objective="x0", sampler="beta:a=4,b=1",
        solver_steps=20,
    )  # fmt: skip
    trained(settings, tmp_path / "run")
    run = opened(tmp_path / "run")
    prompts = prompted(run.net, CAPTIONS, str(tmp_path / "encoder"))
    wanted = [kind for kind in KINDS for _ in WORDINGS] * 4
    shares = {}
    for guidance in (1.0, 2.0):
        shown = judged(sampled(run.net, run.recipe, run.clock, run.data, len(wanted), guidance=guidance, asked=prompts))
        shares[guidance] = sum(mine == theirs for mine, theirs in zip(shown, wanted, strict=True)) / len(wanted)
    print(f"shown as told: {shares}")
    assert shares[2.0] >= 0.9  # by chance it were 1/12
    assert shares[2.0] >= shares[1.0]
    withheld = judged(sampled(run.net, run.recipe, run.clock, run.data, len(wanted), asked=run.net.null[None]))
    assert sum(mine == theirs for mine, theirs in zip(withheld, wanted, strict=True)) / len(wanted) < 0.25
