"""Actions of `every` and `on` → nodes; the same action with the same arguments is one node, however often named."""

from typing import Any, Final

from ...dsl.schema.actions import (
    Action,
    CheckpointAction,
    EvalAction,
    GenerateAction,
    HealthAction,
    LogAction,
    MemorySnapshotAction,
    NotifyAction,
    ProfileAction,
    RequeueAction,
    RollbackAction,
)
from ...dsl.schema.setting import Auto
from ..model.inventory import weight_bytes
from ..plan import NodeKind
from ..resolved import Resolved
from ..schedule.stops import ENDINGS
from ..units import bytes_text, plural, seconds_text
from .averaging import evaluates_averages
from .builder import Builder
from .profiling import profile_args, profile_text, scheduled, snapshot_args, snapshot_text

# The event that the nodes of `xtrain control` are of.
CONTROL: Final = "control"
BEFORE_THE_END: Final = ", before the run ends"
# Seconds that a command of `notify` may take.
NOTIFY_SECONDS: Final = 30.0


class ActionNodes:
    """Adds a node at the first mention of an action, and gives its id again at each further one."""

    def __init__(self, graph: Builder, run: Resolved, after: str) -> None:
        self._graph = graph
        self._run = run
        self._after = after
        self._known: dict[str, dict[str, Any]] = {}

    def add(self, action: Action, event: str = "", *, last: bool = False) -> str:
        """The id of the node of an action (any but stop): `tick.eval.web`, or on an event `event.finish.eval.web`.

        last: the run stops behind it.
        """
        ends = last or event in ENDINGS
        op, args, does = describe(action, self._run, last=ends or event == CONTROL, ends=ends)
        if isinstance(action, CheckpointAction) and event == CONTROL:
            does = does.replace(BEFORE_THE_END, ", as soon as it is asked for")
        name = f"{op}.{action.dataset}" if isinstance(action, EvalAction) else op
        if event:
            name = f"event.{event}.{name.partition('.')[2]}"
        base, number = name, 1
        while name in self._known and self._known[name] != args:
            number += 1
            name = f"{base}.{number}"
        if name not in self._known:
            self._known[name] = args
            kind: NodeKind = "event" if event else "tick"
            after: list[str | tuple[str, str]] = [self._after]
            if isinstance(action, EvalAction):
                after.append((f"setup.data.{action.dataset}", "held-out rows"))
            self._graph.add(kind, op, does, id=name, args=args, after=tuple(after))
        return name

    def add_own(self, name: str, event: str, does: str, args: dict[str, Any] | None = None) -> str:
        """A node that no action of the language stands for."""
        id = f"event.{event}.{name}"
        return self._graph.add("event", f"event.{name}", does, id=id, args=args, after=(self._after,))

    def add_profile(self, action: ProfileAction, event: str) -> str:
        """The node of a profile whose number of steps is asked for when it begins."""
        args = {"warmup": action.warmup, **profile_args(action, self._run)}
        behind = f", behind {action.warmup} to warm up," if action.warmup else ""
        steps = f"as many of the next steps as are asked for{behind}"
        return self.add_own("profile", event, profile_text(action, self._run, steps), args)

    def add_model(self, event: str) -> str:
        """The node that saves weights alone."""
        run, ema = self._run, self._run.spec.ema
        averaged = ema is not None and ema.publish
        size = weight_bytes(run.inventory, run.formats.averages if averaged else run.formats.params)
        does = f"save the {'averaged ' if averaged else ''}weights alone, for publishing: {bytes_text(size)}"
        return self._graph.add("event", "tick.model", does, id=f"event.{event}.model", after=(self._after,))


def describe(action: Action, run: Resolved, *, last: bool = False, ends: bool) -> tuple[str, dict[str, Any], str]:
    """(op, arguments, what it does) of any action but stop. ends: the run has no step behind it."""
    averaged, of = ({"averaged": True}, ", of the averaged weights") if evaluates_averages(run) else ({}, "")
    match action:
        case LogAction():
            return "tick.log", {}, "one record to metrics.jsonl: loss, gradient norm, learning rate, speed"
        case CheckpointAction():
            averages = "" if run.averages is None else " their average,"
            does = f"save weights,{averages} {_optimizer_state(run)} and the place in the data: "
            does += bytes_text(run.checkpoint_bytes)
            return "tick.checkpoint", {"must": last}, f"{does}{BEFORE_THE_END}" if last else does
        case HealthAction(limit=limit):
            does = f"a sum over all ranks, timed; a rank that has not come within {seconds_text(limit.value)} is named"
            return "tick.health", {"limit_seconds": limit.value}, does
        case ProfileAction():
            schedule = {"wait": action.wait, "warmup": action.warmup, "active": action.active}
            return "tick.profile", schedule | profile_args(action, run), profile_text(action, run, scheduled(action))
        case MemorySnapshotAction():
            args = snapshot_args(action, run, ends=ends)
            return "tick.memory_snapshot", args, snapshot_text(action, run, ends=ends)
        case RollbackAction(times=times):
            often = f"{plural(times, 'time')} at most"
            does = f"back to the last good checkpoint and on with the data behind the failure, {often}"
            return "event.rollback", {"times": times}, does
        case NotifyAction(command=command):
            shown = command if len(command) <= 40 else f"{command[:39]}…"
            does = f"run `{shown}` beside training, for {seconds_text(NOTIFY_SECONDS)} at most"
            return "tick.notify", {"command": command, "limit_seconds": NOTIFY_SECONDS}, " ".join(does.split())
        case RequeueAction():
            return "event.requeue", {}, "ask Slurm to start the job again; without Slurm a warning says so"
        case EvalAction(dataset=dataset):
            batches = eval_batches(action, run.batch.steps)
            # Counted in the rows of a step, not of a microbatch: every layout then evaluates the same rows.
            rows = None if batches is None else batches * run.batch.rows
            reach = "the whole hold-out" if rows is None else f"its first {plural(rows, 'row')}"
            does = f"loss on what {dataset} held out: {reach}"
            args: dict[str, Any] = {"dataset": dataset, "rows": rows}
            return "tick.eval", args | averaged, does + of
        case GenerateAction():
            args = {
                "prompts": list(action.prompts),
                "tokens": action.tokens,
                "temperature": action.temperature,
                "top_p": action.top_p,
                "seed": run.spec.experiment.seed,
            }
            does = f"continue {plural(len(action.prompts), 'prompt')} by {action.tokens} tokens"
            return "tick.generate", args | averaged, does + of
    raise AssertionError(action)


def eval_batches(action: EvalAction, steps: int | None) -> int | None:
    """`auto` is a twentieth of the steps, at least 1; the whole hold-out (None) while the steps are not known."""
    if not isinstance(action.batches, Auto):
        return action.batches
    return None if steps is None else max(steps // 20, 1)


def _optimizer_state(run: Resolved) -> str:
    """What a checkpoint holds of the optimizer, in words."""
    return {0: "no state of the optimizer", 1: "the moment", 2: "both moments"}.get(
        run.moments, f"{run.moments} moments"
    )
