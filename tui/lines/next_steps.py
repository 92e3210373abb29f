"""What to do once a run is over."""

import shlex
from pathlib import Path

from xtrain.records.end_status import EndStatus
from xtrain.records.step_events import LrSweepEvent
from xtrain.tui.event_text import failed
from xtrain.tui.state import RunState
from xtrain.tui.words import printable


def short_path(path: Path) -> str:
    """Return the path as typed here: relative to the working directory if it is below it. Does not access the file
    system, which may hang."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def command_of_model(state: RunState, directory: Path) -> tuple[str, str, str]:
    """Return what a command does with the trained model, and the command in two parts that may stand on two lines:
    generate text, or export a reward model."""
    folder = shlex.quote(short_path(directory))
    if state.start is not None and state.start.rewards:
        return "export the model", f"xtrain export {folder}", "--to FOLDER"
    return "generate text", f"xtrain generate {folder}", '--prompt "…"'


def going_on(state: RunState) -> str:
    """Return how to continue a run that stopped before its end or has no checkpoint to resume from."""
    sweep = next((each for each in reversed(state.ticks) if isinstance(each, LrSweepEvent)), None)
    if sweep is not None and not state.failures:
        rate = sweep.steepest or sweep.minimum_tenth
        return "the loss falls at no rate" if rate is None else f"train with --set optimizer.lr={rate:.2g}"
    if state.status == EndStatus.DONE and not _saved(state):
        if state.export is not None:
            return f"what was trained is in {printable(state.export.path)}"
        return "no checkpoint was saved, so the trained model is gone"
    code = next((failure.code for failure in state.failures if failure.code), None)
    if code:
        return f"xtrain explain {code}"
    checkpoint = state.checkpoint
    if checkpoint and checkpoint.step:
        return f"run the same command again to resume from step {checkpoint.step:,}"
    if state.start and state.start.resumed_step:
        return f"run the same command again to resume from step {state.start.resumed_step:,}"
    if state.start is None:  # only the run itself knows what earlier starts have left
        return "run the same command again; it resumes from the last checkpoint, if there is one"
    return "run the same command again; no checkpoint was saved, so it starts from scratch"


def more_of_it(state: RunState) -> str:
    """Return how to extend a run that had nothing left to do; empty for others."""
    if state.status != EndStatus.COMPLETE:
        return ""
    return "a larger experiment.budget extends the run; --set checkpoint.resume=false starts from scratch"


def outcome(state: RunState) -> str:
    """Return what the status leaves open about how the run ended; may be empty."""
    if state.failures:
        first = state.failures[0]
        if state.under_way is not None:
            return f"{failed(first)} in {state.under_way.node}"
        return failed(first) if first.step is None else f"{failed(first)} at step {first.step:,}"
    if state.end is None:
        return "nothing was recorded" if state.status == "waiting" else "the run ended without reporting a reason"
    if state.status == EndStatus.COMPLETE:
        return "nothing was left to do"
    return f"by {state.signal}" if state.signal and state.status in (EndStatus.STOPPED, EndStatus.INTERRUPTED) else ""


def wants_logs(state: RunState) -> bool:
    """Return True if the logs are the next place to look."""
    return state.end is None or state.status == EndStatus.FAILED


def succeeded(state: RunState) -> bool:
    """Return True if the run directory has a trained model at the end."""
    return state.status == EndStatus.COMPLETE or (state.status == EndStatus.DONE and _saved(state))


def _saved(state: RunState) -> bool:
    resumed = state.start is not None and state.start.resumed_step is not None
    return state.checkpoint is not None or state.model is not None or resumed
