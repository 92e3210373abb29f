"""What is dear about a run is said, with what would help, and what would help has been tried."""

import pytest

from xtrain.plan.views import TIGHT
from xtrain.planner.rules.costs import Change

BIG = "model llama { dim = 4Ki, layers = 8, heads = 32, kv_heads = 8, ffn = 14Ki, vocab = 128k }"
ROW = "batch { sequence = 8Ki, micro = 2, accumulate = 4 }"
SLOW = "cluster cpu { flops = 1T, link = 10 GiB, network = 1 GiB }"
HALF = "precision { compute = bf16 }"


def check(plan, rule):
    return next(c for c in plan.checks if c.id == rule)


def gib(memory):
    return f"cluster h100 {{ devices = 8, memory = {memory} GiB }}"


def test_without_a_cluster_nothing_is_held_against_one(make_plan):
    plan = make_plan(parallel="parallel { pp 2 }")
    assert not {"memory.device", "pipeline.bubble", "mesh.tp.need"} & {c.id for c in plan.checks}
    assert plan.estimates.remedies == ()


def test_what_fits_has_no_remedies(make_plan):
    plan = make_plan(model=BIG, batch=ROW, precision=HALF, cluster=gib(140))
    assert check(plan, "memory.device").status == "pass" and plan.estimates.remedies == ()


def test_a_plan_that_does_not_fit_is_a_plan_and_says_what_would_help(compiled):
    result = compiled(model=BIG, batch=ROW, precision=HALF, cluster=gib(24))
    assert result.plan is not None
    found = check(result.plan, "memory.device")
    assert (found.status, found.code) == ("warn", "W423") and "does not fit" in found.evidence
    remedies = result.plan.estimates.remedies
    assert 1 <= len(remedies) <= 3
    for remedy in remedies:
        assert remedy.memory_bytes <= (1 - TIGHT) * 24 * 2**30
        assert ", ".join(remedy.sets) in found.evidence
    assert [r.seconds for r in remedies if r.seconds] == sorted(r.seconds for r in remedies if r.seconds)


def test_a_remedy_does_what_it_says(make_plan, load):
    """The text of a remedy, as `--set`, gives the plan that was estimated."""
    from xtrain.dsl.load import load_spec
    from xtrain.planner.compile import compile_plan

    blocks = {"model": BIG, "batch": ROW, "precision": HALF, "cluster": gib(24)}
    plan = make_plan(**blocks)
    path = load(**blocks).path
    assert plan.estimates.remedies
    for remedy in plan.estimates.remedies:
        changed = compile_plan(load_spec(path, remedy.sets).require(), world=plan.mesh.world_size).plan
        assert changed is not None
        assert changed.estimates.fullest.memory.total_bytes == remedy.memory_bytes
        if remedy.seconds is not None:
            assert changed.estimates.times.step == pytest.approx(remedy.seconds)


def test_little_room_is_said_too(make_plan):
    plan = make_plan(model=BIG, batch=ROW, precision=HALF, cluster=gib(140))
    full = plan.estimates.fullest.memory.total_bytes
    tight = make_plan(model=BIG, batch=ROW, precision=HALF, cluster=gib(int(full * 1.04 / 2**30)))
    found = check(tight, "memory.device")
    assert found.code == "W423" and "less than 8%" in found.evidence


def test_states_alone_that_do_not_fit_are_named(make_plan):
    plan = make_plan(model=BIG.replace("layers = 8", "layers = 200"), batch=ROW, precision=HALF, cluster=gib(24))
    evidence = check(plan, "memory.device").evidence
    assert "model states" in evidence and "use more ranks" in evidence and "is not enough" in evidence


def test_a_pipeline_that_waits(make_plan):
    blocks = {"parallel": "parallel { pp 4, fsdp 1 }", "cluster": "cluster h100 { devices = 4 }"}
    blocks["model"] = "model llama { dim = 64, layers = 16, heads = 8, kv_heads = 4 }"
    few = make_plan(batch="batch { sequence = 256, accumulate = 4 }", **blocks)
    found = check(few, "pipeline.bubble")
    assert found.code == "W424" and "stages_per_rank=4" in found.evidence and few.estimates.bubble > 0.2
    many = make_plan(batch="batch { sequence = 256, accumulate = 64 }", **blocks)
    assert check(many, "pipeline.bubble").status == "pass"


def test_tensor_parallel_between_machines(make_plan):
    plan = make_plan(parallel="parallel { tp 4, fsdp auto }", launch="launch { nodes = 2, ranks_per_node = 2 }")
    found = check(plan, "mesh.tp.nodes")
    assert found.code == "W425" and "use tp 2" in found.evidence
    inside = make_plan(parallel="parallel { tp 2, fsdp auto }", launch="launch { nodes = 2, ranks_per_node = 2 }")
    assert check(inside, "mesh.tp.nodes").status == "pass"


def test_tensor_parallel_that_is_not_needed(make_plan):
    blocks = {"model": BIG, "batch": ROW.replace("micro = 2", "micro = 1"), "precision": HALF, "cluster": gib(140)}
    plan = make_plan(parallel="parallel { tp 2, fsdp auto }", **blocks)
    assert check(plan, "mesh.tp.need").code == "W426"
    needed = make_plan(parallel="parallel { tp 2, fsdp auto }", **{**blocks, "cluster": gib(18)})
    assert check(needed, "mesh.tp.need").status == "pass"
    few = {**blocks, "batch": "batch { sequence = 8Ki, micro = 1, rows = 2 }"}
    found = check(make_plan(parallel="parallel { tp 2, fsdp 2 }", **few), "mesh.tp.need")
    assert found.status == "pass" and found.evidence == "there are not enough rows without tp 2"


def test_changes_are_texts_and_values():
    change = Change.of(parallel__tp__size=2, parallel__fsdp__offload=True) + Change.of(activation__mode="full")
    assert change.sets == ("parallel.tp=2", "parallel.fsdp.offload=true", "activation.mode=full")


@pytest.mark.parametrize(("layout", "pieces"), [("parallel { fsdp 2 }", 4), ("parallel { pp 2 }", 1)])
def test_ranks_that_compute_are_not_to_be_taken_for_stuck(compiled, layout, pieces):
    """They tell of every microbatch, in a pipeline of every step."""

    def warnings(stuck: str) -> list[str]:
        result = compiled(model=BIG, batch=ROW, parallel=layout, cluster=SLOW, more=stuck)
        assert result.plan is not None
        return [check.evidence for check in result.plan.checks if check.code == "W606"]

    longest = compiled(model=BIG, batch=ROW, parallel=layout, cluster=SLOW).plan.estimates.times.slow / pieces
    assert warnings(f"fault_tolerance {{ stuck = {longest * 1.01:.0f} s }}") == []
    (warning,) = warnings(f"fault_tolerance {{ stuck = {longest * 0.99:.0f} s }}")
    assert warning.startswith("a step of the pipeline" if pieces == 1 else "a microbatch")
    assert warnings("fault_tolerance { stuck = none }") == []
