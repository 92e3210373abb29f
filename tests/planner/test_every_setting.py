"""No setting is without effect: each one, changed, gives another plan, and another experiment if it is about learning.

The test walks the schema, so that a new setting which the planner ignores fails here.
"""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from every_setting import alternatives, at, places, replaced

from xtrain.dsl.schema.data import Batch, Dataset, Mixture, Phase
from xtrain.dsl.schema.setting import AUTO, Auto, Role
from xtrain.dsl.spec import Spec
from xtrain.planner.compile import compile_plan
from xtrain.planner.plan import Plan

# Everything is on, so that every setting has something to act upon.
ALL_ON = {
    "model": "model qwen3_moe { dim = 64, layers = 8, heads = 8, kv_heads = 4, vocab = 300, experts = 8 }",
    "dataset": """dataset code { source = jsonl("a/*.jsonl"), holdout = 1% }
        dataset other { source = text("b/*.txt"), holdout = 100% }
        dataset chat {
          source = huggingface("org/name"), messages = "messages", train_on = last, template = "chatml"
        }
        dataset qa { source = parquet("q/*.parquet"), prompt = "question", response = "answer", template = "plain" }
        dataset ready { source = tokens("t/*.npy", dtype = uint16, separator = 0) }
        dataset fake { source = synthetic() }""",
    "mixture": "mixture { code = 0.5, chat = 0.2, qa = 0.1, ready = 0.1, fake = 0.1, temperature = 2 }\n"
    "phase early { from = 20 steps, mix = { code: 1 }, lr_scale = 0.5 }",
    "every": "every 25 steps eval code { batches = 2 } then health then log\n"
    "every 50 steps eval other then checkpoint\n"
    "every 30 steps profile { active = 2 } then memory_snapshot\n"
    'on finish generate { prompts = ["def "] } then notify("./done.sh")\non sigterm checkpoint then stop\n'
    "on nan(3) skip",
    "scheduler": "scheduler wsd { warmup = 5 steps }",
    "activation": "activation selective",
    "compile": "compile { mode = default }",
    "checkpoint": "checkpoint { mode = async }",
    "alerts": "alerts { stalled = 45 s }",
    "ema": "ema { decay = 0.99 }",
    "log": 'log { wandb { project = "tests" } }',
    "cluster": "cluster other { memory = 80 GiB, flops = 900T, efficiency = 40%, link = 4 GiB, network = 1 GiB }",
}
AXES = "tp 2, pp 2 { schedule = interleaved_1f1b }, cp 2, ep 2"
CHAIN = "collate = to_tensor -> flatten -> shift_tokens -> pack"
STATED = ALL_ON | {
    "parallel": f"parallel {{ {AXES}, fsdp 2 }}",
    "batch": "batch { sequence = 256, accumulate = 4 }",
    "collate": f"{CHAIN}(multipack)",
    "checkpoint": "checkpoint { mode = async, best = eval.code.loss }",
}
# The same ranks and rows, asked for from the other end.
FREE = ALL_ON | {
    "parallel": f"parallel {{ {AXES}, fsdp auto }}",
    "launch": "launch { ranks_per_node = 16 }",
    "batch": "batch { sequence = 256, rows = 8 }",
}
# Ranks that could as well be copies of the whole model.
COPIES = ALL_ON | {"parallel": "parallel { fsdp 1 { replicate = 2 } }"}
# One rank by itself.
ALONE = ALL_ON | {"parallel": "parallel { fsdp 1 }"}

EXEMPT = {
    "path": "where the spec lies is not part of the experiment",
    "origins": "nor is how it is written",
    "uses": "which files are read shows in the parts that are used",
    **{f"datasets.{name}.name": "the name is the key" for name in ("code", "other", "chat", "qa", "ready", "fake")},
}
OF_RECORDS = ("text", "messages", "prompt", "response", "train_on", "template")
OF_FORM = {"code": ("text",), "chat": ("messages", "train_on", "template"),
           "qa": ("prompt", "response", "train_on", "template")}  # fmt: skip
EXEMPT |= {
    f"datasets.{name}.{field}": "another form of records has it, or a source with fields"
    for name in ("code", "other", "chat", "qa", "ready", "fake")
    for field in OF_RECORDS
    if field not in OF_FORM.get(name, ())
}


EXEMPT["events.2.event"] = "what stands under nan stands nowhere else"
EXEMPT |= {f"events.{number}.count": "of nan alone, which is the last of them" for number in (0, 1)}
EXEMPT |= {
    f"datasets.{name}.{field}": "what is the same for all datasets is changed in two of them"
    for name in ("chat", "qa", "ready", "fake")
    for field in ("holdout", "oversized", "bad_records")
}


