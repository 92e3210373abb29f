"""What is written and changes nothing is told of (W401), and is no other experiment."""

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
from every_setting import alternatives, at, places, replaced

from xtrain.dsl.schema.blocks import label_of
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec import Origin, Spec
from xtrain.dsl.values import Quantity
from xtrain.plan.plan import Plan
from xtrain.planner.compile import Compiled, compile_plan

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8, expert_ffn = 32 }"
WHOLE = MOE.replace(" }", ", experts_per_token = 8 }")
CPU, CUDA = "launch { device = cpu }", "launch { device = cuda }"
FP64 = "precision { params = fp64 }"
WSD = "scheduler wsd { decay = 0 steps }"
OFF = "checkpoint { enabled = false }"
FSDP, SUMMED = "parallel { fsdp 2 }", "parallel { fsdp { sync = microbatch } }"
ASKED = """dataset code { source = synthetic() }
dataset asked { source = jsonl("a.jsonl"), choices = "choices", holdout = 100% }"""
AVERAGED = "ema { decay = 0.9 }"
# Blocks, and what is written besides: a block, or a setting of one that is there; of which setting W401 then speaks.
CASES = [
    ({"model": MOE}, "model { ffn = 128 }", "model.ffn"),
    ({"model": WHOLE}, "model { router { bias_speed = 0.001 } }", "model.router.bias_speed"),
    ({"precision": FP64}, "precision { matmul = high }", "precision.matmul"),
    ({"launch": CPU}, "alerts { memory = 90% }", "alerts.memory"),
    ({"cluster": "cluster cpu"}, "alerts { memory = 90% }", "alerts.memory"),
    ({"scheduler": WSD}, "scheduler { shape = sqrt }", "scheduler.shape"),
    ({"scheduler": WSD}, "scheduler { floor = 10% }", "scheduler.floor"),
    ({"scheduler": "scheduler wsd { floor = 100% }"}, "scheduler { decay = 30% }", "scheduler.decay"),
    ({"scheduler": "scheduler wsd { floor = 100% }"}, "scheduler { shape = cosine }", "scheduler.shape"),
    ({"scheduler": "scheduler cosine { warmup = 100% }"}, "scheduler { floor = 10% }", "scheduler.floor"),
    ({"activation": "activation none"}, "activation { every = 2 }", "activation.every"),
    ({"activation": "activation none"}, "activation { save = [matmul] }", "activation.save"),
    ({"batch": "batch { sequence = 16 }"}, "activation { tile_mlp = auto }", "activation.tile_mlp"),
    ({"cluster": "cluster none"}, "cluster { memory = 80 GiB }", "cluster.memory"),
    ({}, "mixture { temperature = 2, code = 1 }", "mixture.temperature"),
    ({}, 'on finish generate { prompts = ["a"], temperature = 0, top_p = 0.5 }', "on.0.actions.0.top_p"),
    ({"dataset": ASKED}, "every 10 steps eval asked { batches = 2 }", "every.0.actions.0.batches"),
    ({}, "every 10 steps health { limit = 5 s }", "every.0.actions.0.limit"),
    ({"ema": AVERAGED, "checkpoint": OFF}, "ema { publish = false }", "ema.publish"),
    ({"ema": AVERAGED, "dataset": "dataset code { source = synthetic() }"}, "ema { eval = false }", "ema.eval"),
    ({"parallel": FSDP, "batch": "batch { sequence = 256 }"}, SUMMED, "parallel.fsdp.sync"),
    ({}, SUMMED, "parallel.fsdp.sync"),
    ({"precision": "precision { compute = bf16 }", "launch": CUDA}, "parallel { fsdp { prefetch = true } }",
     "parallel.fsdp.prefetch"),
    ({}, "precision { fp8 { recipe = tensorwise } }", "precision.fp8.recipe"),
    ({}, "precision { fp16 { scale = 1024 } }", "precision.fp16.scale"),
    ({"checkpoint": "checkpoint { mode = sync }"}, "checkpoint { overlap = latest }", "checkpoint.overlap"),
    ({"checkpoint": "checkpoint { keep = 2 }"}, "checkpoint { best_is = highest }", "checkpoint.best_is"),
    ({"launch": CPU, "checkpoint": "checkpoint { mode = async }"}, "checkpoint { mode = async_pinned }",
     "checkpoint.mode"),
    ({"ft": "fault_tolerance { restarts = 2, elastic = 1..2 }", "batch": "batch { sequence = 64, rows = 4 }"},
     "batch { accumulate = 2 }", "batch.accumulate"),
    ({"batch": "batch { sequence = 256, prefetch = 0 }"}, "batch { workers = 2 }", "batch.workers"),
]  # fmt: skip

