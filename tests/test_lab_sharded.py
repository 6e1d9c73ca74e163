"""Checkpoints of a model that is spread over two processes: each writes its own rows, and they are read on any number."""

import errno
import json
import os
import shutil
import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import noiseclock.lab.train as lab_train
from forked import Forked
from noiseclock import cli
from noiseclock.lab import checkpoint
from noiseclock.lab.errors import Mistake
from noiseclock.lab.stored import Files
from noiseclock.lab.trained import evaluated, opened
from small_runs import TINY, differing, lines, run_of, state_of, trained, words

# eleven embeddings of classes, which two cannot share evenly, and parameters that are not spread
# the policy's rate is low because one that jumps warns, and these few noisy rewards make it jump
SAMPLER = "adaptive.scaled:every=2,queue=3,lr=0.001"
SETTINGS = replace(TINY, updates=8, save_every=4, conditional=True, weighting="uncertainty", sampler=SAMPLER)
PARTS = ["part-00000-of-00002.safetensors", "part-00001-of-00002.safetensors"]


def train(settings, folder: Path, fails_at: int | None = None) -> int:
    """`noiseclock train --shard` of the process's rank, which notes what it holds and writes. fails_at: the step whose part rank 1 cannot write."""
    rank, noted = int(os.environ["RANK"]), {"written": [], "gathered": 0}
    save, write, gather = lab_train.Run.save, checkpoint.save_file, DTensor.full_tensor
    now = {"saving": False, "step": 0}

    def saved(self, log):
        parameters = [p for p in self.net.parameters() if isinstance(p, DTensor)]
        noted.update(held=sum(p.to_local().nbytes for p in parameters), whole=sum(p.nbytes for p in parameters))
        now.update(saving=True, step=self.step)
        save(self, log)
        now["saving"] = False

    def written(tensors, path):
        if rank == 1 and now["step"] == fails_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        noted["written"].append([Path(path).name, {name: list(tensor.shape) for name, tensor in tensors.items()}])
        write(tensors, path)

    def gathered(self, **how):
        noted["gathered"] += now["saving"]
        return gather(self, **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lab_train.Run, "save", saved)
        patch.setattr(checkpoint, "save_file", written)
        patch.setattr(DTensor, "full_tensor", gathered)
        status = cli.main([*words(settings, folder), "--shard"])
    Path(f"{folder}-rank-{rank}.json").write_text(json.dumps(noted))
    return status


def on_two(settings, folder: Path, port: int, fails_at: int | None = None) -> list[int | None]:
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                Forked(train, settings, folder, fails_at, output=Path(f"{folder}-{rank}.txt"), RANK=str(rank), LOCAL_RANK=str(rank), **place)
            )
            for rank in range(2)
        ]
        return [process.wait(120) for process in processes]


