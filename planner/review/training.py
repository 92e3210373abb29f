"""Parts of the page about data, phases, tokens, learning rate, checkpoints, alerts and the duration of a run."""

from collections import Counter
from math import inf
from typing import Any

from xtrain.dsl.schema.actions import action_of
from xtrain.dsl.schema.cluster import CLUSTERS
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.dsl.schema.optimizers import SCHEDULERS
from xtrain.dsl.schema.run import OP as TRACKER
from xtrain.dsl.schema.run import tracker_of
from xtrain.plan.arithmetic import arithmetic_of, sampler_of
from xtrain.plan.data import form_text
from xtrain.plan.learning_rate import computed, in_order, learning_rate
from xtrain.plan.plan import Node, Plan, PlanPhase, PlanTick
from xtrain.plan.timeline import count_node, count_saves, known_arithmetic, saves, unrecorded, waits
from xtrain.plan.views import no_times
from xtrain.planner.costs.run import FAILURES, disk_of, goodput_of, restart_of, startup_of
from xtrain.planner.graph.data import OP as REFERENCE
from xtrain.planner.review.resuming_course import mix_text, start_text
from xtrain.text.page import Detail, Page
from xtrain.text.units import amount_in_epochs, amount_text, bytes_text, count_text, plural, seconds_text, times_text


def show_data(page: Page, plan: Plan, detail: Detail) -> None:
    """Show sources, the collate chain with the output of each link, and the data that a resume depends on."""
    loader = plan.node("setup.loader").args
    tokenizer = plan.node("setup.tokenizer").args["source"]
    page.heading(
        "DATA", f"tokenizer {tokenizer}, {plural(loader['rows'], 'row')} of {loader['sequence']:,} tokens a step"
    )
    sources = [node for node in plan.nodes if node.op == "setup.data"]
    most = detail.most(6)
    rows = []
    for node in sources[:most]:
        args = node.args
        role = "trained on" if args["dataset"] in loader["datasets"] else "evaluated"
        holdout = f", {100 * args['holdout']:.3g}% held out" if args["holdout"] else ""
        rows.append((args["dataset"], f"{role}{holdout}: {source_text(args)}"))
    if len(sources) > most:
        rows.append(("…", f"and {len(sources) - most} more: --part data"))
    rows.append(("chain", chain_text(plan)))
    computed = [node for node in plan.nodes if node.op == REFERENCE]
    rows += [("reference", node.does) for node in computed[:most]]
    if len(computed) > most:
        rows.append(("…", f"and {len(computed) - most} more: --part data"))
    place = "its position in the data" if len(loader["datasets"]) == 1 else "its position in each dataset"
    rows.append(("order", f"determined by the seed, on any number of ranks; a run resumes at {place}"))
    if mix := mix_of_epoch(plan):
        rows.append(("epoch", mix))
    if detail.full or loader["workers"] or not loader["prefetch"]:
        rows.append(("reading", reading_text(loader)))
    if plan.counted is None:
        rows.append(("unknown", "documents, rows, how full they are, and epochs, until the data has been tokenized"))
    else:
        rows.append(("counted", epoch_text(plan)))
    page.described(rows, wraps=True)
    if detail.full:
        page.described([(node.id, node.does) for node in plan.nodes if node in sources or node.kind == "collate"])


def mix_of_epoch(plan: Plan) -> str:
    """Return the definition of an epoch of several datasets as text; empty if the plan has no epochs."""
    phases, datasets = plan.timeline.phases, plan.node("setup.loader").args["datasets"]
    if (weights := phases[0].passes) is not None:
        words = {1.0: "once", 2.0: "twice"}
        each = ", ".join(f"{name} {words.get(n, f'{n:g} times')}" for name, n in weights.items() if n > 0)
        return f"all rows of {each}"
    if len(datasets) > 1 and (plan.timeline.epochs is not None or waits(plan)):
        return f"as many rows as {', '.join(datasets)} have together, drawn by their shares"
    return ""


def epoch_text(plan: Plan) -> str:
    """Return text on an epoch of counted data: `85 rows, 11 steps an epoch, counted in the token store 1a2b…`."""
    assert plan.counted is not None
    batch, counted = known_arithmetic(plan), plan.counted
    several = len(counted.rows) > 1
    rows = " + ".join(
        f"{count:,} rows of {name}" if several else plural(count, "row") for name, count in counted.rows.items()
    )
    stores = plural(len(set(counted.stores.values())), "token store")
    where = stores if several else f"the token store {next(iter(counted.stores.values()))}"
    return f"{rows}, {plural(batch.steps_in(1.0) or 0, 'step')} an epoch, counted in {where}"


