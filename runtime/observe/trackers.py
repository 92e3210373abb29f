"""Trackers of a run (`log { … }`): each receives the records on the first rank, in a thread of its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from xtrain.plan.plan import Plan
from xtrain.runtime.observe.provenance import typed_value
from xtrain.runtime.observe.records import Records, RecordSink, RecordWriter

if TYPE_CHECKING:
    from xtrain.runtime.base.state import Progress


@frozen(kw_only=True)
class TrackerContext:
    """Facts of a run for a tracker that begins.

    directory: of the run, where a tracker keeps its files. step: the step that this start resumes after, 0 at the first
    start; records of later steps from an earlier start are void. rolled_back: number of steps that rollbacks have
    undone so far. plan: of the run. warn: records a warning for people.
    """

    directory: Path
    step: int
    rolled_back: int
    plan: Plan
    warn: Callable[[str], None]

    @property
    def settings(self) -> Mapping[str, Any]:
        """Every resolved setting as nested maps, `{"optimizer": {"lr": 0.0003, …}, …}`, with the plan's ids."""
        nested: dict[str, Any] = {"plan_id": self.plan.id, "config_id": self.plan.config_id}
        for entry in self.plan.provenance:
            *blocks, name = entry.path.split(".")
            inner = nested
            for block in blocks:
                before = inner.get(block, {})
                # A value with settings of its own, as a source.
                inner[block] = before if isinstance(before, dict) else {"kind": before}
                inner = inner[block]
            inner[name] = typed_value(entry.value)
        nested.setdefault("experiment", {}).setdefault("name", self.plan.name)
        return nested


@frozen
class Trackers:
    """Start of trackers, passed to their ops `setup.log.NAME`."""

    plan: Plan
    records: Records
    progress: "Progress"

    def begin(self, make: Callable[[TrackerContext], RecordWriter]) -> None:
        """Create a tracker and give it all records from now on. Only the first rank creates it; with replica groups the
        first rank of a group does so when the group begins to lead."""
        if self.records.speaks:
            self._begin(make)
        elif self.records.first:
            self.records.begin_speaking.append(lambda: self._begin(make))

    def _begin(self, make: Callable[[TrackerContext], RecordWriter]) -> None:
        context = TrackerContext(
            directory=self.records.directory,
            step=self.progress.step,
            rolled_back=sum(before - after for before, after in self.progress.bad.went_back),
            plan=self.plan,
            warn=self._warn,
        )
        try:
            writer = make(context)
        except Exception as error:  # training continues without it, as after any later failure
            self._warn(f"a tracker gets no records: {type(error).__name__}: {error}; metrics.jsonl is complete")
            return
        sink = RecordSink(writer, self._warn)
        self.records.sinks.append(sink)
        sink.begin()

    def _warn(self, message: str) -> None:
        self.records.warn(message, step=self.progress.step)
