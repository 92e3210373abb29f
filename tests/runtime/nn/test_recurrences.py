"""Recurrences in chunks, the gated delta rule and the state-space duality of Mamba-2: what they compute one position
after the other, and the gradients of that."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from xtrain.runtime.nn import chunks, delta_rule, ssd, state_scan
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.delta_net import DeltaRule
from xtrain.runtime.nn.mamba2 import Ssd
from xtrain.runtime.nn.recurrent import Recurrence, RecurrentMixer, _mix, _order, convolved
from xtrain.runtime.nn.state_scan import RingScan

ROWS, POSITIONS, KEYS, VALUES, HEADS = 3, 150, 8, 6, 2
# Documents that end inside a chunk, at its border, and one after the other.
BORDERS = ((40, 41), (64, 130), (100,))


class Kind(NamedTuple):
    """A recurrence: its module, its inputs of drawn numbers, its state at first, one step of it, and its functions."""

    module: Any
    draw: Callable[[Callable[..., Tensor]], Any]
    state: tuple[int, ...]
    step: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]
    outputs: Callable[..., tuple[Tensor, Tensor]]
    gradients: Callable[..., Any]
    moved: Callable[..., Tensor]


def _delta_inputs(normal: Callable[..., Tensor]) -> delta_rule.Inputs:
    keys = torch.nn.functional.normalize(normal(POSITIONS, KEYS), dim=-1)
    decays, steps = -normal(POSITIONS).square() / 9, normal(POSITIONS).sigmoid()
    return delta_rule.Inputs(normal(POSITIONS, KEYS), keys, normal(POSITIONS, VALUES), decays, steps)


def _delta_step(x: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, b = x
    state = state * g.exp()[:, None, None]
    change = v - torch.einsum("rk,rkv->rv", k, state)
    state = state + torch.einsum("rk,rv->rkv", k, change * b[:, None])
    return torch.einsum("rk,rkv->rv", q, state), state


def _ssd_inputs(normal: Callable[..., Tensor]) -> ssd.SsdInputs:
    vectors = normal(POSITIONS, KEYS), normal(POSITIONS, KEYS)
    steps, decays = normal(POSITIONS, HEADS).square(), -normal(POSITIONS, HEADS).square() / 9
    return ssd.SsdInputs(*vectors, normal(POSITIONS, HEADS, VALUES), steps, decays, normal(HEADS))


def _ssd_step(x: Sequence[Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, x_RJV, dt, g, d = x
    state = state * g.exp()[:, None, :, None] + torch.einsum("rk,rj,rjv->rkjv", k, dt, x_RJV)
    return torch.einsum("rk,rkjv->rjv", q, state) + d[..., None] * x_RJV, state


KINDS = {
    "delta rule": Kind(
        delta_rule,
        _delta_inputs,
        (KEYS, VALUES),
        _delta_step,
        delta_rule.delta_rule,
        delta_rule.delta_rule_gradients,
        delta_rule.delta_step,
    ),
    "ssd": Kind(ssd, _ssd_inputs, (KEYS, HEADS, VALUES), _ssd_step, ssd.ssd, ssd.ssd_gradients, ssd.ssd_step),
}
ALL = pytest.mark.parametrize("name", KINDS)


def inputs(name: str, seed: int = 0) -> tuple[Any, Tensor]:
    drawn = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(ROWS, *shape, dtype=torch.float64, generator=drawn)

    document_RT = torch.zeros(ROWS, POSITIONS, dtype=torch.int32)
    for row, borders in enumerate(BORDERS):
        for border in borders:
            document_RT[row, border:] += 1
    return KINDS[name].draw(normal), document_RT


def at(x: Any, places: slice) -> Any:
    """Inputs at some positions; those without positions as they are."""
    return type(x)(*(each[:, places] if each.shape[1] == POSITIONS else each for each in x))


def one_by_one(name: str, x: Any, document_RT: Tensor) -> tuple[Tensor, Tensor]:
    state, found = torch.zeros(ROWS, *KINDS[name].state, dtype=torch.float64), []
    for place in range(POSITIONS):
        if place:
            same = document_RT[:, place] == document_RT[:, place - 1]
            state = state * same.view(-1, *(1,) * (state.dim() - 1))
        own = [each[:, place] if each.shape[1] == POSITIONS else each for each in x]
        out, state = KINDS[name].step(own, state)
        found.append(out)
    return torch.stack(found, 1), state


def gaps(name: str, seed: int = 0) -> dict[str, float]:
    """The largest differences of outputs, states and gradients, relative to the largest number of each."""
    x, document_RT = inputs(name, seed)
    leaves = type(x)(*(each.clone().requires_grad_() for each in x))
    expected, state = one_by_one(name, leaves, document_RT)
    out, last = KINDS[name].outputs(x, document_RT)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    wanted = torch.autograd.grad((expected * grad).sum(), leaves)
    found = KINDS[name].gradients(x, document_RT, grad)
    pairs = {"outputs": (out, expected), "states": (last, state)}
    pairs |= dict(zip(x._fields, zip(found, wanted, strict=True), strict=True))
    return {name: float((a - b).abs().max() / b.abs().max()) for name, (a, b) in pairs.items()}


@ALL
@pytest.mark.parametrize("seed", range(3))
def test_chunks_compute_what_positions_one_after_the_other_do(name: str, seed: int):
    assert max(gaps(name, seed).values()) < 1e-13


@ALL
def test_a_step_continues_the_state(name: str):
    x, document_RT = inputs(name)
    expected, state = one_by_one(name, x, document_RT)
    end = POSITIONS - 3
    _, own = KINDS[name].outputs(at(x, slice(end)), document_RT[:, :end])
    for place in range(end, POSITIONS):
        out = KINDS[name].moved(at(x, slice(place, place + 1)), own)
        assert torch.allclose(out[:, 0], expected[:, place], rtol=1e-12, atol=1e-12)
    assert torch.allclose(own, state, rtol=1e-12, atol=1e-12)


def _no_reset(decays: chunks.Decays) -> chunks.Decays:
    before = decays.before_RNJC
    return decays._replace(before_RNJC=torch.where(before == 0, torch.ones_like(before), before))


def _no_carry(decays: chunks.Decays) -> chunks.Decays:
    kept, after = torch.zeros_like(decays.kept_RNJ), torch.zeros_like(decays.after_RNJC)
    return decays._replace(kept_RNJ=kept, after_RNJC=after)


@ALL
@pytest.mark.parametrize("mutate", [_no_reset, _no_carry])
def test_a_state_that_is_not_reset_or_not_carried_is_seen(
    monkeypatch: pytest.MonkeyPatch, name: str, mutate: Callable[[chunks.Decays], chunks.Decays]
):
    right = chunks.Decays.of
    monkeypatch.setattr(chunks.Decays, "of", lambda *given, **how: mutate(right(*given, **how)))
    assert gaps(name)["outputs"] > 1e-3


@ALL
def test_a_wrong_decay_in_the_backward_is_seen(monkeypatch: pytest.MonkeyPatch, name: str):
    right, module = chunks.from_end, KINDS[name].module
    monkeypatch.setattr(module, "from_end", lambda x, dim: right(x, dim) - x)  # sums without the position itself
    found = gaps(name)
    assert found["g_RT" if name == "delta rule" else "g_RTJ"] > 1e-3
    assert max(value for each, value in found.items() if not each.startswith("g_")) < 1e-13


# Recurrence of two heads → the widths of its projections, and the shapes of its parameters.
LAYERS: dict[str, tuple[Recurrence, Sequence[int], Sequence[tuple[int, ...]]]] = {
    "delta rule": (DeltaRule(4, 3), (4, 4, 6, 2, 2), ((4, 1, 3), (4, 1, 3), (6, 1, 3), (2,), (2,))),
    "ssd": (Ssd(3, 4, 0.1, 0.5), (6, 4, 4, 2), ((6, 1, 3), (4, 1, 3), (4, 1, 3), (6,), (4,), (4,), (2,), (2,), (2,))),
}


def layer_gradients(name: str, wanted: Sequence[int]) -> dict[int, Tensor]:
    """The gradients of some inputs of a layer's convolution and recurrence."""
    drawn = torch.Generator().manual_seed(3)
    how, widths, shapes = LAYERS[name]
    sizes = [*((2, 20, width) for width in widths), *shapes]
    values = [torch.randn(*size, dtype=torch.float64, generator=drawn) for size in sizes]
    given = [value.requires_grad_(number in wanted) for number, value in enumerate(values)]
    document_BS = torch.tensor([[0] * 9 + [1] * 11, [2] * 20], dtype=torch.int32)
    out = _mix(how, document_BS, None, *given)
    found = torch.autograd.grad(out.square().sum(), [given[number] for number in wanted])
    return dict(zip(wanted, found, strict=True))


