"""Runs a plan on this rank: set-up nodes in topological order, the step as a flat list of calls, ticks, shutdown.

What a node does is known to its op alone. What the plan does not contain does not happen.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from attrs import evolve
from torch.distributed.distributed_c10d import Store

from ..dsl.schema.actions import SIGNALS, action_of
from ..planner.graph.alerts import ALERTS
from ..planner.plan import Node, Plan, PlanTick, Timeline
from ..planner.units import plural
from ..records.run_events import RunEndEvent, SignalEvent, StopEvent
from ..records.start_events import RunStartEvent, SetupBeginEvent, SetupDoneEvent, SetupEvent
from ..records.step_events import NonFiniteEvent, SkippedEvent
from .bootstrap import choose_device
from .checkpoint.sources import FINISHED, begun_from, check_left, finished_step, starting_point
from .control.agreement import Agreement
from .control.commands import Control
from .control.inbox import Inbox
from .control.signals import StopRequests
from .data.errors import DataError
from .errors import EnvironmentFault
from .files import durable
from .input.feed import Feed
from .monitoring.alert_actions import AlertActions, informs
from .monitoring.failing import lost_a_peer, report_deadline, report_failure
from .monitoring.heartbeat import LASTING, HeartbeatWriter
from .monitoring.memory import forget_peak
from .monitoring.notify import Notifier
from .monitoring.poller import Poller
from .monitoring.time_left import TimeLeft
from .monitoring.waits import WAITS
from .monitoring.watch import Watchdog
from .node_order import DueTick, DueTicks, StepCall, nodes_due, topological
from .ops import OPS, PlanMismatch, load_ops, op_of
from .outcome import EXIT_CODES
from .outcome import leave as leave_process
from .profiling import out_of_memory
from .profiling.under_way import UnderWay
from .provenance.start import first_step
from .reporting.records import Records
from .shutdown import report_end
from .state import Halt, NonFinite, NothingLearned, Progress, Resources, SkipStep, Step
from .timers import Clocks
from .training.observe import Window

STATUS_OF_EVENT = {
    "sigint": "interrupted",
    **dict.fromkeys(("sigterm", "sigusr1", "time_limit", "stop_file", "stop_at"), "stopped"),
}


class Executor:
    """One rank's walk through a plan."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        rank: int,
        leave: Callable[[int], None] = leave_process,
        store: Store | None = None,
    ) -> None:
        """leave: ends the process from any thread, where the others have been given up. store: in which the ranks of
        this start have met, if they have; they then share a screen, which the first one writes on."""
        self.plan = plan
        self.beat = HeartbeatWriter()
        self.records = Records.open(directory, rank)
        self.progress = Progress()
        self.requests = StopRequests(deadline_seconds=300.0, report=self._report_deadline)
        self.clocks = Clocks()
        self.control = Control(plan.timeline.commands, self._call)
        self.poller = Poller(report=self._warn)
        self.under_way = UnderWay()
        self.notifier = Notifier(self.records, self.progress, plan.timeline.steps)
        self.alert_actions = AlertActions.of(plan, ALERTS)
        self.due_ticks = DueTicks(self.progress, self.clocks, plan.estimates.tokens_per_step)
        self.resources: Resources = {
            "plan": plan,
            "records": self.records,
            "progress": self.progress,
            "requests": self.requests,
            "clocks": self.clocks,
            "control": self.control,
            "due_ticks": self.due_ticks,
            "poller": self.poller,
            "agreement": Agreement(self.requests, self.clocks, self.control, self.alert_actions),
            "notifier": self.notifier,
            "alert_actions": self.alert_actions,
            "beat": self.beat,
            "under_way": self.under_way,
            "leave": leave,
            "prepared": {},
            "stages": [],
            "store": store,
        }
        self.resources["resources"] = self.resources
        self._quiet = store is not None and rank > 0
        self._begun = time.time()
        self._order = topological(plan)
        self._finished = directory / FINISHED
        self._under_way = ""
        self._bound: dict[str, StepCall] = {}
        self._last_step: Step | None = None
        self._reason = ""
        self._hooks = [node for node in plan.nodes if node.op in ("step.hook", "event.hook")]

    def run(self) -> str:
        """Set up, train, shut down; returns how it ended (a key of EXIT_CODES). Failures are reported, not raised."""
        begin = time.perf_counter()
        status = "failed"
        try:
            self._set_up(begin)
            status = self._train()
            if status != "complete":
                self._call_hooks("at_end", status=status)
            self.under_way.cut_short("the run ends")
        except (EnvironmentFault, DataError) as error:
            status = "environment"
            self._report(error, exit_code=EXIT_CODES[status], trace=False)
        except (NonFinite, NothingLearned, PlanMismatch) as error:
            self._report(error, trace=False)
        except BaseException as error:  # also CheckpointException, which is no Exception
            self._report(error, trace=not lost_a_peer(error))
        self.under_way.drop()
        self.poller.close()
        with suppress(EnvironmentFault):
            self.records.flush(self.progress.step)  # of a failure between two steps
        with suppress(EnvironmentFault):  # a disk that takes no record takes none of what was left to be refused
            self.control.close()
        self.beat.at("shutdown.drain", lasting=True)
        try:
            self._tell_the_end(status, begin)
        except EnvironmentFault as error:
            if not _failed(status):
                status = "environment"
                self._report(error, exit_code=EXIT_CODES[status], trace=False)
        self._shut_down(failed=_failed(status))
        self.requests.rest()
        return status

    # set-up ---------------------------------------------------------------------------------------------------------

    def _set_up(self, begin: float) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        start = starting_point(self.plan, self.records.directory).entry
        self.records.event(
            RunStartEvent(
                step=0,
                run_id=self.records.directory.name,
                plan_id=self.plan.id,
                name=self.plan.name,
                world_size=self.plan.mesh.world_size,
                device=choose_device(self.plan.node("setup.bootstrap").args["device"], local_rank).type,
                steps=self.plan.timeline.steps,
                attempt=self.records.attempts() + 1,
                resumed_step=start.step if start else None,
                directory=str(self.records.directory),
            )
        )
        if self.records.rank == 0:
            folder, commands = self.records.directory / "control", self.plan.timeline.commands
            inbox = Inbox(folder=folder, commands=commands, records=self.records, progress=self.progress)
            inbox.sweep(self._begun)
            self.control.inbox = inbox
            self.poller.looks["commands"] = inbox.look
        load_ops()
        for node in self._order:
            if node.kind in ("setup", "collate"):
                self._execute(node)
        self._under_way = ""
        self.requests.listen()
        # What set-up took for a moment, as to load a checkpoint, is not held against the plan of a step.
        most, seconds = forget_peak(self.resources["rank"].device), time.perf_counter() - begin
        self.records.event(SetupDoneEvent(step=self.progress.step, seconds=seconds, memory_bytes=most))

    def _execute(self, node: Node) -> None:
        """Run a node that acts at once, time it, and keep what it gives."""
        operation = op_of(node)
        self._under_way = node.id
        self.beat.at(node.id, lasting=True)
        self.records.event(SetupBeginEvent(step=self.progress.step, node=node.id))
        began = time.perf_counter()
        result = operation.bind(node, {**self.resources, "node_id": node.id})()
        if operation.gives:
            self.resources[operation.gives] = result
        seconds = time.perf_counter() - began
        self.records.event(SetupEvent(step=self.progress.step, node=node.id, seconds=seconds, detail=node.does))

    # training -------------------------------------------------------------------------------------------------------

    def _train(self) -> str:
        feed: Feed = self.resources["feed"]
        window: Window = self.resources["window"]
        begun = begun_from(self.plan, self.resources["begun"].start)
        total = self._total(feed)
        calls = [(node.id, self._call(node.id), node.op in LASTING) for node in self._order if node.kind == "step"]
        timeline = feed.timeline
        due_ticks = self.due_ticks
        due_ticks.ticks = [self._due_tick(tick) for tick in timeline.ticks]
        due_ticks.tokens_taken = feed.tokens_taken
        reactions = {r.event: tuple(map(self._call, r.nodes)) for r in self.plan.timeline.reactions if r.event != "nan"}
        on_nan = [r for r in self.plan.timeline.reactions if r.event == "nan"]
        bad_steps = {r.count or 1: tuple(map(self._call, r.nodes)) for r in on_nan}
        too_many = max(bad_steps)
        fails = any(r.stop for r in on_nan)
        check_left(self.plan, self.resources["begun"].start, self.records.directory, total)
        self.records.flush(self.progress.step)  # what a checkpoint has kept of its step's record
        if self.progress.step >= total and finished_step(self.records.directory) == self.progress.step:
            return "complete"
        tokens_per_step = self.plan.estimates.tokens_per_step
        seconds = window.node_seconds = dict.fromkeys((node for node, *_ in calls), 0.0)
        spent = [0.0] * len(calls)
        clock, at = time.perf_counter, self.beat.at
        stopping, control, alert_actions, under_way = False, self.control, self.alert_actions, self.under_way
        if self.records.rank == 0:
            self.poller.begin()
        time_left = TimeLeft(told=self.records.rank != 0)
        warms_up = True  # until a step has been computed: the first one compiles, and may take long
        stops = self._stops_at(timeline)
        last = min(total, stops)
        while self.progress.step < last:
            step = Step(index=self.progress.step, began=clock(), warms_up=warms_up, waited=WAITS.seconds)
            try:
                mark = step.began
                self.beat.begin(step.index + 1)
                for number, (node, call, lasting) in enumerate(calls):
                    at(node, warms_up or lasting)
                    call(step)
                    now = clock()
                    spent[number] = now - mark
                    mark = now
                if not warms_up:  # nor is a step that is left out one of the window's
                    for node, each in zip(seconds, spent, strict=True):
                        seconds[node] += each
                warms_up = False
                if not time_left.told and (estimate := time_left.after(step, mark - step.began, int(last))):
                    self.records.event(estimate)
            except SkipStep as reason:
                self.records.event(SkippedEvent(step=step.index + 1, reason=str(reason), **reason.fields))
                step.let_go()
                for call in bad_steps.get(reason.fields.get("in_a_row", 0), ()):
                    call(step)
            except NonFinite as error:
                self.records.event(NonFiniteEvent(step=error.step, loss=error.loss, grad_norm=error.grad_norm))
                step.let_go()
                for call in bad_steps[too_many]:
                    call(step)
                if fails:
                    raise
                self._last_step = None
                self.clocks.put_back()
                total = self._total(feed)  # of a budget in epochs there may be less left
                timeline = feed.timeline
                pairs = zip(due_ticks.ticks, timeline.ticks, strict=True)
                due_ticks.ticks = [evolve(each, tick=tick) for each, tick in pairs]
                last = min(total, stops)
                continue
            except Halt as halt:
                return self._stop(halt.event, halt.reason, reactions)
            self._last_step = step
            self.progress.step += 1
            self.progress.tokens += tokens_per_step
            if under_way:
                under_way.after_step()
            due = due_ticks.due()
            for call in nodes_due(due).values():
                call(step)
            step.taken.clear()
            for tick in due:
                if tick.tick.stop:
                    self._note_stop("tick", f"every {tick.tick.period} … stop")
                    stopping = True
            if alert_actions.due:
                stopping = self._on_alerts(step) or stopping
            if control.busy:
                try:
                    stopping = control.obey(step) or stopping
                except Halt as halt:
                    return self._stop(halt.event, halt.reason, reactions)
            self.records.flush(self.progress.step)
            if stopping and self.progress.step < total:
                return "stopped"
        if self.progress.step < total:
            return self._stop("stop_at", f"the run stops after step {last:,} of {total:,}", reactions)
        self._check_learned(begun["step"] if begun else 0)
        self._call_hooks("after_phase")
        self._react("finish", reactions)
        self.records.settle(self.progress.step)
        if self.records.rank == 0:
            try:
                durable.write(self._finished, f"{self.progress.step}\n")
            except OSError as error:
                # Nothing of the training is lost: another start does once more what was to happen at the end.
                self._warn(f"the end of the run could not be recorded: {error}")
        return "done"

    def _check_learned(self, first: int) -> None:
        """Raises NothingLearned, on all ranks alike, if the run is at its end and all of its steps were left out: there
        is nothing to publish, and nothing to call done. first: the step that the run has begun with."""
        bad = self.progress.bad
        if bad.last_good > first or self.progress.step == first:
            return
        steps = f"all {plural(self.progress.step - first, 'step')} of the run were skipped"
        why = ["had no valid token"] if bad.empty else []
        why += ["had a non-finite loss or gradient norm"] if bad.in_a_row else []
        raise NothingLearned(f"{steps}, as they {' or '.join(why)}: nothing was learned, and no model is saved")

    def _total(self, feed: Feed) -> int:
        """The steps of the whole run: as planned, else as many as the data is good for."""
        return self.plan.timeline.steps if self.plan.timeline.steps is not None else feed.steps

    def _stops_at(self, timeline: Timeline) -> float:
        """The step after which this start stops, whatever the budget: infinite where nothing is said."""
        at, after = timeline.stop_at, timeline.stop_after
        return min(
            float("inf") if at is None else max(at, self.progress.step),
            float("inf") if after is None else first_step(self.progress.step) + after,
        )

    def _stop(self, event: str, reason: str, reactions: dict[str, tuple[StepCall, ...]]) -> str:
        """Do what is declared for something that stops the run; how the run then ends."""
        self._note_stop(event, reason)
        self.requests.hurry(event)
        self._react(event, reactions)
        self.requests.answered = True
        return STATUS_OF_EVENT[event]

    def _note_stop(self, event: str, reason: str) -> None:
        """Write why the run is to stop; its end says the first reason again."""
        kind = SignalEvent if event in SIGNALS else StopEvent
        self.records.event(kind(step=self.progress.step, name=event, reason=reason))
        self._reason = self._reason or f"{event}: {reason}"

    def _on_alerts(self, step: Step) -> bool:
        """Do what is declared for alerts that all ranks have heard of; whether the run is to stop."""
        stopping = False
        for trigger in self.alert_actions.take():
            for node in trigger.nodes:
                if not informs(self.plan.node(node)):  # that was run when the alert was raised
                    self._call(node)(step)
            if trigger.stop:
                self._note_stop(trigger.event, f"an alert was raised: on {trigger.event}")
                stopping = True
        return stopping

    def _react(self, event: str, reactions: dict[str, tuple[StepCall, ...]]) -> None:
        """Run the nodes that the plan names for an event."""
        step = self._last_step or Step(index=self.progress.step)
        for call in reactions[event]:
            call(step)
        self.records.flush(self.progress.step)

    def _due_tick(self, tick: PlanTick) -> DueTick:
        clock = self.clocks.add(tick.seconds) if tick.seconds is not None else None
        return DueTick(tick, {node: self._call(node) for node in tick.nodes}, clock)

    def _call(self, node_id: str) -> StepCall:
        """The callable of a step, tick or event node, made once."""
        if node_id not in self._bound:
            node = self.plan.node(node_id)
            call = op_of(node).bind(node, {**self.resources, "node_id": node_id})()
            call = self._with_hooks(node_id, call)
            self._bound[node_id] = call if node.kind == "step" else self._marked(node, call)
        return self._bound[node_id]

    def _with_hooks(self, node_id: str, call: StepCall) -> StepCall:
        """The call of a node with the hooks before and after it."""
        around = [node for node in self._hooks if node_id in node.args.get("nodes", ())]
        if not around:
            return call
        before, after = (
            [self._call(node.id) for node in around if node.args["place"].startswith(word)]
            for word in ("before", "after")
        )

        def run(step: Step) -> None:
            for each in (*before, call, *after):
                each(step)

        return run

    def _call_hooks(self, place: str, **told: Any) -> None:
        """Call the hooks of a place that is beside no node."""
        step = self._last_step or Step(index=max(0, self.progress.step - 1))
        for node in self._hooks:
            if node.args["place"] == place:
                OPS["event.hook"].bind(node, {**self.resources, "node_id": node.id})()(step, **told)

    def _call_failure_hooks(self, error: BaseException) -> None:
        """What goes wrong in them is a warning: the run has failed for another reason."""
        if "optimizer" not in self.resources or "feed" not in self.resources:
            return
        try:
            self._call_hooks("at_failure", failure=error)
        except (Exception, SystemExit) as another:
            with suppress(EnvironmentFault):
                self.records.warn(f"a hook at_failure: {another}", step=self.progress.step, every_rank=True)

    def _marked(self, node: Node, call: StepCall) -> StepCall:
        """The call with a mark before it; the first time it may take long, as it may compile."""
        action, before = action_of(node.op), False
        lasting = node.op in LASTING if action is None or action.lasting is None else action.lasting
        compiles = action is None or action.lasting is None

        def run(step: Step) -> None:
            nonlocal before
            self.beat.at(node.id, lasting=lasting or (compiles and not before))
            before = True
            call(step)

        return run

    # the end --------------------------------------------------------------------------------------------------------

    def _tell_the_end(self, status: str, begin: float) -> None:
        """Raises EnvironmentFault where a disk takes no word of it."""
        failed, code = _failed(status), EXIT_CODES[status]
        saver = self.resources.get("saver")
        report_end(self.records, self.requests, self.notifier, saver, exit_code=code, failed=failed)
        if not failed:  # of a failure only the launcher can say when all has been told
            loss = self._last_step.loss if self._last_step and isfinite(self._last_step.loss) else None
            reason = (self._reason or "a command: stop") if status in ("stopped", "interrupted") else ""
            self.records.event(
                RunEndEvent(
                    step=self.progress.step,
                    status=status,
                    exit_code=code,
                    seconds=time.perf_counter() - begin,
                    loss=loss,
                    reason=reason,
                )
            )

    def _report(self, error: BaseException, *, exit_code: int = 1, trace: bool) -> None:
        watch: Watchdog | None = self.resources.get("watch")
        if watch is not None and lost_a_peer(error):
            watch.leave_if_condemned()
        place, more = self._under_way or f"step {self.progress.step + 1}", ""
        self._call_failure_hooks(error)
        if out_of_memory.ran_out(error):
            records = self.records
            more = out_of_memory.write(records.directory, records.attempts(), self.resources, error, self.beat.node)
        report_failure(
            self.records,
            error,
            step=self.progress.step,
            place=place,
            exit_code=exit_code,
            trace=trace,
            more=more,
            quiet=self._quiet,
        )

    def _report_deadline(self, message: str) -> None:
        report_deadline(self.records, message, step=self.progress.step)

    def _warn(self, message: str) -> None:
        self.records.warn(message, step=self.progress.step)

    def _shut_down(self, *, failed: bool) -> None:
        for node in self._order:
            # After a failure the other ranks may be gone: waiting for them would only hide what happened.
            if node.kind == "shutdown" and node.op in OPS and not (failed and node.op == "shutdown.leave"):
                self.beat.at(node.id, lasting=True)
                op_of(node).bind(node, {**self.resources, "node_id": node.id})()
        watch: Watchdog | None = self.resources.get("watch")
        if watch is not None:
            watch.close()


def _failed(status: str) -> bool:
    return EXIT_CODES[status] in (1, 3)
