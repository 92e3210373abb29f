"""Folder of checkpoints as its writer changes it: begin, publish, point, retain and roll back."""

import json
from pathlib import Path
from typing import Any, Final

from attrs import asdict, fields, frozen

from xtrain.plan.checkpoints import POINTERS, STATE, Pointer
from xtrain.regular_files import read_json
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import ResumeRefused
from xtrain.runtime.base.locks import unless_read
from xtrain.runtime.store.checkpoints import LATE_METRICS, TENSORS, CheckpointEntry, CheckpointFolder, content_seal

FORMAT: Final = 2


@frozen
class Publisher:
    """Writer of a run's folder of checkpoints; one process at a time. All methods raise OSError.

    best: the metric that `best` follows, the least value or the highest if `highest`; None without one.
    """

    folder: CheckpointFolder
    best: str | None = None
    highest: bool = False

    def sweep(self) -> None:
        """Remove leftovers of interrupted saves and removals; no process may be saving here."""
        for path in self.folder.remains():
            durable.clear(path) if path.is_dir() else durable.forget(path)
        for pointer in POINTERS:
            if not self._follows(pointer):
                self._follow(pointer)

    def begin(self, final: Path) -> Path:
        """Create an empty folder to write `final` into; leftovers of an earlier attempt are removed."""
        partial = partial_of(final)
        if partial.exists():
            durable.clear(partial)
        partial.mkdir(parents=True)
        return partial

    def abandon(self, final: Path) -> None:
        """Remove a partly written checkpoint."""
        partial = partial_of(final)
        if partial.exists():
            durable.clear(partial)

    def publish(
        self, final: Path, state: dict[str, Any], checksums: dict[str, str], pointers: tuple[Pointer, ...]
    ) -> None:
        """Seal the written files, rename the folder to `final` and set pointers, in that order.

        Every file must be synced already and be listed in `checksums`.
        """
        partial = partial_of(final)
        write_sidecar(partial, state, checksums)  # also syncs the folder
        aside = self._make_way(final) if final.exists() else None
        durable.rename(partial, final)
        for pointer in pointers:
            self.point(pointer, final.name)
        if aside is not None:
            durable.clear(aside)

    def point(self, pointer: Pointer, name: str) -> None:
        """Set a pointer, then its alias if the checkpoint is a single file."""
        durable.write(self.folder.root / pointer, f"{name}\n")
        self._follow(pointer)

    def _follow(self, pointer: Pointer) -> None:
        """Bring an alias in line with its pointer."""
        alias, file = self.folder.alias(pointer), self._file(pointer)
        if file is not None:
            durable.name_also(file, alias)
        elif alias.exists():
            durable.forget(alias)

    def _follows(self, pointer: Pointer) -> bool:
        alias, file = self.folder.alias(pointer), self._file(pointer)
        return durable.means(alias, file) if file is not None else not alias.exists()

    def _file(self, pointer: Pointer) -> Path | None:
        """Return the single file of a pointer's target; None without one."""
        file = self.folder.root / self.folder.named(pointer) / TENSORS
        return file if file.is_file() else None

    def retain(self, keep: int | None, *, begun: CheckpointEntry | None = None) -> list[Path]:
        """Remove the checkpoints of `CheckpointFolder.old` (None: no full checkpoints), and weights that `model` no
        longer names.

        begun: the checkpoint that the run resumes from, which is kept. A checkpoint that another process reads, for
        example to export it, is left for the next call. Returns the removed paths.
        """
        old = self.folder.old(keep, begun=begun) if keep is not None else []
        old = [entry for entry in old if begun is None or entry.name != begun.name]
        if model := self.folder.named("model"):
            old += [entry for entry in self.folder.models() if entry.name != model]
        removed = []
        for entry in old:
            with unless_read(entry.path) as unread:
                if unread:
                    self.remove(entry.path)
                    removed.append(entry.path)
        return removed

    def remove(self, path: Path) -> None:
        durable.clear(durable.set_aside(path))

    def _make_way(self, final: Path) -> Path:
        """Free the name of a step that is saved again; its pointers move to another checkpoint or are removed."""
        for pointer in POINTERS:
            if self.folder.named(pointer) == final.name:
                other = self._other(pointer, final.name)
                if other is not None:
                    self.point(pointer, other.name)
                else:
                    durable.forget(self.folder.root / pointer)
                    self._follow(pointer)
        return durable.set_aside(final)

    def _other(self, pointer: Pointer, name: str) -> CheckpointEntry | None:
        """Return the checkpoint that a pointer moves to; None without one."""
        if pointer == "latest":
            return next((entry for entry in reversed(self.folder.entries()) if entry.name != name), None)
        if pointer != "best" or not self.best:
            return None
        return self.folder.best_of(self.best, highest=self.highest, besides=name)


def write_sidecar(folder: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Seal a folder whose other files are all written. checksums: of each of these files. Raises OSError."""
    files = {name: {"bytes": (folder / name).stat().st_size, "checksum": sum} for name, sum in checksums.items()}
    content = {"format": FORMAT, **state, "files": files}
    durable.write(folder / STATE, json.dumps({**content, "seal": content_seal(content)}, indent=1))


def write_late_metrics(folder: Path, metrics: dict[str, float]) -> None:
    """Store metrics measured after the state was saved, next to the sealed files. Raises OSError."""
    durable.write(folder / LATE_METRICS, json.dumps(metrics, indent=1))


def partial_of(final: Path) -> Path:
    """Return the path where a checkpoint is written before it is published."""
    return final.with_name(final.name + durable.PARTIAL)


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
