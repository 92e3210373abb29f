"""Every registered family: its inventory, its cost and its modules are of one model; and one of an installed package,
which no file of xtrain names."""

import json
from collections.abc import Callable, Iterator
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import attrs
import other_packages
import pytest
import torch
import torch.nn.functional as F
from agreement import hold_against_the_trace
from torch.utils.flop_counter import FlopCounterMode

from xtrain.blocks.op_trace import OpTrace
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.model import FAMILIES, expert_families
from xtrain.dsl.schema.setting import resuming_of, settings_of
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import Architecture, parameters
from xtrain.plan.checkpoints import checkpoint_contents, weight_mismatches
from xtrain.plan.findings import Findings
from xtrain.plan.mesh import DIMENSION, tensor_rules
from xtrain.plan.parameters import block_matmul_parameters
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import compile_plan, resolve
from xtrain.planner.costs import memory
from xtrain.planner.costs.block_trace import block_trace
from xtrain.planner.rules.validate import validate
from xtrain.runtime.nn.attention import KERNELS
from xtrain.runtime.nn.axes import Axes
from xtrain.runtime.nn.batch import DocumentLayout
from xtrain.runtime.nn.block import DecoderBlock
from xtrain.runtime.nn.layers import RMSNorm, Rotation
from xtrain.runtime.nn.loss import Head
from xtrain.runtime.nn.transformer import StageSpan, Transformer
from xtrain.runtime.nn.weights import initial_values, initials

# A setting with which layers differ → settings of a model of two kinds of layers.
MIXED = {
    "expert_every": {"expert_every": 2, "expert_ffn": 32},
    "no_rope": {"no_rope": "[1]"},
    "full_layers": {"full_layers": "[1]"},
    "first_dense": {"first_dense": 1, "expert_ffn": 32},
    "attention_layers": {"attention_layers": "[1]"},
    "full_head_dim": {"full_head_dim": 24, "full_kv_heads": 2, "full_key_values": "true"},
    "pattern": {"pattern": '"M*"', "experts": 0},
}
# The same of one kind of layers, in which more is different from those of other families.
ODD = {
    "kv_rank": {"q_rank": 40, "value_dim": 60},  # wider than queries
    "query_growth": {"query_growth": "0.1, rope { scaling = yarn, factor = 4, original = 16 }"},
    "residual_scale": {"residual_scale": 0.3, "embedding_scale": 6, "logit_divisor": 3},
    "expert_groups": {"expert_groups": 4, "groups_per_token": 2, "expert_scale": 2.5},
}
SIZES = {"dim": 64, "layers": 2, "heads": 8, "kv_heads": 4, "experts": 8, "window": 20}
CPU = torch.device("cpu")
LAYOUTS = {
    "one rank": "",
    "tp 2 · fsdp 2": "parallel { tp 2, fsdp 2 }",
    "tp 2, whole sequences, selective": "parallel { tp 2 { sequence = false } }\nactivation selective {}",
    "ring 2 · ulysses 2, full": "parallel { cp 4 { ring = 2, ulysses = 2 } }\nactivation full {}",
    "ulysses 2, full": "parallel { cp 2 { ring = 1, ulysses = 2 } }\nactivation full {}",
    "ddp": "parallel { stack = ddp, fsdp 1 { replicate = 2 } }",
    "pp 2": "parallel { pp 2 }",
}
NAMES = [*FAMILIES, "side_by_side"]
INDEXED = ("deepseek_v32", "glm_moe_dsa")  # with indexers, which take no ring
WITH_EXPERTS = expert_families()
# By default of what differs most: latent attention with experts, windows, recurrent mixers, and an installed family.
TRACED = (
    ("deepseek_v3", "tp 2, whole sequences, selective"), ("gemma3", "ulysses 2, full"), ("qwen3_5", "tp 2 · fsdp 2"),
    ("side_by_side", "tp 2 · fsdp 2"),
)  # fmt: skip
LIKE_OTHERS = (
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "smollm3", "olmo2",
    "olmo3", "seed_oss", "qwen3_5_moe", "granite", "glm4", "glm4_moe", "glm4_moe_lite", "ministral3", "minimax_m2",
    "phi3", "gemma4_unified", "olmoe", "ernie4_5", "exaone4", "dots1", "granitemoehybrid",
    "falcon_h1",
)  # fmt: skip
# With settings that no others have, norms after their halves, and the plain one.
KINDS = ("llama", "granite", "ministral3", "olmo2")
OWN_BLOCKS = [
    pytest.param(name, marks=() if name in KINDS or name not in LIKE_OTHERS else pytest.mark.matrix) for name in NAMES
]
ALIKE = (  # which differ in their files alone
    {"qwen3_5_moe", "qwen3_next"},
    {"deepseek_v3", "glm4_moe_lite"},
    {"gemma4", "gemma4_unified"},
)
COSTS = [
    pytest.param(name, layout, marks=() if (name, layout) in TRACED else pytest.mark.matrix, id=f"{name}, {layout}")
    for name in NAMES
    for layout in LAYOUTS
    if "ring" not in layout or name not in INDEXED
]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The family of `other_package`, as long as a test runs."""
    with other_packages.installed(monkeypatch):
        yield


def spec(name: str, more: str = "", sequence: int = 64, **settings: Any) -> str:
    """A small experiment with a model of a family."""
    known = settings_of(FAMILIES[name])
    sizes = {each: value for each, value in SIZES.items() if each in known}
    examples = {each: meta.example for each, (a, meta) in known.items() if a.default is attrs.NOTHING}
    text = ", ".join(f"{each} = {value}" for each, value in {**examples, **sizes, **settings}.items())
    return f"""
