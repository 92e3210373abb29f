"""Training loop: steps as flat lists of calls, the ticks that are due after each, and skipped steps."""

import time
from collections.abc import Callable
from typing import Final

from attrs import define, evolve, field

from xtrain.dsl.schema.actions import FAILURE, SIGNALS, START
from xtrain.plan.plan import Node, Plan, Timeline
from xtrain.plan.step_sizes import StepSizes
from xtrain.records.events import SignalEvent, StopEvent
from xtrain.records.names import EndStatus
from xtrain.records.training_events import EstimateEvent, NonFiniteEvent, SkippedEvent
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.process import collected_garbage, first_step
from xtrain.runtime.base.state import Clocks, Progress
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.alerts import AlertActions, informs
from xtrain.runtime.loop.commands import Control, UnderWay
from xtrain.runtime.loop.metrics import Window
from xtrain.runtime.loop.node_calls import DueTicks, NodeCalls, nodes_due
from xtrain.runtime.loop.own_loops import Course, LoopDriver
from xtrain.runtime.nn.batch import Halt, NonFinite, NothingLearned, RunIsOver, SkipStep, Step, StepAgain, StepCall
from xtrain.runtime.observe.heartbeat import LASTING, WAITS
from xtrain.runtime.observe.records import Records
from xtrain.runtime.observe.stopping import StopRequests
from xtrain.runtime.observe.watch import Poller
from xtrain.runtime.store.beginning import FINISHED, begun_from, check_left, finished_step
from xtrain.text.units import plural

# Seconds and number of steps measured before an estimate.
LEAST_SECONDS: Final = 3.0
LEAST_STEPS: Final = 2


@define
class TimeLeft:
    """Estimate of the remaining time, on the first rank only: all ranks wait for each other in every step."""

    done: bool = False
    _first: float | None = None
    _steps: int = 0
    _rows: int = 0
    _seconds: float = 0.0

    def after(self, step: Step, seconds: float, last: int, rows_left: int) -> EstimateEvent | None:
        """Return the `estimate` event once enough is measured, else None.

        seconds: of the step. last: the step after which this start of the run ends. rows_left: rows until then.
        """
        if step.warms_up:
            self._first = seconds
            return None
        self._steps += 1
        self._rows += step.rows
        self._seconds += seconds
        left = last - (step.index + 1)
        if self._seconds < LEAST_SECONDS or self._steps < LEAST_STEPS or left <= 0:
            return None
        self.done = True
        step_seconds = self._seconds / self._steps
        return EstimateEvent(
            step=step.index + 1,
            step_seconds=step_seconds,
            measured_steps=self._steps,
            first_step_seconds=self._first,
            steps_left=left,
            seconds_left=rows_left * self._seconds / self._rows,
        )


# A function of the user that runs the steps returned before the last one.
OWN_LOOP: Final = "loop"
STATUS_OF_EVENT: Final = {
    "sigint": EndStatus.INTERRUPTED,
    **dict.fromkeys(("sigterm", "sigusr1", "time_limit", "stop_file", "stop_at", OWN_LOOP), EndStatus.STOPPED),
}


