"""What a trace of one rank cuts of parameters is what FSDP cuts for all of them."""

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from xtrain.runtime.tracing.own_pieces import Pieces, own_pieces


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_those_of_torch(number, dim):
    whole = torch.arange(15 * 6).view(15, 6).transpose(0, dim).contiguous()
    pieces, theirs = Pieces(whole, number, dim), _chunk_with_empty(whole, number, dim)
    assert len(pieces) == len(theirs) == number
    for ours, other in zip(pieces, theirs, strict=True):
        assert ours.numel() == other.numel()
        assert not ours.numel() or (torch.equal(ours, other) and ours.stride() == other.stride())


def test_fsdp_has_its_own_again_behind_it():
    with own_pieces():
        assert vars(_fsdp_param)["_chunk_with_empty"] is Pieces
    assert vars(_fsdp_param)["_chunk_with_empty"] is _chunk_with_empty
