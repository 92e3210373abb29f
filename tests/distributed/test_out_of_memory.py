"""A rank that runs out of memory writes down what it held, and its failure says where."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from forked_ranks import Mutation, RanksFailed
from projects import events
from topologies import FLAT, Topology

TWO = Topology(fsdp=2, accumulate=1, shared=FLAT)


def test_what_a_rank_had_in_memory_is_written_and_named(lab):
    plan = lab.plan(evolve(TWO.trial("fp32"), steps=4), TWO.layout)
    with pytest.raises(RanksFailed):
        lab.ranks.run(plan, lab.folder, name="memory", mutation=Mutation("need_memory", rank=1, step=3))
    directory = lab.folder / "jobs" / "memory"
    (failure,) = (event for event in events(directory, "failure") if event["rank"] == 1)
    first, said = failure["error"].split("\n")[0], failure["error"].split("\n")[-1]
    assert "can't allocate memory" in first and said.startswith("the rank held ") and "are planned at the peak" in said
    page = Path(said.rpartition(": ")[2])
    assert page == directory / "logs" / "memory-1" / "rank-00001.md", said
    assert said in (directory / "logs" / "1.log").read_text(), "also in the log of the rank"
    text = page.read_text()
    assert text.startswith("# Rank 1 out of memory in step 3, step.optimizer") and "float32 of 3 × 1000" in text
    found = json.loads(page.with_suffix(".json").read_text())
    memory = next(each.memory for each in plan.estimates.classes)
    assert found["held"]["parameters"] == memory.parameters and found["held"]["gradients"] == memory.gradients
    assert found["held"]["other"] >= 12_000 and found["process"]["resident_bytes"] > 10**7
    assert (found["step"], found["node"]) == (2, "step.optimizer") and found["planned"]["total"] == memory.total_bytes
    assert [path.name for path in sorted(page.parent.iterdir())] == ["rank-00001.json", "rank-00001.md"]
