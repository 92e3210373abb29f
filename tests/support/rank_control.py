"""Things that happen to ranks from outside while they train: signals, commands, files."""

import importlib
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rank_mutations import MUTATIONS, StepCall, mutation, rebind

from xtrain.runtime.nn.batch import Step
from xtrain.runtime.observe import watch as poller

# Where something may happen, by the name that tests give it.
PLACES = {"agree": "step.agree", "optimizer": "step.optimizer", "eval": "tick.eval", "save": "tick.checkpoint"}


@mutation
def happens(
    *,
    environment: dict[str, str] | None = None,
    full_disk: dict[str, Any] | None = None,
    **places: list[list[Any]],
) -> None:
    """By place a list of [after how many steps, rank, what, with what], done once, in front of what happens there.

    what: `signal` (its name), `command` (what its file holds, as JSON or as a text), `file` (a path), `hang` (seconds),
    `later` ([so many seconds after the run has paused, what, with what]), in the order in which they are given.
    full_disk: the mutation of that name as well.
    """
    if full_disk:
        MUTATIONS["full_disk"](**full_disk)
    os.environ.update(environment or {})
    poller.SECONDS = 0.05
    for place, acts in places.items():
        _put(PLACES[place], [tuple(act) for act in acts])


def _put(op: str, acts: list[tuple[Any, ...]]) -> None:
    rank, waiting = int(os.environ.get("RANK", "0")), list(acts)

    def change(call: StepCall, given: dict[str, Any]) -> StepCall:
        def run(step: Step) -> None:
            for act in [act for act in waiting if act[0] == step.index and act[1] == rank]:
                waiting.remove(act)
                _act(act[2], act[3], given)
            call(step)

        return run

    rebind(op, change)


def _act(what: str, value: Any, given: dict[str, Any]) -> None:
    if what == "signal":
        os.kill(os.getpid(), signal.Signals[value])
    elif what == "command":
        _command(value)
        if "agreement" in given:  # heard in this very step, however busy the machine is
            given["agreement"]._control.inbox.look()
    elif what == "hang":
        time.sleep(value)
    elif what == "file":
        Path(value).touch()
    else:
        _later.append(value)
        if len(_later) == 1:
            threading.Thread(target=_act_later, daemon=True).start()


_later: list[tuple[float, str, Any]] = []


def _act_later() -> None:
    events = Path(os.environ["XTRAIN_TEST_CONTROL"]).with_name("events.jsonl")
    while not _has_paused(events):
        time.sleep(0.02)
    begin = time.monotonic()
    for seconds, what, value in _later:
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        _act(what, value, {})


def _has_paused(events: Path) -> bool:
    lines = events.read_text().splitlines(True) if events.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    said = [event for event in map(json.loads, whole) if event["event"] == "control"]
    return any(event["command"] == "pause" and event["state"] == "done" for event in said)


def _command(content: Any) -> None:
    """Files are named by their number."""
    folder = Path(os.environ["XTRAIN_TEST_CONTROL"])
    folder.mkdir(exist_ok=True)
    count = _command.__dict__.setdefault("count", [0])
    count[0] += 1
    beside = folder / f".{count[0]}.tmp"
    beside.write_text(content if isinstance(content, str) else json.dumps(content))
    beside.replace(folder / f"{count[0]}.json")


@mutation
def unwritten(rank: int) -> None:
    """One rank cannot write what it has looked at closely: there is no room for it."""
    if int(os.environ.get("RANK", "0")) == rank:

        def write_whole(path: Path, write: Any) -> int:
            raise OSError(28, "No space left on device", str(path))

        actions = "components.actions.profile_torch", "components.actions.memory_snapshot_torch"
        for module in ("runtime.loop.memory_report", *actions):
            importlib.import_module(f"xtrain.{module}").write_whole = write_whole
