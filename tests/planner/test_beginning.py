"""Where a run begins that goes on from another one, as far as the plan can tell."""

from pathlib import Path

import pytest

from xtrain.planner.rules.schedule import begins_at


@pytest.fixture
def run(tmp_path) -> Path:
    """A run whose latest checkpoint is of step 34, and the best of step 20."""
    folder = tmp_path / "a" / "checkpoints"
    for step in (20, 34):
        (folder / f"ckpt-s{step:012d}").mkdir(parents=True)
    (folder / "latest").write_text("ckpt-s000000000034\n")
    (folder / "latest.pt").write_bytes(b"tensors")
    (folder / "ckpt-s000000000020" / "state.pt").write_bytes(b"tensors")
    (folder / "best").write_text("ckpt-s000000000020\n")
    return tmp_path / "a"


@pytest.mark.parametrize(("path", "step"), [
    ("", 34),
    ("checkpoints", 34),
    ("checkpoints/latest", 34),
    ("checkpoints/latest.pt", 34),
    ("checkpoints/best", 20),
    ("checkpoints/ckpt-s000000000020", 20),
    ("checkpoints/ckpt-s000000000020/state.pt", 20),
    ("checkpoints/ckpt-s000000000099", None),
    ("nothing", None),
    ("x" * 5000, None),
])  # fmt: skip
def test_the_step_of_a_state_by_its_name(run, path, step):
    beginning = begins_at(run / path)
    assert (beginning and beginning.step) == step


def test_a_damaged_pointer_says_nothing(run):
    (run / "checkpoints" / "latest").write_bytes(b"\xff")
    assert begins_at(run) is None


@pytest.mark.parametrize(("experiment", "launch", "words"), [
    ("budget = 5 steps", "", "is a checkpoint of step 34 and the budget ends with step 5"),
    ("budget = 34 steps", "", "nothing is left to train"),
    ("budget = 35 steps", "", ""),
    ("budget = 50 steps", "launch { stop_at = 34 steps }", "stop_at is step 34"),
    ("budget = 1 epochs", "", ""),
])  # fmt: skip
def test_a_run_that_begins_where_it_is_to_end_is_warned_of(compiled, run, experiment, launch, words):
    found = compiled(
        experiment=f"experiment tiny {{ {experiment} }}",
        checkpoint=f'checkpoint {{ from = "{run}" }}',
        launch=launch,
        every="every 1 step log\nevery 5 steps checkpoint",
    )
    said = [each for each in found.diagnostics if each.code == "W608"]
    assert found.plan is not None and len(said) == bool(words)
    assert all(words in each.message for each in said)
