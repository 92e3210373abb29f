"""Reading ahead: a thread, or processes, make the microbatches of the next steps while a step computes.

The microbatches of a step depend only on its number. So nothing that was read ahead has an old mixture, and a new
reader returns what the previous one would have.

Processes serve collate chains that are slow in Python: several steps are made at the same time. Each process is a new
interpreter and gets one message with its task: mapped arrays by the names of their files, the chain by its nodes in the
plan. It is not forked: locks that threads of a rank hold (of torch, gloo or numba) would stay locked in the fork. Each
has a socket of its own, so that a lost process is noticed at once and harms no other. torch's DataLoader shares a queue
between its workers, notices a lost one after seconds, and reports it by an exception from a signal handler, anywhere in
the loop.

A message with a step is a pickle followed by its arrays one by one, so that only the socket copies them.
"""

import pickle
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

import numpy as np
import torch
from attrs import evolve, fields, frozen
from torch import Tensor

from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.collate import CollateChain
from xtrain.runtime.feed.loader import RowLoader
from xtrain.runtime.feed.microbatch import Microbatch

Microbatches = list[Microbatch]
# Generator of the microbatches of steps from the first number to before the second, in order.
Reads = Callable[[int, int], Generator[Microbatches]]


class ReadingAhead:
    """Reader of the microbatches of a run's steps, up to `ahead` steps in advance.

    A thread continues after the last requested step: `take` in order waits only for what is not read yet; another order
    restarts the reading. Kernels and copies of tensors release the GIL.
    """

    def __init__(self, reads: Reads, *, ahead: int, end: Callable[[], int], device: torch.device) -> None:
        """Start without reading. end: returns the step to stop before, called whenever reading begins. device: the one
        that computes."""
        assert ahead >= 1
        self._reads, self._ahead, self._end, self._device = reads, ahead, end, device
        self._current: _AheadSpan | None = None

    def take(self, step: int) -> Microbatches:
        """Return the microbatches of a step. Raises what reading them raised."""
        if self._current is None or not self._current.gives(step):
            self.close()
            until = max(self._end(), step + 1)
            self._current = _AheadSpan(self._reads, step, until, self._ahead, self._device)
        return self._current.take()

    def close(self) -> None:
        """Stop reading, and wait for the thread to end."""
        if self._current is not None:
            self._current.close()
            self._current = None


