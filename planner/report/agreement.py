"""Closed forms held against a trace: for every category of memory and every collective a check with both numbers."""

from collections.abc import Iterable
from typing import Final

from attrs import evolve, frozen

from xtrain.planner.plan import Check, Mesh, Plan, RankClass, Status, Traced, Traffic
from xtrain.planner.report.render_memory import CATEGORIES
from xtrain.planner.units import bytes_text

TOLERANCE: Final = 0.10
NEGLIGIBLE: Final = 1e-3  # of what a rank holds or sends in all: less decides nothing, however far it is off
PREFIX: Final = "trace."

Ranks = tuple[int, ...]


@frozen(kw_only=True)
class TraceComparison:
    """One figure by both ways, on one rank; `whole` is what it is a part of."""

    rank: int
    closed: int
    traced: int
    whole: int

    @property
    def apart(self) -> float:
        """Difference as a share of the larger; 0 where it is negligible."""
        difference = abs(self.closed - self.traced)
        return difference / max(self.closed, self.traced) if difference > NEGLIGIBLE * self.whole else 0.0


def ranks_to_trace(plan: Plan) -> tuple[int, ...]:
    """The first rank of every pipeline coordinate, but only one of neighbours whose closed forms are the same."""
    found: list[RankClass] = []
    for one in plan.estimates.classes:
        if not found or evolve(one, pp=found[-1].pp) != found[-1]:
            found.append(one)
    each = plan.mesh.world_size // plan.mesh.size("pp")
    return tuple(one.pp * each for one in found)


def with_trace(plan: Plan, traced: tuple[Traced, ...]) -> Plan:
    """The plan with its trace, and with the checks that hold both against each other."""
    own = tuple(check for check in plan.checks if not check.id.startswith(PREFIX))
    return evolve(plan, traced=traced, checks=(*own, *agreement(evolve(plan, traced=traced))))


def agreement(plan: Plan) -> tuple[Check, ...]:
    """A check for each figure, with the rank on which both ways are furthest apart; beyond TOLERANCE it warns."""
    pairs = [(each, _class(plan, each)) for each in plan.traced]
    if not pairs:
        return ()
    return (*_memory(pairs), *_traffic(plan.mesh, pairs))


def _class(plan: Plan, traced: Traced) -> RankClass:
    return next(each for each in plan.estimates.classes if each.pp == traced.pp)


def _memory(pairs: list[tuple[Traced, RankClass]]) -> Iterable[Check]:
    """What is alive at the peak. The reserve is from outside: no trace sees it."""
    for name in CATEGORIES:
        if name == "reserve":
            continue
        found = [
            TraceComparison(
                rank=traced.rank,
                closed=getattr(one.memory, name),
                traced=getattr(traced.memory, name),
                whole=traced.memory.total_bytes,
            )
            for traced, one in pairs
        ]
        if any(each.closed or each.traced for each in found):
            yield _check(f"memory.{name}", found)


def _traffic(mesh: Mesh, pairs: list[tuple[Traced, RankClass]]) -> Iterable[Check]:
    """Calls and bytes by group of ranks: a trace cannot tell axes with the same ranks apart, such as tp 2 and ep 2."""
    sums = [(traced, sums_of_groups(mesh, one.traffic), sums_of_groups(mesh, traced.traffic)) for traced, one in pairs]
    names = _axes_of_groups(mesh, (each for traced, _ in pairs for each in traced.traffic))
    names |= _axes_of_groups(mesh, (each for _, one in pairs for each in one.traffic))
    for kind, axes in names.items():
        bytes_found, calls_found = [], []
        for traced, planned, seen in sums:
            (calls, size), (calls_seen, size_seen) = planned.get(kind, (0, 0)), seen.get(kind, (0, 0))
            whole_calls, whole = map(sum, zip((0, 0), *seen.values(), strict=True))
            calls_found.append(TraceComparison(rank=traced.rank, closed=calls, traced=calls_seen, whole=whole_calls))
            bytes_found.append(TraceComparison(rank=traced.rank, closed=size, traced=size_seen, whole=whole))
        yield _check(f"traffic.{'_or_'.join(axes)}.{kind[1]}".replace(" · ", "_"), bytes_found, calls_found)


def _axes_of_groups(mesh: Mesh, traffic: Iterable[Traffic]) -> dict[tuple[Ranks, str], dict[str, None]]:
    found: dict[tuple[Ranks, str], dict[str, None]] = {}
    for each in traffic:
        found.setdefault((mesh.group(each.axis), each.op), {})[each.axis] = None
    return found


def sums_of_groups(mesh: Mesh, traffic: Iterable[Traffic]) -> dict[tuple[Ranks, str], tuple[int, int]]:
    """Return (calls, bytes) by group of ranks, as of `Mesh.group`, and op."""
    found: dict[tuple[Ranks, str], tuple[int, int]] = {}
    for each in traffic:
        kind = mesh.group(each.axis), each.op
        calls, size = found.get(kind, (0, 0))
        found[kind] = calls + each.count, size + each.bytes
    return found


def _check(id: str, sizes: list[TraceComparison], counts: list[TraceComparison] | None = None) -> Check:
    size = max(sizes, key=lambda each: each.apart)
    text = f"formula {bytes_text(size.closed)}, trace {bytes_text(size.traced)}"
    apart = size.apart
    if counts is not None:
        count = max(counts, key=lambda each: each.apart)
        text += f"; {count.closed:,} calls, {count.traced:,}"
        apart = max(apart, count.apart)
    status: Status = "warn" if apart > TOLERANCE else "pass"
    text += f" on rank {size.rank:,}" + (f", {apart:.0%} apart" if apart > 0 else "")
    return Check(id=f"{PREFIX}{id}", status=status, evidence=text)
