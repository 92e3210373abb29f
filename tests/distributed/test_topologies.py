"""Every layout of the table computes what one process computes: losses, gradient norms, all tensors.

Losses and norms of two steps (of three in the whole table), the loss of an evaluation, parameters and moments after
them, where experts are their loads. Every rank holds what the plan foresees, and what is said of tokens and operations
is what a count of all positions gives. The table is tests/support/topologies.py.
"""

from itertools import combinations

import numpy as np
import pytest
from attrs import evolve
from projects import worst
from rank_counts import stray_counts
from topologies import BY_DEFAULT, BY_NAME, CASES, SCHEDULES, TOPOLOGIES, Topology
from trials import TOLERANCE, Laboratory, gaps

from xtrain.dsl.schema.parallel import Pp


def check(lab: Laboratory, topology: Topology, params: str, *, whole: bool) -> None:
    """whole: three steps of four layers, and checkpoints are written; else two of two are enough."""
    trial = topology.trial(params, shallow=not whole)
    plan, outcome, _ = lab.same_as_one_process(trial, topology.layout, saves=whole)
    assert plan.mesh.world_size == topology.world
    assert not stray_counts(plan, outcome.directory)


def cases(chosen: list[tuple[Topology, str]]):
    return pytest.mark.parametrize(
        ("topology", "params"), chosen, ids=[f"{topology.name} {params}" for topology, params in chosen]
    )


@cases([case for case in CASES if case[0].is_ordinary(case[1])])
def test_a_layout_computes_what_one_process_computes(lab, topology, params):
    check(lab, topology, params, whole=False)


@pytest.mark.matrix
@cases(list(CASES))
def test_the_whole_table(lab, topology, params):
    check(lab, topology, params, whole=True)


def pairs(topologies: list[Topology]) -> set[tuple[str, str]]:
    """Of axes with one another, with models and with how many microbatches a step has; of models with the latter."""
    found: set[tuple[str, str]] = set()
    for topology in topologies:
        many = "several" if topology.microbatches > 1 else "one"
        found |= {*combinations(topology.axes, 2), (topology.model, many)}
        found |= {(axis, what) for axis in topology.axes for what in (topology.model, many)}
    return found


def test_the_rows_that_run_by_default_cover_every_pair_of_the_table():
    rows = [BY_NAME[name] for name in BY_DEFAULT]
    assert not pairs(list(TOPOLOGIES)) - pairs(rows)
    ordinary = {text for row in rows for text in row.sets}
    default = f"parallel.pp.schedule={Pp().schedule}"  # which no row has to ask for
    assert {text for texts in SCHEDULES.values() for text in texts} - ordinary <= {default}


def test_one_process_clips_where_it_should_and_its_parameters_move(lab):
    """Rows would prove little if clipping never happened, or always, or if two steps changed next to nothing."""
    clipped, free = (lab.alone(Topology(clip=clip).trial("fp64", shallow=True)) for clip in ("0.5", "1e3"))
    assert len(clipped.curve) == len(free.curve) > 0
    assert all(norm > 0.5 for _, _, norm in clipped.curve)
    assert all(norm < 1e3 for _, _, norm in free.curve)
    still = lab.run(Topology(shared=("optimizer.lr=1e-30",)).trial("fp64", shallow=True), (), alone=True, saves=False)
    parameters = {name: value for name, value in clipped.tensors.items() if not name.startswith("optimizer.")}
    assert parameters
    for name, value in parameters.items():
        assert abs(value - still.tensors[name]).max() > 1e-3 * abs(value).max(), name


def test_bf16_compute_follows_fp32_and_is_the_same_on_two_ranks(lab):
    exact = lab.alone(Topology().trial("fp32", shallow=True))
    trial = Topology(shared=("precision.compute=bf16",)).trial("fp32", shallow=True)
    one, two = lab.alone(trial), lab.run(trial, Topology(fsdp=2).layout, saves=False)
    assert 1e-6 < worst(one.curve, exact.curve)[0] < 5e-3, "it computes in bf16"
    assert worst(two.curve, one.curve)[0] < 5e-3
    assert {value.dtype for value in one.tensors.values()} == {np.dtype("float32")}


@pytest.mark.slow
def test_partial_evaluations_are_the_same_in_every_layout(lab):
    """They take the same first rows, however many ranks share them."""
    more = "every 2 steps eval lines { batches = 1 }"
    trial = evolve(Topology().trial("fp64", shallow=True), steps=4, more=more)
    alone = lab.alone(trial)
    assert [e["step"] for e in alone.evals] == [2, 4, 4]
    assert alone.evals[0]["tokens"] < alone.evals[2]["tokens"]
    for topology in (Topology(fsdp=2), Topology(pp=2)):
        found = gaps(lab.run(trial, topology.layout, saves=False), alone)  # also that they have seen as many tokens
        assert found.eval < TOLERANCE["fp64"]


def test_rows_are_unevenly_filled(lab):
    """The table would prove nothing of the normalisation if all ranks had as many valid tokens."""
    from xtrain.components.packings.sequential_run import pack as pack_sequential
    from xtrain.components.tokenizers.bytes_run import ByteTokenizer
    from xtrain.runtime.feed.documents import DocumentEncoder
    from xtrain.runtime.feed.prepared import build_store
    from xtrain.runtime.feed.sources.source import open_source

    lab.alone(Topology().trial("fp64", shallow=True))
    reads = {"form": "text", "text": "text"}
    source = open_source("jsonl", patterns=("data.jsonl",), reads=reads, base=lab.folder)
    cache = lab.folder / "runs" / "cache" / "tokens"
    there = set(cache.iterdir())
    lengths = build_store(source, DocumentEncoder(ByteTokenizer(), reads), cache).lengths()
    assert set(cache.iterdir()) == there, "this is the store of the run"
    rows = pack_sequential(lengths, 64, "split")
    *_, positions = rows.segments(lengths)
    bounds = list(zip(rows.row_offsets[:-1], rows.row_offsets[1:], strict=True))
    filled = [int(positions[a:b].sum()) for a, b in bounds]
    documents = [b - a for a, b in bounds]
    assert len(set(filled)) > 10
    assert sum(count > 1 for count in documents) > len(documents) / 2
    assert len(rows.row_offsets) > 3 * 12, "no row is seen twice"
