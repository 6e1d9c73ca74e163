"""Networks: parameter counts of the papers, a reference implementation, labels and times that reach them."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from diffusers import DiTTransformer2DModel, UNet2DModel
from diffusers.models.attention_processor import Attention
from diffusers.models.resnet import ResnetBlock2D
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import noiseclock as nc
from noiseclock.lab.errors import Mistake
from noiseclock.lab.models import DIT, build, count, time_scale
from noiseclock.lab.models.channels_last import Dropout, GroupNorm, Normalised, Residual, SelfAttention, Times, keep_channels_last

SMALL = {
    "unet": {"channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,)},
    "adm": {"channels": 16, "multipliers": (1, 2), "blocks": 1, "attention": (4,), "head_channels": 8},
    "dit": {"channels": 32, "blocks": 2, "head_channels": 16},
    "uvit": {"channels": 32, "blocks": 2, "head_channels": 16},
}
every_kind = pytest.mark.parametrize("kind", SMALL)


def small(kind: str, shape=(3, 8, 8), *, seed=0, **options):
    """A model whose weights are random throughout, because a fresh one predicts zero."""
    torch.manual_seed(seed)
    model = build(kind, shape, **{**SMALL[kind], **options})
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3 if kind == "uvit" else 0.1)  # a U-ViT's signal passes the weights of every norm
    return model


def noise(*shape: int, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- sizes --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "options", "parameters"),
    [
        # DDPM (2006.11239, appendix B): 35.7 M; this is the exact number in the released CIFAR-10 weights
        ((3, 32, 32), {"channels": 128, "dropout": 0.1}, 35_746_307),
        # shared/measurements.md: 8.9 M
        ((3, 32, 32), {"channels": 64, "dropout": 0.1}, 8_952_067),
        # LDM (2112.10752, table 12, CelebA-HQ): 274 M; the released code prints 274.06 M
        ((3, 64, 64), {"channels": 224, "multipliers": (1, 2, 3, 4), "attention": (32, 16, 8), "head_channels": 32}, 274_056_163),
    ],
)
def test_unets_have_the_papers_sizes(shape, options, parameters):
    with torch.device("meta"):
        assert count(build("unet", shape, **options)) == parameters


@pytest.mark.parametrize(
    ("shape", "channels", "multipliers", "blocks", "millions"),
    [
        ((3, 64, 64), 192, (1, 2, 3, 4), 3, 296),
        ((3, 128, 128), 256, (1, 1, 2, 3, 4), 2, 422),
        ((3, 256, 256), 256, (1, 1, 2, 2, 4, 4), 2, 554),
    ],
)
def test_adms_have_the_papers_sizes(shape, channels, multipliers, blocks, millions):
    """2105.05233, the hyper-parameters for ImageNet, rounded to 1 M there; theirs predict a variance too, and embed no class that stands for none."""
    settings = {"channels": channels, "multipliers": multipliers, "blocks": blocks}
    with torch.device("meta"):
        model = build("adm", shape, classes=1000, attention=(32, 16, 8), head_channels=64, **settings)
    variance, none = 3 * (9 * channels + 1), 4 * channels
    assert round((count(model) + variance - none) / 1e6) == millions


@pytest.mark.parametrize(("size", "millions"), [("S", 33), ("B", 130), ("L", 458), ("XL", 675)])
def test_dits_have_the_papers_sizes(size, millions):
    """2212.09748, table 1, patches of 2, 32×32×4 latents, 1000 classes; theirs predict a variance too, p²·C rows more in the last layer."""
    with torch.device("meta"):
        model = build("dit", (4, 32, 32), classes=1000, **DIT[size])
    variance = model.patch**2 * 4 * (model.out.in_features + 1)
    assert round((count(model) + variance) / 1e6) == millions


@pytest.mark.parametrize(("head_channels", "heads"), [(0, {1}), (8, {4, 6})])
def test_attention_is_where_it_was_asked_for_and_in_the_middle(head_channels, heads):
    model = build("unet", (1, 16, 16), channels=16, multipliers=(1, 2, 3), blocks=1, attention=(8,), head_channels=head_channels)
    layers = {name.rpartition(".attentions")[0]: module for name, module in model.net.named_modules() if isinstance(module, Attention)}
    assert set(layers) == {"down_blocks.1", "mid_block", "up_blocks.1"}
    assert {layer.heads for layer in layers.values()} == heads


@pytest.mark.parametrize("channels", [16, 20, 48, 64])
def test_group_norm_takes_the_largest_number_of_groups_that_fits(channels):
    model = build("unet", (1, 8, 8), channels=channels, multipliers=(1, 2), blocks=1, attention=())
    groups = {module.num_groups for module in model.modules() if isinstance(module, nn.GroupNorm)}
    assert groups == {{16: 16, 20: 20, 48: 24, 64: 32}[channels]}
    assert model(noise(2, 1, 8, 8), torch.tensor([0, 9])).shape == (2, 1, 8, 8)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_dropout_reaches_every_residual_block(p):
    blocks = [module for module in small("unet", dropout=p).modules() if isinstance(module, ResnetBlock2D)]
    assert len(blocks) == 2 + 2 + 2 * 2  # down, middle, up with one more for each level
    assert {block.dropout.p for block in blocks} == {p}


# --- numbers ------------------------------------------------------------------------------------------------------------------------------


def test_the_dit_agrees_with_diffusers():
    """The same weights in diffusers' DiTTransformer2DModel, which keeps a copy of the embeddings in every block and splits q, k and v."""
    ours = small("dit", (3, 8, 8), classes=5).eval()
    theirs = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=3, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=5, norm_eps=1e-6
    ).eval()
    pairs = {theirs.pos_embed.proj: ours.tokens, theirs.proj_out_1: ours.modulation, theirs.proj_out_2: ours.out}
    for their, our in zip(theirs.transformer_blocks, ours.blocks, strict=True):
        # DiT's own frequencies: diffusers puts 127 gaps between them where DiT has 128, which is 7 % at the slowest
        their.norm1.emb.time_proj.downscale_freq_shift = 0
        their.norm1.emb.class_embedder.embedding_table.weight.data = ours.label.weight.data
        pairs |= {their.norm1.emb.timestep_embedder.linear_1: ours.time[0], their.norm1.emb.timestep_embedder.linear_2: ours.time[2]}
        pairs |= {their.norm1.linear: our.modulation, their.attn1.to_out[0]: our.mix, their.ff.net[0].proj: our.mlp[0], their.ff.net[2]: our.mlp[3]}
        for projection, weight, bias in zip(
            (their.attn1.to_q, their.attn1.to_k, their.attn1.to_v), our.qkv.weight.chunk(3), our.qkv.bias.chunk(3), strict=True
        ):
            projection.weight.data, projection.bias.data = weight, bias
    for their, our in pairs.items():
        their.weight.data, their.bias.data = our.weight.data, our.bias.data
    x, t, labels = noise(6, 3, 8, 8), torch.tensor([0, 1, 10, 500, 998, 999]), torch.tensor([0, 1, 2, 3, 4, 5])
    with torch.no_grad():
        expected = theirs(x, t, labels).sample
        # a few hundred float32 operations on values of order one, each rounded at 6e-8
        assert (ours(x, t, labels) - expected).abs().max() < 1e-5
        assert expected.std() > 0.1


