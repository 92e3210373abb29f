"""`tick.norms` and `step.norms`: L2 norms by group, with one reduction over ranks.

A rank adds the squares of its shards, each divided by the number of ranks with the same shard, so that every element
counts once under any layout. Squares are computed in fp32 (fp64 for fp64 shards), sums in fp64 on the host in the order
of the model, so that equal states give equal norms.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.components.actions.norms import WHOLE, group_of
from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Rank
from xtrain.runtime.loop.node_calls import DueTicks
from xtrain.runtime.nn.axes import local
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.nn.gradients import copies_of
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.nn.weights import values_of
from xtrain.runtime.observe.records import Records

# Key of the copies for the tick.
TAKEN = "tick.norms"
KEYS = {"parameters": "param_norm", "gradients": "grad_norm", "updates": "update_norm"}


@op("step.norms")
def copy_parameters(plan: Plan, model: ModelParts, due_ticks: DueTicks | None = None) -> StepCall:
    """Copy this rank's parameters before the optimizer step if a tick measures updates after this step."""
    nodes = [node.id for node in plan.nodes if node.op == TAKEN and "updates" in node.args["of"]]

    @torch.no_grad()
    def run(step: Step) -> None:
        if due_ticks is None or due_ticks.will_run(nodes):
            step.taken[TAKEN] = [local(parameter).clone() for _, parameter in model.trained()]

    return run


@op("tick.norms")
def norms(plan: Plan, model: ModelParts, rank: Rank, records: Records, by: str, of: list[str]) -> StepCall:
    """Measure norms collectively and add them to the step's record. Before the first trained step of a start there are
    no gradients, and none are recorded."""
    sums = GroupSums(plan, model, rank, by)

    @torch.no_grad()
    def run(step: Step) -> None:
        trained = [parameter for _, parameter in model.trained()]
        gradients = [local(parameter.grad) for parameter in trained if parameter.grad is not None]
        pieces: dict[str, Tensor] = {}
        if "parameters" in of:
            pieces["parameters"] = _parameter_norms(model)
        if "gradients" in of and len(gradients) == len(trained):
            pieces["gradients"] = _norms(gradients)
        if "updates" in of and TAKEN in step.taken:
            # One by one: all differences at once would be another copy of the parameters.
            pairs = zip(trained, step.taken[TAKEN], strict=True)
            changes = [_norm(local(now) - before) for now, before in pairs]
            pieces["updates"] = torch.stack(changes).double().cpu() if changes else torch.zeros(0)
        found = sums.norms(pieces)
        if "gradients" in found and step.clipped != 1.0:
            found["gradients"] = {name: norm / step.clipped for name, norm in found["gradients"].items()}
        records.measured({f"{KEYS[each]}/{name}": norm for each, of in found.items() for name, norm in of.items()})

    return run


class GroupSums:
    """The groups of the whole model in order, and this rank's contribution to each sum."""

    def __init__(self, plan: Plan, model: ModelParts, rank: Rank, by: str) -> None:
        tensors = plan.parameters.tensors
        self._names = list(dict.fromkeys(group_of(tensor.name, by) for tensor in tensors))
        place = {name: number for number, name in enumerate(self._names)}
        own = {False: model.named_parameters(), True: model.trained()}
        self._places = {trained: [place[group_of(name, by)] for name, _ in named] for trained, named in own.items()}
        self._copies = {trained: copies_of(model, rank, trained=trained) for trained in own}
        self._groups = {
            trained: sorted({place[group_of(tensor.name, by)] for tensor in tensors if tensor.trained or not trained})
            for trained in own
        }
        self._rank = rank

    def norms(self, pieces: dict[str, Tensor]) -> dict[str, dict[str, float]]:
        """Return quantity → group → norm. pieces: for `parameters`, the norms of all parameters of this rank; for other
        quantities, the norms of trained parameters, in their order. Collective."""
        of = {what: what != "parameters" for what in pieces}
        parts: dict[tuple[str, int], list[float]] = {(what, n): [] for what in pieces for n in self._groups[of[what]]}
        for what, own in pieces.items():
            for place, copies, norm in zip(self._places[of[what]], self._copies[of[what]], own.tolist(), strict=True):
                parts[what, place].append(norm * norm / copies)
        total = torch.tensor([sum(each) for each in parts.values()], dtype=torch.float64, device=self._rank.device)
        if self._rank.world_size > 1 and pieces:
            dist.all_reduce(total)
        found: dict[str, dict[str, float]] = {what: {} for what in pieces}
        for (what, place), square in zip(parts, total.tolist(), strict=True):
            found[what][self._names[place]] = square
        return {what: _roots(squares | {WHOLE: math.fsum(squares.values())}) for what, squares in found.items()}


def _roots(squares: dict[str, float]) -> dict[str, float]:
    return {name: math.sqrt(square) if square >= 0 else math.nan for name, square in squares.items()}


def _parameter_norms(model: ModelParts) -> Tensor:
    """Return the norms of this rank's pieces of all parameters; quantized parameters are computed one by one."""
    stored = {each.name: each for each in model.quantised()}
    named = list(model.named_parameters())
    others = iter(_norms([local(parameter) for name, parameter in named if name not in stored]))
    norms = [_norm(values_of(stored[name])).double().cpu() if name in stored else next(others) for name, _ in named]
    return torch.stack(norms)


def _norms(tensors: list[Tensor]) -> Tensor:
    """Return the norm of each tensor, in fp64 on the CPU."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    found = torch._foreach_norm(tensors, 2, _wide(tensors[0]))  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(found).double().cpu()


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=_wide(tensor))


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
