"""What can go wrong outside the spec, told to a person: the machine, the files, the state of an earlier run."""

import os
from collections.abc import Collection
from typing import Any

from xtrain.dsl.env_text import filled


class EnvironmentFault(Exception):
    """The environment is not what the plan needs (exit code 3). `code` is a diagnostic code.

    `agreed`: every rank finds the same, so that one of them says it.
    """

    agreed = False

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class ResumeRefused(EnvironmentFault):
    """A checkpoint does not fit this plan; says what differs."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X705", message)


class StorageFailed(EnvironmentFault):
    """A checkpoint could not be written or read; every rank knows the same reason."""

    agreed = True

    def __init__(self, message: str, code: str = "X721") -> None:
        super().__init__(code, message)


class NothingLeft(EnvironmentFault):
    """The state that a run begins with is not before the end of its budget."""

    agreed = True

    def __init__(self, message: str) -> None:
        super().__init__("X722", message)


class ExportFailed(EnvironmentFault):
    """A model could not be exported; nothing is left of it."""

    agreed = True

    def __init__(self, message: str, code: str = "X723") -> None:
        super().__init__(code, message)


def values_here(args: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Arguments of a node with the values of these environment variables. Raises EnvironmentFault where one is not
    set."""
    try:
        return filled(args, names, os.environ)
    except ValueError as error:
        raise EnvironmentFault("X709", f"{error}; set it on every machine") from None
