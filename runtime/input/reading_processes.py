"""Processes that read for a rank: where the collate chain takes long in Python, several steps are made at once.

Each is started afresh and told what to read by one message: what is mapped from files by the names of these, the chain
by its nodes in the plan. It is not forked: locks that threads of a rank hold (of torch, gloo or numba) would be held in
the fork for ever. Each has a socket of its own, so that one that is killed, at whatever point, is noticed at once and
hurts no other. torch's DataLoader would share a queue between its workers, notice a dead one after seconds, and tell of
it by an exception from a signal handler, anywhere in the loop.
"""

import pickle
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Pipe
from typing import Any, Final

import numpy as np
from attrs import frozen

from xtrain.planner.plan import Plan
from xtrain.runtime.data.collate.collators import CollateChain
from xtrain.runtime.data.loading.loader import RowLoader
from xtrain.runtime.data.loading.reading_ahead import Microbatches
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.input.reading_messages import receive_answer
from xtrain.runtime.state import Rank

# A reader that ends this often before it has read the step that is due will not read it at all.
ATTEMPTS: Final = 3


@frozen(kw_only=True)
class ReaderProcesses:
    """`count` processes that read the steps of a rank in turn. `warn` is told of one that had to be replaced."""

    plan: Plan
    rank: Rank
    loader: RowLoader
    count: int
    warn: Callable[[int, str], None]

    def reads(self, first: int, until: int) -> Generator[Microbatches]:
        """The microbatches of the steps from `first` up to and without `until`, in order.

        A process that ends is replaced, and what it was asked for is asked of the new one. Raises what a step raised in
        its process, and EnvironmentFault if processes end again and again at the same step.
        """
        recipe = self._recipe()
        readers = [ReaderProcess(recipe) for _ in range(min(self.count, until - first))]
        try:
            for step in range(first, min(first + len(readers), until)):
                readers[(step - first) % len(readers)].ask(step)
            for step in range(first, until):
                place = (step - first) % len(readers)
                found = self._answer(readers, place, step, recipe)
                if step + len(readers) < until:
                    readers[place].ask(step + len(readers))
                yield found
        finally:
            for reader in readers:
                reader.end()

    def _answer(self, readers: list["ReaderProcess"], place: int, step: int, recipe: bytes) -> Microbatches:
        for _ in range(ATTEMPTS):
            try:
                found = readers[place].answer()
            except (EOFError, OSError):
                code = readers[place].end()
                self.warn(
                    step,
                    f"rank {self.rank.rank}: the data worker for step {step + 1} died ({_how(code)}) and was replaced",
                )
                readers[place] = ReaderProcess(recipe)
                readers[place].ask(step)
                continue
            if isinstance(found, BaseException):
                raise found
            return found
        message = f"rank {self.rank.rank}: data workers for step {step + 1} died {ATTEMPTS} times in a row"
        raise EnvironmentFault("X714", message)

    def _recipe(self) -> bytes:
        stream = BytesIO()
        _ByNamePickler(stream, protocol=5).dump((self.plan, self.rank, self.loader))
        return stream.getvalue()


class ReaderProcess:
    """One process, and this end of its socket."""

    def __init__(self, recipe: bytes) -> None:
        self._socket, theirs = Pipe(duplex=True)
        with theirs:
            # A session of its own: Ctrl-C at the terminal is for the ranks, which may still want what is read here.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xtrain.runtime.input.reading_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._send(recipe)

    def ask(self, step: int) -> None:
        """Ask for a step; that the process has ended is told by `answer`."""
        self._send(step.to_bytes(8, "little"))

    def answer(self) -> Microbatches | BaseException:
        """What was asked for longest ago. Raises EOFError or OSError if the process has ended."""
        return receive_answer(self._socket)

    def end(self) -> int:
        """End the process, which has nothing to lose, if it has not ended; its exit code."""
        self._socket.close()
        ended = self.process.poll()
        self.process.kill()
        code = self.process.wait()
        return code if ended is None else ended

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # it has ended: reading from it says so
            self._socket.send_bytes(message)


class _ByNamePickler(pickle.Pickler):
    """Writes arrays that are mapped from files as the names of these, and the chain as a word."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, CollateChain):
            return ("chain",)
        if isinstance(obj, np.ndarray):
            return mapped_from(obj)
        return None


def mapped_from(array: np.ndarray) -> tuple[Any, ...] | None:
    """("mapped", file, dtype, bytes from its beginning, shape) of a read-only array that lies in a file, else None."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    # A view of a map has its file's name too, but its own offset is only that of the map.
    while isinstance(base, np.memmap) and isinstance(base.base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return ("mapped", str(base.filename), array.dtype.str, base.offset + start, array.shape)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
