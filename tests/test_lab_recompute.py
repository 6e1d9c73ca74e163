"""Activations that are computed twice: the same losses and gradients, with less memory."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from noiseclock.lab import checkpoint
from noiseclock.lab.built import network
from noiseclock.lab.captured import why_not_captured
from noiseclock.lab.data import load
from noiseclock.lab.models import build
from noiseclock.lab.models.recompute import straight
from small_runs import TINY, UNET, differing, lines, state_of, trained

SIZES = {
    "unet": {"channels": 16, "multipliers": (1, 2), "blocks": 2, "attention": (4,)},
    "adm": {"channels": 16, "multipliers": (1, 2), "blocks": 2, "attention": (4,), "head_channels": 8},
    "dit": {"channels": 32, "blocks": 4, "head_channels": 8},
    "uvit": {"channels": 32, "blocks": 4, "head_channels": 8},
}


def pair(kind, dropout, **options):
    """Two networks with the same weights, none of them zero; the second recomputes."""
    options = {"classes": 4, "dropout": dropout, **SIZES[kind], **options}
    made = [build(kind, (3, 8, 8), checkpointing=yes, **options) for yes in (False, True)]
    torch.manual_seed(1)
    for p in made[0].parameters():
        torch.nn.init.normal_(p, std=0.1)
    made[1].load_state_dict(made[0].state_dict())
    return made


def noisy():
    """x, t and labels."""
    torch.manual_seed(2)
    return torch.randn(6, 3, 8, 8), torch.arange(6) * 100, torch.arange(6) % 5


def gradients(model, net=None, seed=3, given=None):
    """The output and the gradient of its square, and the bytes that the forward pass kept beside inputs and weights."""
    given = noisy() if given is None else given
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(seed)  # dropout
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = (model if net is None else net)(*given)
        loss = out.square().mean()
    held = sum(kept.values())
    loss.backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()]), torch.rand(()), held


def alike(found, wanted):
    """To float32's rounding of sums that may be taken in another order."""
    for mine, theirs in zip(found[:2], wanted[:2], strict=True):
        assert (mine - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", SIZES)
def test_gradients_stay_and_memory_shrinks(kind, dropout):
    plain, spare = pair(kind, dropout)
    wanted, found = gradients(plain.train()), gradients(spare.train())
    # the same operations in the same order on one thread: not even rounding differs
    for mine, theirs in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(mine, theirs)
    # of a transformer's block the input stays, one of a dozen activations; of a U-Net attention and changes of size are kept besides
    assert found[3] < wanted[3] * (0.7 if kind in ("unet", "adm") else 0.35)
    if dropout:  # which is really there, and the same in both passes of `spare` only because its mask is
        assert not torch.equal(gradients(plain, seed=4)[0], wanted[0])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's own tracer
@pytest.mark.parametrize(
    ("kind", "dropout"),
    [pytest.param("unet", 0.3, marks=pytest.mark.slow), pytest.param("adm", 0.3, marks=pytest.mark.slow), ("dit", 0.0), ("uvit", 0.3)],
)
def test_a_compiled_network_recomputes_too(kind, dropout):
    few = {"multipliers": (1,), "blocks": 1, "attention": ()} if kind in ("unet", "adm") else {"blocks": 2}  # it is the compiler that takes long
    plain, spare = (model.train() for model in pair(kind, dropout, **few))
    torch.compiler.reset()
    wanted, found = (gradients(model, torch.compile(model, backend="aot_eager", fullgraph=True)) for model in (plain, spare))
    alike(found, wanted)
    assert found[3] < wanted[3]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's own tracer
@pytest.mark.parametrize("kind", ["unet", "adm"])
def test_a_compiled_level_of_a_u_net_recomputes_too(kind):
    """Levels and the middle call their residual blocks in one way: a whole U-Net takes the compiler ten seconds, its first level one."""
    plain, spare = (model.net.down_blocks[0].train() for model in pair(kind, 0.3, multipliers=(1,), blocks=1, attention=()))
    torch.manual_seed(2)
    pictures, times = torch.randn(6, 16, 8, 8), torch.randn(6, 64)
    torch.compiler.reset()
    compiled = (torch.compile(level, backend="aot_eager", fullgraph=True) for level in (plain, spare))
    nets = [lambda *given, net=net: net(*given)[0] for net in compiled]  # the second is what the other side of the U is given
    wanted, found = (gradients(level, net, given=(pictures, times)) for level, net in zip((plain, spare), nets, strict=True))
    alike(found, wanted)
    assert found[3] < wanted[3]


@pytest.mark.parametrize("kind", SIZES)
def test_what_does_not_train_is_not_recomputed(kind):
    plain, spare = (model.eval() for model in pair(kind, 0.3))
    wanted, found = gradients(plain), gradients(spare)
    assert found[3] == wanted[3]
    alike(found, wanted)
    # a probe's gradient may be taken with other tensors in the place of the weights, and is theirs
    leaves = {name: p.detach().clone().requires_grad_() for name, p in spare.named_parameters()}
    spare.zero_grad()
    functional_call(spare, leaves, (torch.ones(2, 3, 8, 8), torch.zeros(2))).sum().backward()
    assert all(p.grad is None for p in spare.parameters())
    assert sum(leaf.grad is not None for leaf in leaves.values()) == len(leaves)


@pytest.mark.parametrize("settings", [TINY, UNET, replace(TINY, model="uvit", blocks=2)], ids=["dit", "unet", "uvit"])
def test_a_training_may_change_its_mind_and_stays_the_same_to_the_bit(tmp_path, settings):
    settings = replace(settings, dropout=0.2, updates=6, sampler="adaptive.scaled:every=2,queue=3")
    spare = replace(settings, checkpointing=True)
    trained(settings, tmp_path / "plain")
    trained(spare, tmp_path / "spare")
    trained(spare, tmp_path / "changed", stop=3)
    trained(settings, tmp_path / "changed")
    wanted = state_of(tmp_path / "plain")
    for name in ("spare", "changed"):
        found = state_of(tmp_path / name)
        assert found.pop("settings")["checkpointing"] == (name == "spare")
        assert differing(found, {key: value for key, value in wanted.items() if key != "settings"}) == []
        assert lines(tmp_path / name) == lines(tmp_path / "plain")
    assert checkpoint.steps(tmp_path / "changed") == [3, 6]


def test_a_recipe_builds_it_and_a_graph_is_refused_with_a_reason():
    data = load("digits")
    assert network(TINY, data, TINY.clock()).through is straight
    spare = replace(TINY, checkpointing=True)
    assert network(spare, data, spare.clock()).through is not straight
    unet = replace(UNET, checkpointing=True)
    assert network(unet, data, unet.clock()).net.is_gradient_checkpointing
    cuda = torch.device("cuda")
    assert why_not_captured(spare, cuda, 1, False) == ""
    assert why_not_captured(replace(spare, dropout=0.1), cuda, 1, False).startswith("dropout is recomputed")
