"""Rules about what a run costs: memory that does not suffice, pipelines that wait, tensor parallel where it is dear.

They warn, as every figure is an estimate: a plan that does not fit is still a plan, and says what would help.
"""

from fractions import Fraction
from math import ceil, inf
from typing import Final

from attrs import evolve

from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.planner.costs.bubble import waiting
from xtrain.planner.costs.goodput import goodput_of
from xtrain.planner.costs.headroom import TIGHT
from xtrain.planner.findings import Findings
from xtrain.planner.graph.launcher_args import obeying_launchers, restarts_of
from xtrain.planner.mesh.mesh import largest_divisor
from xtrain.planner.plan import Estimates, Hardware, Plan
from xtrain.planner.resolved import Resolved
from xtrain.planner.rules.remedies import Change, Judge, fullest, remedies, same_rows
from xtrain.planner.units import amount_text, bytes_text, count_text, plural, seconds_text

WAITS: Final = 0.20  # of a step, above which a pipeline wastes more than most runs do


def check_costs(run: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge) -> Estimates:
    """Report what is dear about a run, and give its estimates back with remedies where memory does not suffice.

    judge: estimates a changed spec on as many ranks.
    """
    _check_nodes(run, found)
    if not CLUSTERS[cluster.preset].known:
        return estimates  # there is nothing to hold them against
    estimates = _check_memory(run, cluster, estimates, found, judge)
    _check_bubble(run, estimates, found)
    _check_need(run, cluster, estimates, found, judge)
    _check_stuck(run, estimates, found)
    return estimates


def check_failures(plan: Plan, found: Findings) -> None:
    """A run that fails more often than it is started again needs somebody who starts it."""
    goodput = goodput_of(plan)
    if goodput is None:
        return
    rule, expected = "failures.restarts", goodput.failures
    setting, restarts = restarts_of(plan)
    between, restart = seconds_text(goodput.faults.between), seconds_text(goodput.faults.restart)
    if goodput.stands:
        message = f"a device fails every {between}, a restart takes {restart}, and checkpoints are "
        message += f"{seconds_text(goodput.interval)} of training apart: the run does not get on"
        better = f"save every {seconds_text(goodput.best)}, which makes it {goodput.best_share:.1%}"
        better = better if goodput.best_share >= 0.01 else "use fewer devices, or restarts that are shorter"
        found.warn(rule, "W432", "cluster.mtbf", message, better)
    elif goodput.interval == inf:
        if goodput.trained is not None and round(goodput.trained / goodput.faults.between) == 0:
            found.passed(rule, f"a device fails every {between}, and training takes {seconds_text(goodput.trained)}")
        else:
            message = f"a device fails every {between}, and no checkpoint is saved on the way"
            found.warn(rule, "W432", "cluster.mtbf", message, "save with `every … checkpoint`")
    elif expected is None:
        found.unknown(rule, "how many failures there will be depends on the data")
    elif round(expected) > restarts:
        message = f"{amount_text(expected)} failures are expected, and "
        message += f"{setting} is {restarts}" if setting else "nothing starts several machines again"
        hint = f"use {setting or 'fault_tolerance.restarts'} {ceil(2 * expected)}"
        hint += "" if setting else f" and launcher {obeying_launchers()}"
        found.warn(rule, "W432", setting or "launch.nodes", message, f"{hint}, unless a scheduler starts the run again")
    else:
        found.passed(rule, f"{amount_text(expected)} failures are expected, and {plural(restarts, 'restart')} allowed")


def _check_stuck(run: Resolved, estimates: Estimates, found: Findings) -> None:
    """Ranks that compute are not to be taken for ranks that are stuck: they tell of every microbatch, in a pipeline of
    every step."""
    stuck, times, piped = run.spec.fault_tolerance.stuck, estimates.times, run.size("pp") > 1
    if stuck is None or times is None:
        return
    longest = times.slow if piped else times.slow / run.batch.accumulate
    if longest < stuck.value:
        return
    what = "a step of the pipeline" if piped else "a microbatch"
    message = f"{what} may take {seconds_text(longest)}, and ranks count as stuck after {seconds_text(stuck.value)}"
    found.warn("health.stuck", "W606", "fault_tolerance.stuck", message, f"use {ceil(longest / 30)} min or more")


