"""Rules on the cost of a run: memory, pipeline bubbles, slow links, and settings that would need less memory.

They only warn, because every figure is an estimate: a plan that does not fit is still a plan, and gives remedies.
"""

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import combinations
from math import ceil, inf
from typing import Any, Final

from attrs import evolve, fields_dict

from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture
from xtrain.plan.estimates import Estimates, Hardware, Remedy
from xtrain.plan.findings import Findings, checks
from xtrain.plan.graph import obeying_launchers, restarts_of
from xtrain.plan.mesh import device_kind, largest_divisor
from xtrain.plan.pipeline import ZERO_BUBBLE
from xtrain.plan.plan import Plan
from xtrain.plan.resolved import Resolved
from xtrain.plan.views import TIGHT
from xtrain.planner.costs.estimates import waiting
from xtrain.planner.costs.run import goodput_of
from xtrain.text.units import BYTES, amount_text, bytes_text, count_text, plural, seconds_text

Judge = Callable[[Spec], Estimates | None]  # None: that spec has no plan

MOST: Final = 3
SMALL_CHUNK: Final = 256 * 2**20  # bytes of logits; smaller pieces make the head's products slow


@frozen
class Change:
    """Settings as `--set` texts, and by path as values."""

    sets: tuple[str, ...]
    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, **texts: Any) -> "Change":
        """Return a change from keywords: `activation__mode="full"`; two underscores stand for a dot."""
        values = tuple((name.replace("__", "."), value) for name, value in texts.items())
        return cls(tuple(f"{path.removesuffix('.size')}={_text(value)}" for path, value in values), values)

    def __add__(self, other: "Change") -> "Change":
        return Change(self.sets + other.sets, self.values + other.values)

    def applied(self, spec: Spec) -> Spec:
        for path, value in self.values:
            spec = _with(spec, path.split("."), value)
        return spec


def remedies(resolved: Resolved, cluster: Hardware, judge: Judge) -> tuple[Remedy, ...]:
    """Return the cheapest changes, at most three, after which the fullest rank fits with room to spare.

    Single changes if any suffices, otherwise pairs; if nothing suffices, those that save the most. Cost is the added
    time of a step or, if times are unknown, the memory saved beyond need.
    """
    device = cluster.memory_bytes
    if device is None:
        return ()
    changes = list(changes_of(resolved))
    single = tried(resolved.spec, changes, judge)
    enough = [each for each in single if each.memory_bytes <= (1 - TIGHT) * device]
    if not enough:
        paths = [{path for path, _ in change.values} for change in changes]
        pairs = [a + b for (a, p), (b, q) in combinations(zip(changes, paths, strict=True), 2) if not p & q]
        double = tried(resolved.spec, pairs, judge)
        enough = [each for each in double if each.memory_bytes <= (1 - TIGHT) * device]
        single += double
    if enough:
        # Remedies of unknown cost come last.
        enough.sort(key=lambda each: (each.seconds is None, each.seconds or 0.0, -each.memory_bytes))
        return tuple(enough[:MOST])
    return tuple(sorted(single, key=lambda each: each.memory_bytes)[:1])


def tried(spec: Spec, changes: list[Change], judge: Judge) -> list[Remedy]:
    """Return the memory and time of each change that has a plan."""
    found = []
    for change in changes:
        estimates = judge(change.applied(spec))
        if estimates is not None:
            moves = any(each.memory.host_bytes for each in estimates.classes)  # over a bus of unknown speed
            seconds = estimates.times.step if estimates.times is not None and not moves else None
            found.append(Remedy(sets=change.sets, memory_bytes=estimates.fullest.memory.total_bytes, seconds=seconds))
    return found


