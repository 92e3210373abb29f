"""The state of a run from one rank to another that has none, in the same place of a copy of the model: without a file.

A text of JSON goes first, then the bytes of this rank's piece of each tensor, in an order that both know.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain.runtime.checkpoint.full_state import FullState
from xtrain.runtime.parallel.tensor import local

Send = Callable[[Tensor], None]
"""Takes bytes, uint8 [n], in host memory."""
Receive = Callable[[int], Tensor]
"""Gives the next n bytes."""
_LENGTH = 8


def give(state: FullState, beside: dict[str, Any], send: Send) -> None:
    """beside: what else is to be known of it, as JSON."""
    text = json.dumps({**state.described(), **beside}).encode()
    send(torch.tensor([len(text)]).view(torch.uint8))
    send(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    for tensors in state.given():
        for name in sorted(tensors):
            send(local(tensors[name]).detach().cpu().contiguous().view(-1).view(torch.uint8))


def take(state: FullState, receive: Receive, source: Path) -> dict[str, Any]:
    """Put back what `give` of another rank sends, in place; what it has said. source: where that is from, for errors.

    Raises ResumeRefused if its rows are not those of this data.
    """
    length = int(receive(_LENGTH).view(torch.int64).item())
    said: dict[str, Any] = json.loads(bytes(receive(length).tolist()))

    @torch.no_grad()
    def read(tensors: dict[str, Tensor]) -> str:
        for name in sorted(tensors):
            own = local(tensors[name])
            content = receive(own.numel() * own.element_size())
            own.copy_(content.view(own.dtype).view(own.shape))
        return "read"

    state.take(said, read, source)
    return said