@ALL
def test_frozen_inputs_of_a_layer_change_no_gradients(name: str):
    _, widths, shapes = LAYERS[name]
    count = len(widths) + len(shapes)
    whole = layer_gradients(name, range(count))
    for wanted in ((0,), (len(widths) + 2,), (count - 1, 3), (1, count - 2)):
        for number, grad in layer_gradients(name, wanted).items():
            assert torch.equal(grad, whole[number])


def test_convolutions_have_the_gradients_of_their_numbers():
    """Of rows with several documents, one of them shorter than the convolution."""
    drawn = torch.Generator().manual_seed(4)
    document_BS = torch.tensor([[0] * 3 + [1] * 2 + [2] * 4], dtype=torch.int32)
    sizes = ((1, 9, 2), (2, 1, 4), (2,))
    x, weight, bias = (torch.randn(*size, dtype=torch.float64, generator=drawn).requires_grad_() for size in sizes)

    def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return convolved(x, weight, document_BS, torch.float64, bias)

    parts = [convolve_alone(part, weight, bias) for part in x.split([3, 2, 4], dim=1)]
    torch.testing.assert_close(convolve(x, weight, bias), torch.cat(parts, dim=1))
    assert torch.autograd.gradcheck(convolve, (x, weight, bias))


class Board:
    """Collectives of threads instead of ranks."""

    def __init__(self, ring: int) -> None:
        self.ring, self.numbers = ring, {}
        self.barrier, self.here = threading.Barrier(ring), threading.local()

    def size(self) -> int:
        return self.ring

    def rank(self) -> int:
        return self.here.rank

    def shown(self, x: Tensor) -> list[Tensor]:
        """What every rank has at this call."""
        self.numbers[self.rank()] = x.detach().clone()
        self.barrier.wait()
        found = [self.numbers[rank] for rank in range(self.ring)]
        self.barrier.wait()
        return found


