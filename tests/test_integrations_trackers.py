"""Trackers show the clock's own numbers: event files and tables are read back and compared with it."""

import json
import math
import sys

import numpy as np
import pytest
import torch
from torch import nn

import noiseclock as nc
from noiseclock.integrations.trackers import PREFIX, curves, means, numbers, prices, track

pytestmark = pytest.mark.integrations

SAMPLERS = {
    "uniform": (nc.Uniform(), set()),
    "loss-second-moment": (nc.LossSecondMoment(refresh=2), {"ess", "skipped"}),
    "variance-optimal": (nc.VarianceOptimal(every=2, bins=8, warmup=2), {"ess", "rho", "held_out_rho", "probes", "skipped"}),
    "lookahead": (nc.Lookahead(every=2, bins=8, warmup=2), {"ess", "probes", "skipped"}),
    "gradient-variance": (nc.GradientVariance(bins=4, samples=4, pairs=1, every=4), {"ess", "skipped"}),
    "adaptive": (nc.Adaptive.scaled(every=1, stride=100, lr=1e-4), {"probes", "skipped", "entropy", "r_squared", "f"}),
    "annealed": (
        nc.Annealed(nc.LossSecondMoment(refresh=2), nc.LossEMA(refresh=2), 0, 30),
        {"ess", "skipped", "other_ess", "other_skipped", "share"},
    ),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, t):
        return self.layer(x) * (1 + t[:, None] / 1000)


def trained(sampler, schedule="linear", updates=12):
    """A clock after some updates of a small network."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    clock = nc.Clock(schedule, sampler, "min-snr").attach(optimizer)
    for _ in range(updates):
        b = clock.draw(torch.randn(16, 4), predict=model)
        clock.loss(b, model(b.x_t, b.t)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return clock


@pytest.fixture(scope="module")
def clock():
    return trained(nc.VarianceOptimal(every=2, bins=8, warmup=2))


# --- what there is to show ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.filterwarnings("ignore:for five probes")
def test_every_sampler_says_what_a_log_should_show(name):
    sampler, wanted = SAMPLERS[name]
    clock = trained(sampler)
    found = numbers(clock)
    assert set(found) == {PREFIX + key for key in wanted | {f"loss_q{i}" for i in range(1, 5)}}
    assert all(math.isfinite(value) for value in found.values())
    for key in wanted:
        assert found[PREFIX + key] == clock.sampler.info[key]


def test_the_numbers_are_the_samplers():
    optimal, annealed = trained(nc.VarianceOptimal(every=2, bins=8, warmup=2)), trained(SAMPLERS["annealed"][0])
    assert numbers(optimal)[PREFIX + "rho"] == optimal.sampler.rho
    assert numbers(optimal)[PREFIX + "ess"] == optimal.sampler.ess()
    assert numbers(annealed)[PREFIX + "share"] == 12 / 30
    assert numbers(annealed)[PREFIX + "other_ess"] == annealed.sampler.other.ess()


def test_the_f_statistic_follows_from_r_squared_and_the_number_of_probes():
    info = trained(SAMPLERS["adaptive"][0]).sampler.info
    # 12 probes leave 10 degrees of freedom; both are float64
    assert info["f"] == pytest.approx(info["r_squared"] / (1 - info["r_squared"]) * 10, rel=1e-9)


def test_losses_come_by_quarter_of_time():
    clock = nc.Clock("linear", "uniform")
    # four samples in each quarter, with an error that is that quarter's number
    for quarter in range(4):
        b = clock.at(torch.zeros(4, 4), (quarter + torch.tensor([0.1, 0.3, 0.6, 0.9])) / 4)
        clock.record.add(b.time, torch.full((4,), quarter + 1.0))
    # times of 0.25 to 0.26 count in the second quarter, so quarters are exact here
    assert [numbers(clock)[f"{PREFIX}loss_q{i}"] for i in range(1, 5)] == pytest.approx([1, 2, 3, 4], abs=1e-12)
    # nothing is said of what was never drawn
    assert numbers(nc.Clock("linear", "uniform")) == {}


@pytest.mark.parametrize(
    "schedule", [nc.schedule("linear", steps=7), nc.schedule("cosine", steps=120), nc.schedule("flow")], ids=["7", "120", "flow"]
)
def test_curves_keep_the_mass_of_the_density(schedule):
    sampler = nc.SpeeD() if schedule.steps else nc.LogitNormal()
    clock = nc.Clock(schedule, sampler, "min-snr")
    found, plot = curves(clock), clock.plot_data()
    assert all(len(column) == 50 for column in found)
    # sums in another order: a few rounding errors of float64
    assert found.density.mean() == pytest.approx(plot.p.mean(), abs=1e-12)
    if schedule.steps:
        pmf = torch.arange(schedule.steps)
        below = clock.sampler.log_pmf(pmf, schedule.steps).exp().numpy().cumsum()
        # half of time is half of the cells, and its probability that of half the steps, interpolated
        wanted = np.interp(0.5, np.arange(1, schedule.steps + 1) / schedule.steps, below)
        assert found.density[:25].sum() / 50 == pytest.approx(wanted, abs=1e-12)
    assert np.array_equal(found.log_snr, schedule.log_snr(torch.from_numpy(found.time)).numpy())


def test_means_of_more_cells_and_of_fewer():
    assert means(np.array([1.0, 3.0]), 4) == pytest.approx([1, 1, 3, 3], abs=1e-12)
    assert means(np.array([1.0, 3.0, 5.0, 7.0]), 2) == pytest.approx([2, 6], abs=1e-12)


def test_prices_are_those_of_the_sampler_that_measures_them(clock):
    found = prices(clock)
    price, error = clock.sampler.curve
    assert np.array_equal(found.price, price.numpy())
    assert np.array_equal(found.error, error.numpy())
    assert found.price.max() > 0
    assert len(prices(trained(nc.Annealed(nc.VarianceOptimal(every=2, bins=8)))).price) == 8
    assert prices(trained("uniform")) is None


# --- TensorBoard --------------------------------------------------------------------------------------------------------------------------


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"histograms": 0, "images": 0, "scalars": 0}).Reload()


def check_events(folder, clock, step):
    """The event files of a folder hold the clock's numbers and curves."""
    found = events(folder)
    for name, value in numbers(clock).items():
        (event,) = found.Scalars(name)
        assert (event.step, event.value) == (step, np.float32(value))
    seen = clock.record.by_time()
    wanted = {
        "density": curves(clock).density / 50,
        "drawn": seen.drawn,
        "loss_by_time": np.nan_to_num(seen.loss),
        "price_by_time": prices(clock).price,
    }
    for name, heights in wanted.items():
        (event,) = found.Histograms(PREFIX + name)
        shown = event.histogram_value
        assert event.step == step
        assert shown.bucket == heights.tolist()
        assert shown.bucket_limit == pytest.approx(np.arange(1, len(heights) + 1) / len(heights), abs=1e-15)
        assert (shown.min, shown.max) == (0, 1)
    return found


