"""What a page of a finished run says of commands that answer questions about it."""

import json
from pathlib import Path

import pytest

from xtrain.tui.pages.figures import advice
from xtrain.tui.pages.inquiries import inquiries
from xtrain.tui.report.content import read_all


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two alerts of its loss and one of its disk, of which the first was cleared."""
    run = tmp_path / "runs/tiny/0a1b"
    run.mkdir(parents=True)
    start = {
        "event": "run_start",
        "step": 0,
        "time": 1.0,
        "attempt": 1,
        "run_id": "0a1b",
        "name": "tiny",
        "device": "cpu",
    }
    alert = {"event": "alert", "time": 2.0, "state": "raised", "message": "high", "ranks": []}
    events = [
        start,
        {**alert, "kind": "loss_spike", "step": 12},
        {**alert, "kind": "loss_spike", "state": "cleared", "step": 14},
        {**alert, "kind": "disk", "step": 15},
        {**alert, "kind": "nonfinite", "step": 30},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_alerts_have_the_command_that_explains_them(run: Path):
    lines = [*inquiries(read_all(run))]
    assert len(lines) == 2
    assert lines[0].startswith("loss_spike at step 12: which documents: xtrain blame ")
    assert lines[1].startswith("nonfinite at step 30: ") and lines[1].endswith("--step 30")


def test_answers_take_the_place_of_commands(run: Path):
    replays = run.parent.with_name("tiny-replays")
    (replays / "0a1b-77").mkdir(parents=True)
    found = {
        "step": 12,
        "metric": "loss",
        "note": "",
        "without": 2.2503280270754635,
        "documents": [{"dataset": "web", "document": 4}],
    }
    (replays / "blame-0a1b-12.json").write_text(json.dumps(found))
    (replays / "blame-0a1b-30.json").write_text(json.dumps({**found, "documents": [], "note": "not in the data"}))
    (replays / "0a1b-77/forgotten.json").write_text(json.dumps({"documents": {"web": {"4": None, "5": None}}}))
    (replays / "0a1b-78").mkdir()
    (replays / "0a1b-78/forgotten.json").write_text("[torn")
    lines = [*inquiries(read_all(run))]
    assert lines[0] == "loss_spike at step 12: caused by web:4; loss without: 2.2503"
    assert lines[1] == "nonfinite at step 30: no document is to blame: not in the data"
    assert lines[2].startswith("forgotten documents: 2 of web; retrained in ") and len(lines) == 3
    assert advice(read_all(run))[-3:] == lines