# What stands in a node or beside the plan either way, and is not used.
FIGURES = ("on.0.actions.0.top_p", "every.0.actions.0.limit", "ema.publish", "ema.eval", "precision.matmul",
           "cluster.memory", "alerts.memory")  # fmt: skip


def doings(plan: Plan) -> Plan:
    """What a plan does, however it was asked for."""
    return attrs.evolve(plan, id="", config_id="", config={}, provenance=(), checks=(), spec_text="")


@pytest.mark.parametrize(("blocks", "more", "path"), CASES, ids=[f"{path}-{more}" for _, more, path in CASES])
def test_what_changes_nothing_is_reported_and_changes_nothing(compiled, blocks, more, path):
    without = {"on.0.actions.0.top_p": more.replace("0.5", "0.9"), "mixture.temperature": "mixture { code = 1 }"}
    without["every.0.actions.0.limit"] = more.replace("5", "6")
    without["every.0.actions.0.batches"] = more.replace(" { batches = 2 }", "")
    base, other = compiled(**blocks, more=without.get(path, "")), compiled(**blocks, more=more)
    rules = [check.id for check in other.plan.checks if check.code == "W401"]
    assert f"idle.{path}" in rules, rules
    assert f"idle.{path}" not in [check.id for check in base.plan.checks] or path in without
    if path not in FIGURES:
        assert doings(other.plan) == doings(base.plan)
    assert other.plan.config_id == base.plan.config_id


def test_a_seed_that_is_written_out_is_no_other_experiment(make_plan):
    drawn = "dataset code {{ source = synthetic({}), holdout = 1% }}"
    usual, same, other = (make_plan(dataset=drawn.format(text)) for text in ("", "seed = 1", "seed = 2"))
    assert usual.config_id == same.config_id != other.config_id


@pytest.mark.parametrize(("nodes", "placed"), [(1, (1, 4)), (2, (2, 2)), (4, (4, 1))])
def test_machines_that_are_asked_for_are_used(make_plan, nodes, placed):
    """Even if all ranks had room on fewer: those of a cluster that is larger are filled one by one."""
    blocks = {"cluster": "cluster h100 { devices = 8 }", "parallel": "parallel { fsdp 4 }"}
    launch = make_plan(**blocks, launch=f"launch {{ nodes = {nodes} }}").launch
    assert (launch["nodes"], launch["ranks_per_node"]) == placed


@pytest.mark.parametrize(("nodes", "code"), [(3, "X401"), (8, "X401")])
def test_machines_that_do_not_come_out_even_are_refused(compiled, nodes, code):
    found = compiled(
        cluster="cluster h100 { devices = 8 }", parallel="parallel { fsdp 4 }", launch=f"launch {{ nodes = {nodes} }}"
    )
    assert [each.code for each in found.diagnostics] == [code]


# Every setting in many specs ------------------------------------------------------------------------------------------

