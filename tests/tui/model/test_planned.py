"""plan.json as values: each of them is the one in the file."""

import json

import pytest
from attrs import asdict
from made_runs import SHAPES, plan_text

from xtrain.tui.model.planned import AXES, planned


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_everything_is_as_in_the_file(shape) -> None:
    content = json.loads(plan_text(shape))
    plan = planned(content)
    assert plan is not None and plan.content == content
    assert (plan.id, plan.name) == (content["id"], content["name"])
    _same(plan.nodes, content["graph"]["nodes"], "nodes")
    _same(plan.edges, content["graph"]["edges"], "edges")
    timeline, estimates = content["timeline"], content["estimates"]
    for name, key in (("phases",) * 2, ("ticks",) * 2, ("triggers", "reactions"), ("commands",) * 2):
        _same(getattr(plan, name), timeline[key], name)
    for name in ("steps", "tokens", "stop_at"):
        assert getattr(plan, name) == timeline[name], name
    for name in ("tokens_per_step", "checkpoint_bytes"):
        assert getattr(plan, name) == estimates[name], name
    assert (plan.times is None) == (estimates["times"] is None)
    if plan.times is not None:
        assert asdict(plan.times) == {**estimates["times"], "label": ""}
    for found, written in zip(plan.classes, estimates["classes"], strict=True):
        assert found.pp == written["pp"]
        # What is computed meanwhile is for the times alone.
        traffic = [{name: value for name, value in each.items() if name != "meanwhile"} for each in written["traffic"]]
        assert [asdict(each) for each in found.traffic] == traffic
    mesh = content["mesh"]
    for axes, name in ((plan.axes, "axes"), (plan.expert_axes, "expert_axes")):
        assert {axis.name: axis.size for axis in axes} == mesh[name]
        assert [axis.name for axis in axes] == [known for known in AXES if known in mesh[name]]
    assert {axis.name: axis.stride for axis in (*plan.axes, *plan.expert_axes)} == mesh["strides"]


@pytest.mark.parametrize("shape", ["large", "pipeline", "experts"])
def test_what_follows_for_ranks_is_what_the_file_says_of_them(shape) -> None:
    content = json.loads(plan_text(shape))
    plan = planned(content)
    assert plan is not None and plan.world_size == content["world_size"]
    for rank, memory in zip(content["ranks"], content["memory"]["per_rank"], strict=True):
        assert plan.coordinates(rank["rank"]) == rank["coordinates"]
        assert plan.machine(rank["rank"]) == rank["node"]
        of_rank = next(each for each in plan.classes if each.pp == rank["coordinates"].get("pp", 0))
        assert of_rank.allocated_bytes == memory["allocated_bytes"]
    assert plan.memory_bytes == max(each["allocated_bytes"] for each in content["memory"]["per_rank"])


def test_a_plan_of_another_version_reads_as_far_as_it_goes() -> None:
    assert planned(None) is None and planned([]) is None and planned({"format": 9}) is None
    plan = planned({"graph": {"nodes": [{"id": "a"}, 7, {"args": 3}], "edges": None}, "mesh": {"axes": {"dp": "x"}}})
    assert plan is not None
    assert [node.id for node in plan.nodes] == ["a", ""] and plan.edges == () and plan.times is None
    assert plan.coordinates(5) == {"dp": 0} and plan.classes == () and plan.memory_bytes is None


def test_numbers_beyond_what_a_float_holds_stay_exact() -> None:
    plan = planned({"graph": {}, "estimates": {"checkpoint_bytes": 3_456_789_012_345_678_901_234}})
    assert plan is not None and plan.checkpoint_bytes == 3_456_789_012_345_678_901_234


def _same(found, written, name: str) -> None:
    read = json.loads(json.dumps([asdict(each) for each in found]))
    # What a plan does not use is not written, and what no screen shows is not read.
    for each, own in zip(read, written, strict=True):
        assert {key: value for key, value in each.items() if value or key in own} == {
            key: value for key, value in own.items() if key in each
        }, name


def test_the_plan_of_a_run_keeps_its_keys_sorted() -> None:
    """As a run writes it, so that the order of axes and of memory is this module's own to keep."""
    content = json.loads(plan_text("experts"))
    assert list(content["mesh"]["axes"]) == sorted(content["mesh"]["axes"])
