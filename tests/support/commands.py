"""Commands of xtrain in tests, and what launchers are given."""

import contextlib
import io
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Final
from unittest import mock

import pytest

from xtrain.cli.main import main

# `xtrain` in this process ---------------------------------------------------------------------------------------------


ROOT = Path(__file__).parents[2]


def xtrain(*arguments: object, cwd: Path = ROOT) -> CompletedProcess[str]:
    """Run the command in a folder, its streams being no terminals."""
    command, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    with (
        mock.patch.dict(os.environ, plain, clear=True),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(command)
        except SystemExit as ended:  # of argparse
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return CompletedProcess(command, code, out.getvalue(), err.getvalue())


# Specs with launchers, and commands of a queue or a cluster that are stood in for -------------------------------------


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
