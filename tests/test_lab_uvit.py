"""U-ViT: the papers' sizes, torch's own transformer layers as a reference, long skip connections, training and going on."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from noiseclock.lab.errors import Mistake
from noiseclock.lab.models import UVIT, build, count
from noiseclock.lab.models.uvit import Block
from noiseclock.lab.trained import opened
from small_runs import TINY, differing, state_of, trained

SMALL = {"channels": 32, "blocks": 4, "head_channels": 16}


def small(shape=(3, 8, 8), **options):
    """A model that is far from its start, so that every part of it counts."""
    torch.manual_seed(0)
    model = build("uvit", shape, **{**SMALL, **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def noise(*shape: int, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- sizes --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "shape", "patch", "classes", "millions"),
    [
        ("S", (3, 32, 32), 2, None, 44),  # CIFAR-10
        ("S-deep", (4, 32, 32), 2, None, 58),  # latents; with a text's 77 tokens in the paper, 0.4 M more
        ("M", (3, 64, 64), 4, 1000, 131),  # ImageNet
        ("L", (4, 32, 32), 2, 1000, 287),  # latents of ImageNet 256
        ("H", (4, 32, 32), 2, 1000, 501),
    ],
)
def test_the_papers_sizes(size, shape, patch, classes, millions):
    """2209.12152, Table 1, which rounds to 1 M: half a million either way."""
    with torch.device("meta"):
        model = build("uvit", shape, patch=patch, classes=classes, **UVIT[size])
    assert abs(count(model) / 1e6 - millions) <= 0.5


@pytest.mark.parametrize(("depth", "blocks"), [(1, 1), (2, 3), (3, 3), (4, 5), (28, 29), (29, 29)])
def test_half_of_the_depth_is_on_either_side_of_the_middle(depth, blocks):
    with torch.device("meta"):
        model = build("uvit", (1, 8, 8), channels=8, blocks=depth)
    assert sum(isinstance(module, Block) for module in model.modules()) == blocks
    assert sum(block.join is not None for block in model.modules() if isinstance(block, Block)) == blocks // 2


# --- numbers ------------------------------------------------------------------------------------------------------------------------------


def torchs(block: Block, h: torch.Tensor) -> torch.Tensor:
    """The same block as torch's own, without its `join`."""
    channels = h.shape[2]
    layer = nn.TransformerEncoderLayer(channels, block.heads, 4 * channels, 0.0, "gelu", batch_first=True, norm_first=True)
    state = {
        "self_attn.in_proj_weight": block.qkv.weight, "self_attn.in_proj_bias": torch.zeros(3 * channels),
        "self_attn.out_proj.weight": block.mix.weight, "self_attn.out_proj.bias": block.mix.bias,
    }  # fmt: skip
    for theirs, ours in {"linear1": block.mlp[0], "linear2": block.mlp[3], "norm1": block.norm1, "norm2": block.norm2}.items():
        state |= {f"{theirs}.{name}": tensor for name, tensor in ours.state_dict().items()}
    layer.load_state_dict(state)
    return layer(h)


@pytest.mark.parametrize("classes", [None, 5])
@torch.no_grad()
def test_it_is_what_the_paper_draws(classes):
    """Written out with torch's layers, for one skip inside another, on a picture that is not square."""
    model = small((3, 4, 8), classes=classes)
    x, t, labels = noise(2, 3, 4, 8), torch.tensor([3, 700]), torch.tensor([1, 5])
    angles = t[:, None] * 10000.0 ** -(torch.arange(16) / 16)
    tokens = [torch.cat([angles.cos(), angles.sin()], 1)]
    if classes is not None:
        tokens.append(model.label.weight[labels])
    for row in (0, 2):
        for column in (0, 2, 4, 6):
            patch = x[:, :, row : row + 2, column : column + 2].flatten(1)
            tokens.append(patch @ model.tokens.weight.flatten(1).T + model.tokens.bias)
    h = torch.stack(tokens, 1) + model.positions
    one = torchs(model.first[0], h)
    two = torchs(model.first[1], one)
    h = torchs(model.middle[0], two)
    for block, earlier in zip(model.second, (two, one), strict=True):
        h = torchs(block, block.join(torch.cat([h, earlier], 2)))
    patches = model.out(model.norm(h))[:, -8:]
    picture = torch.empty(2, 3, 4, 8)
    for i in range(8):
        row, column = i // 4 * 2, i % 4 * 2
        picture[:, :, row : row + 2, column : column + 2] = patches[:, i].view(2, 2, 2, 3).permute(0, 3, 1, 2)
    wanted = model.smooth(picture)
    found = model(x, t) if classes is None else model(x, t, labels)
    assert wanted.std() > 0.1
    # some tens of float32 operations on values of order one to ten, each rounded at 6e-8
    assert (found - wanted).abs().max() < 1e-5


