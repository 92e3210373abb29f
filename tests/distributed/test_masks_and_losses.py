"""Masked tokens and several datasets: a layout computes what one process does, and tells the same of each dataset."""

from contextlib import chdir
from pathlib import Path

import pytest
from attrs import evolve
from forked_ranks import Outcome
from projects import events, records
from topologies import BY_NAME, ELSEWHERE, Topology
from trials import TOLERANCE, Trial, gaps

from xtrain.plan.plan import Plan
from xtrain.runtime.feed.curriculum import curriculum_of
from xtrain.runtime.feed.dataset_view import data_nodes, rows_from, tokenizer_of
from xtrain.runtime.feed.prepared import prepared_from

# Two thirds of the rows are conversations, of which only the answers are predicted.
MIXED = """
dataset talks {
  source = jsonl("talks.jsonl"), messages = "messages", template = "chatml", train_on = assistant, holdout = 10%
  oversized = split
}
mixture { lines = 1, talks = 2 }
on finish eval talks { batches = none }
"""
LAYOUTS = (
    *(BY_NAME[name] for name in ELSEWHERE["mixture"]),
    *(
        pytest.param(topology, marks=pytest.mark.matrix)
        for topology in (
            BY_NAME["ulysses 2 · tp 2 · ep 2 (moe)"],
            Topology(fsdp=2, ring=2),
            Topology(tp=2, pp=2),
            Topology(replicate=2, ulysses=2, sets=("parallel.cp.fold=ring_only",)),
            Topology(fsdp=2, tp=2, sets=("parallel.tp.loss=false",)),
        )
    ),
)


def mixed(topology: Topology) -> Trial:
    return evolve(topology.trial("fp64", shallow=True), more=MIXED)


def by_dataset(outcome: Outcome) -> list[dict]:
    """What the log says of each dataset, step by step."""
    kinds = ("loss/", "valid_tokens/", "rows/")
    return [{key: line[key] for key in line if key.startswith(kinds)} for line in records(outcome.directory, "metrics")]


@pytest.mark.parametrize("topology", LAYOUTS, ids=lambda topology: topology.name)
def test_a_layout_computes_what_one_process_computes_of_a_mixture(lab, topology):
    trial = mixed(topology)
    alone = lab.alone(trial)
    outcome = lab.run(trial, topology.layout, saves=False)
    found = gaps(outcome, alone)
    assert found.worst < TOLERANCE["fp64"]
    assert len(by_dataset(alone)) == trial.steps
    for ours, theirs in zip(by_dataset(outcome), by_dataset(alone), strict=True):
        assert ours.keys() == theirs.keys()
        counts = [key for key in theirs if not key.startswith("loss/")]
        assert [ours[key] for key in counts] == [theirs[key] for key in counts]
        losses = [key for key in theirs if key.startswith("loss/")]
        assert losses and [ours[key] for key in losses] == pytest.approx([theirs[key] for key in losses], rel=1e-12)


def test_losses_of_datasets_add_up_to_the_loss(lab):
    alone = lab.alone(evolve(mixed(Topology()), steps=3))
    lines = [line for line in records(alone.directory, "metrics") if "loss" in line]
    assert len(lines) == 3
    taken = 0
    for step, line in enumerate(lines, start=1):
        tokens = {name: line.get(f"valid_tokens/{name}", 0) for name in ("lines", "talks")}
        whole = sum(line[f"loss/{name}"] * count for name, count in tokens.items() if count) / sum(tokens.values())
        assert whole == pytest.approx(line["loss"], rel=1e-12)
        assert line["rows/lines"] + line["rows/talks"] == 8 * step
        assert line["phase"] == "train"
        rows, taken = line["rows/talks"] - taken, line["rows/talks"]
        assert tokens["talks"] < 0.3 * 64 * rows, "most of a conversation is only read"
    assert any("loss/talks" in line for line in lines) and all("loss/lines" in line for line in lines)
    assert {event["dataset"] for event in alone.evals} == {"lines", "talks"}


def test_ranks_without_anything_to_predict_take_part(lab):
    """Two ranks of a row each: of some steps one has no valid token, of others none has, and these are left out."""
    topology = Topology(fsdp=2, rows=2, accumulate=1)
    trial = evolve(topology.trial("fp64", shallow=True), steps=8, more=MIXED.replace("lines = 1", "lines = 0"))
    valid = valid_by_step(lab.plan(trial, topology.layout), trial.steps, rows=2)
    assert any(0 in step and sum(step) > 0 for step in valid)
    alone, outcome = lab.alone(trial), lab.run(trial, topology.layout, saves=False)
    assert gaps(outcome, alone).worst < TOLERANCE["fp64"]
    skipped = [event["step"] for event in events(outcome.directory, "skipped")]
    assert skipped == [number for number, step in enumerate(valid, start=1) if sum(step) == 0]


def valid_by_step(plan: Plan, steps: int, rows: int) -> list[list[int]]:
    """Valid tokens of every row of every step, of a plan that is trained on conversations alone."""
    with chdir(Path(plan.spec).parent):
        data = prepared_from(plan, data_nodes(plan)["talks"], tokenizer_of(plan))
    reader = data.parts["training"]
    count = {"talks": reader.rows.num_rows}
    order = [index for _, index, _ in rows_from(curriculum_of(plan, count), count, 0)]
    valid = [sum(int(mask[1:].sum()) for mask in reader.row(index).trained or []) for index in order]
    return [valid[step * rows : (step + 1) * rows] for step in range(steps)]
