"""How fp32 products are computed where a spec leaves that to the machine."""

import pytest
import torch

from xtrain.runtime.loop.bootstrap import _medium_is_exact, set_matmul

CPU = torch.device("cpu")
ROUNDS = {
    "nothing": lambda left: False,
    "small matrices": lambda left: left.dim() == 2 and left.numel() <= 2**15,
    "batches": lambda left: left.dim() == 3,  # both as torch 2.11 on processors with products of bf16
    "large matrices": lambda left: left.dim() == 2 and left.numel() > 2**16,
}


@pytest.mark.parametrize("rounds", ROUNDS)
def test_medium_is_taken_only_where_it_rounds_nothing(rounds, monkeypatch):
    """On a processor that is made up."""
    in_force, real = ["highest"], torch.Tensor.__matmul__
    monkeypatch.setattr("xtrain.runtime.loop.bootstrap._medium_is_exact", _medium_is_exact.__wrapped__)

    def multiplied(left, right):
        if in_force[-1] == "medium" and left.dtype == torch.float32 and ROUNDS[rounds](left):
            left, right = left.bfloat16().float(), right.bfloat16().float()
        return real(left, right)

    monkeypatch.setattr(torch, "set_float32_matmul_precision", in_force.append)
    monkeypatch.setattr(torch.Tensor, "__matmul__", multiplied)
    assert set_matmul("auto", CPU) == in_force[-1] == ("medium" if rounds == "nothing" else "highest")
    assert set_matmul("auto", CPU, small_products=True) == in_force[-1] == "highest"


def test_what_is_set_is_in_force(monkeypatch):
    in_force = []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", in_force.append)
    assert [set_matmul("medium", CPU), set_matmul("auto", torch.device("cuda"))] == in_force == ["medium", "highest"]
