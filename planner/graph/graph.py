"""Graph of a plan: set-up nodes, commands and shutdown."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from attrs import evolve

from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.stacks import stack_of
from xtrain.dsl.evaluation.values import quantity_text
from xtrain.dsl.schema.actions import commanded
from xtrain.dsl.schema.component import planned_class
from xtrain.dsl.schema.optimizers import OPTIMIZERS, ParameterGroup
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import ParameterSpec
from xtrain.plan.estimates import Estimates
from xtrain.plan.graph import (
    CONTROL,
    LEARNS,
    ORDER,
    Builder,
    Rules,
    add_trackers,
    check_graph,
    component_rules,
    learns,
    resumes,
    rounds,
)
from xtrain.plan.groups import OP, name_of, optimizer_of
from xtrain.plan.learning_rate import scheduler_args
from xtrain.plan.mesh import AXES, LAZY_FROM, device_kind
from xtrain.plan.parameters import Patterns
from xtrain.plan.plan import Command, Edge, Node, Timeline
from xtrain.plan.resolved import Resolved
from xtrain.plan.timeline import waits_for_data
from xtrain.planner.graph.data import add_data
from xtrain.planner.graph.model import add_model
from xtrain.planner.graph.rollouts import COMPLETIONS, PROMPT_RATES
from xtrain.planner.graph.saving import add_average, add_resume, on_nan
from xtrain.planner.graph.step import add_hooks, add_step
from xtrain.planner.graph.timeline import ActionNodes, Schedule, alert_args, alert_text, build_timeline
from xtrain.text.units import amount_in_epochs, count_text, plural

ROOT = "setup.bootstrap"
# Settings of torch's CUDA allocator: a segment grows by mapping further pages, so freed memory serves tensors of any
# size. Without it fragmentation decides whether a run fits that fills a device.
ALLOCATOR: Final = "expandable_segments:True"
# Steps between collections of garbage. Collections that start by themselves would stop one rank after the other, and
# all others wait for it; torchtitan has the same interval.
COLLECT_STEPS: Final = 50
# Environment of NCCL: its kernels start before waiting kernels of the computation, which would otherwise delay them.
NCCL: Final = {"TORCH_NCCL_HIGH_PRIORITY": "1"}


@frozen
class Graph:
    """Nodes and edges, the timeline that names its ticks by node, and the proof that everything can be executed."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    proof: str


def build_graph(resolved: Resolved, schedule: Schedule, estimates: Estimates) -> Graph:
    """Build the graph of a plan; disabled features have no node. Raises GraphError for a bug of the planner."""
    graph = Builder()
    add_bootstrap(graph, resolved)
    add_determinism(graph, resolved)
    add_invariance(graph, resolved)
    add_watch(graph, resolved)
    model = add_model(graph, resolved, add_mesh(graph, resolved))
    optimizer = stack_of(resolved.spec).wrap_optimizer(
        graph, resolved, _parametrize(graph, resolved, _groups(graph, resolved, _optimizer(graph, resolved, model)))
    )
    averages = add_average(graph, resolved, model)
    loader = add_data(graph, resolved, estimates, model)
    scheduler = _scheduler(graph, resolved, optimizer, loader)
    resume = _resume(
        graph, resolved, estimates, loader, optimizer, scheduler, averages, _alerts(graph, resolved, estimates)
    )
    last = add_trackers(graph, resolved.spec, _horizon(graph, resolved.spec, resume))
    last = add_step(graph, resolved, last, estimates, schedule)
    first_tick = len(graph.nodes)
    publishes = resolved.spec.checkpoint.enabled and resolved.spec.checkpoint.model
    actions = ActionNodes(graph, resolved, last)
    timeline = build_timeline(
        schedule,
        resolved.batch,
        resolved.phases,
        actions,
        resolved.spec.launch,
        bad_steps=on_nan(resolved.spec).limit,
        publishes=publishes,
    )
    timeline = evolve(timeline, commands=build_commands(resolved.spec, resolved.training, actions))
    add_hooks(graph, resolved.spec, last)
    endings = (last, *(node.id for node in graph.nodes[first_tick:]))
    drain = graph.add("shutdown", "shutdown.drain", "finish pending writes", after=endings)
    graph.add("shutdown", "shutdown.leave", "wait for all ranks, then exit together", after=(drain,))
    nodes, edges = tuple(graph.nodes), tuple(graph.edges)
    return Graph(nodes=nodes, edges=edges, timeline=timeline, proof=check_graph(nodes, edges, ROOT))


