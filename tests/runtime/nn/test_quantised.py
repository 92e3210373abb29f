"""Matrices in blocks of codes: the numbers of bitsandbytes, exact formulas of the others, and pieces of a matrix."""

import numpy as np
import pytest
import torch
from quantised_vectors import BLOCKS, SHAPES, digest, key, numbers, vectors

from xtrain.dsl.schema.precision import BASES, Base
from xtrain.runtime.nn import number_formats as quantised
from xtrain.runtime.nn.layers import Linear
from xtrain.runtime.nn.number_formats import QuantisedMatrix
from xtrain.runtime.nn.recompute import SAVED, RecomputeFunction


def whole(base: Base, shape: tuple[int, ...]) -> QuantisedMatrix:
    return QuantisedMatrix(base, shape, shape, (0,) * len(shape), "")


@pytest.mark.parametrize("double", [True, False], ids=["8-bit scales", "fp32 scales"])
@pytest.mark.parametrize("block", BLOCKS)
def test_nf4_is_that_of_bitsandbytes(block, double):
    known, base = vectors(), BASES["nf4"](block=block, double=double)
    for shape in SHAPES:
        weight, expected = numbers(shape), known[key(shape, block, double=double)]
        assert digest(weight) == expected["input"]
        matrix = whole(base, shape)
        packed, beside = matrix.pack(torch.from_numpy(weight))
        units = packed.view(-1, base.block_bytes)
        codes = units[:, : block // 2].flatten()[: -(-weight.size // 2)]
        scales = units[:, block // 2 :].contiguous()
        found = {"input": digest(weight), "codes": digest(codes[:, None].numpy())}
        if beside is not None:
            found |= {"scales": digest(scales.flatten().numpy())}
            found |= {"mean": digest(beside[0].numpy()), "largest": digest(beside[1:].numpy())}
        else:
            found |= {"scales": digest(scales.view(torch.float32).flatten().numpy())}
        for name, type in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            found[name] = digest(matrix.values(packed, beside, type).float().flatten().numpy())
        # Of one block the distance of its scale from their mean is 0, and so whatever its code is.
        differs = {name for name in expected if found[name] != expected[name]}
        assert differs <= ({"scales"} if weight.size <= block and double else set()), shape
    assert known.keys() == {key(s, b, double=d) for s in SHAPES for b in BLOCKS for d in (True, False)}


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("fp8", 448)])
def test_bytes_for_a_number_follow_their_formula(kind, most):
    base, weight = BASES[kind](block=32), torch.from_numpy(numbers((20, 96)))
    weight[3] = 0
    packed, beside = whole(base, (20, 96)).pack(weight)
    assert beside is None and packed.shape == (20, 3 * 36)
    blocks = weight.view(-1, 32)
    scale = blocks.abs().amax(-1, keepdim=True) / most
    share = torch.where(scale == 0, 0, blocks / scale)
    codes = share.round() if kind == "int8" else share.to(torch.float8_e4m3fn).float()
    values = whole(base, (20, 96)).values(packed, None, torch.float64)
    assert torch.equal(values, (codes * scale).view(20, 96).double())
    largest = blocks.abs().amax(-1, keepdim=True)
    assert bool(((values.view(-1, 32) - blocks).abs() <= largest / (254 if kind == "int8" else 28)).all())


@pytest.mark.parametrize("kind", ["nf4", "int8", "fp8"])
@pytest.mark.parametrize("chunk", [2**22, 300])
def test_pieces_have_the_values_of_the_whole(monkeypatch, kind, chunk):
    """Cut by rows and by columns, whose groups of scales begin anywhere."""
    monkeypatch.setattr(quantised, "CHUNK", chunk)
    base, shape = BASES[kind](block=32), (60, 320)
    packed, beside = whole(base, shape).pack(torch.from_numpy(numbers(shape)))
    all_values = whole(base, shape).values(packed, beside, torch.float32)
    for row, column, rows, columns in ((0, 0, 20, 320), (37, 0, 23, 320), (0, 160, 60, 160), (11, 32, 5, 96)):
        piece = QuantisedMatrix(base, shape, (rows, columns), (row, column), "")
        width = base.block_bytes // 1
        own = packed[row : row + rows, column // 32 * width : (column + columns) // 32 * width]
        found = piece.values(own.contiguous(), beside, torch.float32)
        assert torch.equal(found, all_values[row : row + rows, column : column + columns])
    stack = torch.from_numpy(numbers((6 * 10, 64))).view(6, 10, 64)
    packed, beside = whole(base, (6, 10, 64)).pack(stack)
    piece = QuantisedMatrix(base, (6, 10, 64), (2, 10, 64), (4, 0, 0), "")
    found = piece.values(packed[4:], beside, torch.float32)
    for number in range(2):
        alone, scales = whole(base, (10, 64)).pack(stack[4 + number])
        assert torch.equal(found[number], whole(base, (10, 64)).values(alone, scales, torch.float32))


def test_a_product_has_the_gradient_of_the_stored_values():
    base, shape = BASES["nf4"](block=32), (48, 64)
    matrix = whole(base, shape)
    packed, beside = matrix.pack(torch.from_numpy(numbers(shape)))
    values = matrix.values(packed, beside, torch.float64)
    x, same = (torch.from_numpy(numbers((5, 64))).double().requires_grad_() for _ in range(2))
    out = matrix.product(x, packed, beside, torch.matmul, turned=True)
    expected = torch.nn.functional.linear(same, values)
    weights = torch.from_numpy(numbers((5, 48))).double()
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.equal(out, expected) and x.grad is not None and same.grad is not None
    assert torch.equal(x.grad, same.grad)
    assert np.array_equal(packed.numpy(), matrix.pack(torch.from_numpy(numbers(shape)))[0].numpy())


def test_selective_recomputation_keeps_a_product_without_its_bias():
    """What is kept of the first run is not what the bias is added to."""
    base, whole = BASES["int8"](block=32), torch.from_numpy(numbers((32, 64)))
    matrix, layer = QuantisedMatrix(base, (32, 64), (32, 64), (0, 0), ""), Linear(64, 32, bias=True)
    layer.register_parameter("weight", torch.nn.Parameter(matrix.pack(whole)[0], requires_grad=False))
    layer.quantised = matrix
    torch.nn.init.normal_(layer.bias)
    x = torch.from_numpy(numbers((4, 64))).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(layer(torch.sin(x))).square()

    (plain,) = torch.autograd.grad(block(x).sum(), x)
    keeps = RecomputeFunction(save=frozenset(SAVED["matmul"]))
    assert torch.equal(torch.autograd.grad(keeps(block, x).sum(), x)[0], plain)
