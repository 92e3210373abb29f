"""`tick.profile`, `event.profile` and `tick.memory_snapshot`: looking closely at some steps, or at what is held."""

from collections.abc import Callable

from torch.optim import Optimizer

from ...planner.plan import Plan
from ..control.commands import Control
from ..input.feed import Feed
from ..models.parts import ModelParts
from ..monitoring.heartbeat import HeartbeatWriter
from ..ops import op
from ..profiling.found import planned_of
from ..profiling.profile import Profile, Subject
from ..profiling.snapshot import Snapshot
from ..profiling.under_way import UnderWay
from ..reporting.records import Records
from ..state import Progress, Rank, Step
from ..training.ema import WeightAverages

StepCall = Callable[[Step], None]


@op("tick.profile")
def profile(
    node_id: str,
    rank: Rank,
    feed: Feed,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    wait: int,
    warmup: int,
    active: int,
    shapes: bool,
    stacks: bool,
    memory: bool,
    ranks: list[int] | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Begin a profile with the next step, where the run has a step left to record and no other is under way."""
    subject = Subject(
        node=node_id,
        wait=wait,
        warmup=warmup,
        active=active,
        ranks=ranks,
        shapes=shapes,
        stacks=stacks,
        memory=memory,
    )

    def run(step: Step) -> None:
        if progress.step + subject.before >= feed.steps:
            return
        if under_way.has("profile"):
            message = f"{node_id}: another profile is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        under_way.begin(Profile.begin(subject, rank=rank, records=records, progress=progress, beat=beat))

    return run


@op("event.profile")
def profile_on_request(
    node_id: str,
    control: Control,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    warmup: int,
    shapes: bool,
    stacks: bool,
    memory: bool,
    ranks: list[int] | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Begin a profile of as many steps as were asked for; the answer is given when it has ended."""

    def run(step: Step) -> None:
        order = control.order
        assert order is not None

        def told(done: bool, detail: str) -> None:
            if control.inbox is not None:
                control.inbox.profiling = False
            control.tell(order, "done" if done else "refused", detail)

        if under_way.has("profile"):
            told(False, "another profile is being recorded")
            return
        subject = Subject(
            node=node_id,
            wait=0,
            warmup=warmup,
            active=order.amount,
            ranks=ranks,
            shapes=shapes,
            stacks=stacks,
            memory=memory,
        )
        under_way.begin(Profile.begin(subject, rank=rank, records=records, progress=progress, beat=beat, told=told))

    return run


@op("tick.memory_snapshot")
def memory_snapshot(
    node_id: str,
    plan: Plan,
    model: ModelParts,
    optimizer: Optimizer,
    rank: Rank,
    records: Records,
    progress: Progress,
    under_way: UnderWay,
    history: int,
    ranks: list[int] | None = None,
    ema: WeightAverages | None = None,
    beat: HeartbeatWriter | None = None,
) -> StepCall:
    """Look at what is held, at once or when so many more steps have ended, where no other look is under way."""
    planned = planned_of(plan, rank)

    def run(step: Step) -> None:
        if under_way.has("memory_snapshot"):
            message = f"{node_id}: another memory snapshot is being recorded, and this one is skipped"
            records.warn(message, step=progress.step)
            return
        snapshot = Snapshot(
            node=node_id,
            ranks=ranks,
            history=history,
            model=model,
            optimizer=optimizer,
            ema=ema,
            planned=planned,
            rank=rank,
            records=records,
            progress=progress,
            beat=beat,
        )
        if snapshot.begin():
            under_way.begin(snapshot)

    return run
