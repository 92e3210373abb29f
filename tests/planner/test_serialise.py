"""A plan as JSON: read back whole, refused when changed, with the views other programs ask for."""

import json

import pytest

from xtrain.plan.serialise import PlanError, dumps, from_json, load_plan, to_json
from xtrain.planner.load import plan_from_path

MOE = "model qwen3_moe { dim = 64, layers = 4, heads = 8, kv_heads = 4, experts = 8 }"


@pytest.fixture
def rich(make_plan):
    return make_plan(
        model=MOE,
        parallel="parallel { fsdp 2, tp 2, pp 2, cp 2, ep 4 }",
        launch="launch { nodes = 2 }",
        every="every 10 steps eval code then log",
        more='on finish generate { prompts = ["grüß dich"] }',
        scheduler="scheduler wsd { warmup = 5% }",
    )


def test_round_trip(rich, make_plan):
    assert from_json(to_json(rich)) == rich
    assert from_json(json.loads(dumps(rich))) == rich
    assert json.loads(dumps(rich)) == to_json(rich)
    # As another program might write it: keys sorted.
    assert from_json(json.loads(json.dumps(to_json(rich), sort_keys=True))) == rich
    open_ended = make_plan(experiment="experiment tiny { budget = 1.5 epochs }")
    assert from_json(json.loads(dumps(open_ended))) == open_ended


def test_views_stand_under_their_names(rich):
    content = json.loads(dumps(rich))
    assert content["format"] == 6
    assert content["id"] == rich.id
    assert content["world_size"] == 16
    assert content["mesh"]["axes"] == {"pp": 2, "replicate": 1, "fsdp": 2, "ring": 1, "ulysses": 2, "tp": 2}
    assert content["parameters"]["total"] == rich.parameters.total
    assert content["parameters"]["active"] < content["parameters"]["total"]
    assert content["steps"] == 100
    assert content["tokens_per_step"] == 8 * 256
    assert [rank["coordinates"] for rank in content["ranks"]] == [rich.mesh.coordinates(r) for r in range(16)]
    assert [rank["node"] for rank in content["ranks"]] == [0] * 8 + [1] * 8
    totals = [each.memory.total_bytes for each in rich.estimates.classes]
    assert [rank["total_bytes"] for rank in content["memory"]["per_rank"]] == [totals[0]] * 8 + [totals[1]] * 8
    assert [node["id"] for node in content["graph"]["nodes"]] == [node.id for node in rich.nodes]
    assert {"before": "setup.checkpoint", "after": "step.fetch", "data": ""} in content["graph"]["edges"]
    assert content["timeline"]["ticks"][0]["nodes"] == ["tick.eval.code", "tick.log"]
    assert {"id", "status", "evidence"} <= content["checks"][0].keys()


CHANGES = {
    "an argument": lambda c: c["graph"]["nodes"][0]["args"].update(seed=99),
    "a node": lambda c: c["graph"]["nodes"].pop(),
    "an edge": lambda c: c["graph"]["edges"].pop(),
    "a tick": lambda c: c["timeline"]["ticks"][0].update(steps=11),
    "a shape": lambda c: c["parameters"]["tensors"][0].update(shape=[1, 1]),
    "the mesh": lambda c: c["mesh"]["axes"].update(fsdp=4),
    "the workspace": lambda c: c["workspace"].update(root="elsewhere"),
    "the experiment": lambda c: c.update(config_id="0" * 16),
    "a view": lambda c: c.update(steps=1),
    "a rank": lambda c: c["ranks"][3].update(node=9),
    "the id": lambda c: c.update(id="0" * 16),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_plan_changed_by_hand_is_refused(rich, change):
    content = json.loads(dumps(rich))
    change(content)
    with pytest.raises(PlanError) as caught:
        from_json(content)
    assert caught.value.code == "X704"
    assert "plan it again" in caught.value.hint


@pytest.mark.parametrize("content", [None, [], {}, {"format": 99}, {"format": 3}, {"format": 3, "id": "x", "mesh": 3}])
def test_what_is_no_plan_is_refused(content):
    with pytest.raises(PlanError) as caught:
        from_json(content)
    assert caught.value.code == "X704"


def test_unknown_fields_are_refused(rich):
    content = json.loads(dumps(rich))
    content["graph"]["nodes"][0]["surprise"] = 1
    with pytest.raises(PlanError):
        from_json(content)


def test_a_saved_plan_takes_the_place_of_a_spec(tmp_path, rich):
    path = tmp_path / "plan.json"
    path.write_text(dumps(rich))
    assert load_plan(path) == rich
    assert plan_from_path(path).plan == rich
    assert plan_from_path(path, world=16).plan == rich
    for changed in (plan_from_path(path, ["optimizer.lr=1"]), plan_from_path(path, world=2)):
        assert changed.plan is None
        assert [error.code for error in changed.diagnostics.errors] == ["X704"]


def test_files_that_are_no_plans(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    codes = [plan_from_path(path).diagnostics.errors[0].code for path in (broken, tmp_path / "none.json")]
    assert codes == ["X704", "X704"]


def test_every_value_says_where_it_came_from(rich):
    origins = {entry.path: entry for entry in rich.provenance}
    assert origins["optimizer.lr"].origin == "text"
    assert origins["optimizer.lr"].place.endswith("spec.xtrain:6:24")
    assert origins["optimizer.eps"].origin == "default"
    assert (origins["model.head_dim"].origin, origins["model.head_dim"].how) == ("derived", "dim 64 / heads 8")
    assert origins["tokens_per_step"].how == "rows 8 · sequence 256"
    assert len(origins) == len(rich.provenance)


def test_provenance_of_let_param_and_set(tmp_path, load):
    from xtrain.planner.load import plan_from_spec

    load(
        model="let width = 64\nparam depth = 4\nmodel llama { dim = width, layers = depth, heads = 8 }",
    )
    compiled = plan_from_spec(tmp_path / "spec.xtrain", ["optimizer.lr=5e-4"])
    assert compiled.plan is not None
    origins = {entry.path: entry.origin for entry in compiled.plan.provenance}
    assert [origins[path] for path in ("model.dim", "model.layers", "optimizer.lr")] == ["let", "param", "set"]
