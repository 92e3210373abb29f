"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464) in chunks of positions, with its exact gradients.

A head has a state S [K, V]. A position with query q, key k, value v, log decay g and step size b computes
S ← exp(g) · S, then S ← S + b · k (v - kᵀ S)ᵀ, and its output is qᵀ S. The positions of a chunk are solved together
from the state before the chunk (UT transform, Yang et al. 2024, arXiv 2406.06484, section 3). States are zero at the
start of a document: masks keep the documents of a chunk apart.

shapes: R rows · heads, N chunks, C positions of a chunk, K width of a key, V width of a value, T positions of a row
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from xtrain.runtime.nn.chunks import Decays, Scan, documents_in_chunks, flat, from_end, in_chunks, last_chunks, matmul


class Inputs(NamedTuple):
    """Queries, keys, values, log decays and step sizes of heads, in the format of exact sums."""

    q_RTK: Tensor
    k_RTK: Tensor
    v_RTV: Tensor
    g_RT: Tensor
    b_RT: Tensor


class _Chunks(NamedTuple):
    """Inputs in chunks, and what follows from them without a state.

    decay, before, after, kept: see `Decays`. pairs: product of decay with q · k; solved: strictly lower triangle of I +
    b · (k · k) · decay. u, w: solutions for b · v and for the decayed keys.
    """

    q_RNCK: Tensor
    k_RNCK: Tensor
    v_RNCV: Tensor
    b_RNC: Tensor
    decay_RNCC: Tensor
    pairs_RNCC: Tensor
    system_RNCC: Tensor
    u_RNCV: Tensor
    w_RNCK: Tensor
    before_RNC: Tensor
    after_RNC: Tensor
    kept_RN: Tensor


