"""Layers of a user that mix positions: what a plan reads and measures of them, and what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from code_models import measured

from xtrain.blocks.delta_net import DeltaNetLayer
from xtrain.blocks.mamba2 import Mamba2Layer
from xtrain.blocks.mixer import UserMixer
from xtrain.blocks.recurrent import RecurrentLayer
from xtrain.dsl.checking import inspections
from xtrain.plan.parameters import matmul_parameters
from xtrain.planner.load import plan_from_text
from xtrain.runtime.base.user_parts import UserPart
from xtrain.runtime.inspect.trace import trace_plan
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout, KeyValueCache
from xtrain.runtime.nn.mixer import OwnMixer

PARTS = '''
import torch
from xtrain import Chain, NormLayer, Residual, SwiGLULayer, family, layer, state, weight


@layer(mixes="causal")
def summed(x, memory=state("dim"), out=weight("dim", "dim")):
    """Sums of earlier positions."""
    sums = memory[:, None] + x.cumsum(1)
    return sums @ out.T, sums[:, -1]


@family
def recurrent(arch):
    """Sums instead of attention."""
    return Chain.of(Residual.of(NormLayer("norm"), summed("mixer")), Residual.of(NormLayer("fed"), SwiGLULayer("mlp")))
'''
SPEC = """use "{parts}"
experiment small {{ budget = 2 steps }}
model recurrent {{ dim = 32, layers = 2, heads = 4, ffn = 48 }}
tokenizer bytes
dataset made {{ source = synthetic() }}
batch {{ sequence = 64, micro = 2, rows = 4 }}
optimizer adamw {{ lr = 1e-2 }}
launch {{ device = cpu }}
{more}
"""


RUN_CHILD = inspections.run_child


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Layers are measured in this process, which has imported torch."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(inspections, "run_child", measured)
    return tmp_path


def compiled(folder: Path, text: str = PARTS, more: str = "", world: int | None = None):
    (folder / "parts.py").write_text(text)
    return plan_from_text(SPEC.format(parts=folder / "parts.py", more=more), str(folder / "small.xtrain"), world=world)


@pytest.mark.parametrize(("before", "after", "reason"), [
    ("x.cumsum(1)", "x.cumsum(1).flip(1)", "a position of it depends on later positions"),
    ("memory[:, None] + x.cumsum(1)", "x.cumsum(1)", "a document in parts, with the states between them"),
    ("sums[:, -1]", "memory", "a document in parts, with the states between them"),
    ("x.cumsum(1)", "x.cumsum(1) + x.mean(0)", "a document of it depends on others of the batch"),
    ("return sums @ out.T, sums[:, -1]", "return sums @ out.T", "gave 1 values"),
    ("sums[:, -1]", "sums[:, -1:]", "of shape (2, 1, 32) as state 1"),
    ("sums @ out.T", "sums @ nothing", "nothing"),
    ('@layer(mixes="causal")', "@layer", "only a layer that mixes positions has a state"),
    ('memory=state("dim")', 'memory=weight("dim")', "a layer that mixes positions has a state"),
    ('@layer(mixes="causal")', '@layer(mixes="all")', "there is no way to mix positions `all`"),
    ('weight("dim", "dim")', 'weight("dim", "dim", cut="row")', "every tensor-parallel rank has all of it"),
    ('state("dim")', 'state("dim", initial="twos")', "does not begin with `twos`"),
    ('state("dim")', "state()", "a state has extents"),
    ('summed("mixer")', 'summed("mixer", power=2)', "has no setting `power`"),
])  # fmt: skip
def test_layers_that_do_not_compute_what_they_declare(folder: Path, before: str, after: str, reason: str):
    assert before in PARTS
    found = compiled(folder, PARTS.replace(before, after)).diagnostics.errors
    assert [each.code for each in found] == ["X223"] and reason in found[0].message, found


def test_ranks_that_have_parts_of_documents(folder: Path):
    (folder / "parts.py").write_text(PARTS)
    text = SPEC.format(parts=folder / "parts.py", more="parallel { cp 2 { } }")
    found = plan_from_text(text, str(folder / "small.xtrain"), world=2).diagnostics.errors
    assert "X449" in {each.code for each in found}, found


DELTA = """experiment small {{ }}
model qwen3_5 {{ dim = 32, layers = 4, heads = 4, kv_heads = 2, head_dim = 8, ffn = 48 }}
tokenizer bytes
{}
"""
TRAINED = "dataset made { source = synthetic() }\nbatch { sequence = 64, rows = 4 }\noptimizer adamw { lr = 1e-2 }\n"


def test_ranks_may_have_parts_of_documents_of_delta_nets():
    text = DELTA.format(f"{TRAINED}parallel {{ cp 2 {{ }} }}").replace("small { }", "small { budget = 2 steps }")
    found = plan_from_text(text, "small.xtrain", world=2)
    assert not found.diagnostics.errors


@pytest.mark.parametrize(("layer", "heads", "gathered", "exchanged", "most"), [
    (DeltaNetLayer(name="", kernel=4, key_heads=16, value_heads=32, key_dim=128, value_dim=128), 16, 32, 193, 5),
    (Mamba2Layer(name="", kernel=4, groups=8, heads=64, head_dim=64, state_dim=128), 8, 16, 161, 9),
])  # fmt: skip
def test_bytes_that_a_ring_sends_of_recurrent_mixers(
    layer: RecurrentLayer, heads: int, gathered: int, exchanged: int, most: int
):
    """The table of docs/families.md, and heads that a ring cannot share."""
    positions = 32768
    assert round(layer.document_bytes(4, 2, 4) / 2**20) == gathered
    assert round(positions // 4 * (layer.moving() + layer.outputs()) * 2 / 2**20) == exchanged
    assert [layer.most_documents(4, each, positions, 2, 4) for each in (heads, 1)] == [most, positions]


HYBRID = "model {} {{ dim = 32, layers = 4, heads = 4, kv_heads = 2, {} }}"


@pytest.mark.parametrize("more", ["", "parallel { pp 2 }", "parallel { tp 2 }"])
@pytest.mark.parametrize(("settings", "reason"), [
    ('pattern = "MXM*"', "no kind of blocks is named 'X'"),
    ('pattern = "MM*"', "pattern has 3 blocks, and layers is 4"),
    ('pattern = "MEM*EEE", experts = 4', "pattern has 7 blocks, and layers is 4"),
    ('pattern = "MEM*"', "experts is 0, and some block of pattern is of kind E"),
    ('pattern = "M-M*", experts = 4', "experts is 4, and no block of pattern is of kind E"),
    ("mamba_heads = 7", "mamba_heads 7 is not divisible by mamba_groups 2"),
    ("experts = 4, expert_groups = 3", "experts 4 cannot be divided into 3 groups"),
])  # fmt: skip
def test_patterns_and_sizes_that_do_not_fit(settings: str, reason: str, more: str):
    model = DELTA.splitlines()[1]
    text = DELTA.format(TRAINED + more).replace(model.format(), HYBRID.format("nemotron_h", settings))
    text = text.replace("small { }", "small { budget = 2 steps }")
    found = plan_from_text(text, "small.xtrain", world=1).diagnostics.errors
    assert any(each.code == "X433" and reason in each.message for each in found), found


@pytest.mark.parametrize(("settings", "reason"), [
    ("experts = 1, experts_per_token = 1", "experts is 1"),
    ("attention_layers = [1, 4]", "block 4 does not exist: the model has blocks 0 to 3"),
    ("mamba_head_dim = 6", "mamba_heads · mamba_head_dim = 48 is not divisible by dim 32"),
    ("mamba_head_dim = 6, attention_layers = [0, 1, 2]", "= 48 is not divisible"),
    ("mamba_head_dim = 16", ""),
])  # fmt: skip
def test_blocks_of_granite_that_do_not_fit(settings: str, reason: str):
    text = DELTA.format(TRAINED).replace(DELTA.splitlines()[1].format(), HYBRID.format("granitemoehybrid", settings))
    text = text.replace("small { }", "small { budget = 2 steps }")
    found = plan_from_text(text, "small.xtrain", world=1).diagnostics.errors
    assert [each.code for each in found] == ["X433"] * bool(reason) and all(reason in each.message for each in found)


@pytest.mark.parametrize(("parallel", "reason", "words"), [
    ("cp 4 { }", "the 2 groups of Mamba-2 mixers of a tp rank cannot be split over ulysses 4", ""),
    ("cp 4 { ulysses = 1 }", "", "states of recurrent mixers pass through 4 ranks, 25.2 KiB for each document of"),
    ("cp 4 { ulysses = 2 }", "", "states of recurrent mixers pass through 2 ranks, 6.31 KiB for each document of"),
    ("cp 2 { ulysses = 1 }", "", "positions are exchanged for heads of recurrent mixers in microbatches with more"),
    ("cp 2 { ulysses = 2 }", "", "(ulysses=2), positions are exchanged for heads of recurrent mixers"),
    ("tp 4", "the 2 groups of Mamba-2 mixers cannot be split over tp 4", ""),
])  # fmt: skip
def test_ranks_share_the_groups_of_mixers_or_pass_states(parallel: str, reason: str, words: str):
    model = HYBRID.replace("kv_heads = 2", "kv_heads = 4").format(
        "granitemoehybrid", "mamba_groups = 2, mamba_state = 8"
    )
    text = DELTA.format(f"{TRAINED}parallel {{ {parallel} }}").replace(DELTA.splitlines()[1].format(), model)
    text = text.replace("small { }", "small { budget = 2 steps }")
    found = plan_from_text(text, "small.xtrain", world=2 if "2" in parallel[:4] else 4)
    assert [each.message for each in found.diagnostics.errors] == [reason] * bool(reason)
    if not reason:
        assert found.plan is not None
        assert words in found.plan.node("setup.parallel.cp").does


@pytest.mark.parametrize(("more", "limit"), [
    pytest.param("activation none { }", 0.05, marks=pytest.mark.slow), ("activation full { }", 0.08),
])  # fmt: skip
def test_planned_memory_is_near_the_traced(folder: Path, more: str, limit: float):
    plan = compiled(folder, more=more).plan
    assert plan is not None
    (planned,) = plan.estimates.classes
    (traced,) = trace_plan(plan)
    assert planned.memory.total_bytes == pytest.approx(traced.memory.total_bytes, rel=limit)


def test_another_function_is_another_experiment(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A child process measures the layer, as in a command."""
    one = compiled(folder, PARTS.replace("x.cumsum(1)", "2 * x.cumsum(1)")).plan
    monkeypatch.setattr(inspections, "run_child", RUN_CHILD)
    two = compiled(folder).plan
    assert one is not None and two is not None and one.config_id != two.config_id


