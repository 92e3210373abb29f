"""How long a start takes: its parts, what a cluster says better, and what of it is in a restart."""

from math import isclose

import pytest

from xtrain.plan.mesh import LAZY_FROM
from xtrain.planner.costs import run as startup
from xtrain.planner.costs.run import goodput_of, restart_of, startup_of
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.page import render

SPEC = """
experiment starting {{ budget = 200k steps }}
cluster {cluster}
parallel {{ {parallel} }}
activation full
model llama {{ dim = 4096, layers = 32, heads = 32, kv_heads = 8, ffn = 14336, vocab = 128256 }}
tokenizer bytes
dataset made {{ source = synthetic(documents = 10) }}
batch {{ sequence = 8Ki, rows = 10240 }}
optimizer adamw {{ lr = 3e-4 }}
every 500 steps checkpoint
{rest}
"""
GPUS = "h100 {{ nodes = 1280, devices = 8{more} }}"


def planned(more="", rest="", cluster=GPUS, parallel="fsdp 1280, tp 8"):
    text = SPEC.format(cluster=cluster.format(more=more), parallel=parallel, rest=rest)
    found = plan_from_text(text, "starting.xtrain")
    assert found.plan is not None, found.diagnostics.render()
    return found.plan, [each.code for each in found.diagnostics]


def parts(plan):
    return {part.name: part.seconds for part in startup_of(plan).parts}


def test_parts_of_ten_thousand_ranks():
    plan, _ = planned(", storage = 1000 GiB")
    found, world = parts(plan), 10_240
    assert list(found) == ["programs", "plan", "meeting", "groups", "communicators", "weights"]
    assert found["programs"] == startup.PROGRAMS
    assert found["meeting"] == world * (startup.MEETING / startup.STORE_RATE + startup.CONNECTION + startup.ANSWER)
    # tp and fsdp have groups in which something is sent, and all ranks agree on signals
    assert found["communicators"] == (world + 1280 + 8) * startup.CONNECT
    assert found["weights"] == plan.estimates.checkpoint_bytes / 1000 / 2**30
    assert startup_of(plan).seconds == sum(found.values())
    assert plan.node("setup.bootstrap").args["lazily"]


def test_what_a_cluster_says_better_is_taken():
    more = ", storage = 1000 GiB, programs = 50 s, store_rate = 10k, connect = 0.01 s, compile = 30 s"
    plan, codes = planned(more, "compile { mode = default }")
    assert "W401" not in codes
    usual, found = parts(planned(", storage = 1000 GiB")[0]), parts(plan)
    assert (found["programs"], found["compile"]) == (50.0, 30.0)
    assert isclose(found["communicators"] / usual["communicators"], 0.01 / startup.CONNECT)
    assert found["meeting"] > usual["meeting"] and found["groups"] > usual["groups"]


def test_what_nobody_knows_is_said_and_in_no_sum():
    plan, _ = planned("", "compile { mode = default }")
    assert {part.name for part in startup_of(plan).unknown} == {"weights", "compile"}
    assert "plus weights, compile (unknown)" in render(plan)
    text = render(plan, parts=["training"])
    assert "no cluster.storage" in text and "no cluster.compile" in text


def test_few_ranks_connect_at_once_and_many_as_they_need():
    few, _ = planned(cluster="cpu {{ nodes = 8, devices = 8{more} }}", parallel="fsdp 64")
    many, _ = planned(
        cluster=f"cpu {{{{ nodes = {LAZY_FROM}, devices = 8{{more}} }}}}", parallel=f"fsdp {8 * LAZY_FROM}"
    )
    assert "lazily" not in few.node("setup.bootstrap").args and many.node("setup.bootstrap").args["lazily"]
    assert "communicators" not in parts(few)
    # three groups of all ranks, each of which waits for the address of every other one and gets it
    assert isclose(parts(few)["groups"], 3 * 3 * 64 * 64 / startup.STORE_RATE)


def test_settings_that_nothing_is_computed_from_are_idle():
    more = ", connect = 0.01 s, compile = 30 s, storage = 1 GiB"
    assert planned(more, cluster="cpu {{ nodes = 8, devices = 8{more} }}", parallel="fsdp 64")[1].count("W401") == 2


def test_a_restart_is_noticed_and_then_a_start():
    plan, _ = planned(", mtbf = 30000 h, storage = 1000 GiB", "fault_tolerance { stuck = 2 min, restarts = 1000 }")
    assert restart_of(plan) == 120 + startup_of(plan).seconds
    found = goodput_of(plan)
    assert found is not None and found.faults.restart == restart_of(plan)
    assert "noticed after 2.00 min at most" in render(plan)
    plan, _ = planned(", mtbf = 30000 h, storage = 1000 GiB, restart = 7 min")
    assert restart_of(plan) == 420 and "noticed after" not in render(plan)
    never, _ = planned(", mtbf = 30000 h", "fault_tolerance { stuck = none, restarts = 1000 }")
    assert restart_of(never) == startup_of(never).seconds and "never noticed" in render(never)


@pytest.mark.parametrize("forgotten", [None, *range(4)])
def test_communicators_take_what_is_published(forgotten):
    """Ranks and seconds; the constant is that of all four, and hardly another of any three."""
    published = [(8 * 1024, 15), (96 * 1024, 265), (16 * 1024, 17), (96 * 1024, 200)]
    taken = [point for place, point in enumerate(published) if place != forgotten]
    slope = sum(ranks * seconds for ranks, seconds in taken) / sum(ranks**2 for ranks, _ in taken)
    assert abs(slope / startup.CONNECT - 1) < (0.03 if forgotten is None else 0.2)
