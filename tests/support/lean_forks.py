"""Bounded functions in forks of a small process: a fork of one that has loaded what all tests need takes a third of a
second."""

import importlib
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from xtrain.runtime.base.bounded import MEMORY, SECONDS, Bounded, CallLimits
from xtrain.runtime.base.fork_server import ForkServer


class GivenFunctions:
    """Calls the function that comes with an item."""

    def prepare(self) -> None:
        importlib.import_module("xtrain.runtime.feed.documents")
        importlib.import_module("xtrain.components.tokenizers.folder_run")

    def __call__(self, item: tuple[Callable[[Any], Any], Any]) -> Any:
        function, argument = item
        return function(argument)


class SmallServer(ForkServer):
    """Starts processes for all functions of tests, with the usual limits."""

    def __init__(self) -> None:
        super().__init__(GivenFunctions(), CallLimits(seconds=SECONDS, memory=MEMORY))

    def _begin(self) -> Connection:
        with mock.patch.dict(os.environ, PYTHONPATH=str(Path(__file__).parent)):
            return super()._begin()

    def install(self, patch: pytest.MonkeyPatch) -> None:
        send = Bounded.send
        patch.setattr(Bounded, "_start", lambda bounded: self.start())
        patch.setattr(
            Bounded, "send", lambda bounded, items: send(bounded, [(bounded._function, item) for item in items])
        )
