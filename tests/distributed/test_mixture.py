"""Several datasets in several phases, on several ranks, that change on the way: the run of one process."""

import json
import shutil
from collections import Counter

import pytest
from attrs import evolve
from projects import events, records
from topologies import FLAT, SHALLOW, Topology
from trials import TOLERANCE, Laboratory, gaps

from xtrain.plan.plan import Plan
from xtrain.runtime.feed.curriculum import Curriculum, curriculum_of
from xtrain.runtime.feed.dataset_view import rows_from
from xtrain.runtime.store.checkpoints import CheckpointFolder

STEPS = 8
MORE = """
dataset sums { source = jsonl("sums.jsonl") }
dataset noise { source = synthetic(documents = 40, length = 60, seed = 5) }
mixture { lines = 0.6, sums = 0.2, noise = 0.2 }
phase drill { from = 2 steps, mix = { sums: 2 } }
phase clean { from = 50%, mix = { noise: 0 }, lr_scale = 0.5 }
phase last { from = 6 steps, mix = { lines: 0, noise: 0 }, lr_scale = 0.25 }
every 3 steps checkpoint
checkpoint { keep = none }
"""
EPOCHS = """
dataset sums { source = jsonl("sums.jsonl") }
dataset noise { source = synthetic(documents = 10, length = 40, seed = 5) }
mixture { lines = 0.5 epochs, sums = 1 epoch, noise = 3 epochs }
phase calm { from = 75%, lr_scale = 0.5 }
every 4 steps checkpoint
checkpoint { keep = none }
"""
ONE, TWO, PIPELINE = Topology(accumulate=1), Topology(fsdp=2), Topology(pp=2)


@pytest.fixture
def trial(lab: Laboratory):
    sums = [{"text": f"{i} + {i + 7} = {2 * i + 7}; " * (1 + i % 4)} for i in range(60)]
    (lab.folder / "sums.jsonl").write_text("".join(json.dumps(each) + "\n" for each in sums))
    return evolve(ONE.trial("fp64"), steps=STEPS, more=MORE, settings=FLAT)


def plan_of(lab: Laboratory, trial, layout: Topology, *sets: str) -> Plan:
    return lab.plan(trial, (*layout.layout, *sets))


def curriculum(plan: Plan) -> Curriculum:
    args = plan.node("setup.loader").args
    return Curriculum(
        datasets=tuple(args["datasets"]),
        phases=plan.timeline.phases,
        steps=STEPS,
        rows_per_step=args["rows"],
        seed=args["seed"],
    )


@pytest.mark.slow  # by default test_epochs.py, and tests/runtime/feed/test_curriculum.py of the order alone
def test_each_dataset_is_taken_as_often_as_its_epochs_say(lab: Laboratory, trial):
    """On one rank, and on two that stop in the middle of an epoch and go on as one."""
    trial = evolve(trial, more=EPOCHS, settings=(*trial.settings, "experiment.budget=2 epochs"))
    alone, plan = lab.alone(trial, saves=True), plan_of(lab, trial, ONE)
    (data,) = events(alone.directory, "data")
    often = {"lines": 1, "sums": 2, "noise": 6}  # in both epochs together
    rows, each = data["rows"], plan.node("setup.loader").args["rows"]
    total = sum(times * rows[name] for name, times in often.items())
    assert data["steps"] == -(-total // each) == len(alone.curve)

    # Every row of a dataset so often and no other way; what is left of the last step is of the third epoch.
    drawn = [row[:2] for row in rows_from(curriculum_of(plan, rows), rows, 0)]
    assert len(drawn) == data["steps"] * each
    assert Counter(drawn[:total]) == {(name, row): often[name] for name in rows for row in range(rows[name])}

    name = "epochs"
    first = lab.ranks.run(plan_of(lab, trial, TWO), lab.folder, name=name)
    assert gaps(first, alone).worst < TOLERANCE["fp64"]
    for entry in CheckpointFolder(first.directory / "checkpoints").entries():
        if entry.step > 8:
            shutil.rmtree(entry.path)
    (first.directory / "finished").unlink()
    (first.directory / "metrics.jsonl").unlink()
    moved = lab.ranks.run(plan_of(lab, trial, ONE), lab.folder, name=name)
    assert events(moved.directory, "resumed")[-1]["step"] == 8
    # The checkpoint has brought the record of its own step along.
    later = evolve(alone, curve=alone.curve[7:], routing=alone.routing[7:])
    assert gaps(evolve(moved, evals=moved.evals[-1:]), later).worst < TOLERANCE["fp64"]
    for outcome in (alone, first, moved):
        saved = CheckpointFolder(outcome.directory / "checkpoints").latest()
        assert saved is not None and saved.step == data["steps"]
        taken = Counter({name: its["cursor"] for name, its in saved.state()["loader"]["datasets"].items()})
        assert taken - Counter(name for name, _ in drawn[total:]) == {name: often[name] * rows[name] for name in rows}


def test_a_curriculum_is_followed_to_the_step_and_kept_over_stops_and_other_ranks(lab: Laboratory, trial):
    trial = evolve(trial, settings=SHALLOW)  # a layer for each of the stages
    alone = lab.alone(trial, saves=True)
    plan = plan_of(lab, trial, ONE)

    # What is recorded is what is declared.
    begun = [(event["step"], event["name"]) for event in events(alone.directory, "phase")]
    assert begun == [(0, "train"), (2, "drill"), (4, "clean"), (6, "last")]
    logged = [record for record in records(alone.directory, "metrics") if "loss" in record]
    assert [record["phase"] for record in logged] == ["train"] * 2 + ["drill"] * 2 + ["clean"] * 2 + ["last"] * 2
    rate = plan.node("setup.scheduler").args["lr"]
    assert [record["lr"] for record in logged] == [rate * scale for scale in (1, 1, 1, 1, 0.5, 0.5, 0.25, 0.25)]
    assert set(events(alone.directory, "phase")[3]["shares"]) == {"sums"}
    expected = curriculum(plan).position(STEPS).cursors
    saved = CheckpointFolder(alone.directory / "checkpoints").latest()
    assert saved is not None
    assert {name: its["cursor"] for name, its in saved.state()["loader"]["datasets"].items()} == expected
    assert sum(expected.values()) == STEPS * plan.node("setup.loader").args["rows"]

    # Two data ranks, then two stages of a pipeline, then one process: with reading ahead, and without.
    name = "curriculum"
    first = lab.ranks.run(plan_of(lab, trial, TWO, "batch.prefetch=3"), lab.folder, name=name)
    assert gaps(first, alone).worst < TOLERANCE["fp64"]
    for keep, layout, prefetch in ((3, PIPELINE, 2), (6, ONE, 0)):
        for entry in CheckpointFolder(first.directory / "checkpoints").entries():
            if entry.step > keep:
                shutil.rmtree(entry.path)
        (first.directory / "finished").unlink()
        (first.directory / "metrics.jsonl").unlink()
        moved = lab.ranks.run(plan_of(lab, trial, layout, f"batch.prefetch={prefetch}"), lab.folder, name=name)
        assert events(moved.directory, "resumed")[-1]["step"] == keep
        assert events(moved.directory, "phase")[-1]["name"] == "last"
        later = evolve(alone, curve=alone.curve[keep - 1 :], routing=alone.routing[keep - 1 :])
        assert gaps(evolve(moved, evals=moved.evals[-1:]), later).worst < TOLERANCE["fp64"]
