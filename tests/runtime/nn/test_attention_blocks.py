"""Blocks of attention: kernel and written-out version are the same, and summands over keys make up the whole."""

import math

import pytest
import torch
from torch import Tensor

from xtrain.runtime.nn import attention_blocks as blocks

N, H, A = 3, 4, 8
SHAPES = [(6, 6, "causal"), (6, 6, "reversed"), (6, 6, "all"), (8, 4, "all"), (4, 8, "all"), (1, 1, "causal")]
SHAPES_ON_CUDA = [(256, 256, "causal"), (256, 256, "reversed"), (256, 128, "all"), (128, 256, "all")]


def inputs(queries: int, keys: int, kv_heads: int = H, dtype=torch.float64, device="cpu", width=A) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(N, H, queries, width), (N, kv_heads, keys, width), (N, kv_heads, keys, width), (N, H, queries, width)]
    return [torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes]


def mask_of(queries: int, keys: int, seen: blocks.Seen) -> Tensor | None:
    every_QL = torch.ones(queries, keys, dtype=torch.bool)
    return {"all": None, "causal": every_QL.tril(), "reversed": every_QL.triu()}[seen]


@pytest.mark.parametrize("scores", [blocks.PLAIN, blocks.Scores(scale=0.8)])
@pytest.mark.parametrize(("queries", "keys", "seen"), SHAPES)
def test_the_cpu_kernel_is_the_written_out_block(queries: int, keys: int, seen: blocks.Seen, scores: blocks.Scores):
    q, k, v, grad = inputs(queries, keys)
    mask = mask_of(queries, keys, seen)
    ours, theirs = blocks.attend(q, k, v, seen, scores), blocks.written_out(q, k, v, mask, scores)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    # As a part of more keys: probabilities are smaller than those of the block alone.
    out, lse = theirs[0] * 0.5, theirs[1] + 1.0
    ours = blocks.attend_backward(grad, q, k, v, out, lse, seen, scores)
    theirs = blocks.written_out_backward(grad, q, k, v, out, lse, mask, scores)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_two_halves_of_the_keys_are_attention_over_all(kv_heads: int):
    q, k, v, grad = inputs(6, 10, kv_heads)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    repeated = [x.repeat_interleave(H // kv_heads, 1) for x in (k, v)]
    expected = torch.softmax(q @ repeated[0].mT / math.sqrt(A), -1) @ repeated[1]
    expected.backward(grad)

    with torch.no_grad():
        halves = [(k[:, :, :5], v[:, :, :5]), (k[:, :, 5:], v[:, :, 5:])]
        out, lse = (x.clone() for x in blocks.attend(q, *halves[0], "all"))
        blocks.merge(out, lse, *blocks.attend(q, *halves[1], "all"))
        assert torch.allclose(out, expected, atol=1e-12)
        found = [blocks.attend_backward(grad, q, *half, out, lse, "all") for half in halves]
    assert torch.allclose(found[0][0] + found[1][0], q.grad, atol=1e-12)
    assert torch.allclose(torch.cat((found[0][1], found[1][1]), 2), k.grad, atol=1e-12)
    assert torch.allclose(torch.cat((found[0][2], found[1][2]), 2), v.grad, atol=1e-12)


@pytest.mark.parametrize("far", [-800.0, -30.0, 0.0, 21.0, 30.0, 800.0])
def test_merging_is_exact_however_far_the_parts_are_apart(far: float):
    lse, block_lse = torch.tensor([1.0], dtype=torch.float64), torch.tensor([1.0 + far], dtype=torch.float64)
    out, block_out = torch.tensor([[2.0]], dtype=torch.float64), torch.tensor([[5.0]], dtype=torch.float64)
    share = math.exp(far) / (1 + math.exp(far)) if far < 700 else 1.0
    expected_lse = 1.0 + math.log1p(math.exp(-abs(far))) + max(far, 0.0)
    blocks.merge(out, lse, block_out, block_lse)
    assert out.item() == pytest.approx(2.0 + 3.0 * share, rel=1e-14)
    assert lse.item() == pytest.approx(expected_lse, rel=1e-15, abs=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "keys", "seen"), SHAPES_ON_CUDA)
def test_blocks_on_cuda_are_the_written_out_ones(dtype, queries: int, keys: int, seen: blocks.Seen):
    q, k, v, grad = inputs(queries, keys, kv_heads=2, dtype=dtype, device="cuda", width=64)
    exact = [x.double() for x in (q, k, v, grad)]
    wide = [x.repeat_interleave(2, 1) for x in exact[1:3]]
    out, lse = blocks.attend(q, k, v, seen)
    mask = mask_of(queries, keys, seen)
    mask = None if mask is None else mask.cuda()
    expected_out, expected_lse = blocks.written_out(exact[0], *wide, mask)
    found = blocks.attend_backward(grad, q, k, v, out, lse, seen)
    expected = list(blocks.written_out_backward(exact[3], exact[0], *wide, expected_out, expected_lse, mask))
    expected[1:] = [x.unflatten(1, (2, 2)).sum(2) for x in expected[1:]]
    assert lse.dtype == torch.float32
    pairs = [(out, expected_out), (lse, expected_lse), *zip(found, expected, strict=True)]
    tolerance = 2e-3 if dtype == torch.float32 else 2e-2
    for ours, theirs in pairs:
        assert (ours.double() - theirs).abs().max() <= tolerance * theirs.abs().max()
