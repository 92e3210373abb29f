"""The folder of checkpoints as its readers see it: immutable entries, and pointer files that name some of them.

    checkpoints/
      ckpt-s000000001000/   the full state after 1,000 steps: shards, .metadata, state.json; metrics.json where it was
                            measured only when it was saved already
      model-s000000002000/  weights alone, of a run that has come to its end
      latest  best  model   one name each
      latest.pt best.pt …   the one file of what that names, where it is one file (`checkpoint.backend = file`)
      *.partial  *.removing what a save or a removal that was cut off has left

Names count steps, whatever the budget is counted in: a state belongs to a step, and names sort. That with which an
epoch has ended can be asked for as `epoch-2`, which is no file: its sidecar says so.
"""

import re
from pathlib import Path
from typing import Any

from attrs import frozen

from xtrain.planner.graph.checkpoint_names import ALIAS, EPOCH, FULL, POINTERS, WEIGHTS, Pointer
from xtrain.regular_files import read_regular
from xtrain.runtime.checkpoint.sidecar import TENSORS, flaws, read_late_metrics, read_sidecar
from xtrain.runtime.files.durable import PARTIAL, REMOVING, means


@frozen
class CheckpointEntry:
    """One published checkpoint, intact or not. step: optimizer steps behind its state."""

    path: Path
    step: int

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def is_full(self) -> bool:
        """Whether a run can go on from it; else it holds weights alone."""
        return FULL.fullmatch(self.name) is not None

    def state(self) -> dict[str, Any]:
        """Its sidecar, with what was measured behind the save. Raises OSError or ValueError where that is damaged."""
        state = read_sidecar(self.path)
        return {**state, "metrics": {**state.get("metrics", {}), **read_late_metrics(self.path)}}

    def flaws(self, *, content: bool = False) -> list[str]:
        """See `sidecar.flaws`."""
        return flaws(self.path, content=content)


@frozen
class CheckpointFolder:
    """`checkpoints/` of a run."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"ckpt-s{step:012d}"

    def model_path(self, step: int) -> Path:
        return self.root / f"model-s{step:012d}"

    def published(self) -> list[CheckpointEntry]:
        """All full checkpoints that have a name, oldest first, intact or not."""
        return self._named(FULL)

    def models(self) -> list[CheckpointEntry]:
        """The same of weights alone."""
        return self._named(WEIGHTS)

    def entries(self) -> list[CheckpointEntry]:
        """Full checkpoints of which every file has its size, oldest first."""
        return [entry for entry in self.published() if not entry.flaws()]

    def remains(self) -> list[Path]:
        """What is left of saves and removals that were cut off."""
        return sorted(path for path in self._paths() if path.suffix in (PARTIAL, REMOVING))

    def named(self, pointer: Pointer = "latest") -> str:
        """The name in a pointer; empty where there is none."""
        try:
            name = read_regular(self.root / pointer, 1000).decode().strip()
        except (OSError, UnicodeDecodeError):
            return ""
        return name if FULL.fullmatch(name) or WEIGHTS.fullmatch(name) else ""

    def alias(self, pointer: Pointer) -> Path:
        """Where the one file of what a pointer names lies as well, under a name that stays."""
        return self.root / f"{pointer}{ALIAS}"

    def pointed(self, pointer: Pointer) -> CheckpointEntry | None:
        """What a pointer names, if every file of it has its size."""
        found = entry_of(self.root / self.named(pointer))
        return found if found is not None and not found.flaws() else None

    def at_epoch(self, number: int) -> CheckpointEntry | None:
        """The newest full checkpoint that this epoch, counted from 1, has ended with."""
        return next((entry for entry in reversed(self.entries()) if entry.state().get("epoch_ended") == number), None)

    def protected(self) -> dict[str, tuple[Pointer, ...]]:
        """Name → the pointers to it."""
        names = {pointer: self.named(pointer) for pointer in POINTERS}
        return {name: tuple(p for p in POINTERS if names[p] == name) for name in names.values() if name}

    def old(self, keep: int, *, begun: CheckpointEntry | None = None) -> list[CheckpointEntry]:
        """All but the newest `keep` and what any pointer names: what `best` names is kept, be it among the newest or in
        addition to them.

        begun: what a run goes on from. Those of later steps, which it will save again, are not counted either: with
        them, one that the run would still have kept had it not been cut off would go.
        """
        protected, counted = self.protected(), self.entries()
        if begun is not None:
            counted = [entry for entry in counted if entry.step <= begun.step]
        return [entry for entry in counted[:-keep] if entry.name not in protected and not self._aliased(entry)]

    def candidates(self) -> list[CheckpointEntry]:
        """What a run can go on from, the best choice first: what `latest` names, then the others, newest first."""
        named = self.named()
        return sorted(self.published(), key=lambda entry: (entry.name == named, entry.step), reverse=True)

    def latest(self) -> CheckpointEntry | None:
        """The first of the candidates of which every file has its size."""
        return next((entry for entry in self.candidates() if not entry.flaws()), None)

    def _aliased(self, entry: CheckpointEntry) -> bool:
        """Whether a file beside the pointers still is that of a checkpoint, because a crash came before the next."""
        return any(means(self.alias(pointer), entry.path / TENSORS) for pointer in POINTERS)

    def best_of(self, metric: str, *, highest: bool, besides: str) -> CheckpointEntry | None:
        """The full checkpoint, of all but one, that has measured the least of a metric, or the most if `highest`; the
        oldest of equals."""
        found = [(value, entry) for entry in self.entries() if entry.name != besides
                 if (value := entry.state().get("metrics", {}).get(metric)) is not None]  # fmt: skip
        return min(found, key=lambda each: -each[0] if highest else each[0])[1] if found else None

    def _named(self, pattern: re.Pattern[str]) -> list[CheckpointEntry]:
        found = [(path, pattern.fullmatch(path.name)) for path in self._paths()]
        return sorted((CheckpointEntry(path, int(m[1])) for path, m in found if m), key=lambda entry: entry.step)

    def _paths(self) -> list[Path]:
        return list(self.root.iterdir()) if self.root.is_dir() else []


def epoch_named(name: str) -> int | None:
    """2 of `epoch-2`; None of what is no such name."""
    match = EPOCH.fullmatch(name)
    return int(match[1]) if match else None


def entry_of(path: Path) -> CheckpointEntry | None:
    """The checkpoint in a folder; None where its name is not that of one or it is not there."""
    match = FULL.fullmatch(path.name) or WEIGHTS.fullmatch(path.name)
    return CheckpointEntry(path, int(match[1])) if match and path.is_dir() else None


def size_bytes(path: Path) -> int:
    """Of all files in a folder, the sidecar included."""
    return sum(file.stat().st_size for file in path.iterdir())
