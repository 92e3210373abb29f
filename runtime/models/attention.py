"""Attention over packed rows: every kernel keeps the documents of a row apart, and is causal inside each.

Shapes: B rows, S positions of a row, H query heads, K key/value heads, A head width, T = B·S positions.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor


@frozen(eq=False)
class Packing:
    """Where the documents of a microbatch lie.

    segments: (row, first position, length) of every document, in order; together they cover every position.
    document_BS: int32, a number of its own for every document of the microbatch.
    """

    segments: tuple[tuple[int, int, int], ...]
    document_BS: Tensor

    @classmethod
    def from_lengths(cls, cumulative_lengths: Tensor, rows: int, sequence: int, device: torch.device) -> "Packing":
        """`cumulative_lengths` int32 [documents + 1] over the flattened B·S positions; no document crosses a row."""
        bounds = cumulative_lengths.tolist()
        segments = tuple((first // sequence, first % sequence, last - first) for first, last in pairwise(bounds))
        lengths = cumulative_lengths.diff().to(device)
        numbers = torch.arange(len(segments), device=device, dtype=torch.int32)
        document_T = numbers.repeat_interleave(lengths, output_size=rows * sequence)
        return cls(segments=segments, document_BS=document_T.view(rows, sequence))


class AttentionKernel(Protocol):
    def __call__(self, q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: Packing) -> Tensor: ...


def by_document(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: Packing) -> Tensor:
    """One causal product a document: no mask is built, and nothing is computed between documents.

    Rows that hold a single document go through one batched call.
    """
    rows, sequence = q_BHSA.shape[0], q_BHSA.shape[2]
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    if len(packing.segments) == rows:
        return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, is_causal=True, enable_gqa=grouped)
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


def masked(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: Packing) -> Tensor:
    """Scaled dot-product attention under a boolean mask; S² booleans a row, for short rows and any device."""
    document_BS = packing.document_BS
    sequence = q_BHSA.shape[2]
    causal_SS = torch.ones(sequence, sequence, dtype=torch.bool, device=q_BHSA.device).tril()
    mask_B1SS = (document_BS[:, None, :, None] == document_BS[:, None, None, :]) & causal_SS
    grouped = q_BHSA.shape[1] != k_BKSA.shape[1]
    return F.scaled_dot_product_attention(q_BHSA, k_BKSA, v_BKSA, attn_mask=mask_B1SS, enable_gqa=grouped)


def flex(q_BHSA: Tensor, k_BKSA: Tensor, v_BKSA: Tensor, packing: Packing) -> Tensor:
    """FlexAttention with a block mask of the documents: compiled on CUDA, where it skips blocks between documents.

    Rows that hold a single document need no mask; a sample that grows token by token would compile anew each time.
    """
    if len(packing.segments) == q_BHSA.shape[0]:
        return by_document(q_BHSA, k_BKSA, v_BKSA, packing)
    attend, make_mask = _flex_functions(q_BHSA.device.type)
    document_BS = packing.document_BS

    def same_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (document_BS[b, q] == document_BS[b, kv])

    rows, sequence = document_BS.shape
    mask = make_mask(same_document, rows, None, sequence, sequence, device=str(q_BHSA.device))
    return attend(q_BHSA, k_BKSA, v_BKSA, block_mask=mask, enable_gqa=q_BHSA.shape[1] != k_BKSA.shape[1])


@cache
def _flex_functions(device_type: str) -> tuple[Callable[..., Tensor], Callable]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if device_type != "cuda":
        return flex_attention, create_block_mask  # pyright: ignore[reportReturnType]
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask, dynamic=False)  # pyright: ignore


KERNELS: dict[str, AttentionKernel] = {"documents": by_document, "mask": masked, "flex": flex}