experiment tiny {{ seed = 1, budget = 100 steps }}
model {name} {{ {text} }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = {sequence}, micro = 2, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
{more}
"""


def loaded_of(folder: Path, name: str, more: str = "", sequence: int = 64, **settings: Any) -> Spec:
    path = folder / "spec.xtrain"
    path.write_text(spec(name, more, sequence, **settings))
    loaded = load_spec(path)
    assert loaded.spec is not None, loaded.diagnostics.render()
    return loaded.spec


def plan_of(folder: Path, name: str, more: str = "", sequence: int = 64, **settings: Any) -> Plan:
    compiled = compile_plan(loaded_of(folder, name, more, sequence, **settings))
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def architecture_of(folder: Path, name: str, **settings: Any) -> Architecture:
    """The architecture of a plan, without the costs and the graph, which take most of the time."""
    loaded = loaded_of(folder, name, **settings)
    valid = validate(loaded, None, findings := Findings(loaded))
    assert valid is not None, findings.diagnostics.render()
    return resolve(valid.elastic.spec, valid).architecture


def block_of(arch: Architecture, layer: int, device: str) -> DecoderBlock:
    with torch.device(device):
        return DecoderBlock(arch, layer, KERNELS["documents"], Axes(), rows=4)


def biased(name: str) -> dict[str, Any]:
    """Settings of a family with all biases that it may have."""
    return {each: "true" for each in settings_of(FAMILIES[name]) if each.endswith("_bias")}


def odd(name: str) -> dict[str, Any]:
    """Settings of a family with which it differs most from others."""
    known = settings_of(FAMILIES[name])
    return {each: value for name, settings in ODD.items() if name in known for each, value in settings.items()}


def mixed(name: str) -> dict[str, Any]:
    """Settings of a family with which its layers differ; none where they cannot."""
    known = settings_of(FAMILIES[name])
    return {each: value for name, settings in MIXED.items() if name in known for each, value in settings.items()}


@pytest.mark.parametrize("name", NAMES)
def test_modules_are_the_inventory(name: str, tmp_path: Path):
    """Names, shapes and order, and the buffers of a checkpoint; what is cut is cut evenly."""
    for settings in (
        {},
        *({"qk_norm": "true"},) * ("qk_norm" in settings_of(FAMILIES[name])),
        *filter(None, [mixed(name), biased(name), odd(name)]),
        *({"one_norm": "false"},) * (name == "side_by_side"),
    ):
        arch = architecture_of(tmp_path, name, **settings)
        rules = {pattern.removeprefix("layers.*."): style for pattern, style in tensor_rules(arch)}
        for kind in arch.kinds:
            block, wanted = block_of(arch, kind.first, "meta"), list(kind.block.parameters(arch))
            assert [(n, tuple(p.shape)) for n, p in block.named_parameters()] == [(p.name, p.shape) for p in wanted]
            assert {n: list(b.shape) for n, b in block.named_buffers()} == kind.block.buffers(arch)
            layers = [layer.name for layer in kind.block.layers()]
            assert len(set(layers)) == len(layers)
            for module, each in block.named_modules():
                if (style := rules.get(module)) is not None:
                    weights = [weight for weight in each.parameters() if weight.ndim > DIMENSION[style]]
                    assert all(weight.shape[DIMENSION[style]] % 2 == 0 for weight in weights)
            assert all(p.decays == (len(p.shape) > (2 if p.expert else 1)) for p in wanted)


@pytest.mark.parametrize("name", OWN_BLOCKS)
def test_norms_change_only_the_size_of_rows_at_first(name: str, tmp_path: Path):
    """All weights of theirs multiply by 1."""
    arch = architecture_of(tmp_path, name)
    model = Transformer(
        arch,
        StageSpan(0, arch.layers - 1, embeds=True, predicts=True),
        axes=Axes(),
        kernel="documents",
        head=Head(vocabulary=arch.vocab, z_weight=0.0, chunk_bytes=1),
        rows=1,
    )
    kinds, norms = initials(arch), {n: each for n, each in model.named_modules() if isinstance(each, RMSNorm)}
    assert "norm" in norms and len(norms) > arch.layers
    for module, norm in norms.items():
        norm.weight.data.copy_(initial_values(module, norm.weight.shape, kinds[f"{module}.weight"], 1.0, 0, CPU))
        rows = torch.arange(1.0, 1 + 3 * len(norm.weight)).view(3, -1)
        parts = rows.unflatten(-1, (-1, norm.part or len(norm.weight)))
        wanted = F.rms_norm(parts, parts.shape[-1:], eps=arch.norm_eps).flatten(-2)
        assert torch.allclose(norm(rows) / norm.scale, wanted)


@pytest.mark.parametrize("name", OWN_BLOCKS)
def test_the_trace_uses_every_parameter_with_its_products(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Gradients of all parameters, and the products that torch counts when a block runs."""
    traces: list[OpTrace] = []
    monkeypatch.setattr(memory, "block_trace", lambda *args: traces.append(block_trace(*args)) or traces[-1])
    for settings in ({}, *filter(None, [mixed(name), biased(name), odd(name)])):
        traces.clear()
        arch = plan_of(tmp_path, name, **settings).architecture
        for kind, ops in zip(arch.kinds, traces, strict=True):
            _hold_against_a_block(arch, kind.first, ops)


def _hold_against_a_block(arch: Architecture, layer: int, ops: OpTrace) -> None:
    rows, positions = 2, 64
    wanted = list(arch.kind_of(layer).block.parameters(arch))
    assert sorted(ops.parameters) == sorted(parameter.name for parameter in wanted)
    trained = {parameter.name for parameter in wanted if parameter.trained}
    assert sum(op.weights for op in ops.ops) == 4 * sum(prod(p.shape) for p in wanted if p.name in trained)
    planned = sum(op.flops for op in ops.ops if not op.attends)
    scored = sum(op.flops for op in ops.ops if op.attends and not op.runs_back)  # by an indexer
    mixing = sum(each.position_flops(arch) for each in arch.kind_of(layer).block.layers())
    assert planned == rows * positions * (2 * block_matmul_parameters(arch, layer) + mixing)

    torch.manual_seed(0)
    block = block_of(arch, layer, "cpu")
    for tensor in (*block.parameters(), *block.buffers()):
        torch.nn.init.normal_(tensor, std=0.2)
    x_BSD = torch.randn(rows, positions, arch.dim, requires_grad=True)
    places_BS = torch.arange(positions).expand(rows, positions)
    rotate = None if block.angles is None else Rotation.of(places_BS, block.angles, x_BSD.dtype)
    bounds = torch.arange(0, rows * positions + 1, positions, dtype=torch.int32)
    packing = DocumentLayout.from_lengths(bounds, rows, positions, x_BSD.device)
    with FlopCounterMode(display=False) as counter:
        out_BSD = block(x_BSD, rotate, packing, torch.ones(rows, positions, dtype=torch.bool))
    convolved = 2 * rows * positions * sum(prod(p.shape) for p in wanted if len(p.shape) == 3 and not p.expert)
    products = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
    assert sum(counter.get_flop_counts()["Global"].get(each, 0) for each in products) == planned + scored - convolved
    out_BSD.square().sum().backward()
    grads = {
        name for name, parameter in block.named_parameters() if parameter.grad is not None and parameter.grad.any()
    }
    assert grads == trained


@pytest.mark.parametrize(("name", "layout"), COSTS)
def test_it_costs_what_its_plan_says(name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # Of large models DDP has one bucket in the first step, which is traced, and those of the plan from the second on.
    one_bucket = layout == "ddp" and name in (*WITH_EXPERTS, "falcon_h1")
    hold_against_the_trace(plan_of(tmp_path, name, LAYOUTS[layout]), traffic=not one_bucket)


FACTORS = {
    **{f"{side}_scale": 0.7 for side in ("embedding", "logit", "key")},
    **{f"{layer}_{side}_scale": 0.7 for layer in ("attention", "mamba") for side in ("input", "output")},
    "mamba_scales": "[0.9, 0.8, 0.7, 1.2, 1.1]",
    "ffn_scales": "[1.3, 0.6]",
}


@pytest.mark.matrix
@pytest.mark.parametrize("norm", ["none", "first", "gated"])
@pytest.mark.parametrize("layout", ["tp 2 · fsdp 2", "tp 2, whole sequences, selective", "ulysses 2, full"])
def test_factors_and_norms_of_mixers_cost_what_their_plan_says(layout: str, norm: str, tmp_path: Path):
    hold_against_the_trace(plan_of(tmp_path, "falcon_h1", LAYOUTS[layout], mamba_norm=norm, **FACTORS))


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["qwen3_5", "nemotron_h"])
@pytest.mark.parametrize("layout", ["cp 2 { ring = 2, ulysses = 1 }", "tp 2, cp 4 { ring = 2, ulysses = 2 }"])
def test_states_that_pass_in_a_ring_cost_what_their_plan_says(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    heads = {"delta_key_heads": 8} if name == "qwen3_5" else {"mamba_groups": 8, "pattern": '"M*"', "experts": 0}
    plan = plan_of(tmp_path, name, f"parallel {{ {layout} }}", sequence=1024, **heads)
    assert "states of recurrent mixers pass" in plan.node("setup.parallel.cp").does
    hold_against_the_trace(plan)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "chunk"), [("one rank", "1GiB"), *((each, "2MiB") for each in (*LAYOUTS, "tp 2, whole logits"))]
)
def test_capped_logits_and_scores_cost_what_their_plan_says(
    layout: str, chunk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With so many ids that the head takes the most memory of a step."""
    monkeypatch.chdir(tmp_path)
    whole = "parallel { tp 2 { loss = false } }"
    more = f"{LAYOUTS.get(layout, whole)}\nloss cross_entropy {{ chunk = {chunk} }}"
    plan = plan_of(tmp_path, "gemma3", more, vocab=20_000, logit_cap=30, score_cap=50)
    hold_against_the_trace(plan, traffic=layout != "ddp")


def test_rotary_positions_cost_what_their_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of blocks with a window beside those of blocks without, where little else is kept."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, "gemma3", "activation full {}", head_dim=64, rope_theta=1e6, **MIXED["full_layers"])
    assert len(plan.architecture.kinds) == 2
    hold_against_the_trace(plan)


ALL_BUT_INDEXERS = (
    '["embed_tokens", "norm", "lm_head", "layers.*.mlp", "layers.*.*_layernorm", "layers.*.self_attn.*_proj", '
    '"layers.*.self_attn.kv_a_proj_with_mqa", "layers.*.self_attn.*_layernorm"]'
)
SHARED = {"layers": 4, "layer_input": 16, "layer_vocab": 300, "shared_kv": 2, "double_ffn": "true"}
ADAPTED = "adapter lora { rank = 4 }"
LAYOUTS_OF_SHARED = {
    **{name: text for name, text in LAYOUTS.items() if name != "pp 2"},  # where values would be sent
    "adapted": ADAPTED,
    "ring 2, full, adapted": f"parallel {{ cp 2 {{ ring = 2, ulysses = 1 }} }}\nactivation full {{}}\n{ADAPTED}",
    "last blocks adapted": 'adapter lora { rank = 4, layers = ["3"] }',
}


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=() if each == "tp 2 · fsdp 2" else pytest.mark.matrix) for each in LAYOUTS_OF_SHARED],
)
def test_values_that_blocks_give_to_later_ones_cost_what_their_plan_says(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Inputs of each block, and keys and values of two blocks with which two others compute."""
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, "gemma4", LAYOUTS_OF_SHARED[layout], **SHARED, full_layers="[1, 3]", full_head_dim=24)
    hold_against_the_trace(plan, traffic=layout != "ddp")


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [name for name in LAYOUTS_OF_SHARED if "ring" not in name])
def test_shared_choices_cost_what_their_plan_says(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shared = {"layers": 4, "index_shared": "[1, 2]", "first_dense": 1, "expert_ffn": 32}
    hold_against_the_trace(
        plan_of(tmp_path, "glm_moe_dsa", LAYOUTS_OF_SHARED[layout], **shared), traffic=layout != "ddp"
    )


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("tp 2 · fsdp 2", {}),
        *(pytest.param(each, {}, marks=pytest.mark.matrix) for each in LAYOUTS if "ring" not in each),
        pytest.param("ulysses 2, full", {"index_topk": 64}, marks=pytest.mark.matrix),
        pytest.param("tp 2 · fsdp 2", {"index_topk": 64, "frozen": ALL_BUT_INDEXERS}, marks=pytest.mark.matrix),
        pytest.param("one rank", {"frozen": '["layers.0.self_attn.indexer"]'}, marks=pytest.mark.matrix),
    ],
)
def test_learning_indexers_cost_what_their_plan_says(
    layout: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, "deepseek_v32", LAYOUTS[layout], index_loss=1.0, **more)
    assert all(tensor.trained for tensor in plan.parameters.tensors if ".1.self_attn.indexer." in tensor.name)
    hold_against_the_trace(plan, traffic=layout != "ddp")


