"""How far a run has come, put back from what a checkpoint keeps."""

from xtrain.runtime.base.state import Progress


def test_what_was_measured_after_the_step_of_a_checkpoint_is_known_again() -> None:
    state = {**Progress(step=20, tokens=640).counters(), "metrics": {"eval/web/loss": 2.5}}
    progress = Progress()
    progress.take(state)
    assert (progress.step, progress.tokens) == (20, 640)
    assert progress.measured == {"eval/web/loss": (20, 2.5)}


def test_what_was_measured_behind_a_checkpoint_is_not() -> None:
    progress = Progress(step=30, measured={"eval/web/loss": (30, 1.0), "eval/code/loss": (10, 3.0)})
    progress.take({**Progress(step=20).counters(), "metrics": {}})
    assert progress.measured == {"eval/code/loss": (10, 3.0)}
