"""Layers of a user that mix the positions of a document, which carry a state from one position to the next.

The function is called for each document, or with the state of earlier positions for one that texts are continued by: it
cannot mix documents.
"""

from typing import Any

import torch
from torch import Tensor

from xtrain.blocks.mixer import UserMixer
from xtrain.runtime.base.collectives import gather
from xtrain.runtime.base.user_parts import UserPart
from xtrain.runtime.nn.axes import Axes, local
from xtrain.runtime.nn.batch import DocumentLayout, LayerCache
from xtrain.runtime.nn.block import BlockSettings, Built, builds
from xtrain.runtime.nn.layers import OwnModule, is_like, type_text

State = tuple[Tensor, ...]
BEGINNINGS = {"zeros": torch.zeros, "ones": torch.ones}


class OwnMixer(OwnModule):
    """Layer of a user's function f(x, states…, weights…) → (activations, states…) on documents [B, S, D]."""

    def __init__(self, layer: UserMixer, part: UserPart, axes: Axes) -> None:
        super().__init__(layer, part, axes)
        self._states, self._holders = layer.states, tuple(weight.owner for weight in layer.weights)

    def forward(self, x_BSD: Tensor, packing: DocumentLayout, cache: LayerCache | None = None) -> Tensor:
        """Compute the layer. Raises PartFailed for what the function raises, and for a result that does not fit."""
        tensor = self.axes.tensor
        if tensor is None or not tensor.sequence:
            return self._mixed(x_BSD, packing, cache)  # pyright: ignore[reportCallIssue]
        own = x_BSD.shape[1]
        whole_BSD = gather(x_BSD, 1, tensor.group)
        out_BSD = self._mixed(whole_BSD, packing, cache)  # pyright: ignore[reportCallIssue]
        return out_BSD.narrow(1, tensor.group.rank() * own, own)

    @torch.compiler.disable  # compiled, each packing would get a graph of its own
    def _mixed(self, x_BSD: Tensor, packing: DocumentLayout, cache: LayerCache | None) -> Tensor:
        rows = x_BSD.shape[0]
        if cache is not None and cache.filled:
            out_BSD, last = self.step(x_BSD.transpose(0, 1) if cache.one_text else x_BSD, cache.kept(self))
            cache.keep(self, last)
            return out_BSD.transpose(0, 1) if cache.one_text else out_BSD
        if packing.single:
            out_BSD, last = self.step(x_BSD, self.beginning(x_BSD, rows))
        else:
            by_row: list[list[Tensor]] = [[] for _ in range(rows)]
            states: list[State] = [()] * rows
            for row, first, length in packing.segments:
                x_1LD = x_BSD[row : row + 1, first : first + length]
                out_1LD, states[row] = self.step(x_1LD, self.beginning(x_BSD, 1))
                by_row[row].append(out_1LD)
            out_BSD = torch.cat([torch.cat(parts, 1) for parts in by_row])
            last = tuple(torch.cat(each) for each in zip(*states, strict=True))
        if cache is not None:
            cache.keep(self, last)
        return out_BSD

    def beginning(self, x_BSD: Tensor, rows: int) -> State:
        """Return the states at the first position of documents."""
        like: dict[str, Any] = {"dtype": x_BSD.dtype, "device": x_BSD.device}
        return tuple(BEGINNINGS[state.initial](rows, *state.shape, **like) for state in self._states)

    def step(self, x_BSD: Tensor, states: State) -> tuple[Tensor, State]:
        """Return the activations of positions that follow on `states`, and the states after them."""
        partial = self.axes.tensor is not None and self.axes.tensor.sequence
        weights = {name: local(getattr(self, name).weight, partial=partial) for name in self._holders}
        found: Any = self._called(x_BSD, *states, **weights)
        found = found if isinstance(found, tuple) else (found,)
        wanted = [("activations", x_BSD)]
        wanted += [(f"state {number}", state) for number, state in enumerate(states, 1)]
        if len(found) != len(wanted):
            count = len(wanted) - 1
            raise self.part.failed(f"gave {len(found)} values, not activations and {count} of its states")
        for (what, before), now in zip(wanted, found, strict=True):
            if not is_like(now, before):
                raise self.part.failed(f"gave {type_text(now)} as {what}, not {type_text(before)}")
        return found[0], tuple(found[1:])


@builds(UserMixer)
def _mixer(layer: UserMixer, settings: BlockSettings) -> Built:
    module = OwnMixer(layer, settings.part_of(layer), settings.axes)
    return module, lambda x_BSD, given: module(x_BSD, given.packing, given.cache)
