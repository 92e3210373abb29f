"""`tick.profile` and `event.profile`: profiles of some steps."""

from typing import Any

from xtrain.records.names import ControlState
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.inspect.profile import Profile, Subject
from xtrain.runtime.loop.commands import Control, UnderWay
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import Records


@op("tick.profile")
def profile(
    node_id: str,
    rank: Rank,
    feed: Feed,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
    **subject: Any,
) -> StepCall:
    """Start a profile with the next step, unless no step is left or another profile is in progress."""
    whole = Subject(node=node_id, **subject)

    def run(step: Step) -> None:
        if progress.step + whole.before >= feed.steps:
            return
        if under_way.has("profile"):
            message = f"{node_id}: another profile is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        under_way.begin(Profile.begin(whole, rank=rank, records=records, progress=progress, beat=beat))

    return run


@op("event.profile")
def profile_on_request(
    node_id: str,
    control: Control,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    beat: HeartbeatWriter | None = None,
    **subject: Any,
) -> StepCall:
    """Start a profile of the requested number of steps; the request is answered when it has ended."""

    def run(step: Step) -> None:
        order = control.order
        assert order is not None

        def answer(done: bool, detail: str) -> None:
            if control.inbox is not None:
                control.inbox.profiling = False
            control.report(order, ControlState.DONE if done else ControlState.REFUSED, detail)

        if under_way.has("profile"):
            answer(False, "another profile is being recorded")
            return
        whole = Subject(node=node_id, wait=0, active=order.amount, **subject)
        under_way.begin(Profile.begin(whole, rank=rank, records=records, progress=progress, beat=beat, report=answer))

    return run
