"""A checkpoint of one file: what is in it, whoever reads it, and what a disk says no to."""

import errno

import pytest
import torch
from faulty_disk import FULL, Death, FaultyDisk

from xtrain.runtime.base import files as durable
from xtrain.runtime.store.checkpoints import TENSORS
from xtrain.runtime.store.reading import read_tensors
from xtrain.runtime.store.writing import write_file


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """Of several kinds; one is a piece of a larger one, one has no dimension, one no element."""
    table = torch.arange(12.0).reshape(3, 4)
    return {
        "model.w": table.clone(),
        "model.piece": table[1:, 1:3],
        "model.half": torch.full((5,), 1.5, dtype=torch.bfloat16),
        "optimizer.w.step": torch.tensor(7.0),
        "rng.cpu": torch.get_rng_state(),
        "empty": torch.zeros(0, 4),
    }


def test_anybody_can_read_it_and_it_holds_nothing_else(tensors, tmp_path):
    big = torch.zeros(1_000_000)
    sums = write_file({**tensors, "model.small": big[:3]}, tmp_path)
    assert list(sums) == [TENSORS] and (tmp_path / TENSORS).stat().st_size < 50_000
    read = torch.load(tmp_path / TENSORS, weights_only=True)
    assert list(read) == [*tensors, "model.small"]
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == tensors[name].dtype for name in tensors)


def test_tensors_are_filled_where_they_are_and_in_their_own_format(tensors, tmp_path):
    write_file(tensors, tmp_path)
    found = {name: torch.empty_like(tensor) for name, tensor in tensors.items() if tensor.numel()}
    found["model.half"] = torch.empty(5)
    places = {name: tensor.data_ptr() for name, tensor in found.items()}
    read_tensors(found, tmp_path)
    assert all(torch.equal(found[name].to(tensors[name].dtype), tensors[name]) for name in found)
    assert {name: tensor.data_ptr() for name, tensor in found.items()} == places


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [("model.other", (3, 4), "model.other"), ("model.w", (4, 4), "[Ss]ize|[Ss]hape")],
)
def test_what_is_not_in_it_or_of_another_shape_is_an_error(tensors, tmp_path, name, shape, said):
    write_file(tensors, tmp_path)
    with pytest.raises(BaseException, match=said):
        read_tensors({name: torch.zeros(shape)}, tmp_path)


@pytest.mark.parametrize(("error", "kind"), [(None, Death), (FULL, OSError), (errno.EIO, OSError)])
def test_a_disk_that_fails_at_any_change_is_reported_as_it_is(tensors, tmp_path, monkeypatch, error, kind):
    disk = FaultyDisk()
    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", disk)
        write_file(tensors, tmp_path)
    assert disk.count > 10
    for at in range(disk.count):
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", FaultyDisk(at, error))
            with pytest.raises(kind) as failed:
                write_file(tensors, tmp_path)
        assert getattr(failed.value, "errno", None) == error
