"""Function calls in a forked process with limits on time and memory, for chat templates and tokenizers of others."""

import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final, Generic, TypeVar
from weakref import finalize

SECONDS: Final = 5.0
"""Processor time of a call."""
MEMORY: Final = 1 << 29
"""Bytes of address space that the process may add to what it begins with."""
PARALLEL: Final = "TOKENIZERS_PARALLELISM"
Asked = TypeVar("Asked")
Given = TypeVar("Given")


class BeyondBounds(Exception):
    """A call takes more than its bounds, or ends its process; the text says which."""


class Bounded(Generic[Asked, Given]):
    """A function that is called in a process of its own, which begins with the first call and ends with this object.

    It can be pickled if the function can be: a copy has another process. Where processes cannot be forked, as on
    Windows, and where fork is not safe beside threads, as on macOS, the function is called as it is.
    """

    def __init__(self, function: Callable[[Asked], Given], more: Callable[[Asked], float] | None = None) -> None:
        """more: seconds that a call may take in addition to SECONDS."""
        self._function, self._more = function, more
        self._connection: Connection | None = None
        self._process, self._owner = 0, 0

    def map(self, items: Sequence[Asked]) -> list[Given]:
        """Return what the function gives for each item. Raises what it raises, and BeyondBounds."""
        if not sys.platform.startswith("linux"):
            return [self._function(item) for item in items]
        if self._connection is None or self._owner != os.getpid():
            self._begin()
        assert self._connection is not None
        try:
            self._connection.send(items)
            failure, found = self._connection.recv()
            if failure is not None:
                raise failure
        except (EOFError, ConnectionError):
            raise BeyondBounds(self._end()) from None
        except BaseException:
            self._end()  # what it still has to say is of no use
            raise
        return found

    def _begin(self) -> None:
        ours, theirs = Pipe()
        before = os.environ.get(PARALLEL)
        os.environ[PARALLEL] = "false"  # else the package tokenizers complains of forks behind threads of its own
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads: no lock of theirs is taken
            process = os.fork()
        if not process:
            try:
                _serve(theirs, self._function, self._more)
            finally:
                os._exit(1)
        if before is None:
            del os.environ[PARALLEL]
        else:
            os.environ[PARALLEL] = before
        theirs.close()
        self._connection, self._process, self._owner = ours, process, os.getpid()
        finalize(self, _finish, ours, process, self._owner)

    def _end(self) -> str:
        """End the process; why it has ended, if it has."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        with suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        with suppress(ChildProcessError):
            _, status = os.waitpid(self._process, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                return f"takes more than {SECONDS:g} s of processor time"
        return f"takes more than {MEMORY >> 20} MiB of memory, or ends its process"

    def __getstate__(self) -> dict[str, Any]:
        return {"_function": self._function, "_more": self._more, "_connection": None, "_process": 0, "_owner": 0}


def _finish(connection: Connection, process: int, owner: int) -> None:
    if owner != os.getpid():  # a copy of the object in a forked process
        return
    connection.close()
    with suppress(ChildProcessError, ProcessLookupError):
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _serve(connection: Connection, function: Callable[[Any], Any], more: Callable[[Any], float] | None) -> None:
    """Answer lists of items, an item at a time, until nobody asks any more."""
    # Whatever else the parent has open: who waits for its end must not wait for this process.
    keep = connection.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        begun = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (begun + MEMORY, most))
    try:
        while True:
            connection.send(_answer(connection.recv(), function, more))
    except (EOFError, ConnectionError):
        os._exit(0)


def _answer(
    items: Iterable[Any], function: Callable[[Any], Any], more: Callable[[Any], float] | None
) -> tuple[Exception | None, list[Any]]:
    """What ended the calls, if anything did, and what they have given."""
    found = []
    try:
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, SECONDS + (more(item) if more is not None else 0.0))
            found.append(function(item))
    except MemoryError:
        return BeyondBounds(f"takes more than {MEMORY >> 20} MiB of memory"), []
    except Exception as error:
        return error, []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None, found
