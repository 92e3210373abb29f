"""Execution stacks: those of an installed package are planned, costed, refused and documented as xtrain's own are."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import other_packages
import pytest
from agreement import hold_against_the_trace
from attrs import evolve

from xtrain.components.stacks.ddp import bucket_sizes
from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.json_schema import json_schema
from xtrain.dsl.reference.reference import pages
from xtrain.dsl.schema.parallel import STACKS
from xtrain.plan.mesh import local_shapes
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.compile import compile_plan
from xtrain.planner.review.capabilities import capabilities
from xtrain.planner.review.resumable import resumable
from xtrain.planner.rules.validate import check_spec

SPEC = """
experiment tiny {{ seed = 1, budget = 100 steps }}
model {family} {{ dim = 64, layers = 2, heads = 8, kv_heads = 4 }}
tokenizer bytes
dataset code {{ source = python_stdlib() }}
batch {{ sequence = 64, micro = 2, accumulate = 2 }}
optimizer adamw {{ lr = 1e-3 }}
parallel {{ {parallel} }}
"""


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stacks of `package_with_stacks`, as long as a test runs."""
    with other_packages.installed(monkeypatch, other_packages.OTHER_STACKS):
        yield


def plan_of(folder: Path, parallel: str, world: int | None = None, family: str = "llama") -> Plan:
    (folder / "spec.xtrain").write_text(SPEC.format(parallel=parallel, family=family))
    compiled = compile_plan(load_spec(folder / "spec.xtrain").require(), world=world)
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled.plan


def errors(folder: Path, parallel: str) -> list[tuple[str, str, str | None]]:
    (folder / "spec.xtrain").write_text(SPEC.format(parallel=parallel, family="llama"))
    loaded = load_spec(folder / "spec.xtrain")
    found = loaded.diagnostics.errors or check_spec(loaded.require(), 4).errors
    return [(each.code, each.message, each.hint) for each in found]


