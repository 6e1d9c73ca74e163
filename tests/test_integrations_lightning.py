"""A clock in Lightning: it counts updates, is saved and restored bit for bit, and draws one stratum for every sample of an update."""

import csv
import math
import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import noiseclock as nc
from noiseclock.integrations.lightning import ClockCallback, ClockMixin, micro_batch
from noiseclock.integrations.trackers import numbers

L = pytest.importorskip("lightning")
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger  # noqa: E402
from lightning.pytorch.plugins.precision import MixedPrecision  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec", "ignore:the sampling", "ignore:Starting from v1.9.0",
        "ignore:.*number of training batches", "ignore:.*No .* metrics found", "ignore:.*Checkpoint directory", "ignore:The .* does not have a value",
    ),
]  # fmt: skip

DATA = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))  # ten batches of four


class Model(ClockMixin, L.LightningModule):
    def __init__(self, sampler="uniform"):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 4)
        self.clock = nc.Clock("linear", sampler, "min-snr")

    def predict(self, x_t, t):
        return self.net(x_t) * (0.1 + 3 * t[:, None] / 1000)  # so that times differ in price

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


class Loader:
    """Ten batches in order; it knows where it is, so that Lightning can go on in the middle of an epoch."""

    def __init__(self):
        self.place = 0

    def __len__(self):
        return 10

    def __iter__(self):
        for i in range(self.place % 10, 10):  # Lightning does not ask for an eleventh
            self.place = i + 1
            yield DATA[4 * i : 4 * i + 4]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def trainer(folder, *, callback=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(**{"accelerator": "cpu", "default_root_dir": folder, "callbacks": callback or ClockCallback(), **quiet, **options})


def fit(model, folder, *, ckpt=None, save=None, loader=None, **options):
    run = trainer(folder, **options)
    run.fit(model, Loader() if loader is None else loader, ckpt_path=ckpt, weights_only=False if ckpt else None)
    if save:
        run.save_checkpoint(save)
    return run


def differing(a, b, path=""):
    """Where two nested states differ in any bit."""
    if isinstance(a, (list, tuple)):
        a, b = dict(enumerate(a)), dict(enumerate(b))
    if isinstance(a, dict):
        return [path + " keys"] if set(a) != set(b) else [found for key in a for found in differing(a[key], b[key], f"{path}/{key}")]
    same = torch.equal(a, b) if isinstance(a, torch.Tensor) else np.array_equal(a, b, equal_nan=isinstance(a, float))
    return [] if same else [path]


# --- a training goes on as if it had never stopped ----------------------------------------------------------------------------------------

SAMPLERS = {
    "uniform": lambda: nc.Uniform(),
    "loss-second-moment": lambda: nc.LossSecondMoment(bins=4, refresh=3, warmup=4),
    "variance-optimal": lambda: nc.VarianceOptimal(every=1, bins=4, warmup=2, gain=1.0),
    "adaptive": lambda: nc.Adaptive.scaled(every=2, stride=100, lr=1e-3),
    "annealed": lambda: nc.Annealed(nc.LogitNormal(), start=2, stop=30),
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_resumed_training_is_that_which_was_never_stopped(name, accumulate, tmp_path):
    """Stopped in the middle of an epoch: after 5 of ten batches, or with three of them an update, after 2 updates of 4."""
    half, whole = (15, 30) if accumulate == 1 else (6, 12)
    models = [Model(SAMPLERS[name]()) for _ in range(3)]
    options = {"accumulate_grad_batches": accumulate, "max_epochs": -1}
    fit(models[0], tmp_path, max_steps=whole, save=tmp_path / "whole.ckpt", **options)
    fit(models[1], tmp_path, max_steps=half, save=tmp_path / "half.ckpt", **options)
    fit(models[2], tmp_path, max_steps=whole, ckpt=tmp_path / "half.ckpt", save=tmp_path / "resumed.ckpt", **options)
    assert models[0].clock.updates == models[2].clock.updates == whole
    assert not torch.equal(models[0].net.weight, models[1].net.weight)  # the second half did something
    states = [torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "resumed")]
    for part in ("state_dict", "optimizer_states", "callbacks"):
        assert differing(*(state[part] for state in states)) == []
    assert differing(models[0].clock.state_dict(), models[2].clock.state_dict()) == []
    if name in ("loss-second-moment", "variance-optimal"):
        assert models[1].clock.sampler.ess() < 0.99  # there was something to restore


def test_another_clock_is_refused_and_a_checkpoint_without_one_is_told(tmp_path):
    fit(Model("uniform"), tmp_path, max_steps=3, save=tmp_path / "uniform.ckpt")
    with pytest.raises(ValueError, match=r"the state belongs to another clock: its sampler is Uniform\(\), this one's is LogitNormal"):
        fit(Model("logit-normal"), tmp_path, max_steps=6, ckpt=tmp_path / "uniform.ckpt")
    fit(Model(), tmp_path, max_steps=3, callback=L.Callback(), save=tmp_path / "none.ckpt")
    with pytest.warns(UserWarning, match=r"none.ckpt was made without ClockCallback, so the clock starts anew"):
        fit(Model(), tmp_path, max_steps=6, ckpt=tmp_path / "none.ckpt")


# --- updates and micro-batches --------------------------------------------------------------------------------------------------------------


def strata(times):
    """Are these times one from each of as many equal intervals?"""
    times = torch.cat(times).sort().values
    return torch.equal((times * len(times)).floor(), torch.arange(len(times), dtype=times.dtype))


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "endless"])
def test_times_are_stratified_over_the_micro_batches_of_an_update(sized, tmp_path, monkeypatch):
    model, updates, times, micros = Model(), [], [], []
    draw, attach = nc.Clock.draw, nc.Clock.attach

    def drawn(self, *given, **options):
        b = draw(self, *given, **options)
        times.append(b.time)
        micros.append(options["micro"])
        return b

    def attached(self, optimizer):
        optimizer.register_step_post_hook(lambda *_: (updates.append(times.copy()), times.clear()))
        return attach(self, optimizer)

    monkeypatch.setattr(nc.Clock, "draw", drawn)
    monkeypatch.setattr(nc.Clock, "attach", attached)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield DATA[0]

    loader = Loader() if sized else DataLoader(Endless(), batch_size=4)
    fit(model, tmp_path, loader=loader, accumulate_grad_batches=3, max_steps=8, max_epochs=-1)
    # ten batches make three updates of three and one of one, which is stratified by itself
    assert micros == ([*[(0, 3), (1, 3), (2, 3)] * 3, (0, 1)] * 2 if sized else [(0, 3), (1, 3), (2, 3)] * 8)
    assert [len(update) for update in updates] == ([3, 3, 3, 1] * 2 if sized else [3] * 8)
    assert all(strata(update) for update in updates)
    assert model.clock.updates == 8
    first, second = updates[0], updates[1]
    assert not torch.equal(torch.cat(first).sort().values, torch.cat(second).sort().values)


