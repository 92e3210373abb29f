"""A run directory that is moved or removed while the run writes into it.

Open files go on in the folder that was moved, or in files that nobody can see, and checkpoints in a new folder of the
old name: the run would be torn in two. A folder that was moved is moved back, where its name is free. What was removed
is made anew, with what is known of the run; the run then saves a checkpoint and stops, as its earlier ones are gone.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from attrs import define, field

from xtrain.planner.plan import Plan
from xtrain.runtime.provenance import metadata
from xtrain.runtime.provenance.code import read_code
from xtrain.runtime.reporting.records import Records


@define(eq=False)
class DirectoryWatch:
    """Compares the folder of a run with the one that the run began in. stop: ends the run, with a reason."""

    directory: Path
    plan: Plan
    records: Records
    report: Callable[[str], None]
    stop: Callable[[str], None]
    _fd: int = field(init=False)
    _looking: threading.RLock = field(factory=threading.RLock, init=False)
    _given_up: bool = field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        self.directory = self.directory.absolute()
        self._fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> None:
        """Put back what was moved, or end the run. Raises OSError."""
        with self._looking:
            if self._given_up or self._is_there():
                return
            place = self._place()
            if place is not None and self._move_back(place):
                self.report(
                    f"the run directory was moved to {place} while the run writes into it, and was moved back to "
                    f"{self.directory}; to move a run, stop it first"
                )
                return
            self._given_up = True
            what = f"moved to {place}, and {self.directory} is another folder" if place is not None else "removed"
            reason = f"the run directory was {what} while the run writes into it"
            self._make_anew()
            self.report(
                f"{reason}: the run saves a checkpoint in {self.directory} and stops; earlier ones are not there"
            )
            self.stop(reason)

    def close(self) -> None:
        """Look no more."""
        with self._looking:
            if not self._given_up:
                self._given_up = True
                os.close(self._fd)

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self.directory.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _place(self) -> Path | None:
        """Where the folder lies now; None where it was removed, or the system does not tell."""
        try:
            place = Path(f"/proc/self/fd/{self._fd}").readlink()
            return place if os.path.samestat(place.stat(), os.fstat(self._fd)) else None
        except OSError:
            return None

    def _move_back(self, place: Path) -> bool:
        try:
            self.directory.parent.mkdir(parents=True, exist_ok=True)
            place.rename(self.directory)  # which takes the place of an empty folder, and of no other
        except OSError:
            return False
        return True

    def _make_anew(self) -> None:
        """Everything but records and checkpoints, and files that the run has open under the old name."""
        contents = metadata.describe(
            self.plan, self.plan.spec_text, read_code(Path(self.plan.spec).parent), "anew", None
        )
        for name in ("metadata", "ranks", "logs", "checkpoints"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)
        metadata.write(self.directory, contents, None)
        self.records.reopen()