class _AheadSpan:
    """Steps from `first` to before `until`, read in order by one thread."""

    def __init__(self, reads: Reads, first: int, until: int, ahead: int, device: torch.device) -> None:
        self._reads, self._due, self._until, self._ahead, self._device = reads, first, until, ahead, device
        self._read: deque[Microbatches | BaseException] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        # A daemon: a process that is told to end does not wait for its reader.
        self._thread = threading.Thread(target=self._run, args=(first,), name="reading ahead", daemon=True)
        self._thread.start()

    def gives(self, step: int) -> bool:
        return step == self._due < self._until

    def take(self) -> Microbatches:
        with self._changed:
            self._changed.wait_for(lambda: self._read)
            if isinstance(error := self._read[0], BaseException):
                raise error  # it stays first: nothing is read after it
            microbatches = self._read.popleft()
            self._due += 1
            self._changed.notify_all()
        assert not isinstance(microbatches, BaseException)
        return microbatches

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._read.clear()
            self._changed.notify_all()
        # A thread in a read that never returns is left alone: it ends with the process.
        self._thread.join(timeout=5.0)

    def _run(self, first: int) -> None:
        steps = self._reads(first, self._until)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread starts on the first device of the machine
            while self._may_go_on():
                microbatches = next(steps, None)
                if microbatches is None:
                    return
                self._give([pinned(batch) for batch in microbatches] if self._device.type == "cuda" else microbatches)
        except BaseException as error:  # raised again in the step that needs it
            self._give(error)
        finally:
            steps.close()

    def _may_go_on(self) -> bool:
        """Wait until another step may be read; return False once stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._read) < self._ahead)
            return not self._stopped

    def _give(self, result: Microbatches | BaseException) -> None:
        with self._changed:
            self._read.append(result)
            self._changed.notify_all()


def pinned(batch: Microbatch) -> Microbatch:
    """Return the batch in pinned memory, for asynchronous copies to a GPU; tensors that only the host reads are
    kept."""

    def moved(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.pin_memory()

    return evolve(
        batch,
        input_ids_BS=moved(batch.input_ids_BS),
        labels_BS=moved(batch.labels_BS),
        positions_BS=moved(batch.positions_BS),
        real_BS=moved(batch.real_BS),
        dataset_B=moved(batch.dataset_B),
        place_B=moved(batch.place_B),
        in_row_BS=moved(batch.in_row_BS),
        text_BS=moved(batch.text_BS),
        columns={name: column.pin_memory() for name, column in batch.columns.items()},
        units=None if batch.units is None else batch.units.each(lambda tensor: tensor.pin_memory()),
    )


def send_answer(socket: Connection, microbatches: Microbatches) -> None:
    """Send microbatches. Raises OSError if the receiver is gone."""
    buffers: list[pickle.PickleBuffer] = []
    content = [_arrays(batch) for batch in microbatches]
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    socket.send_bytes(pickle.dumps((head, [view.nbytes for view in views])))
    for view in views:
        if view.nbytes:
            socket.send_bytes(view)


def send_failure(socket: Connection, error: BaseException) -> None:
    """Send the exception itself if it can be pickled, else its text, with the traceback as a note."""
    try:
        again = pickle.loads(pickle.dumps(error))
        known = type(again) is type(error) and str(again) == str(error)
    except Exception:
        known = False
    sent = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    socket.send_bytes(pickle.dumps((sent, "".join(traceback.format_exception(error)))))


def receive_answer(socket: Connection) -> Microbatches | BaseException:
    """Return the microbatches that were sent, or the exception. Raises EOFError or OSError if the sender is gone."""
    head, more = pickle.loads(socket.recv_bytes())
    if isinstance(head, BaseException):
        head.add_note(f"in a process that reads:\n{more}")
        return head
    buffers = [np.empty(size, dtype=np.uint8) for size in more]
    for buffer in buffers:
        if buffer.nbytes:
            socket.recv_bytes_into(buffer.data)
    return [_tensors(content) for content in pickle.loads(head, buffers=buffers)]


def _arrays(batch: Microbatch) -> dict[str, Any]:
    return {attribute.name: _array(getattr(batch, attribute.name)) for attribute in fields(Microbatch)}


def _array(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _array(item) for name, item in value.items()}
    return np.ascontiguousarray(value.numpy()) if isinstance(value, torch.Tensor) else value


def _tensors(content: dict[str, Any]) -> Microbatch:
    return Microbatch(**_tensor(content))


def _tensor(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensor(item) for name, item in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


# Deaths in a row, at the same step, after which a step is given up.
ATTEMPTS: Final = 3


@frozen(kw_only=True)
class ReaderProcesses:
    """`count` processes that read the steps of a rank in turn. warn: called when one had to be replaced."""

    plan: Plan
    rank: Rank
    loader: RowLoader
    count: int
    warn: Callable[[int, str], None]

    def reads(self, first: int, until: int) -> Generator[Microbatches]:
        """Yield the microbatches of the steps from `first` to before `until`, in order.

        A process that ends is replaced, and the new one reads its steps. Raises what a step raised in its process, and
        EnvironmentFault if processes end repeatedly at the same step.
        """
        recipe = self._recipe()
        readers = [ReaderProcess(recipe) for _ in range(min(self.count, until - first))]
        try:
            for step in range(first, min(first + len(readers), until)):
                readers[(step - first) % len(readers)].ask(step)
            for step in range(first, until):
                place = (step - first) % len(readers)
                microbatches = self._answer(readers, place, step, recipe)
                if step + len(readers) < until:
                    readers[place].ask(step + len(readers))
                yield microbatches
        finally:
            for reader in readers:
                reader.end()

    def _answer(self, readers: list["ReaderProcess"], place: int, step: int, recipe: bytes) -> Microbatches:
        for _ in range(ATTEMPTS):
            try:
                answer = readers[place].answer()
            except (EOFError, OSError):
                code = readers[place].end()
                self.warn(
                    step,
                    f"rank {self.rank.rank}: the data worker for step {step + 1} died ({_how(code)}) and was replaced",
                )
                readers[place] = ReaderProcess(recipe)
                readers[place].ask(step)
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer
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
            # A session of its own: Ctrl-C at the terminal is for the ranks, which may still need these steps.
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "xtrain.runtime.feed.reading_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._send(recipe)

    def ask(self, step: int) -> None:
        """Request a step; if the process has ended, `answer` raises."""
        self._send(step.to_bytes(8, "little"))

    def answer(self) -> Microbatches | BaseException:
        """Return the result of the oldest request. Raises EOFError or OSError if the process has ended."""
        return receive_answer(self._socket)

    def end(self) -> int:
        """Kill the process if it is running; returns its exit code. It has no state to lose."""
        self._socket.close()
        ended = self.process.poll()
        self.process.kill()
        code = self.process.wait()
        return code if ended is None else ended

    def _send(self, message: bytes) -> None:
        with suppress(OSError):  # it has ended: reading from it raises
            self._socket.send_bytes(message)


class _ByNamePickler(pickle.Pickler):
    """Pickler that writes mapped arrays as the names of their files, and the chain as a word."""

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, CollateChain):
            return ("chain",)
        if isinstance(obj, np.ndarray):
            return mapped_from(obj)
        return None


def mapped_from(array: np.ndarray) -> tuple[Any, ...] | None:
    """Return ("mapped", file, dtype, offset in bytes, shape) of a read-only array mapped from a file, else None."""
    base: Any = array
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    # A view of a map has its file's name too, but only the offset of the map itself.
    while isinstance(base, np.memmap) and isinstance(base.base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or not array.flags.c_contiguous:
        return None
    start = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return ("mapped", str(base.filename), array.dtype.str, base.offset + start, array.shape)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
