"""A clock in Lightning with two processes: they share the strata, each resumes as itself, and what Uncertainty learns is the same on both."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import noiseclock as nc
from noiseclock.integrations.lightning import ClockCallback
from test_integrations_lightning import Loader, Model, differing, fit, pytestmark as marks, strata, trainer

pytestmark = marks


class Shared(Loader):
    """Each rank has its own half of every batch."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        for x0 in super().__iter__():
            yield x0[2 * rank : 2 * rank + 2]


def fit_two(model, folder, *, epochs, ckpt=None):
    """To be called by both processes; five micro-batches an update, of ten an epoch."""
    run = trainer(folder, devices=2, strategy="ddp", max_epochs=epochs, accumulate_grad_batches=5, use_distributed_sampler=False)
    run.fit(model, Shared(), ckpt_path=ckpt, weights_only=False if ckpt else None)
    return run


def two(script, folder):
    """What a script saves as rank-0.pt and rank-1.pt, run by Lightning in two processes."""
    path = folder / "two.py"
    path.write_text(script)
    here = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(path), str(folder)], env=here, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(2)]


# --- strata and checkpoints -----------------------------------------------------------------------------------------------------------------

SAMPLED = """
import sys
from pathlib import Path
import torch
from test_integrations_lightning import Model, SAMPLERS
from test_integrations_lightning_ranks import fit_two

folder, times = Path(sys.argv[1]), []

def trained(name, epochs, ckpt=None):
    model = Model(SAMPLERS[name]())
    draw = model.clock.draw
    def drawn(x0, **options):
        b = draw(x0, **options)
        times.append(b.time)
        return b
    model.clock.draw = drawn
    run = fit_two(model, folder, epochs=epochs, ckpt=ckpt)
    run.save_checkpoint(folder / f"{name}-{epochs}-{'resumed' if ckpt else 'through'}.ckpt")
    return {"weights": model.net.weight.detach(), "clock": model.clock.state_dict(), "updates": model.clock.updates}

found = {}
for name in ("uniform", "loss-second-moment", "variance-optimal"):
    found[name] = trained(name, 4)
    trained(name, 2)
    found[name + " resumed"] = trained(name, 4, folder / f"{name}-2-through.ckpt")
found["times"] = times[:10]  # of the uniform sampler's first two updates
torch.save(found, folder / f"rank-{torch.distributed.get_rank()}.pt")
"""


def test_two_processes_share_the_strata_and_resume_each_as_itself(tmp_path):
    ranks = two(SAMPLED, tmp_path)
    for name in ("uniform", "loss-second-moment", "variance-optimal"):
        for rank in ranks:
            assert rank[name]["updates"] == 8  # five micro-batches each, of ten an epoch
            assert differing(rank[name], rank[name + " resumed"]) == []
        assert torch.equal(ranks[0][name]["weights"], ranks[1][name]["weights"])
        # noise is each rank's own, what was learned is the same
        states = [rank[name]["clock"] for rank in ranks]
        assert not torch.equal(states[0]["noise"]["state"], states[1]["noise"]["state"])
        if name != "uniform":
            for part in ("pmf", "faded"):
                assert torch.equal(*(state["sampler"][part] for state in states))
            assert states[0]["sampler"]["faded"].abs().max() > 0  # and is something; eight small probes need not move a density
    assert (ranks[0]["loss-second-moment"]["clock"]["sampler"]["pmf"] - 1 / 4).abs().max() > 0.01  # no longer uniform on its four bins
    # an update's times are one from each of 2 ranks · 5 micro-batches · 2 samples intervals
    for update in range(2):
        assert strata([time for rank in ranks for time in rank["times"][5 * update : 5 * update + 5]])
    # one process goes on from what two have saved
    model = Model(nc.LossSecondMoment(bins=4, refresh=3, warmup=4))
    run = trainer(tmp_path, max_epochs=5, accumulate_grad_batches=5)
    run.fit(model, Loader(), ckpt_path=tmp_path / "loss-second-moment-4-through.ckpt", weights_only=False)
    assert model.clock.updates == 10


# --- what Uncertainty learns ----------------------------------------------------------------------------------------------------------------


class Learned(Model):
    """The weighting is given to the optimiser beside the module, or owned by the module, or forgotten."""

    def __init__(self, how):
        super().__init__()
        self.how, self.clock = how, nc.Clock("linear", "uniform", nc.Uncertainty())
        if how == "owned":
            self.uncertainty = self.clock.weighting.net

    def configure_optimizers(self):
        beside = self.clock.weighting.parameters() if self.how == "given" else []
        return torch.optim.Adam([*self.parameters(), *beside], 1e-2)


LEARNED = """
import sys
from pathlib import Path
import torch
from test_integrations_lightning_ranks import Learned, fit_two

found = {}
for how in ("given", "owned"):
    model = Learned(how)
    fit_two(model, sys.argv[1], epochs=4)
    found[how] = {"net": model.net.weight.detach(), **model.clock.weighting.state_dict()}
torch.save(found, Path(sys.argv[1]) / f"rank-{torch.distributed.get_rank()}.pt")
"""


def test_two_processes_learn_one_weighting(tmp_path):
    ranks = two(LEARNED, tmp_path)
    assert differing(*ranks) == []
    given, owned = ranks[0]["given"], ranks[0]["owned"]
    # DDP averages what the module owns. Both are the same mean, but micro-batches are summed before it there and after it here, so float32's
    # last bits differ. Not averaged, the two ranks would be 0.09 apart.
    for name in given:
        torch.testing.assert_close(given[name], owned[name], rtol=1e-5, atol=1e-6)
    assert given["weight"].abs().max() > 0.01  # of eight updates by up to 0.01 each


def test_a_weighting_that_nothing_trains_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no optimiser trains the Uncertainty weighting.*\*self.clock.weighting.parameters\(\)"):
        fit(Learned("forgotten"), tmp_path, max_steps=1)
    model = Learned("given")
    fit(model, tmp_path, max_steps=1)
    assert model.clock.weighting.net.bias != 0


@pytest.mark.parametrize(("how", "device"), [("given", "meta"), ("owned", "cpu")])
def test_a_weighting_goes_where_lightning_takes_the_module(how, device):
    """One that the module owns goes with the module."""
    model = Learned(how)
    ClockCallback().setup(SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("meta"))), model, "fit")
    assert model.clock.weighting.net.bias.device.type == device
