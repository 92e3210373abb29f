"""Runs while they are running: how far they are, and which of their processes are alive."""

import subprocess
import time
from pathlib import Path

from forking import ForkedCommand
from projects import Project


def wait_for_step(project: Project, process: subprocess.Popen | ForkedCommand, step: int) -> None:
    """Return as soon as `process` has logged `step`."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        for path in (project.folder / "runs").glob("tiny/*/metrics.jsonl"):
            if path.read_text().count('"loss"') >= step:
                return
        assert not ended, "\n".join(process.communicate())
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached")


def workers(directory: Path) -> list[int]:
    """Process ids of the ranks of a run that are alive."""
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                command = (process / "cmdline").read_bytes().decode().split("\0")
                running = (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
                here = (process / "cwd").resolve()
            except (OSError, IndexError):
                continue
            if running and "xtrain.runtime.worker" in command and here / command[-3] == directory:
                found.append(int(process.name))
    return found


def gone(directory: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while workers(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not workers(directory)