@pytest.mark.parametrize("layout", ["tp 2 · fsdp 2", "tp 2, whole sequences, selective"])
@pytest.mark.matrix
def test_biases_cost_what_their_plan_says(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Those of matrices that tensor parallelism cuts by input are added to the sums."""
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, "llama", LAYOUTS[layout], **biased("llama")))


@pytest.mark.parametrize(("name", "layout"), [
    (name, layout) for name in FAMILIES if odd(name) for layout in LAYOUTS
    if "ring" not in layout or name not in INDEXED
])  # fmt: skip
@pytest.mark.matrix
def test_what_is_odd_costs_what_its_plan_says(name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, name, LAYOUTS[layout], **{**odd(name), **biased(name)})
    hold_against_the_trace(plan, traffic=layout != "ddp")


@pytest.mark.matrix  # by default layers that differ do, over the same ranks
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_cost_what_their_plan_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    hold_against_the_trace(plan_of(tmp_path, name, "parallel { fsdp 2, ep 2 }", shared_experts=1))


DIFFER = [name for name in NAMES if name in FAMILIES and mixed(name)]  # of xtrain's own
LAYOUTS_OF_KINDS = {
    **LAYOUTS,
    "ep 2 · fsdp 2": "parallel { fsdp 2, ep 2 }",
    "ep 2 · pp 2, selective": "parallel { pp 2, fsdp 2, ep 2 }\nactivation selective { every = 2 }",
    "zero bubble": "parallel { pp 2 { schedule = zero_bubble } }",
    "whole parameters stay": "parallel { fsdp 2 { reshard = false } }",
}


@pytest.mark.parametrize(("name", "layout"), [
    pytest.param(name, layout,
        marks=() if (name, layout) == ("nemotron_h", "ep 2 · fsdp 2") else pytest.mark.matrix)
    for name in DIFFER for layout in LAYOUTS_OF_KINDS
    if (name in WITH_EXPERTS or not layout.startswith("ep")) and ("ring" not in layout or name not in INDEXED)
])  # fmt: skip
def test_layers_that_differ_cost_what_their_plan_says(
    name: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Blocks in an order in which no neighbours are alike, and a stage that has more of one kind."""
    monkeypatch.chdir(tmp_path)
    more = {"dense_layers": "[3]", "layers": 6} if "expert_every" in mixed(name) else {"layers": 4}
    more |= {"pattern": '"ME-M"', "experts": 8} if "pattern" in mixed(name) else {}
    settings = {**mixed(name), **more}
    text = LAYOUTS_OF_KINDS[layout]
    plan = plan_of(tmp_path, name, text if name in WITH_EXPERTS else text.replace(", ep 2", ""), **settings)
    assert len(plan.architecture.kinds) > 1
    hold_against_the_trace(plan, traffic=layout != "ddp")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Plan, dict[str, Any]]]:
    """The plan of a model of four layers, enough for every kind of them, and its checkpoint's contents, by family."""
    folder = tmp_path_factory.mktemp("deep")

    @cache
    def deep_plan(name: str) -> tuple[Plan, dict[str, Any]]:
        plan = plan_of(folder, name, layers=4)
        return plan, checkpoint_contents(plan)

    return deep_plan


