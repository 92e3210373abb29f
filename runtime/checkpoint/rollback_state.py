"""`rollback.json`: from which checkpoint a run goes on that has gone back, and where in the data.

The checkpoint itself is not touched: it says where the data was when it was saved, and the rows of all steps between it
and the failure are to be left out. Until the next save this file is all that knows. It speaks of a checkpoint by its
seal, so that one which is saved anew at the same step is none of its business.
"""

import json
from pathlib import Path
from typing import Any, Final

from attrs import asdict, fields, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.checkpoint.layout import CheckpointEntry, CheckpointFolder
from xtrain.runtime.checkpoint.publish import Publisher
from xtrain.runtime.errors import ResumeRefused
from xtrain.runtime.files import durable

FILE: Final = "rollback.json"
_KEYS: Final = {"newer": "undone"}  # of fields whose key in the file is another


@frozen(kw_only=True)
class RollbackState:
    """What was undone, and how it goes on.

    checkpoint, seal: from which. from_step: how many steps there were. loader: the state of the data that the run goes
    on with. nonfinite: the counters it goes on with. newer: name → seal of the checkpoints that were newer.
    """

    checkpoint: str
    seal: str
    from_step: int
    loader: dict[str, Any]
    nonfinite: dict[str, Any]
    newer: dict[str, str]

    def write(self, directory: Path) -> None:
        """Make it last, in place of an earlier one. Raises OSError."""
        content = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        durable.write(directory / FILE, json.dumps(content, indent=1))

    def finish(self, directory: Path) -> None:
        """Take the names from what was undone; the best one so far keeps it. Raises OSError."""
        folder = CheckpointFolder(directory / "checkpoints")
        publisher = Publisher(folder)
        discarded = [entry for entry in folder.published() if self.newer.get(entry.name) == seal_of(entry)]
        named = folder.named()
        if named in {entry.name for entry in discarded}:
            publisher.point("latest", self.checkpoint)
        for entry in discarded:
            if "best" not in folder.protected().get(entry.name, ()):
                publisher.remove(entry.path)


def read_rollback(directory: Path) -> RollbackState | None:
    """The last one of a run; None where it has never gone back. Raises ResumeRefused where it is damaged."""
    try:
        content = read_json(directory / FILE)
        return RollbackState(
            **{each.name: content.pop(_KEYS.get(each.name, each.name)) for each in fields(RollbackState)}, **content
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ResumeRefused(
            f"{directory / FILE} is damaged. It lists rows to skip after a rollback; remove it to train on these rows "
            "again"
        ) from error


def finish_rollback(directory: Path) -> None:
    """Do what a run that was killed while it went back has left to do; nobody may be saving there. Raises OSError."""
    rollback = read_rollback(directory)
    if rollback is not None:
        rollback.finish(directory)


def onward(entry: CheckpointEntry) -> dict[str, Any]:
    """What a checkpoint says of itself, with the place in the data where a run goes on that has gone back to it."""
    state = entry.state()
    rollback = read_rollback(entry.path.parent.parent)
    if rollback is None:
        return state
    if (rollback.checkpoint, rollback.seal) == (entry.name, seal_of(entry)):
        return {**state, "loader": rollback.loader, "nonfinite": rollback.nonfinite}
    return state


def seal_of(entry: CheckpointEntry) -> str:
    """What tells a checkpoint from another of its name; empty where it cannot be read."""
    try:
        return str(entry.state().get("seal", ""))
    except (OSError, ValueError):
        return ""
