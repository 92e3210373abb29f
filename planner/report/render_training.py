"""The parts of the page about the run as a whole: how many tokens, the learning rate, what happens along the way."""

from collections import Counter
from math import inf
from typing import Any

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.log import OP as TRACKER
from xtrain.dsl.schema.log import tracker_of
from xtrain.dsl.schema.schedules import SCHEDULERS
from xtrain.planner.costs.disk import disk_of
from xtrain.planner.costs.goodput import FAILURES, goodput_of, restart_of
from xtrain.planner.costs.headroom import no_times
from xtrain.planner.costs.startup import startup_of
from xtrain.planner.graph.averaging import average_args
from xtrain.planner.plan import Node, Plan, PlanTick
from xtrain.planner.report.render_data import epoch_text
from xtrain.planner.report.text import Detail, Page
from xtrain.planner.schedule.arithmetic import arithmetic_of
from xtrain.planner.schedule.counts import count_node, count_saves, saves, unrecorded
from xtrain.planner.units import amount_in_epochs, amount_text, bytes_text, count_text, plural, seconds_text, times_text


def show_training(page: Page, plan: Plan, detail: Detail) -> None:
    """The arithmetic of the budget, the break points of the learning rate, checkpoints, ticks and triggers."""
    page.heading("TRAINING")
    rows = [
        *_amounts(plan),
        _learning_rate(plan),
        *_average(plan),
        *_checkpoints(plan),
        *_duration(plan),
        *_failures(plan),
        *_startup(plan, detail),
    ]
    page.table(rows, align="<>", styles=("", "", "dim"))
    page.line()
    ticks, most = _ticks(plan), detail.most(12)
    page.table(ticks[:most], align="<<>", styles=("cyan", "", "", "dim"))
    page.more(len(ticks) - most, "training")
    commands = ", ".join(command.name for command in plan.timeline.commands)
    page.wrapped(f"xtrain control  {commands}", rest=" " * 18)
    page.wrapped(f"alerts          {_alerts(plan)}", rest=" " * 18)
    if takers := _trackers(plan):
        page.wrapped(f"records         {takers}", rest=" " * 18)
    if detail.full:
        page.described([(node.id, node.does) for kind in ("tick", "event") for node in plan.nodes if node.kind == kind])


def _amounts(plan: Plan) -> list[tuple[str, str, str]]:
    """Tokens and steps, and how they follow from each other."""
    timeline, loader = plan.timeline, plan.node("setup.loader").args
    rows, sequence, micro = loader["rows"], loader["sequence"], loader["micro"]
    product = (
        f"{micro * sequence:,} a microbatch · {loader['accumulate']} · {plural(plan.mesh.data_ranks, 'data rank')}"
    )
    table = [("tokens a step", f"{rows * sequence:,}", f"{plural(rows, 'row')} of {sequence:,}; {product}")]
    table += _ramp(plan)
    if timeline.steps is None or timeline.tokens is None:
        epochs = amount_in_epochs(timeline.epochs or 0.0)
        return [*table, ("steps", "unknown", f"{epochs} of data that has not been counted yet")]
    ratio = timeline.tokens / plan.parameters.total
    how = next((entry.how for entry in plan.provenance if entry.path == "steps"), "") or "the budget"
    if timeline.epochs is not None:
        how = f"{amount_in_epochs(timeline.epochs)} of {epoch_text(plan)}"
    active = ""
    if plan.architecture.is_moe:
        active = f", {timeline.tokens / plan.parameters.active:.3g} an active one"
    return [
        *table,
        ("steps", f"{timeline.steps:,}", how),
        ("tokens", count_text(timeline.tokens), f"{ratio:.3g} a parameter{active}"),
    ]