@pytest.mark.parametrize(
    ("parts", "batches", "micros"),
    [
        (1, 2, [(0, 1)] * 3),  # the third is beyond the epoch
        (3, 5, [(0, 3), (1, 3), (2, 3), (0, 2), (1, 2), (2, 3)]),
        (4, math.inf, [(0, 4), (1, 4), (2, 4), (3, 4), (0, 4)]),
    ],
)
def test_micro_batches_of_an_epoch(parts, batches, micros):
    trainer = SimpleNamespace(accumulate_grad_batches=parts, num_training_batches=batches)
    assert [micro_batch(trainer, i) for i in range(len(micros))] == micros


def test_a_run_that_stopped_at_the_end_of_an_epoch_goes_on_with_any_loader(tmp_path):
    loader = DataLoader(TensorDataset(DATA), batch_size=4)
    fit(Model(), tmp_path, loader=loader, max_steps=10, max_epochs=-1, save=tmp_path / "half.ckpt")
    model = Model()
    fit(model, tmp_path, loader=loader, max_steps=25, max_epochs=-1, ckpt=tmp_path / "half.ckpt")
    assert model.clock.updates == 25


def poisoned(model, steps):
    """Let the gradients of these updates be infinite."""
    seen = []

    def on_after_backward():
        seen.append(1)
        if len(seen) - 1 in steps:
            model.net.weight.grad[0, 0] = math.inf

    model.on_after_backward = on_after_backward
    return seen


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_steps_that_a_grad_scaler_skips_do_not_count(fused, tmp_path, monkeypatch):
    """16-mixed as on a GPU, with the scaler that Lightning would make there. A probe that a skipped step interrupts is made anew."""
    model, pairs = Model(nc.Adaptive.scaled(every=1, stride=100, lr=1e-3)), []
    model.configure_optimizers = lambda: torch.optim.Adam(model.parameters(), 1e-2, fused=fused)
    after = nc.Adaptive.after
    monkeypatch.setattr(nc.Adaptive, "after", lambda self, probe, batch: (pairs.append((probe.x0, batch.x0)), after(self, probe, batch)))
    poisoned(model, {0, 4, 5})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fit(model, tmp_path, max_steps=10, plugins=MixedPrecision("16-mixed", "cpu", scaler))
    assert model.clock.updates == 7
    assert scaler.get_scale() == 1.0  # halved three times
    assert all(torch.equal(probed, drawn) for probed, drawn in pairs)
    # a fused optimiser tells of a skipped step only after the sampler has looked, and the sampler leaves that look out
    made = [x0 for i, (x0, _) in enumerate(pairs) if not fused or i not in (0, 4, 5)]
    assert [int(torch.where((x0[0] == DATA).all(1))[0]) // 4 for x0 in made] == [1, 2, 3, 6, 7, 8, 9]


def test_without_mixed_precision_nothing_is_skipped(tmp_path):
    model = Model(nc.Adaptive.scaled(every=2, stride=100, lr=1e-3))
    run = fit(model, tmp_path, max_steps=10)
    assert model.clock.updates == run.global_step == 10
    assert model.clock.sampler.probes == 5


class Manual(Model):
    """Manual optimisation: two optimisers, and two micro-batches to an update of the one that trains the network."""

    def __init__(self, sampler="uniform"):
        super().__init__(sampler)
        self.automatic_optimization = False
        self.other = nn.Parameter(torch.zeros(()))
        self.times = []

    def configure_optimizers(self):
        return torch.optim.SGD([self.other], 0.1), torch.optim.Adam(self.net.parameters(), 1e-2)

    def training_step(self, batch, batch_idx):
        other, mine = self.optimizers()
        self.manual_backward(self.clock_losses(batch, micro=(batch_idx % 2, 2)).mean() / 2)
        if batch_idx % 2:
            mine.step()
            mine.zero_grad()
        self.manual_backward((self.other - 1).square())
        other.step()
        other.zero_grad()


def test_manual_optimisation_with_several_optimisers(tmp_path):
    model = Manual()
    fit(model, tmp_path, max_epochs=2, callback=ClockCallback(optimizer=1))
    assert model.clock.updates == 10  # of the second optimiser; the first made 20
    for chosen in (None, 2):
        with pytest.raises(ValueError, match=r"there are 2 optimisers; say which trains the clock's model: ClockCallback\(optimizer=0\)"):
            fit(Manual(), tmp_path, max_epochs=1, callback=ClockCallback(optimizer=chosen))


class Both(Model):
    """Two optimisers that train the network together, one after the other."""

    def __init__(self):
        super().__init__(nc.VarianceOptimal(every=2, bins=8))
        self.automatic_optimization = False

    def configure_optimizers(self):
        return torch.optim.Muon([self.net.weight], 1e-2), torch.optim.AdamW([self.net.bias], 1e-2)

    def training_step(self, batch, batch_idx):
        self.manual_backward(self.clock_losses(batch).mean())
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("chosen", "parameters"), [((0, 1), 2), ([1], 1), (0, 1)])
def test_two_optimisers_that_train_one_network(tmp_path, chosen, parameters):
    model = Both()
    with nullcontext() if parameters == 2 else pytest.warns(UserWarning, match="trained by an optimiser that is not attached"):
        fit(model, tmp_path, max_epochs=1, callback=ClockCallback(optimizer=chosen))
    assert model.clock.updates == 10  # of ten batches
    assert sum(len(group["params"]) for each in model.clock.optimizers for group in each.param_groups) == parameters
    assert model.clock.sampler.probes > 1


