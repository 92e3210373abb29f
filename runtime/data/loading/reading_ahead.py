"""Reading ahead: the microbatches of the next steps are made in a thread while a step computes.

What a step is given is a function of its number alone, so that what was read ahead is never of an old mixture, and a
reader that is begun anew gives what the one before it would have given.
"""

import threading
from collections import deque
from collections.abc import Callable, Generator

import torch
from attrs import evolve
from torch import Tensor

from xtrain.runtime.data.collate.batch import Microbatch

Microbatches = list[Microbatch]
# From a step up to, and without, another one: what each of them is given, in order.
Reads = Callable[[int, int], Generator[Microbatches]]


class ReadingAhead:
    """Gives the steps of a run their microbatches, of which up to `ahead` steps are read before they are asked for.

    A thread goes on reading where it has been asked last: `take` in the order of steps waits for no more than what has
    not been read yet; another order begins anew. Kernels and copies of tensors let the rest of the process run.
    """

    def __init__(self, reads: Reads, *, ahead: int, end: Callable[[], int], device: torch.device) -> None:
        """end: the step that is read no more, asked whenever reading begins. device: the one that computes."""
        assert ahead >= 1
        self._reads, self._ahead, self._end, self._device = reads, ahead, end, device
        self._current: _AheadSpan | None = None

    def take(self, step: int) -> Microbatches:
        """The microbatches of a step. Raises what reading them raised."""
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
    """Steps in order, from `first` up to and without `until`, read by one thread."""

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
                raise error  # it stays: nothing is read behind it
            found = self._read.popleft()
            self._due += 1
            self._changed.notify_all()
        assert not isinstance(found, BaseException)
        return found

    def close(self) -> None:
        with self._changed:
            self._stopped = True
            self._read.clear()
            self._changed.notify_all()
        # A thread in the middle of a read that takes for ever is left alone: it ends with the process.
        self._thread.join(timeout=5.0)

    def _run(self, first: int) -> None:
        steps = self._reads(first, self._until)
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # a thread begins with the first device of the machine
            while self._may_go_on():
                found = next(steps, None)
                if found is None:
                    return
                self._give([pinned(batch) for batch in found] if self._device.type == "cuda" else found)
        except BaseException as error:  # told to the step that needs it, whatever it is
            self._give(error)
        finally:
            steps.close()

    def _may_go_on(self) -> bool:
        """Wait until another step may be read; False if nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._read) < self._ahead)
            return not self._stopped

    def _give(self, found: Microbatches | BaseException) -> None:
        with self._changed:
            self._read.append(found)
            self._changed.notify_all()


def pinned(batch: Microbatch) -> Microbatch:
    """The same in memory that a GPU copies from while both go on; what only the host reads stays where it is."""

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