@resumes(
    "setup.bootstrap",
    "seed axes lazily",
    harmless="stop_deadline_seconds=launch.stop_deadline cuda=launch.device",
    device=rounds("launch.device", "another kind of device computes"),
    threads=rounds("launch.threads", ORDER),
    **dict.fromkeys(("matmul", "small_products"), rounds("precision.matmul", "fp32 products are computed differently")),
)
def add_bootstrap(graph: Builder, resolved: Resolved) -> None:
    launch, mesh = resolved.spec.launch, resolved.layout.mesh
    groups = f", in {plural(resolved.size('replicate'), 'replica group')}" if resolved.stack.groups else ""
    args: dict[str, Any] = {
        "seed": resolved.spec.experiment.seed,
        "device": device_kind(resolved.spec),
        "threads": None if isinstance(launch.threads, Auto) else launch.threads,
        "matmul": resolved.spec.precision.matmul,
        "axes": [[axis.name, axis.size] for axis in resolved.group_mesh.axes],
        "stop_deadline_seconds": launch.stop_deadline.value,
    }
    small = lazily = ""
    if resolved.small_products:
        args["small_products"] = True
        small = f"; products have at most {resolved.largest_product:,} multiply-adds in blocks and "
        small += f"{resolved.head_product:,} in the head, so fp32 ones are computed as `highest`"
    if mesh.world_size >= LAZY_FROM:
        args["lazily"] = True
        lazily = ", connected over the host on first use"
    device = "cuda if available, else cpu" if args["device"] == "auto" else args["device"]
    does = f"{plural(mesh.world_size, 'rank')} on {plural(resolved.layout.nodes, 'node')}{groups}, {device}, "
    does += f"seed {args['seed']}{lazily}{small}"
    if args["device"] != "cpu":
        args["cuda"] = {"allocator": ALLOCATOR, "collect_steps": COLLECT_STEPS}
        does += f"; on cuda memory segments grow, and Python's garbage is collected every {COLLECT_STEPS} steps"
        if mesh.world_size > 1:
            args["cuda"]["nccl"] = NCCL
            does += ", and collectives have priority over computation"
    graph.add("setup", ROOT, does, args=args, axes=resolved.wide(*AXES))


# cuBLAS workspaces for deterministic results: eight of 4 MiB for every stream.
WORKSPACES: Final = ":4096:8"


@resumes(
    "setup.deterministic", switch=True, workspaces=rounds("precision.deterministic", "other algorithms may compute")
)
def add_determinism(graph: Builder, resolved: Resolved) -> None:
    if not resolved.spec.precision.deterministic:
        return
    does = "use deterministic algorithms of torch only; fail where there are none"
    if device_kind(resolved.spec) != "cpu":
        does += f"; matrix products on CUDA use workspaces {WORKSPACES}"
    graph.add("setup", "setup.deterministic", does, args={"workspaces": WORKSPACES}, after=(ROOT,))


# Rows of a product, and queries and keys of attention, that are computed at once.
TILES: Final = {"rows": 32, "queries": 16, "keys": 64}
_TILED: Final = rounds("precision.batch_invariant", "tokens are computed by other kernels from here on")


@resumes("setup.batch_invariant", switch=True, rows=_TILED, queries=_TILED, keys=_TILED)
def add_invariance(graph: Builder, resolved: Resolved) -> None:
    if not resolved.spec.precision.batch_invariant:
        return
    does = "compute each token independently of its batch: products of {rows} rows at a time, attention of {queries} "
    does += "queries and {keys} keys at a time, in a single thread; a step takes more than twice as long"
    graph.add("setup", "setup.batch_invariant", does.format(**TILES), args=TILES, after=(ROOT,))


@resumes("setup.watch", harmless="stuck_seconds=fault_tolerance.stuck")
def add_watch(graph: Builder, resolved: Resolved) -> None:
    stuck = resolved.spec.fault_tolerance.stuck
    seconds = None if stuck is None else stuck.value
    does = "heartbeat every second"
    if stuck is not None:
        does += f"; after {quantity_text(stuck)} without progress, name the stuck ranks and stop"
    graph.add("setup", "setup.watch", does, args={"stuck_seconds": seconds}, axes=resolved.wide(*AXES), after=(ROOT,))


@resumes(
    "setup.alerts",
    harmless="alerts.loss_spike alerts.slow alerts.starvation alerts.memory window=alerts.loss_spike "
    "alerts.loss_above loss_steps=alerts.loss_patience "
    "disk_share=alerts.disk disk_most_bytes=alerts.disk disk_bytes=alerts.disk checkpoint_bytes=alerts.disk "
    "stalled_seconds=alerts.stalled",
)
def _alerts(graph: Builder, resolved: Resolved, estimates: Estimates) -> str:
    args = alert_args(resolved.spec, estimates)
    return graph.add("setup", "setup.alerts", alert_text(resolved.spec, args), args=args, after=("setup.watch",))