def source_text(args: dict[str, Any]) -> str:
    """Return the source of a `setup.data` node's documents as text, and their form if they are not plain text."""
    source = SOURCES.of_kind(args["kind"])
    found = args["kind"] if source is None else source.shown(args)
    form = form_text(args["reads"])
    return f"{found}; {form}" if form else found


def reading_text(loader: dict[str, Any]) -> str:
    """Return text on reading rows while a step computes."""
    by = plural(loader["workers"], "process") if loader["workers"] else "a thread"
    if not loader["prefetch"]:
        return f"by {by} of each rank when a step asks for them: nothing is read ahead"
    return f"by {by} of each rank, {plural(loader['prefetch'], 'step')} ahead"


def chain_text(plan: Plan) -> str:
    """Return links and the values passed between them: `(rows) to_tensor (rows of token tensors) flatten …`."""
    given = {edge.after: edge.data for edge in plan.edges if edge.data}
    parts = [f"{given.get(n.id, 'rows')} → [{n.id.removeprefix('collate.')}]" for n in plan.of_kind("collate")]
    return " → ".join([*parts, given.get("setup.loader", "microbatches")])


HEAD = ("phase", "steps", "learning rate", "dataset", "share", "rows", "tokens")


def show_phases(page: Page, plan: Plan, detail: Detail) -> None:
    """Show a line for each dataset of each phase, and the sums; nothing for a single dataset."""
    phases, datasets = plan.timeline.phases, plan.node("setup.loader").args["datasets"]
    if len(phases) == 1 and len(datasets) == 1 and not detail.full:
        return
    weights = "shares of rows" if not any(phase.passes for phase in phases) else "how often an epoch takes each"
    weights = f"exact shares of the {phases[0].exact_rows} rows of every step" if phases[0].exact_rows else weights
    page.heading("PHASES", f"{plural(len(phases), 'phase')}, {plural(len(datasets), 'dataset')}, {weights}")
    rate = plan.node("setup.scheduler").args
    lengths = (rate.get("warmup") or {}, rate.get("decay") or {})
    waits = any(phase.first is None and phase.epochs for phase in phases)
    waits = waits or any(each and "steps" not in each and "fraction" not in each for each in lengths)
    if plan.timeline.steps is None or waits:
        page.described([(phase.name, _uncounted(phase)) for phase in phases])
        return
    rows = phase_rows(plan)
    most = detail.most(14)
    page.table([HEAD, *rows[:most]], align="<<<<>>>", styles=("cyan", "", "", "", "", "", ""))
    page.more(len(rows) - most, "phases")


