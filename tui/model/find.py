"""Which run a user means: the same rule as that of `xtrain control`, for runs that have ended as well."""

from pathlib import Path

from .processes import is_folder

# Where runs lie unless a spec says otherwise.
ROOT = "runs"


class NoRun(Exception):
    """There is no such run; the message says where was looked."""


def run_at(text: str | None) -> Path:
    """The run that is meant by a path, by a lineage, by a run id or its beginning (both below `runs`), or by nothing:
    then the one below `runs` that was started last. Raises NoRun."""
    path = Path(ROOT if text is None else text)
    if is_folder(path) or text is None:
        return newest_run(path)
    if path.name == text:
        named = [run for run in _runs(Path(ROOT)) if run.name.startswith(text) or run.parent.name == text]
        if named:
            return _newest(named)
        raise NoRun(f"there is no run at {path}, and no run of that name below {ROOT}")
    raise NoRun(f"there is no run at {path}")


def newest_run(root: Path) -> Path:
    """The run at a path, or of those below it the one that was started last. Raises NoRun."""
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
    """Those directly below a root, or below a lineage in it."""
    return [plan.parent for depth in ("*", "*/*") for plan in root.glob(f"{depth}/plan.json")]


def _newest(runs: list[Path]) -> Path:
    """By the time of its plan, which every start writes anew."""

    def started(run: Path) -> float:
        try:
            return (run / "plan.json").stat().st_mtime
        except OSError:  # it was removed just now
            return 0.0

    return max(runs, key=started)