@resumes("setup.mesh", "axes expert_axes shard_axes")
def add_mesh(graph: Builder, resolved: Resolved) -> str:
    mesh = resolved.group_mesh
    args: dict[str, Any] = {
        "axes": [[axis.name, axis.size] for axis in mesh.axes],
        "expert_axes": [[axis.name, axis.size] for axis in mesh.expert_axes],
        "shard_axes": list(resolved.shard_axes),
    }
    wide = tuple(axis.name for axis in mesh.axes if axis.size > 1)
    experts = resolved.wide("ep_fsdp", "ep") if resolved.architecture.is_moe else ()
    does = f"groups of ranks along {resolved.product(wide)}" if wide else "one rank, no groups"
    if experts:
        does += f"; for experts {resolved.product(experts)}"
    return graph.add("setup", "setup.mesh", does, args=args, axes=wide, after=(ROOT,))


def _optimizer_rules(args: Mapping[str, Any]) -> Rules:
    learned = component_rules(OPTIMIZERS, args, LEARNS)
    rounding = {"symmetric": rounds("launch.device", "updates are rounded differently")}
    return {**learned, **rounding, **dict.fromkeys(("kind", "lr", "state", "scalars", "compiled"))}


def _group_rules(args: Mapping[str, Any]) -> Rules:
    path = f"group.{args['pattern']}" if "pattern" in args else f"task.{args['task']}"
    own = {"lr_scale": "lr_scale", "weight_decay": "weight_decay", "own": "optimizer"}
    learned = {name: learns(f"{path}.{setting}", LEARNS) for name, setting in own.items()}
    return {"pattern": None, "task": None, **learned}


@resumes("setup.stack_optimizer")
@resumes("setup.optimizer", by=_optimizer_rules)
def _optimizer(graph: Builder, resolved: Resolved, model: str) -> str:
    chosen = resolved.spec.optimizer
    does = chosen.does(resolved.formats.params)
    if "compiled" in resolved.groups.main:
        does += "; on cuda the update of each tensor is compiled"
    return graph.add("setup", "setup.optimizer", does, args=dict(resolved.groups.main), after=((model, "model"),))


