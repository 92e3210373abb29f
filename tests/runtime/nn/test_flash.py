"""Attention by a release of FlashAttention that torch has activated. A stand-in for its kernels computes on a CPU what
torch documents for them (`torch.nn.attention.varlen`), registered as the packages register theirs."""

from itertools import pairwise

import pytest
import torch
from attrs import evolve
from one_rank import one_rank
from torch._dynamo.testing import CompileCounter
from torch.library import Library
from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl

from xtrain.plan.architecture import Architecture
from xtrain.plan.hardware import FLASH
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.nn import build
from xtrain.runtime.nn.attention import KERNELS, activate, with_bounds
from xtrain.runtime.nn.attention_blocks import PLAIN, Scores
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.build import build_model

B, S, HEADS, GROUPS, WIDTH = 2, 96, 4, 2, 16
PACKINGS = {"one document a row": [S, S], "several": [1, 30, 65, 96], "many": [7, 9, 16, 31, 33, 1, 1, 46, 48]}


SPEC = """
experiment flash { seed = 1, budget = 4 steps }
model llama { dim = 64, layers = 1, heads = 4, attention = flash3 }
tokenizer bytes
dataset made { source = synthetic() }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
precision { params = bf16 }
launch { device = cuda }
"""


class StandIn:
    """What a package registers with torch, and the calls of it."""

    def __init__(self):
        self.library, self.calls = Library("aten", "IMPL", "CPU"), []
        self.library.impl("_flash_attention_forward", self.forward)
        self.library.impl("_flash_attention_backward", self.backward)

    def remove(self):
        self.library._destroy()

    def weights(self, q_THA, k_TKA, bounds, scale, left, right):
        """Yield of each document its positions, and weights and logsumexp of all its pairs."""
        for first, end in pairwise(bounds.tolist()):
            q, k = q_THA[first:end], k_TKA[first:end].repeat_interleave(HEADS // GROUPS, 1)
            ahead = torch.arange(end - first)[None] - torch.arange(end - first)[:, None]
            hidden = (ahead > right if right >= 0 else False) | (-ahead > left if left >= 0 else ahead > end)
            scores = (torch.einsum("qha,kha->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
            yield slice(first, end), scores.softmax(-1), scores.logsumexp(-1)

    def forward(
        self, q, k, v, bounds, of_keys, longest, of_key, dropout, causal, debug, *, scale=None, window_size_left=None,
        window_size_right=None, **more,
    ):  # fmt: skip
        assert bounds.dtype == torch.int32 and (dropout, debug) == (0.0, False) and torch.equal(bounds, of_keys)
        assert longest == of_key >= bounds.diff().max() and causal == (window_size_left == -1)
        self.calls.append(len(bounds) - 1)
        out, sums = torch.empty_like(q), torch.empty(HEADS, len(q), dtype=torch.float32)
        for part, p, sum_ in self.weights(q, k, bounds, scale or WIDTH**-0.5, window_size_left, window_size_right):
            out[part] = torch.einsum("hqk,kha->qha", p, v[part].repeat_interleave(HEADS // GROUPS, 1))
            sums[:, part] = sum_.float()
        return out, sums, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), q.new_empty(0)

    def backward(
        self, grad, q, k, v, out, sums, bounds, of_keys, longest, of_key, dropout, causal, state, unused, *,
        scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        slopes, scale = [torch.empty_like(x) for x in (q, k, v)], scale or WIDTH**-0.5
        for part, p, _ in self.weights(q, k, bounds, scale, window_size_left, window_size_right):
            g, o, x = grad[part], out[part], q[part]
            y, z = (each[part].repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
            s = p * (torch.einsum("qha,kha->hqk", g, z) - (g * o).sum(-1).T[..., None]) * scale
            slopes[0][part] = torch.einsum("hqk,kha->qha", s, y)
            for slope, a, b in ((slopes[1], s, x), (slopes[2], p, g)):
                slope[part] = torch.einsum("hqk,qha->kha", a, b).unflatten(1, (GROUPS, -1)).sum(2)
        return tuple(slopes)


@pytest.fixture
def stand_in(monkeypatch):
    made = []
    register_flash_attention_impl("stand-in", register_fn=lambda: made.append(StandIn()) or made[-1])
    monkeypatch.setitem(FLASH, "flash3", FLASH["flash3"]._replace(registered="stand-in"))
    activate("flash3")
    yield made[-1]
    torch.nn.attention.restore_flash_attention_impl()


def layout_of(lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    return with_bounds(DocumentLayout.from_lengths(bounds, B, S, torch.device("cpu")))


def inputs():
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, heads, S, WIDTH) for heads in (HEADS, GROUPS, GROUPS))
    return [torch.randn(shape, dtype=torch.float64, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("scores", [PLAIN, Scores(window=20), Scores(scale=0.5)], ids=str)
@pytest.mark.parametrize("lengths", PACKINGS.values(), ids=PACKINGS)
def test_all_documents_are_one_call_with_the_numbers_of_any_kernel(stand_in, lengths, scores):
    found = []
    for kernel in ("flash3", "mask"):
        given = inputs()
        out = KERNELS[kernel](*given, layout_of(lengths), scores)
        out.backward(torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(4)))
        found.append([out, *(x.grad for x in given)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 1e-12
    assert stand_in.calls == [len(lengths)]


def test_generated_positions_are_computed_without_it(stand_in):
    layout = evolve(layout_of(PACKINGS["several"]), bounds=None)
    q, k, v = inputs()
    assert torch.allclose(KERNELS["flash4"](q, k, v, layout), KERNELS["mask"](q, k, v, layout))
    assert stand_in.calls == []


def test_compiled_code_is_made_once_for_any_number_of_documents(stand_in):
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(KERNELS["flash3"], backend=counter, dynamic=False, fullgraph=True)
    for lengths in PACKINGS.values():
        layout = layout_of(lengths)
        assert torch.allclose(compiled(*inputs(), layout), KERNELS["mask"](*inputs(), layout))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kernel", FLASH)
def test_a_package_that_is_missing_is_named(kernel):
    """By torch's own registration, where a preflight could not look."""
    release = FLASH[kernel]
    with pytest.raises(EnvironmentFault, match=f"cannot use {release.title}.*{release.install[:20]}") as one:
        activate(kernel)
    assert one.value.code == "X715"
    with pytest.raises(ImportError):
        activate_flash_attention_impl(release.registered)
    activate("flex")  # has none


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_ranks_on_cuda_activate_the_release_that_the_plan_names(monkeypatch, device):
    activated = []
    monkeypatch.setattr(build, "activate", activated.append)
    loaded = plan_from_text(SPEC, "flash.xtrain", [], world=1)
    args = loaded.plan.node("setup.build_model").args
    args = {**args, "architecture": Architecture.from_values(args["architecture"])}
    made = build_model(loaded.plan, evolve(one_rank(), device=torch.device(device)), **args)
    assert made.parts[0].uses_bounds and activated == ["flash3"] * (device == "cuda")
