"""The digest of what is not trained: it says whether two bases have the same content."""

import pytest
import torch
from torch import Tensor

from xtrain.runtime.store import base_weights as base
from xtrain.runtime.store.base_weights import digest_of, piece_of

SHAPES = ((7,), (6, 10), (3, 4, 5), (300, 1000))


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sum_of(tensor: Tensor, name: str = "layers.0.mlp.up_proj.weight") -> int:
    piece = piece_of(name, tensor)
    assert piece.numbers == tensor.numel()
    return piece.sum


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_sum_is_of_values_and_not_of_their_format(shape: tuple[int, ...]):
    coarse = drawn(shape).to(torch.bfloat16)
    assert len({sum_of(coarse.to(format)) for format in (torch.bfloat16, torch.float32, torch.float64)}) == 1
    assert sum_of(drawn(shape).half()) == sum_of(drawn(shape).half().float())
    assert sum_of(coarse) != sum_of(drawn(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_content_has_another_sum(shape: tuple[int, ...]):
    whole = drawn(shape)
    place = tuple(extent // 2 for extent in shape)
    found = {sum_of(whole), sum_of(whole, "norm.weight")}
    for change in (
        lambda value: -value,
        lambda value: torch.nextafter(value, value + 1),
        lambda value: torch.zeros_like(value),
    ):
        other = whole.clone()
        other[place] = change(whole[place])
        found.add(sum_of(other))
    swapped = whole.clone()
    swapped[[0, 1]] = whole[[1, 0]]
    found.add(sum_of(swapped))
    assert len(found) == 6


def test_the_last_bits_of_fp64_count():
    whole = drawn((4, 4)).double()
    other = whole.clone()
    other[1, 2] = torch.nextafter(whole[1, 2], whole[1, 2] + 1)
    assert sum_of(other) != sum_of(whole)


def test_the_sum_does_not_depend_on_how_much_is_looked_at_at_a_time(monkeypatch: pytest.MonkeyPatch):
    whole = drawn((300, 1000))
    found = sum_of(whole)
    monkeypatch.setattr(base, "CHUNK", 1024)
    assert sum_of(whole) == found


def test_the_digest_is_of_all_tensors_in_whatever_order():
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert len({digest_of(sums) for sums in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"a": 1, "c": 2})}) == 4