def phase_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return phase, its steps from 1, the first and last learning rate, then dataset, share, rows and tokens in it.

    Rows are those that the run samples, from its first step to its last; with weights in epochs they depend on the
    data.
    """
    steps, loader = plan.timeline.steps, plan.node("setup.loader").args
    assert steps is not None
    args = plan.node("setup.scheduler").args
    rate = learning_rate(args, known_arithmetic(plan), plan.timeline.phases) if computed(args) else None
    begins = [pair for pair in in_order(plan.timeline.phases, steps) if pair[0] < steps]
    ends = [first for first, _ in begins[1:]] + [steps]
    table: list[tuple[str, ...]] = []
    sizes = arithmetic_of(plan).row_sizes
    taken = dict.fromkeys(loader["datasets"], 0)
    for (first, phase), end in zip(begins, ends, strict=True):
        scale = f" (× {phase.lr_scale:g})" if phase.lr_scale != 1 else ""
        span = f"{first + 1:,} to {end:,}" if end > first + 1 else f"{end:,}"
        ends_at = f"{rate(first):.3g} → {rate(end - 1):.3g}" if rate is not None else f"by {args['kind']}"
        head = (phase.name, span, f"{ends_at}{scale}")
        if phase.passes is not None:
            for name, epochs in phase.passes.items():
                if epochs > 0:
                    table.append((*head, name, amount_in_epochs(epochs), "", ""))
                    head = ("", "", "")
            continue
        sampler = sampler_of(phase, tuple(phase.shares), {}, loader["seed"])
        sampled = sampler.counts(0, sizes.between(first, end))
        for (name, share), rows in zip(phase.shares.items(), sampled, strict=True):
            taken[name] += rows
            if share > 0:
                table.append((*head, *_phase_amounts(name, share, rows, loader["sequence"])))
                head = ("", "", "")
    if len(begins) > 1 and not any(phase.passes for _, phase in begins):
        head = ("all", f"{steps:,}", "")
        for name, rows in taken.items():
            table.append((*head, *_phase_amounts(name, rows / sizes.before(steps), rows, loader["sequence"])))
            head = ("", "", "")
    return table


def _phase_amounts(name: str, share: float, rows: int, sequence: int) -> tuple[str, ...]:
    return name, f"{share:.1%}", f"{rows:,}", count_text(rows * sequence)


def _uncounted(phase: PlanPhase) -> str:
    start = f"from step {phase.first + 1:,}" if phase.first is not None else f"from {start_text(phase)}"
    scale = f", learning rate × {phase.lr_scale:g}" if phase.lr_scale != 1 else ""
    return f"{start}: {mix_text(phase)}{scale}"


def show_training(page: Page, plan: Plan, detail: Detail) -> None:
    """Show the arithmetic of the budget, the breakpoints of the learning rate, checkpoints, ticks and triggers."""
    page.heading("TRAINING")
    rate = plan.node("setup.scheduler").args
    rows = [
        *_amounts(plan),
        ("learning rate", f"{rate['lr']:g}", ", ".join(breakpoints(rate))),
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
    """Return tokens and steps, and how they are derived."""
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
    """Return the growth of the first steps."""
    batch = arithmetic_of(plan)
    if not batch.ramp:
        return []
    sizes, each = batch.row_sizes, batch.micro * plan.mesh.data_ranks
    tokens = count_text(batch.sizes.before(batch.ramp))
    counts = f"{sizes.first // each:,} to {plural(sizes.full // each, 'microbatch')}"
    how = f"from {plural(sizes.first, 'row')} by {sizes.grows_by:,}, {counts} of the same shape; {tokens} tokens in it"
    return [("ramp", plural(batch.ramp, "step"), how)]


def _average(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the decay of averaged weights, and their uses."""
    args = plan.args("setup.ema")
    if not args:
        return []
    often = "every step" if args["every"] == 1 else f"every {plural(args['every'], 'step')}"
    looked_at = any(node.args.get("averaged") for node in plan.nodes)
    uses = [word for word, on in (("evaluated", looked_at), ("published", args["publish"])) if on]
    return [("averages", f"{args['decay']:g} stays", f"{often}, in {args['format']}, {' and '.join(uses) or 'kept'}")]


def breakpoints(args: dict[str, Any]) -> list[str]:
    """Return the breakpoints of the learning rate, from the arguments of `setup.scheduler`; shares of an uncounted
    budget stay shares."""
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
    """Return the size of checkpoints, how often one is written, and how many are kept."""
    size = plan.estimates.checkpoint_bytes
    saving = plan.args("setup.checkpoint")
    if not saving:
        return [("checkpoint", bytes_text(size), "none is written")]
    keep = saving["keep"]
    ticks = [tick for tick in plan.timeline.ticks if any(saves(plan.node(n)) for n in tick.nodes)]
    written = count_saves(plan)
    clocks = any(tick.seconds is not None for tick in ticks)
    times = "depends on the clock" if clocks else "as many as the number of steps allows"
    if written is not None:
        times = f"{written:,} written"
    best = " + best" if saving["best"] is not None else ""
    retained = "all are kept" if keep is None else f"{keep}{best} kept"
    if disk := disk_of(plan, written):
        retained += f": {bytes_text(disk.rest)} on disk"
        retained += f", at most {bytes_text(disk.most)}" if disk.most > disk.rest else ""
    found = f"{times}, {retained}"
    every = next((t.steps for t in ticks if t.steps), None)
    if plan.estimates.times is not None and every:
        found += f"; one every {seconds_text(every * plan.estimates.times.step)}"
    if copies := saving["copies"]:
        share = bytes_text(copies * plan.estimates.copy_bytes)
        found += f"; {copies} {'copy' if copies == 1 else 'copies'} in host memory at most: {share} a rank"
    return [("checkpoint", bytes_text(size), found)]


