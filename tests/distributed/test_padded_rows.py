"""Rows that end at the next multiple after their longest document teach what whole rows teach, in every layout."""

import pytest
from attrs import evolve
from rank_counts import stray_counts, whole_counts
from topologies import ZBV, Topology
from trials import TOLERANCE, Laboratory, gaps

# Rows of one document, and of several, of which some are padded inside too.
SINGLE, SEVERAL = "pack(single, align = 4)", "pack(sequential, align = 4)"
NOISE = ("batch.neftune=8",)
ROWS = [
    (Topology(accumulate=4, note="four microbatches"), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(pp=2), SINGLE, NOISE, ()),
    (Topology(ring=2), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(pp=3, sets=("model.layers=3",), shared=("model.layers=3",)), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(accumulate=2, sets=("batch.workers=1",), note="reading process"), SEVERAL, (), pytest.mark.matrix),
    (Topology(fsdp=2), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(fsdp=2, model="moe"), SINGLE, (), pytest.mark.matrix),
    (Topology(fsdp=2, ep=2, model="moe"), SINGLE, (), pytest.mark.matrix),
    (Topology(tp=2), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(tp=2, model="moe"), SINGLE, (), pytest.mark.matrix),
    (Topology(ulysses=2), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(ring=2), SEVERAL, NOISE, pytest.mark.matrix),
    (Topology(pp=2, ring=2), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(pp=2, sets=ZBV, note="zbv"), SINGLE, NOISE, pytest.mark.matrix),
    (Topology(pp=2, fsdp=2, ulysses=2), SINGLE, (), pytest.mark.matrix),
    (Topology(replicate=2, sets=("parallel.stack=ddp",), note="ddp"), SINGLE, (), pytest.mark.matrix),
    (Topology(accumulate=4, model="gemma3", note="windows"), SINGLE, ("model.full_layers=[1]",), pytest.mark.matrix),
]


@pytest.mark.parametrize(
    ("topology", "packing", "more"),
    [pytest.param(row, packing, more, id=f"{row.name}, {packing}", marks=marks) for row, packing, more, marks in ROWS],
)
def test_shorter_rows_teach_what_whole_rows_teach(lab: Laboratory, topology, packing, more):
    trial = topology.trial("fp64", shallow=True)
    chain = f"collate=to_tensor -> flatten -> shift_tokens -> {packing}"
    trial = evolve(trial, settings=(*trial.settings, *more, chain), align=1)
    layout = (*topology.layout, "batch.pad_to=8")
    short = lab.run(trial, layout, saves=False)
    assert not gaps(short, lab.alone(trial)).beyond(TOLERANCE["fp64"])
    plan = lab.plan(trial, layout)
    assert topology.note == "windows" or not stray_counts(plan, short.directory), "pairs are not counted by window"
    positions = [counts["positions"] for counts in whole_counts(plan, short.directory).values()]
    assert max(positions) < trial.rows * 64 if packing is SINGLE else all(n % 8 == 0 for n in positions)
