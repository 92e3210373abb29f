"""Attention over packed rows: every kernel keeps the documents of a row apart, and is causal inside each.

Shapes: B rows, S positions of a row, H query heads, K key/value heads, A head width, T = B·S positions.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor


@frozen(eq=False)
class DocumentLayout:
    """Where the documents of a microbatch lie.

    segments: (row, first position, length) of every document, in order; together they cover every position.
    document_BS: int32, a number of its own for every document of the microbatch.
    single: every row is one document. block_mask: what flex wants to know, made once for all layers.
    cached: keys and values of earlier positions lie in a cache (`cache.py`), and these rows are the newest positions.
    """

    segments: tuple[tuple[int, int, int], ...]
    document_BS: Tensor
    single: bool
    block_mask: Any = None
    cached: "CachedRows | None" = None

    @classmethod
    def from_lengths(
        cls, cumulative_lengths: Tensor, rows: int, sequence: int, device: torch.device
    ) -> "DocumentLayout":
        """`cumulative_lengths` int32 [documents + 1] over the flattened B·S positions; no document crosses a row."""
        bounds = cumulative_lengths.tolist()
        segments = tuple((first // sequence, first % sequence, last - first) for first, last in pairwise(bounds))
        lengths = cumulative_lengths.diff().to(device)
        numbers = torch.arange(len(segments), device=device, dtype=torch.int32)
        document_T = numbers.repeat_interleave(lengths, output_size=rows * sequence)
        return cls(segments=segments, document_BS=document_T.view(rows, sequence), single=len(segments) == rows)


@frozen(eq=False)
class CachedRows:
    """What the newest position of every row sees of the rows in a cache.

    seen_B11L: bool, which of the positions that there is room for; None: all that have come so far.
    """

    seen_B11L: Tensor | None = None


class AttentionKernel(Protocol):
    """Keys may be of more positions than queries are where `packing` is of rows in a cache: the queries are the last
    ones."""

    def __call__(self, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout) -> Tensor: ...


def by_document(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout) -> Tensor:
    """One causal product a document: no mask is built, and nothing is computed between documents.

    Rows that hold a single document go through one batched call.
    """
    if packing.cached is not None:
        return newest(q_BHSA, k_BKSA, v_BKSA, packing.cached)
    if packing.single:
        return causal(q_BHSA, k_BKSA, v_BKSA)
    return _one_by_one(q_BHSA, k_BKSA, v_BKSA, packing)


def causal(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor) -> Tensor:
    """Attention of rows that are one document each."""
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, is_causal=True, enable_gqa=grouped)


def newest(q_BH1A: Tensor, k_BKLA: Tensor, v_BKLA: Tensor, rows: CachedRows) -> Tensor:
    """Attention of the newest position of every row over all so far.

    The heads of a group lie side by side as queries of one head: with one position there is no order among them to
    heed, and keys and values are read in place instead of being repeated for every head.
    """
    groups, seen = k_BKLA.shape[1], rows.seen_B11L
    q_BKGA = q_BH1A.view(len(q_BH1A), groups, -1, q_BH1A.shape[-1])
    mask = None if seen is None else seen[..., : k_BKLA.shape[2]]
    return F.scaled_dot_product_attention(q_BKGA, k_BKLA, v_BKLA, attn_mask=mask).view_as(q_BH1A)


def _by_document(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout) -> Tensor:
    rows, sequence = q_BHSA.shape[0], q_BHSA.shape[2]
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    by_row: list[list[Tensor]] = [[] for _ in range(rows)]
    for row, first, length in packing.segments:
        part = slice(first, first + length)
        by_row[row].append(
            F.scaled_dot_product_attention(
                q_BHSA[row : row + 1, :, part],
                k_BKSA[row : row + 1, :, part],
                v_BKSA[row : row + 1, :, part],
                is_causal=True,
                enable_gqa=grouped,
            )
        )
    out = torch.cat([torch.cat(parts, dim=2) if len(parts) > 1 else parts[0] for parts in by_row], dim=0)
    assert out.shape[2] == sequence
    return out


# The compiler would make a graph for every number and every length of documents.
_one_by_one: AttentionKernel = torch.compiler.disable(_by_document)  # pyright: ignore[reportAssignmentType]


def masked(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout) -> Tensor:
    """Scaled dot-product attention under a boolean mask; S² booleans a row, for short rows and any device."""
    if packing.cached is not None:
        return newest(q_BHSA, k_BKSA, v_BKSA, packing.cached)
    document_BS = packing.document_BS
    sequence = q_BHSA.shape[2]
    causal_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=q_BHSA.device).tril()
    mask_B1SS = (document_BS[:, None, :, None] == document_BS[:, None, None, :]) & causal_SS
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, attn_mask=mask_B1SS, enable_gqa=grouped)


def flex(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: DocumentLayout) -> Tensor:
    """FlexAttention with a block mask of the documents: compiled on CUDA, where it skips blocks between documents.

    Rows that hold a single document need no mask. Prompts have none either: it would be compiled for every length.
    """
    if packing.block_mask is None:
        return by_document(q_BHSA, k_BKSA, v_BKSA, packing)
    attend, _ = _flex_functions(q_BHSA.device.type)
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return attend(q_BHSA, k_BKSA, v_BKSA, block_mask=packing.block_mask, enable_gqa=grouped)


def with_block_mask(packing: DocumentLayout) -> DocumentLayout:
    """The packing with what flex needs: which blocks of queries and keys have anything to do with each other."""
    if packing.single:
        return packing
    document_BS = packing.document_BS
    _, make_mask = _flex_functions(document_BS.device.type)

    def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (document_BS[b, q] == document_BS[b, kv])

    rows, sequence = document_BS.shape
    mask = make_mask(same_document, rows, None, sequence, sequence, device=str(document_BS.device))
    return evolve(packing, block_mask=mask)


@cache
def _flex_functions(device_type: str) -> tuple[Callable[..., Tensor], Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device_type != "cuda":
        return flex_attention, create_block_mask  # pyright: ignore[reportReturnType]
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)  # pyright: ignore


KERNELS: dict[str, AttentionKernel] = {"documents": by_document, "mask": masked, "flex": flex}
