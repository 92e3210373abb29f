"""The graph of a plan: what is set up, what a step does, what happens along the way, how it ends."""

from typing import Any, Final

from attrs import evolve, frozen

from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.setting import Auto
from xtrain.dsl.spec import Spec
from xtrain.planner.graph.action_node import CONTROL
from xtrain.planner.graph.actions import ActionNodes
from xtrain.planner.graph.alerts import alert_args, alert_text
from xtrain.planner.graph.averaging import add_average
from xtrain.planner.graph.builder import Builder, check_graph
from xtrain.planner.graph.data_nodes import add_data
from xtrain.planner.graph.hook_nodes import add_hooks
from xtrain.planner.graph.model_nodes import add_model
from xtrain.planner.graph.nonfinite import on_nan
from xtrain.planner.graph.rollout_nodes import COMPLETIONS
from xtrain.planner.graph.saving import add_resume
from xtrain.planner.graph.step_nodes import add_step
from xtrain.planner.graph.timeline import Schedule, build_timeline
from xtrain.planner.graph.trackers import add_trackers
from xtrain.planner.mesh.cluster import device_kind
from xtrain.planner.mesh.mesh import AXES, LAZY_FROM
from xtrain.planner.model.groups import OP, group_text, name_of, task_text
from xtrain.planner.plan import Command, Edge, Estimates, Node, Timeline
from xtrain.planner.resolved import Resolved
from xtrain.planner.schedule.horizon import waits_for_data
from xtrain.planner.schedule.learning_rate import scheduler_args
from xtrain.planner.units import amount_in_epochs, plural, seconds_text

ROOT = "setup.bootstrap"


@frozen
class Graph:
    """Nodes and edges, the timeline that names its ticks by node, and the proof that all of it can be executed."""

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    timeline: Timeline
    proof: str


def build_graph(run: Resolved, schedule: Schedule, estimates: Estimates) -> Graph:
    """Put the plan together; features that are off have no node. Raises GraphError for a mistake of the planner."""
    graph = Builder()
    add_bootstrap(graph, run)
    add_determinism(graph, run)
    add_watch(graph, run)
    model = add_model(graph, run, add_mesh(graph, run))
    optimizer = run.stack.wrap_optimizer(graph, run, _groups(graph, run, _optimizer(graph, run, model)))
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


# What cuBLAS needs to compute the same each time: eight workspaces of 4 MiB for every stream.
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
    """What is different for some of the parameters."""
    texts = [group_text(run, group) for group in run.spec.groups.values()]
    texts += [task_text(run, task) for task in run.spec.tasks]
    for does, args in zip(texts, run.groups.groups, strict=True):
        name = name_of(args).replace(" ", ".")
        last = graph.add("setup", OP, does, id=f"{OP}.{name}", args=dict(args), after=((last, "optimizer"),))
    return last


def _scheduler(graph: Builder, run: Resolved, optimizer: str, loader: str) -> str:
    """It follows the loader, which knows how many steps the data gives where the budget does not."""
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
    """Where everything that has state meets: the last node of the setup."""
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
    """Everything that can be asked of this run, each with the nodes that carry it out between two steps.

    training: the datasets that are trained on. Actions say which commands there are of them.
    """
    declared = [action for trigger in (*spec.ticks, *spec.events) for action in trigger.actions]
    groups = spec.parallel.execution.groups
    commands: list[Command] = []
    saves: tuple[str, ...] = ()
    for kind in ACTIONS.values():
        if groups and kind.writes_beside:
            continue
        for name, action, counts in kind.commands(declared, spec, training):
            commands.append(Command(name=name, nodes=(nodes.add(action, CONTROL),), counts=counts))
            saves += commands[-1].nodes if action.saves else ()
    if groups:  # who waits between two steps takes part in no quorum
        return Command(name="stop", nodes=saves, stop=True), *commands
    pause = nodes.add_own("pause", CONTROL, "wait between two steps until the run is to go on or to stop")
    stop = Command(name="stop", nodes=saves, stop=True)
    return stop, *commands, Command(name="pause", nodes=(pause,)), Command(name="resume", nodes=())