@resumes("setup.parametrization", switch=True, roles=learns("parametrization.base_width", LEARNS))
def _parametrize(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the node of rates that follow from the size of the model."""
    chosen = resolved.spec.parametrization
    if chosen is None:
        return last
    from xtrain.plan.parametrization import ratios, scales_of

    wider, deeper = ratios(chosen, resolved.architecture)
    scales = scales_of(chosen, resolved.architecture)
    does = f"{chosen.kind} of width {wider:.4g} times"
    does += f" and depth {deeper:.4g} times the base" if chosen.base_depth is not None else " the base"
    factors = "; ".join(f"{role}: {each.text}" for role, each in scales.items() if each.args)
    does += f": {factors or 'all factors are 1'}"
    args = {"roles": {role: each.args for role, each in scales.items() if each.args}}
    return graph.add("setup", "setup.parametrization", does, args=args, after=((last, "optimizer"),))


@resumes(OP, switch=True, by=_group_rules)
def _groups(graph: Builder, resolved: Resolved, last: str) -> str:
    """Add the nodes of parameter groups and tasks; return the id of the last one."""
    tensors = {each.name: each for each in resolved.inventory.tensors if each.trained}
    matches = Patterns(resolved.spec.groups).matches(tensors)
    texts = [
        group_text(resolved, group, [tensors[each] for each in matches[name]])
        for name, group in resolved.spec.groups.items()
    ]
    texts += [task_text(resolved, task) for task in resolved.spec.tasks]
    for does, args in zip(texts, resolved.groups.groups, strict=True):
        name = name_of(args).replace(" ", ".")
        last = graph.add("setup", OP, does, id=f"{OP}.{name}", args=dict(args), after=((last, "optimizer"),))
    return last


@resumes("setup.scheduler", by=dict.fromkeys)  # the curve is compared as a whole
def _scheduler(graph: Builder, resolved: Resolved, optimizer: str, loader: str) -> str:
    """Add the schedule after the loader, which knows the number of steps if the budget depends on the data."""
    args = scheduler_args(resolved.spec, resolved.batch)
    does = f"{args['kind']}, peak {args['lr']:g}"
    if "user" in args:
        does += f", times {args['kind']} of {args['user']['module']} for each step"
    elif "warmup" in args:
        does += f", warm-up {_length_text(args['warmup'])}"
    if "floor" in args:
        does += f", down to {args['floor']:.0%} of the peak"
    after = ((optimizer, "optimizer"), (loader, "steps"))
    return graph.add("setup", "setup.scheduler", does, args=args, after=after)


@resumes("setup.observe", harmless="peak_flops=cluster.flops")
@resumes("setup.schedule_cache", "counts")
def _resume(
    graph: Builder,
    resolved: Resolved,
    estimates: Estimates,
    loader: str,
    optimizer: str,
    scheduler: str,
    averages: list[tuple[str, str]],
    alerts: str,
) -> str:
    """Add the last node of the setup, which restores everything that has state."""
    given = resolved.spec.cluster.flops
    args = {"peak_flops": None if isinstance(given, Auto) else given}
    does = "count steps, seconds and tokens; estimate the run's duration after 3 s of steps"
    observe = graph.add("setup", "setup.observe", does, args=args, after=(ROOT,))
    rollout = resolved.spec.rollout
    several = rollout is not None and rollout.steps > 1
    before: list[str | tuple[str, str]] = [
        (loader, "loader"),
        *([(COMPLETIONS, "completions")] if several else []),
        *([(PROMPT_RATES, "success rates")] if rollout is not None and rollout.replay_prompts else []),
        (optimizer, "optimizer"),
        (scheduler, "scheduler"),
        *averages,
        observe,
        alerts,
    ]
    if resolved.size("pp") > 1:
        counts = [*resolved.batch.microbatches]
        numbers = f"{len(counts)} numbers of microbatches, {counts[0]} to {counts[-1]}"
        numbers = numbers if len(counts) > 1 else plural(counts[0], "microbatch")
        does = f"build the pipeline schedule for {numbers}; stages agree on shapes"
        after = (("setup.parallel.pp", "pipeline"), (loader, "loader"))
        before.append(
            graph.add("setup", "setup.schedule_cache", does, args={"counts": counts}, axes=("pp",), after=after)
        )
    return add_resume(graph, resolved, estimates, tuple(before))


@resumes("setup.horizon")
def _horizon(graph: Builder, spec: Spec, last: str) -> str:
    if not waits_for_data(spec):
        return last
    does = "resolve amounts in epochs now that the data is counted, and run the checks that depend on them"
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
    declared = [action for _, action in spec.actions]
    groups = spec.parallel.execution.groups
    commands: list[Command] = []
    saves: tuple[str, ...] = ()
    for kind in commanded():
        if groups and kind.writes_beside:
            continue
        for name, action, counts in planned_class(kind, PlannedAction).commands(declared, spec, training):
            commands.append(Command(name=name, nodes=(nodes.add(action, CONTROL),), counts=counts))
            saves += commands[-1].nodes if action.saves else ()
    if groups:  # a rank that waits between two steps would take part in no quorum
        return Command(name="stop", nodes=saves, stop=True), *commands
    pause = nodes.add_own("pause", CONTROL, "wait between two steps until the run is resumed or stopped")
    stop = Command(name="stop", nodes=saves, stop=True)
    return stop, *commands, Command(name="pause", nodes=(pause,)), Command(name="resume", nodes=())


def task_text(resolved: "Resolved", task: str) -> str:
    """Return text on the parameters of a task and their optimizer."""
    own = optimizer_of(resolved.spec, task)
    meant = [each for each in resolved.inventory.tensors if each.task == task]
    size, reads = count_text(sum(each.size for each in meant)), ", ".join(resolved.spec.tasks[task].reads)
    does = f"{own.does(resolved.formats.params)}, peak {own.lr:g}"
    return f"{plural(len(meant), 'tensor')}, {size} parameters, on {reads}: {does}"


def group_text(resolved: "Resolved", group: ParameterGroup, meant: Sequence[ParameterSpec]) -> str:
    """Return text on the trained parameters of a group and the settings that it changes."""
    size, own = count_text(sum(each.size for each in meant)), group.optimizer
    parts = [] if own is None else [own.does(resolved.formats.params), f"peak {own.lr:g}"]
    if group.lr_scale != 1.0:
        parts.append(f"learning rate × {group.lr_scale:g}")
    if group.weight_decay is not None:
        vectors = sum(len(each.shape) == 1 for each in meant)
        also = f", including {plural(vectors, 'vector')}" if 0 < vectors < len(meant) else ""
        parts.append(f"weight decay {group.weight_decay:g} on all{also}" if group.weight_decay else "no weight decay")
    return f"{plural(len(meant), 'tensor')}, {size} parameters: {'; '.join(parts)}"