def _duration(plan: Plan) -> list[tuple[str, str, str]]:
    """Return wall time, device-hours and cost, without evaluations and checkpoints."""
    times, steps = plan.estimates.times, plan.timeline.full_steps
    if times is None or steps is None:
        why = no_times(plan) if times is None else "steps are unknown"
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
    """Return how often devices fail, the cost of failures, and the best interval of checkpoints."""
    found = goodput_of(plan)
    if found is None:
        return []
    faults = found.faults
    one = f"one every {seconds_text(faults.between)}, of {plural(plan.mesh.world_size, 'device')}"
    if found.interval == inf:
        why = "no checkpoint is saved during the run: a failure restarts it from step 0"
        if found.trained is not None:
            one += f"; training takes {seconds_text(found.trained)}"
        return [("failures", "", one), ("goodput", "unknown", why)]
    count = "" if found.failures is None else amount_text(found.failures)
    wall = "" if found.wall is None else f"; {seconds_text(found.wall)} in all"
    costs = f"lost work {found.lost:.1%}, restarts {found.restarts:.1%}, saves {found.saves:.1%}{wall}"
    step = plan.estimates.times.step if plan.estimates.times is not None else inf
    if plan.cluster.storage is None:  # saves cost nothing, so saving at every step would be best
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
    """Return the time until the first step, and its parts."""
    if not CLUSTERS[plan.cluster.preset].known:
        return []
    found = startup_of(plan)
    known = sorted((part.seconds, part.name) for part in found.parts if part.seconds is not None)
    longest = ", ".join(f"{name} {seconds_text(seconds)}" for seconds, name in reversed(known))
    missing = ", ".join(part.name for part in found.unknown)
    text = f"plus {missing} (unknown); {longest}" if missing else longest
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
    triggers: dict[tuple[str, str], list[str]] = {}  # actions, and whether they are a default → events
    for trigger in plan.timeline.triggers:
        names = [_name(plan.node(node)) for node in trigger.nodes] + (["stop"] if trigger.stop else [])
        by_default = "default" if f"on.{trigger.event}" in defaults else ""
        if by_default and trigger.event == "finish" and len(names) > 1:
            by_default = f"{names[0]} by default"  # other actions there were declared
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
    """Return alerts and thresholds as text, with the names in `alerts` of a spec."""
    args = plan.node("setup.alerts").args
    found = ["nonfinite"]
    found += [f"{name} {args[name]:g}" for name in ("loss_spike", "loss_above", "slow") if args.get(name) is not None]
    found += [f"{name} {100 * args[name]:.3g}%" for name in ("starvation", "memory") if args[name] is not None]
    if args["disk_share"] is not None:
        found.append(f"disk {100 * args['disk_share']:.3g}% (at most {bytes_text(args['disk_most_bytes'])})")
    found += [f"disk {bytes_text(args['disk_bytes'])}"] if args["disk_bytes"] is not None else []
    found += [f"stalled {seconds_text(args['stalled_seconds'])}"] if args["stalled_seconds"] is not None else []
    return ", ".join(found)


def _trackers(plan: Plan) -> str:
    """Return the trackers that get the run's records, as text; empty without one."""
    pairs = [(node, tracker_of(node.op)) for node in plan.nodes if node.op.startswith(TRACKER)]
    found = [kind.shown(node.args) if kind else node.op.removeprefix(TRACKER) for node, kind in pairs]
    return f"also to {' and '.join(found)}" if found else ""


def _name(node: Node) -> str:
    """Return the name of a node's action: `eval web`, `log`."""
    action = action_of(node.op)
    return node.op.partition(".")[2] if action is None else action.shown(node.args)


def _count(tick: PlanTick) -> str:
    if tick.count is None:
        return "by the clock" if tick.seconds is not None else ""
    return times_text(tick.count)


def _in_all(plan: Plan) -> dict[str, int | None]:
    """Return node → its total count, for nodes of several ticks and for nodes that do not act at every tick."""
    nodes = {id: plan.node(id) for tick in plan.timeline.ticks for id in tick.nodes}
    same = {id: node.op if saves(node) else id for id, node in nodes.items()}
    ticks = Counter(name for tick in plan.timeline.ticks for name in {same[id] for id in tick.nodes})
    several = [id for id in nodes if ticks[same[id]] > 1 or unrecorded(nodes[id]) is not None]
    saved = count_saves(plan) if any(saves(nodes[id]) for id in several) else None
    return {id: saved if saves(nodes[id]) else count_node(plan, id) for id in several}


def _more_often(plan: Plan, tick: PlanTick, in_all: dict[str, int | None]) -> str:
    """Return the total counts of a tick's actions as text, where they differ from the tick's count."""
    if tick.count is None:
        return ""
    counts = [(id, in_all.get(id)) for id in tick.nodes]
    found = [f"{_name(plan.node(id))} {count:,}" for id, count in counts if count not in (None, tick.count)]
    return f"in all {', '.join(found)}" if found else ""
