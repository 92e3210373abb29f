"""Storages alive during a traced step, from the operator that makes each to its end, and their purpose."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

from attrs import define, field
from torch import Tensor, UntypedStorage
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from xtrain.plan.estimates import Memory
from xtrain.runtime.loop.memory_report import averages_of, moments
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.axes import own_part
from xtrain.runtime.nn.batch import ModelBatch
from xtrain.runtime.nn.transformer import ModelParts


class Ledger:
    """Bytes of storages over time. A storage has a number, and belongs to the category assigned last.

    Time is counted in changes: `now` grows by one with each change.
    """

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}  # by address of the storage, as long as it lives
        self._bytes: dict[int, int] = {}  # of live storages, by number
        self._references: dict[int, Any] = {}  # by address, as long as it lives
        self._changes: list[tuple[int, int]] = []  # (number, added bytes)
        self._category: dict[int, str] = {}
        self._like: dict[int, int] = {}  # invented storages → the one whose category they share
        self._start = ""
        self._count = 0

    @property
    def now(self) -> int:
        return len(self._changes)

    def see(self, tensor: Tensor) -> None:
        """Register the storage of a tensor, if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._number_of:
            self._begin(storage, address)

    def assign(self, category: str, tensors: Iterable[Tensor]) -> None:
        """Assign storages to a category; unknown storages are skipped.

        It applies from the storage's start, or from now on if the storage had another category.
        """
        for tensor in tensors:
            address = tensor.untyped_storage()._cdata
            number = self._number_of.get(address)
            if number is None or self._category.get(number) == category:
                continue
            if self._category.get(number, self._start) != self._start:
                number = self._renumber(address)
            self._category[number] = category

    @property
    def newest(self) -> int:
        """The number of the newest storage; later ones have higher numbers."""
        return self._count

    def since(self, time: int) -> list[tuple[int, int]]:
        """Return the changes from `time` on: (number of the storage, added bytes)."""
        return self._changes[time:]

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage, if known."""
        return self._number_of.get(tensor.untyped_storage()._cdata)

    def alive(self) -> dict[int, int]:
        """Return the bytes of live storages, by number."""
        return {number: size for number, size in self._bytes.items() if size}

    def made_up(self, kind: str | int) -> int:
        """Invent a storage and return its number. kind: its category, or the storage whose category it shares."""
        self._count += 1
        self._set_kind(self._count, kind)
        return self._count

    def _set_kind(self, number: int, kind: str | int) -> None:
        if isinstance(kind, int):
            self._like[number] = kind
        else:
            self._category[number] = kind

    def has_kind(self, tensor: Tensor, kind: str | int) -> None:
        """Give a tensor's storage a category, or another storage's category."""
        number = self.number_of(tensor)
        assert number is not None
        self._set_kind(number, kind)

    def change(self, number: int, size: int) -> None:
        """Record a change without an operator: a storage begins, ends or is resized."""
        self._changes.append((number, size))
        self._bytes[number] = self._bytes.get(number, 0) + size

    def kind_of(self, number: int) -> str:
        """Return the category of a storage, as assigned so far."""
        return self._category.get(self._like.get(number, number), "")

    def begin(self, category: str) -> None:
        """Start counting: live storages belong to `category` until reassigned."""
        self._changes = list(self._bytes.items())
        self._start, self._category = category, dict.fromkeys(self._bytes, category)

    def over_time(self, category: str | None = None, *, but: Sequence[str] = ()) -> list[int]:
        """Return the live bytes after every change: of one category (`""`: unassigned), or of all `but` some."""
        kinds = {number: self.kind_of(number) for number in {number for number, _ in self._changes}}
        counts = {n: kind == category if category is not None else kind not in but for n, kind in kinds.items()}
        return list(accumulate(size * counts[number] for number, size in self._changes))

    @contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Record FSDP's resizing of storages, which is no operator."""
        original: Callable[[UntypedStorage, int], Any] = UntypedStorage.resize_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self._resized(storage)
            return result

        with ExitStack() as stack:
            stack.callback(setattr, UntypedStorage, "resize_", original)
            UntypedStorage.resize_ = resize_  # pyright: ignore[reportAttributeAccessIssue]
            yield

    def _begin(self, storage: UntypedStorage, address: int) -> None:
        self._count += 1
        number, size = self._count, storage.nbytes()
        self._number_of[address], self._bytes[number] = number, size
        self._changes.append((number, size))

        def end(_: Any) -> None:
            last = self._number_of.pop(address)
            del self._references[address]
            self._changes.append((last, -self._bytes.pop(last)))

        self._references[address] = weakref.ref(storage, end)

    def _renumber(self, address: int) -> int:
        """Count a storage as a new one from now on."""
        self._count += 1
        old, new = self._number_of[address], self._count
        size = self._bytes.pop(old)
        self._number_of[address], self._bytes[new] = new, size
        self._changes += [(old, -size), (new, size)]
        return new

    def _resized(self, storage: UntypedStorage) -> None:
        number = self._number_of.get(storage._cdata)
        if number is not None:
            size = storage.nbytes()
            self._changes.append((number, size - self._bytes[number]))
            self._bytes[number] = size


