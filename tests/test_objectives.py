import math

import pytest
import torch

import noiseclock as nc
from noiseclock.core.batch import column
from noiseclock.core.objectives import OBJECTIVES, Preconditioned, squared_error

SCHEDULES = [nc.schedule(name) for name in ("linear", "cosine", "flow", "edm")]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exact_prediction_gives_back_x0(schedule, name, dtype):
    objective = nc.objective(name)
    time = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    x0, noise = (torch.randn(19, 2, 3, dtype=dtype, generator=torch.Generator().manual_seed(i)) for i in range(2))
    a, s = (column(c, x0) for c in schedule(time))
    seen = objective.model_input(a * x0 + s * noise, a, s)
    target = objective.target(x0, noise, a, s)
    # x0 = (x_t - s·eps)/a magnifies the rounding of x_t by 1/a
    unit = torch.finfo(dtype).eps * (1 + s) * 16
    assert ((objective.to_x0(target, seen, a, s) - x0).abs() <= unit * (1 + 1 / a)).all()


def test_targets_by_hand():
    x0, noise, a, s = torch.tensor([[2.0]]), torch.tensor([[5.0]]), torch.tensor([[0.6]]), torch.tensor([[0.8]])
    expected = {"eps": 5.0, "x0": 2.0, "v": 0.6 * 5 - 0.8 * 2, "flow": 3.0}
    for name, value in expected.items():
        assert nc.objective(name).target(x0, noise, a, s).item() == pytest.approx(value)


def test_preconditioning_is_edms_table():
    """Table 1 of 2206.00364 in σ, against the form multiplied out in a and s."""
    sigma, sigma_data = torch.tensor([[0.01], [0.5], [20.0]], dtype=torch.float64), 0.7
    c_skip = sigma_data**2 / (sigma**2 + sigma_data**2)
    c_out = sigma * sigma_data / (sigma**2 + sigma_data**2).sqrt()
    c_in = 1 / (sigma**2 + sigma_data**2).sqrt()
    x0, noise, output = torch.randn(3, 3, 4, dtype=torch.float64).unbind(0)
    x, one = x0 + sigma * noise, torch.ones_like(sigma)
    objective = Preconditioned(sigma_data)
    seen = objective.model_input(x, one, sigma)
    assert torch.allclose(seen, c_in * x)
    assert torch.allclose(objective.target(x0, noise, one, sigma), (x0 - c_skip * x) / c_out)
    assert torch.allclose(objective.to_x0(output, seen, one, sigma), c_skip * x + c_out * output)


def test_preconditioned_input_and_target_have_unit_variance():
    """What EDM's coefficients are for: data of standard deviation σ_data gives inputs and targets of variance 1 at every noise level."""
    generator = torch.Generator().manual_seed(0)
    x0 = 0.5 * torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(200_000, 1, generator=generator, dtype=torch.float64)
    for schedule in SCHEDULES:
        for u in (0.1, 0.5, 0.9):
            a, s = (c.reshape(1, 1) for c in schedule(u))
            objective = Preconditioned(0.5)
            for value in (objective.model_input(a * x0 + s * noise, a, s), objective.target(x0, noise, a, s)):
                assert value.var().item() == pytest.approx(1, abs=5 * math.sqrt(2 / 200_000))


@pytest.mark.parametrize("name", ["v", "flow", "edm"])
def test_nothing_is_divided_by_zero_without_noise_or_without_signal(name):
    objective = nc.objective(name)
    a, s = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])
    x0, noise = torch.randn(2, 3), torch.randn(2, 3)
    seen = objective.model_input(a * x0 + s * noise, a, s)
    target = objective.target(x0, noise, a, s)
    assert target.isfinite().all()
    assert torch.allclose(objective.to_x0(target, seen, a, s), x0, atol=1e-6)


def test_squared_error_is_a_mean_per_sample_in_float32_at_least():
    prediction, target = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    expected = torch.stack([((p - t) ** 2).mean() for p, t in zip(prediction, target, strict=True)])
    assert torch.allclose(squared_error(prediction, target), expected, rtol=1e-6)
    assert squared_error(prediction.bfloat16(), target.bfloat16()).dtype == torch.float32
    assert squared_error(prediction.double(), target).dtype == torch.float64
    # 1e-4 is lost beside 1 in bfloat16, but not when the difference is taken in float32
    assert squared_error(torch.ones(1, 4).bfloat16(), torch.full((1, 4), 1 + 1e-4)).item() == pytest.approx(1e-8, rel=1e-2)


def test_bad_input_is_named():
    class Output:
        sample = torch.zeros(2, 3)

    with pytest.raises(ValueError, match="unknown objective 'epsilon'; known: edm, eps, flow, v, x0"):
        nc.objective("epsilon")
    with pytest.raises(TypeError, match=r"got Output; a diffusers model keeps it in \.sample"):
        squared_error(Output(), torch.zeros(2, 3))  # a common slip
    with pytest.raises(ValueError, match=r"prediction has shape \(2, 6\), the target \(2, 3\)"):
        squared_error(torch.zeros(2, 6), torch.zeros(2, 3))
    for loss in (torch.zeros(()), torch.zeros(2)):
        with pytest.raises(ValueError, match=r"the target \(2, 3\); give what the model predicts, not a loss"):
            squared_error(loss, torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"the prediction has shape \(2,\), the target \(2, 1\)$"):
        squared_error(torch.zeros(2), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="sigma_data must be positive"):
        nc.objective("edm", sigma_data=0.0)
    with pytest.raises(TypeError, match="got int"):
        nc.objective(3)
