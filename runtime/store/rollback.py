"""Rollback of a run to an earlier checkpoint: its file, its completion, and the data state to continue with."""

import json
from pathlib import Path
from typing import Any, Final

from attrs import asdict, fields, frozen

from xtrain.regular_files import read_json
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ResumeRefused
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, Publisher

FILE: Final = "rollback.json"
_KEYS: Final = {"newer": "undone"}  # fields with another key in the file


@frozen(kw_only=True)
class RollbackState:
    """Rollback of a run and the state that it continues with.

    checkpoint, seal: the checkpoint it went back to. from_step: the step it came from. loader: the data state to
    continue with. nonfinite: the counters to continue with. newer: name → seal of the newer checkpoints.
    """

    checkpoint: str
    seal: str
    from_step: int
    loader: dict[str, Any]
    nonfinite: dict[str, Any]
    newer: dict[str, str]

    def write(self, directory: Path) -> None:
        """Write the rollback durably, replacing an earlier one. Raises OSError."""
        content = {_KEYS.get(name, name): value for name, value in asdict(self).items()}
        durable.write(directory / FILE, json.dumps(content, indent=1))

    def finish(self, directory: Path) -> None:
        """Remove the newer checkpoints, except the best one so far. Raises OSError."""
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
    """Return the last rollback of a run; None without one. Raises ResumeRefused if the file is damaged."""
    try:
        content = read_json(directory / FILE)
        return RollbackState(
            **{
                attribute.name: content.pop(_KEYS.get(attribute.name, attribute.name))
                for attribute in fields(RollbackState)
            },
            **content,
        )
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ResumeRefused(
            f"{directory / FILE} is damaged. It lists rows to skip after a rollback; remove it to train on these rows "
            "again"
        ) from error


def finish_rollback(directory: Path) -> None:
    """Finish the rollback of a run that was killed during it; no process may be saving there. Raises OSError."""
    rollback = read_rollback(directory)
    if rollback is not None:
        rollback.finish(directory)


def onward(entry: CheckpointEntry) -> dict[str, Any]:
    """Return a checkpoint's description, with the data state to continue with after a rollback."""
    state = entry.state()
    rollback = read_rollback(entry.path.parent.parent)
    if rollback is None:
        return state
    if (rollback.checkpoint, rollback.seal) == (entry.name, seal_of(entry)):
        return {**state, "loader": rollback.loader, "nonfinite": rollback.nonfinite}
    return state


def seal_of(entry: CheckpointEntry) -> str:
    """Return the seal that distinguishes checkpoints of one name; empty if it cannot be read."""
    try:
        return str(entry.state().get("seal", ""))
    except (OSError, ValueError):
        return ""