@pytest.fixture(scope="module")
def spread(tmp_path_factory):
    """A folder that two processes have trained to the end, with checkpoints of updates 4 and 8."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = int(s.getsockname()[1])
    folder = tmp_path_factory.mktemp("spread") / "run"
    assert on_two(SETTINGS, folder, port) == [0, 0], Path(f"{folder}-0.txt").read_text() + Path(f"{folder}-1.txt").read_text()
    assert checkpoint.steps(folder) == [4, 8]
    return folder


def until(folder: Path, step: int, copy: Path) -> Path:
    """A copy of a run as it was after some update."""
    shutil.copytree(folder, copy)
    for later in checkpoint.steps(folder):
        if later > step:
            shutil.rmtree(copy / "checkpoints" / f"step-{later:08d}")
    return copy


def test_each_process_holds_and_writes_its_half(spread):
    notes = [json.loads(Path(f"{spread}-rank-{rank}.json").read_text()) for rank in range(2)]
    path = spread / "checkpoints" / "step-00000008"
    assert sorted(p.name for p in path.iterdir()) == sorted(["SHA256SUMS", "state.json", "tensors.safetensors", *PARTS])
    state = state_of(spread)
    for rank, note in enumerate(notes):
        assert note["gathered"] == 0
        # but for the odd embedding, to a hundredth
        assert note["held"] == pytest.approx(note["whole"] / 2, rel=0.01)
        names = [name for name, _ in note["written"]]
        assert names == ([PARTS[0], "tensors.safetensors"] * 2 if rank == 0 else [PARTS[1]] * 2)
        part = dict(note["written"][-2:])[PARTS[rank]]
        # weights, averages and both moments of every parameter of the network, and of none more than half of the rows
        assert len(part) == 4 * len(state["model"])
        for name, weight in state["model"].items():
            for written in (f"model.{name}", f"ema.{name}", f"optimizer.state.{name}.exp_avg", f"optimizer.state.{name}.exp_avg_sq"):
                share = -(-len(weight) // 2)
                assert part[written] == [share if rank == 0 else len(weight) - share, *weight.shape[1:]]
    # what is left for the first process are counts of updates, what belongs to the weighting, and the state of each process's clock
    rest = [name for name in load_file(path / "tensors.safetensors") if not name.startswith(("ranks.", "optimizer.state.weighting."))]
    assert {name.rsplit(".", 1)[1] for name in rest} == {"step"}


def test_two_go_on_from_it_bit_for_bit_and_one_too(spread, tmp_path, free_port):
    two = until(spread, 4, tmp_path / "two")
    assert on_two(SETTINGS, two, free_port) == [0, 0], Path(f"{two}-0.txt").read_text()
    assert lines(two) == lines(spread)
    assert differing(state_of(two), state_of(spread)) == []
    # one process has other noise, but begins with the same
    one = until(spread, 4, tmp_path / "one")
    run = run_of(SETTINGS, one)
    wanted = state_of(spread, 4)
    assert differing(dict(run.net.state_dict()), wanted["model"]) == []
    assert differing(run.ema.state_dict(), {name: wanted["ema"][name] for name in run.ema.state_dict()}) == []
    found = {name: run.optimizer.state[p] for name, p in run._named}
    assert differing(found, {name: wanted["optimizer"]["state"][name] for name in found}) == []
    run.close()
    assert [record.step for record in trained(SETTINGS, one)] == [5, 6, 7, 8]
    losses = [[line["loss"] for line in lines(folder) if line["step"] > 4] for folder in (one, spread)]
    assert losses[0] == pytest.approx(losses[1], rel=0.5)  # of other noise
    assert "parts" not in json.loads((one / "checkpoints" / "step-00000008" / "state.json").read_text())


def test_it_is_evaluated_by_one_process(spread):
    run = opened(spread)
    assert run.step == 8
    assert differing(dict(run.net.state_dict()), {**state_of(spread)["model"], **state_of(spread)["ema"]}) == []
    found = evaluated(run, samples=0, vlb_images=0)
    assert found.curve.loss.mean() < 3
    assert len(run.optimizer().state) == len(list(run.net.parameters()))


@pytest.mark.parametrize("damage", ["bit", "short", "gone", "sum"])
def test_one_damaged_part_damages_all(spread, tmp_path, damage):
    run = until(spread, 8, tmp_path / "run")
    path = run / "checkpoints" / "step-00000008"
    file = path / PARTS[1]
    raw = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "sum":
        kept = [line for line in (path / "SHA256SUMS").read_text().splitlines(keepends=True) if PARTS[1] not in line]
        (path / "SHA256SUMS").write_text("".join(kept))
    else:
        file.write_bytes(raw[:-1] if damage == "short" else raw[:-1] + bytes([raw[-1] ^ 1]))
    assert checkpoint.newest(run) == run / "checkpoints" / "step-00000004"
    with pytest.raises(Mistake, match="step-00000008 is damaged"):
        checkpoint.load(run, 8)
    with pytest.warns(UserWarning, match="step-00000008 is damaged .* and is skipped"):
        assert checkpoint.load(run)[0] == 4


def test_a_process_that_cannot_write_its_part_ends_all_and_leaves_the_last_one(tmp_path, free_port):
    run = tmp_path / "run"
    assert on_two(SETTINGS, run, free_port, fails_at=8) == [1, 1]
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["step-00000004"]
    said = Path(f"{run}-1.txt").read_text()
    assert "could not save the checkpoint of step 8 (No space left on device); the newest whole one is" in said
    assert "Traceback" not in said + Path(f"{run}-0.txt").read_text()


def test_rows_are_read_from_where_they_are(tmp_path):
    x = torch.arange(20.0).view(10, 2)
    for i, rows in enumerate(x.split([4, 4, 2, 0])):
        save_file({"x": rows.contiguous()}, tmp_path / str(i))
    save_file({"x": x, "n": torch.tensor(3)}, tmp_path / "all")
    files = Files(tmp_path / "all", [tmp_path / str(i) for i in range(4)])
    for stored in (files.whole("x"), files.spread("x")):
        assert stored.shape == (10, 2)
        assert torch.equal(stored.whole(), x)
        for start, stop in [(0, 10), (0, 4), (3, 5), (2, 9), (4, 8), (9, 10)]:
            assert torch.equal(stored.rows(start, stop), x[start:stop])
    assert files.whole("n").shape == ()
    assert files.whole("n").whole() == 3
    files.close()


def test_spread_tensors_are_saved_by_all_or_not_at_all(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        spread = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0)])
        with pytest.raises(TypeError, match="w is no ordinary tensor"):
            checkpoint.save(tmp_path, 1, {"w": spread})
    finally:
        torch.distributed.destroy_process_group()
