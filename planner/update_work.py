"""What an optimizer does in a step beside updating numbers in place."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from .architecture import ParameterSpec
from .units import BYTES

if TYPE_CHECKING:
    from .costs.op_trace import CollectiveCall
    from .resolved import Resolved

# Elements whose numbers are in the format of the update at once, where that is another than the one they are stored in.
AT_ONCE: Final = 2**24
# Of 64 random bits of an element, and of what they are computed from.
OF_RANDOM_BITS: Final = 24


@frozen(kw_only=True)
class UpdateWork:
    """Of one rank and step. flops: of products of matrices. scratch: bytes that are allocated meanwhile."""

    calls: "tuple[CollectiveCall, ...]" = ()
    flops: int = 0
    scratch: int = 0


def rows_at_once(shape: Sequence[int]) -> int:
    """How many rows, along the first dim, of a rank's piece of a parameter are updated at once where their numbers are
    brought into another format."""
    return max(1, AT_ONCE // max(1, prod(shape[1:])))


def update_work(run: "Resolved", parameters: Sequence[ParameterSpec]) -> UpdateWork | None:
    """Of the first rank of a pipeline coordinate. parameters: its own, whole."""
    chosen, trained = run.spec.optimizer, [each for each in parameters if each.trained]
    work = chosen.work(run, trained)
    if not chosen.converts(run.optimizer_args):
        return work
    return evolve(work or UpdateWork(), scratch=(0 if work is None else work.scratch) + _converted(run, trained))


def _converted(run: "Resolved", parameters: Iterable[ParameterSpec]) -> int:
    """Bytes of the numbers of some rows in the format of the update: fp32, or finer where weights are."""
    stored, rounds = run.formats.params, run.optimizer_args.get("stochastic_rounding", False)
    width = max(BYTES[stored], BYTES["fp32"])
    weights = 2 if width > BYTES[stored] else 0  # with the gradient
    largest = 0
    for parameter in parameters:
        shape = run.cuts.shape(parameter)
        elements = min(shape[0], rows_at_once(shape)) * prod(shape[1:])
        moments = sum(BYTES[each.format or stored] != width for each in run.moments(parameter))
        largest = max(largest, elements * ((weights + moments) * width + rounds * OF_RANDOM_BITS))
    return largest
