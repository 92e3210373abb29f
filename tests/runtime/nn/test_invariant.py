"""Numbers that do not depend on the batch: the same bits for a row alone, among others, and at other places."""

import attrs
import pytest
import torch
import torch.nn.functional as F
from small_generators import SPEC, generator_of
from torch import Tensor

from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.schema.setting import settings_of
from xtrain.planner.load import plan_from_text
from xtrain.runtime.nn.attention import by_document, in_tiles
from xtrain.runtime.nn.attention_blocks import Scores
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache
from xtrain.runtime.nn.invariant import Attended, Invariant, newest
from xtrain.runtime.sampling.text_generator import Prompts

COUNTS = (1, 2, 5, 31, 33)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def parts(x: Tensor):
    return ((first, x[first : first + count].clone()) for first in (0, 3, 40) for count in COUNTS)


@pytest.mark.parametrize("form", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [6, 40, 258])
def test_products_of_rows_do_not_depend_on_their_number(form, width):
    random = torch.Generator().manual_seed(width)
    x_TK, weight_NK, bias_N = (torch.randn(*s, generator=random).to(form) for s in ((80, 32), (width, 32), (width,)))
    with Invariant():
        for product in (
            lambda x: F.linear(x, weight_NK, bias_N),
            lambda x: x @ weight_NK.t(),
            lambda x: torch.addmm(bias_N, x, weight_NK.t()),
            lambda x: F.silu(F.linear(x, weight_NK)),
            lambda x: F.linear(x, weight_NK).float().logsumexp(-1),
        ):
            whole = product(x_TK)
            assert all(torch.equal(product(part), whole[first : first + len(part)]) for first, part in parts(x_TK))
    torch.testing.assert_close(F.linear(x_TK, weight_NK).float().logsumexp(-1), whole)


def test_gradients_of_products_are_the_usual_ones():
    x_TK, weight_NK = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((7, 5), (6, 5)))
    expected = torch.autograd.grad(F.linear(x_TK, weight_NK).square().sum(), (x_TK, weight_NK))
    with Invariant():
        found = torch.autograd.grad(F.linear(x_TK, weight_NK).square().sum(), (x_TK, weight_NK))
    torch.testing.assert_close(found, expected)


def heads(rows: int, length: int, width: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(length)
    return [torch.randn(rows, number, length, width, generator=random) for number in (4, 2, 2)]


SCORES = {"plain": Scores(), "window": Scores(window=20), "cap": Scores(cap=5.0, scale=0.3)}


@pytest.mark.parametrize("width", [10, 16])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_a_sampled_position_attends_as_in_training(name, sinks, width):
    """A document of 80 positions in a packed row, and grown position by position next to a shorter one."""
    scores, sink_H = SCORES[name], torch.tensor([0.5, -1.0, 0.0, 2.0]) if sinks else None
    given = heads(1, 120, width)
    packing = DocumentLayout.from_lengths(torch.tensor([0, 30, 110, 120]), 1, 120, torch.device("cpu"))
    with Invariant():
        trained = in_tiles(*given, packing, scores, sink_H)[:, :, 30:110]
        expected = by_document(*given, packing, scores, sink_H)[:, :, 30:110]
        torch.testing.assert_close(trained, expected, rtol=1e-4, atol=1e-5)
        own = [x[:, :, 30:110] for x in given]
        # Two rows, of which the second has a shorter prompt: 12 of 20 positions.
        rows = [torch.cat((x, torch.cat((torch.zeros_like(x[:, :, :8]), x[:, :, :72]), 2))) for x in own]
        seen_BL = torch.arange(80) >= torch.tensor([[0], [8]])
        cache, layer = KeyValueCache(80, seen_B11L=seen_BL[:, None, None]), torch.nn.Identity()
        cache.extended(layer, *(x[:, :, :20] for x in rows[1:]), window=scores.window)
        cache.filled = 20
        for place in range(20, 80):
            k, v = cache.extended(layer, *(x[:, :, place : place + 1] for x in rows[1:]), window=scores.window)
            found = newest(rows[0][:, :, place : place + 1], k, v, cache, scores, sink_H)
            assert torch.equal(found[0], trained[0, :, place : place + 1])
            assert torch.equal(found[1], trained[0, :, place - 8 : place - 7])
            cache.filled += 1


def test_gradients_of_attention_are_those_of_documents():
    given = [x.double().requires_grad_() for x in heads(2, 40, 8)]
    packing = DocumentLayout.from_lengths(torch.tensor([0, 25, 40, 80]), 2, 40, torch.device("cpu"))
    sink_H = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 4, 40, 8, dtype=torch.float64)
    expected = torch.autograd.grad((by_document(*given, packing, Scores(), sink_H) * weights).sum(), (*given, sink_H))
    out = Attended.apply(by_document, packing, Scores(), *given, sink_H)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(torch.autograd.grad((out * weights).sum(), (*given, sink_H)), expected)


# Widths that end within a vector register: the last numbers of rows are then computed otherwise.
SMALL = {
    "dim": 48, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 77, "experts": 4, "experts_per_token": 2,
    "expert_ffn": 21, "window": 8,
}  # fmt: skip
OTHER_ORDER = {
    "deepseek_v3", "deepseek_v32", "falcon_h1", "glm4_moe_lite", "glm_moe_dsa", "granitemoehybrid", "nemotron_h",
    "qwen3_5", "qwen3_5_moe", "qwen3_next",
}  # fmt: skip
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_samples_the_numbers_of_whole_texts_or_is_refused(family):
    """A pointwise function of a family without kernels of fixed shapes is seen here."""
    known = settings_of(FAMILIES[family])
    given = {name: meta.example for name, (a, meta) in known.items() if a.default is attrs.NOTHING}
    given |= {name: value for name, value in SMALL.items() if name in known}
    model = f"{family} {{ {', '.join(f'{name} = {value}' for name, value in given.items())} }}"
    text = SPEC.format(model=model).replace("params = fp64", "params = fp32, batch_invariant = true")
    found = plan_from_text(text, "tiny.xtrain")
    refused = any(each.code == "X448" for each in found.diagnostics.errors)
    assert refused == (family in OTHER_ORDER) == (found.plan is None)
    if found.plan is None:
        return
    author, ids = generator_of(found.plan), [[256, *b"def f"], [256, *b"a"], [256, *range(40, 75)]]
    with Invariant():
        rows = Prompts.of(ids, 48, CPU)
        batch = rows.first()
        for _ in range(3):
            logits_BV = author.logits(batch)
            assert logits_BV is not None
            for text, logits_V in zip(ids, logits_BV, strict=True):
                alone_1V = author.logits(Prompts.of([text], len(text), CPU).first())
                assert alone_1V is not None and torch.equal(logits_V, alone_1V[0])
            ids = [[*text, int(logits_V.argmax())] for text, logits_V in zip(ids, logits_BV, strict=True)]
            batch = rows.next([text[-1] for text in ids])
