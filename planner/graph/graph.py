"""Graph of a plan: set-up nodes, the nodes of a step in order, hooks, commands, and shutdown."""

from collections.abc import Mapping
from typing import Any, Final

from attrs import evolve, frozen

from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.component import planned_class
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.schema.actions import ACTIONS, action_of
from xtrain.dsl.schema.optimizers import ParameterGroup
from xtrain.dsl.schema.run import Hook
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.dsl.user_parts.kinds import AROUND, IN_STEP, NOTHING, PLACES, Place
from xtrain.plan.amounts import agree_args
from xtrain.plan.architecture import EMBEDDING
from xtrain.plan.arithmetic import microbatches_text
from xtrain.plan.estimates import Estimates
from xtrain.plan.graph import CONTROL, Builder, StepNode, add_trackers, check_graph
from xtrain.plan.groups import OP, clip_args, name_of, optimizer_of, optimizers_of
from xtrain.plan.learning_rate import scheduler_args
from xtrain.plan.mesh import AXES, LAZY_FROM, folded_axes
from xtrain.plan.parameters import covers, forward_flops
from xtrain.plan.plan import Command, Edge, Node, Timeline
from xtrain.plan.timeline import waits_for_data
from xtrain.planner.derive.layout import device_kind
from xtrain.planner.graph.data import COMPLETIONS, KEPT, PROMPTS, SCORER, add_data, before_step, behind_forward
from xtrain.planner.graph.model import add_model
from xtrain.planner.graph.saving import (
    add_average,
    add_resume,
    bad_step_text,
    on_nan,
    put_off_text,
    saves_beside,
    update_text,
)
from xtrain.planner.graph.timeline import ActionNodes, Schedule, alert_args, alert_text, build_timeline
from xtrain.planner.resolved import Resolved
from xtrain.text.units import amount_in_epochs, count_text, flops_text, plural, seconds_text


def hook_text(hook: Hook) -> str:
    """Return the description of a hook's node."""
    place, changes = hook.declared["place"], hook.declared["changes"]
    purpose = hook.purpose.removesuffix(".")
    does = f"{hook.function} of {hook.module}, {PLACES[place]}{f': {purpose}' if purpose else ''}"
    return does if changes == NOTHING else f"{does}; changes {changes}"


def add_hooks(graph: Builder, spec: Spec, after: str) -> None:
    """Add the hooks outside steps; hooks around nodes name the nodes."""
    for hook in spec.hooks.values():
        place = hook.declared["place"]
        if place in IN_STEP:
            continue
        args: dict[str, Any] = hook.args()
        if place in AROUND:
            hooked = {node.id: action.hooked for node in graph.nodes if (action := action_of(node.op)) is not None}
            args["nodes"] = [id for id, word in hooked.items() if word == place.partition("_")[2]]
        graph.add("event", "event.hook", hook_text(hook), id=f"hook.{hook.name}", args=args, after=(after,))


AWAITS: Final = "the copy of a state that is being saved is complete before anything writes to it"


