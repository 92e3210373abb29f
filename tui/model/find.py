"""The run that a user means, running or ended, by the same rule as `xtrain control`; and the runs that it can be
compared with."""

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import frozen

from xtrain.records.events import FailureEvent, RunEndEvent, event_of
from xtrain.records.lines import object_of, read
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE, EndStatus
from xtrain.regular_files import open_regular
from xtrain.text.units import duration
from xtrain.tui.model.life import LAUNCHER_LOCK, QUIET_SECONDS, WORKER_LOCK, is_folder, is_locked, is_shared

# Words of a list of runs for how a run ended.
ENDED = {
    EndStatus.DONE: "finished",
    EndStatus.COMPLETE: "finished",
    EndStatus.FAILED: "failed",
    EndStatus.ENVIRONMENT: "failed",
    EndStatus.STOPPED: "stopped",
    EndStatus.INTERRUPTED: "stopped",
}
# Default directory of runs.
ROOT = "runs"


class NoRun(Exception):
    """Error for a run that does not exist; the message names the searched places."""


def run_at(text: str | None) -> Path:
    """Return the run at a path, of a lineage, or with a run id or its prefix (both below `runs`), also of its second
    part, and as the dashboard names it (`experiment·id`); for None, the run below `runs` that was started last. Raises
    NoRun."""
    path = Path(ROOT if text is None else text)
    if is_folder(path) or text is None:
        return newest_run(path)
    if path.name == text:
        named = [run for run in _runs(Path(ROOT)) if _is_named(run, text)]
        if named:
            return _newest(named)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise NoRun(f"there is no run at {path}: {error.strerror}") from error
    below = f", and no run of that name below {ROOT}" if path.name == text else ""
    raise NoRun(f"there is no run at {path}{below}")


def _is_named(run: Path, text: str) -> bool:
    lineage, _, id = text.rpartition("·")
    names = run.name, run.name.partition("-")[2]
    if run.parent.name == text:
        return True
    return id != "" and lineage in ("", run.parent.name) and any(name.startswith(id) for name in names)


def newest_run(root: Path) -> Path:
    """Return the run at a path, or the one below it that was started last. Raises NoRun."""
    try:
        if (root / "plan.json").is_file():
            return root
        runs = _runs(root)
    except OSError as error:
        raise NoRun(f"{root} cannot be read: {error.strerror}") from error
    if not runs:
        raise NoRun(f"there is no run at {root} or below it")
    return _newest(runs)


def _runs(root: Path) -> list[Path]:
    """Return the runs directly below a root, or below a lineage in it."""
    return [plan.parent for depth in ("*", "*/*") for plan in root.glob(f"{depth}/plan.json")]


def _newest(runs: list[Path]) -> Path:
    """Return the run with the newest plan, which every start rewrites."""

    def started(run: Path) -> float:
        try:
            return (run / "plan.json").stat().st_mtime
        except OSError:  # it was removed just now
            return 0.0

    return max(runs, key=started)


# Seconds that a search may take, and the most runs it finds.
_PATIENCE_SECONDS, _MOST = 3.0, 500
_END_BYTES = 16 << 10


@frozen(kw_only=True)
class FoundRun:
    """Run found by a quick look at its files. name: its path below the searched folder; time: of its newest record,
    seconds since 1970; status: how it ended, empty without an end record; failed: its last report is a failure."""

    directory: Path
    name: str
    step: int | None
    loss: float | None
    status: str
    time: float | None
    failed: bool = False

    @property
    def state(self) -> str:
        """One of `running`, `finished`, `failed`, `stopped`, `lost`: by its end record. Without one, a held lock means
        running; where locks are unknown, a record of the last two minutes does."""
        launched, locked = (self._is_locked(name) for name in (LAUNCHER_LOCK, WORKER_LOCK))
        if launched:
            return "running"
        if self.ended:
            return self.ended
        if launched is None and locked is None:
            quiet = self.time is None or time.time() - self.time > QUIET_SECONDS
            return "running" if not quiet else "failed" if self.failed else "lost"
        return "running" if locked else "failed" if self.failed else "lost"

    @property
    def ended(self) -> str:
        """Outcome of the run by its records: `finished`, `failed` or `stopped`; "" while it runs."""
        return next((word for status, word in ENDED.items() if status == self.status), self.status)

    def _is_locked(self, name: str) -> bool | None:
        return is_locked(self.directory / name, shared=is_shared(self.directory))

    def age(self, now: float) -> str:
        """Return `6m48s ago`."""
        return "" if self.time is None else f"{duration(max(0.0, now - self.time))} ago"


def runs_below(root: Path) -> list[FoundRun]:
    """Return the run in a folder, and the runs below it or below a lineage in it, newest first."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    own = [root] if (root / "plan.json").is_file() else _directories(root, deadline)
    return sorted((_glance(run, root) for run in islice(own, _MOST)), key=lambda run: -(run.time or 0.0))


def found_runs(directory: Path) -> list[FoundRun]:
    """Return other runs below the folder of a run and of its lineage, newest first; unreadable ones are left out."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    root = _root(directory.absolute(), deadline)
    others = (run for run in _directories(root, deadline) if run != directory.absolute())
    found = [_glance(run, root) for run in islice(others, _MOST)]
    return sorted(found, key=lambda run: -(run.time or 0.0))


def _root(directory: Path, deadline: float) -> Path:
    """Return `runs` for `runs/LINEAGE/RUN`: the folder above if it has a second run or lineage, else the parent
    folder."""
    around = directory.parent
    above = around.parent
    return above if above != around and any(run != directory for run in _directories(above, deadline)) else around


def _directories(root: Path, deadline: float, depth: int = 2) -> Iterator[Path]:
    """Yield runs in a folder and in its subfolders, as time allows: it may be a remote home directory."""
    try:
        with os.scandir(root) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return
    for folder in sorted(folders):
        if time.monotonic() > deadline:
            return
        if (folder / "plan.json").is_file():
            yield folder
        elif depth > 1:
            yield from _directories(folder, deadline, depth - 1)


def _glance(run: Path, root: Path) -> FoundRun:
    logged = read(StepMetrics, _last_object(run / METRICS_FILE, "loss"))
    said = event_of(_last_object(run / EVENTS_FILE, "event"))
    end = said if isinstance(said, RunEndEvent) else None
    times = [record.time for record in (logged, said) if record.time is not None]
    return FoundRun(
        directory=run,
        name=str(run.relative_to(root)),
        step=end.step if end else logged.step,
        loss=logged.loss,
        status=end.status if end else "",
        failed=isinstance(said, FailureEvent),
        time=max(times, default=None),
    )


def _last_object(path: Path, key: str) -> dict[str, Any]:
    """Return the last whole line of a file that holds an object with `key`."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _END_BYTES))
            block = file.read(_END_BYTES)
    except OSError:
        return {}
    for line in reversed(block.split(b"\n")[:-1]):
        if (found := object_of(line)) is not None and key in found:
            return found
    return {}
