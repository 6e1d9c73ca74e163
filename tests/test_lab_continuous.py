"""Score-based and flow models reach DDPM's quality on digits in as many updates, with uniform times and with learned ones."""

from dataclasses import replace

import pytest

from noiseclock.lab.recipes import recipe
from noiseclock.lab.trained import evaluated, opened
from small_runs import EDM, FLOW, trained

KINDS = {
    "ddpm": {"solver": "ddim", "solver_steps": 20},
    "edm": {**EDM, "solver": "heun", "solver_steps": 10},  # 19 evaluations, as on flow
    "flow": {**FLOW, "solver": "heun", "solver_steps": 10},
}


@pytest.mark.slow  # two minutes each on one core
@pytest.mark.parametrize("sampler", ["uniform", "adaptive:every=20,stride=10"])
def test_continuous_models_are_as_good_as_ddpm_at_equal_updates(sampler, tmp_path):
    found = {}
    for kind, changes in KINDS.items():
        settings = replace(
            recipe("digits"), sampler=sampler, channels=16, batch=32, updates=300, lr=2e-3, warmup=30, ema=0.98, **changes,
            save_every=0, validate_every=0, sample_every=0, track=(),
        )  # fmt: skip
        trained(settings, tmp_path / kind)
        found[kind] = evaluated(opened(tmp_path / kind), samples=500, vlb_images=0).scores.frechet
    print(f"Fréchet distances with {sampler}: {found}")
    # the distance that docs/log.md states is none: they are ahead. Found here: 5.8, 4.1 and 3.3 with uniform, 5.9, 4.6 and 3.2 with adaptive
    assert found["edm"] < found["ddpm"]
    assert found["flow"] < found["ddpm"]
