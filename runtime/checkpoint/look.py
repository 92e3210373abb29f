"""Checkpoints from outside a run: which there are below a path, what they say of themselves, what could go."""

from pathlib import Path
from typing import Any

from attrs import frozen

from xtrain.runtime.checkpoint.layout import CheckpointEntry, CheckpointFolder, entry_of, size_bytes
from xtrain.runtime.checkpoint.sidecar import total_bytes
from xtrain.runtime.files.locks import hold_for_reading


@frozen(kw_only=True)
class SeenCheckpoint:
    """A checkpoint as it is listed. flaws: by sizes alone unless content was read; pointers: that name it."""

    entry: CheckpointEntry
    run: str
    pointers: tuple[str, ...]
    flaws: tuple[str, ...]
    state: dict[str, Any]
    bytes: int

    def json(self) -> dict[str, Any]:
        """For programs; what the checkpoint says of itself without the long lists of tensors."""
        said = (
            "step",
            "tokens",
            "epoch",
            "epoch_ended",
            "metrics",
            "time",
            "plan_id",
            "config_id",
            "world_size",
            "begun_from",
            "made_by",
        )
        return {
            "name": self.entry.name,
            "path": str(self.entry.path),
            "run": self.run,
            "kind": "full" if self.entry.is_full else "weights",
            "bytes": self.bytes,
            "pointers": list(self.pointers),
            "sound": not self.flaws,
            "flaws": list(self.flaws),
            **{name: self.state.get(name) for name in said},
            "step": self.entry.step,
        }


def folders(path: Path) -> list[CheckpointFolder]:
    """Those of a run, of all runs of a lineage or below a root, or the one that `path` is; empty if there are none."""
    for found in (
        [path],
        [path / "checkpoints"],
        *(sorted(path.glob(p)) for p in ("*/checkpoints", "*/*/checkpoints")),
    ):
        known = [CheckpointFolder(each) for each in found if each.is_dir()]
        known = [each for each in known if each.published() or each.models() or each.remains()]
        if known:
            return known
    return []


def below(path: Path, *, content: bool = False) -> list[SeenCheckpoint]:
    """All checkpoints below a path, by run and step; a checkpoint itself is the only one. content: read all of each."""
    if entry := entry_of(path):
        return [_seen(entry, CheckpointFolder(path.parent), content)]
    found = []
    for folder in folders(path):
        for entry in sorted((*folder.published(), *folder.models()), key=lambda each: (each.step, not each.is_full)):
            if (held := hold_for_reading(entry.path)) is not None:  # else the run has removed it
                found.append(_seen(entry, folder, content))
                held.close()
    return found


def _seen(entry: CheckpointEntry, folder: CheckpointFolder, content: bool) -> SeenCheckpoint:
    try:
        state = entry.state()
        size = total_bytes(state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        state, size = {}, size_bytes(entry.path)
    return SeenCheckpoint(
        entry=entry,
        run=str(folder.root.parent if folder.root.name == "checkpoints" else folder.root),
        pointers=folder.protected().get(entry.name, ()),
        flaws=tuple(entry.flaws(content=content)),
        state=state,
        bytes=size,
    )


def removable(folder: CheckpointFolder, *, keep: int | None, damaged: bool) -> list[tuple[Path, str]]:
    """What could go and why.

    Remains of saves that were cut off; what `CheckpointFolder.old` says (None: nothing of it); damaged ones, if asked.
    """
    found = [(path, "left of a save or removal that was cut off") for path in folder.remains()]
    if damaged:
        known = (*folder.published(), *folder.models())
        found += [(entry.path, flaws[0]) for entry in known if (flaws := entry.flaws())]
    if keep is not None:
        found += [(entry.path, f"older than the newest {keep}") for entry in folder.old(keep)]
    return found
