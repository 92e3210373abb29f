"""Specs with launchers, and commands of a queue or a cluster that are stood in for."""

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

LAUNCHES: Final = Path(__file__).parents[1] / "cli" / "launches"


def taken_to(folder: Path, monkeypatch: pytest.MonkeyPatch, *specs: str) -> None:
    """Outside any git checkout, which runs would be named by."""
    for spec in specs:
        shutil.copy(LAUNCHES / spec, folder)
    monkeypatch.chdir(folder)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str | None) -> Callable[[], list[str]]:
    """Commands that do as their bodies say; returns what tells how they were called."""
    log = folder / "calls"
    there = folder / "commands"
    there.mkdir(exist_ok=True)
    for name, body in bodies.items():
        path = there / name
        path.write_text(f'#!/bin/bash\nwords="$*"\necho {name} $words >> {shlex.quote(str(log))}\n{body or ""}\n')
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{there}:/usr/bin:/bin")
    return lambda: log.read_text().splitlines() if log.exists() else []


def submitted() -> list[Path]:
    return [file.parent.parent.parent / file.parent.name for file in Path.cwd().glob("runs/*/launch/*/job.json")]
