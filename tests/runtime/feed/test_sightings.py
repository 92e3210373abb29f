"""Steps in which documents are trained on, and rows without documents, against the loader's own rows."""

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from projects import TINY, Project

from xtrain.plan.plan import Plan
from xtrain.planner.load import plan_from_text
from xtrain.runtime.feed.dataset_view import data_nodes, tokenizer_of
from xtrain.runtime.feed.loader import RowReader
from xtrain.runtime.feed.prepared import PreparedDataset, prepared_from
from xtrain.runtime.feed.sightings import Stretch, rows_of

MIXED = """
dataset noise { source = synthetic(documents = 40, length = 60, seed = 5) }
mixture { lines = 0.6, noise = 0.4 }
phase drill { from = 5 steps, mix = { noise: 2 } }
"""
PLAIN = ""
RAMP = "batch { ramp_from = 4, ramp = 6 steps }"
EPOCHS = """
dataset noise { source = synthetic(documents = 9, length = 40, seed = 5) }
mixture { lines = 1 epoch, noise = 3 epochs }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(more: str, *sets: str, steps: int = 90) -> Plan:
    plan = plan_from_text(TINY.format(steps=steps, tied="true", more=more), "tiny.xtrain", sets).plan
    assert plan is not None
    return plan


def begun(plan: Plan) -> Stretch:
    data = {name: prepared_from(plan, node, tokenizer_of(plan), jobs=1) for name, node in data_nodes(plan).items()}
    return Stretch.begin(plan, data)


def taken(stretch: Stretch, name: str) -> list[tuple[int, int, int]]:
    """(step, row, document) as the steps take their rows."""
    number = stretch.curriculum.datasets.index(name)
    dataset = stretch.datasets[number]
    found = []
    for step in range(stretch.first, stretch.end):
        numbers, cursors = stretch.curriculum.rows(step)
        for cursor in cursors[numbers == number].tolist():
            row = dataset.order.row(cursor)[1]
            packed = dataset.reader.rows
            held = packed.document[packed.row_offsets[row] : packed.row_offsets[row + 1]]
            found += [(step + 1, row, document) for document in sorted(set(dataset.reader.documents[held].tolist()))]
    return sorted(found)


def said(stretch: Stretch, name: str, documents: np.ndarray) -> list[tuple[int, int, int]]:
    parts = stretch.sightings(name, documents)
    return sorted(
        (step, row, document)
        for part in parts
        for step, row, document in zip(part.steps.tolist(), part.rows.tolist(), part.documents.tolist(), strict=True)
    )


@pytest.mark.parametrize("more", [PLAIN, MIXED, RAMP, EPOCHS], ids=["plain", "mixed", "ramp", "epochs"])
def test_every_sighting_is_a_row_that_a_step_takes(folder: Path, more: str):
    stretch = begun(planned(more))
    for name in stretch.curriculum.datasets:
        every = np.arange(stretch.prepared[name].store.num_documents)
        assert said(stretch, name, every) == taken(stretch, name)
        some = every[::7]
        assert said(stretch, name, some) == [one for one in taken(stretch, name) if one[2] in some]
        one = evolve(stretch, first=30, end=41)
        assert said(one, name, every) == taken(one, name)


def test_a_resume_with_another_batch_and_mixture_goes_on_with_the_next_rows(folder: Path):
    before = begun(planned(PLAIN))
    after = begun(planned(MIXED, "batch.rows=4")).resumed(before, 20, 20)
    first = taken(evolve(before, end=20), "lines")
    every = np.arange(before.prepared["lines"].store.num_documents)
    assert said(evolve(before, end=20), "lines", every) == first
    assert said(after, "lines", every) == taken(after, "lines")
    # The rows follow each other: no row of the first epoch is repeated before the epoch ends.
    rows = [row for _, row in dict.fromkeys((step, row) for step, row, _ in first)]
    then = [row for _, row in dict.fromkeys((step, row) for step, row, _ in taken(evolve(after, end=30), "lines"))]
    assert len(set(rows + then)) == len(rows) + len(then) <= before.datasets[0].order.num_rows


def without(data: PreparedDataset, removed: list[int]) -> RowReader:
    reader = data.parts["training"]
    return evolve(reader, rows=reader.without(np.array(removed)))


@pytest.mark.parametrize("method", ["sequential", "best_fit"])
def test_removed_documents_leave_all_others_where_they_are(folder: Path, method: str):
    chain = f"collate = to_tensor -> flatten -> shift_tokens -> pack({method})"
    data = begun(planned(chain)).prepared["lines"]
    reader = data.parts["training"]
    removed = [int(document) for document in data.train_documents[3::11]]
    less = without(data, removed)
    assert less.rows.num_rows == reader.rows.num_rows
    assert less.fingerprint == reader.fingerprint  # positions in the rows stay valid
    assert less.rows.fingerprint() != reader.rows.fingerprint()
    lost = 0
    for row in range(reader.rows.num_rows):
        held = reader.documents[reader.rows.document[reader.rows.row_offsets[row] : reader.rows.row_offsets[row + 1]]]
        own = [
            tokens for document, tokens in zip(held, reader.row(row).segments, strict=True) if document not in removed
        ]
        left = less.row(row).segments
        assert len(own) == len(left) and all(map(np.array_equal, own, left))
        lost += sum(len(tokens) - 1 for tokens in reader.row(row).segments) - sum(len(tokens) - 1 for tokens in own)
    assert reader.rows.num_positions - less.rows.num_positions == lost > 0
    assert not len(rows_of(less, np.array(removed))[0])