@pytest.mark.parametrize("name", NAMES)
def test_its_plan_is_read_back_and_says_what_a_checkpoint_is(
    name: str, tmp_path: Path, deep: Callable[[str], tuple[Plan, dict[str, Any]]]
):
    plan, own = deep(name)
    assert from_json(json.loads(dumps(plan))) == plan
    assert weight_mismatches(json.loads(json.dumps(own)), own) == []
    loaded = loaded_of(tmp_path, name, layers=4)
    values, _ = loaded.model.resolved()
    known = resuming_of(FAMILIES[name])
    added = {each for each, (_, meta) in settings_of(FAMILIES[name]).items() if meta.added}
    assert known.keys() <= values.keys() | {"head_dim", "vocab"} | added
    for other in NAMES:  # another family is refused, unless it computes the same
        mismatches = weight_mismatches(deep(other)[1], own)
        assert bool(mismatches) == (other != name and {other, name} not in ALIKE)


def test_a_checkpoint_without_factors_says_so(tmp_path: Path):
    plain, factors = (checkpoint_contents(plan_of(tmp_path, name)) for name in ("gemma3", "gemma4"))
    texts = [each.text for each in weight_mismatches(plain, factors)]
    assert any("the plan has `factor` in blocks, and the checkpoint has none" in text for text in texts)
    assert not any("biases of routers" in text for text in texts)