def test_manual_optimisation_resumes_too(tmp_path):
    models = [Manual(nc.LossSecondMoment(bins=4, refresh=3, warmup=4)) for _ in range(3)]
    for model, epochs, ckpt in zip(models, (4, 2, 4), (None, None, tmp_path / "half.ckpt"), strict=True):
        fit(model, tmp_path, max_epochs=epochs, callback=ClockCallback(optimizer=1), ckpt=ckpt, save=tmp_path / "half.ckpt")
    assert torch.equal(models[0].net.weight, models[2].net.weight)
    assert differing(models[0].clock.state_dict(), models[2].clock.state_dict()) == []


# --- logs ---------------------------------------------------------------------------------------------------------------------------------


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_the_samplers_numbers_go_through_the_trainers_loggers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = Model(nc.VarianceOptimal(every=2, bins=4, warmup=2))
    board, table = TensorBoardLogger(tmp_path, name="board", version=""), CSVLogger(tmp_path, name="table", version="")
    fit(model, tmp_path, max_epochs=2, logger=[board, table], log_every_n_steps=5, callback=ClockCallback(curves_every=15))
    events = EventAccumulator(str(tmp_path / "board"), size_guidance={"histograms": 0}).Reload()
    # as often as Lightning logs; the curves, and the numbers once more, at 15 and at the end
    assert [event.step for event in events.Scalars("noiseclock/rho")] == [5, 10, 15, 20, 20]
    assert [event.step for event in events.Histograms("noiseclock/density")] == [15, 20]
    for name, value in numbers(model.clock).items():
        assert events.Scalars(name)[-1].value == np.float32(value)
    rows = rows_of(tmp_path / "table")
    assert float(rows[-1]["noiseclock/ess"]) == model.clock.sampler.ess()
    assert sum(row["train_loss"] != "" for row in rows) == 4  # what the mixin's step logs


