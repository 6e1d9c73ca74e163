"""Many processes train what one trains: DDP and FSDP2 over gloo, and checkpoints that go from one number of processes to another.

Of what is random, order and labels of the images are the same for any number of processes, and so are the times of an update taken together; but
which image gets which time, and the noise, belong to a process. Here both are made a function of the image, so that one process and two must take
the same steps but for rounding. What the clock would have drawn is noted, and held to the promise above.
"""

import os
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.distributed.run
from accelerate.commands.launch import launch_command_parser
from safetensors.torch import load_file, save_file

import noiseclock.lab.train as lab_train
import shapes
from forked import Forked
from noiseclock import cli
from noiseclock.core.clock import Clock
from noiseclock.lab import checkpoint, processes
from noiseclock.lab.captions import embed
from noiseclock.lab.errors import Failure, Mistake
from noiseclock.lab.recipes import Recipe
from noiseclock.lab.shards import whole
from small_runs import TINY, distance, lines, state_of, words

# two micro-batches, whose gradients must not be exchanged before the last; and parameters that DDP knows nothing of
SETTINGS = replace(TINY, updates=8, accumulate=2, weighting="uncertainty", conditional=True, clip=0.5)


def by_image(x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(B,) times and (B, ...) noises that depend on nothing but the image."""
    flat = x0.double().flatten(1)
    place = (flat * torch.arange(1, flat.shape[1] + 1).double().sqrt()).sum(1) % 1
    noises = [torch.randn(x0.shape[1:], generator=torch.Generator().manual_seed(int(u * 2**31))) for u in place]
    return place, torch.stack(noises)


def bare(settings, folder: Path) -> list[str]:
    """The command line without a device, which it must find by itself; with one where there are GPUs, and too few of them."""
    argv = words(settings, folder)
    return argv if torch.cuda.is_available() else [word for word in argv if word not in ("--device", "cpu")]


def train(settings, folder: Path, *options: str, stop_rank: int | None = None) -> int:
    """`noiseclock train` of the process's rank, with times and noises by image. Notes go to FOLDER-rank-R.safetensors.

    They are what the clock drew in the first update, the gradient of that update, and the weights at the end. stop_rank: the rank that gets a
    SIGTERM in its fourth update.
    """
    rank = int(os.environ.get("RANK", "0"))
    notes: dict[str, torch.Tensor] = {}
    draw, clipped, save = Clock.draw, lab_train.Run._clipped, lab_train.Run.save
    draws = []

    def drawn(self, x0, *, cond, **given):
        draws.append(draw(self, x0, cond=cond, **given))
        time, noise = by_image(x0)
        return self.at(x0, time, noise=noise, cond=cond)

    def watched(self):
        if not any(name.startswith("gradient") for name in notes):
            first = draws[-self.recipe.accumulate :]
            notes.update(time=torch.cat([b.time for b in first]), noise=torch.cat([b.noise for b in first]), cond=torch.cat([b.cond for b in first]))
            notes.update({f"gradient.{name}": whole(p.grad).clone() for name, p in self.net.named_parameters()})
        if rank == stop_rank and self.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        norm = clipped(self)
        notes.setdefault("others", torch.cat([p.grad.flatten() for p in self.others]).clone())
        return norm

    def saved(self, log):
        save(self, log)
        notes.update({f"weight.{name}": whole(value).clone() for name, value in self.net.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "draw", drawn)
        patch.setattr(lab_train.Run, "_clipped", watched)
        patch.setattr(lab_train.Run, "save", saved)
        status = cli.main([*bare(settings, folder), *options])
    save_file(notes, f"{folder}-rank-{rank}.safetensors")
    return status


def on_two(settings, folder: Path, port: int, *options: str, stop_rank: int | None = None) -> list[int | None]:
    """The same on two processes, as torchrun starts them; returns their exit statuses."""
    environment = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                Forked(
                    _rank, settings, folder, options, stop_rank, output=Path(f"{folder}-rank-{rank}.txt"),
                    RANK=str(rank), LOCAL_RANK=str(rank), **environment,
                )
            )
            for rank in range(2)
        ]  # fmt: skip
        return [process.wait(120) for process in processes]


def _rank(settings, folder, options, stop_rank):
    return train(settings, folder, *options, stop_rank=stop_rank)


def notes(folder: Path, rank: int = 0) -> dict[str, torch.Tensor]:
    return load_file(f"{folder}-rank-{rank}.safetensors")


def part(of: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in of.items() if name.startswith(kind)}


def relative(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The distance of two sets of tensors by the length of the second."""
    return distance(mine, theirs) / distance(theirs, {name: torch.zeros_like(value) for name, value in theirs.items()})


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """One process: its folder after 8 updates, and copies of it after 4 and 6."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    for updates in (4, 6, 8):
        assert train(replace(SETTINGS, updates=updates), folder) == 0
        shutil.copytree(folder, f"{folder}-{updates}")
        shutil.copy(f"{folder}-rank-0.safetensors", f"{folder}-{updates}-rank-0.safetensors")
    return folder


# Rounding: losses and gradients are sums of at most 16·64 and 16·4 terms, taken in another order, each right to 2^-24: 1e-5 is ample. What could be
# wrong instead (a gradient that is not averaged, images seen twice, micro-batches weighted wrongly) changes them by a tenth at least.
EXACT = 1e-5
# Adam divides by the size of the gradient, so that a coordinate whose gradient is all rounding moves as far as any other. Of the way that the
# weights have gone, the share that is such noise: some 1e-6 on the machine of the author.
DRIFT = 1e-4


def agree(found: Path, wanted: Path, start: Path) -> None:
    """The weights in the checkpoint of `found` are those of `wanted`, measured by the way from `start`; optimiser and average too."""
    mine, theirs, begin = (state_of(folder) for folder in (found, wanted, start))
    for kind in ("model", "ema"):
        assert distance(mine[kind], theirs[kind]) < DRIFT * distance(theirs[kind], begin[kind])
    first = [{str(i): moment["exp_avg"] for i, moment in state["optimizer"]["state"].items()} for state in (mine, theirs)]
    assert relative(*first) < DRIFT


def test_two_processes_with_ddp_train_what_one_trains(tmp_path, alone, free_port):
    run = tmp_path / "ddp"
    # one of them is told to stop: both must, after the same update
    assert on_two(SETTINGS, run, free_port, stop_rank=1) == [143, 143]
    assert checkpoint.steps(run) == [4]
    ours, (zero, one) = notes(Path(f"{alone}-4")), (notes(run, rank) for rank in range(2))
    # the gradient that is applied is the same on both, and that of one process
    for rank in (zero, one):
        assert relative(part(rank, "gradient"), part(ours, "gradient")) < EXACT
        assert relative(part(rank, "others"), part(ours, "others")) < EXACT
    assert all(torch.equal(zero[name], one[name]) for name in zero if name.split(".")[0] in ("gradient", "weight", "others"))
    # what the clock drew for them: different noise, and together the times and labels of one process
    assert not torch.equal(zero["noise"], one["noise"])
    assert torch.equal(torch.cat([zero["time"], one["time"]]).sort().values, ours["time"].sort().values)
    half = len(ours["cond"]) // 4  # of a micro-batch on one rank
    shares = [rank["cond"][half * micro : half * (micro + 1)] for micro in range(2) for rank in (zero, one)]
    assert torch.equal(torch.cat(shares), ours["cond"])
    agree(run, Path(f"{alone}-4"), start=Path(f"{alone}-8"))
    # losses are those of all, and only the first process speaks
    wanted = lines(alone)[:4]
    assert [line["loss"] for line in lines(run)] == pytest.approx([line["loss"] for line in wanted], rel=1e-4)
    assert [line["images"] for line in lines(run)] == [16, 32, 48, 64]
    assert "update 4 of 8" in Path(f"{run}-rank-0.txt").read_text()
    assert Path(f"{run}-rank-1.txt").read_text() == "noiseclock: stopped by SIGTERM; run the same command again to go on\n"

    # a checkpoint of two goes on with one
    assert train(SETTINGS, run) == 0
    assert [line["step"] for line in lines(run)] == list(range(1, 9))
    agree(run, alone, start=Path(f"{alone}-4"))


def test_two_processes_are_told_the_captions_that_one_is_told(tmp_path, free_port):
    pictures, encoder = shapes.write_shapes(tmp_path / "pictures", 24), shapes.write_encoder(tmp_path / "encoder")
    embed(pictures, encoder, tmp_path / "embedded")
    settings = replace(SETTINGS, data=f"captions:{tmp_path / 'embedded'}", model="uvit", patch=8, updates=2)
    assert train(settings, tmp_path / "one") == 0
    assert on_two(settings, tmp_path / "two", free_port) == [0, 0]
    ours, (zero, one) = notes(tmp_path / "one"), (notes(tmp_path / "two", rank) for rank in range(2))
    half = len(ours["cond"]) // 4  # of a micro-batch on one rank
    shares = [rank["cond"][half * micro : half * (micro + 1)] for micro in range(2) for rank in (zero, one)]
    assert torch.equal(torch.cat(shares), ours["cond"])
    assert len(ours["cond"].flatten(1).unique(dim=0)) > half  # among them different ones
    for rank in (zero, one):
        assert relative(part(rank, "gradient"), part(ours, "gradient")) < EXACT


def test_two_processes_with_fsdp_go_on_where_one_was(tmp_path, alone, free_port):
    run = tmp_path / "fsdp"
    shutil.copytree(f"{alone}-4", run)
    assert on_two(replace(SETTINGS, updates=6, checkpointing=True), run, free_port, "--shard") == [0, 0]  # whose blocks are gathered once more
    ours, (zero, one) = notes(Path(f"{alone}-6")), (notes(run, rank) for rank in range(2))
    for rank in (zero, one):
        assert relative(part(rank, "gradient"), part(ours, "gradient")) < EXACT
        assert relative(part(rank, "others"), part(ours, "others")) < EXACT
        assert relative(part(rank, "weight"), part(ours, "weight")) < EXACT
    agree(run, Path(f"{alone}-6"), start=Path(f"{alone}-4"))
    # and one goes on where two were
    assert train(SETTINGS, run) == 0
    agree(run, alone, start=Path(f"{alone}-4"))


def test_a_sharded_model_is_probed_and_averaged(tmp_path, alone, free_port):
    # a probe leaves the weights gathered; the average must be taken of the parts. What it learns has no effect here: times are by image.
    settings = replace(SETTINGS, updates=4, sampler="adaptive.scaled:every=2,queue=3", sample_every=4)
    assert on_two(settings, tmp_path / "run", free_port, "--shard") == [0, 0]
    assert lines(tmp_path / "run")[-1]["sampler"].startswith("2 probes")
    agree(tmp_path / "run", Path(f"{alone}-4"), start=Path(f"{alone}-8"))
    assert (tmp_path / "run" / "samples" / "step-00000004.png").is_file()


def test_an_error_of_one_ends_all(monkeypatch):
    class Two:
        num_processes, device = 2, "cpu"

    # the other process fails
    monkeypatch.setattr(processes.dist, "all_reduce", lambda x: x.add_(1))
    with pytest.raises(SystemExit), processes.all_or_none(Two()):
        pass
    # this one fails
    monkeypatch.setattr(processes.dist, "all_reduce", lambda x: x)
    for error in (Mistake("wrong"), Failure("broken")):
        with pytest.raises(type(error), match=str(error)), processes.all_or_none(Two()):
            raise error
    # neither
    with processes.all_or_none(Two()):
        pass


def test_a_batch_that_cannot_be_shared_is_a_mistake(tmp_path, monkeypatch):
    accelerator = processes.joined(tmp_path, "cpu", ())
    monkeypatch.setattr(type(accelerator), "num_processes", 3)
    with pytest.raises(Mistake, match="a batch of 16 cannot be shared by 3 processes with 1 micro-batches each"):
        lab_train.Run(TINY, tmp_path, accelerator, shard=False)


def test_launchers_do_not_take_our_options_for_theirs():
    """They read the whole line, and refuse a word that could be short for two options of their own."""
    ours = {f"--{field.name.replace('_', '-')}" for field in fields(Recipe)}
    for parser in (torch.distributed.run.get_args_parser(), launch_command_parser()):
        theirs = parser._option_string_actions
        assert [name for name in ours if sum(option.startswith(name) for option in theirs) > 1 and name not in theirs] == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--shard"]], ids=["ddp", "fsdp"])
def test_torchrun_runs_the_same_command(tmp_path, options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "noiseclock.cli"]
    subprocess.run([*command, *bare(SETTINGS, tmp_path), *options], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert len(state_of(tmp_path)["ranks"]) == 2
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 9))
