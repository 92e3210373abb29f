"""State-space duality of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, section 6) in chunks of positions, with its exact
gradients.

A head has a state S [K, V]. A position with values x, step size dt, log decay g, write vector k and read vector q
computes S ← exp(g) · S + k (dt · x)ᵀ, and its output is qᵀ S + d · x. The heads of a group share q and k: products with
the states of a group are one product. States are zero at the start of a document: masks keep the documents of a chunk
apart.

shapes: R rows · groups, J heads of a group, N chunks, C positions of a chunk, K width of a state's rows, V width of a
head, T positions of a row
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.runtime.nn.chunks import Decays, Scan, documents_in_chunks, from_end, in_chunks, last_chunks, matmul


class SsdInputs(NamedTuple):
    """Inputs of groups and heads, in the format of exact sums: read and write vectors, values x with their step sizes,
    log decays, and the factor of x in the output."""

    q_RTK: Tensor
    k_RTK: Tensor
    x_RTJV: Tensor
    dt_RTJ: Tensor
    g_RTJ: Tensor
    d_RJ: Tensor


def ssd(x: SsdInputs, document_RT: Tensor, scan: Scan | None = None) -> tuple[Tensor, Tensor]:
    """Return the outputs [R, T, J, V], and the states after the last position [R, K, J, V].

    document_RT: number of the document of each position. scan: the rows are pieces of documents.
    """
    q, k, v, decays = _chunked(x, document_RT, scan)
    heads = v.shape[3:]
    out_RNCJV = _turned(_products(decays.pairs_RNJCC.mul_(matmul(q, k.mT)[:, :, None]), _turned(v))).contiguous()
    decays = _without_pairs(decays)
    states_RNKA, last_RKA = _states(k, v, decays, scan)
    del v
    out_RNCJV += matmul(q, states_RNKA).unflatten(-1, heads).mul_(_of_positions(decays.before_RNJC))
    out_RTJV = out_RNCJV.flatten(1, 2)[:, : x.x_RTJV.shape[1]]
    return out_RTJV.addcmul_(x.x_RTJV, x.d_RJ[:, None, :, None]), last_RKA.unflatten(-1, heads)


def ssd_gradients(x: SsdInputs, document_RT: Tensor, grad_RTJV: Tensor, scan: Scan | None = None) -> SsdInputs:
    """Return the gradients of the inputs from the gradients of the outputs."""
    q, k, v, decays = _chunked(x, document_RT, scan)
    grad, heads, positions = in_chunks(grad_RTJV), v.shape[3:], grad_RTJV.shape[1]
    grad_q, grad_k, grad_v, slopes_RNJC = _within(q, k, v, grad, decays.pairs_RNJCC)
    decays = _without_pairs(decays)
    before, after = _of_positions(decays.before_RNJC), _of_positions(decays.after_RNJC)

    def reverse(grads_RNKA: Tensor, given: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield chunks with the gradients of the states after and before them. grads: of the latter, by reads."""
        grad_state = torch.zeros_like(grads_RNKA[:, 0])
        for n in reversed(range(q.shape[1])):
            after_chunk = given.get(n, grad_state)
            grad_state = torch.addcmul(grads_RNKA[:, n], after_chunk, _wide(decays, n, v))
            yield n, after_chunk, grad_state

    grad_read = (grad * before).flatten(-2)
    starts, ends = {}, {}
    if scan is not None:
        grads_RNKA = matmul(q.mT, grad_read)
        last, zeros = last_chunks(scan, q.shape[1]), torch.zeros_like(grads_RNKA[:, 0])
        firsts = [each for n, _, each in reverse(grads_RNKA, dict.fromkeys(last, zeros)) if n in scan.begins]
        before_pieces, after_pieces = scan.gradients(torch.stack(firsts[::-1]).unflatten(-1, heads))
        starts = dict(zip(scan.begins, before_pieces.flatten(-2), strict=True))
        ends = dict(zip(last, after_pieces.flatten(-2), strict=True))
        del grads_RNKA

    # Reads of the state before a chunk.
    states_RNKA, _ = _states(k, v, decays, starts=starts)
    grad_q += matmul(grad_read, states_RNKA.mT)
    slopes_RNJC += _turned(matmul(q, states_RNKA).mul_(grad_read).unflatten(-1, heads).sum(-1))
    # The scan, in reverse: gradients of the states before chunks become gradients of the states after them.
    grads_RNKA = matmul(q.mT, grad_read)
    del grad_read
    for n, after_chunk, _ in reverse(grads_RNKA, ends):
        grads_RNKA[:, n] = after_chunk
    ends_RNJ = states_RNKA.mul_(grads_RNKA).unflatten(-1, heads).sum((2, 4)) * decays.kept_RNJ
    del states_RNKA

    # Writes to the state after a chunk.
    sent = v.mul_(after).flatten(-2)
    grad_k += matmul(sent, grads_RNKA.mT)
    written = matmul(k, grads_RNKA)
    del grads_RNKA
    of_after_RNJC = _turned(sent.mul_(written).unflatten(-1, heads).sum(-1))
    grad_v.addcmul_(written.unflatten(-1, heads), after)

    # A decay from one position to another falls with the sum of logs up to the first, and grows with the other sum.
    slopes_RNJC -= of_after_RNJC
    slopes_RNJC[..., -1] += of_after_RNJC.sum(-1) + ends_RNJ
    grad_g = _turned(from_end(slopes_RNJC, -1))

    grad_q, grad_k, grad_v, grad_g = (each.flatten(1, 2)[:, :positions] for each in (grad_q, grad_k, grad_v, grad_g))
    grad_dt, grad_d = (grad_v * x.x_RTJV).sum(-1), (grad_RTJV * x.x_RTJV).sum((1, 3))
    grad_x = grad_v.mul_(x.dt_RTJ[..., None]).addcmul_(grad_RTJV, x.d_RJ[:, None, :, None])
    return SsdInputs(grad_q, grad_k, grad_x, grad_dt, grad_g, grad_d)


