"""A user's whole training step under torch.compile, with the clock in it."""

import pytest
import torch

import noiseclock as nc
from gaussians import Denoiser

SAMPLERS = {
    "uniform": nc.Uniform,
    "loss-second-moment": lambda: nc.LossSecondMoment(bins=4, refresh=4, warmup=8),
    "variance-optimal": lambda: nc.VarianceOptimal(every=2),
    "adaptive": lambda: nc.Adaptive.scaled(every=2, stride=100),
    "lookahead": lambda: nc.Lookahead(every=2),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_compiled_step_trains_as_the_step_does(name):
    """aot_eager hands the traced operations to autograd as inductor does, which failed at probes, and computes them as they are."""
    (losses, learned, compiled), (wanted, expected, none) = (trained(SAMPLERS[name](), compiling) for compiling in (True, False))
    assert losses == pytest.approx(wanted, rel=1e-9)  # in float64: sums may be in another order
    torch.testing.assert_close(learned, expected, rtol=1e-5, atol=1e-7)  # the policy of Adaptive is float32
    assert name == "uniform" or any(x.any() for x in learned)
    assert max(compiled) < 4  # the model for training, and once more for the first probe; nothing later
    assert not none


def trained(sampler, compiling):
    """(losses of 16 updates, the tensors of the sampler's state in the end, the updates in which something was compiled)"""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Denoiser(width=8).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)  # compiled, Adam's steps differ by 1e-6
    clock = nc.Clock("linear", sampler).attach(optimizer)

    def step(x0):
        b = clock.draw(x0, predict=model)
        loss = clock.loss(b, model(b.x_t, b.t)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def backend(graph, inputs):
        compiled.append(len(losses))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    run, losses, compiled = torch.compile(step, backend=backend) if compiling else step, [], []
    for _ in range(16):
        losses.append(float(run(torch.randn(64, 2, dtype=torch.float64))))
    return losses, list(tensors(clock.state_dict()["sampler"])), compiled


def tensors(state):
    """All tensors in a nested state."""
    for value in state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from tensors(value)
