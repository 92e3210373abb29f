"""What a process that reads and its rank tell each other: microbatches, or why there are none.

A message of a step is a pickle whose arrays follow it one by one, so that none is copied on the way but by the socket.
"""

import pickle
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from attrs import fields

from xtrain.runtime.data.collate.batch import Microbatch
from xtrain.runtime.data.loading.reading_ahead import Microbatches


def send_answer(socket: Connection, microbatches: Microbatches) -> None:
    """Raises OSError if nobody listens any more."""
    buffers: list[pickle.PickleBuffer] = []
    content = [_arrays(batch) for batch in microbatches]
    head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    socket.send_bytes(pickle.dumps((head, [view.nbytes for view in views])))
    for view in views:
        if view.nbytes:
            socket.send_bytes(view)


def send_failure(socket: Connection, error: BaseException) -> None:
    """The exception itself if it can be sent, else its text, with the traceback as a note."""
    try:
        again = pickle.loads(pickle.dumps(error))
        known = type(again) is type(error) and str(again) == str(error)
    except Exception:
        known = False
    sent = error if known else RuntimeError(f"{type(error).__name__}: {error}")
    socket.send_bytes(pickle.dumps((sent, "".join(traceback.format_exception(error)))))


def receive_answer(socket: Connection) -> Microbatches | BaseException:
    """The microbatches that were sent, or the exception. Raises EOFError or OSError if the sender is gone."""
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
        return {name: _array(each) for name, each in value.items()}
    return np.ascontiguousarray(value.numpy()) if isinstance(value, torch.Tensor) else value


def _tensors(content: dict[str, Any]) -> Microbatch:
    return Microbatch(**_tensor(content))


def _tensor(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensor(each) for name, each in value.items()}
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value
