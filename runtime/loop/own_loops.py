"""Functions of a user that run the training, or each epoch of it, around the built-in steps (`event.loop`)."""

from collections.abc import Callable, Generator
from typing import Any, Final

from attrs import define, field

from xtrain.plan.plan import Plan
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Resources
from xtrain.runtime.base.user_parts import failures_of
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.hooks import HookCall, RunContext
from xtrain.runtime.loop.node_calls import NodeCalls
from xtrain.runtime.nn.batch import Step

TRAIN: Final = "train"
EPOCH: Final = "epoch"
# Generator of the steps of a run: yields before the first and after each of them, and returns the end status.
Course = Generator[None, None, str]


@op("event.loop")
def own_loop(plan: Plan, user: dict[str, Any], resources: Resources, kind: str) -> HookCall:
    """Load a function that runs the training (`train`) or an epoch (`epoch`)."""
    assert kind in (TRAIN, EPOCH)
    return HookCall.of(kind, plan, user, resources, place="around the steps")  # pyright: ignore[reportArgumentType]


@define(kw_only=True, eq=False)
class EpochContext:
    """Argument of a function that runs the steps of an epoch; the first function of a resumed run gets the rest of its
    epoch."""

    _driver: "LoopDriver" = field(alias="driver")
    _part: HookCall = field(alias="part")

    @property
    def epoch(self) -> int:
        """Number of the epoch of the data, from 1, in which the next step begins."""
        return self._driver.epoch

    @property
    def run(self) -> RunContext:
        """The state of the run after the last step."""
        return self._driver.context(self._part)

    def step(self) -> bool:
        """Run the next step, and the ticks after it; return False without a step if the epoch is over. Collective."""
        return self._driver.step_of_epoch()


@define(kw_only=True, eq=False)
class TrainContext(EpochContext):
    """Argument of a function that runs the training."""

    def step(self) -> bool:
        """Run the next step, and the ticks after it; return False without a step if the run is over. Collective."""
        return self._driver.step()

    def run_epoch(self) -> bool:
        """Run the rest of the current epoch, by the function of `epoch NAME` if there is one; return False without a
        step if the run is over. Collective."""
        return self._driver.run_epoch()


@define(kw_only=True, eq=False)
class LoopDriver:
    """Steps of a run, driven by the functions of a user or all at once. last: returns the step after which this start
    ends."""

    course: Course
    nodes: NodeCalls
    progress: Progress
    feed: Feed
    last: Callable[[], float]
    stop: Callable[[str], str]
    """Saves and stops for a reason before the last step; returns the end status."""
    _status: str | None = field(default=None, init=False)
    _error: BaseException | None = field(default=None, init=False)
    _running: int = field(default=0, init=False)  # number of the epoch that is running
    _given_up: str = field(default="", init=False)
    _own: dict[str, HookCall] = field(factory=dict, init=False)

    def run(self) -> str:
        """Train; return the end status. Raises what the steps raise, and PartFailed for an error of a function."""
        self._own = self._own_calls()
        self._advance()  # up to the first step
        if not self._own:
            while self.step():
                pass
        elif TRAIN in self._own:
            call = self._own[TRAIN]
            self._called(call, TrainContext(driver=self, part=call))
        else:
            while self.run_epoch():
                pass
        if self._status is None and self._left():
            self.course.close()
            return self.stop(self._given_up)
        while self._status is None:
            self._advance()
        return self._status

    def _own_calls(self) -> dict[str, HookCall]:
        nodes = [node for node in self.nodes.plan.nodes if node.op == "event.loop"]
        return {node.args["kind"]: self.nodes.act(node) for node in nodes}

    def _called(self, call: HookCall, context: EpochContext) -> None:
        """Call a function; errors of the steps in it are raised unchanged, even if the function hides them."""
        try:
            with failures_of(call.part):
                call.function(context, **call.part.arguments)
        finally:
            if self._error is not None:
                raise self._error
        if self._status is None and self._left() and not (call.part.kind == EPOCH and self._epoch_over()):
            at = f"after step {self.progress.step:,} of {self.feed.steps:,}"
            self._given_up = self._given_up or f"{call.part.title} returned {at}"

    def _left(self) -> bool:
        return self.progress.step < self.last()

    def _advance(self) -> None:
        try:
            next(self.course)
        except StopIteration as end:
            self._status = end.value
        except BaseException as error:
            self._error = error
            raise

    def _epoch_over(self) -> bool:
        return self.epoch > self._running  # a step may be repeated, and a rollback may go back or leave out rows

    def step(self) -> bool:
        if self._status is not None or self._given_up or not self._left():
            return False
        self._advance()
        return True

    def step_of_epoch(self) -> bool:
        return not self._epoch_over() and self.step()

    def run_epoch(self) -> bool:
        if self._status is not None or self._given_up or not self._left():
            return False
        self._running = self.epoch
        if call := self._own.get(EPOCH):
            self._called(call, EpochContext(driver=self, part=call))
        else:
            while self.step_of_epoch():
                pass
        return True

    @property
    def epoch(self) -> int:
        batch = self.feed.batch
        epochs = None if batch is None else batch.epochs_before(self.progress.step)
        return int(epochs or 0) + 1

    def context(self, call: HookCall) -> RunContext:
        return call.context(self.nodes.last_step or Step(index=max(0, self.progress.step - 1)))