@pytest.mark.parametrize("kind", ["unet", "adm"])
def test_the_unet_is_diffusers_own(kind):
    model = small(kind)
    theirs = UNet2DModel.from_config(model.net.config)
    assert not isinstance(theirs.mid_block.attentions[0], type(model.net.mid_block.attentions[0]))
    theirs.load_state_dict(model.net.state_dict())
    x, t = noise(2, 3, 8, 8), torch.tensor([3, 700])
    assert torch.equal(model(x, t), theirs(x, t).sample)


@pytest.mark.parametrize("kind", ["unet", "adm", "dit"])  # a U-ViT does not start at zero: test_lab_uvit.py
def test_a_fresh_model_predicts_zero_and_learns(kind):
    model = build(kind, (1, 8, 8), **SMALL[kind])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    x, t, target = noise(4, 1, 8, 8), torch.arange(4), noise(4, 1, 8, 8, seed=1)
    assert model(x, t).abs().max() == 0
    losses = []
    for _ in range(30):
        losses.append((model(x, t) - target).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    # four pictures are to be learned by heart: through the output alone, nothing but a mean could be
    assert losses[-1] < 0.7 * losses[0]


def test_in_an_adm_time_and_class_scale_and_shift_in_every_block_and_residual_blocks_change_the_size():
    model = build("adm", (3, 16, 16), classes=3, channels=16, multipliers=(1, 2, 2), blocks=1, attention=(8,), head_channels=8)
    blocks = [module for module in model.modules() if isinstance(module, ResnetBlock2D)]
    assert all(block.time_emb_proj.out_features == 2 * block.out_channels for block in blocks)
    assert [sum(getattr(block, way) is not None for block in blocks) for way in ("downsample", "upsample")] == [2, 2]
    assert not [module for module in model.modules() if isinstance(module, nn.Conv2d) and module.stride != (1, 1)]
    # diffusers' own of these settings has no norm in the middle, and `keep_channels_last` then leaves that attention alone
    assert all(module.group_norm is not None for module in model.modules() if isinstance(module, Attention))
    theirs = UNet2DModel.from_config({**model.net.config, "attn_norm_num_groups": None})
    keep_channels_last(theirs)
    assert theirs.mid_block.attentions[0].group_norm is None
    assert {type(module) for module in theirs.mid_block.attentions} == {Attention}


@every_kind
def test_gradients_reach_every_parameter(kind):
    model = small(kind, classes=4).train()
    model(noise(4, 3, 8, 8), torch.tensor([1, 10, 100, 900]), torch.arange(4)).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        assert parameter.grad.isfinite().all(), name


@every_kind
def test_the_time_changes_the_prediction(kind):
    model, x = small(kind), noise(1, 3, 8, 8).expand(3, 3, 8, 8)
    one, two, three = model(x, torch.tensor([10, 11, 500]))
    # one step moves it, and many move it more
    assert 1e-6 < (one - two).abs().max() < (one - three).abs().max()


@every_kind
def test_labels_and_their_absence(kind):
    model = small(kind, classes=4)  # in training mode: diffusers' own DiT would drop labels at random here
    x, t = noise(4, 3, 8, 8), torch.full((4,), 20)
    labels = torch.arange(4)
    assert model.null == 4
    assert torch.equal(model(x, t, labels), model(x, t, labels))
    assert torch.equal(model(x, t), model(x, t, torch.full((4,), model.null)))
    assert (model(x, t, labels) - model(x, t)).abs().amax((1, 2, 3)).min() > 1e-3
    with pytest.raises(Mistake, match="knows no classes"):
        small(kind)(x, t, labels)


@every_kind
def test_the_state_can_be_saved_and_a_copy_stands_alone(kind):
    model = small(kind, classes=3)
    state = model.state_dict()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)  # safetensors refuses tensors that share memory
    assert sum(tensor.numel() for tensor in state.values()) == count(model)
    twin = copy.deepcopy(model)
    x, t = noise(2, 3, 8, 8), torch.tensor([5, 6])
    assert torch.equal(model(x, t), twin(x, t))
    for parameter in twin.parameters():
        nn.init.zeros_(parameter)
    assert model(x, t).abs().max() > 0


