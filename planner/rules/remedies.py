"""What would make a plan hold less: settings that can be changed, each tried by estimating the run with it."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations
from typing import Any, Final

from attrs import evolve, fields_dict, frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.costs.headroom import TIGHT
from xtrain.planner.plan import Estimates, Hardware, Remedy
from xtrain.planner.resolved import Resolved

Judge = Callable[[Spec], Estimates | None]  # None: that spec has no plan

MOST: Final = 3
SMALL_CHUNK: Final = 256 * 2**20  # bytes of logits; smaller pieces make the products of the head slow


@frozen
class Change:
    """Settings as `--set` texts, and by path as values."""

    sets: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, **texts: Any) -> "Change":
        """`activation__mode="full"`: two underscores stand for a dot."""
        values = tuple((name.replace("__", "."), value) for name, value in texts.items())
        return cls(tuple(f"{path.removesuffix('.size')}={_text(value)}" for path, value in values), values)

    def __add__(self, other: "Change") -> "Change":
        return Change(self.sets + other.sets, self.values + other.values)

    def applied(self, spec: Spec) -> Spec:
        for path, value in self.values:
            spec = _with(spec, path.split("."), value)
        return spec


def remedies(run: Resolved, cluster: Hardware, judge: Judge) -> tuple[Remedy, ...]:
    """The cheapest changes after which the fullest rank fits with room to spare, at most three.

    One change alone if any suffices, else two together; where nothing suffices, those that save most. Cheapest is what
    costs the least time of a step, or where times are not known the least memory that is saved beyond need.
    """
    device = cluster.memory_bytes
    if device is None:
        return ()
    changes = list(changes_of(run))
    single = _tried(run.spec, changes, judge)
    enough = [each for each in single if each.memory_bytes <= (1 - TIGHT) * device]
    if not enough:
        paths = [{path for path, _ in change.values} for change in changes]
        pairs = [a + b for (a, p), (b, q) in combinations(zip(changes, paths, strict=True), 2) if not p & q]
        double = _tried(run.spec, pairs, judge)
        enough = [each for each in double if each.memory_bytes <= (1 - TIGHT) * device]
        single += double
    if enough:
        return tuple(sorted(enough, key=_cost)[:MOST])
    return tuple(sorted(single, key=lambda each: each.memory_bytes)[:1])


def _cost(remedy: Remedy) -> tuple[bool, float, int]:
    """What is not known to cost nothing comes last."""
    return (remedy.seconds is None, remedy.seconds or 0.0, -remedy.memory_bytes)


def _tried(spec: Spec, changes: list[Change], judge: Judge) -> list[Remedy]:
    found = []
    for change in changes:
        estimates = judge(change.applied(spec))
        if estimates is not None:
            moves = any(each.memory.host_bytes for each in estimates.classes)  # over a bus that no estimate knows
            seconds = estimates.times.step if estimates.times is not None and not moves else None
            found.append(Remedy(sets=change.sets, memory_bytes=fullest(estimates), seconds=seconds))
    return found


def fullest(estimates: Estimates) -> int:
    """Bytes on the rank that holds most."""
    return max(each.memory.total_bytes for each in estimates.classes)


def changes_of(run: Resolved) -> Iterator[Change]:
    """Single changes that can save memory and leave what is computed as it is."""
    spec, parallel = run.spec, run.spec.parallel
    if spec.activation.mode == "none":
        yield Change.of(activation__mode="selective")
    if spec.activation.mode != "full":
        yield Change.of(activation__mode="full")
    if spec.loss.head == "vocabulary" and spec.loss.chunk.value > SMALL_CHUNK:
        yield Change.of(loss__chunk=Quantity(SMALL_CHUNK, "bytes"))
    if run.batch.micro % 2 == 0:
        yield Change.of(batch__micro=run.batch.micro // 2, **same_rows(run, 2))
    if run.dense_fsdp and run.sync == "step" and run.batch.accumulate > 1 and run.size("pp") == 1:
        yield Change.of(parallel__fsdp__sync="microbatch")
    if run.dense_fsdp and not run.reshard and run.size("pp") == 1:
        yield Change.of(parallel__fsdp__reshard=True)
    yield from _wider(run)
    if spec.launch.device == "cpu":
        return
    if "offload" not in run.stack.unsupported and not parallel.fsdp.offload:
        yield Change.of(parallel__fsdp__offload=True)
    for saving in run.stack.savings(spec):
        yield Change.of(**{f"parallel__{run.stack.kind}__{name}": value for name, value in saving.items()})


def _wider(run: Resolved) -> Iterator[Change]:
    """More ranks for one axis, taken from copies or from data ranks, with as many more microbatches."""
    parallel, replicate, fsdp = run.spec.parallel, run.size("replicate"), run.size("fsdp")
    lacks = run.stack.unsupported
    if replicate > 1 and "fsdp" not in lacks:
        sizes = {} if not isinstance(parallel.fsdp.size, int) else {"parallel__fsdp__size": fsdp * replicate}
        yield Change.of(parallel__fsdp__replicate=1, **sizes)
    if fsdp % 2:
        return
    rest: dict[str, Any] = {"parallel__fsdp__size": fsdp // 2} if isinstance(parallel.fsdp.size, int) else {}
    rest |= same_rows(run, 2)
    sizes = {"tp": 2 * run.size("tp"), "cp": 2 * run.context, "pp": 2 * run.size("pp")}
    for axis, size in sizes.items():
        if axis not in lacks and (axis != "tp" or size <= run.layout.mesh.ranks_per_node):
            yield Change.of(**{f"parallel__{axis}__size": size}, **rest)


def same_rows(run: Resolved, factor: Fraction | int) -> dict[str, Any]:
    """Settings that keep the rows of a step where it has `factor` times as many microbatches on a data rank."""
    batch, count = run.spec.batch, run.batch.accumulate * factor
    if isinstance(batch.accumulate, Auto) and not isinstance(batch.rows, Auto):
        return {}
    return {"batch__accumulate": max(1, int(count))}


def _with(block: Any, path: list[str], value: Any) -> Any:
    name, *below = path
    assert name in fields_dict(type(block)), f"{type(block).__name__} has no {name}"
    return evolve(block, **{name: _with(getattr(block, name), below, value) if below else value})


def _text(value: Any) -> str:
    if isinstance(value, Quantity):
        return f"{int(value.value) // 2**20} MiB"
    return str(value).lower() if isinstance(value, bool) else str(value)
