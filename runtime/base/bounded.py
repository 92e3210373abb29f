"""Function calls in a forked process with limits on time and memory, for chat templates, tokenizers and environments of
others."""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Generic, TypeVar
from weakref import finalize

from attrs import frozen

SECONDS: Final = 5.0
"""Processor time per call, in seconds."""
MEMORY: Final = 1 << 29
"""Bytes of address space that the process may allocate on top of its size at the start."""
PARALLEL: Final = "TOKENIZERS_PARALLELISM"
Asked = TypeVar("Asked")
Given = TypeVar("Given")


class BeyondBounds(Exception):
    """A call exceeded its limits, or its process ended; the text says which."""


@frozen(kw_only=True)
class CallLimits:
    """Limits of a call. seconds: of processor time. memory: bytes on top of the size of the process at its start. wait:
    seconds until an answer, from when the call was sent; None: no limit.

    answer: for a function whose code is not trusted, the largest answer in bytes, which is then JSON, read without
    running anything. What such a process writes to its standard streams is dropped, and the processes in its process
    group end with it. None: answers are any objects.
    """

    seconds: float
    memory: int
    wait: float | None = None
    answer: int | None = None


class Bounded(Generic[Asked, Given]):
    """A function that is called in a process of its own. The process starts with the first call and ends with this
    object, or with `close`.

    It can be pickled if the function can be; the copy starts its own process. Where processes cannot be forked
    (Windows), or fork is not safe next to threads (macOS), the function is called directly.
    """

    def __init__(
        self,
        function: Callable[[Asked], Given],
        more: Callable[[Asked], float] | None = None,
        bounds: CallLimits | None = None,
    ) -> None:
        """more: returns the seconds that a call with this item may take in addition to `bounds.seconds`."""
        self._function, self._more = function, more
        self._bounds = bounds or CallLimits(seconds=SECONDS, memory=MEMORY)
        self._connection: Connection | None = None
        self._process, self._owner = 0, 0
        self._sent: Sequence[Asked] = ()
        self._deadline: float | None = None

    def map(self, items: Sequence[Asked]) -> list[Given]:
        """Return the function's result for each item. Raises what the function raises, and BeyondBounds."""
        self.send(items)
        return self.receive()

    def send(self, items: Sequence[Asked]) -> None:
        """Begin to call the function for each item; `receive` returns the results. Raises BeyondBounds."""
        self._sent = items
        if not sys.platform.startswith("linux"):
            return
        if self._connection is None or self._owner != os.getpid():
            self._begin()
        assert self._connection is not None
        wait = self._bounds.wait
        self._deadline = None if wait is None else time.monotonic() + wait
        try:
            _write(self._connection, items, wait)
        except TimeoutError:  # a process that reads nothing, or slowly
            self._end()
            raise BeyondBounds(f"takes more than {wait:g} s") from None
        except ConnectionError:
            raise BeyondBounds(self._end()) from None

    def receive(self) -> list[Given]:
        """Return the results of the items that were sent. Raises what the function raises, and BeyondBounds."""
        if not sys.platform.startswith("linux"):
            return [self._function(item) for item in self._sent]
        assert self._connection is not None
        try:
            self._await(self._connection)
            if self._deadline is not None:  # the rest of an answer larger than a pipe is written while it is read
                self._deadline = max(self._deadline, time.monotonic() + (self._bounds.wait or 0.0))
            failure, results = self._answered(self._connection)
            if failure is not None:
                raise failure
        except (EOFError, ConnectionError):
            raise BeyondBounds(self._end()) from None
        except BaseException:
            self._end()  # a late answer would be taken for the next call's
            raise
        return results

    def close(self) -> None:
        """End the process, if there is one."""
        if self._connection is not None and self._owner == os.getpid():
            self._end()

    def _await(self, connection: Connection) -> None:
        """Return when the process has sent something. Raises BeyondBounds after `bounds.wait` seconds."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if not connection.poll(left):
            raise BeyondBounds(f"takes more than {self._bounds.wait:g} s")

    def _answered(self, connection: Connection) -> tuple[Exception | None, list[Given]]:
        most = self._bounds.answer
        if most is None:
            return connection.recv()
        line = bytearray()
        while not line.endswith(b"\n"):
            self._await(connection)
            piece = os.read(connection.fileno(), 1 << 16)
            if not piece:
                raise EOFError
            line += piece
            if len(line) > most + 1:
                raise BeyondBounds(f"answers with more than {most >> 10} KiB")
        try:
            beyond, results = json.loads(line)
            if beyond is None and len(results) != len(self._sent):
                raise ValueError
        except (ValueError, TypeError, RecursionError):
            raise BeyondBounds("answers with something else than its result") from None
        return None if beyond is None else BeyondBounds(str(beyond)), results

    def _begin(self) -> None:
        self._connection, self._process = self._start()
        self._owner = os.getpid()
        finalize(self, _finish, self._connection, self._process, self._owner, self._bounds)

    def _start(self) -> tuple[Connection, int]:
        """Start the process; return the connection to it and its id."""
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
                serve(theirs, self._function, self._more, self._bounds)
            finally:
                os._exit(1)
        if before is None:
            del os.environ[PARALLEL]
        else:
            os.environ[PARALLEL] = before
        theirs.close()
        return ours, process

    def _end(self) -> str:
        """Kill the process and return why it ended."""
        assert self._connection is not None
        self._connection.close()
        self._connection = None
        _kill(self._process, self._bounds)
        with suppress(ChildProcessError):
            _, status = os.waitpid(self._process, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
                return f"takes more than {self._bounds.seconds:g} s of processor time"
        return f"takes more than {self._bounds.memory >> 20} MiB of memory, or ends its process"

    def __getstate__(self) -> dict[str, Any]:
        functions = {"_function": self._function, "_more": self._more, "_bounds": self._bounds}
        return {**functions, "_connection": None, "_process": 0, "_owner": 0, "_sent": (), "_deadline": None}


def _write(connection: Connection, items: Any, seconds: float | None) -> None:
    """Send items as `Connection.send` does. Raises TimeoutError if they are not read within `seconds`."""
    if seconds is None:
        connection.send(items)
        return
    content = bytes(ForkingPickler.dumps(items))
    with socket.socket(fileno=os.dup(connection.fileno())) as pipe:
        pipe.settimeout(seconds)
        try:
            pipe.sendall(struct.pack("!i", len(content)) + content)
        finally:
            pipe.settimeout(None)  # the connection has the same mode


def _kill(process: int, bounds: CallLimits) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    if bounds.answer is not None:  # a group of its own, once it has begun
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process, signal.SIGKILL)


def _finish(connection: Connection, process: int, owner: int, bounds: CallLimits) -> None:
    if owner != os.getpid() or connection.closed:  # a copy of the object in a forked process, or ended already
        return
    connection.close()
    with suppress(ChildProcessError):
        _kill(process, bounds)
        os.waitpid(process, 0)


def die_with_parent() -> None:
    """Ask the kernel for a SIGKILL when the parent dies (Linux only)."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(
    connection: Connection, function: Callable[[Any], Any], more: Callable[[Any], float] | None, bounds: CallLimits
) -> None:
    """Answer lists of items, one item at a time, until the connection closes. Ends the process."""
    if bounds.answer is not None:
        os.setsid()
        die_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
    # Close everything else that the parent has open: whoever waits for it to close must not wait for this process.
    keep = connection.fileno()
    os.closerange(3, keep)
    os.closerange(keep + 1, 1 << 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.SIG_IGN)
    for number in (signal.SIGPROF, signal.SIGCHLD):  # with the latter ignored, its own processes have no exit status
        signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        begun = int(file.read().split()[0]) * resource.getpagesize()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (begun + bounds.memory, most))
    try:
        while True:
            failure, results = _answer(connection.recv(), function, more, bounds)
            if bounds.answer is None:
                connection.send((failure, results))
            else:
                line = json.dumps((None if failure is None else str(failure), results)).encode() + b"\n"
                while line:
                    line = line[os.write(keep, line) :]
    except (EOFError, ConnectionError):
        os._exit(0)


def _answer(
    items: Iterable[Any], function: Callable[[Any], Any], more: Callable[[Any], float] | None, bounds: CallLimits
) -> tuple[Exception | None, list[Any]]:
    """Return the exception that ended the calls, if any, and the results."""
    results = []
    try:
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, bounds.seconds + (more(item) if more is not None else 0.0))
            results.append(function(item))
    except MemoryError:
        return BeyondBounds(f"takes more than {bounds.memory >> 20} MiB of memory"), []
    except Exception as error:
        return error, []
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None, results