# --- times --------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [nc.schedule("flow"), nc.schedule("flow", condition_scale=1000.0), nc.schedule("edm"), nc.schedule("edm", sigma_max=20)]
)
def test_continuous_times_span_a_thousand_units(schedule):
    ends = schedule.condition(torch.tensor([0.0, 1.0], dtype=torch.float64)).double()
    assert float((ends[1] - ends[0]) * time_scale(schedule)) == pytest.approx(1000, rel=1e-6)  # the conditions are float32


@pytest.mark.parametrize("steps", [100, 1000, 4000])
def test_steps_are_told_as_they_are(steps):
    assert time_scale(nc.schedule("cosine", steps=steps)) == 1


@every_kind
def test_the_time_is_scaled_before_it_is_embedded(kind):
    x = noise(3, 3, 8, 8)
    plain, stretched = small(kind), small(kind, time_scale=1000.0)
    u = torch.tensor([0.0, 0.25, 0.875])  # their thousandfold is exact
    assert torch.equal(stretched(x, u), plain(x, (u * 1000).long()))
    # unscaled, a quarter of the flow moves the prediction far less than its scaled self does
    moved, barely = ((model(x[:1], torch.tensor([0.75])) - model(x[:1], torch.tensor([0.5]))).abs().mean() for model in (stretched, plain))
    assert moved > 2 * barely


