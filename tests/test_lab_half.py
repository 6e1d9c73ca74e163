"""Weights cast as a list give what autocast gives, and the gradients reach the weights that are trained."""

import pytest
import torch
from torch import nn

from noiseclock.lab.half import HalfWeights
from noiseclock.lab.models import build

SMALL = {
    "unet": {"channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,)},
    "adm": {"channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,), "head_channels": 8},
    "dit": {"channels": 16, "head_channels": 8, "blocks": 2, "patch": 2},
    "uvit": {"channels": 16, "head_channels": 8, "blocks": 2, "patch": 2},
}


def network(model, classes):
    torch.manual_seed(0)
    net = build(model, (3, 8, 8), classes=classes, **SMALL[model])
    for p in net.parameters():
        nn.init.normal_(p, std=0.2)
    return net


def under_autocast(net, classes):
    """What a network predicts, and the gradient of its square for the parameters that it has by then."""
    torch.manual_seed(1)
    given = [torch.randn(4, 3, 8, 8), torch.tensor([0, 10, 500, 999])]
    labels = [] if classes is None else [torch.tensor([0, 1, 2, 3])]
    with torch.autocast("cpu", torch.bfloat16):
        out = net(*given, *labels)
        out.float().square().mean().backward()
    return out.detach()


@pytest.mark.parametrize(("model", "classes"), [("unet", None), ("adm", None), ("dit", None), ("dit", 10), ("uvit", None), ("uvit", 10)])
def test_it_is_autocast_bit_for_bit(model, classes):
    net = network(model, classes)
    half = HalfWeights(net)
    wanted = under_autocast(net, classes)
    gradients = {name: p.grad.clone() for name, p in net.named_parameters()}
    net.zero_grad()
    assert torch.equal(under_autocast(half.net, classes), wanted)
    half.collect()
    for name, p in net.named_parameters():
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad, gradients[name]), name
    assert all(p.grad is None for p in half.net.parameters() if p.dtype == torch.bfloat16)


@pytest.mark.parametrize("model", ["unet", "adm"])
def test_embedded_classes_are_rounded_once_more(model):
    """By diffusers' U-Net, which brings them to the dtype of its first weight: 2^-9 of them, and what the layers after them make of it."""
    net = network(model, 10)
    half = HalfWeights(net)
    wanted, found = (under_autocast(one, 10).float() for one in (net, half.net))
    assert 0 < (found - wanted).norm() < 2**-6 * wanted.norm()


def test_it_follows_the_original_when_refreshed():
    net = network("unet", None)
    half = HalfWeights(net)
    before = under_autocast(half.net, None)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    half.refresh()
    after = under_autocast(half.net, None)
    assert not torch.equal(before, after)
    assert torch.equal(after, under_autocast(net, None))


def test_norms_and_embeddings_stay_whole_and_are_shared():
    net = network("unet", 10)
    half = HalfWeights(net)
    theirs = dict(half.net.named_parameters())
    for name, p in net.named_parameters():
        norm = "norm" in name or "class_embedding" in name
        assert (theirs[name] is p) == norm, name
        assert theirs[name].dtype == (torch.float32 if norm else torch.bfloat16)
        assert theirs[name].stride() == p.stride()


def test_embedded_positions_and_classes_of_a_uvit_stay_whole_and_are_shared():
    net = network("uvit", 10)
    half = HalfWeights(net)
    theirs = dict(half.net.named_parameters())
    for name, p in net.named_parameters():
        whole = "norm" in name or name in ("positions", "label.weight")
        assert (theirs[name] is p) == whole, name
        assert theirs[name].dtype == (torch.float32 if whole else torch.bfloat16)


def test_layers_that_share_a_weight_go_on_sharing_it():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    half = HalfWeights(net)
    assert half.net[0].weight is half.net[1].weight
    assert half.net[0].weight is not net[0].weight
    with torch.autocast("cpu", torch.bfloat16):
        half.net(torch.ones(2, 3)).sum().backward()
    half.collect()
    assert net[0].weight.grad.abs().sum() > 0
    assert net[0].bias.grad.abs().sum() > 0


def test_what_is_frozen_stays_frozen():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[0].requires_grad_(False)
    half = HalfWeights(net)
    with torch.autocast("cpu", torch.bfloat16):
        half.net(torch.ones(2, 3)).sum().backward()
    half.collect()
    assert net[0].weight.grad is None
    assert net[1].weight.grad is not None
