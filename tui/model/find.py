"""Which run a user means."""

from pathlib import Path


class NoRun(Exception):
    """There is no such run; the message says where was looked."""


def newest_run(root: Path) -> Path:
    """The run at a path, or of those below it the one that was started last. Raises NoRun."""
    if _is_run(root):
        return root
    runs = [plan.parent for depth in ("*", "*/*") for plan in root.glob(f"{depth}/plan.json")]
    if not runs:
        raise NoRun(f"there is no run at {root} or below it")
    return max(runs, key=lambda run: (run / "plan.json").stat().st_mtime)


def run_at(text: str | None) -> Path:
    """The run that is meant by a path, by a run id or its beginning, or by nothing: then the newest. Raises NoRun."""
    return newest_run(Path(text or "runs"))


def _is_run(path: Path) -> bool:
    return (path / "plan.json").is_file()
