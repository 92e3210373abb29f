"""`specs/reward_cpu.xtrain`: a reward model learns which of two answers it has not seen is right."""

import json
from pathlib import Path

import pytest
from forking import ForkedCommand
from projects import Project

SPEC = Path(__file__).parents[1] / "specs" / "reward_cpu.xtrain"
STEPS = 40

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_held_out_pairs_are_told_apart(tmp_path: Path):
    """In a third of its steps, of a quarter of the rows, and on one rank; guessing is right in half of them."""
    sets = (
        f"experiment.budget={STEPS} steps",
        "dataset.prefs.source=orders(count = 1300)",
        "launch.ranks_per_node=1",
        "batch.rows=4",
        "batch.micro=4",
    )
    given = [word for text in sets for word in ("--set", text)]
    command = ForkedCommand(["run", str(SPEC), "--ui", "plain", *given], tmp_path, Project(tmp_path).environment)
    out, err = command.communicate(timeout=500)
    assert command.returncode == 0, out + err
    (events,) = tmp_path.glob("runs/reward_cpu/*/events.jsonl")
    (found,) = (each for each in map(json.loads, events.read_text().splitlines()) if each["event"] == "eval")
    assert found["step"] == STEPS and found["metrics"]["rewards/accuracy"] > 0.9
    assert found["metrics"]["rewards/margin"] > 1 and abs(found["metrics"]["rewards/chosen"]) < 10
