"""What the storages of a rank are for, said while it runs."""

from collections.abc import Iterator
from typing import Any

from attrs import define, field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from xtrain.planner.plan import Memory
from xtrain.runtime.models.batch import ModelBatch
from xtrain.runtime.models.parts import ModelParts
from xtrain.runtime.tracing.ledger import Ledger, bytes_of, pieces
from xtrain.runtime.training.ema import WeightAverages

# In host memory, where the plan says so.
STATES = ("parameters", "gradients", "optimizer", "averages")


@define(kw_only=True, eq=False)
class MemoryOwners:
    """Gives storages their category when it can be seen what they are for, and sums them up in the end."""

    model: ModelParts
    optimizer: Optimizer
    ema: WeightAverages | None
    ledger: Ledger
    offloaded: bool
    _forwards: list[int] = field(factory=list, init=False)  # where in the ledger's time a forward has ended
    _units: list[Any] = field(init=False)

    @_units.default  # pyright: ignore[reportAttributeAccessIssue]
    def _find_units(self) -> list[Any]:
        groups = [m._get_fsdp_state()._fsdp_param_group for m in self.model.modules() if isinstance(m, FSDPModule)]
        return [group for group in groups if group is not None]

    def begin(self) -> None:
        """A step begins."""
        self._forwards.clear()
        self.ledger.begin("lasting")
        self.ledger.assign("parameters", pieces(self._parameters()))
        self.ledger.assign("optimizer", pieces(self._moments()))
        self.ledger.assign("averages", pieces(self._averages()))

    def forward_begins(self, batches: list[ModelBatch]) -> None:
        """`batches`: those that wait, too."""
        self.name_gradients()
        for batch in batches:
            tensors = (batch.input_ids_BS, batch.labels_BS, batch.positions_BS, batch.real_BS, batch.dataset_B)
            read = (*batch.columns.values(), *(() if batch.units is None else (batch.units.segment_BS,)))
            self.ledger.assign("batch", pieces((*tensors, *read, batch.packing.document_BS)))

    def forward_ends(self, objective: Tensor | None) -> None:
        """`objective`: what the last stage gives."""
        if objective is not None and self.model.predicts:  # that of a head of rewards leaves to autograd what it needs
            self.ledger.assign("loss", pieces(left_by_heads(objective, 1 + self.model.parts[0].arch.mtp)))
        gathered = (tensor for p in self._sharded() for tensor in p.all_gather_outputs)
        self.ledger.assign("unsharded", gathered)
        self.forward_counts()

    @property
    def last_forward(self) -> int:
        """When the latest forward ended, in the ledger's time."""
        return self._forwards[-1]

    def forward_counts(self) -> None:
        """Activations are looked for here."""
        self._forwards.append(self.ledger.now)

    def name_gradients(self) -> None:
        """A rank's own gradients, and whole ones that are still to be exchanged, which parameters that are gathered
        have."""
        whole = pieces(self._whole_gradients())
        known = {tensor.untyped_storage()._cdata for tensor in whole}
        own = pieces(p.grad for p in self.model.parameters())
        self.ledger.assign("gradients", (tensor for tensor in own if tensor.untyped_storage()._cdata not in known))
        self.ledger.assign("unreduced", whole)

    def memory(self) -> Memory:
        """All categories: each when most of it was alive, but activations after a forward."""
        ledger, parameters = self.ledger, list(self.model.parameters())
        states = {
            "parameters": bytes_of(pieces(self._parameters())),
            "gradients": bytes_of(pieces(p.grad for p in parameters)),
            "optimizer": bytes_of(pieces(self._moments())),
            "averages": bytes_of(pieces(self._averages())),
        }
        rest = {name: max(ledger.over_time(name)) for name in ("unsharded", "unreduced", "loss")}
        left = ledger.over_time("")
        rest["activations"] = max(left[end - 1] for end in self._forwards)
        on_device = sum(rest.values()) + (0 if self.offloaded else sum(states.values()))
        peak = max(ledger.over_time(but=STATES if self.offloaded else ()))
        return Memory(**states, **rest, working=max(0, peak - on_device), offloaded=self.offloaded)

    def _parameters(self) -> Iterator[Tensor]:
        """With what those that are quantised have beside their bytes, and those of a teacher."""
        yield from self.model.parameters()
        for part in self.model.parts:
            if part.teacher is not None:
                yield from part.teacher.model.parameters()
        for each in self.model.quantised():
            if (beside := each.matrix.beside(each.module)) is not None:
                yield beside

    def _moments(self) -> Iterator[Tensor]:
        for state in self.optimizer.state.values():
            yield from (tensor for tensor in state.values() if tensor.dim())

    def _averages(self) -> Iterator[Tensor]:
        """Those of parameters: the others are as small as what they are of."""
        if self.ema is not None:
            yield from (self.ema.averages[name] for name, _ in self.model.named_parameters())

    def _sharded(self) -> Iterator[Any]:
        """What FSDP knows of every parameter that it shards."""
        for unit in self._units:
            yield from unit.fsdp_params

    def _whole_gradients(self) -> Iterator[Tensor | None]:
        for parameter in self._sharded():
            yield parameter.unsharded_accumulated_grad
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param.grad


def left_by_heads(objective: Tensor, heads: int) -> list[Tensor | None]:
    """The gradients that the chunked loss has computed in its forward, which its node in the graph has, or what is left
    to compute them in the backward; of so many heads."""
    nodes: dict[Any, None] = {objective.grad_fn: None}
    found: list[Tensor | None] = []
    queue = list(nodes)
    for node in queue:
        if hasattr(node, "grads"):
            heads -= 1
            if node.grads is not None:
                found += node.grads
            else:
                _, lse_T, entropy_T, hidden_TD, *_ = node.saved_tensors
                found += [hidden_TD, lse_T, entropy_T]
            if not heads:
                return found
        new = [each for each, _ in node.next_functions if each is not None and each not in nodes]
        nodes |= dict.fromkeys(new)
        queue += new
    raise AssertionError("the last stage ends with a loss")
