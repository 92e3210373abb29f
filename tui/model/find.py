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
_LISTED = 5  # candidates in a message


class NoRun(Exception):
    """Error for a name of no run, or of several; the message names the searched places and candidates."""


def run_at(text: str | None) -> Path:
    """Return the run that a text names; the one that was started last if it names a folder or an experiment. Raises
    NoRun."""
    return runs_at(text)[0]


def runs_at(text: str | None) -> list[Path]:
    """Return the runs that a text names, the one that was started last first. Raises NoRun.

    None: all below `runs`. A folder: the run around it or in it, else the runs below it or below its `runs`.
    Any other text is a name of runs below `runs`: an experiment, a run, the part of a run's name after `-`, one of
    these after `experiment/` or `experiment·`, or the beginning of a single such name. A whole name also counts if a
    folder without runs has it. `@2` is the second newest run, `NAME@2` the second newest of the runs that NAME may
    mean.
    """
    given = ROOT if text is None else text
    before, mark, count = given.rpartition("@")
    counted = bool(mark) and count.isdecimal() and len(count) < 7 and not is_folder(Path(given))
    name = ((before or ROOT) if counted else given).rstrip("/") or given
    in_folder = text is None or is_folder(Path(name)) or (counted and not before)
    try:
        runs = _runs_in(Path(name)) if in_folder else _runs_called(name)
    except NoRun:  # a folder of other files may have the name of an experiment
        runs = [run for run in _runs(Path(ROOT)) if in_folder and name in _names(run)]
        if not runs:
            raise
        in_folder = False
    if counted:
        if not 0 < int(count) <= len(runs):
            raise NoRun(f"there is no run {given}: {name} has {len(runs)}")
        return [runs[int(count) - 1]]
    experiments = {run.parent.name for run in runs}
    if not in_folder and len(runs) > 1 and not (len(experiments) == 1 and experiments.pop().startswith(name)):
        hint = f"write more of a name, or {name}@1 for the newest"
        raise NoRun(f"`{name}` names {len(runs)} runs: {_listed(runs)}; {hint}")
    return runs


def _runs_in(folder: Path) -> list[Path]:
    try:
        above = [*folder.absolute().parents][:3]
        if around := [run for run in above if is_run(run) and (run / "metadata").is_dir()]:
            return around[:1]
        runs = [folder] if is_run(folder) else _runs(folder) or _runs(folder / ROOT)
    except OSError as error:
        raise NoRun(f"{folder} cannot be read: {error.strerror}") from error
    if not runs:
        raise NoRun(f"there is no run at {folder} or below it")
    return runs


def _runs_called(name: str) -> list[Path]:
    try:
        Path(name).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise NoRun(f"there is no run at {name}: {error.strerror}") from error
    runs = _runs(Path(ROOT))
    exact = [run for run in runs if name in _names(run)]
    if found := exact or [run for run in runs if any(each.startswith(name) for each in _names(run))]:
        return found
    below = f", and no run of that name below {ROOT}: it has {_listed(runs)}" if runs else " or below it"
    raise NoRun(f"there is no run at {name}{below}")


def _names(run: Path) -> tuple[str, ...]:
    experiment, id = run.parent.name, run.name.partition("-")[2]
    names = (run.name, id) if id else (run.name,)
    return experiment, *names, *(f"{experiment}{mark}{name}" for name in names for mark in "/·")


def _listed(runs: list[Path]) -> str:
    names = [f"{run.parent.name}/{run.name}" for run in runs[:_LISTED]]
    return ", ".join(names) + (f" and {len(runs) - _LISTED} more" if len(runs) > _LISTED else "")


def is_run(folder: Path) -> bool:
    """Return True for the directory of a run; False for a folder with runs in which a plan was saved."""
    return (folder / "plan.json").is_file() and not (folder / ROOT).is_dir()


def _runs(root: Path) -> list[Path]:
    """Return the runs directly below a root, or below an experiment in it, the one that was started last first."""
    found = [plan.parent for depth in ("*", "*/*") for plan in root.glob(f"{depth}/plan.json")]
    return sorted(filter(is_run, found), key=_started, reverse=True)


def _started(run: Path) -> tuple[float, str]:
    """Return the time of a run's plan, which every start rewrites, and the run's name."""
    try:
        return (run / "plan.json").stat().st_mtime, run.name
    except OSError:  # it was removed just now
        return 0.0, run.name


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
    """Return the run in a folder, and the runs below it or below an experiment in it, the one that was started last
    first."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    own = [root] if is_run(root) else islice(_directories(root, deadline), _MOST)
    return [_glance(run, root) for run in sorted(own, key=_started, reverse=True)]


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