def _ramp(plan: Plan) -> list[tuple[str, str, str]]:
    """How the first steps grow."""
    batch = arithmetic_of(plan)
    if not batch.ramp:
        return []
    sizes, each = batch.row_sizes, batch.micro * plan.mesh.data_ranks
    tokens = count_text(batch.sizes.before(batch.ramp))
    counts = f"{sizes.first // each:,} to {plural(sizes.full // each, 'microbatch')}"
    how = f"from {plural(sizes.first, 'row')} by {sizes.grows_by:,}, {counts} of the same shape; {tokens} tokens in it"
    return [("ramp", plural(batch.ramp, "step"), how)]


def _learning_rate(plan: Plan) -> tuple[str, str, str]:
    args = plan.node("setup.scheduler").args
    return ("learning rate", f"{args['lr']:g}", ", ".join(breakpoints(args)))


def _average(plan: Plan) -> list[tuple[str, str, str]]:
    """How the averaged weights move, and who works with them."""
    args = average_args(plan)
    if args is None:
        return []
    often = "every step" if args["every"] == 1 else f"every {plural(args['every'], 'step')}"
    looked_at = any(node.args.get("averaged") for node in plan.nodes)
    uses = [word for word, on in (("evaluated", looked_at), ("published", args["publish"])) if on]
    return [("averages", f"{args['decay']:g} stays", f"{often}, in {args['format']}, {' and '.join(uses) or 'kept'}")]


def breakpoints(args: dict[str, Any]) -> list[str]:
    """Where the learning rate turns, from the arguments of `setup.scheduler`; shares of a budget nobody has counted."""
    warmup = args.get("warmup", {})
    parts = []
    if any(warmup.values()):
        parts.append(f"warm-up over {_length(warmup)}")
    shown = SCHEDULERS.of(args).shown(args, lambda name: _length(args[name]))
    return [*parts, *(f"then {each}" if parts and each == "constant" else each for each in shown)]


def _length(length: dict[str, Any]) -> str:
    if "epochs" in length and "steps" not in length:
        return amount_in_epochs(length["epochs"])
    if "steps" not in length and "tokens" in length:
        return plural(length["tokens"], "token")
    return plural(length["steps"], "step") if "steps" in length else f"{100 * length['fraction']:.3g}%"


def _checkpoints(plan: Plan) -> list[tuple[str, str, str]]:
    """How large they are, how often one is written, how many are kept."""
    size = plan.estimates.checkpoint_bytes
    saving = next((node for node in plan.nodes if node.op == "setup.checkpoint"), None)
    if saving is None:
        return [("checkpoint", bytes_text(size), "none is written")]
    keep = saving.args["keep"]
    ticks = [tick for tick in plan.timeline.ticks if any(saves(plan.node(n)) for n in tick.nodes)]
    written = count_saves(plan)
    clocks = any(tick.seconds is not None for tick in ticks)
    times = "depends on the clock" if clocks else "as many as the number of steps allows"
    if written is not None:
        times = f"{written:,} written"
    best = " + best" if saving.args["best"] is not None else ""
    retained = "all are kept" if keep is None else f"{keep}{best} kept"
    if disk := disk_of(plan, written):
        retained += f": {bytes_text(disk.rest)} on disk"
        retained += f", at most {bytes_text(disk.most)}" if disk.most > disk.rest else ""
    found = f"{times}, {retained}"
    every = next((t.steps for t in ticks if t.steps), None)
    if plan.estimates.times is not None and every:
        found += f"; one every {seconds_text(every * plan.estimates.times.step)}"
    if copies := saving.args["copies"]:
        share = bytes_text(copies * plan.estimates.copy_bytes)
        found += f"; {copies} {'copy' if copies == 1 else 'copies'} in host memory at most: {share} a rank"
    return [("checkpoint", bytes_text(size), found)]


def _duration(plan: Plan) -> list[tuple[str, str, str]]:
    """Wall time, device-hours and cost; evaluations and checkpoints come on top."""
    times, steps = plan.estimates.times, plan.timeline.full_steps
    if times is None or steps is None:
        why = no_times(plan) if times is None else "steps are not known"
        return [("wall time", "unknown", why)]
    wall, world, price = steps * times.step, plan.mesh.world_size, plan.cluster.price
    span = ""
    if times.fast != times.slow:
        span = f"{seconds_text(steps * times.fast)} to {seconds_text(steps * times.slow)}; "
    hours = wall * world / 3600
    cost = (
        "cost unknown: no cluster.price" if price is None else f"cost {amount_text(hours * price)} at {price:g} an hour"
    )
    return [
        ("wall time", seconds_text(wall), f"{span}without evaluations and checkpoints"),
        ("device-hours", amount_text(hours), cost),
    ]


