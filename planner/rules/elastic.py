"""`fault_tolerance.elastic`: the world sizes on which a run may continue, each with the same rows in every step.

The axis that is `auto`, fsdp, takes the remaining ranks of a world; the other axes stay. With fewer data ranks, each
takes more microbatches for the same rows, so the run learns the same. The rows of a step come from the ranks that
`launch` declares, otherwise from the largest world in the range that works with the spec as written: they do not depend
on the world that a plan is made for.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Final

from attrs import evolve, field

from xtrain.dsl.schema.setting import AUTO, Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Interval
from xtrain.lazy_attrs import frozen
from xtrain.plan.arithmetic import Arithmetic
from xtrain.plan.findings import Findings, checks
from xtrain.plan.mesh import Layout
from xtrain.plan.pipeline import StageAssignment
from xtrain.plan.plan import PlanPhase, RefusedWorlds
from xtrain.plan.resolved import Shape
from xtrain.planner.graph.timeline import Schedule
from xtrain.planner.rules.layout import FittedTeacher
from xtrain.text.units import consecutive, plural

Validate = Callable[[Spec, int, Findings], "ValidatedSpec | None"]

# Worlds tried to find one that works as written, among those that divide the rows: smaller worlds fail for the same
# reasons as the largest.
TRIES: Final = 48
SHOWN: Final = 8
# Maximum number of worlds in a range: a larger one is probably a typo, and would take seconds to search.
WIDEST: Final = 2**16


@frozen(kw_only=True)
class Elastic:
    """Elastic range of a run. spec: the spec to plan, with the rows that all worlds share, and without `elastic`.
    world: the number of ranks to plan it for.

    worlds: valid worlds, the smallest first, with their validated specs. why_rows: the origin of the rows.
    """

    spec: Spec
    world: int | None
    worlds: "dict[int, ValidatedSpec]" = field(factory=dict)
    refused: tuple[RefusedWorlds, ...] = ()
    why_rows: str = ""


@frozen
class ValidatedSpec:
    """Values derived from a spec that passes every rule."""

    shape: Shape
    layout: Layout
    staging: StageAssignment
    batch: Arithmetic
    phases: tuple[PlanPhase, ...]
    schedule: Schedule
    elastic: Elastic
    scorer: Shape | None = None
    teacher: FittedTeacher | None = None


@checks("elastic.worlds", reads="*")
def settle_worlds(spec: Spec, world: int | None, found: Findings, validate: Validate) -> Elastic:
    """Find the worlds of a spec; report an invalid range.

    world: the requested one, None for the one that `launch` declares, otherwise the largest that works. validate: the
    rules.
    """
    given = spec.fault_tolerance.elastic
    bare = evolve(spec, fault_tolerance=evolve(spec.fault_tolerance, elastic=None))
    if given is None:
        return Elastic(spec=spec, world=world)
    rule = "elastic.worlds"
    if found.unknown_settings:
        found.unknown(rule, "it depends on an invalid setting")
        return Elastic(spec=bare, world=world)
    if given.high - given.low >= WIDEST:
        message = f"elastic {given} spans {given.high - given.low + 1:,} numbers of ranks"
        hint = f"choose a range of {WIDEST:,} at most"
        found.fail(rule, "X430", "fault_tolerance.elastic", message, hint)
        return Elastic(spec=bare, world=world)
    if not _may_give_way(spec, found) or not _is_inside(spec, given, world, found):
        return Elastic(spec=bare, world=world)
    _check_use(spec, found)
    search = _Search(bare, given, validate)
    reference = search.reference(_declared(spec))
    if reference is None and search.fails_alike:
        found.unknown(rule, "it depends on an error with every number of ranks")
        return Elastic(spec=bare, world=world or max(search.reasons))
    if reference is None:
        first = search.first_reason
        found.fail(
            rule, "X430", "fault_tolerance.elastic", f"none of {given} ranks works: {first}",
            "choose a range that has ranks this spec can run on, or change the spec",
        )  # fmt: skip
        return Elastic(spec=bare, world=world)
    number, valid = reference
    rows = valid.batch.rows
    adapted = evolve(bare, batch=evolve(bare.batch, rows=rows, accumulate=AUTO))
    worlds = search.all(adapted, rows)
    refused = search.refused()
    if len(worlds) < 2:
        only = f"only one number of ranks works, {next(iter(worlds))}" if worlds else "no number of ranks works"
        reasons = "; ".join(f"{each.worlds}: {each.reason}" for each in refused[:3])
        hint = (
            f"a step of {plural(rows, 'row')} must divide evenly on each; {reasons}" if reasons else "widen the range"
        )
        found.fail(rule, "X430", "fault_tolerance.elastic", f"of {given} {only}", hint)
        return Elastic(spec=bare, world=world)
    found.passed(rule, f"{', '.join(map(str, worlds))} of {given} ranks take {plural(rows, 'row')} a step")
    chosen = world or _declared(spec) or max(worlds)
    why = "" if not isinstance(spec.batch.rows, Auto) else f"the rows of {plural(number, 'rank')}, whatever the world"
    return Elastic(spec=adapted, world=chosen, worlds=worlds, refused=refused, why_rows=why)


def _declared(spec: Spec) -> int | None:
    """Return the world that `launch` declares; None if it declares none."""
    nodes, each = spec.launch.nodes, spec.launch.ranks_per_node
    if isinstance(each, Auto):
        return None
    return each * (1 if isinstance(nodes, Auto) else nodes)


@checks("elastic.stack", reads="fault_tolerance.elastic parallel.stack")
@checks("elastic.axis", reads="fault_tolerance.elastic parallel.fsdp.size")
def _may_give_way(spec: Spec, found: Findings) -> bool:
    if spec.parallel.execution.groups:
        message = f"stack {spec.parallel.stack} continues with the remaining replica groups, and not on other ranks"
        found.fail(
            "elastic.stack", "X415", "fault_tolerance.elastic", message, "remove `elastic`, or use stack parallel"
        )
        return False
    if isinstance(spec.parallel.fsdp.size, Auto):
        return True
    found.fail(
        "elastic.axis", "X428", "fault_tolerance.elastic", "no axis is `auto`: the axes allow only one number of ranks",
        "write `fsdp auto`, or leave `elastic` out",
    )  # fmt: skip
    return False


@checks("elastic.range", reads="fault_tolerance.elastic launch.nodes launch.ranks_per_node")
def _is_inside(spec: Spec, given: Interval, world: int | None, found: Findings) -> bool:
    declared = _declared(spec)
    for who, count in (("--world", world), ("launch", declared)):
        if count is not None and count not in given:
            low, high = min(count, given.low), max(count, given.high)
            message = f"{who} says {plural(count, 'rank')}, and elastic is {given}"
            found.fail("elastic.range", "X429", "fault_tolerance.elastic", message, f"use elastic {low}..{high}")
            return False
    return True


@checks("elastic.use", reads="fault_tolerance.elastic fault_tolerance.restarts")
def _check_use(spec: Spec, found: Findings) -> None:
    if spec.fault_tolerance.restarts:
        found.passed("elastic.use", f"used by up to {plural(spec.fault_tolerance.restarts, 'restart')}")
        return
    found.warn(
        "elastic.use", "W431", "fault_tolerance.elastic",
        "restarts is 0: no run is restarted with fewer ranks, unless torchrun or Slurm does so",
        "add `restarts = 3`, or leave `elastic` out",
    )  # fmt: skip


@frozen
class _Search:
    """Search through the worlds of a range. reasons: world → why it does not work, in words shared by worlds with the
    same reason."""

    spec: Spec
    given: Interval
    validate: Validate
    reasons: dict[int, str] = field(factory=dict, init=False)

    @property
    def fixed(self) -> int:
        """Number of ranks of the fixed axes."""
        return prod(self._sizes.values())

    @property
    def _sizes(self) -> dict[str, int]:
        parallel = self.spec.parallel
        sizes = {
            "pp": parallel.pp.size,
            "replicate": parallel.fsdp.replicate,
            "cp": parallel.cp.size,
            "tp": parallel.tp.size,
        }
        return {axis: size for axis, size in sizes.items() if isinstance(size, int)}

    def reference(self, declared: int | None) -> "tuple[int, ValidatedSpec] | None":
        """Return the world whose rows all others take, and its validated spec with rows as written."""
        rows = self.spec.batch.rows
        even = [world for world in self._multiples() if isinstance(rows, Auto) or self._comes_out(rows, world)]
        candidates = [declared] if declared else even[: -TRIES - 1 : -1]
        for world in candidates:
            valid = self._tried(self.spec, world)
            if valid is not None:
                return world, valid
        return None

    @property
    def fails_alike(self) -> bool:
        """True if several worlds fail for the same reason, which then does not depend on the world and is reported at
        its own place."""
        return len(self.reasons) > 1 and len(set(self.reasons.values())) == 1

    @property
    def first_reason(self) -> str:
        world = max(self.reasons, default=None)
        if world is None:
            return f"no number of ranks is divisible by {self._product}"
        return f"{plural(world, 'rank')}: {self.reasons[world]}"

    def all(self, spec: Spec, rows: int) -> "dict[int, ValidatedSpec]":
        """Return world → validated spec, for every world that works with these rows."""
        self.reasons.clear()
        multiples = set(self._multiples())
        found: dict[int, ValidatedSpec] = {}
        for world in range(self.given.low, self.given.high + 1):
            if world not in multiples:
                self.reasons[world] = f"not divisible by {self._product}"
            elif not self._comes_out(rows, world):
                even = f"microbatches of {spec.batch.micro} on each data rank"
                self.reasons[world] = f"{plural(rows, 'row')} a step do not divide evenly into {even}"
            elif (valid := self._tried(spec, world)) is not None:
                found[world] = valid
        return found

    def _comes_out(self, rows: int, world: int) -> bool:
        """Return True if the rows of a step are whole microbatches on each data rank."""
        others = prod(size for axis, size in self._sizes.items() if axis != "replicate")
        return rows % (self.spec.batch.micro * (world // others)) == 0

    @property
    def _product(self) -> str:
        parts = [f"{axis} {size}" for axis, size in self._sizes.items() if size > 1]
        return f"{' · '.join(parts)} = {self.fixed}" if len(parts) > 1 else parts[0] if parts else "1"

    def _multiples(self) -> Iterator[int]:
        first = -(-self.given.low // self.fixed) * self.fixed
        return iter(range(first, self.given.high + 1, self.fixed))

    def _tried(self, spec: Spec, world: int) -> "ValidatedSpec | None":
        found = Findings(spec)
        valid = self.validate(spec, world, found)
        if valid is None:
            failed = next((check for check in found.checks if check.status == "fail"), None)
            self.reasons[world] = failed.evidence.partition("; ")[0] if failed else "it does not fit"
        return valid

    def refused(self) -> tuple[RefusedWorlds, ...]:
        """Return the invalid worlds, grouped by reason."""
        worlds_of: dict[str, list[int]] = {}
        for world, reason in sorted(self.reasons.items()):
            worlds_of.setdefault(reason, []).append(world)
        return tuple(RefusedWorlds(worlds=_listed(worlds), reason=reason) for reason, worlds in worlds_of.items())


def _listed(worlds: list[int]) -> str:
    """Return worlds as text: `3`, `3, 5..7`, or their number if that is long."""
    parts = [f"{a}..{b}" if b > a + 1 else ", ".join(map(str, dict.fromkeys((a, b)))) for a, b in consecutive(worlds)]
    if len(parts) <= SHOWN:
        return ", ".join(parts)
    return f"{', '.join(parts[:3])}, … ({len(worlds):,} of them)"