@torch.no_grad()
def test_long_skips_carry_the_picture_past_the_middle():
    model = small()
    model.middle[0].register_forward_hook(lambda module, given, result: torch.zeros_like(result))
    t, pictures = torch.tensor([5]), (noise(1, 3, 8, 8), noise(1, 3, 8, 8, seed=1))
    one, other = (model(x, t) for x in pictures)
    assert (one - other).abs().max() > 0.01
    # each of them by itself, and none without them
    for block in model.second:
        block.join.weight[:, 32:] = 0
        assert (model(pictures[0], t) - one).abs().max() > 0.01
    one, other = (model(x, t) for x in pictures)
    assert torch.equal(one, other)


def test_a_fresh_one_starts_as_in_the_paper_and_learns_four_pictures_by_heart():
    torch.manual_seed(0)
    model = build("uvit", (1, 8, 8), **SMALL)
    weights = torch.cat([module.weight.flatten() for module in model.modules() if isinstance(module, nn.Linear)]).detach()
    assert float(weights.std()) == pytest.approx(0.02, rel=0.02)  # 56,000 of them: three standard errors are 1 %
    assert float(model.positions.detach().std()) == pytest.approx(0.02, rel=0.15)  # 544: five are 15 %
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, t, target = noise(4, 1, 8, 8), torch.arange(4), noise(4, 1, 8, 8, seed=1)
    losses = []
    for _ in range(200):
        losses.append((model(x, t) - target).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.05 * losses[0]  # three seeds came to 0.017, 0.004 and 0.003 of it


def test_dropout_is_where_a_branch_ends_and_off_when_asked_to_predict():
    model = small(dropout=0.3)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.3}
    x, t = noise(2, 3, 8, 8), torch.tensor([1, 2])
    assert not torch.equal(model(x, t), model(x, t))
    model.eval()
    assert torch.equal(model(x, t), model(x, t))
    assert torch.equal(model(x, t), small()(x, t))  # which has none


# --- shapes and mistakes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [None, 4])
@pytest.mark.parametrize(
    ("shape", "options"), [((1, 28, 28), {"patch": 4}), ((4, 6, 8), {"head_channels": 0}), ((3, 16, 8), {"patch": 8}), ((2, 3, 5), {"patch": 1})]
)
def test_shapes_that_work(shape, options, classes):
    out = small(shape, classes=classes, **options)(noise(2, *shape), torch.tensor([0, 1]))
    assert out.shape == (2, *shape)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patch": 3}, "patches of 3×3 do not tile a picture of 8×12; choose a patch that divides both sides"),
        ({"patch": 8}, "patches of 8×8 do not tile"),
        ({"patch": 0}, "patches of 0×0 do not tile"),
        ({"channels": 31}, "even number, for sines and cosines of the time, got 31"),
        ({"head_channels": 12}, "head_channels=12 must divide channels=32; 0 makes one head"),
        ({"head_channels": -4}, "head_channels=-4 must divide"),
        ({"blocks": 0}, "at least one block"),
        ({"classes": 0}, "classes must be at least 1"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(Mistake, match=message):
        build("uvit", (1, 8, 12), **{**SMALL, **options})


# --- training -----------------------------------------------------------------------------------------------------------------------------

UVIT_RUN = replace(TINY, model="uvit", blocks=2)


@pytest.mark.parametrize("changes", [{}, {"conditional": True, "dropout": 0.2, "precision": "bf16"}], ids=["plain", "classes, dropout, bf16"])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path, changes):
    settings = replace(UVIT_RUN, **changes)
    whole = trained(settings, tmp_path / "whole")
    parts = [trained(settings, tmp_path / "parts", stop=stop) for stop in (4, None)]
    assert [record.loss for part in parts for record in part] == [record.loss for record in whole]
    assert differing(state_of(tmp_path / "whole"), state_of(tmp_path / "parts")) == []


def test_a_trained_one_is_opened_again(tmp_path):
    trained(UVIT_RUN, tmp_path)
    run = opened(tmp_path)
    assert run.net.patch == 4
    assert run.net(noise(2, 1, 8, 8), torch.tensor([1, 2])).shape == (2, 1, 8, 8)