def pieces(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the local parts of tensors, without None."""
    return [own_part(tensor) for tensor in tensors if tensor is not None]


def bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# In host memory if the plan offloads them.
STATES = ("parameters", "gradients", "optimizer", "averages")


@define(kw_only=True, eq=False)
class MemoryOwners:
    """Assignment of storages to categories once their purpose is known, and their sum at the end."""

    model: ModelParts
    optimizer: Optimizer
    ema: WeightAverages | None
    ledger: Ledger
    offloaded: bool
    _forwards: list[int] = field(factory=list, init=False)  # times in the ledger at which a forward ended
    _units: list[Any] = field(init=False)

    @_units.default  # pyright: ignore[reportAttributeAccessIssue]
    def _find_units(self) -> list[Any]:
        groups = [m._get_fsdp_state()._fsdp_param_group for m in self.model.modules() if isinstance(m, FSDPModule)]
        return [group for group in groups if group is not None]

    def begin(self) -> None:
        """Begin a step."""
        self._forwards.clear()
        self.ledger.begin("lasting")
        self.ledger.assign("parameters", pieces(self._parameters()))
        self.ledger.assign("optimizer", pieces(moments(self.optimizer)))
        self.ledger.assign("averages", pieces(averages_of(self.model, self.ema)))

    def forward_begins(self, batches: list[ModelBatch]) -> None:
        """Begin a forward. `batches`: including waiting ones."""
        self.name_gradients()
        for batch in batches:
            tensors = (batch.input_ids_BS, batch.labels_BS, batch.positions_BS, batch.real_BS, batch.dataset_B)
            read = (*batch.columns.values(), *(() if batch.units is None else (batch.units.segment_BS,)))
            self.ledger.assign("batch", pieces((*tensors, *read, batch.packing.document_BS)))

    def forward_ends(self, objective: Tensor | None) -> None:
        """End a forward. `objective`: the output of the last stage."""
        if objective is not None and self.model.predicts:  # a reward head leaves its gradients to autograd
            self.ledger.assign("loss", pieces(left_by_heads(objective, 1 + self.model.parts[0].arch.mtp)))
        gathered = (tensor for p in self._sharded() for tensor in p.all_gather_outputs)
        self.ledger.assign("unsharded", gathered)
        self.forward_counts()

    @property
    def last_forward(self) -> int:
        """Time in the ledger at which the latest forward ended."""
        return self._forwards[-1]

    def forward_counts(self) -> None:
        """Mark a time at which activations are measured."""
        self._forwards.append(self.ledger.now)

    def name_gradients(self) -> None:
        """Categorize a rank's own gradients, and the full gradients of gathered parameters before they are reduced."""
        whole = pieces(self._whole_gradients())
        known = {tensor.untyped_storage()._cdata for tensor in whole}
        own = pieces(p.grad for p in self.model.parameters())
        self.ledger.assign("gradients", (tensor for tensor in own if tensor.untyped_storage()._cdata not in known))
        self.ledger.assign("unreduced", whole)

    def memory(self) -> Memory:
        """Return all categories: each at its own peak, activations after a forward."""
        ledger, parameters = self.ledger, list(self.model.parameters())
        states = {
            "parameters": bytes_of(pieces(self._parameters())),
            "gradients": bytes_of(pieces(p.grad for p in parameters)),
            "optimizer": bytes_of(pieces(moments(self.optimizer))),
            "averages": bytes_of(pieces(averages_of(self.model, self.ema))),
        }
        rest = {name: max(ledger.over_time(name)) for name in ("unsharded", "unreduced", "loss")}
        left = ledger.over_time("")
        rest["activations"] = max(left[end - 1] for end in self._forwards)
        on_device = sum(rest.values()) + (0 if self.offloaded else sum(states.values()))
        peak = max(ledger.over_time(but=STATES if self.offloaded else ()))
        return Memory(**states, **rest, working=max(0, peak - on_device), offloaded=self.offloaded)

    def _parameters(self) -> Iterator[Tensor]:
        """Yield all parameters, with the scales of quantized ones and a teacher's parameters."""
        yield from self.model.parameters()
        for part in self.model.parts:
            if part.teacher is not None:
                yield from part.teacher.model.parameters()
        for matrix in self.model.quantised():
            if (beside := matrix.matrix.beside(matrix.module)) is not None:
                yield beside

    def _sharded(self) -> Iterator[Any]:
        """Yield FSDP's record of every parameter that it shards."""
        for unit in self._units:
            yield from unit.fsdp_params

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        for parameter in self._sharded():
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param.grad


def left_by_heads(objective: Tensor, heads: int) -> list[Tensor | None]:
    """Return the gradients that the chunked loss computed in its forward, held by its graph node, or the tensors from
    which the backward computes them; of `heads` heads."""
    nodes: dict[Any, None] = {objective.grad_fn: None}
    tensors: list[Tensor | None] = []
    queue = list(nodes)
    for node in queue:
        if hasattr(node, "grads"):
            heads -= 1
            if node.grads is not None:
                tensors += node.grads
            else:
                _, lse_T, entropy_T, hidden_TD, *_ = node.saved_tensors
                tensors += [hidden_TD, lse_T, entropy_T]
            if not heads:
                return tensors
        new = [previous for previous, _ in node.next_functions if previous is not None and previous not in nodes]
        nodes |= dict.fromkeys(new)
        queue += new
    raise AssertionError("the last stage ends with a loss")