def add_step(graph: Builder, run: Resolved, after: str, estimates: Estimates, schedule: Schedule) -> str:
    """Add the nodes of a step; return the id of the last one."""
    spec, batch = run.spec, run.batch
    everyone = run.wide(*AXES)
    last = after
    of_actions = _of_actions(run, schedule)

    def then(op: str, does: str, args: dict[str, Any] | None = None, axes: tuple[str, ...] = (), id: str = "") -> None:
        nonlocal last
        for extra in of_actions:
            if extra.before == op:
                last = graph.add("step", extra.op, extra.does, args=extra.args, after=(last,))
        last = graph.add("step", op, does, id=id, args=args, axes=axes, after=(last,))

    def hooks(place: Place) -> None:
        for hook in spec.hooks.values():
            if hook.declared["place"] == place:
                then("step.hook", hook_text(hook), hook.args(), everyone, f"hook.{hook.name}")

    for node in stack_of(run.spec).before_rows(run):
        then(node.op, node.does, node.args, run.wide("replicate"))
    readers = run.pipeline.readers
    ranks, sizes = run.layout.mesh.data_ranks, batch.row_sizes
    rows = plural(sizes.full // ranks, "row")
    does = f"take {f'{sizes.first // ranks:,} to ' if sizes.ramp else ''}{rows} a data rank from the loader"
    if len(readers) < run.size("pp"):
        does += f", on pp {' and '.join(map(str, readers))}, which hold the ends of the model"
    then("step.fetch", does, {"readers": readers}, run.wide("replicate", "fsdp"))
    if len(readers) < run.size("pp"):
        numbers = run.row_numbers
        named = "".join(f" and the number of each row's {each}" for each in numbers)
        does = f"the lengths of documents{named} go from pp {readers[0]} to the stages that read no rows"
        args = {"source": readers[0], **({"numbers": list(numbers)} if numbers else {})}
        then("step.share_outline", does, args, ("pp",))
    if spec.rollout is not None and spec.reward is not None:
        for node in before_step(run, spec.rollout, spec.reward):
            then(node.op, node.does, node.args, node.axes)
        graph.edges.append(Edge(before=PROMPTS, after="rollout.generate", data="prompts"))
        if spec.reward.model_folder is not None:
            graph.edges.append(Edge(before=SCORER, after="rollout.score", data="scorer"))
        if spec.loss.computed:
            graph.edges.append(Edge(before=KEPT, after="rollout.reference", data="weights of the reference"))
    hooks("after_phase")
    hooks("before_phase")
    agree = "one all-reduce" if everyone else "count"
    empty = spec.fault_tolerance.empty_steps
    unit = spec.loss.unit
    args = {**agree_args(spec), "empty_steps": empty, **({"unit": unit} if unit != "token" else {})}
    asks = [f"a limit of {seconds_text(args['time_limit_seconds'])}"] if "time_limit_seconds" in args else []
    asks += [f"the file {args['stop_file']}"] if "stop_file" in args else []
    counted = "valid tokens" + (f", {unit}s" if unit != "token" else "")
    does = ", ".join((f"{agree}: {counted} and documents of the step", "stop requests", *asks, "clock"))
    does += f"; {plural(empty, 'step')} in a row without a token to learn from {'end' if empty > 1 else 'ends'} the run"
    then("step.agree", does, args, everyone)
    if put_off := put_off_text(spec, schedule):
        then("step.put_off_save", put_off)
    hooks("before_step")
    then("step.zero_gradients", "release the gradients of the step before")
    waits = saves_beside(spec, schedule)
    moves = [chosen.before_forward for chosen in optimizers_of(spec).values() if chosen.before_forward]
    if moves:
        if waits:
            then("step.await_copy", AWAITS)
        then("step.training_point", moves[0])
    hooks("before_backward")
    if batch.ramp and run.architecture.is_moe:
        does = f"losses of routers are means over the rows of the step: weights × {batch.rows:,} / its rows"
        then("step.router_rows", does)
    if run.architecture.mtp and any(phase.mtp_weight is not None for phase in run.phases):
        weight = spec.model.mtp_weight
        each = [f"{weight if one.mtp_weight is None else one.mtp_weight:g} in {one.name}" for one in run.phases]
        then("step.mtp_weight", f"losses of further tokens count {', '.join(each)}", {"weight": weight})
    share = estimates.flops_per_step / run.layout.mesh.world_size
    if spec.loss.mismatched:
        does = "what log-ratios are compared with: their mean over answers behind the prompts of other documents of "
        forward = forward_flops(run.architecture, batch.sequence) * batch.tokens_per_step / run.layout.mesh.world_size
        does += f"their row, and at least 0; a forward, {flops_text(forward)} a rank"
        then("step.reference_point", does, axes=everyone)
    does = f"{microbatches_text(batch)}, loss summed and divided by the {unit}s of the whole step"
    op, args = "step.forward_backward", {"accumulate": batch.accumulate, "sync": run.sync}
    if run.size("pp") > 1:
        op, args, does = "step.pipeline", {"accumulate": batch.accumulate}, f"{does}; bubble {estimates.bubble:.0%}"
    elif run.sync == "microbatch":
        does += ", gradients summed over ranks after each"
    if run.teacher is not None and spec.loss.learns_from is not None:
        does += f"; of each microbatch, before the head, a forward of {spec.loss.learns_from.folder}"
    if spec.rollout is not None:
        args["each"] = True
        does += "; the cross-entropy of each token is kept"
    if spec.step is not None:
        op, args = "step.body", {**args, "user": spec.step.call()}
        does = f"{spec.step.function} of {spec.step.module}, in place of: {does}"
    then(op, f"{does}; {flops_text(share)} a rank", args, everyone, "step.forward_backward")
    if spec.rollout is not None:
        node = behind_forward(run)
        then(node.op, node.does, node.args, node.axes)
    _add_syncs(run, then)
    for node in stack_of(run.spec).sums(run):
        then(node.op, node.does, node.args, run.wide("replicate"))
    hooks("after_backward")
    if spec.tasks:
        policy, own = on_nan(spec), clip_args(spec)
        does = f"gradients of each task, over its own tokens and with a norm of its own: {_task_text(own)}"
        does += "; a task without a token, or whose numbers are none, leaves the step out" if policy.bears else ""
        then("step.task_gradients", does, {"tasks": own, "limit": policy.limit}, everyone)
    else:
        args = spec.optimizer.clip_args()
        then("step.clip" if args else "step.gradient_norm", f"global gradient norm, {_clip_text(args)}", args, everyone)
    if (largest := spec.optimizer.clip_value) is not None:
        does = f"limit every element of the gradients to {largest:g}, up and down"
        then("step.clip_value", does, {"largest": largest})
    policy = on_nan(spec)
    then("step.check_finite", bad_step_text(policy), {"limit": policy.limit})
    scheduled = {"decay": "lr"} if spec.optimizer.scheduled_decay else None
    also = ", and weight decay as the same share of its own" if scheduled else ""
    then("step.schedule", f"learning rate of this step, a closed form of its number{also}", scheduled)
    if waits and not moves:
        then("step.await_copy", AWAITS)
    hooks("before_optimizer")
    kinds = dict.fromkeys((spec.optimizer.kind, *(each["own"]["kind"] for each in run.groups.groups if "own" in each)))
    update = f"{' and '.join(kinds)} {'updates' if len(kinds) == 1 else 'update'}"
    then("step.optimizer", f"{update} the parameters a rank owns")
    hooks("after_optimizer")
    if (speed := run.architecture.router_bias_speed) > 0:
        does = f"move each expert's bias by {speed:g} towards an even load, from the counts of all ranks"
        then("step.router_bias", does, {"speed": speed}, everyone)
    if spec.ema is not None:
        then("step.ema", update_text(run))
    keeps = any(hook.declared["place"] == "after_step" for hook in spec.hooks.values())
    does = "add the step to what the next log line and alerts speak of"
    then("step.measure", does, {"lets_go": False} if keeps else None)
    hooks("after_step")
    if keeps:
        then("step.let_go", "release the rows of the step")
    return last


def _task_text(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    return ", ".join(f"{name} {_clip_text(args)}" for name, args in tasks.items())


def _clip_text(args: Mapping[str, Any]) -> str:
    parts = [f"scaled down to {args['max_norm']:g}"] if "max_norm" in args else []
    if "deviations" in args:
        parts.append(
            f"scaled down where it is {args['deviations']:g} standard deviations above the mean of those before "
            f"({args['decay']:g} of both stays in a step), behind the first {args['first']} steps"
        )
    return "; and ".join(parts) or "for the record; nothing is clipped"


def _of_actions(run: Resolved, schedule: Schedule) -> list[StepNode]:
    """Return the nodes that actions of ticks need in the step."""
    actions = [action for tick in schedule.ticks for action in tick.actions]
    by_kind = ((kind, [action for action in actions if isinstance(action, kind)]) for kind in ACTIONS.values())
    return [node for kind, own in by_kind if own for node in planned_class(kind, PlannedAction).in_step(own, run)]


def _add_syncs(run: Resolved, then: Any) -> None:
    """Add the sums of gradients that FSDP does not make."""
    tp, parallel = run.size("tp"), run.spec.parallel
    if tp > 1 and not run.dense_fsdp:
        does = f"sum gradients of norms and other weights that tp={tp} does not cut"
        then("step.tensor_grad_sync", does, {"axes": ["tp"]}, ("tp",))
    tied = run.size("pp") > 1 and run.architecture.embeds_behind
    if tied and any(each.trained for each in run.inventory.tensors if each.name == f"{EMBEDDING}.weight"):
        table = count_text(run.architecture.vocab * run.architecture.dim)
        copy = "the head" if run.architecture.tie_embeddings else "that of the modules"
        does = f"sum the gradients of the embedding, {table} parameters, and of its copy, {copy} on the last stage"
        then("step.tied_grad_sync", does, {"axes": ["pp"]}, ("pp",))
    unfolded = run.wide(*(axis for axis in ("ring", "ulysses") if axis not in folded_axes(parallel)))
    if unfolded:
        does = f"sum gradients over {run.product(unfolded)}, which fsdp does not cover"
        then("step.context_grad_sync", does, {"axes": list(unfolded)}, unfolded)


ROOT = "setup.bootstrap"


@frozen
class Graph:
    """Nodes and edges, the timeline that names its ticks by node, and the proof that everything can be executed."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    proof: str


def build_graph(run: Resolved, schedule: Schedule, estimates: Estimates) -> Graph:
    """Build the graph of a plan; disabled features have no node. Raises GraphError for a bug of the planner."""
    graph = Builder()
    add_bootstrap(graph, run)
    add_determinism(graph, run)
    add_watch(graph, run)
    model = add_model(graph, run, add_mesh(graph, run))
    optimizer = stack_of(run.spec).wrap_optimizer(graph, run, _groups(graph, run, _optimizer(graph, run, model)))
    averages = add_average(graph, run, model)
    loader = add_data(graph, run, estimates, model)
    scheduler = _scheduler(graph, run, optimizer, loader)
    resume = _resume(graph, run, estimates, loader, optimizer, scheduler, averages, _alerts(graph, run, estimates))
    last = add_trackers(graph, run.spec, _horizon(graph, run.spec, resume))
    last = add_step(graph, run, last, estimates, schedule)
    first_tick = len(graph.nodes)
    publishes = run.spec.checkpoint.enabled and run.spec.checkpoint.model
    actions = ActionNodes(graph, run, last)
    timeline = build_timeline(
        schedule,
        run.batch,
        run.phases,
        actions,
        run.spec.launch,
        bad_steps=on_nan(run.spec).limit,
        publishes=publishes,
    )
    timeline = evolve(timeline, commands=build_commands(run.spec, run.training, actions))
    add_hooks(graph, run.spec, last)
    endings = (last, *(node.id for node in graph.nodes[first_tick:]))
    drain = graph.add("shutdown", "shutdown.drain", "finish what is still being written", after=endings)
    graph.add("shutdown", "shutdown.leave", "wait for the others and leave together", after=(drain,))
    nodes, edges = tuple(graph.nodes), tuple(graph.edges)
    return Graph(nodes=nodes, edges=edges, timeline=timeline, proof=check_graph(nodes, edges, ROOT))


def add_bootstrap(graph: Builder, run: Resolved) -> None:
    launch, mesh = run.spec.launch, run.layout.mesh
    groups = f", in {plural(run.size('replicate'), 'replica group')}" if run.stack.groups else ""
    args: dict[str, Any] = {
        "seed": run.spec.experiment.seed,
        "device": device_kind(run.spec),
        "threads": None if isinstance(launch.threads, Auto) else launch.threads,
        "matmul": run.spec.precision.matmul,
        "axes": [[axis.name, axis.size] for axis in run.group_mesh.axes],
        "stop_deadline_seconds": launch.stop_deadline.value,
    }
    small = lazily = ""
    if run.small_products:
        args["small_products"] = True
        small = f"; products have at most {run.largest_product:,} multiply-adds, so fp32 ones are computed as `highest`"
    if mesh.world_size >= LAZY_FROM:
        args["lazily"] = True
        lazily = ", connected on the host as they first need each other"
    device = "cuda where there is one, else cpu" if args["device"] == "auto" else args["device"]
    does = f"{plural(mesh.world_size, 'rank')} on {plural(run.layout.nodes, 'node')}{groups}, {device}, "
    does += f"seed {args['seed']}{lazily}{small}"
    graph.add("setup", ROOT, does, args=args, axes=run.wide(*AXES))


# cuBLAS workspaces for deterministic results: eight of 4 MiB for every stream.
WORKSPACES: Final = ":4096:8"


def add_determinism(graph: Builder, run: Resolved) -> None:
    if not run.spec.precision.deterministic:
        return
    does = "let torch choose algorithms alone that give the same numbers each time, and fail where it has none"
    if device_kind(run.spec) != "cpu":
        does += f"; matrix products on CUDA with workspaces {WORKSPACES}"
    graph.add("setup", "setup.deterministic", does, args={"workspaces": WORKSPACES}, after=(ROOT,))


def add_watch(graph: Builder, run: Resolved) -> None:
    stuck = run.spec.fault_tolerance.stuck
    seconds = None if stuck is None else stuck.value
    does = "tell of every rank's progress about once a second"
    if seconds is not None:
        does += f"; where none is made for {seconds_text(seconds)}, name the ranks that the others wait for, and end"
    graph.add("setup", "setup.watch", does, args={"stuck_seconds": seconds}, axes=run.wide(*AXES), after=(ROOT,))


def _alerts(graph: Builder, run: Resolved, estimates: Estimates) -> str:
    args = alert_args(run.spec, estimates)
    return graph.add("setup", "setup.alerts", alert_text(run.spec, args), args=args, after=("setup.watch",))


def add_mesh(graph: Builder, run: Resolved) -> str:
    mesh = run.group_mesh
    args: dict[str, Any] = {
        "axes": [[axis.name, axis.size] for axis in mesh.axes],
        "expert_axes": [[axis.name, axis.size] for axis in mesh.expert_axes],
        "shard_axes": list(run.shard_axes),
    }
    wide = tuple(axis.name for axis in mesh.axes if axis.size > 1)
    experts = run.wide("ep_fsdp", "ep") if run.architecture.is_moe else ()
    does = f"groups of ranks along {run.product(wide)}" if wide else "one rank, no groups"
    if experts:
        does += f"; for experts {run.product(experts)}"
    return graph.add("setup", "setup.mesh", does, args=args, axes=wide, after=(ROOT,))


def _optimizer(graph: Builder, run: Resolved, model: str) -> str:
    chosen = run.spec.optimizer
    does = chosen.does(run.formats.params)
    return graph.add("setup", "setup.optimizer", does, args=dict(run.groups.main), after=((model, "model"),))


def _groups(graph: Builder, run: Resolved, last: str) -> str:
    """Add the nodes of parameter groups and tasks; return the id of the last one."""
    texts = [group_text(run, group) for group in run.spec.groups.values()]
    texts += [task_text(run, task) for task in run.spec.tasks]
    for does, args in zip(texts, run.groups.groups, strict=True):
        name = name_of(args).replace(" ", ".")
        last = graph.add("setup", OP, does, id=f"{OP}.{name}", args=dict(args), after=((last, "optimizer"),))
    return last


def _scheduler(graph: Builder, run: Resolved, optimizer: str, loader: str) -> str:
    """Add the schedule after the loader, which knows the number of steps if the budget depends on the data."""
    args = scheduler_args(run.spec, run.batch)
    does = f"{args['kind']}, peak {args['lr']:g}"
    if "user" in args:
        does += f", times what {args['kind']} of {args['user']['module']} gives for each step"
    elif "warmup" in args:
        does += f", warm-up {_length_text(args['warmup'])}"
    if "floor" in args:
        does += f", down to {args['floor']:.0%} of the peak"
    after = ((optimizer, "optimizer"), (loader, "steps"))
    return graph.add("setup", "setup.scheduler", does, args=args, after=after)


def _resume(
    graph: Builder,
    run: Resolved,
    estimates: Estimates,
    loader: str,
    optimizer: str,
    scheduler: str,
    averages: list[tuple[str, str]],
    alerts: str,
) -> str:
    """Add the last node of the setup, which restores everything that has state."""
    given = run.spec.cluster.flops
    args = {"peak_flops": None if isinstance(given, Auto) else given}
    does = "count steps, seconds and tokens from here on; say how long the run will take once 3 s of steps are measured"
    observe = graph.add("setup", "setup.observe", does, args=args, after=(ROOT,))
    several = run.spec.rollout is not None and run.spec.rollout.steps > 1
    before: list[str | tuple[str, str]] = [
        (loader, "loader"),
        *([(COMPLETIONS, "completions")] if several else []),
        (optimizer, "optimizer"),
        (scheduler, "scheduler"),
        *averages,
        observe,
        alerts,
    ]
    if run.size("pp") > 1:
        counts = [*run.batch.microbatches]
        numbers = f"each of {len(counts)} numbers of microbatches, {counts[0]} to {counts[-1]}"
        numbers = numbers if len(counts) > 1 else plural(counts[0], "microbatch")
        does = f"lay out the schedule for {numbers} and let stages agree on shapes"
        after = (("setup.parallel.pp", "pipeline"), (loader, "loader"))
        before.append(
            graph.add("setup", "setup.schedule_cache", does, args={"counts": counts}, axes=("pp",), after=after)
        )
    return add_resume(graph, run, estimates, tuple(before))


def _horizon(graph: Builder, spec: Spec, last: str) -> str:
    if not waits_for_data(spec):
        return last
    does = "with the data counted, work out what was given in epochs or shares of them, and check what waited for that"
    return graph.add("setup", "setup.horizon", does, after=(last,))


def _length_text(length: dict[str, Any]) -> str:
    if "epochs" in length:
        return amount_in_epochs(length["epochs"])
    if "steps" not in length and "tokens" in length:
        return plural(length["tokens"], "token")
    return plural(length["steps"], "step") if "steps" in length else f"{length['fraction']:.0%} of the budget"


# commands of a live run ----------------------------------------------------------------------------------------------


def build_commands(spec: Spec, training: tuple[str, ...], nodes: ActionNodes) -> tuple[Command, ...]:
    """Return all commands that this run accepts, each with the nodes that execute it between two steps.

    training: the training datasets. Actions define their commands.
    """
    declared = [action for trigger in (*spec.ticks, *spec.events) for action in trigger.actions]
    groups = spec.parallel.execution.groups
    commands: list[Command] = []
    saves: tuple[str, ...] = ()
    for kind in ACTIONS.values():
        if groups and kind.writes_beside:
            continue
        for name, action, counts in planned_class(kind, PlannedAction).commands(declared, spec, training):
            commands.append(Command(name=name, nodes=(nodes.add(action, CONTROL),), counts=counts))
            saves += commands[-1].nodes if action.saves else ()
    if groups:  # a rank that waits between two steps would take part in no quorum
        return Command(name="stop", nodes=saves, stop=True), *commands
    pause = nodes.add_own("pause", CONTROL, "wait between two steps until the run is to go on or to stop")
    stop = Command(name="stop", nodes=saves, stop=True)
    return stop, *commands, Command(name="pause", nodes=(pause,)), Command(name="resume", nodes=())


def task_text(run: "Resolved", task: str) -> str:
    """Return text on the parameters of a task and their optimizer."""
    own = optimizer_of(run.spec, task)
    meant = [each for each in run.inventory.tensors if each.task == task]
    size, reads = count_text(sum(each.size for each in meant)), ", ".join(run.spec.tasks[task].reads)
    does = f"{own.does(run.formats.params)}, peak {own.lr:g}"
    return f"{plural(len(meant), 'tensor')}, {size} parameters, on {reads}: {does}"


def group_text(run: "Resolved", group: ParameterGroup) -> str:
    """Return text on the parameters of a group and the settings that it changes."""
    meant = [each for each in run.inventory.tensors if each.trained and covers(group.name, each.name)]
    size, own = count_text(sum(each.size for each in meant)), group.optimizer
    parts = [] if own is None else [own.does(run.formats.params), f"peak {own.lr:g}"]
    if group.lr_scale != 1.0:
        parts.append(f"learning rate × {group.lr_scale:g}")
    if group.weight_decay is not None:
        vectors = sum(len(each.shape) == 1 for each in meant)
        also = f", of which {plural(vectors, 'vector')}," if 0 < vectors < len(meant) else ""
        parts.append(f"all{also} decay by {group.weight_decay:g}" if group.weight_decay else "nothing decays")
    return f"{plural(len(meant), 'tensor')}, {size} parameters: {'; '.join(parts)}"
