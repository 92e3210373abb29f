"""The chunked loss against the plain one, value and gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from attrs import evolve
from packed_rows import T, head, inputs
from ranks import on_ranks
from torch.profiler import ProfilerActivity, profile

from xtrain.runtime.base.collectives import shared
from xtrain.runtime.nn import loss
from xtrain.runtime.nn.axes import TensorAxis
from xtrain.runtime.nn.loss import IGNORE, Head, token_losses
from xtrain.runtime.nn.loss import whole_logits as whole_logits_of

CASES = [(0.0, None), (0.3, None), (0.3, 1.5)]


def plain(hidden, weight, labels, z_weight, cap=None):
    valid = labels != IGNORE
    logits = hidden[valid] @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    lse = torch.logsumexp(logits, -1)
    cross_entropy = (lse - logits.gather(1, labels[valid, None]).squeeze(1)).sum()
    return cross_entropy + z_weight * lse.square().sum(), cross_entropy


@pytest.mark.parametrize(("z_weight", "cap"), CASES)
@pytest.mark.parametrize("per_chunk", [1, 5, 7, 36, 37, 1000])
def test_every_chunk_size_gives_the_plain_loss(per_chunk, z_weight, cap):
    hidden, weight, labels = inputs()
    terms = token_losses(hidden, weight, labels, evolve(head(z_weight, per_chunk), cap=cap))
    (terms.objective * 0.25).backward()
    ours = hidden.grad, weight.grad
    hidden, weight, labels = inputs()
    objective, cross_entropy = plain(hidden, weight, labels, z_weight, cap)
    (objective * 0.25).backward()
    assert torch.allclose(terms.objective, objective, rtol=1e-13)
    assert torch.allclose(terms.cross_entropy, cross_entropy, rtol=1e-13)
    assert torch.allclose(ours[0], hidden.grad, atol=1e-13)
    assert torch.allclose(ours[1], weight.grad, atol=1e-13)


def test_statistics_take_no_memory_beside_the_logits():
    """`torch.logsumexp` would take as much again, which plans do not count."""
    logits_TV, labels_T = torch.randn(64, 1000), torch.arange(64)
    wanted_T, bytes_of = logits_TV.logsumexp(-1), logits_TV.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        stats = loss.statistics_of(logits_TV, labels_T, head(0.0, 64), ())
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    assert largest < bytes_of / 50 and stats.softmax_TV is logits_TV
    torch.testing.assert_close(stats.lse_T, wanted_T, rtol=1e-6, atol=0)


def each(hidden, weight, labels, cap=None):
    logits = hidden.detach() @ weight.detach().T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE)


@pytest.mark.parametrize("per_chunk", [1, 5, 37, 1000])
def test_losses_of_single_tokens_change_nothing_else(per_chunk):
    results = []
    for asked in (False, True):
        hidden, weight, labels = inputs()
        terms = token_losses(hidden, weight, labels, head(0.3, per_chunk), each=asked)
        (terms.objective * 0.25).backward()
        results.append((terms.objective.detach(), terms.cross_entropy, hidden.grad, weight.grad))
        assert (terms.each_T is not None) == asked
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert terms.each_T is not None and not terms.each_T.requires_grad
    assert torch.allclose(terms.each_T, each(hidden, weight, labels), rtol=1e-13)
    assert not terms.each_T[labels == IGNORE].any()


@pytest.mark.parametrize("per_chunk", [5, 1000])
def test_without_valid_labels_the_loss_is_zero_and_has_a_gradient(per_chunk):
    hidden, weight, _ = inputs()
    terms = token_losses(hidden, weight, torch.full((T,), IGNORE), head(0.1, per_chunk))
    terms.objective.backward()
    assert terms.objective.item() == 0.0
    assert hidden.grad.abs().sum() == 0 and weight.grad.abs().sum() == 0


def test_bf16_logits_are_taken_to_fp32():
    hidden, weight, labels = (t.detach() for t in inputs())
    terms = token_losses(hidden.bfloat16(), weight.bfloat16(), labels, head(0.0, 1000))
    assert terms.cross_entropy.dtype == torch.float32
    logits = F.linear(hidden.bfloat16(), weight.bfloat16()).float()
    assert torch.allclose(terms.cross_entropy, F.cross_entropy(logits, labels, reduction="sum"), rtol=1e-6)


def test_evaluation_needs_no_gradient():
    hidden, weight, labels = (t.detach() for t in inputs())
    with torch.no_grad():
        terms = token_losses(hidden, weight, labels, head(0.0, 3))
    assert torch.allclose(terms.cross_entropy, plain(hidden, weight, labels, 0.0)[1])


def cut_over_ranks(rank: int, world: int, whole_logits: bool, z_weight: float, cap: float | None):
    """Of three ranks, whose vocabulary of 50 is 17, 17 and 16 rows."""
    group = torch.distributed.group.WORLD
    hidden, weight, labels = inputs()
    own = weight.detach().chunk(world)[rank].clone().requires_grad_()
    axis = TensorAxis(group=group, sequence=False, loss=not whole_logits)
    cut = evolve(head(z_weight, 7), tensor=axis, cap=cap)
    terms = token_losses(shared(hidden, group), own, labels, cut, each=True)
    (terms.objective * 0.25).backward()
    logits = whole_logits_of(hidden.detach(), own.detach(), cut)
    return terms.objective.detach(), terms.cross_entropy, terms.each_T, hidden.grad, own.grad, logits


@pytest.mark.parametrize(("z_weight", "cap"), CASES)
@pytest.mark.parametrize("whole_logits", [False, True])
def test_a_vocabulary_cut_over_ranks_gives_the_plain_loss(whole_logits, z_weight, cap, tmp_path):
    ranks = on_ranks(3, cut_over_ranks, tmp_path, whole_logits, z_weight, cap)
    hidden, weight, labels = inputs()
    logits = hidden.detach() @ weight.detach().T
    objective, cross_entropy = plain(hidden, weight, labels, z_weight, cap)
    (objective * 0.25).backward()
    for piece, found in zip(weight.grad.chunk(3), ranks, strict=True):
        own_objective, own_cross_entropy, own_each, hidden_grad, weight_grad, own_logits = found
        assert torch.allclose(own_logits, logits if cap is None else cap * torch.tanh(logits / cap), rtol=1e-13)
        assert torch.allclose(own_objective, objective, rtol=1e-13)
        assert torch.allclose(own_cross_entropy, cross_entropy, rtol=1e-13)
        assert torch.allclose(own_each, each(*inputs(), cap), rtol=1e-13)
        assert torch.allclose(hidden_grad, hidden.grad, atol=1e-13)
        assert torch.allclose(weight_grad, piece, atol=1e-13)


def test_a_backward_that_runs_twice_gives_the_same_gradients():
    """As under schedules that take the gradients of inputs and of weights apart."""
    hidden, weight, labels = inputs()
    terms = token_losses(hidden, weight, labels, evolve(head(0.3, 7), twice=True))
    once = torch.autograd.grad(terms.objective * 0.25, (hidden, weight), retain_graph=True)
    first = [grad.clone() for grad in once]
    again = torch.autograd.grad(terms.objective * 0.25, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("form", "z_weight", "temperature"), [
    (torch.float64, 1e-2, 0.7),
    pytest.param(torch.float32, 0.0, 1.0, marks=pytest.mark.slow),
    pytest.param(torch.float32, 1e-2, 0.7, marks=pytest.mark.slow),
    pytest.param(torch.float64, 0.0, 1.0, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_compiled_piece_is_the_plain_loss(form, z_weight, temperature, monkeypatch):
    """As Inductor gets it: the operations one after the other."""
    monkeypatch.setattr(loss, "_PIECES", {})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(11, 8, generator=generator).to(form)
    weight = torch.randn(19, 8, generator=generator).to(form)
    labels = torch.randint(0, 19, (11,), generator=generator)
    labels[::4] = -100
    found = {}
    for compiled in (False, True):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        head = Head(
            vocabulary=19, z_weight=z_weight, chunk_bytes=4 * 19 * 4, temperature=temperature, compiled=compiled
        )
        terms = token_losses(*inputs, labels, head, each=True)
        terms.objective.backward()
        with torch.no_grad():
            plain = token_losses(*inputs, labels, head)
        assert terms.each_T is not None
        found[compiled] = [terms.objective, terms.cross_entropy, terms.each_T, plain.objective]
        found[compiled] += [each.grad for each in inputs]
    for expected, ours in zip(*found.values(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12 if form is torch.float64 else 1e-6, atol=1e-6)


def test_a_compiled_piece_fills_tiles():
    sizes = {compiled: Head(vocabulary=1000, z_weight=0.0, chunk_bytes=4_000_000, compiled=compiled).chunk
             for compiled in (False, True)}  # fmt: skip
    assert sizes == {False: 1000, True: 896}
    assert Head(vocabulary=1000, z_weight=0.0, chunk_bytes=400_000, compiled=True).chunk == 100
