"""Processes with a limit: what one has said is kept whatever becomes of it, and none outlives its limit."""

import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TAIL = 2500  # characters of what a process has said
LEAST = 15  # seconds without which nothing is begun


class Failed(Exception):
    """A process that did not end as it should; the text is the end of what it has said. found: what it had found."""

    def __init__(self, text: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.found = found or {}


def ended(
    command: list[str],
    limit: float,
    folder: Path | None = None,
    *,
    look: Callable[[], float | None] | None = None,
    small_files: int | None = None,
) -> tuple[int | None, str]:
    """(exit code, what was said on both channels); None for a process that its limit has ended.

    look: is called ten times a second; a number from it is the new limit, in seconds from now. small_files: bytes above
    which the process can make no file. All processes of its session end with it: compilers have many.
    """

    def limited() -> None:
        if small_files is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (small_files, resource.RLIM_INFINITY))

    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True, preexec_fn=limited
        )
        until, code = time.monotonic() + limit, None
        try:
            while (code := process.poll()) is None and time.monotonic() < until:
                time.sleep(0.1)
                if look is not None and (more := look()) is not None:
                    until = time.monotonic() + more
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if look is not None:
            look()
        log.seek(0)
        return code, log.read()


def said(command: list[str], limit: float, folder: Path | None = None, *, code: int = 0) -> str:
    """What a command says; code: with which it has to end. Raises Failed."""
    found, text = ended(command, limit, folder)
    if found != code:
        raise Failed(f"{_end(found, limit)}\n{text[-TAIL:]}")
    return text


def _end(code: int | None, limit: float) -> str:
    return f"not done within {limit:.0f} s" if code is None else f"exit code {code}"


class Pieces:
    """What a process that does one thing after the other has written to a file, a JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Lines that are complete and have not been seen yet."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                with suppress(ValueError):
                    yield json.loads(line)


def in_pieces(
    command: list[str],
    each: float,
    until: float,
    note: Callable[[str, dict[str, Any]], None],
    folder: Path | None = None,
) -> None:
    """Let a process do its things, and note each as it ends; go on behind the one that a process dies of.

    command: takes `--to FILE` and `--skip NAMES`. each: seconds that one thing may take, and the start as well. until:
    on the clock, when all must have ended. Raises Failed where a process ends badly before it has begun anything.
    """
    begun: list[str] = []
    while True:
        with tempfile.TemporaryDirectory() as made:
            path, under_way = Path(made) / "pieces", ""
            pieces, before = Pieces(path), len(begun)

            def look(pieces: Pieces = pieces) -> float | None:
                nonlocal under_way
                limit = None
                for line in pieces.new():
                    limit = max(0.0, min(each, until - time.monotonic()))
                    if "begins" in line:
                        under_way = line["begins"]
                        begun.append(under_way)
                    else:
                        under_way = ""
                        note(line["name"], line["found"])
                return limit

            given = [*command, "--to", str(path), "--skip", *begun]
            limit = max(0.0, min(each, until - time.monotonic()))
            code, text = ended(given, limit, folder, look=look)
        if code == 0:
            return
        out_of_time = until - time.monotonic() < LEAST
        why = "no time is left" if code is None and out_of_time else _end(code, each)
        if under_way:
            note(under_way, {"failed": f"{why}\n{text[-TAIL:]}"})
        if len(begun) == before:
            raise Failed(f"{why}\n{text[-TAIL:]}")
        if out_of_time:
            raise Failed("no time is left for the rest")