# --- shapes and mistakes ------------------------------------------------------------------------------------------------------------------


def test_a_dit_keeps_every_patch_in_its_place():
    """With its blocks at their start, the identity, a pixel can only reach its own patch; pictures need not be square."""
    model = build("dit", (2, 8, 12), channels=16, blocks=1, patch=4)
    nn.init.normal_(model.out.weight)
    nn.init.normal_(model.modulation.weight)
    x, t = noise(1, 2, 8, 12), torch.tensor([3])
    before = model(x, t)
    x[0, 1, 5, 6] += 1
    changed = ((model(x, t) - before).abs() > 1e-6).any(1)[0]
    expected = torch.zeros(8, 12, dtype=torch.bool)
    expected[4:8, 4:8] = True
    assert torch.equal(changed, expected)


@pytest.mark.parametrize(
    ("kind", "shape", "options"),
    [
        ("unet", (1, 28, 28), {"multipliers": (1, 2, 2), "attention": (7,)}),  # MNIST: 28, 14, 7
        ("unet", (3, 8, 16), {"attention": (8,)}),
        ("unet", (1, 5, 7), {"multipliers": (1,), "attention": (5,)}),
        ("adm", (1, 28, 28), {"multipliers": (1, 2, 2), "attention": (7,)}),
        ("adm", (3, 8, 16), {"attention": (8,)}),
        ("adm", (2, 8, 8), {"attention": ()}),
        ("dit", (1, 28, 28), {"patch": 4}),
        ("dit", (4, 6, 8), {"head_channels": 0}),
    ],
)
def test_shapes_that_work(kind, shape, options):
    out = small(kind, shape, **options)(noise(2, *shape), torch.tensor([0, 1]))
    assert out.shape == (2, *shape)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("vit", {}, "unknown kind of model 'vit'; known: adm, dit, unet, uvit"),
        ("unet", {"shape": (8, 8)}, r"shape \(channels, height, width\)"),
        ("unet", {"shape": (1, 8, 9)}, "sides must be multiples of 2, got 8×9"),
        ("unet", {"multipliers": (1, 2, 2, 2, 2)}, "sides must be multiples of 16"),
        ("unet", {"multipliers": ()}, "one for each level"),
        ("unet", {"attention": (16,)}, "attention at height 16 never happens; this U-Net works at heights 8, 4"),
        ("unet", {"head_channels": 5}, "must divide the width of every level that attends"),
        ("unet", {"channels": 15}, "even number"),
        ("unet", {"dropout": 1.0}, "dropout"),
        ("unet", {"blocks": 0}, "at least one block"),
        ("unet", {"classes": 0}, "classes must be at least 1"),
        ("adm", {"shape": (1, 8, 9)}, "sides must be multiples of 2, got 8×9"),
        ("adm", {"attention": (16,)}, "attention at height 16 never happens; this U-Net works at heights 8, 4"),
        ("adm", {"head_channels": 5}, "must divide the width of every level that attends"),
        ("dit", {"patch": 3}, "patches of 3×3 do not tile"),
        ("dit", {"channels": 30}, "multiple of 4"),
        ("dit", {"head_channels": 12}, "must divide channels=32"),
    ],
)
def test_mistakes_are_named(kind, options, message):
    with pytest.raises(Mistake, match=message):
        build(kind, **{"shape": (1, 8, 8), **SMALL.get(kind, {}), **options})