def _failures(plan: Plan) -> list[tuple[str, str, str]]:
    """How often devices fail, what that costs, and how often it would be best to save."""
    found = goodput_of(plan)
    if found is None:
        return []
    faults = found.faults
    one = f"one every {seconds_text(faults.between)}, of {plural(plan.mesh.world_size, 'device')}"
    if found.interval == inf:
        why = "there is no checkpoint on the way: after a failure the run begins anew"
        if found.trained is not None:
            one += f"; training takes {seconds_text(found.trained)}"
        return [("failures", "", one), ("goodput", "unknown", why)]
    count = "" if found.failures is None else amount_text(found.failures)
    wall = "" if found.wall is None else f"; {seconds_text(found.wall)} in all"
    costs = f"lost work {found.lost:.1%}, restarts {found.restarts:.1%}, saves {found.saves:.1%}{wall}"
    step = plan.estimates.times.step if plan.estimates.times is not None else inf
    if plan.cluster.storage is None:  # saves would be free, and the best were to save at every step
        save = ("best to save", "unknown", "set cluster.storage: without it saves count as free")
    else:
        best = f"{plural(max(1, round(found.best / step)), 'step')}: goodput {found.best_share:.1%}"
        best += f"; by Young's formula {seconds_text(faults.young)}" if faults.blocked else ""
        save = ("best to save", seconds_text(found.best), best)
    return [
        ("failures", count, one),
        ("goodput", f"{found.share:.1%}", costs),
        ("", f"{faults.simulated(found.interval):.1%}", f"in a simulation of {FAILURES:,} failures"),
        save,
        *_restart(plan),
    ]


def _restart(plan: Plan) -> list[tuple[str, str, str]]:
    if plan.cluster.restart_seconds is not None:
        return []
    stuck = plan.node("setup.watch").args["stuck_seconds"]
    noticed = "a failure is never noticed" if stuck is None else f"noticed after {seconds_text(stuck)} at most"
    return [("restart", seconds_text(restart_of(plan)), f"{noticed}, then a start; no machine is replaced")]


def _startup(plan: Plan, detail: Detail) -> list[tuple[str, str, str]]:
    """How long a start takes until the first step, and what of it."""
    if not CLUSTERS[plan.cluster.preset].known:
        return []
    found = startup_of(plan)
    known = sorted((part.seconds, part.name) for part in found.parts if part.seconds is not None)
    longest = ", ".join(f"{name} {seconds_text(seconds)}" for seconds, name in reversed(known))
    missing = ", ".join(part.name for part in found.unknown)
    text = f"without {missing}, which nobody knows: {longest}" if missing else longest
    parts = [
        ("", "unknown" if part.seconds is None else seconds_text(part.seconds), f"{part.name}: {part.why}")
        for part in found.parts
    ]
    return [("start", seconds_text(found.seconds), text), *(parts if detail.full else ())]