def _check_memory(run: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge) -> Estimates:
    rule, need, device = "memory.device", fullest(estimates), cluster.memory_bytes
    if device is None:
        found.unknown(rule, f"the fullest rank needs {bytes_text(need)}, and the memory of a device is unknown")
        return estimates
    share = f"{bytes_text(need)} of {bytes_text(device)} on the fullest rank"
    if need <= (1 - TIGHT) * device:
        found.passed(rule, f"{share}, {1 - need / device:.0%} free")
        return estimates
    estimates = evolve(estimates, remedies=remedies(run, cluster, judge))
    certain = max(each.memory.states + each.memory.unsharded for each in estimates.classes)
    if need <= device:
        message = f"{share} leave {1 - need / device:.0%} free, less than {TIGHT:.0%}"
    elif certain > device and not run.spec.parallel.fsdp.offload:
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


def _check_bubble(run: Resolved, estimates: Estimates, found: Findings) -> None:
    if run.size("pp") == 1:
        return
    rule, message = "pipeline.bubble", f"the pipeline bubble is {estimates.bubble:.0%} of a step"
    if estimates.bubble <= WAITS:
        found.passed(rule, message)
        return
    found.warn(rule, "W424", "parallel.pp.schedule", message, _fuller(run))


def _fuller(run: Resolved) -> str:
    """What makes a pipeline wait less: more stages on a rank, which take turns, or more microbatches."""
    size, count, schedule = run.size("pp"), run.batch.accumulate, run.spec.parallel.pp.schedule
    now = run.staging.stages_per_rank if schedule == "interleaved_1f1b" else 1
    rounds = count % max(count // size, 1) == 0
    for stages in (4, 2):
        if now < stages and rounds and size * stages <= run.architecture.blocks and schedule in ("gpipe", "1f1b"):
            sets = f"parallel.pp.schedule=interleaved_1f1b, parallel.pp.stages_per_rank={stages}"
            return f"use {sets}: about {waiting(size, stages * count):.0%}"
    return f"use twice the microbatches, {2 * count}: about {waiting(size, 2 * now * count):.0%}, or fewer stages"


def _check_nodes(run: Resolved, found: Findings) -> None:
    tp, rule = run.size("tp"), "mesh.tp.nodes"
    if tp == 1:
        return
    axis = next(axis for axis in run.layout.mesh.axes if axis.name == "tp")
    if axis.crosses_nodes:
        inside = run.layout.mesh.ranks_per_node
        message = f"tp {tp} crosses machines of {inside} ranks, and exchanges activations in every layer"
        found.warn(rule, "W425", "parallel.tp.size", message, f"use tp {largest_divisor(tp, inside)}, or fewer")
    else:
        found.passed(rule, f"the ranks of tp {tp} are on one machine")


def _check_need(run: Resolved, cluster: Hardware, estimates: Estimates, found: Findings, judge: Judge) -> None:
    """Tensor parallel where fsdp alone would do: smaller products and waiting in each layer cost 15 to 20 points of MFU
    in published runs (KempnerForge on H200, 7 B to 13 B parameters)."""
    tp, parallel = run.size("tp"), run.spec.parallel
    if tp == 1:
        return
    rule, device, times = "mesh.tp.need", cluster.memory_bytes, estimates.times
    if device is None or times is None:
        found.unknown(rule, "whether fsdp alone would do is not known without the cluster's memory and speed")
        return
    sizes = {"parallel__fsdp__size": run.size("fsdp") * tp} if isinstance(parallel.fsdp.size, int) else {}
    change = Change.of(parallel__tp__size=1, **sizes, **same_rows(run, Fraction(1, tp)))
    without = judge(change.applied(run.spec))
    if without is None or without.times is None:
        found.passed(rule, f"there are not enough rows without tp {tp}")
        return
    need, speed, now = fullest(without), without.times.tokens_per_second, times.tokens_per_second
    shown = f"{bytes_text(need)} of {bytes_text(device)}, {count_text(speed)} tokens/s instead of {count_text(now)}"
    if need <= (1 - TIGHT) * device and speed > now:
        message = f"fsdp fits without tp {tp}: {shown}"
        found.warn(rule, "W426", "parallel.tp.size", message, f"use {', '.join(change.sets)}")
    else:
        found.passed(rule, f"without tp: {shown}")