def compiled_variants(spec: Spec, path: str, attribute: attrs.Attribute) -> Iterator[Any]:
    for new in alternatives(at(spec, path), attribute.type):
        variant = replaced(spec, path, new)
        if variant != spec:
            plan = compile_plan(variant).plan
            if plan is not None:
                yield plan


def differs(plan: Plan, base: Plan) -> bool:
    """Another id, and not only because it is called another experiment: something is done differently."""

    def doings(one: Plan) -> Plan:
        return attrs.evolve(one, id="", config_id="", config={}, provenance=(), checks=())

    return plan.id != base.id and doings(plan) != doings(base)


def role_of(attribute: attrs.Attribute) -> Role | None:
    setting = attribute.metadata.get("setting")
    return setting.role if setting else None


def test_every_setting_changes_the_plan(load):
    silent = []
    bases = [load(**STATED), load(**FREE), load(**COPIES), load(**ALONE)]
    for path, attribute in places(bases[0], exempt=EXEMPT):
        if not alternatives(at(bases[0], path), attribute.type):
            continue  # a word without another choice
        for spec in bases:
            base = compile_plan(spec).plan
            assert base is not None
            if any(differs(plan, base) for plan in compiled_variants(spec, path, attribute)):
                break
        else:
            silent.append(path)
    assert silent == []


def test_settings_belong_to_the_experiment_by_their_role(load):
    """With the alignment of documents given, which else follows from the ring."""
    spec = load(**FREE, collate=f"{CHAIN}(multipack, align = 16) -> shard")
    base = compile_plan(spec).plan
    assert base is not None
    wrong = []
    for path, attribute in places(spec, exempt=EXEMPT):
        if (role := role_of(attribute)) is None or attribute.name == "accumulate":
            continue
        plans = list(compiled_variants(spec, path, attribute))
        changed = [plan.config_id != base.config_id for plan in plans]
        if role is Role.EXPERIMENT and plans and not any(changed):
            wrong.append(f"{path} has no effect on the experiment")
        if role is not Role.EXPERIMENT and any(changed):
            wrong.append(f"{path} must not change the experiment")
    assert wrong == []


def test_the_walk_sees_the_whole_schema(load):
    """Guards the tests above: were the walk to skip a block, they would pass."""
    seen = {path for path, _ in places(load(**STATED), exempt=EXEMPT)}
    assert len(seen) > 90
    for path in (
        "launch.stop_deadline",
        "cluster.price",
        "parallel.cp.fold",
        "model.router.z_loss",
        "datasets.code.source",
        "ticks.0.actions.0.batches",
        "events.0.actions.0.top_p",
        "tokenizer.source",
        "parallel.stack",
        "parallel.pp.layers",
        "activation.save",
        "compile.mode",
        "collate.3.align",
        "datasets.chat.source.config",
        "datasets.ready.source.dtype",
        "datasets.fake.source.seed",
        "mixture.weights.code",
        "phases.early.mix.code",
    ):
        assert path in seen
    for field in attrs.fields(Dataset):
        of_some = [f"datasets.{name}.{field.name}" for name in ("code", "chat", "qa")]
        assert field.name == "name" or set(of_some) & seen, field.name
    assert {f"batch.{a.name}" for a in attrs.fields(Batch)} <= seen
    assert {f"phases.early.{a.name}" for a in attrs.fields(Phase)} - {"phases.early.mix"} <= seen
    assert {f"mixture.{a.name}" for a in attrs.fields(Mixture)} - {"mixture.weights"} <= seen


def test_a_setting_without_effect_would_be_found(load, monkeypatch):
    """Break the planner on purpose: the walk must notice."""
    from xtrain.planner.nodes import graph

    original = graph.Builder.add

    def forgetful(self, kind, op, does, **rest):
        if op == "setup.bootstrap":
            rest["args"] = {key: value for key, value in rest["args"].items() if key != "matmul"}
        return original(self, kind, op, does, **rest)

    monkeypatch.setattr(graph.Builder, "add", forgetful)
    spec = load(**STATED)
    base = compile_plan(spec).plan
    attribute = attrs.fields(type(spec.precision)).matmul
    assert base is not None
    assert not any(differs(plan, base) for plan in compiled_variants(spec, "precision.matmul", attribute))


@pytest.mark.parametrize("value", [AUTO, None])
def test_alternatives_exist_for_values_that_are_not_set(value):
    assert alternatives(value, int | Auto | None)