def _ticks(plan: Plan) -> list[tuple[str, str, str, str]]:
    defaults = {entry.path for entry in plan.provenance if entry.origin == "default"}
    rows, in_all = [], _in_all(plan)
    for tick in plan.timeline.ticks:
        names = [_name(plan.node(node)) for node in tick.nodes] + (["stop"] if tick.stop else [])
        by_default = len(names) == 1 and f"every.{names[0]}" in defaults
        note = "default" if by_default else _more_often(plan, tick, in_all)
        rows.append((f"every {tick.period}", " then ".join(names), _count(tick), note))
    triggers: dict[tuple[str, str], list[str]] = {}  # what happens, and whether by default → on which events
    for trigger in plan.timeline.triggers:
        names = [_name(plan.node(node)) for node in trigger.nodes] + (["stop"] if trigger.stop else [])
        by_default = "default" if f"on.{trigger.event}" in defaults else ""
        if by_default and trigger.event == "finish" and len(names) > 1:
            by_default = f"{names[0]} by default"  # what else happens there was declared
        elif any((kind := action_of(plan.node(node).op)) and kind.informs for node in trigger.nodes):
            by_default = ""
        triggers.setdefault((" then ".join(names), by_default), []).append(trigger.name)
    rows += [(f"on {', '.join(events)}", names, "", by_default) for (names, by_default), events in triggers.items()]
    if (stuck := plan.node("setup.watch").args["stuck_seconds"]) is not None:
        by_default = "default" if "fault_tolerance.stuck" in defaults else ""
        rows.append((f"no progress for {seconds_text(stuck)}", "report stuck ranks, then end", "", by_default))
    if (empty := plan.node("step.agree").args.get("empty_steps")) is not None:
        by_default = "default" if "fault_tolerance.empty_steps" in defaults else ""
        rows.append((f"{plural(empty, 'empty step')} in a row", "the run fails", "", by_default))
    return rows


def _alerts(plan: Plan) -> str:
    """What is raised an alert about, with the thresholds, as `alerts` of a spec names them."""
    args = plan.node("setup.alerts").args
    found = ["nonfinite", *(f"{name} {args[name]:g}" for name in ("loss_spike", "slow") if args[name] is not None)]
    found += [f"{name} {100 * args[name]:.3g}%" for name in ("starvation", "memory") if args[name] is not None]
    if args["disk_share"] is not None:
        found.append(f"disk {100 * args['disk_share']:.3g}% (at most {bytes_text(args['disk_most_bytes'])})")
    found += [f"disk {bytes_text(args['disk_bytes'])}"] if args["disk_bytes"] is not None else []
    found += [f"stalled {seconds_text(args['stalled_seconds'])}"] if args["stalled_seconds"] is not None else []
    return ", ".join(found)


def _trackers(plan: Plan) -> str:
    """What takes the records of the run besides its own files; empty where nothing does."""
    pairs = [(node, tracker_of(node.op)) for node in plan.nodes if node.op.startswith(TRACKER)]
    found = [kind.shown(node.args) if kind else node.op.removeprefix(TRACKER) for node, kind in pairs]
    return f"also to {' and '.join(found)}" if found else ""


def _name(node: Node) -> str:
    """`eval web`, `log`."""
    action = action_of(node.op)
    return node.op.partition(".")[2] if action is None else action.shown(node.args)


def _count(tick: PlanTick) -> str:
    if tick.count is None:
        return "by the clock" if tick.seconds is not None else ""
    return times_text(tick.count)


def _in_all(plan: Plan) -> dict[str, int | None]:
    """Node → how often it happens in all, where several ticks do the same or it does not happen at each tick."""
    nodes = {id: plan.node(id) for tick in plan.timeline.ticks for id in tick.nodes}
    same = {id: node.op if saves(node) else id for id, node in nodes.items()}
    ticks = Counter(name for tick in plan.timeline.ticks for name in {same[id] for id in tick.nodes})
    several = [id for id in nodes if ticks[same[id]] > 1 or unrecorded(nodes[id]) is not None]
    saved = count_saves(plan) if any(saves(nodes[id]) for id in several) else None
    return {id: saved if saves(nodes[id]) else count_node(plan, id) for id in several}


def _more_often(plan: Plan, tick: PlanTick, in_all: dict[str, int | None]) -> str:
    """How often what a tick does happens in all, where that is not as often as the tick does something."""
    if tick.count is None:
        return ""
    counts = [(id, in_all.get(id)) for id in tick.nodes]
    found = [f"{_name(plan.node(id))} {count:,}" for id, count in counts if count not in (None, tick.count)]
    return f"in all {', '.join(found)}" if found else ""
