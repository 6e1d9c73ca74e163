"""Tensors kept from one run to the next."""

import pytest
import torch

from noiseclock.lab.cache import digest, remembered


def never() -> dict[str, torch.Tensor]:
    raise AssertionError("was made again")


def test_what_was_made_once_is_read_from_then_on(tmp_path):
    path = tmp_path / "some" / "where.safetensors"
    made = {"a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(3)}
    assert remembered(path, lambda: made) is made
    found = remembered(path, never)
    assert set(found) == {"a", "b"}
    assert all(torch.equal(found[name], made[name]) for name in made)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_damaged_file_is_made_again(tmp_path):
    path = tmp_path / "x.safetensors"
    remembered(path, lambda: {"a": torch.zeros(100)})
    whole = path.read_bytes()
    for damaged in (b"", whole[:50], whole[:-1]):
        path.write_bytes(damaged)
        assert torch.equal(remembered(path, lambda: {"a": torch.ones(2)})["a"], torch.ones(2))
        assert torch.equal(remembered(path, never)["a"], torch.ones(2))


def test_a_disk_that_cannot_be_written_loses_nothing(tmp_path):
    (tmp_path / "file").write_text("")  # where a folder would have to be
    with pytest.warns(UserWarning, match="cannot keep"):
        assert remembered(tmp_path / "file" / "x.safetensors", lambda: {"a": torch.ones(2)})["a"].tolist() == [1, 1]


def test_a_failure_while_making_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError, match="made again"):
        remembered(tmp_path / "x.safetensors", never)
    assert list(tmp_path.iterdir()) == []


def test_digests_tell_contents_shapes_and_dtypes_apart():
    zeros = torch.zeros(4)
    others = [torch.ones(4), torch.zeros(2, 2), torch.zeros(2).double(), torch.zeros(5), torch.tensor([0.0, 0, 0, 1e-30])]
    digests = {digest([x]) for x in (zeros, *others)} | {digest([]), digest([zeros, zeros])}
    assert len(digests) == 8
    # the same in memory by rows or by columns, and of bfloat16, which numpy does not know
    x = torch.arange(6.0).reshape(2, 3)
    assert digest([x]) == digest([x.T.contiguous().T])
    assert digest([x.bfloat16()]) != digest([x])
