"""What an optimizer does in a step beside updating numbers in place."""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from xtrain.dsl.schema.optimizers import OPTIMIZERS
from xtrain.planner.architecture import ParameterSpec
from xtrain.planner.model.groups import optimizers_of
from xtrain.planner.units import BYTES

if TYPE_CHECKING:
    from xtrain.planner.costs.op_trace import CollectiveCall
    from xtrain.planner.resolved import Resolved

# Elements whose numbers are in the format of the update at once, where that is another than the one they are stored in.
AT_ONCE: Final = 2**24
# Of 64 random bits of an element, and of what they are computed from.
OF_RANDOM_BITS: Final = 24
# Numbers for each element while signs are compared: of the update, both signs and their product.
OF_SIGNS: Final = 4


@frozen(kw_only=True)
class UpdateWork:
    """Of one rank and step. flops: of products of matrices. scratch: bytes that are allocated meanwhile."""

    calls: "tuple[CollectiveCall, ...]" = ()
    flops: int = 0
    scratch: int = 0

    def __add__(self, other: "UpdateWork") -> "UpdateWork":
        """That of two optimizers, one after the other."""
        return UpdateWork(
            calls=(*self.calls, *other.calls),
            flops=self.flops + other.flops,
            scratch=max(self.scratch, other.scratch),
        )


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows, along the first dim, of a rank's piece of a parameter are updated at once where their numbers are
    brought into another format."""
    return max(1, AT_ONCE // max(1, prod(shape[1:])))


def update_work(run: "Resolved", parameters: Iterable[ParameterSpec]) -> UpdateWork | None:
    """Of the first rank of a pipeline coordinate, all optimizers together. parameters: its own, whole."""
    found: UpdateWork | None = None
    for name, chosen in optimizers_of(run.spec).items():
        own = [each for each in parameters if each.trained and run.groups.owner(each.name) == name]
        work = chosen.work(run, own)
        args = run.groups.args(name)
        if chosen.converts(args) or args.get("cautious_decay", False):
            converted = _converted(run, args, own)
            work = evolve(work or UpdateWork(), scratch=(0 if work is None else work.scratch) + converted)
        if work is not None:
            found = work if found is None else found + work
    return found


def cuts_along(run: "Resolved", parameter: ParameterSpec) -> list[tuple[str, int]]:
    """The axes that cut a parameter, and which dim."""
    cuts = run.cuts
    if parameter.expert:
        return [("ep_fsdp", cuts.expert_dimension)] if cuts.ep_fsdp > 1 else []
    found = [(" · ".join(run.wide(*run.shard_axes)), 0)] if cuts.fsdp > 1 else []
    if (dim := cuts.tensor_dim(parameter)) is not None:
        found.append(("tp", dim))
    return found


def _converted(run: "Resolved", args: Mapping[str, Any], parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of the numbers of some rows in the format of the update, which is fp32, or finer where weights are, and of
    what says which of them decay. args: of the optimizer."""
    stored, rounds = run.formats.params, args.get("stochastic_rounding", False)
    cautious = OF_SIGNS if args.get("cautious_decay", False) else 0
    width = max(BYTES[stored], BYTES["fp32"])
    weights = 2 if width > BYTES[stored] else 0  # with the gradient
    largest, chosen = 0, OPTIMIZERS.of(args)
    for parameter in parameters:
        shape = run.cuts.shape(parameter)
        elements = min(shape[0], rows_at_once(shape)) * prod(shape[1:])
        moments = sum(BYTES[each.format or stored] != width for each in run.moments(parameter))
        numbers = (weights + moments + chosen.temporaries) * width if chosen.converts(args) else 0
        largest = max(largest, elements * (numbers + cautious * width + rounds * OF_RANDOM_BITS))
    return largest
