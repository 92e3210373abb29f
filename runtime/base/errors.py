"""Faults outside the spec, in the machine or the data, and the exit codes of processes.

A fault concerns the machine, the files, or the state of an earlier run. It has the code, the place and the remedy that
are shown.
"""

import os
import signal
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from os import PathLike
from typing import Any, Final

from xtrain.dsl.values import filled
from xtrain.records.names import EndStatus


class EnvironmentFault(Exception):
    """The environment does not meet the plan's needs (exit code 3). `code` is a diagnostic code.

    `agreed`: every rank finds the same fault, so one of them reports it.
    """

    agreed = False

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResumeRefused(EnvironmentFault):
    """A checkpoint does not fit this plan; the text says what differs."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X705", message)


class StorageFailed(EnvironmentFault):
    """A checkpoint could not be written or read; every rank has the same reason."""

    agreed = True

    def __init__(self, message: str, code: str = "X721") -> None:
        super().__init__(code, message)


class NothingLeft(EnvironmentFault):
    """The state that a run resumes from has already used up the run's budget."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X722", message)


class ExportFailed(EnvironmentFault):
    """A model could not be exported; its partial files are removed."""

    agreed = True

    def __init__(self, message: str, code: str = "X723") -> None:
        super().__init__(code, message)


def values_here(args: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a node's arguments with the values of these environment variables. Raises EnvironmentFault if one is not
    set."""
    try:
        return filled(args, names, os.environ)
    except ValueError as error:
        raise EnvironmentFault("X709", f"{error}; set it on every machine") from None


EXIT_CODES: Final[Mapping[str, int]] = {
    EndStatus.DONE: 0,
    EndStatus.COMPLETE: 0,
    EndStatus.FAILED: 1,
    EndStatus.ENVIRONMENT: 3,
    EndStatus.STOPPED: 75,
    EndStatus.INTERRUPTED: 130,
}

# Status of a run that a signal ended before there was anything to save.
STATUS_OF_SIGNAL: Final[dict[int | None, str]] = {
    signal.SIGTERM: EndStatus.STOPPED,
    signal.SIGHUP: EndStatus.STOPPED,
    signal.SIGUSR1: EndStatus.STOPPED,
    signal.SIGINT: EndStatus.INTERRUPTED,
}


def exit_process(code: int) -> None:
    """Exit without the interpreter's teardown: torch's teardown aborts about once in a hundred runs."""
    with suppress(OSError):  # a full disk refuses the output, but must not keep the process alive
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class DataError(Exception):
    """Data, a tokenizer or a data setting that cannot be used as given; diagnostic code X507.

    The text reads `file:line: what is wrong`, then the remedy on a line of its own.
    """

    code = "X507"

    def __init__(
        self,
        message: str,
        *,
        path: str | PathLike[str] | None = None,
        line: int | None = None,
        remedy: str | None = None,
    ) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(f"{where}{message}" if remedy is None else f"{where}{message}\n  {remedy}")
        self.message = message
        self.path = path
        self.line = line
        self.remedy = remedy
