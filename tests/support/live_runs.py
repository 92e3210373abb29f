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


def slow_set_up(project: Project) -> None:
    """Rank 1 needs many minutes for one of the modules that all ranks import before they train."""
    (project.folder / "sitecustomize.py").write_text(
        "import os, time\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import importlib.abc, sys\n"
        "    class Finder(importlib.abc.MetaPathFinder):\n"
        "        def find_spec(self, name, path, target=None):\n"
        "            if name == 'xtrain.runtime.nn.optimizer':\n"
        "                open('waiting', 'w').close()\n"
        "                time.sleep(400)\n"
        "    sys.meta_path.insert(0, Finder())\n"
    )


def wait_for_slow_set_up(project: Project) -> None:
    """Return when rank 1 has begun with that."""
    deadline = time.monotonic() + 90
    while not (project.folder / "waiting").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


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
            if running and "xtrain.runtime.loop.worker" in command and here / command[-3] == directory:
                found.append(int(process.name))
    return found


def gone(directory: Path, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while workers(directory) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not workers(directory)
