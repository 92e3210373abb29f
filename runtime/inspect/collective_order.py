"""Order of the collectives of a plan at full size: members of a group must issue the same ones with fitting shapes."""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Final

from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from xtrain.plan.certificate import Issued
from xtrain.plan.graph import groups_node
from xtrain.plan.plan import Plan
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import load_ops
from xtrain.runtime.inspect.observer import IssuedCall
from xtrain.runtime.inspect.trace import recorded_calls

PAIRED: Final = ("send", "recv")
Calls = list[IssuedCall]


def issued_alike(plan: Plan, told: Callable[[str], object] = lambda line: None, small: Plan | None = None) -> Issued:
    """Compare what ranks of every kind issue in a step of the plan, traced on meta tensors.

    small: a small plan of the same code. If a trace fails and a trace of `small` does not, the sizes or the layout of
    the plan are the cause, which is a problem; otherwise traces do not support the code, and nothing is traced.

    Ranks: the first of the first two and the last two pipeline coordinates, and the last of the first and the last one.
    Ranks of a coordinate must issue the same calls; coordinates the same calls of groups that they share, and receives
    for sends.
    """
    if groups_node(plan) is not None:
        return _untraced("replica groups have process groups of their own")
    load_ops()
    mesh = plan.mesh
    if mesh.world_size == 1:
        return _untraced("one rank issues no collectives")
    pp = mesh.size("pp")
    stage = mesh.world_size // pp
    first = [coordinate * stage for coordinate in sorted({0, min(1, pp - 1), max(0, pp - 2), pp - 1})]
    ranks = tuple(dict.fromkeys((*first, stage - 1, mesh.world_size - 1)))
    calls: dict[int, Calls] = {}
    for number, rank in enumerate(ranks, start=1):
        told(f"collectives of rank {rank:,}, {number} of {len(ranks)}")
        try:
            calls[rank] = recorded_calls(plan, rank)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return _untraced(f"{plan.architecture.title} looks at values, which a trace does not have")
        except EnvironmentFault as problem:
            return _untraced(str(problem))
        except Exception as problem:
            said = f"the trace of rank {rank:,} failed: {_first_line(problem)}"
            if small is None or not _is_traced(small):
                return _untraced(said)
            return Issued(ranks=(rank,), calls=0, problems=(f"{said}, and a small plan of the same code is traced",))
    problems = [problem for one, other in combinations(ranks, 2) for problem in _compared(plan, calls, one, other)]
    return Issued(ranks=ranks, calls=sum(map(len, calls.values())), problems=tuple(problems))


def _is_traced(plan: Plan) -> bool:
    try:
        recorded_calls(plan, 0)
    except Exception:
        return False
    return True


def _first_line(problem: Exception) -> str:
    return (str(problem) or type(problem).__name__).splitlines()[0]


def _untraced(reason: str) -> Issued:
    return Issued(ranks=(), calls=0, problems=(), reason=reason)


def _compared(plan: Plan, calls: dict[int, Calls], one: int, other: int) -> Iterator[str]:
    ours, theirs = (plan.mesh.coordinates(rank)["pp"] for rank in (one, other))
    if ours == theirs:
        seen = ([_seen(plan, call) for call in calls[rank]] for rank in (one, other))
        yield from _first_difference(one, other, next(seen), next(seen))
        return
    groups = {call.ranks for call in calls[one]} & {call.ranks for call in calls[other]}
    for group in sorted(groups):
        shared = (
            [str(call) for call in calls[rank] if call.ranks == group and call.op not in PAIRED]
            for rank in (one, other)
        )
        yield from _first_difference(one, other, next(shared), next(shared))
    for sender, receiver in ((one, other), (other, one)):
        sent = [call for call in calls[sender] if (call.op, call.peer) == ("send", receiver)]
        received = [call for call in calls[receiver] if (call.op, call.peer) == ("recv", sender)]
        texts = ([", ".join(call.shapes) for call in side] for side in (sent, received))
        yield from _first_difference(sender, receiver, next(texts), next(texts), verbs=("sends", "receives"))


def _seen(plan: Plan, call: IssuedCall) -> str:
    """Return a call as any rank of a pipeline coordinate sees it."""
    if call.peer is None:
        return str(call)
    return f"{call} with pipeline coordinate {plan.mesh.coordinates(call.peer)['pp']}"


def _first_difference(
    one: int, other: int, ours: list[str], theirs: list[str], verbs: tuple[str, str] = ("issues", "issues")
) -> Iterator[str]:
    """Yield the first difference of two lists of calls, in words."""
    for number in range(max(len(ours), len(theirs))):
        pair = [each[number] if number < len(each) else "nothing more" for each in (ours, theirs)]
        if pair[0] != pair[1]:
            yield (
                f"call {number + 1:,}: rank {one:,} {verbs[0]} {pair[0]}, but rank {other:,} {verbs[1]} {pair[1]}: "
                "the ranks would wait for each other"
            )
            return