@pytest.mark.parametrize(("before", "after", "more"), [
    ("@ out.T", "@ out.T", 0),
    ("sums @ out.T", "sums * out[0]", -2 * 32 * 32),  # a matrix that nothing is multiplied with
    ("sums @ out.T", "sums @ out.T * (x[..., None, :] @ x[..., None]).squeeze(-1)", 2 * 32),
])  # fmt: skip
def test_flops_of_a_layer_are_planned(folder: Path, before: str, after: str, more: int):
    """In addition to products with matrices: two layers, with a backward twice as large."""
    plan = compiled(folder, PARTS.replace(before, after)).plan
    assert plan is not None
    assert plan.estimates.work.position == 6 * matmul_parameters(plan.architecture) + 2 * 3 * more


@pytest.fixture
def mixer(folder: Path) -> OwnMixer:
    plan = compiled(folder).plan
    assert plan is not None
    (layer,) = (each for each in plan.architecture.kinds[0].block.layers() if isinstance(each, UserMixer))
    user = plan.architecture.own["user"]
    part = UserPart("layer", user["module"], layer.function, user["digest"], {}, folder)
    found = OwnMixer(layer, part, Axes())
    torch.nn.init.normal_(found.get_parameter("out.weight"))
    return found


def test_texts_are_continued_by_the_states_of_a_layer(mixer: OwnMixer):
    x_BSD, cache = torch.randn(2, 9, 32), KeyValueCache(9)
    layout = DocumentLayout.from_lengths(torch.tensor([0, 9, 18]), 2, 9, torch.device("cpu"))
    whole_BSD = mixer(x_BSD, layout)
    for begin, end in ((0, 5), (5, 6), (6, 9)):
        found_BSD = mixer(x_BSD[:, begin:end], layout, cache)
        torch.testing.assert_close(found_BSD, whole_BSD[:, begin:end])
        cache.filled = end
        assert len(cache.kept(mixer)) == 1 and cache.bytes == 4 * 2 * 32
    cache = KeyValueCache(9)
    mixer(x_BSD[:1, :5], DocumentLayout.from_lengths(torch.tensor([0, 5]), 1, 5, torch.device("cpu")), cache)
    cache.filled, cache.one_text = 5, True  # positions of a text as rows
    torch.testing.assert_close(mixer(x_BSD[0, 5:, None], layout, cache)[:, 0], whole_BSD[0, 5:])


def test_the_compiler_makes_no_graph_for_every_packing(mixer: OwnMixer):
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda x_BSD, layout: mixer(x_BSD * 2, layout) + 1, backend=count)
    for documents in range(1, 9):
        bounds = torch.tensor([*range(documents), 12], dtype=torch.int32)
        compiled(torch.randn(1, 12, 32), DocumentLayout.from_lengths(bounds, 1, 12, torch.device("cpu")))
    assert len(graphs) <= 3
