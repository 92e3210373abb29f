"""What to do once a run is over."""

import shlex
from pathlib import Path

from .state import RunState

GENERATE = '--prompt "…"'


def short_path(path: Path) -> str:
    """The path as it would be typed here: relative to the working directory when that is below it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def generate_command(directory: Path) -> tuple[str, str]:
    """The command that lets the trained model write, in two parts that may stand on two lines."""
    return f"xtrain generate {shlex.quote(short_path(directory))}", GENERATE


def going_on(state: RunState) -> str:
    """How a run that stopped before its end goes on."""
    checkpoint = state.checkpoint
    if checkpoint and checkpoint.step:
        return f"run the same command again to go on from step {checkpoint.step:,}"
    if state.start and state.start.resumed_step:
        return f"run the same command again to go on from step {state.start.resumed_step:,}"
    return "run the same command again; no checkpoint was saved, so it begins anew"


def outcome(state: RunState) -> str:
    """How the run ended, in a few words."""
    if state.end is None:
        if state.status == "waiting":
            return "nothing was recorded"
        return "a rank failed" if state.failures else "ended without saying why"
    return {
        "done": "every step is done",
        "complete": "nothing was left to do",
        "stopped": f"stopped early by {state.signal}" if state.signal else "stopped early",
        "interrupted": "interrupted",
        "failed": "training failed",
    }.get(state.end.status, state.end.status)


def wants_logs(state: RunState) -> bool:
    """Whether the logs are where to look next."""
    return state.end is None or state.status == "failed"


def succeeded(state: RunState) -> bool:
    """Whether there is a trained model at the end of it."""
    return state.status in ("done", "complete")