TICKS = """every 25 steps eval code then log\nevery 50 steps checkpoint\nevery 30 steps profile then memory_snapshot
every 20 steps health\non finish generate { prompts = ["a"] }\non nan(3) skip\non sigterm checkpoint then stop"""
TWO = "dataset code { source = synthetic(), holdout = 1% }\ndataset web { source = synthetic() }"
CONTEXTS: dict[str, dict[str, str]] = {
    "plain": {},
    "ticks on a cpu": {"launch": CPU, "ticks": TICKS},
    "ticks on two GPUs": {"launch": CUDA, "ticks": TICKS, "parallel": "parallel { fsdp 2 }"},
    "a known cluster": {"cluster": "cluster h100 { devices = 2 }", "parallel": "parallel { fsdp 2 }"},
    "other machines": {"cluster": "cluster other { flops = 10T }"},
    "experts": {"model": MOE},
    "experts over ranks": {"model": MOE, "parallel": "parallel { ep 2, fsdp 2 }"},
    "every expert for every token": {"model": WHOLE},
    "mixtral": {"model": "model mixtral { dim = 64, layers = 4, heads = 8, experts = 4 }"},
    "fp64": {"precision": FP64, "launch": CPU},
    "bf16": {"precision": "precision { compute = bf16 }", "launch": CUDA},
    "cosine": {"scheduler": "scheduler cosine { warmup = 10 steps }"},
    "nothing but warm-up": {"scheduler": "scheduler linear { warmup = 100% }"},
    "wsd": {"scheduler": "scheduler wsd { warmup = 5% }"},
    "wsd without a fall": {"scheduler": WSD},
    "wsd to the peak": {"scheduler": "scheduler wsd { floor = 100% }"},
    "cosine to the peak": {"scheduler": "scheduler cosine { floor = 100% }"},
    "tp": {"parallel": "parallel { tp 2 }"},
    "hsdp": {"parallel": "parallel { fsdp 2 { replicate = 2 } }"},
    "one microbatch": {"parallel": "parallel { fsdp 2 }", "batch": "batch { sequence = 256 }"},
    "copies": {"parallel": "parallel { fsdp 1 { replicate = 2 } }"},
    "ddp": {"parallel": "parallel { stack = ddp, fsdp auto { replicate = 2 } }"},
    "pp": {"parallel": "parallel { pp 2 }"},
    "pp by hand": {"parallel": "parallel { pp 2 { layers = [1, 3] } }"},
    "pp of fsdp": {"parallel": "parallel { pp 2, fsdp 2 }"},
    "ring": {"parallel": "parallel { cp 2 { ring = 2 } }"},
    "ulysses": {"parallel": "parallel { cp 2 { ulysses = 2 } }"},
    "multipack": {"collate": "collate = to_tensor -> flatten -> shift_tokens -> pack(multipack)"},
    "zeroes": {"optimizer": "optimizer adamw { lr = 1e-3, weight_decay = 0, clip = none, betas = [0, 0] }"},
    "averages": {"ema": AVERAGED},
    "averages that are not saved": {"ema": AVERAGED, "checkpoint": OFF},
    "recomputed": {"activation": "activation selective"},
    "tiled": {"activation": "activation { tile_mlp = 4 }"},
    "asynchronous": {"checkpoint": "checkpoint { mode = async, best = eval.code.loss }", "ticks": TICKS},
    "one file": {"checkpoint": "checkpoint { backend = file, mode = async }"},
    "not saved": {"checkpoint": OFF},
    "from": {"checkpoint": 'checkpoint { from = "runs/a/b" }'},
    "elastic": {"ft": "fault_tolerance { restarts = 2, elastic = 1..2 }", "batch": "batch { sequence = 64, rows = 4 }"},
    "no alerts": {"alerts": "alerts { loss_spike = none, slow = none, starvation = none, disk = none }"},
    "logged": {"log": 'log { tensorboard = true, wandb { project = "x" } }'},
    "conversations": {
        "dataset": 'dataset code { source = jsonl("a"), messages = "m", template = "chatml", holdout = 1% }'
    },
    "text": {"dataset": 'dataset code { source = text("a") }'},
    "tokens": {"dataset": 'dataset code { source = tokens("t/*.npy", dtype = uint16) }'},
    "two datasets alike": {"dataset": TWO, "mixture": "mixture { code = 0.5, web = 0.5 }"},
    "phases": {"dataset": TWO, "mixture": "mixture { code = 1, web = 2 }\nphase p { from = 50%, mix = { code: 3 } }"},
    "epochs": {"experiment": "experiment tiny { seed = 1, budget = 2 epochs }"},
    "nothing read ahead": {"batch": "batch { sequence = 256, prefetch = 0 }"},
}  # fmt: skip
KINDS = {"datasets": "dataset", "phases": "phase", "ticks": "every", "events": "on"}
EXEMPT = {
    "path": "where the spec lies is no setting",
    "origins": "nor is how it is written",
    "experiment.name": "what a run is called",
    "events.2.count": "of nan alone",
    "datasets.code.name": "the name is the key",
    "datasets.web.name": "the name is the key",
    **dict.fromkeys(("model.folder", "model.weights"), "of a folder: tests/planner/test_model_folder.py"),
    **{f"ticks.2.actions.{n}.ranks": "on few ranks all, the first one and auto may be the same" for n in (0, 1)},
}


