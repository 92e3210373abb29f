"""Attention kernels against a written-out reference, on packed rows."""

# shapes: B rows, S positions, H query heads, K key/value heads, A head width

from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.plan.architecture import pairs_within
from xtrain.plan.hardware import BLOCK_MASKS
from xtrain.runtime.nn import attention, blockwise
from xtrain.runtime.nn.attention import KERNELS, newest, with_block_masks
from xtrain.runtime.nn.attention_blocks import PLAIN, Scores, causal_blocks
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache
from xtrain.runtime.nn.blockwise import BlockLayout

B, S, H, K, A = 3, 24, 4, 2, 8
LENGTHS = [24, 5, 12, 7, 10, 13, 1]  # row 0: one document; row 1: three; row 2: three, the last a single position


def packing(scores: Scores = PLAIN, sinks: bool = False, lengths: list[int] = LENGTHS) -> DocumentLayout:
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    layout = DocumentLayout.from_lengths(bounds, B, S, torch.device("cpu"))
    return with_block_masks(layout, [(scores, sinks)])


def inputs(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(B, H, S, A), (B, K, S, A), (B, K, S, A)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(q)
    position = 0
    for length in LENGTHS:
        row, first = divmod(position, S)
        position += length
        for head in range(H):
            for i in range(first, first + length):
                scores = q[row, head, i] @ k[row, head // (H // K), first : i + 1].T / A**0.5
                out[row, head, i] = torch.softmax(scores, -1) @ v[row, head // (H // K), first : i + 1]
    return out


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_forward_is_the_reference(name):
    q, k, v = (t.detach() for t in inputs())
    with torch.no_grad():
        out = KERNELS[name](q, k, v, packing())
        assert torch.allclose(out, reference(q, k, v), atol=1e-12)


@pytest.mark.parametrize("name", ["documents", "mask"])
def test_gradients_are_the_reference(name):
    ours, theirs = inputs(), inputs()
    seed = torch.randn(B, H, S, A, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    KERNELS[name](*ours, packing()).backward(seed)
    q, k, v = theirs
    written_out = torch.zeros(B, H, S, A, dtype=torch.float64)
    position = 0
    for length in LENGTHS:
        row, first = divmod(position, S)
        position += length
        part = slice(first, first + length)
        keys = k[row, :, part].repeat_interleave(H // K, 0)
        values = v[row, :, part].repeat_interleave(H // K, 0)
        future = torch.ones(length, length).triu(1).bool()
        scores = (q[row, :, part] @ keys.transpose(1, 2) / A**0.5).masked_fill(future, -torch.inf)
        written_out[row, :, part] = torch.softmax(scores, -1) @ values
    written_out.backward(seed)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-12)


def dense(q: Tensor, k: Tensor, v: Tensor, layout: DocumentLayout, scores: Scores, sink: Tensor | None) -> Tensor:
    """All scores of rows, as transformers' eager models compute them: sliding windows, soft caps and sinks."""
    keys, values = (x.repeat_interleave(H // K, 1) for x in (k, v))
    scored = q @ keys.mT * (A**-0.5 if scores.scale is None else scores.scale)
    if scores.cap is not None:
        scored = scores.cap * torch.tanh(scored / scores.cap)
    positions, documents = torch.arange(S), layout.document_BS
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (documents[:, None, :, None] == documents[:, None, None, :])
    if scores.window is not None:  # `sliding_window_overlay`: kv_idx > q_idx - sliding_window
        seen = seen & (distance < scores.window)
    scored = scored.masked_fill(~seen, -torch.inf)
    if sink is not None:
        scored = torch.cat([scored, sink[None, :, None, None].expand(B, H, S, 1)], -1)
    return torch.softmax(scored, -1)[..., :S] @ values


# Windows of one position, shorter than documents, as long as one, as a multiple of them, longer than all.
KINDS = [
    *((Scores(window), sinks) for window, sinks in ((5, False), (7, True), (12, False), (None, True))),
    (Scores(5, 0.7, 1.5), True),
    (Scores(None, 0.7, 1.5), False),
    *(pytest.param(Scores(window), sinks, marks=pytest.mark.matrix) for window, sinks in (
        (1, False), (2, True), (13, True), (23, False), (24, True), (40, True))),
    pytest.param(Scores(scale=0.7), False, marks=pytest.mark.matrix),
]  # fmt: skip


@pytest.mark.parametrize("lengths", [LENGTHS, [S] * B], ids=["packed", "single"])
@pytest.mark.parametrize(("scores", "sinks"), KINDS, ids=str)
@pytest.mark.parametrize("name", sorted(KERNELS))
def test_windows_sinks_caps_and_scales_are_those_of_dense_attention(
    name: str, scores: Scores, sinks: bool, lengths: list[int], monkeypatch
):
    monkeypatch.setattr(blockwise, "TILE", 4)
    layout, grads = packing(scores, sinks, lengths), []
    seed = torch.randn(B, H, S, A, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for attend in (KERNELS[name], dense):
        given = inputs()
        sink = torch.linspace(-2.0, 3.0, H, dtype=torch.float64).requires_grad_() if sinks else None
        if name in BLOCK_MASKS:  # which have no backward on a CPU
            out = attend(*(x.detach() for x in given), layout, scores, None if sink is None else sink.detach())
            grads.append([out])
            continue
        out = attend(*given, layout, scores, sink)
        out.backward(seed)
        grads.append([out, *(x.grad for x in given), *([] if sink is None else [sink.grad])])
    for ours, theirs in zip(*grads, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(("scores", "sinks"), KINDS, ids=str)
def test_the_newest_position_sees_what_it_sees_of_the_whole_text(scores: Scores, sinks: bool):
    """Rows of a cache begin with what is no text; the last position but one comes by itself too."""
    layout, missing = packing(lengths=[24, 5, 19, 20, 4]), torch.tensor([0, 5, 20])
    sink = torch.linspace(-2.0, 3.0, H, dtype=torch.float64) if sinks else None
    with torch.no_grad():
        q, k, v = inputs()
        expected = dense(q, k, v, layout, scores, sink)[:, :, -1:]

        def found(rows: slice, seen: Tensor | None) -> Tensor:
            cache, layer = KeyValueCache(S + 3, seen_B11L=seen), nn.Identity()
            kept = (k, v)
            for part in (slice(S - 2), slice(S - 2, S - 1), slice(S - 1, S)):
                new = (x[rows, :, part] for x in (k, v))
                kept = cache.extended(layer, *new, window=scores.window)
                cache.filled = part.stop
            cache.filled -= 1
            assert kept[0].shape[2] == min(S, scores.window or S)
            return newest(q[rows, :, -1:], *kept, cache, scores, sink)

        seen = (torch.arange(S + 3) >= missing[:, None])[:, None, None]
        assert torch.allclose(found(slice(None), seen), expected, atol=1e-12)
        assert torch.allclose(found(slice(1), None), expected[:1], atol=1e-12)


@pytest.mark.parametrize("ring", [1, 2, 4])
def test_a_window_is_cut_into_parts_that_cover_what_is_seen_and_nothing_twice(ring: int):
    """Positions as the ranks of a ring have them: chunks r and 2R - 1 - r."""
    for length, window, tile in [(16, 5, 256), (16, 1, 256), (24, 8, 3), (24, 24, 5), (32, 11, 256), (8, 7, 2)]:
        bounds = torch.tensor([0, length, 2 * length], dtype=torch.int32)
        layout = BlockLayout.of(DocumentLayout.from_lengths(bounds, 2, length, torch.device("cpu")), ring)
        chunk, seen = length // (2 * ring), torch.zeros(2, length, length, dtype=torch.int64)
        places = [[c * chunk + i for c in (r, 2 * ring - 1 - r) for i in range(chunk)] for r in range(ring)]
        for rank, source in product(range(ring), range(ring)):
            for queries, keys, kind in layout.parts(source, rank, Scores(window), tiled=tile < 256):
                of_rank = torch.tensor([[d, p] for d in range(2) for p in places[rank]])
                of_source = torch.tensor([[d, p] for d in range(2) for p in places[source]])
                q_NQ, k_NK = queries(of_rank[:, None])[:, 0], keys(of_source[:, None])[:, 0]
                for q, k in zip(q_NQ, k_NK, strict=True):
                    pairs = torch.ones(len(q), len(k), dtype=torch.int64)
                    pairs = {"all": pairs, "causal": pairs.tril(), "reversed": pairs.triu()}[kind]
                    assert (q[:, None, 0] == k[:, 0]).all()
                    seen[q[0, 0], q[:, None, 1], k[:, 1]] += pairs
        distance = torch.arange(length)[:, None] - torch.arange(length)
        assert torch.equal(seen, ((distance >= 0) & (distance < window)).long().expand(2, -1, -1))
        assert int((distance.abs() < window).sum()) == pairs_within(length, window)


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_a_document_does_not_see_its_neighbours(name):
    q, k, v = (t.detach() for t in inputs())
    with torch.no_grad():
        before = KERNELS[name](q, k, v, packing())
        k[1, :, :5] += 1.0  # the first document of row 1
        v[1, :, :5] += 1.0
        after = KERNELS[name](q, k, v, packing())
    assert not torch.equal(before[1, :, :5], after[1, :, :5])
    assert torch.equal(before[1, :, 5:], after[1, :, 5:])
    assert torch.equal(before[[0, 2]], after[[0, 2]])


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize(("heads", "wide"), [(1, 5), (2, 8), (4, 8)])
def test_blocks_of_queries_are_torchs_attention(length: int, heads: int, wide: int):
    """wide: of values, which latent attention has in another width than keys."""
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(2, length, heads, width, dtype=torch.float64, generator=generator).transpose(1, 2)

    given = [each.detach().requires_grad_() for each in (drawn(4, 8), drawn(heads, 8), drawn(heads, wide))]
    seed = drawn(4, wide)
    for scale in (None, 0.3):
        ours = causal_blocks(*given, scale)
        whole = F.scaled_dot_product_attention(*given, is_causal=True, scale=scale, enable_gqa=True)
        assert torch.allclose(ours, whole, atol=1e-12, rtol=0)
        for a, b in zip(*(torch.autograd.grad(out, given, seed) for out in (ours, whole)), strict=True):
            assert torch.allclose(a, b, atol=1e-12, rtol=0)


def test_rows_of_one_document_go_through_blocks_of_queries():
    q, k, v = (x[:, :, :1].expand(-1, -1, 64, -1) for x in inputs())
    whole = DocumentLayout.from_lengths(torch.tensor([0, 64, 128, 192]).int(), B, 64, torch.device("cpu"))
    parts = DocumentLayout.from_lengths(torch.tensor([0, 64, 100, 128, 192]).int(), B, 64, torch.device("cpu"))
    found = [
        str(KERNELS[kernel](q, k, v, packing).grad_fn)
        for kernel, packing in (("blocks", whole), ("blocks", parts), ("documents", whole))
    ]
    assert ["CausalBlocks" in each for each in found] == [True, False, False]


def test_packing_knows_segments_and_document_numbers():
    found = packing()
    assert found.segments == ((0, 0, 24), (1, 0, 5), (1, 5, 12), (1, 17, 7), (2, 0, 10), (2, 10, 13), (2, 23, 1))
    assert found.document_BS[1].tolist() == [1] * 5 + [2] * 12 + [3] * 7


def test_the_compiler_makes_no_graph_for_every_number_of_documents():
    """Rows are packed anew in every step: a graph for each number of documents would soon be one too many."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v, packing: KERNELS["documents"](q, k, v, packing) * 2.0, backend=count)
    q, k, v = (t.detach()[:1] for t in inputs())
    for documents in range(1, 9):
        bounds = torch.tensor([*range(documents), S], dtype=torch.int32)
        compiled(q, k, v, DocumentLayout.from_lengths(bounds, 1, S, torch.device("cpu")))
    assert len(graphs) <= 3


def test_windows_and_sinks_are_the_same_where_blocks_are_compiled():
    def scaled(q: Tensor, k: Tensor, v: Tensor, layout: DocumentLayout, sink: Tensor) -> Tensor:
        return KERNELS["documents"](q * 1.5, k, v, layout, Scores(5), sink) * 2.0

    torch._dynamo.reset()
    found = []
    for function in (scaled, torch.compile(scaled, backend="eager")):
        given, sink = inputs(), torch.linspace(-2.0, 3.0, H, dtype=torch.float64).requires_grad_()
        out = function(*given, packing(), sink)
        out.square().sum().backward()
        found.append([out, *(x.grad for x in given), sink.grad])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("single", [True, False])
def test_only_rows_of_one_document_go_to_cudnn(single, monkeypatch):
    """On CUDA, with torch's other kernels after cuDNN's; and with the numbers of any other kernel."""
    orders = []

    @contextmanager
    def ordered(backends, set_priority):
        orders.append(([each.name for each in backends], set_priority))
        yield

    monkeypatch.setattr(attention, "device_type", lambda x: "cuda")
    monkeypatch.setattr(attention, "sdpa_kernel", ordered)
    q, k, v = (torch.randn(B, heads, S, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    layout = packing(lengths=[S] * B if single else LENGTHS)
    found = KERNELS["cudnn"](q, k, v, layout)
    assert (found - KERNELS["mask"](q, k, v, layout)).abs().max() < 1e-5
    assert orders == [(["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"], True)] * single
