"""The README is true: its loop runs, its names exist, its options are spelled as in the code."""

import inspect
import re
from pathlib import Path

import torch
from torch import nn

import noiseclock as nc
from noiseclock.core.names import SCHEDULES

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_loop_of_the_readme_runs():
    diff = re.search(r"```diff\n(.*?)```", README, re.DOTALL)
    assert diff
    code = "\n".join(line[2:] for line in diff[1].splitlines() if not line.startswith("-"))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x_t, t):
            return self.scale * x_t

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    scope = {"nc": nc, "model": model, "optimizer": optimizer, "loader": [torch.randn(4, 3, 8, 8) for _ in range(3)]}
    exec(code, scope)
    assert scope["clock"].updates == 3
    assert model.scale.item() != 1


def test_every_object_named_in_the_readme_exists_with_these_arguments():
    for name, arguments in re.findall(r"`([A-Z][A-Za-z0-9]+)\(([^`]*)\)`", README):
        parameters = inspect.signature(getattr(nc, name)).parameters
        for argument in filter(None, (a.split("=")[0].strip() for a in arguments.split(","))):
            assert argument in parameters, (name, argument)


def test_every_name_is_in_the_readme():
    for name in nc.__all__:
        thing = getattr(nc, name)
        if isinstance(thing, type) and issubclass(thing, (nc.Weighting, nc.Density)) and thing not in (nc.Weighting, nc.Density):
            assert f"`{name}(" in README, name
    for name in SCHEDULES:
        assert f"`{name}`" in README, name
    for name in nc.objectives.OBJECTIVES:
        assert f'`"{name}"`' in README, name