def ssd_step(x: SsdInputs, state_RKJV: Tensor) -> Tensor:
    """Return the outputs [R, 1, J, V] of the last position, and update the states in place."""
    q_RK, k_RK, x_RJV, dt_RJ, g_RJ = (each[:, -1] for each in x[:5])
    v_RJV = x_RJV * dt_RJ[..., None]
    state_RKJV.mul_(g_RJ.exp()[:, None, :, None]).addcmul_(k_RK[..., None, None], v_RJV[:, None])
    out_RJV = torch.bmm(q_RK[:, None], state_RKJV.flatten(-2))[:, 0].unflatten(-1, v_RJV.shape[1:])
    return out_RJV.addcmul_(x_RJV, x.d_RJ[..., None])[:, None]


def _chunked(x: SsdInputs, document_RT: Tensor, scan: Scan | None) -> tuple[Tensor, Tensor, Tensor, Decays]:
    """Return reads, writes and written values in chunks, and their decays."""
    q, k, v, g = map(in_chunks, (x.q_RTK, x.k_RTK, x.x_RTJV * x.dt_RTJ[..., None], x.g_RTJ))
    return q, k, v, Decays.of(_turned(g), documents_in_chunks(document_RT), begun=scan is not None)


def _without_pairs(decays: Decays) -> Decays:
    """Return the decays without the decays of pairs, which take the most memory."""
    return decays._replace(pairs_RNJCC=decays.kept_RNJ)


def _within(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of reads, writes and values by pairs of positions of a chunk, and the slopes [R, N, J, C] of
    the sums of log decays. decay: of pairs, which is overwritten."""
    scores = matmul(q, k.mT)[:, :, None]
    pairs = decay * scores
    grad_v = _turned(_products(pairs.mT, _turned(grad))).contiguous()
    grad_pairs = _products(_turned(grad), _turned(v).mT)
    pairs *= grad_pairs
    slopes = pairs.sum(-1) - pairs.sum(-2)
    del pairs
    grad_scores = decay.mul_(grad_pairs).sum(2)
    del grad_pairs
    return matmul(grad_scores, k), matmul(grad_scores.mT, q), grad_v, slopes


def _states(
    k: Tensor, v: Tensor, decays: Decays, scan: Scan | None = None, starts: Mapping[int, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the states before each chunk [R, N, K, J · V], and after the last. starts: known states before some."""
    states = matmul(k.mT, (v * _of_positions(decays.after_RNJC)).flatten(-2))  # what chunks write

    def following(starts: Mapping[int, Tensor]) -> Iterator[tuple[int, Tensor, Tensor]]:
        after = torch.zeros_like(states[:, 0])
        for n in range(states.shape[1]):
            before = starts.get(n, after)
            after = torch.addcmul(states[:, n], before, _wide(decays, n, v))
            yield n, before, after

    if scan is not None:
        last, zeros = last_chunks(scan, k.shape[1]), torch.zeros_like(states[:, 0])
        ends = [after for n, _, after in following(dict.fromkeys(scan.begins, zeros)) if n in last]
        kept = [decays.kept_RNJ[:, a : b + 1].prod(1) for a, b in zip(scan.begins, last, strict=True)]
        known = scan.states((torch.stack(kept), torch.stack(ends).unflatten(-1, v.shape[3:])))
        starts = dict(zip(scan.begins, known.flatten(-2), strict=True))
    after = states[:, 0]
    for n, before, after in following(starts or {}):  # noqa: B007
        states[:, n] = before
    return states, after


def _wide(decays: Decays, n: int, v: Tensor) -> Tensor:
    """Return the decay over a chunk for each column of states, [R, 1, J · V]."""
    return decays.kept_RNJ[:, n].repeat_interleave(v.shape[-1], dim=-1)[:, None]


def _of_positions(x_RNJC: Tensor) -> Tensor:
    return _turned(x_RNJC)[..., None]


def _turned(x: Tensor) -> Tensor:
    """Return [R, N, J, C, …] from [R, N, C, J, …], and back."""
    return x.transpose(2, 3)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the products of the matrices of heads, [R, N, J, …]."""
    return torch.bmm(left.flatten(0, 2), right.flatten(0, 2)).unflatten(0, left.shape[:3])