# --- compiled -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's own tracer
# the middle always attends; classes change what residual blocks are told, and nothing about levels and attention: one of each will do
@pytest.mark.parametrize("options", [{"attention": ()}, {"classes": 10, "multipliers": (1,), "attention": ()}], ids=["plain", "classes"])
def test_a_compiled_unet_computes_the_same_and_keeps_channels_last(options):
    model = small("unet", **options).to(memory_format=torch.channels_last)
    x, t = noise(3, 3, 8, 8).to(memory_format=torch.channels_last), torch.tensor([1, 500, 999])
    orders, products = [], []

    def look(graph, inputs):
        """What a compiler is given: are the pictures that go into each convolution in channels-last order?"""
        for node in graph.graph.nodes:
            if node.target is torch.ops.aten.convolution.default:
                orders.append(node.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last))
            elif node.target is torch.ops.aten.addmm.default:
                products.append(node)
        return make_boxed_func(graph.forward)

    def gradients(net):
        model.zero_grad()
        out = net(x, t)
        out.square().sum().backward()
        return out, torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.compiler.reset()
    found, wanted = (
        gradients(torch.compile(model, backend=aot_autograd(fw_compiler=look, bw_compiler=lambda g, _: make_boxed_func(g.forward)))),
        gradients(model),
    )
    assert len(orders) == sum(isinstance(m, nn.Conv2d) for m in model.modules())
    assert all(orders)
    attention, residual = (sum(isinstance(m, kind) for m in model.modules()) for kind in (SelfAttention, Residual))
    # two of each attention, two that embed the time, and one for all residual blocks unless classes are added in between
    assert len(products) == 2 * attention + 2 + (residual if "classes" in options else 1)
    # sums in another order: float32 keeps seven digits of the largest
    assert (found[0] - wanted[0]).abs().max() < 1e-5 * wanted[0].abs().max()
    assert (found[1] - wanted[1]).abs().max() < 1e-5 * wanted[1].abs().max()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch's own tracer
# an ADM with classes is one without them and a sum more; a U-ViT has a token more. What changes the size in an ADM are more residual blocks of
# diffusers' own, which take the compiler as long as the rest
@pytest.mark.parametrize(
    ("kind", "classes", "options"),
    [
        ("adm", 10, {"multipliers": (1,), "attention": ()}),
        pytest.param("adm", 10, {}, marks=pytest.mark.slow),
        ("uvit", None, {}),
        ("uvit", 10, {}),
    ],
    ids=["adm", "adm with levels", "uvit", "uvit with classes"],
)
def test_the_others_compute_the_same_when_they_are_compiled(kind, classes, options):
    """Of what `keep_channels_last` puts into U-Nets, an ADM has the norms and the attention; its residual blocks and its time stay diffusers'."""
    model = small(kind, classes=classes, **options).train().to(memory_format=torch.channels_last)
    assert not [module for module in model.modules() if isinstance(module, (Residual, Times))]
    x, t = noise(3, 3, 8, 8).to(memory_format=torch.channels_last), torch.tensor([1, 500, 999])
    labels = [] if classes is None else [torch.tensor([0, 4, 10])]

    def gradients(net):
        model.zero_grad()
        out = net(x, t, *labels)
        out.square().sum().backward()
        return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters()])

    torch.compiler.reset()
    # sums in another order: float32 keeps seven digits of the largest
    for found, wanted in zip(gradients(torch.compile(model, backend="aot_eager", fullgraph=True)), gradients(model), strict=True):
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_the_written_out_gradient_of_the_group_norm_is_its_gradient():
    torch.manual_seed(0)
    x = 2 + torch.randn(16, 5, 6, dtype=torch.float64)  # a batch whose sums are taken in two stages
    offset, weight, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((16, 2, 3), (2, 3), (2, 3)))
    given = [tensor.requires_grad_() for tensor in (x, offset, weight, bias)]
    assert torch.autograd.gradcheck(lambda *of: Normalised.apply(*of, 1e-5), given)
    wanted = F.group_norm((x + offset.flatten(1)[:, None]).transpose(1, 2), 2, weight.flatten(), bias.flatten(), 1e-5)
    assert torch.allclose(Normalised.apply(*given, 1e-5), wanted.transpose(1, 2), rtol=1e-12, atol=1e-12)


