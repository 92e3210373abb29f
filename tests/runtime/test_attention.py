"""Attention kernels against a written-out reference, on packed rows."""

# shapes: B rows, S positions, H query heads, K key/value heads, A head width

import pytest
import torch

from xtrain.runtime.models.attention import KERNELS, DocumentLayout, with_block_mask

B, S, H, K, A = 3, 24, 4, 2, 8
LENGTHS = [24, 5, 12, 7, 10, 13, 1]  # row 0: one document; row 1: three; row 2: three, the last a single position


def packing() -> DocumentLayout:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return with_block_mask(DocumentLayout.from_lengths(bounds, B, S, torch.device("cpu")))


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