def test_a_summary_writer_gets_numbers_histograms_and_a_figure(clock, tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        track(writer, clock, 7)
    found = check_events(tmp_path, clock, 7)
    # the density is one: its bars sum to 1 up to rounding
    assert sum(found.Histograms(PREFIX + "density")[0].histogram_value.bucket) == pytest.approx(1, abs=1e-12)
    (image,) = found.Images(PREFIX + "by_time")
    assert image.encoded_image_string.startswith(b"\x89PNG")
    assert (image.width, image.height) == (1500, 350)  # three panels of 5 by 3.5 inches at 100 dots an inch


def test_without_matplotlib_there_are_numbers_and_histograms(clock, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with SummaryWriter(tmp_path) as writer:
        track(writer, clock, 7)
    assert check_events(tmp_path, clock, 7).Tags()["images"] == []


@pytest.mark.filterwarnings("ignore:for five probes")
@pytest.mark.parametrize("name", ["uniform", "adaptive", "lookahead"])
def test_the_figure_can_be_drawn_before_and_after_learning(name, tmp_path):
    pytest.importorskip("tensorboard")
    pytest.importorskip("matplotlib")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step, updates in enumerate((0, 12)):
            track(writer, trained(SAMPLERS[name][0], "cosine", updates), step)
    assert [image.step for image in events(tmp_path).Images(PREFIX + "by_time")] == [0, 1]


def test_accelerates_tensorboard_tracker_is_opened(clock, tmp_path):
    pytest.importorskip("tensorboard")
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    track(accelerator.trackers[0], clock, 3)
    accelerator.end_training()
    check_events(tmp_path / "run", clock, 3)


def test_a_tracker_of_another_kind_gets_the_numbers(clock):
    tracking = pytest.importorskip("accelerate.tracking")
    logged = []

    class Mine(tracking.GeneralTracker):
        name, requires_logging_directory, main_process_only, tracker = "mine", False, False, "anything"

        def log(self, values, step=None, **_):
            logged.append((step, values))

    track(Mine(), clock, 3)
    assert logged == [(3, numbers(clock))]


# --- Weights & Biases ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """W&B without a network, and nothing of it at home."""
    wandb = pytest.importorskip("wandb")
    folders = {f"WANDB_{name}_DIR": str(tmp_path) for name in ("CACHE", "CONFIG", "DATA")}
    for name, value in {**folders, "WANDB_MODE": "offline", "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    wandb.teardown()  # W&B reads its environment once
    yield wandb
    wandb.teardown()


def check_tables(folder, clock):
    """The one file for each table in W&B's folder holds the clock's curves."""
    for name, wanted in {"by_time": curves(clock), "prices": prices(clock)}.items():
        (path,) = folder.rglob(f"{name}_[0-9]*.table.json")
        table = json.loads(path.read_text())
        assert table["columns"] == list(wanted._fields)
        rows = np.array(table["data"], dtype=np.float64)  # None becomes NaN
        assert np.array_equal(rows, np.stack(wanted, 1), equal_nan=True)
    for name in ("density", "effective", "loss"):
        (path,) = folder.rglob(f"{name}_by_time_table_[0-9]*.table.json")
        table = json.loads(path.read_text())
        assert table["columns"] == ["time", name]
        assert np.array_equal(np.array(table["data"], dtype=np.float64)[:, 1], getattr(curves(clock), name), equal_nan=True)


def test_a_wandb_run_gets_numbers_tables_and_lines(clock, offline, tmp_path):
    run = offline.init(project="test", dir=tmp_path)
    track(run, clock, 4)
    run.log({}, step=5)  # W&B keeps a step open until the next
    summary = dict(run.summary)
    run.finish()
    for name, value in numbers(clock).items():
        assert summary[name] == value
    check_tables(tmp_path, clock)


def test_accelerates_wandb_tracker_is_opened(clock, offline, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, log_with="wandb")
    accelerator.init_trackers("run", init_kwargs={"wandb": {"dir": tmp_path}})
    track(accelerator.trackers[0], clock, 4)
    accelerator.log({}, step=5)
    summary = dict(accelerator.trackers[0].run.summary)
    accelerator.end_training()
    assert summary[PREFIX + "rho"] == clock.sampler.rho
    check_tables(tmp_path, clock)


def test_lightnings_wandb_logger_counts_steps_in_its_own_way(clock, offline, tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.WandbLogger(save_dir=tmp_path, project="test", offline=True)
    logger.log_metrics({"train_loss": 1.0}, 499)  # takes W&B's own step 0, so that a step given to W&B would get out of order
    track(logger, clock, 500)
    summary = dict(logger.experiment.summary)
    logger.experiment.finish()
    assert (summary["_step"], summary["trainer/global_step"], summary[PREFIX + "ess"]) == (1, 500, clock.sampler.ess())
    check_tables(tmp_path, clock)


# --- the rest -----------------------------------------------------------------------------------------------------------------------------


def test_lightnings_other_loggers_are_opened_or_get_the_numbers(clock, tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    board, table = loggers.TensorBoardLogger(tmp_path, name="board", version=""), loggers.CSVLogger(tmp_path, name="table", version="")
    for logger in (board, table):
        track(logger, clock, 5)
        logger.save()
    board.finalize("success")
    check_events(tmp_path / "board", clock, 5)
    header, row = (line.split(",") for line in (tmp_path / "table" / "metrics.csv").read_text().splitlines())
    assert {name: float(value) for name, value in zip(header, row, strict=True)} == pytest.approx({**numbers(clock), "step": 5})


@pytest.mark.parametrize(("where", "told"), [(print, "builtin_function_or_method"), ("runs", "str"), (None, "NoneType")])
def test_anything_else_is_named(clock, where, told):
    with pytest.raises(TypeError, match=rf"^track writes to a SummaryWriter, a wandb run .* got {told}$"):
        track(where, clock, 1)


def test_the_order_of_the_arguments_is_told(clock):
    with pytest.raises(TypeError, match=r"takes a Clock second, got int"):
        track(None, 1, clock)
