"""`setup.log.user`: a user-defined tracker."""

from typing import Any

from xtrain.lazy_attrs import define
from xtrain.plan.plan import Plan
from xtrain.records.lines import Event, as_object
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.user_parts import UserPart, failures_of, part_of, spec_folder
from xtrain.runtime.observe.records import TrackerContext, Trackers


@op("setup.log.user")
def log_to_user(trackers: Trackers, plan: Plan, user: dict[str, Any]) -> None:
    """Open the tracker with its settings, and send it records as dicts, as in the files."""
    part = part_of("tracker", user, spec_folder(plan.spec))
    trackers.begin(lambda run: UserWriter(part=part, context=run, name=f"`{part.function}`"))


@define(eq=False, kw_only=True)
class UserWriter:
    """A `RecordWriter` for a user-defined tracker. Raises PartFailed if the user's code raises."""

    part: UserPart
    context: TrackerContext
    name: str
    seconds: float = 10.0
    local: bool = False
    _tracker: Any = None

    def begin(self) -> None:
        with failures_of(self.part):
            self._tracker = self.part.load()()
            self._tracker.open(self.context, **self.part.arguments)

    def metric(self, record: StepMetrics) -> None:
        self._call("metrics", as_object(record))

    def event(self, record: Event) -> None:
        self._call("event", as_object(record))

    def rest(self, *, must: bool) -> None:
        """Do nothing: the user's tracker flushes its own buffers."""

    def end(self, exit_code: int) -> None:
        self._call("close", exit_code)

    def _call(self, name: str, given: Any) -> None:
        method = getattr(self._tracker, name, None)
        if method is not None:
            with failures_of(self.part):
                method(given)
