"""`xtrain prove`: layouts that compute what one process computes are certified, and faults in their ranks are found."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from attrs import evolve
from forked_ranks import ForkedRanks, Mutation, Outcome
from rank_mutations import rebind
from topologies import BY_NAME, SCHEDULES, Topology
from traces import plan_of

from recipes import RECIPES, planned, published_folders
from xtrain.plan.certificate import Certificate
from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_spec, plan_from_text
from xtrain.planner.review.small_experiment import small_experiment
from xtrain.runtime.base import ops
from xtrain.runtime.base.ops import load_ops
from xtrain.runtime.inspect import collective_order
from xtrain.runtime.inspect import prove as proofs
from xtrain.runtime.inspect.collective_order import issued_alike
from xtrain.runtime.inspect.prove import prove
from xtrain.runtime.inspect.rank_jobs import TIMEOUT, RankForks
from xtrain.runtime.inspect.trace import Program, fake_world, recorded_calls

ROOT = Path(__file__).parents[2]
# Others need folders that their page makes first, or serve.
SPECS = sorted(path for path in (ROOT / "specs").glob("*.xtrain") if path.stem != "serve_cpu")


CODE = """
experiment code { budget = 40 steps }
launch { device = cpu }
model "m" { weights = none }
tokenizer bytes
dataset lines { source = synthetic() }
batch { sequence = 128, rows = 8 }
optimizer adamw { lr = 3e-3 }
parallel { fsdp 2 }
"""


class FaultyRanks(ForkedRanks):
    """Ranks of a laboratory with a fault in every job of several ranks, and in those that resume."""

    def __init__(self, ranks: ForkedRanks, fault: Mutation | None) -> None:
        super().__init__()
        self._ranks, self._fault = ranks, fault

    def run(self, plan: Plan, folder: Path, *, name: str, timeout: float = TIMEOUT, **more: Any) -> Outcome:
        fault = None if name == "alone" else self._fault
        return self._ranks.run(plan, folder, name=name, timeout=timeout, mutation=fault)


def proved(lab, plan: Plan, fault: Mutation | None = None) -> Certificate:
    return prove(plan, ranks=FaultyRanks(lab.ranks, fault))


@pytest.mark.parametrize(("topology", "layout", "ranks"), [
    (Topology(tp=2), "tp 2", 2),
    pytest.param(Topology(pp=2, tp=2, sets=SCHEDULES["zero_bubble"]), "tp 2 · pp 2", 4, marks=pytest.mark.slow),
], ids=["tp", "tp and pp"])  # fmt: skip
def test_a_layout_is_certified(lab, here, tmp_path, topology, layout, ranks):
    plan = plan_of(lab.folder, topology, "activation.mode=full")
    certificate = proved(lab, plan)
    assert not certificate.faults
    assert [(each.layout, each.ranks, each.resumed) for each in certificate.compared] == [
        (layout, ranks, False), ("fsdp 2", 2, True)
    ]  # fmt: skip
    assert all(0 < each.tensor < 1e-12 for each in certificate.compared)
    assert certificate.issued.calls > 50 and not certificate.issued.reason
    (tmp_path / "c.json").write_text(certificate.text())
    read = Certificate.read(tmp_path / "c.json")
    assert evolve(read, digest="") == certificate


FAULTS: Mapping[str, list[tuple[str, Mutation, str]]] = {
    "default": [("pp 2, tied (dense)", Mutation("twice", op="step.tied_grad_sync"), "")],
    "slow": [
        ("fsdp 2 (dense)", Mutation("average"), ""),
        ("fsdp 2 (dense)", Mutation("own_tokens"), ""),
        ("fsdp 2 (dense)", Mutation("joined_documents"), ""),
        ("fsdp 2 (dense)", Mutation("forgotten_moments"), "resumed"),
        ("fsdp 2 (dense)", Mutation("same_rows"), ""),
        ("fsdp 2 (dense)", Mutation("skip_on", op="step.clip", rank=1), ""),
        ("replicate 2 · fsdp 2 (dense)", Mutation("counted_copies"), ""),
        ("tp 2, no clipping (qwen3)", Mutation("own_summands"), ""),
        ("tp 2, without sequence (dense)", Mutation("skip_on", op="step.optimizer", rank=1), ""),
        ("tp 2 (moe)", Mutation("own_statistics"), ""),
        ("fsdp 2 · ep 2 (moe)", Mutation("divide_experts", by=2), ""),
        ("fsdp 2 · ep 2, balance bias (moe)", Mutation("skip", op="step.router_bias"), ""),
        ("pp 2, gpipe (dense)", Mutation("clip_per_stage", stages=2), ""),
        ("pp 2, gpipe (dense)", Mutation("reversed_labels", pp=1), ""),
        ("pp 2, interleaved_1f1b (dense)", Mutation("reversed_labels", pp=0), ""),
        ("pp 2, tied (dense)", Mutation("skip", op="step.tied_grad_sync"), ""),
        ("fsdp 2 · ring 2, fold none (dense)", Mutation("skip", op="step.context_grad_sync"), ""),
        ("fsdp 2 · ring 2, fold none (dense)", Mutation("shard_over", axis="ring"), ""),
        ("ring 2 · ulysses 2, fold ring_only (dense)", Mutation("sync_context_over", axis="ring"), ""),
        ("ring 2 · ulysses 2, fold none (dense)", Mutation("skip", op="step.context_grad_sync"), ""),
    ],
}


@pytest.mark.parametrize(
    ("row", "fault", "where"),
    [
        pytest.param(*case, id=f"{case[1]} in {case[0]}", marks=[] if kind == "default" else pytest.mark.slow)
        for kind, cases in FAULTS.items()
        for case in cases
    ],
)
def test_a_fault_is_found(lab, here, row, fault, where):
    certificate = proved(lab, plan_of(lab.folder, BY_NAME[row]), fault)
    assert certificate.faults and where in certificate.faults[0], certificate.compared
    assert not certificate.holds


@pytest.mark.slow
@pytest.mark.parametrize("row", dict.fromkeys(row for cases in FAULTS.values() for row, *_ in cases))
def test_a_row_without_a_fault_is_certified(lab, here, row):
    certificate = proved(lab, plan_of(lab.folder, BY_NAME[row]))
    assert certificate.holds, certificate.faults


def test_all_small_layouts_of_a_ring_pad_documents_alike(lab):
    """Otherwise the layout that resumes could not read the checkpoint."""
    plan = plan_of(lab.folder, BY_NAME["fsdp 2 · ring 2, fold none (dense)"])
    small = small_experiment(plan, {"lines": "data.jsonl"}, 8)
    for each in (small.alone, *small.layouts, small.other):
        layout = plan_from_text(each.text, "small.xtrain", (), each.world).plan
        assert layout is not None and layout.node("collate.pack").args["align"] == 4, each.name


@pytest.mark.parametrize(("model", "layers", "shared"), [
    ("layers = 10, full_layers = [2, 4, 9], shared_kv = 5, layer_input = 16", 10, 5),
    # The first block that shares is the last one of the small model.
    ("layers = 35, shared_kv = 20", 16, 1),
], ids=["all kinds", "many blocks"])  # fmt: skip
def test_blocks_that_share_keys_and_values_keep_the_blocks_that_give_them(model, layers, shared):
    family = f"gemma4 {{ dim = 64, heads = 4, window = 64, {model} }}"
    compiled = plan_from_text(CODE.replace('"m" { weights = none }', family), "code.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    small = small_experiment(compiled.plan, {"lines": "data.jsonl"}, 8)
    found = plan_from_text(small.layouts[0].text, "small.xtrain", (), 2).plan
    assert found is not None
    assert (found.architecture.layers, found.architecture.own["shared_kv"]) == (layers, shared)


SMALL = "qwen3 { dim = 64, layers = 2, heads = 4 }"


MERGES = """
adapter lora { rank = 2 }
use "own.py"
every 5 steps count then merge
"""


def test_adapters_are_trained_before_they_are_merged(tmp_path, monkeypatch):
    """With a merge in every step, the second matrix would always be zero, and the first one without a gradient."""
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from xtrain import RunContext, action\n\n\n@action\ndef count(context: RunContext): ...\n"
    )
    Path("code.xtrain").write_text(CODE.replace('"m" { weights = none }', SMALL) + MERGES)
    compiled = plan_from_spec("code.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    text = small_experiment(compiled.plan, {"lines": "data.jsonl"}, 8).layouts[0].text
    ticks = re.findall(r"every (\d) steps? ([^{\n]*\w)", text)
    assert ticks == [("1", "log then count"), ("2", "checkpoint"), ("3", "merge")]


def test_no_path_of_the_small_data_is_in_a_certificate():
    text = CODE.replace("synthetic()", 'jsonl("none.jsonl")').replace('"m" { weights = none }', SMALL)
    plan = plan_from_text(text, "code.xtrain").plan
    assert plan is not None
    small = small_experiment(plan, {"lines": "/tmp/data.jsonl"}, 8)
    (source,) = (each for each in small.shrunken if ".source" in each.setting)
    assert (source.setting, source.after) == ("datasets.lines.source", "records of a small file")


def test_small_data_have_no_documents_to_leave_out(lab):
    sets = (
        "dataset.lines.without=[390]",
        "dataset.lines.deduplicate=exact",
        'dataset.lines.decontaminate=["none.jsonl"]',
    )
    small = small_experiment(plan_of(lab.folder, Topology(fsdp=2), *sets), {"lines": "data.jsonl"}, 8)
    assert not any(name in small.alone.text for name in ("390", "exact", "none.jsonl"))
    changed = {each.setting for each in small.shrunken}
    assert {f"datasets.lines.{name}" for name in ("without", "deduplicate", "decontaminate")} <= changed


def test_layouts_have_no_more_microbatches_than_they_need(monkeypatch):
    """Their program stays: with several where the plan has several, and four for a pipeline."""
    monkeypatch.chdir(ROOT)
    plan = plan_from_spec("specs/moe_16k.xtrain").plan
    assert plan is not None and plan.node("setup.loader").args["accumulate"] > 1
    small = small_experiment(plan, {"web": "data.jsonl"}, 8)
    counts = {}
    for each in (*small.layouts, small.rehearsal):
        layout = plan_from_text(each.text, "small.xtrain", (), each.world).plan
        assert layout is not None
        counts[each.name] = layout.node("setup.loader").args["accumulate"]
    assert counts == {
        "fsdp 2 · tp 2 · pp 2 · ep 2": 4,
        "fsdp 2 · tp 2 · ulysses 2 · ep 2": 2,
        "fsdp 2 · pp 2 · ulysses 2 · ep 2": 4,
        "tp 2 · pp 2 · ulysses 2 · ep 2": 4,
        "fsdp 2 · tp 2": 2,
    }
    text = CODE.replace('"m" { weights = none }', SMALL).replace("rows = 8 }", "micro = 2, rows = 4 }")
    plain = plan_from_text(text.replace("synthetic()", 'jsonl("none.jsonl")'), "code.xtrain").plan
    assert plain is not None and plain.node("setup.loader").args["accumulate"] == 1
    (only,) = small_experiment(plain, {"lines": "data.jsonl"}, 8).layouts
    layout = plan_from_text(only.text, "small.xtrain", (), only.world).plan
    assert layout is not None and layout.node("setup.loader").args["accumulate"] == 1


@pytest.mark.slow
def test_ranks_are_forked_after_a_rehearsal(tmp_path, monkeypatch):
    """What the rehearsal cannot do would be done in every rank, without a word."""
    monkeypatch.chdir(ROOT)
    plan = plan_from_spec("specs/moe_16k.xtrain").plan
    assert plan is not None
    with RankForks() as forks:
        ranks = proofs._Ranks(forks, tmp_path, lambda line: None)
        small, plans = proofs._small(plan, ranks, 8)
        first = proofs._rehearsal(plan, ranks, small)
        assert first
        ranks.run(plans[0], small.alone, "alone", first)
        assert forks.missed == []


def test_a_call_of_some_ranks_alone_is_found(lab, monkeypatch):
    """That no real rank could show: it would wait for the others. Without it the same layout is certified above."""
    plan = plan_of(lab.folder, Topology(tp=2))
    original = dict(ops.OPS)

    def change(call: Any, given: dict[str, Any]) -> Any:
        def run(step: Any) -> None:
            call(step)
            if dist.get_rank() == 1:
                dist.all_reduce(step_tensor())

        return run

    def step_tensor() -> Any:
        import torch

        return torch.zeros(3)

    rebind("step.clip", change)
    try:
        problems = issued_alike(plan).problems
    finally:
        ops.OPS.clear()
        ops.OPS.update(original)
    assert any("rank 1 issues all_reduce of 3 float32" in problem for problem in problems), problems


@pytest.mark.parametrize("schedule", [
    pytest.param(name, marks=() if name == "1f1b" else pytest.mark.matrix) for name in SCHEDULES
])  # fmt: skip
def test_skipped_microbatches_have_the_calls_of_those_that_run(lab, schedule):
    """Messages between stages stay in order, and no call of a microbatch is missing."""
    load_ops()
    plan, rank = plan_of(lab.folder, Topology(pp=2, fsdp=2, tp=2, sets=SCHEDULES[schedule])), 4
    with fake_world(plan, rank) as this:
        program = Program(plan, this)
        program.set_up()
        program.collectives.log = []
        program.step(repeats=False)
    whole, skipped = program.collectives.log, recorded_calls(plan, rank)
    ours, theirs = ([(call.peer, str(call)) for call in calls if call.peer is not None] for calls in (skipped, whole))
    assert ours == theirs and len(ours) > 3
    assert set(map(str, skipped)) == set(map(str, whole)) and len(skipped) < len(whole)


@pytest.mark.parametrize("small_fails", [False, True])
def test_a_trace_that_fails_at_full_size_alone_is_a_fault(lab, monkeypatch, small_fails):
    whole, small = (plan_of(lab.folder, Topology(fsdp=size)) for size in (4, 2))

    def fail(plan: Plan, rank: int) -> list[Any]:
        if plan is whole or small_fails:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore")
        return []

    monkeypatch.setattr(collective_order, "recorded_calls", fail)
    found = issued_alike(whole, small=small)
    said = "the trace of rank 0 failed: mat1 and mat2 shapes cannot be multiplied"
    assert found.reason == (said if small_fails else "")
    assert found.problems == (() if small_fails else (f"{said}, and a small plan of the same code is traced",))


@pytest.mark.slow
def test_a_model_of_transformers_code_is_certified(lab, tmp_path, monkeypatch):
    """Its sizes are those of a folder, for which a small one stands."""
    from transformers import StableLmConfig

    config = StableLmConfig(hidden_size=2048, num_hidden_layers=8, architectures=["StableLmForCausalLM"])
    config.save_pretrained(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    Path("code.xtrain").write_text(CODE)
    plan = plan_from_spec("code.xtrain").plan
    assert plan is not None
    certificate = proved(lab, plan)
    assert not certificate.faults and certificate.issued.calls and not certificate.issued.reason
    assert ("model.dim", "2048", "32") in [(each.setting, each.before, each.after) for each in certificate.changed]


@pytest.mark.slow
@pytest.mark.parametrize("path", SPECS, ids=lambda path: path.stem)
def test_a_shipped_spec_is_certified(lab, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = plan_from_spec(path.relative_to(ROOT)).plan
    assert plan is not None
    assert not proved(lab, plan).faults


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_a_recipe_is_certified(lab, recipe):
    with published_folders():
        plan = planned(recipe).plan
        assert plan is not None
        assert not proved(lab, plan).faults
