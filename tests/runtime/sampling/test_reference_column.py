"""Columns of references on disk: whole or not at all, and the same on machines whose caches are their own."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from xtrain.runtime.base.errors import DataError
from xtrain.runtime.sampling import reference_column as shared
from xtrain.runtime.sampling.reference_column import SharedColumn, column_key, open_column, write_column

PLACES, NUMBERS = np.array([[1, -1, 4]]), np.array([[-0.5, -9.0, -2.0]])
BLOCKS = [(PLACES, NUMBERS)]


def test_a_column_has_what_was_put_and_nothing_elsewhere(tmp_path: Path):
    write_column(tmp_path / "a", 6, "fp64", {"weights": "w"}, BLOCKS, replaces=False)
    found = open_column(tmp_path / "a", 6, "fp64")
    assert found is not None and not found.numbers.flags.writeable
    np.testing.assert_array_equal(found.numbers, [np.nan, -0.5, np.nan, np.nan, -2.0, np.nan])
    assert column_key(["a"]) != column_key(["b"]) and len(column_key(["a"])) == 32


@pytest.mark.parametrize("damage", ["tokens", "format", "cut", "meta", "none"])
def test_what_is_not_whole_is_not_opened_and_written_anew(tmp_path: Path, damage: str):
    folder, tokens, form = tmp_path / "a", 6, "fp64"
    write_column(folder, tokens, form, {}, BLOCKS, replaces=False)
    if damage == "cut":
        (folder / "logprobs.bin").write_bytes((folder / "logprobs.bin").read_bytes()[:-8])
    elif damage == "meta":
        (folder / "meta.json").write_text("{")
    tokens, form = 7 if damage == "tokens" else tokens, "fp32" if damage == "format" else form
    assert (open_column(folder, tokens, form) is not None) == (damage == "none")
    write_column(folder, tokens, form, {}, BLOCKS, replaces=False)
    found = open_column(folder, tokens, form)
    assert found is not None and found.numbers[4] == -2 and list(tmp_path.iterdir()) == [folder]


def test_one_that_was_cut_off_leaves_nothing(tmp_path: Path):
    def cut_off() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        yield from BLOCKS
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_column(tmp_path / "a", 6, "fp32", {}, cut_off(), replaces=False)
    assert open_column(tmp_path / "a", 6, "fp32") is None and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write log-probabilities"):
        write_column(tmp_path / "file" / "a", 6, "fp32", {}, BLOCKS, replaces=False)


class TwoRanks:
    """What two threads say to each other in place of a process group."""

    def __init__(self) -> None:
        self.barrier, self.said, self.own = threading.Barrier(2, timeout=20), {}, threading.local()

    def _exchange(self, value: Any) -> dict[int, Any]:
        self.said[self.own.rank] = value
        self.barrier.wait()
        found = dict(self.said)
        self.barrier.wait()
        return found

    def all_gather_object(self, found: list[Any], value: Any) -> None:
        found[:] = [each for _, each in sorted(self._exchange(value).items())]

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self._exchange(tensor.clone())[src])

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack([*self._exchange(tensor.clone()).values()]).sum(0))


@pytest.mark.parametrize("has", [(), (0,), (1,), (0, 1)])
def test_a_machine_that_lacks_a_column_gets_it_from_one_that_has_it(tmp_path: Path, monkeypatch, has: tuple[int, ...]):
    """Two machines with a rank each; where both have one, of different runs, that of the first holds."""
    ranks = TwoRanks()
    monkeypatch.setattr(shared, "dist", ranks)
    monkeypatch.setattr(shared, "AT_ONCE", 4)  # two pieces
    for number in has:
        write_column(tmp_path / str(number), 6, "fp32", {}, [(PLACES, NUMBERS - number)], replaces=False)

    def run(number: int) -> np.ndarray:
        ranks.own.rank = number
        rank: Any = SimpleNamespace(rank=number, local_rank=0, world_size=2)
        column = SharedColumn(rank=rank, folder=tmp_path / str(number), tokens=6, form="fp32")
        source = column.source()
        assert source == (has[0] if has else None)
        if source is None:
            column.write({}, iter(BLOCKS))
        else:
            column.copy({}, source)
        return column.open_everywhere().numbers

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, (0, 1))
    expected = NUMBERS[0, 2] - (has[0] if has else 0)
    assert first[4] == second[4] == expected and np.array_equal(first, second, equal_nan=True)