def test_zero_means_no_curves(tmp_path):
    model, table = Model(), CSVLogger(tmp_path, name="table", version="")
    fit(model, tmp_path, max_epochs=1, logger=table, log_every_n_steps=4, callback=ClockCallback(curves_every=0))
    assert [row["step"] for row in rows_of(tmp_path / "table") if row["noiseclock/loss_q1"]] == ["4", "8"]  # not at the end, after ten
    with pytest.raises(ValueError, match="curves_every must be a whole number of at least 0"):
        ClockCallback(curves_every=-1)


# --- what a user may get wrong --------------------------------------------------------------------------------------------------------------


def test_mistakes_are_named(tmp_path):
    class Bare(L.LightningModule):
        pass

    class Mute(Model):
        predict = ClockMixin.predict

    with pytest.raises(TypeError, match=r"looks for a Clock in the module's `clock`: set self.clock = nc.Clock\(...\) in Bare"):
        ClockCallback().setup(None, Bare(), "fit")
    with pytest.raises(NotImplementedError, match=r"Mute must define predict\(self, x_t, t\)"):
        fit(Mute(), tmp_path, max_steps=1)
    with pytest.raises(TypeError, match=r"a batch must be x0 or \(x0, cond\), got list"):
        Model().training_step([], 0)
    with pytest.raises(TypeError, match=r"a batch must be x0 or \(x0, cond\), got dict; for others define training_step"):
        Model().training_step({"image": DATA}, 0)
    with pytest.raises(ValueError, match=r"give it to a Trainer, and the checkpoint to trainer.fit\(ckpt_path=...\)"):
        ClockCallback().load_state_dict({"ranks": []})


def test_conditioning_comes_with_the_batch(tmp_path):
    told = []

    class Conditional(Model):
        def predict(self, x_t, t, label):
            told.append(label)
            return self.net(x_t) * label[:, None]

    labels = torch.arange(40)
    fit(Conditional(), tmp_path, max_epochs=1, loader=DataLoader(TensorDataset(DATA, labels), batch_size=4))
    assert torch.equal(torch.cat(told), labels)


def alone(script, *arguments):
    """Run a script in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_lightning_one_sentence_says_what_to_install():
    script = """
import sys
from contextlib import nullcontext
for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
    sys.modules[name] = None
from noiseclock.integrations.lightning import ClockCallback
try:
    ClockCallback()
except ImportError as error:
    print(error)
"""
    assert alone(script) == "ClockCallback needs Lightning, which is not installed: pip install lightning\n"


PYTORCH_LIGHTNING = """
import sys
from contextlib import nullcontext
if sys.argv[1] == "without lightning":
    sys.modules["lightning"] = sys.modules["lightning.pytorch"] = None
if sys.argv[1] == "with both imported":
    import lightning.pytorch
import pytorch_lightning as pl, torch, noiseclock as nc
from noiseclock.integrations.lightning import ClockCallback, ClockMixin

class Model(ClockMixin, pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.clock = torch.nn.Linear(4, 4), nc.Clock("linear", "loss-second-moment")
    def predict(self, x_t, t):
        return self.net(x_t)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

model, callback = Model(), ClockCallback()
trainer = pl.Trainer(max_steps=5, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=callback)
trainer.fit(model, torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=4))
assert isinstance(callback, pl.Callback)
print(model.clock.updates, "lightning.pytorch" in sys.modules and sys.modules["lightning.pytorch"] is not None)
"""


@pytest.mark.parametrize("installed", ["without lightning", "with both", "with both imported"])
def test_pytorch_lightning_does_as_well(installed):
    pytest.importorskip("pytorch_lightning")
    assert alone(PYTORCH_LIGHTNING, installed).splitlines()[-1] == f"5 {installed == 'with both imported'}"
