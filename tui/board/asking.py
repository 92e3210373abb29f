"""Asking the run from here: `xtrain control` in a process of its own, and what it answers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from xtrain.records.control_words import ControlState
from xtrain.records.events import event_of
from xtrain.records.lines import object_of
from xtrain.records.run_events import ControlEvent
from xtrain.tui.words import printable


@frozen
class Answer:
    """Answer to a command. state: `accepted`, `done`, `refused`, or `unheard` if no run was there to answer."""

    state: str
    detail: str
    step: int | None = None


def command_line(run: Path, word: str, argument: str = "") -> list[str]:
    """Return the arguments of the `xtrain control` command."""
    given = [argument] if argument else []
    return [sys.executable, "-P", "-m", "xtrain", "control", str(run.absolute()), word, *given, "--json"]


def answers(arguments: list[str]) -> Iterator[Answer]:
    """Run a command and yield its answers as they arrive; block until the last one.

    The process has no terminal: neither Ctrl-C nor a closed window cancels the request.
    """
    try:
        process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        yield Answer("unheard", f"xtrain control could not be started: {error.strerror}")
        return
    ended = False
    assert process.stdout is not None and process.stderr is not None
    with process:
        for text in process.stdout:
            said = event_of(object_of(text.encode()) or {})
            if isinstance(said, ControlEvent):
                ended = ended or said.state in (ControlState.DONE, ControlState.REFUSED)
                yield Answer(said.state, printable(said.detail), said.step)
        errors = process.stderr.read().strip()
    if not ended:
        last = errors.splitlines()[-1] if errors else f"xtrain control exited with code {process.returncode}"
        yield Answer("unheard", printable(last.removeprefix("xtrain control: ")))
