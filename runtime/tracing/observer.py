"""Looks on while a rank runs: every operator is told to the ledger and the recorder of collectives."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.dsl.schema.stacks import stack_of_node
from xtrain.runtime.tracing.collective_recorder import CollectiveRecorder
from xtrain.runtime.tracing.ledger import Ledger

LABEL = torch.ops.profiler._record_function_enter_new.default
DEVICE = torch.ops.prim.device.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
BROADCAST = torch.ops.c10d.broadcast_.default


class TraceObserver(TorchDispatchMode):
    """heard: what another rank says, where it broadcasts something. ends: what to do when a label of torch ends."""

    def __init__(self, ledger: Ledger, collectives: CollectiveRecorder) -> None:
        super().__init__()
        self.ledger, self.collectives = ledger, collectives
        self.heard: Tensor | None = None
        self._works_out = False  # DTensor does, which kind of tensor an operator would give
        self.ends: dict[str, Callable[[], None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE:
            return args[0].fake_device  # what the fake mode would say, which takes it a tenth of a trace
        if DTensor in types:
            return NotImplemented  # its parts are what counts, and they come by themselves
        if func is WAIT:
            return args[0]  # of what is not fake, no new tensor comes either
        out = func(*args, **(kwargs or {}))
        if not self._works_out:
            self._see(out)
        namespace = func.namespace
        if namespace == "profiler":
            self._label(args[0] if func is LABEL else None)
        elif namespace in ("c10d", "_c10d_functional"):
            stack = stack_of_node(self.collectives.see(func, args, out) or "")
            if stack is not None and stack.buckets:
                self.ledger.assign("unreduced", args[0])
            if func is BROADCAST and self.heard is not None:
                args[0][0].copy_(self.heard)
        return out

    @contextmanager
    def blind_to_shapes(self) -> Iterator[None]:
        """DTensor works out once for every operator what it gives, by calling it with tensors of whole shapes, which
        have no memory in a run."""
        original = ShardingPropagator._propagate_tensor_meta_non_cached

        def work_out(propagator: ShardingPropagator, schema: OpSchema) -> Any:
            self._works_out = True
            try:
                return original(propagator, schema)
            finally:
                self._works_out = False

        with ExitStack() as stack:
            stack.callback(setattr, ShardingPropagator, original.__name__, original)
            setattr(ShardingPropagator, original.__name__, work_out)
            yield

    def _see(self, out: Any) -> None:
        if isinstance(out, FakeTensor):
            self.ledger.see(out)
        elif isinstance(out, tuple | list):
            for part in out:
                self._see(part)

    def _label(self, begins: str | None) -> None:
        """A label begins, or the innermost one ends."""
        if begins is not None:
            self.collectives.labels.append(begins)
        else:
            end = self.ends.get(self.collectives.labels.pop())
            if end is not None:
                end()