@pytest.mark.parametrize(
    "parallel",
    [pytest.param("stack = summing, fsdp auto { replicate = 2 }", marks=pytest.mark.matrix),
        pytest.param("stack = summing, tp 2, fsdp auto { replicate = 2 }", marks=pytest.mark.matrix),
        "stack = sharding, fsdp 2"],
)  # fmt: skip
def test_it_costs_what_its_plan_says(parallel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(tmp_path, parallel)
    hold_against_the_trace(plan)
    assert from_json(json.loads(dumps(plan))) == plan


def test_free_ranks_have_copies_where_nothing_is_sharded(tmp_path: Path):
    plan = plan_of(tmp_path, "stack = summing, tp 2", 4)
    how = {entry.path: (entry.value, entry.how) for entry in plan.provenance}
    assert how["parallel.fsdp.replicate"] == ("2", "all 4 ranks: summing keeps a whole copy on each")
    assert how["parallel.fsdp.size"] == ("1", "summing shards nothing")
    assert local_shapes(plan, 3)["layers.0.mlp.up_proj.weight"] == (96, 64)
    node = plan.node("setup.parallel.summing")
    assert node.axes == ("replicate",) and node.args == {"tensors": len(plan.parameters.tensors)}
    calls = [each for each in plan.estimates.classes[0].traffic if each.node == node.id]
    assert [(each.axis, each.op, each.exposed) for each in calls] == [("replicate", "all_reduce", True)]
    shards = plan_of(tmp_path, "stack = sharding", 4)
    assert local_shapes(shards, 3)["layers.0.mlp.up_proj.weight"] == (48, 64)
    assert {each.exposed for each in shards.estimates.classes[0].traffic if "fsdp" in each.node} == {False}


def test_what_it_does_not_support_is_refused_in_its_words(tmp_path: Path):
    assert errors(tmp_path, "stack = summing, pp 2") == [
        ("X415", "stack summing has copies and tensor parallel alone, and pp is 2", "use pp 1, or stack parallel")
    ]
    (error,) = errors(tmp_path, "stack = sharding, tp 2")
    assert error[1:] == ("stack sharding has no axis but fsdp, and tp is 2", "use tp 1, or stack parallel")
    (error,) = errors(tmp_path, "stack = summing, fsdp auto { sync = step }")
    assert error[1:] == ("stack summing sums gradients once a step", "use sync auto, or stack parallel")
    assert errors(tmp_path, "stack = sharding, fsdp auto { sync = step }") == []


def test_a_name_that_is_not_there(tmp_path: Path):
    (tmp_path / "spec.xtrain").write_text(SPEC.format(parallel="stack = shading", family="llama"))
    (error,) = load_spec(tmp_path / "spec.xtrain").diagnostics.errors
    assert (error.code, error.message) == ("X305", "`stack` cannot be `shading`")
    assert error.hint == "did you mean `sharding`?"
    assert [text for text, _ in error.notes] == ["one of parallel, ddp, deepspeed, sharding, summing, torchft"]


def test_a_checkpoint_goes_from_one_stack_to_another(tmp_path: Path):
    a, b = (plan_of(tmp_path, f"stack = {stack}, fsdp 1 {{ replicate = 2 }}") for stack in ("ddp", "summing"))
    (reason,) = resumable(a, b).reasons
    assert (reason.kind, reason.path, reason.effect) == ("safe", "parallel.stack", "rounding")
    assert reason.text == "ddp → summing: gradients are summed in another order"
    nodes = tuple(evolve(n, args={"tensors": 9}) if n.op == "setup.parallel.summing" else n for n in b.nodes)
    (reason,) = resumable(b, evolve(b, nodes=nodes, id="other")).reasons
    assert (reason.kind, reason.path) == ("safe", "parallel.stack.tensors")
    assert reason.text == "21 → 9: as many sums as there are parameters"


@pytest.mark.parametrize("lacks", [{}, {"cp": "has no context parallel", "fsdp": "shards nothing"}])
def test_a_stack_that_wraps_the_model_must_refuse_pipelines(lacks: dict[str, str]):
    wraps = {"wrap": lambda self, graph, run, last: last, "unsupported": lacks}
    with pytest.raises(TypeError, match=r'^Wrapping wraps the model, and so its `unsupported` must have "pp": '):
        type(STACKS["parallel"])("Wrapping", (STACKS["parallel"],), wraps)
    wraps["unsupported"] = {**lacks, "pp": "calls the whole model"}
    type(STACKS["parallel"])("Wrapping", (STACKS["parallel"],), wraps)


def test_it_is_documented_with_who_offers_it():
    (page,) = (page for page in pages() if page.name == "parallel")
    assert dict(page.origins) == {
        **dict.fromkeys(("parallel", "ddp", "deepspeed", "torchft"), "xtrain"),
        **dict.fromkeys(("sharding", "summing"), "stacks_of_others"),
    }
    (field,) = (field for field in page.fields if field.name == "stack")
    assert field.choices == tuple(STACKS) and field.default == "parallel"
    assert "; summing: a copy of the model on each data rank, every gradient summed by itself;" in field.doc
    assert '["parallel", "ddp", "deepspeed", "sharding", "summing", "torchft"]' in json.dumps(json_schema())


@pytest.mark.slow
def test_what_works_with_it_is_asked_of_the_rules():
    rows = {(row.where, row.name): row for row in capabilities()}
    row = rows["parallel.stack", "summing"]
    assert row.origin == "stacks_of_others"
    assert [row.cells[each] for each in ("tp", "pp", "fsdp", "→bf16")] == ["yes", "X415", "X415", "X415"]
    assert list(row.cells)[:4] == ["alone", "ddp", "deepspeed", "torchft"]
    assert re.fullmatch("X415", rows["parallel.pp.schedule", "zbv"].cells["sharding"]) is None


def test_buckets_of_ddp_by_hand():
    """From the head to the embedding: 1 MiB, then 25 MiB, each closed by the parameter that fills it."""
    mega = 2**18  # fp32 numbers of 1 MiB
    sizes = {"lm_head.weight": mega, "norm.weight": 3, "embed_tokens.weight": mega, "layers.1.frozen": 99 * mega}
    sizes |= {"layers.0.a": 20 * mega, "layers.0.b": 5 * mega, "layers.1.a": mega, "layers.1.b": 24 * mega}
    tensors = [SimpleNamespace(name=name, size=size, trained="frozen" not in name) for name, size in sizes.items()]
    resolved = SimpleNamespace(
        formats=SimpleNamespace(params="fp32"),
        inventory=SimpleNamespace(tensors=tensors),
        architecture=SimpleNamespace(
            tie_embeddings=False, head_module="lm_head", other_ends=[("norm.weight", 3)], head_adapters=list
        ),
    )
    block = [SimpleNamespace(layer=layer, trace=SimpleNamespace(parameters=["a", "frozen", "b"])) for layer in (0, 1)]
    stage: Any = SimpleNamespace(blocks=[(each, 1) for each in block])
    assert bucket_sizes(cast(Any, resolved), stage) == [2**20, 3 * 4 + 25 * 2**20, 25 * 2**20, 2**20]
