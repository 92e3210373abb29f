"""Processes of functions that are not trusted, forked from a small process that has nothing of the rank.

A fork of a rank would copy the page tables of everything that it has allocated, and show it to the function.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, Final, Protocol
from weakref import finalize

from xtrain.runtime.base.bounded import Bounded, CallLimits, die_with_parent, serve
from xtrain.runtime.base.errors import DataError

_PROGRAM: Final = f"import sys; from {__name__} import main; main(int(sys.argv[1]))"


class Prepared(Protocol):
    """A function with state; each process has a copy of what `prepare` leaves."""

    def prepare(self) -> None:
        """Load what all processes need."""
        ...

    def __call__(self, item: Any, /) -> Any: ...


class ForkServer:
    """Server of processes for one function, which can be pickled. It starts with the first process and ends with this
    object, or with its rank, and so do its processes. Without forks (see `Bounded`) the function is called directly."""

    def __init__(self, function: Prepared, bounds: CallLimits) -> None:
        self._function, self._bounds = function, bounds
        self._connection: Connection | None = None
        self._process, self._answers = 0, False

    def bounded(self) -> Bounded[Any, Any]:
        """Return the function in a process of its own, which starts with the first call."""
        return _Served(self._function, self._bounds, self.start)

    def start(self) -> tuple[Connection, int]:
        """Start a process; return the connection to it and its id. A call may have ended or stopped the server, which
        is then started again. Raises DataError if it ends at once."""
        for fresh in (self._connection is None, True):
            if self._connection is None:
                self._connection = self._begin()
            ours, theirs = Pipe()
            try:
                send_handle(self._connection, theirs.fileno(), self._process)
                # The first answer comes after the code has been loaded, which has no limit.
                if self._answers and not self._connection.poll(self._bounds.wait):
                    raise EOFError
                process, self._answers = self._connection.recv(), True
                return ours, process
            except (EOFError, ConnectionError):
                ours.close()
                self._stop()
                self._connection, self._answers = None, False
                if fresh:
                    break
            finally:
                theirs.close()
        raise DataError("the server that forks processes of episodes has ended at its start; its error is above")

    def _begin(self) -> Connection:
        ours, theirs = Pipe()
        command = [sys.executable, "-c", _PROGRAM, str(theirs.fileno())]
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._process = server.pid
        self._stop = finalize(self, _stop, ours, server, os.getpid())
        with suppress(ConnectionError):  # the first process asked for will find it
            ours.send((self._function, self._bounds))
        return ours


class _Served(Bounded[Any, Any]):
    """A function in a process of a server."""

    def __init__(
        self, function: Callable[[Any], Any], bounds: CallLimits, start: Callable[[], tuple[Connection, int]]
    ) -> None:
        super().__init__(function, bounds=bounds)
        self._started = start

    def _start(self) -> tuple[Connection, int]:
        return self._started()


def _stop(connection: Connection, server: subprocess.Popen[bytes], owner: int) -> None:
    connection.close()
    if owner != os.getpid():  # a copy of the object in a forked process
        return
    with suppress(ProcessLookupError):
        server.kill()
    server.wait()


def main(handle: int) -> None:
    """Fork a process for each connection that comes in, until the rank closes its own."""
    die_with_parent()
    connection = Connection(handle)
    function, bounds = connection.recv()
    function.prepare()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the rank decides when it ends
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, ConnectionError):
        while True:
            theirs = recv_handle(connection)
            process = os.fork()
            if not process:
                try:
                    serve(Connection(theirs), function, None, bounds)
                finally:
                    os._exit(1)
            os.close(theirs)
            connection.send(process)
