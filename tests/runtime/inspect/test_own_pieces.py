"""What a trace of one rank cuts of parameters is what FSDP cuts for all of them."""

from contextlib import nullcontext

import pytest
import torch
from attrs import evolve
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty

from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.device import FakeDevice
from xtrain.runtime.base.ops import load_ops
from xtrain.runtime.inspect import trace as program
from xtrain.runtime.inspect.observer import TracedPieces, own_pieces
from xtrain.runtime.inspect.trace import trace_rank

# 64 ranks with two experts each, which 32 ranks share: they are cut behind their first dim.
EXPERTS = """
experiment pieces { budget = 1 steps }
parallel { fsdp 64, ep 2 }
precision { params = fp32, compute = bf16 }
model qwen3_moe { dim = 64, layers = 1, heads = 2, experts = 4, experts_per_token = 2, expert_ffn = 64 }
tokenizer bytes
dataset fake { source = synthetic(documents = 200, length = 40) }
batch { sequence = 64, micro = 1, accumulate = 1 }
optimizer adamw { lr = 1e-3 }
checkpoint { enabled = false }
"""


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7, 100])
@pytest.mark.parametrize("dim", [0, 1])
def test_pieces_are_those_of_torch(number, dim):
    whole = torch.arange(15 * 6).view(15, 6).transpose(0, dim).contiguous()
    pieces, theirs = TracedPieces(whole, number, dim), _chunk_with_empty(whole, number, dim)
    assert len(pieces) == len(theirs) == number
    for ours, other in zip(pieces, theirs, strict=True):
        assert ours.numel() == other.numel()
        assert not ours.numel() or (torch.equal(ours, other) and ours.stride() == other.stride())


def test_fsdp_has_its_own_again_behind_it():
    with own_pieces():
        assert vars(_fsdp_param)["_chunk_with_empty"] is TracedPieces
    assert vars(_fsdp_param)["_chunk_with_empty"] is _chunk_with_empty


@pytest.mark.matrix
def test_what_fsdp_exchanges_is_not_cut_for_every_rank_and_costs_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_from_text(EXPERTS, "s.xtrain", [], world=64).plan
    assert plan is not None
    load_ops()
    dispatch, most = FakeDevice.dispatch, [0]

    def counting(self, *args, **kwargs):
        out = dispatch(self, *args, **kwargs)
        most[0] = max(most[0], len(out) if isinstance(out, list | tuple) else 1)
        return out

    monkeypatch.setattr(FakeDevice, "dispatch", counting)
    joined = trace_rank(plan, 0)
    assert most[0] < 32
    monkeypatch.setattr(program, "joined_pieces", nullcontext)
    cut = trace_rank(plan, 0)
    assert most[0] == 32
    assert evolve(joined, seconds=0.0) == evolve(cut, seconds=0.0)
