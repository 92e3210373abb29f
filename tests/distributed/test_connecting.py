"""Ranks of large worlds connect where they first need each other; here four ranks do that, as 128 and more would."""

import pytest
from topologies import BY_NAME
from trials import TOLERANCE, gaps

from xtrain.planner.graph import graph


@pytest.mark.matrix
def test_ranks_that_connect_as_they_need_each_other_compute_the_same(lab, monkeypatch):
    topology = BY_NAME["pp 2 · fsdp 2, ramp (moe)"]
    trial = topology.trial("fp64", shallow=True)
    alone = lab.alone(trial)
    monkeypatch.setattr(graph, "LAZY_FROM", 2)
    assert lab.plan(trial, topology.layout).node("setup.bootstrap").args["lazily"]
    outcome = lab.run(trial, topology.layout, saves=True)  # whose files are written over a group of their own
    assert not gaps(outcome, alone).beyond(TOLERANCE["fp64"])