def changes_of(resolved: Resolved) -> Iterator[Change]:
    """Yield single changes that can save memory without changing the computation."""
    spec, parallel = resolved.spec, resolved.spec.parallel
    if spec.activation.mode == "none":
        yield Change.of(activation__mode="selective")
    if spec.activation.mode != "full":
        yield Change.of(activation__mode="full")
    if spec.loss.of_logits and spec.loss.chunk.value > SMALL_CHUNK:
        yield Change.of(loss__chunk=Quantity(SMALL_CHUNK, "bytes"))
    if resolved.batch.micro % 2 == 0:
        yield Change.of(batch__micro=resolved.batch.micro // 2, **same_rows(resolved, 2))
    if resolved.dense_fsdp and resolved.sync == "step" and resolved.batch.accumulate > 1 and resolved.size("pp") == 1:
        yield Change.of(parallel__fsdp__sync="microbatch")
    if resolved.dense_fsdp and not resolved.reshard and resolved.size("pp") == 1:
        yield Change.of(parallel__fsdp__reshard=True)
    yield from _wider(resolved)
    if spec.launch.device == "cpu":
        return
    if "offload" not in resolved.stack.unsupported and not parallel.fsdp.offload:
        yield Change.of(parallel__fsdp__offload=True)
    for saving in stack_of(spec).savings(spec):
        yield Change.of(**{f"parallel__{resolved.stack.kind}__{name}": value for name, value in saving.items()})


def _wider(resolved: Resolved) -> Iterator[Change]:
    """Yield changes that give one axis more ranks, taken from copies or from data ranks, with as many more
    microbatches."""
    parallel, replicate, fsdp = resolved.spec.parallel, resolved.size("replicate"), resolved.size("fsdp")
    lacks = resolved.stack.unsupported
    if replicate > 1 and "fsdp" not in lacks:
        sizes = {} if not isinstance(parallel.fsdp.size, int) else {"parallel__fsdp__size": fsdp * replicate}
        yield Change.of(parallel__fsdp__replicate=1, **sizes)
    if fsdp % 2:
        return
    rest: dict[str, Any] = {"parallel__fsdp__size": fsdp // 2} if isinstance(parallel.fsdp.size, int) else {}
    rest |= same_rows(resolved, 2)
    sizes = {"tp": 2 * resolved.size("tp"), "cp": 2 * resolved.context, "pp": 2 * resolved.size("pp")}
    for axis, size in sizes.items():
        if axis not in lacks and (axis != "tp" or size <= resolved.layout.mesh.ranks_per_node):
            yield Change.of(**{f"parallel__{axis}__size": size}, **rest)


def same_rows(resolved: Resolved, factor: Fraction | int) -> dict[str, Any]:
    """Return settings that keep the rows of a step with `factor` times as many microbatches on a data rank."""
    batch, count = resolved.spec.batch, resolved.batch.accumulate * factor
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


WAITS: Final = 0.20  # share of a step, above which a pipeline wastes more than most runs do


def check_costs(
    resolved: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge
) -> Estimates:
    """Report expensive parts of a run; return its estimates, with remedies if memory does not suffice.

    judge: estimates a changed spec on the same number of ranks.
    """
    _check_nodes(resolved, found)
    _check_speed(resolved, cluster, estimates, found)
    if not CLUSTERS[cluster.preset].known:
        return estimates  # there are no limits to compare the estimates with
    estimates = _check_memory(resolved, cluster, estimates, found, judge)
    _check_bubble(resolved, estimates, found)
    _check_need(resolved, cluster, estimates, found, judge)
    _check_stuck(resolved, estimates, found)
    return estimates


# Bytes that pointwise operations of a block move more as separate kernels than compiled, forward and backward, per byte
# of the values of its layers: 0.75 MB a token for 139 KB of an 8 B model, counted (docs/performance.md).
SEPARATE: Final = 5.4
WORTH_COMPILING: Final = 0.02  # share of a step
# Bandwidth that pointwise kernels reach, of the data sheet's.
REACHED: Final = 0.83


@checks("cuda.compute cuda.compile", reads="*")
def _check_speed(resolved: Resolved, cluster: Hardware, estimates: Estimates, found: Findings) -> None:
    """Check that the defaults of number formats and of compilation do not decide the speed on GPUs."""
    spec, arch = resolved.spec, resolved.architecture
    if device_kind(spec) != "cuda":
        return
    chosen = spec.precision.compute != "auto" or spec.precision.matmul != "auto"
    sheet = spec.cluster.data_sheet()
    measured = {} if sheet is None else sheet.flops
    factor = measured["bf16"] / measured["fp32"] if {"bf16", "fp32"} <= set(measured) else None
    if resolved.formats.compute != "fp32" or chosen:
        found.passed("cuda.compute", f"the model computes in {resolved.formats.compute}")
    else:
        slower = f"{factor:.0f} times on {cluster.preset}" if factor else "10 to 30 times, depending on the GPU,"
        message = f"the model computes in fp32, the default, whose matrix products are {slower} slower than in bf16"
        hint = "use precision { compute = bf16 }, or write compute = fp32"
        found.warn("cuda.compute", "W427", "precision", message, hint)
    origin = spec.origins.get("compile.mode")
    written = origin is not None and origin.kind != "default"
    splits = spec.parallel.pp.schedule in ZERO_BUBBLE and resolved.size("pp") > 1
    if spec.compile.mode != "none" or written or "code" in arch.own or splits:
        found.passed("cuda.compile", f"compile.mode is {spec.compile.mode}")
        return
    message = "blocks are not compiled, the default: their pointwise operations are kernels of their own"
    if sheet is not None and sheet.bandwidth is not None and estimates.times is not None:
        per_token = BYTES[resolved.formats.compute] * SEPARATE * arch.layers * _widths(arch) / resolved.size("tp")
        share = resolved.size("pp") * resolved.context
        tokens = resolved.batch.accumulate * resolved.batch.micro * resolved.batch.sequence / share
        lost = per_token * tokens / (REACHED * sheet.bandwidth) / estimates.times.computing
        if lost < WORTH_COMPILING:
            found.passed("cuda.compile", f"compiled blocks would save about {lost:.1%} of a step")
            return
        message += f", which costs about {lost:.0%} of the time of a step"
    found.warn("cuda.compile", "W428", "compile", message, "use compile { mode = default }, or write mode = none")


def _widths(arch: Architecture) -> int:
    """Return the numbers of a token in the layers of a block that compilation fuses; experts are not part of them."""
    heads = (arch.heads + arch.kv_heads) * arch.head_dim
    return 4 * arch.dim + 2 * heads + (0 if arch.is_moe else 3 * arch.ffn)


@checks("failures.restarts", reads="*")
def check_failures(plan: Plan, found: Findings) -> None:
    """Check that a run is restarted as often as it is expected to fail."""
    goodput = goodput_of(plan)
    if goodput is None:
        return
    rule, expected = "failures.restarts", goodput.failures
    setting, restarts = restarts_of(plan)
    between, restart = seconds_text(goodput.faults.between), seconds_text(goodput.faults.restart)
    if goodput.stands:
        message = f"a device fails every {between}, a restart takes {restart}, and checkpoints are "
        message += f"{seconds_text(goodput.interval)} of training apart: the run makes no progress"
        better = f"save every {seconds_text(goodput.best)}, which makes it {goodput.best_share:.1%}"
        better = better if goodput.best_share >= 0.01 else "use fewer devices, or shorter restarts"
        found.warn(rule, "W432", "cluster.mtbf", message, better)
    elif goodput.interval == inf:
        if goodput.trained is not None and round(goodput.trained / goodput.faults.between) == 0:
            found.passed(rule, f"a device fails every {between}, and training takes {seconds_text(goodput.trained)}")
        else:
            message = f"a device fails every {between}, and no checkpoint is saved during the run"
            found.warn(rule, "W432", "cluster.mtbf", message, "save with `every … checkpoint`")
    elif expected is None:
        found.unknown(rule, "the number of failures depends on the data")
    elif round(expected) > restarts:
        message = f"{amount_text(expected)} failures are expected, and "
        message += f"{setting} is {restarts}" if setting else "nothing restarts several machines"
        hint = f"use {setting or 'fault_tolerance.restarts'} {ceil(2 * expected)}"
        hint += "" if setting else f" and launcher {obeying_launchers()}"
        found.warn(rule, "W432", setting or "launch.nodes", message, f"{hint}, unless a scheduler restarts the run")
    else:
        found.passed(rule, f"{amount_text(expected)} failures are expected, and {plural(restarts, 'restart')} allowed")


@checks("health.stuck", reads="*")
def _check_stuck(resolved: Resolved, estimates: Estimates, found: Findings) -> None:
    """Check that computing ranks are not taken for stuck ranks: they report every microbatch, in a pipeline every
    step."""
    stuck, times, piped = resolved.spec.fault_tolerance.stuck, estimates.times, resolved.size("pp") > 1
    if stuck is None or times is None:
        return
    longest = times.slow if piped else times.slow / resolved.batch.accumulate
    if longest < stuck.value:
        return
    what = "a step of the pipeline" if piped else "a microbatch"
    message = f"{what} may take {seconds_text(longest)}, and ranks count as stuck after {seconds_text(stuck.value)}"
    found.warn("health.stuck", "W606", "fault_tolerance.stuck", message, f"use {ceil(longest / 30)} min or more")


def _check_memory(
    resolved: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge
) -> Estimates:
    rule, need, device = "memory.device", estimates.fullest.memory.total_bytes, cluster.memory_bytes
    if device is None:
        found.unknown(rule, f"the fullest rank needs {bytes_text(need)}, and the memory of a device is unknown")
        return estimates
    share = f"{bytes_text(need)} of {bytes_text(device)} on the fullest rank"
    if need <= (1 - TIGHT) * device:
        found.passed(rule, f"{share}, {1 - need / device:.0%} free")
        return estimates
    estimates = evolve(estimates, remedies=remedies(resolved, cluster, judge))
    certain = max(each.memory.states + each.memory.unsharded for each in estimates.classes)
    if need <= device:
        message = f"{share} leave {1 - need / device:.0%} free, less than {TIGHT:.0%}"
    elif certain > device and not resolved.spec.parallel.fsdp.offload:
        least = f"{bytes_text(certain)} of {bytes_text(device)}"
        message = f"model states and the parameters that fsdp gathers alone take {least}"
    else:
        message = f"the run does not fit: {share}"
    found.warn(rule, "W423", "cluster", message, _remedies_text(estimates, device))
    return estimates


def _remedies_text(estimates: Estimates, device: int) -> str:
    if not estimates.remedies:
        return "use more ranks, or a smaller model"
    shown = []
    for each in estimates.remedies:
        step = "" if each.seconds is None else f" and {seconds_text(each.seconds)} a step"
        shown.append(f"{', '.join(each.sets)} ({bytes_text(each.memory_bytes)}{step})")
    if estimates.remedies[0].memory_bytes > (1 - TIGHT) * device:
        return f"use more ranks: {shown[0]} is not enough"
    return f"use {', or '.join(shown)}"


def _check_bubble(resolved: Resolved, estimates: Estimates, found: Findings) -> None:
    if resolved.size("pp") == 1:
        return
    rule, message = "pipeline.bubble", f"the pipeline bubble is {estimates.bubble:.0%} of a step"
    if estimates.bubble <= WAITS:
        found.passed(rule, message)
        return
    found.warn(rule, "W424", "parallel.pp.schedule", message, _fuller(resolved))


def _fuller(resolved: Resolved) -> str:
    """Return a remedy for waiting in a pipeline: more stages per rank, which take turns, or more microbatches."""
    size, count, schedule = resolved.size("pp"), resolved.batch.accumulate, resolved.spec.parallel.pp.schedule
    now = resolved.staging.stages_per_rank if schedule == "interleaved_1f1b" else 1
    rounds = count % max(count // size, 1) == 0
    for stages in (4, 2):
        if now < stages and rounds and size * stages <= resolved.architecture.blocks and schedule in ("gpipe", "1f1b"):
            sets = f"parallel.pp.schedule=interleaved_1f1b, parallel.pp.stages_per_rank={stages}"
            return f"use {sets}: about {waiting(size, stages * count):.0%}"
    return f"use twice the microbatches, {2 * count}: about {waiting(size, 2 * now * count):.0%}, or fewer stages"


def _check_nodes(resolved: Resolved, found: Findings) -> None:
    tp, rule = resolved.size("tp"), "mesh.tp.nodes"
    if tp == 1:
        return
    axis = next(axis for axis in resolved.layout.mesh.axes if axis.name == "tp")
    if axis.crosses_nodes:
        inside = resolved.layout.mesh.ranks_per_node
        message = f"tp {tp} crosses machines of {inside} ranks, and exchanges activations in every layer"
        found.warn(rule, "W425", "parallel.tp.size", message, f"use tp {largest_divisor(tp, inside)}, or fewer")
    else:
        found.passed(rule, f"the ranks of tp {tp} are on one machine")


def _check_need(resolved: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge) -> None:
    """Warn of tensor parallelism where fsdp alone would do: smaller products and waiting in each layer cost 15 to 20
    points of MFU in published runs (KempnerForge on H200, 7 B to 13 B parameters)."""
    tp, parallel = resolved.size("tp"), resolved.spec.parallel
    if tp == 1:
        return
    rule, device, times = "mesh.tp.need", cluster.memory_bytes, estimates.times
    if device is None or times is None:
        found.unknown(rule, "whether fsdp alone would do is unknown without the cluster's memory and speed")
        return
    sizes = {"parallel__fsdp__size": resolved.size("fsdp") * tp} if isinstance(parallel.fsdp.size, int) else {}
    change = Change.of(parallel__tp__size=1, **sizes, **same_rows(resolved, Fraction(1, tp)))
    without = judge(change.applied(resolved.spec))
    if without is None or without.times is None:
        found.passed(rule, f"there are not enough rows without tp {tp}")
        return
    need, speed, now = without.fullest.memory.total_bytes, without.times.tokens_per_second, times.tokens_per_second
    shown = f"{bytes_text(need)} of {bytes_text(device)}, {count_text(speed)} tokens/s instead of {count_text(now)}"
    if need <= (1 - TIGHT) * device and speed > now:
        message = f"fsdp fits without tp {tp}: {shown}"
        found.warn(rule, "W426", "parallel.tp.size", message, f"use {', '.join(change.sets)}")
    else:
        found.passed(rule, f"without tp: {shown}")
