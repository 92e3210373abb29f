"""Steps that a model was trained with: the starts of its run, and of the runs whose checkpoints it began with."""

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from attrs import evolve, frozen

from xtrain.plan.graph import groups_node
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import PlanError, load_plan
from xtrain.records.events import events_since
from xtrain.records.lines import objects_since, read_all
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.training_events import ResumedEvent, RollbackEvent, RunStartEvent
from xtrain.runtime.base.errors import DataError, EnvironmentFault
from xtrain.runtime.feed.prepared import PreparedDataset
from xtrain.runtime.feed.sightings import Stretch
from xtrain.runtime.observe.provenance import plan_in
from xtrain.runtime.store.beginning import find
from xtrain.runtime.store.checkpoints import CheckpointFolder

Prepare = Callable[[Plan], dict[str, PreparedDataset]]
"""Returns the training datasets of a plan."""


@frozen(kw_only=True)
class _Start:
    """Start of a run, or a rollback within it (with the step that it came from)."""

    plan_id: str
    step: int
    came_from: int | None = None


@frozen(kw_only=True, eq=False)
class TrainedSteps:
    """Run whose steps a model was trained with. stretches: in the order of steps."""

    directory: Path
    stretches: tuple[Stretch, ...]

    @property
    def end(self) -> int:
        """Number of steps."""
        return self.stretches[-1].end if self.stretches else 0


def trained(directory: Path, prepare: Prepare, until: int | None = None) -> list[TrainedSteps]:
    """Return the runs that a model was trained in, the first one first; the last one is the run in `directory`.

    until: step of the model; None: the run's last one. A run that began with `checkpoint.from` counts the steps of that
    checkpoint; runs whose weights it began with come before it. Raises DataError if the rows cannot be computed,
    EnvironmentFault if a run is missing, PlanError for an unreadable plan.
    """
    plans = dict(_plans(directory))
    opened: dict[str, Stretch] = {}

    def begun(plan_id: str) -> Stretch:
        if plan_id not in plans:
            message = f"the plan {plan_id} of an earlier start of {directory} is not in its metadata/attempts"
            raise EnvironmentFault("X708", f"{message}: which rows that start trained on cannot be said")
        if plan_id not in opened:
            _check(plans[plan_id])
            opened[plan_id] = Stretch.begin(plans[plan_id], prepare(plans[plan_id]))
        return opened[plan_id]

    lineage: list[Stretch] = []
    for start in _starts(directory):
        before = lineage[-1] if lineage else None
        lineage = [stretch for stretch in lineage if stretch.first <= start.step]
        if start.came_from is not None and before is not None:
            lineage.append(begun(start.plan_id).resumed(before, start.step, start.came_from))
        elif start.step == 0:
            lineage = [begun(start.plan_id)]
        else:
            earlier = lineage or _origin(plans[start.plan_id], directory, prepare, start.step)
            lineage = [*earlier, begun(start.plan_id).resumed(earlier[-1], start.step, start.step)]
    end = last_step(directory) if until is None else until
    ends = [*(stretch.first for stretch in lineage[1:]), end]
    stretches = [evolve(stretch, end=min(own, end)) for stretch, own in zip(lineage, ends, strict=True)]
    _verify(directory, stretches)
    own = TrainedSteps(directory=directory, stretches=tuple(each for each in stretches if each.first < each.end))
    return [*_weights(lineage[0].plan, prepare), own] if lineage else [own]


def last_step(directory: Path) -> int:
    """Return the last step that a run has recorded or saved."""
    latest = CheckpointFolder(directory / "checkpoints").latest()
    logged = read_all(StepMetrics, objects_since(directory / METRICS_FILE))
    return max([latest.step if latest else 0, *(metrics.step or 0 for metrics in logged)])


def changed_within(directory: Path, begin: int, end: int) -> list[int]:
    """Return the steps after `begin` and before `end` at which a run was resumed with another plan, or rolled back."""
    starts = [*_starts(directory)]
    return [
        start.step
        for before, start in pairwise(starts)
        if begin < start.step < end and (start.came_from is not None or start.plan_id != before.plan_id)
    ]


def _plans(directory: Path) -> Iterator[tuple[str, Plan]]:
    for path in (*directory.glob("metadata/attempts/*/plan.json"), directory / "plan.json"):
        try:
            plan = load_plan(path)
        except PlanError:
            if path.parent == directory:
                raise
            continue
        yield plan.id, plan


def _starts(directory: Path) -> Iterator[_Start]:
    """Yield the starts and rollbacks of a run; without records, one start."""
    starts: list[_Start] = []
    for event in events_since(directory / EVENTS_FILE, 0):
        if isinstance(event, RunStartEvent):
            starts.append(_Start(plan_id=event.plan_id, step=event.resumed_step or 0))
        elif isinstance(event, ResumedEvent) and starts and event.step is not None:
            starts[-1] = evolve(starts[-1], step=event.step)
        elif isinstance(event, RollbackEvent) and starts and event.step is not None:
            starts.append(_Start(plan_id=starts[-1].plan_id, step=event.step, came_from=event.from_step))
    yield from starts or [_Start(plan_id=plan_in(directory).id, step=0)]


def _check(plan: Plan) -> None:
    if groups_node(plan) is not None:
        message = "the rows of a run with replica groups depend on the groups that took part in each step"
        raise DataError(message, remedy="They cannot be computed from the plan.")
    if any(node.op == "rollout.replace" for node in plan.nodes):
        message = "the run replaced groups of prompts by others (`rollout.attempts`), which depended on their rewards"
        raise DataError(message, remedy="The prompts that it trained on cannot be computed from the plan.")
    if any(node.op == "rollout.remember" for node in plan.nodes):
        message = "the run drew prompts by their success (`rollout.replay_prompts`), which depended on their rewards"
        raise DataError(message, remedy="The prompts that it trained on cannot be computed from the plan.")
    if all(node.op != "setup.loader" for node in plan.nodes):
        raise DataError("this run reads no dataset: its clients choose the data")


def _origin(plan: Plan, directory: Path, prepare: Prepare, step: int) -> list[Stretch]:
    """Return the stretches of the run whose checkpoint a run began with, up to `step`."""
    named = plan.node("setup.resume").args["origin"]
    if named is None:
        raise DataError(
            f"the records of {directory} begin with step {step:,}: they lack what was trained before",
            remedy="Restore its events.jsonl.",
        )
    return [*trained(find(Path(named)).path.parents[1], prepare, step)[-1].stretches]


def _weights(plan: Plan, prepare: Prepare) -> list[TrainedSteps]:
    """Return the runs whose weights a run began with."""
    found: list[TrainedSteps] = []
    for node in plan.nodes:
        if node.op == "setup.pretrained":
            entry = find(Path(node.args["path"]), weights=True)
            found += trained(entry.path.parents[1], prepare, entry.step)
    return found


def _verify(directory: Path, stretches: list[Stretch]) -> None:
    """Compare the computed position with the position in the latest checkpoint. Raises DataError if they differ."""
    entry = CheckpointFolder(directory / "checkpoints").latest()
    state = {} if entry is None else entry.state()
    for stretch in stretches:
        if entry is not None and stretch.first < entry.step <= stretch.end and state.get("plan_id") == stretch.plan.id:
            stretch.check(state["loader"])