def test_settings_of_an_installed_family(tmp_path: Path):
    plan = plan_of(tmp_path, "side_by_side", "parallel { tp 2 }")
    assert plan.architecture.own == {"one_norm": True} and plan.architecture.to_json()["one_norm"] is True
    names = [p.name for p in parameters(plan.architecture)]
    assert "layers.1.attn.q_proj.bias" in names and "layers.1.norm.weight" in names
    (cut,) = (node for node in plan.nodes if node.op == "setup.parallel.tp")
    assert ("layers.*.mlp.down_proj", "row") in [(rule["pattern"], rule["style"]) for rule in cut.args["rules"]]
    other = plan_of(tmp_path, "side_by_side", one_norm="false")
    (mismatch,) = weight_mismatches(checkpoint_contents(plan), checkpoint_contents(other))
    assert mismatch.path == "model.one_norm" and "true → false" in mismatch.text
    path = tmp_path / "spec.xtrain"
    path.write_text(spec("llama", one_norm="true"))
    (error,) = load_spec(path).diagnostics.errors
    assert "side_by_side" in error.message + (error.hint or "")


def test_blocks_are_those_of_the_family_that_is_registered_now(tmp_path: Path):
    arch = architecture_of(tmp_path, "side_by_side")
    assert len(arch.kinds) == 1

    class Other(FAMILIES["side_by_side"]):
        @classmethod
        def blocks(cls, arch: Architecture) -> tuple[Any, ...]:
            return tuple(cls.block(attrs.evolve(arch, own={"one_norm": layer > 0})) for layer in range(arch.layers))

    FAMILIES._own["side_by_side"] = Other
    assert len(arch.kinds) == 2