def written_path(path: str) -> str:
    """The path of a setting in a text, of that in a `Spec`."""
    first, *rest = path.removesuffix("_").split(".")
    rest = rest[1:] if (first, rest[:1]) == ("mixture", ["weights"]) else rest
    return ".".join((KINDS.get(first, first), *rest))


def belongs(spec: Spec, path: str, attribute: attrs.Attribute) -> bool:
    """Whether a block of this label has the setting at all; else the language says so."""
    meta = attribute.metadata.get("setting")
    block = at(spec, path.rpartition(".")[0]) if "." in path else spec
    if path.startswith("model.router."):
        return spec.model.experts > 0
    label = label_of(type(block)) if meta is not None and meta.only else None
    return label is None or getattr(block, label.name) in meta.only


def variants(spec: Spec, path: str, attribute: attrs.Attribute) -> Iterator[Compiled]:
    """The spec with other values written for a setting."""
    meta = attribute.metadata.get("setting")
    for new in alternatives(at(spec, path), attribute.type):
        if isinstance(new, Quantity) and meta is not None and new.unit not in meta.units:
            continue
        try:
            other = replaced(spec, path, new)
        except TypeError:
            continue  # of another shape
        if other != spec:
            where = written_path(path)
            yield compile_plan(attrs.evolve(other, origins={**spec.origins, where: Origin("text")}))


def silent(spec: Spec, base: Compiled, path: str, attribute: attrs.Attribute) -> str:
    """What is wrong with what is said of a setting; empty where all is well."""
    assert base.plan is not None
    before, mute, effective = {check.id for check in base.plan.checks}, 0, False
    for found in variants(spec, path, attribute):
        if found.plan is None:
            continue
        rule = f"idle.{written_path(path)}"
        idle = any(check.id == rule and check.code == "W401" for check in found.plan.checks)
        new = {check.id for check in found.plan.checks if check.code.startswith("W")} - before
        same = doings(found.plan) == doings(base.plan)
        if same and found.plan.config_id != base.plan.config_id and (idle or not new):
            return f"{path} changes the experiment and nothing else"
        effective = effective or not same or bool(new) or rule in before
        mute += same and not idle
    # One value may well say what `auto` or a neighbour has chosen anyway.
    chosen_anyway = at(spec, path) in (AUTO, "auto", None) and mute == 1
    return "" if effective or not mute or chosen_anyway else f"{path} changes nothing, and nobody says so"


@pytest.mark.slow
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_setting_has_an_effect_or_is_said_to_have_none(load, context):
    spec: Any = load(**CONTEXTS[context])
    base = compile_plan(spec)
    assert base.plan is not None, base.diagnostics.render()
    wrong = [
        found
        for path, attribute in places(spec, exempt=EXEMPT)
        if belongs(spec, path, attribute)
        if (found := silent(spec, base, path, attribute))
    ]
    assert wrong == []
