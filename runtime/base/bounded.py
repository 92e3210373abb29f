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
"""Processor time per call, in seconds."""
MEMORY: Final = 1 << 29
"""Bytes of address space that the process may allocate on top of its size at the start."""
PARALLEL: Final = "TOKENIZERS_PARALLELISM"
Asked = TypeVar("Asked")
Given = TypeVar("Given")


class BeyondBounds(Exception):
    """A call exceeded its limits, or its process ended; the text says which."""


class Bounded(Generic[Asked, Given]):
    """A function that is called in a process of its own. The process starts with the first call and ends with this
    object.

    It can be pickled if the function can be; the copy starts its own process. Where processes cannot be forked
    (Windows), or fork is not safe next to threads (macOS), the function is called directly.
    """

    def __init__(self, function: Callable[[Asked], Given], more: Callable[[Asked], float] | None = None) -> None:
        """more: returns the seconds that a call with this item may take in addition to SECONDS."""
        self._function, self._more = function, more
        self._connection: Connection | None = None
        self._process, self._owner = 0, 0

    def map(self, items: Sequence[Asked]) -> list[Given]:
        """Return the function's result for each item. Raises what the function raises, and BeyondBounds."""
        if not sys.platform.startswith("linux"):
            return [self._function(item) for item in items]
        if self._connection is None or self._owner != os.getpid():
            self._begin()
        assert self._connection is not None
        try:
            self._connection.send(items)
            failure, results = self._connection.recv()
            if failure is not None:
                raise failure
        except (EOFError, ConnectionError):
            raise BeyondBounds(self._end()) from None
        except BaseException:
            self._end()  # a late answer would be taken for the next call's
            raise
        return results

    def _begin(self) -> None:
        ours, theirs = Pipe()
        before = os.environ.get(PARALLEL)
        # else the package tokenizers warns that the process was forked after it started threads
        os.environ[PARALLEL] = "false"
        with warnings.catch_warnings():
            # of forks next to threads: the child takes no lock of another thread
            warnings.simplefilter("ignore", DeprecationWarning)
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
        """Kill the process and return why it ended."""
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
    """Answer lists of items, one item at a time, until the connection closes."""
    # Close everything else that the parent has open: whoever waits for it to close must not wait for this process.
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
    """Return the exception that ended the calls, if any, and the results."""
    results = []
    try:
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, SECONDS + (more(item) if more is not None else 0.0))
            results.append(function(item))
    except MemoryError:
        return BeyondBounds(f"takes more than {MEMORY >> 20} MiB of memory"), []
    except Exception as error:
        return error, []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None, results
