"""Replays: the plan that runs a window of a recorded run again from a checkpoint, and the comparison of both."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final, Literal, TypeVar

from attrs import evolve, frozen

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.actions import ACTIONS, OnEvent, Tick
from xtrain.dsl.values import Quantity
from xtrain.plan.canonical import DATA, digest
from xtrain.plan.serialise import signed
from xtrain.planner.compile import Compiled
from xtrain.planner.load import plan_from_loaded, plan_from_text
from xtrain.records.lines import object_of, read
from xtrain.records.metrics import StepMetrics
from xtrain.records.names import METRICS_FILE
from xtrain.regular_files import open_regular
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.observe.provenance import plan_in
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder

COMPARED: Final = ("loss", "objective", "grad_norm", "lr")
"""Recorded numbers of a step that depend on nothing but the state and the rows."""
_DIGITS: Final = 8
Logged = Literal["", "steps", "rows", "tensors"]
"""Additional records of a replay: none, of every step, also of every row, or also of every tensor."""


@frozen(kw_only=True)
class ReplayWindow:
    """Steps of a run to run again, counted from 1. entry: the checkpoint to begin with; None: the beginning of the
    run."""

    directory: Path
    first: int
    last: int
    entry: CheckpointEntry | None

    @property
    def begin(self) -> int:
        """Number of steps before the replay."""
        return 0 if self.entry is None else self.entry.step

    @classmethod
    def of(cls, directory: Path, first: int, last: int) -> "ReplayWindow":
        """Return the window with the last checkpoint before it.

        A run that began with a checkpoint of another run has no state before its own first checkpoint: then the replay
        begins as the run did. Raises EnvironmentFault if no state before the window is left.
        """
        folder = CheckpointFolder(directory / "checkpoints")
        entries = [entry for entry in folder.entries() if entry.step < first]
        entry = entries[-1] if entries else None
        if entry is None and plan_in(directory).node("setup.resume").args["origin"] is not None:
            logged = [line.step for line in recorded(directory) if line.step]
            if not logged or logged[0] > first:
                raise EnvironmentFault("X720", f"{directory} has no checkpoint before step {first:,}")
        return cls(directory=directory, first=first, last=last, entry=entry)

    def compiled(self, sets: Sequence[str], world: int | None, logs: Logged = "") -> Compiled:
        """Return the plan of the replay: the recorded spec with another start and end, and `sets`. Its name depends on
        all of these, so that the same call resumes the same replay. logs: what is recorded in addition."""
        plan = plan_in(self.directory)
        world = plan.mesh.world_size if world is None else world
        covers = [str(self.directory), plan.id, self.begin, self.last, sorted(sets), world, *([logs] if logs else [])]
        key = digest(covers, DATA, size=_DIGITS // 2)
        own = [
            _set("workspace.root", str(self.directory.parents[1])),
            _set("workspace.lineage", f"{self.directory.parent.name}-replays"),
            _set("workspace.run", f"{self.directory.name}-{key}"),
            "checkpoint.resume=true",
        ]
        if self.entry is not None:
            own.append(_set("checkpoint.from", str(self.entry.path)))
        if plan.timeline.steps is None or self.last < plan.timeline.steps:
            own.append(f"launch.stop_at={self.last} steps")
        if plan.timeline.stop_after is not None or plan.timeline.stop_after_amount is not None:
            own.append("launch.stop_after=none")
        if plan.launch.get("certificate") == "required":
            own.append("launch.certificate=none")
        given = [*sets, *own]
        name = f"{plan.spec} (as planned)"
        loaded = load_spec(name, given, {name: plan.spec_text})
        if (spec := loaded.spec) is not None:
            ticks, events = (*_within(spec.ticks), *_ticks(logs)), (*_within(spec.events), *_events(logs))
            # Trackers have the records of the run already.
            loaded = evolve(loaded, spec=evolve(spec, log=type(spec.log)(), ticks=ticks, events=events))
        compiled = plan_from_loaded(loaded, world)
        if compiled.plan is None:
            return compiled
        return evolve(compiled, plan=signed(evolve(compiled.plan, spec=plan.spec), given, world))

    def unchanged(self) -> bool:
        """Return True if this xtrain makes the recorded plan of the recorded spec."""
        plan = plan_in(self.directory)
        again = plan_from_text(plan.spec_text, f"{plan.spec} (as planned)", world=plan.mesh.world_size)
        return again.plan is not None and again.plan.id == plan.id

    def is_done(self, replay: Path) -> bool:
        """Return True if a replay has its last step."""
        latest = CheckpointFolder(replay / "checkpoints").latest()
        return latest is not None and latest.step >= self.last


_Calls = TypeVar("_Calls", Tick, OnEvent)


def _within(calls: tuple[_Calls, ...]) -> tuple[_Calls, ...]:
    """Return ticks or events without the actions that notify people, or write outside the run's directory."""
    kept = (
        evolve(call, actions=tuple(each for each in call.actions if not (each.informs or each.publishes)))
        for call in calls
    )
    return tuple(call for call in kept if call.actions)


def _ticks(logs: Logged) -> tuple[Tick, ...]:
    if not logs:
        return ()
    wanted = [kind for kind in ACTIONS.values() if kind.records and kind.default_ticks]
    wanted += [kind for kind in ACTIONS.values() if kind.reads_token_losses and logs == "rows"]
    wanted += [kind for kind in ACTIONS.values() if kind.records_digests and logs == "tensors"]
    return (Tick(actions=tuple(kind() for kind in wanted), every=Quantity(1, "steps")),)


def _events(logs: Logged) -> tuple[OnEvent, ...]:
    """Return what records digests of the checkpoint."""
    kinds = [kind for kind in ACTIONS.values() if kind.records_digests and logs == "tensors"]
    return tuple(OnEvent(event="start", actions=(kind(),)) for kind in kinds)


def _set(path: str, value: str) -> str:
    return f"{path}={json.dumps(value, ensure_ascii=False)}"


def recorded(directory: Path, steps: Collection[int] | None = None) -> list[StepMetrics]:
    """Return the records of some steps of a run, all steps by default, in order; of several of a step the last one.

    Reads line by line. Empty without a file. Raises OSError.
    """
    found: dict[int, StepMetrics] = {}
    path = directory / METRICS_FILE
    if not path.exists():
        return []
    with open_regular(path) as file:
        for line in file:
            content = object_of(line)
            step = None if content is None else content.get("step")
            if content is not None and isinstance(step, int) and (steps is None or step in steps):
                found[step] = read(StepMetrics, content)
    return [found[step] for step in sorted(found)]


@frozen(kw_only=True)
class StepDifference:
    """A step that both runs have recorded. differs: names of the numbers that are not equal bit for bit."""

    before: StepMetrics
    after: StepMetrics
    differs: tuple[str, ...]

    @property
    def step(self) -> int:
        assert self.before.step is not None
        return self.before.step


def compared(directory: Path, replay: Path, first: int, last: int) -> list[StepDifference]:
    """Return the steps of a window that a run and its replay have recorded, with the numbers that differ."""
    window = range(first, last + 1)
    after = {line.step: line for line in recorded(replay, window)}
    return [
        StepDifference(
            before=line,
            after=after[line.step],
            differs=tuple(name for name in COMPARED if getattr(line, name) != getattr(after[line.step], name)),
        )
        for line in recorded(directory, window)
        if line.step in after
    ]
