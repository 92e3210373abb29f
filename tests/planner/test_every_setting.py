"""No setting is without effect: each one, changed, gives another plan, and another experiment if it is about learning.

The test walks the schema, so that a new setting which the planner ignores fails here.
"""

from collections.abc import Iterator
from types import NoneType
from typing import Any, get_args, get_origin

import attrs
import pytest

from xtrain.dsl.blocks import choices_of
from xtrain.dsl.interval import Interval
from xtrain.dsl.metric import Metric
from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.data import Batch, Dataset, JsonLines, Mixture, Phase, Text
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


def places(value: Any, path: str = "") -> Iterator[tuple[str, attrs.Attribute]]:
    """(path, attribute) of every value in a tree of schema classes, tuples and dicts."""
    for attribute in attrs.fields(type(value)):
        name = f"{path}.{attribute.name}".strip(".")
        if name not in EXEMPT:
            yield from _inside(getattr(value, attribute.name), name, attribute)


def _inside(value: Any, path: str, attribute: attrs.Attribute) -> Iterator[tuple[str, attrs.Attribute]]:
    if path in EXEMPT:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _inside(item, f"{path}.{key}", attribute)
    elif isinstance(value, tuple) and value and attrs.has(type(value[0])):
        for number, item in enumerate(value):
            yield from places(item, f"{path}.{number}")
    elif attrs.has(type(value)) and not isinstance(value, Quantity | Auto):
        if attribute.name == "source":
            yield path, attribute
        yield from places(value, path)
    else:
        yield path, attribute


def at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else value[int(name)] if name.isdigit() else getattr(value, name)
    return value


def replaced(value: Any, path: str, new: Any) -> Any:
    name, _, rest = path.partition(".")
    if isinstance(value, dict):
        return {**value, name: replaced(value[name], rest, new) if rest else new}
    if isinstance(value, tuple):
        changed = list(value)
        changed[int(name)] = replaced(value[int(name)], rest, new)
        return tuple(changed)
    return attrs.evolve(value, **{name: replaced(getattr(value, name), rest, new) if rest else new})


def alternatives(value: Any, annotation: Any) -> list[Any]:
    """Other values of the same type, likely ones first; not all of them make sense."""
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is tuple and not attrs.has(get_args(kind)[0]):
            return lists(value, get_args(kind)[0])
    if choices := choices_of(annotation):
        return [choice for choice in choices if choice != value]
    if isinstance(value, Quantity):
        return [
            Quantity(n, value.unit) for n in (value.value * 2, value.value + 5, value.value / 2) if n != value.value
        ]
    kinds = get_args(annotation) or (annotation,)
    if isinstance(value, bool) or bool in kinds:
        return [not value] if isinstance(value, bool) else [True, False]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value * 2, value + 1, value / 2] if isinstance(value, float) else [value * 2, value + 1, value * 3]
    if Metric in get_args(annotation):
        return [Metric("eval.code.loss") if value is None else None]
    if isinstance(value, str):
        return [f"{value}2", "other", "code"]
    if Interval in kinds:
        return [Interval(8, 16)]
    if value is None and Quantity in kinds:
        return [Quantity(7, "steps"), Quantity(60, "seconds")]
    if isinstance(value, Auto) or value is None:
        found: list[Any] = [2, 4, 6, 16, 1, 128] if int in kinds else [0.5, 3.0] if float in kinds else ["else"]
        return [*found, *([None] if NoneType in kinds and value is not None else [])]
    return [Text(("c/*.txt",)), JsonLines(("c/*.jsonl",))]


def lists(value: Any, kind: Any) -> list[Any]:
    """Other lists of a kind of elements: words, layers of four stages that have eight, numbers, texts."""
    if choices := choices_of(kind):
        return [(choice,) for choice in choices if (choice,) != value]
    if kind is int:
        return [(1, 2, 2, 3)]
    return [tuple(v / 2 for v in value)] if kind is float else [(*value, "more")]


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
    for path, attribute in places(bases[0]):
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
    for path, attribute in places(spec):
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
    seen = {path for path, _ in places(load(**STATED))}
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
