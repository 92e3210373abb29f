"""The spec that learns a preference does so: on pairs that it has not seen, far from chance."""

from pathlib import Path

import pytest
from forking import ForkedCommand
from projects import Project, events, records

SPEC = Path(__file__).parents[1] / "specs" / "dpo_cpu.xtrain"
SHORT = (
    "experiment.budget=40 steps",
    "dataset.pairs.source=choices(count = 1500)",
    "dataset.pairs.holdout=10%",
    "batch.rows=5",
    "batch.micro=5",
    "launch.ranks_per_node=1",
)

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
@pytest.mark.parametrize(("sets", "least"), [(SHORT, 0.75), ((), 0.9)])
def test_held_out_pairs_are_told_apart(tmp_path: Path, sets: tuple[str, ...], least: float):
    given = [word for text in sets for word in ("--set", text)]
    command = ForkedCommand(["run", str(SPEC), "--ui", "plain", *given], tmp_path, Project(tmp_path).environment)
    out, err = command.communicate(timeout=800)
    assert command.returncode == 0, out + err
    (run,) = (tmp_path / "runs" / "dpo_cpu").iterdir()
    *_, found = events(run, "eval")
    assert found["metrics"]["rewards/accuracy"] > least and found["objective"] < 0.6
    first, *_, last = records(run, "metrics")
    assert last["rewards/accuracy"] > least and last["rewards/margin"] > first["rewards/margin"]
    *_, told = events(run, "reference")  # before it some of a slow machine
    assert told["computed"] and told["seconds"] > 0