def test_compiled_dropout_drops_its_share_independently_and_the_gradient_with_it():
    torch.manual_seed(0)
    layer = Dropout(0.2)
    x = torch.full((16, 32, 32, 32), 2.0).to(memory_format=torch.channels_last).requires_grad_()
    compiled = torch.compile(layer, backend="aot_eager")
    one, other = compiled(x), compiled(x)
    n = x.numel()
    dropped = [y == 0 for y in (one, other)]
    assert torch.equal(one[~dropped[0]].unique(), torch.tensor([2.5]))  # 2/(1-0.2)
    for share, p in [
        (dropped[0], 0.2),
        (dropped[1], 0.2),
        (dropped[0] & dropped[1], 0.04),  # one call tells nothing of the next
        (dropped[0][:, 1:] & dropped[0][:, :-1], 0.04),  # and no value of its neighbour in memory, row, column or batch
        (dropped[0][..., 1:] & dropped[0][..., :-1], 0.04),
        (dropped[0][:, :, 1:] & dropped[0][:, :, :-1], 0.04),
        (dropped[0][1:] & dropped[0][:-1], 0.04),
    ]:
        assert abs(share.double().mean() - p) < 4 * (p * (1 - p) / n) ** 0.5 * 1.1  # four standard errors, and pairs are a little fewer
    one.sum().backward()
    assert torch.equal(x.grad == 0, dropped[0])
    layer.eval()
    assert torch.equal(compiled(x), x)


@pytest.mark.slow  # half a minute of the C++ compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler here")
def test_a_compiled_norm_is_kept_for_the_next_process_under_what_it_computes(monkeypatch):
    """torch passes over functions with a gradient of their own, if it is not told otherwise. A norm with another gradient is another one."""
    backward = Normalised.backward

    def twice(ctx, dy):
        dx, *others = backward(ctx, dy)
        return 2 * dx, *others

    def compiled():
        torch.compiler.reset()  # a new process starts without what this one has compiled
        counters.clear()
        layer, x = nn.GroupNorm(2, 8), noise(4, 8, 5, 5).requires_grad_()
        layer.__class__ = GroupNorm
        torch.compile(layer)(x).square().mul(noise(4, 8, 5, 5, seed=1)).sum().backward()
        return x.grad, {name for name in counters["aot_autograd"] if name.startswith("autograd_cache")}

    with fresh_cache():
        first, second = compiled(), compiled()
        monkeypatch.setattr(Normalised, "backward", staticmethod(twice))
        changed = compiled()
    made = {"autograd_cache_miss", "autograd_cache_saved"}
    assert [how for _, how in (first, second, changed)] == [made, {"autograd_cache_hit"}, made]
    assert torch.equal(first[0], second[0])
    torch.testing.assert_close(changed[0], 2 * first[0])
