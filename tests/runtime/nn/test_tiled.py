"""Layers in pieces of the positions compute what whole ones do, and keep less."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mixtures import architecture, tokens
from torch import Tensor
from towers import tower

from xtrain.components.adapters.lora_torch import LoraLinear
from xtrain.plan.architecture import Architecture
from xtrain.runtime.base.ops import PlanMismatch
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.build import compile_blocks, recompute_blocks, tile_layers
from xtrain.runtime.nn.layers import SwiGLU
from xtrain.runtime.nn.transformer import ModelParts

MATRIX: Any = SimpleNamespace(rank=2, scale=0.5, by_input=False, pissa=False)
RANK: Any = SimpleNamespace(coordinates={"pp": 0}, device=torch.device("cpu"))
DENSE = architecture(family="qwen3", experts=0)
MODES: dict[str, dict[str, Any] | None] = {
    "all is kept": None,
    "full": {"mode": "full"},
    "selective, matmul": {"mode": "selective", "save": ["matmul"]},
    "selective, attention": {"mode": "selective", "save": ["attention"]},
}


def model_parts(arch: Architecture, positions: int | None, how: dict[str, Any] | None = None) -> ModelParts:
    model = tower(arch)
    if how is not None:
        recompute_blocks(model, RANK, **how, every=1, pattern="layers.*", matches=[arch.layers])
    if positions is not None:
        tile_layers(model, RANK, positions, "layers.*", [arch.layers])
    return model


def gradients(model: ModelParts, *, given: bool = True) -> list[Tensor | None]:
    """Of the input, if it is `given` one, and of parameters."""
    x_BSD, real_BS = tokens(3, 9)
    x_BSD = x_BSD.detach().requires_grad_(given)
    model.parts[0](x_BSD, real_BS).square().sum().backward()
    return [x_BSD.grad, *(p.grad for p in model.parameters())]


def same(ours: list[Tensor | None], wanted: list[Tensor | None]) -> None:
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("how", MODES)
@pytest.mark.parametrize("positions", [5, 26, 100])
def test_gradients_are_those_of_whole_layers(positions, how):
    same(gradients(model_parts(DENSE, positions, MODES[how])), gradients(model_parts(DENSE, None)))


@pytest.mark.parametrize("how", MODES)
def test_a_piece_is_computed_once_more(how, monkeypatch):
    """Recomputed blocks end where their feed-forward layer begins, which then computes its pieces itself."""
    runs, of_piece = [], SwiGLU.of_piece
    monkeypatch.setattr(SwiGLU, "of_piece", lambda self, x_BSD: runs.append(1) or of_piece(self, x_BSD))
    gradients(model_parts(DENSE, 9, MODES[how]))
    assert len(runs) == 2 * 3 * DENSE.layers


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("how", ["all is kept", "full"])
def test_an_adapter_and_frozen_matrices(how, given):
    """The lowest block gets no gradient of what it is given where that has none."""

    def of(positions: int | None) -> list[Tensor | None]:
        model = model_parts(DENSE, positions, MODES[how])
        for parameter in model.parameters():
            parameter.requires_grad = False
        for number, block in model.parts[0].layers.items():
            torch.manual_seed(int(number))
            block.mlp.up_proj = LoraLinear(block.mlp.up_proj, MATRIX, Axes()).double()
            block.mlp.up_proj.weight.requires_grad = False
        return gradients(model, given=given)

    found = of(5)
    assert sum(each is not None for each in found) == 2 * DENSE.layers + given
    same(found, of(None))


def test_sums_over_pieces_are_as_exact_as_those_of_whole_layers():
    torch.manual_seed(0)
    layer = SwiGLU(16, 32).to(torch.bfloat16)
    x_BSD, grad_BSD = torch.randn(1, 2048, 16).bfloat16(), torch.randn(1, 2048, 16).bfloat16() + 0.5

    def of(module: SwiGLU, positions: int | None) -> Tensor:
        module.positions, dtype = positions, module.up_proj.weight.dtype
        module.zero_grad()
        module(x_BSD.to(dtype)).backward(grad_BSD.to(dtype))
        return module.down_proj.weight.grad.double()

    whole, cut = of(layer, None), of(layer, 4)
    exact = of(layer.double(), None)
    assert (cut - exact).norm() < 1.1 * (whole - exact).norm()


def test_another_number_of_blocks_is_a_mismatch():
    with pytest.raises(PlanMismatch, match="fits 3 modules"):
        tile_layers(model_parts(DENSE, None), RANK, 5, "layers.*", [2])
    with pytest.raises(PlanMismatch, match="fits 0 modules"):
        tile_layers(model_parts(architecture(), None), RANK, 5, "layers.*", [3])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["all is kept", "full"])
def test_compiled_pieces_compute_the_same(how):
    model = model_parts(DENSE, 10, MODES[how])
    compile_blocks(model, RANK, "default", "layers.*", [DENSE.layers])
    same(gradients(model), gradients(model_parts(DENSE, None)))