@define(eq=False, kw_only=True)
class TrainingLoop:
    """Loop over the steps of a run. order: all nodes of the plan, sorted. reason: why the run was stopped, else
    empty."""

    plan: Plan
    order: list[Node]
    nodes: NodeCalls
    records: Records
    progress: Progress
    requests: StopRequests
    clocks: Clocks
    control: Control
    poller: Poller
    under_way: UnderWay
    alert_actions: AlertActions
    due_ticks: DueTicks
    reason: str = ""
    _last: float = field(default=0, init=False)
    _event_calls: dict[str, tuple[StepCall, ...]] = field(factory=dict, init=False)

    def run(self) -> str:
        """Train until the end of the run or a stop; return `done`, `stopped`, `interrupted`, or `complete` if nothing
        was left to do."""
        cuda = self.plan.node("setup.bootstrap").args.get("cuda")
        if self.nodes.resources["rank"].device.type != "cuda":
            cuda = None
        with collected_garbage(None if cuda is None else cuda["collect_steps"]) as collect:
            driver = LoopDriver(
                course=self._course(collect),
                nodes=self.nodes,
                progress=self.progress,
                feed=self.nodes.resources["feed"],
                last=lambda: self._last,
                stop=lambda reason: self._stop(OWN_LOOP, reason, self._event_calls),
            )
            return driver.run()

    def _course(self, collect: Callable[[int], None]) -> Course:
        """Yield before the first step and after each, which may be repeated or skipped; return the end status."""
        feed: Feed = self.nodes.resources["feed"]
        window: Window = self.nodes.resources["window"]
        begun = begun_from(self.plan, self.nodes.resources["begun"].start)
        if (saver := self.nodes.resources.get("saver")) is not None:
            saver.hooks = self.nodes.call_hooks
            if (watch := self.nodes.resources.get("directory_watch")) is not None:
                saver.look = watch.look
        total = feed.steps
        calls = [(node.id, self.nodes.call(node.id), node.op in LASTING) for node in self.order if node.kind == "step"]
        timeline = feed.timeline
        assert feed.batch is not None
        due_ticks = self.due_ticks
        due_ticks.ticks = [self.nodes.due_tick(tick) for tick in timeline.ticks]
        due_ticks.tokens_taken, due_ticks.sizes = feed.tokens_taken, feed.batch.sizes
        # Actions of a failure are bound then: ranks may fail before all of this is set up.
        between_steps = (each for each in self.plan.timeline.triggers if each.event not in ("nan", FAILURE))
        event_calls = {each.event: tuple(map(self.nodes.call, each.nodes)) for each in between_steps}
        self._event_calls = event_calls
        on_nan = [r for r in self.plan.timeline.triggers if r.event == "nan"]
        bad_steps = {r.count or 1: tuple(map(self.nodes.call, r.nodes)) for r in on_nan}
        too_many = max(bad_steps)
        fails = any(trigger.stop for trigger in on_nan)
        check_left(self.plan, self.nodes.resources["begun"].start, self.records.directory, total)
        if self.progress.over:  # finished by an action before the end of the budget
            total = self.progress.step
        self.records.flush(self.progress.step)  # the record that the checkpoint kept for its step
        if self.progress.step >= total and finished_step(self.records.directory) == self.progress.step:
            return EndStatus.COMPLETE
        sequence, sizes = feed.batch.sequence, feed.batch.row_sizes
        seconds = window.node_seconds = dict.fromkeys((node for node, *_ in calls), 0.0)
        spent = [0.0] * len(calls)
        clock, at = time.perf_counter, self.nodes.beat.at
        stopping, control, alert_actions, under_way = False, self.control, self.alert_actions, self.under_way
        if self.records.first:
            self.poller.begin()
        time_left = TimeLeft(done=not self.records.speaks)
        warms_up = True  # until the first step, which compiles, is computed
        stops = self._stops_at(timeline, sizes.times(sequence))
        self._last = last = min(total, stops)
        self.nodes.call_hooks("before_train")
        if START in event_calls:
            self._react(START, event_calls)
        yield
        while self.progress.step < last:
            rows = sizes.at(self.progress.step)
            step = Step(
                index=self.progress.step,
                rows=rows,
                share=rows / sizes.full,
                began=clock(),
                warms_up=warms_up,
                waited=WAITS.seconds,
            )
            try:
                mark = step.began
                self.nodes.beat.begin(step.index + 1)
                for number, (node, call, lasting) in enumerate(calls):
                    at(node, warms_up or lasting)
                    call(step)
                    now = clock()
                    spent[number] = now - mark
                    mark = now
                if not warms_up:  # a skipped step is not part of the window either
                    for node, call_seconds in zip(seconds, spent, strict=True):
                        seconds[node] += call_seconds
                warms_up = False
                if not time_left.done:
                    left = sizes.between(step.index + 1, int(last))
                    if estimate := time_left.after(step, mark - step.began, int(last), left):
                        self.records.event(estimate)
            except RunIsOver:
                return EndStatus.COMPLETE
            except StepAgain as again:
                step.release()
                if again.moved:
                    self.nodes.last_step = None
                if again.agreed:
                    self.clocks.put_back()
                yield
                continue
            except SkipStep as reason:
                self.records.event(SkippedEvent(step=step.index + 1, reason=str(reason), **reason.fields))
                step.release()
                for call in bad_steps.get(reason.fields.get("in_a_row", 0), ()):
                    call(step)
            except NonFinite as error:
                self.records.event(NonFiniteEvent(step=error.step, loss=error.loss, grad_norm=error.grad_norm))
                step.release()
                for call in bad_steps[too_many]:
                    call(step)
                if fails:
                    raise
                self.nodes.last_step = None
                self.clocks.put_back()
                total = feed.steps  # less of a budget in epochs may be left
                timeline = feed.timeline
                pairs = zip(due_ticks.ticks, timeline.ticks, strict=True)
                due_ticks.ticks = [evolve(due_tick, tick=tick) for due_tick, tick in pairs]
                self._last = last = min(total, stops)
                yield
                continue
            except Halt as halt:
                return self._stop(halt.event, halt.reason, event_calls)
            self.nodes.last_step = step
            self.progress.step += 1
            self.progress.tokens += rows * sequence
            if under_way:
                under_way.after_step()
            due = due_ticks.due()
            for call in nodes_due(due).values():
                call(step)
            step.taken.clear()
            collect(self.progress.step)
            for tick in due:
                if tick.tick.stop:
                    self._note_stop("tick", f"every {tick.tick.period} … stop")
                    stopping = True
            if step.stop:
                self._note_stop("tick", step.stop)
                stopping = True
            if self.progress.over:
                self._note_stop("tick", self.progress.over)
                total = self._last = last = self.progress.step
            if alert_actions.due:
                stopping = self._on_alerts(step) or stopping
            if control.busy:
                try:
                    stopping = control.obey(step) or stopping
                except Halt as halt:
                    return self._stop(halt.event, halt.reason, event_calls)
            self.records.flush(self.progress.step)
            if stopping and self.progress.step < total:
                self.nodes.call_hooks("after_train")
                return EndStatus.STOPPED
            yield
        try:
            for call in self.nodes.resources["at_end"]:
                call()
        except RunIsOver:
            return EndStatus.COMPLETE
        if self.progress.step < total:
            return self._stop("stop_at", f"the run stops after step {last:,} of {total:,}", event_calls)
        self._check_learned(begun["step"] if begun else 0)
        for place in ("after_phase", "after_epoch", "after_train"):
            self.nodes.call_hooks(place)
        self._react("finish", event_calls)
        self.records.settle(self.progress.step)
        if self.records.speaks:
            try:
                durable.write(self.records.directory / FINISHED, f"{self.progress.step}\n")
            except OSError as error:
                # No training is lost: another start repeats the final work.
                message = f"the end of the run could not be recorded: {error}"
                self.records.warn(message, step=self.progress.step)
        return EndStatus.DONE

    def _check_learned(self, first: int) -> None:
        """Raise NothingLearned on all ranks alike if all steps of the run were skipped: there is no model to publish.
        first: the step that the run started from."""
        bad = self.progress.bad
        if bad.last_good > first or self.progress.step == first:
            return
        steps = f"all {plural(self.progress.step - first, 'step')} of the run were skipped"
        why = ["had no valid token"] if bad.empty else []
        why += ["had a non-finite loss or gradient norm"] if bad.in_a_row else []
        raise NothingLearned(f"{steps}, as they {' or '.join(why)}: nothing was learned, and no model is saved")

    def _stops_at(self, timeline: Timeline, sizes: StepSizes) -> float:
        """Return the step after which this start stops, whatever the budget; infinite without a limit. sizes: in
        tokens."""
        at, after, first = timeline.stop_at, timeline.stop_after, first_step(self.progress.step)
        if timeline.stop_after_tokens is not None:
            after = sizes.steps_of(sizes.before(first) + timeline.stop_after_tokens) - first
        return min(
            float("inf") if at is None else max(at, self.progress.step),
            float("inf") if after is None else first + after,
        )

    def _stop(self, event: str, reason: str, event_calls: dict[str, tuple[StepCall, ...]]) -> str:
        """Run the nodes declared for an event that stops the run; return the end status."""
        self._note_stop(event, reason)
        self.requests.hurry(event)
        self.nodes.call_hooks("after_train")
        # A function that ends the training is a request to stop, which has no event of its own.
        self._react("sigterm" if event == OWN_LOOP else event, event_calls)
        self.requests.answered = True
        return STATUS_OF_EVENT[event]

    def _note_stop(self, event: str, reason: str) -> None:
        """Record why the run is to stop; its end repeats the first reason."""
        kind = SignalEvent if event in SIGNALS else StopEvent
        self.records.event(kind(step=self.progress.step, name=event, reason=reason))
        self.reason = self.reason or f"{event}: {reason}"

    def _on_alerts(self, step: Step) -> bool:
        """Run the actions of alerts that all ranks agreed on; return True if the run is to stop."""
        stopping = False
        for trigger in self.alert_actions.take():
            for node in trigger.nodes:
                if not informs(self.plan.node(node)):  # others ran when the alert was raised
                    self.nodes.call(node)(step)
            if trigger.stop:
                self._note_stop(trigger.event, f"an alert was raised: on {trigger.event}")
                stopping = True
        return stopping

    def _react(self, event: str, event_calls: dict[str, tuple[StepCall, ...]]) -> None:
        """Run the nodes that the plan declares for an event."""
        step = self.nodes.last_step or Step(index=self.progress.step)
        for call in event_calls[event]:
            call(step)
        self.records.flush(self.progress.step)