def delta_rule(x: Inputs, document_RT: Tensor, scan: Scan | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [R, T, V], and the states after the last position [R, K, V].

    document_RT: number of the document of each position. scan: the rows are pieces of documents.
    """
    chunks, (rows, positions, _) = _chunked(x, document_RT, scan), x.v_RTV.shape
    given = None if scan is None else dict(zip(scan.begins, scan.states(_maps(chunks, scan)), strict=True))
    out_RNCV, states = _outputs(chunks, given)
    return out_RNCV.view(rows, -1, out_RNCV.shape[-1])[:, :positions], states[-1]


def delta_rule_gradients(x: Inputs, document_RT: Tensor, grad_RTV: Tensor, scan: Scan | None = None) -> Inputs:
    """Return the gradients of the inputs from the gradients of the outputs."""
    chunks, positions = _chunked(x, document_RT, scan), x.v_RTV.shape[1]
    q, k, v, b, decay, pairs, system, u, w, before, after, kept = chunks
    q_before, k_after = q * before[..., None], k * after[..., None]
    found = _gradients_at_states(chunks, q_before, k_after, in_chunks(grad_RTV), scan)
    grad_q_before, grad_k_after, grad_pairs, grad_kept, grad_added, grad_w = found

    # The triangular system: (I + A) x = y has the gradients (I + A)ᵀ⁻¹ dx of y, and - dy xᵀ of A.
    both = torch.cat((grad_added, grad_w), dim=-1)
    del found, grad_added, grad_w
    solved = torch.linalg.solve_triangular(system.mT, both, upper=True, unitriangular=True)
    grad_bv, grad_bk = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    grad_system = -matmul(solved, torch.cat((u, w), dim=-1).mT).tril(-1)
    del both, chunks, u, w

    # Each product of decays with keys, in the keys and in the logarithms.
    products = matmul(k, k.mT)
    grad_logs = grad_pairs * pairs + grad_system * system.tril(-1)
    grad_pairs, grad_scaled = grad_pairs * decay, grad_system * decay
    grad_b = (grad_scaled * products).sum(-1) + (grad_bv * v).sum(-1)
    grad_products = grad_scaled * b[..., None]
    decayed = k * before[..., None]
    grad_b = grad_b + (grad_bk * decayed).sum(-1)
    grad_decayed = grad_bk * b[..., None]
    grad_q = matmul(grad_pairs, k) + grad_q_before * before[..., None]
    grad_k = matmul(grad_pairs.mT, q) + matmul(grad_products + grad_products.mT, k)
    grad_k = grad_k + grad_decayed * before[..., None] + grad_k_after * after[..., None]
    # A position's log decay is in each decay from a position before it to itself or a later one.
    grad_g = from_end(grad_logs, -2).tril_(-1).sum(-1)
    grad_g = grad_g + from_end((grad_q_before * q_before).sum(-1) + (grad_decayed * decayed).sum(-1), -1)
    of_after = (grad_k_after * k_after).sum(-1)
    grad_g = grad_g + of_after.cumsum(-1) - of_after + (grad_kept * kept)[..., None]

    def of_row(grad: Tensor) -> Tensor:
        return grad.flatten(1, 2)[:, :positions]

    return Inputs(*map(of_row, (grad_q, grad_k, grad_bv * b[..., None], grad_g, grad_b)))


def _gradients_at_states(
    chunks: _Chunks, q_before: Tensor, k_after: Tensor, grad_out: Tensor, scan: Scan | None
) -> tuple[Tensor, ...]:
    """Return the gradients of decayed queries and keys, of pairs, of the decay over each chunk, and of u and w.

    Its other tensors, as large as the inputs or larger, are freed when it returns."""
    q, _, v, _, _, pairs, _, u, w, _, _, kept = chunks
    grad_added = matmul(pairs.mT, grad_out)

    def reverse(given: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yield chunks with the gradients of the states after them, of what is added to these, and of those before."""
        grad_state = q.new_zeros(len(q), q.shape[-1], v.shape[-1])
        for n in reversed(range(q.shape[1])):
            after_chunk = given.get(n, grad_state)
            added = torch.baddbmm(grad_added[:, n], k_after[:, n], after_chunk)
            carried = torch.baddbmm(after_chunk * kept[:, n, None, None], q_before[:, n].mT, grad_out[:, n])
            grad_state = torch.baddbmm(carried, w[:, n].mT, added, alpha=-1)
            yield n, after_chunk, added, grad_state

    states, ends = None, {}
    if scan is not None:
        last = last_chunks(scan, q.shape[1])
        zeros = q.new_zeros(len(q), q.shape[-1], v.shape[-1])
        firsts = [grad for n, *_, grad in reverse(dict.fromkeys(last, zeros)) if n in scan.begins]
        before_pieces, after_pieces = scan.gradients(torch.stack(firsts[::-1]))
        states, ends = dict(zip(scan.begins, before_pieces, strict=True)), dict(zip(last, after_pieces, strict=True))
    states_RNKV = torch.stack(_outputs(chunks, states, outputs=False)[1][:-1], dim=1)
    new_RNCV = torch.baddbmm(flat(u), flat(w), flat(states_RNKV), alpha=-1).view_as(u)
    grad_states = torch.empty_like(states_RNKV)
    for n, after_chunk, added, _ in reverse(ends):
        grad_states[:, n], grad_added[:, n] = after_chunk, added

    grad_q_before, grad_k_after = matmul(grad_out, states_RNKV.mT), matmul(new_RNCV, grad_states.mT)
    grad_pairs, grad_kept = matmul(grad_out, new_RNCV.mT), (grad_states * states_RNKV).sum((-2, -1))
    return grad_q_before, grad_k_after, grad_pairs, grad_kept, grad_added, -matmul(grad_added, states_RNKV.mT)


def delta_step(x: Inputs, state_RKV: Tensor) -> Tensor:
    """Return the outputs [R, 1, V] of one position, and update the states in place."""
    q_RK1, k_RK1 = x.q_RTK.mT, x.k_RTK.mT
    state_RKV.mul_(x.g_RT.exp()[..., None])
    change_R1V = (x.v_RTV - k_RK1.mT @ state_RKV) * x.b_RT[..., None]
    state_RKV.baddbmm_(k_RK1, change_R1V)
    return q_RK1.mT @ state_RKV


def _chunked(x: Inputs, document_RT: Tensor, scan: Scan | None) -> _Chunks:
    q, k, v, g, b = map(in_chunks, x)
    decay, before, after, kept = Decays.of(g, documents_in_chunks(document_RT), begun=scan is not None)
    system = matmul(k, k.mT) * decay * b[..., None]
    right = torch.cat((v, k * before[..., None]), dim=-1) * b[..., None]
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    return _Chunks(q, k, v, b, decay, matmul(q, k.mT) * decay, system, u, w, before, after, kept)


def _maps(chunks: _Chunks, scan: Scan) -> tuple[Tensor, Tensor]:
    """Return the maps of pieces, M [P, R, K, K] and s [P, R, K, V]: what becomes of a unit matrix next to a state of
    zeros."""
    (rows, _, _, keys), values = chunks.k_RNCK.shape, chunks.v_RNCV.shape[-1]
    first = F.pad(torch.eye(keys, dtype=chunks.u_RNCV.dtype, device=chunks.u_RNCV.device), (0, values))
    k_after, state, found = chunks.k_RNCK * chunks.after_RNC[..., None], first, []
    for n in range(chunks.q_RNCK.shape[1]):
        if n in scan.begins:
            state = first.expand(rows, -1, -1)
            found.append(state)
        new_RCA = torch.baddbmm(F.pad(chunks.u_RNCV[:, n], (keys, 0)), chunks.w_RNCK[:, n], state, alpha=-1)
        found[-1] = state = torch.baddbmm(state * chunks.kept_RN[:, n, None, None], k_after[:, n].mT, new_RCA)
    maps, states = torch.stack(found).split((keys, values), dim=-1)
    return maps, states


def _outputs(
    chunks: _Chunks, given: Mapping[int, Tensor] | None = None, *, outputs: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Return the outputs, if wanted, and the state before each chunk and after the last. given: states before some."""
    rows, _, _, keys = chunks.k_RNCK.shape
    states = [chunks.k_RNCK.new_zeros(rows, keys, chunks.v_RNCV.shape[-1])]
    out_RNCV = torch.empty_like(chunks.v_RNCV) if outputs else chunks.v_RNCV
    q_before, k_after = chunks.q_RNCK * chunks.before_RNC[..., None], chunks.k_RNCK * chunks.after_RNC[..., None]
    for n in range(chunks.q_RNCK.shape[1]):
        state = states[-1] = (given or {}).get(n, states[-1])
        new_RCV = torch.baddbmm(chunks.u_RNCV[:, n], chunks.w_RNCK[:, n], state, alpha=-1)
        if outputs:
            within = torch.bmm(chunks.pairs_RNCC[:, n], new_RCV)
            out_RNCV[:, n] = torch.baddbmm(within, q_before[:, n], state)
        states.append(torch.baddbmm(state * chunks.kept_RN[:, n, None, None], k_after[:, n].mT, new_RCV))
    return out_RNCV, states