def _gathered(x: Tensor, dim: int, board: Board) -> Tensor:
    return torch.cat(board.shown(x))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, board: Board) -> Tensor:
        ctx.board = board
        return _gathered(x, dim, board)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum(ctx.board.shown(grad_outputs[0])).chunk(ctx.board.ring)[ctx.board.rank()], None, None


def ring_gap(monkeypatch: pytest.MonkeyPatch, name: str, ring: int) -> float:
    """The largest difference of outputs and gradients from those of whole rows, relative to the largest of each, where
    a ring passes states: of two rows with documents whose pieces are shorter than the convolution and than a chunk."""
    board, drawn, (how, widths, shapes) = Board(ring), torch.Generator().manual_seed(5), LAYERS[name]
    monkeypatch.setattr(state_scan, "gather", _Gather.apply)
    monkeypatch.setattr(state_scan, "all_gather", _gathered)
    lengths = [2 * ring * length for length in (1, 30, 70, 101)]
    sequence = lengths[-1]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    packing = DocumentLayout.from_lengths(bounds, 2, sequence, torch.device("cpu"))
    moving = [torch.randn(2, sequence, width, dtype=torch.float64, generator=drawn) for width in widths]
    weights = [torch.randn(*shape, dtype=torch.float64, generator=drawn) for shape in shapes]

    def computed(rows: Sequence[Tensor], mix: Callable[..., Tensor], grad: Tensor | None) -> list[Tensor]:
        given = [each.clone().requires_grad_() for each in (*rows, *weights)]
        out = mix(given[: len(rows)], given[len(rows) :])
        return [out.detach(), *torch.autograd.grad((out * (1 if grad is None else grad)).sum(), given)]

    def whole(rows: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
        return _mix(how, packing.document_BS, None, *rows, *own)

    out = whole(moving, weights)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=drawn)
    wanted = computed(moving, whole, grad)
    mixer: Any = SimpleNamespace(
        positions=weights[0].shape[2],
        axes=SimpleNamespace(ulysses=None, ring=board),
        layer=SimpleNamespace(most_documents=lambda *_: len(packing.segments)),
    )
    mixer._scanned = partial(RecurrentMixer._scanned, mixer)
    order = torch.tensor(_order(packing.segments, ring)).chunk(ring, dim=1)

    def own(x: Tensor, rank: int) -> Tensor:
        return torch.stack([row[places] for row, places in zip(x, order[rank], strict=True)])

    def of_rank(rank: int) -> list[Tensor]:
        board.here.rank = rank
        rows = [own(each, rank) for each in moving]
        spread = partial(RecurrentMixer._spread, mixer, how)
        return computed(rows, lambda rows, weights: spread((*rows, *weights), packing), own(grad, rank))

    with ThreadPoolExecutor(ring) as pool:
        found = [*pool.map(of_rank, range(ring))]
    pairs = [
        *((each[n], own(wanted[n], rank)) for n in range(1 + len(moving)) for rank, each in enumerate(found)),
        *((sum(each[n] for each in found), wanted[n]) for n in range(1 + len(moving), len(wanted))),
    ]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


@ALL
@pytest.mark.parametrize("ring", [2, 4])
def test_a_ring_that_passes_states_computes_whole_rows(monkeypatch: pytest.MonkeyPatch, name: str, ring: int):
    assert ring_gap(monkeypatch, name, ring) < 1e-12


@ALL
@pytest.mark.parametrize("back", [False, True])
def test_a_state_that_a_rank_does_not_pass_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, back: bool):
    right = RingScan._composed

    def dropped(scan: RingScan, maps: Tensor, added: Tensor, **how: bool) -> Tensor:
        forgets = scan.group.rank() == 0 and bool(how) is back
        return right(scan, maps, torch.zeros_like(added) if forgets else added, **how)

    monkeypatch.setattr(RingScan, "_composed", dropped)
    assert ring_gap(monkeypatch, name, 2) > 1e-3


def convolve_alone(x_BSC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    before = torch.nn.functional.pad(x_BSC.transpose(1, 2), (3, 0))
    return torch.nn.functional.conv1d(before, weight, bias, groups=2).transpose(1, 2)
