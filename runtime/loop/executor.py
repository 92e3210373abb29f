"""Execution of a plan on this rank: set-up nodes in topological order, steps, ticks, and the shutdown."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from xtrain.dsl.values import variables_in
from xtrain.plan.arithmetic import arithmetic_of
from xtrain.plan.graph import ALERTS
from xtrain.plan.plan import Node, Plan
from xtrain.records.events import RunEndEvent
from xtrain.records.names import ControlWord, EndStatus
from xtrain.records.training_events import RunStartEvent, SetupBeginEvent, SetupDoneEvent, SetupEvent
from xtrain.runtime.base.device import forget_peak
from xtrain.runtime.base.errors import EXIT_CODES, DataError, EnvironmentFault
from xtrain.runtime.base.errors import exit_process as exit_this_process
from xtrain.runtime.base.limits import limit_fault
from xtrain.runtime.base.ops import PlanMismatch, load_ops, op, op_of
from xtrain.runtime.base.process import ReplicaGroup, plan_of_group
from xtrain.runtime.base.state import Clocks, Progress, Resources
from xtrain.runtime.base.user_parts import PartFailed
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop import memory_report as out_of_memory
from xtrain.runtime.loop.agreement import Agreement
from xtrain.runtime.loop.alerts import AlertActions, Notifier
from xtrain.runtime.loop.bootstrap import choose_device
from xtrain.runtime.loop.commands import Control, Inbox, UnderWay
from xtrain.runtime.loop.node_calls import DueTicks, NodeCalls, topological
from xtrain.runtime.loop.training_loop import TrainingLoop
from xtrain.runtime.nn.batch import NonFinite, NothingLearned
from xtrain.runtime.observe.heartbeat import HeartbeatWriter
from xtrain.runtime.observe.records import CLOSE_SECONDS, Records, Trackers
from xtrain.runtime.observe.stopping import (
    SECOND_INTERRUPT_SECONDS,
    StopRequests,
    lost_a_peer,
    report_deadline,
    report_failure,
)
from xtrain.runtime.observe.watch import DirectoryWatch, Poller, Watchdog
from xtrain.runtime.store.beginning import starting_point, total_steps
from xtrain.runtime.store.saver import Saver

# Shares of the deadline reserved for leaving and, before that, for record files.
RESERVED: Final = 0.2
LEAVING: Final = 0.1
# Seconds that writers get at the end of a failed run, which is to be restarted.
AFTER_FAILURE: Final = 10.0


def report_end(
    records: Records, requests: StopRequests, notifier: Notifier, saver: Saver | None, *, exit_code: int, failed: bool
) -> None:
    """Wait for a running save, commands and writers, as far as the deadline allows."""
    if saver is not None:
        saver.drain(requests.left())
    notifier.close(requests.left(RESERVED) / 2)  # before the writers, which record the outcomes of commands
    left = requests.left(RESERVED)
    records.end_sinks(exit_code, min(AFTER_FAILURE, left) if failed else left)


@op("shutdown.drain")
def drain(records: Records, requests: StopRequests, saver: Saver | None = None, feed: Feed | None = None) -> None:
    """Wait for a running save, stop reading data, and flush all records."""
    if saver is not None:
        saver.drain(requests.left())
    if feed is not None:
        feed.close()
    records.close(min(CLOSE_SECONDS, requests.left(LEAVING)))


@op("shutdown.leave")
def leave_group() -> None:
    """Wait for the other ranks, then leave the process group."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


class Executor:
    """Executor of a plan on one rank."""

    def __init__(
        self,
        plan: Plan,
        directory: Path,
        *,
        rank: int,
        group: ReplicaGroup | None = None,
        exit_process: Callable[[int], None] = exit_this_process,
        store: Store | None = None,
    ) -> None:
        """exit_process: ends the process from any thread, after other ranks were given up. store: where the ranks of
        this start have met, if they have; they then share a screen, which only the first rank writes to. group: this
        rank's replica group, of several; rank: among the ranks of all groups."""
        self._world = plan.mesh.world_size
        self.plan = plan if group is None else plan_of_group(plan)
        plan = self.plan
        self.beat = HeartbeatWriter()
        self.records = Records.open(directory, rank, group)
        self.records.variables = variables = variables_in(plan.spec_text)
        self.progress = Progress()
        self.requests = StopRequests(deadline_seconds=300.0, report=self._report_deadline)
        self.clocks = Clocks()
        self.resources: Resources = {}
        self.nodes = NodeCalls(plan, self.resources, self.progress, self.beat, self.clocks)
        self.control = Control(plan.timeline.commands, self.nodes.call)
        self.poller = Poller(report=self._warn)
        self.under_way = UnderWay()
        self.notifier = Notifier(self.records, self.progress, plan.timeline.steps, hidden=variables)
        self.alert_actions = AlertActions.of(plan, ALERTS)
        due_ticks = DueTicks(self.progress, self.clocks, arithmetic_of(plan).sizes)
        self.resources |= {
            "plan": plan,
            "records": self.records,
            "progress": self.progress,
            "requests": self.requests,
            "clocks": self.clocks,
            "control": self.control,
            "due_ticks": due_ticks,
            "poller": self.poller,
            "agreement": Agreement(self.requests, self.clocks, self.control, self.alert_actions),
            "notifier": self.notifier,
            "alert_actions": self.alert_actions,
            "beat": self.beat,
            "under_way": self.under_way,
            "exit_process": exit_process,
            "prepared": {},
            "stages": [],
            "store": store,
            "replica": group,
            "at_end": [],
            "trackers": Trackers(plan, self.records, self.progress),
            "resources": self.resources,
        }
        self._quiet = store is not None and rank > 0
        self._begun = time.time()
        self._order = topological(plan)
        self._under_way = ""
        self.loop = TrainingLoop(
            plan=plan,
            order=self._order,
            nodes=self.nodes,
            records=self.records,
            progress=self.progress,
            requests=self.requests,
            clocks=self.clocks,
            control=self.control,
            poller=self.poller,
            under_way=self.under_way,
            alert_actions=self.alert_actions,
            due_ticks=due_ticks,
        )

    def run(self) -> str:
        """Set up, train and shut down; return the end status (a key of EXIT_CODES). Failures are reported, not
        raised."""
        begin = time.perf_counter()
        status = EndStatus.FAILED
        try:
            self._set_up(begin)
            status = self.loop.run()
            if status != EndStatus.COMPLETE:
                self.nodes.call_hooks("at_end", status=status)
            self.under_way.cut_short("the run ends")
        except PartFailed as error:  # not the environment's fault: a restart may get further
            self._report(error, trace=bool(error.trace))
        except (EnvironmentFault, DataError) as error:
            status = EndStatus.ENVIRONMENT
            self._report(error, exit_code=EXIT_CODES[status], trace=False)
        except (NonFinite, NothingLearned, PlanMismatch) as error:
            self._report(error, trace=False)
        except BaseException as error:  # also CheckpointException, which is no Exception
            if (fault := limit_fault(error)) is not None:
                status = EndStatus.ENVIRONMENT
                self._report(fault, exit_code=EXIT_CODES[status], trace=False)
            else:
                self._report(error, trace=not lost_a_peer(error))
        self.under_way.drop()
        self.poller.close()
        if (watch := self.resources.get("directory_watch")) is not None:
            with suppress(OSError, EnvironmentFault):
                watch.look()
            watch.close()
        with suppress(EnvironmentFault):
            self.records.flush(self.progress.step)  # records of a failure between two steps
        with suppress(EnvironmentFault):  # a full disk also takes no refusals
            self.control.close()
        self.beat.at("shutdown.drain", lasting=True)
        try:
            self._report_end(status, begin)
        except EnvironmentFault as error:
            if not _failed(status):
                status = EndStatus.ENVIRONMENT
                self._report(error, exit_code=EXIT_CODES[status], trace=False)
        self._shut_down(failed=_failed(status))
        self.requests.rest()
        return status

    # set-up ---------------------------------------------------------------------------------------------------------

    def _set_up(self, begin: float) -> None:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        begun = starting_point(self.plan, self.records.directory)
        start, self.notifier.total = begun.entry, total_steps(self.plan, begun)
        self.records.event(
            RunStartEvent(
                step=0,
                run_id=self.records.directory.name,
                plan_id=self.plan.id,
                name=self.plan.name,
                world_size=self._world,
                device=choose_device(self.plan.node("setup.bootstrap").args["device"], local_rank).type,
                steps=self.notifier.total,
                attempt=self.records.attempts() + 1,
                resumed_step=start.step if start else None,
                directory=str(self.records.directory),
                rewards=not self.plan.architecture.has_logits,
            )
        )
        if self.records.first:
            folder, commands = self.records.directory / "control", self.plan.timeline.commands
            inbox = Inbox(folder=folder, commands=commands, records=self.records, progress=self.progress)
            if self.records.speaks:
                inbox.sweep(self._begun)
            self.control.inbox = inbox
            self.poller.looks["commands"] = lambda: inbox.look() if self.records.speaks else None
            self.resources["directory_watch"] = watch = DirectoryWatch(
                self.records.directory, self.plan, self.records, self._warn, self._stop
            )
            self.poller.looks["the run directory"] = watch.look
        load_ops()
        for node in self._order:
            if node.kind in ("setup", "collate"):
                self._execute(node)
                if node.op == "setup.bootstrap":
                    self.nodes.call_hooks("before_init")
        self.nodes.call_hooks("after_init")
        self._under_way = ""
        self.requests.listen()
        # Peaks during set-up, such as loading a checkpoint, do not count against the plan of a step.
        most, seconds = forget_peak(self.resources["rank"].device), time.perf_counter() - begin
        self.records.event(SetupDoneEvent(step=self.progress.step, seconds=seconds, memory_bytes=most))

    def _execute(self, node: Node) -> None:
        """Run a set-up node, time it, and store its result."""
        self._under_way = node.id
        self.beat.at(node.id, lasting=True)
        self.records.event(SetupBeginEvent(step=self.progress.step, node=node.id))
        began = time.perf_counter()
        result = self.nodes.act(node)
        if gives := op_of(node).gives:
            self.resources[gives] = result
        seconds = time.perf_counter() - began
        self.records.event(SetupEvent(step=self.progress.step, node=node.id, seconds=seconds, detail=node.does))

    # the end --------------------------------------------------------------------------------------------------------

    def _report_end(self, status: str, begin: float) -> None:
        """Report the end of the run. Raises EnvironmentFault if the disk takes no record."""
        failed, code = _failed(status), EXIT_CODES[status]
        saver = self.resources.get("saver")
        report_end(self.records, self.requests, self.notifier, saver, exit_code=code, failed=failed)
        if not failed:  # of a failure only the launcher knows when everything is reported
            loss = last.loss if (last := self.nodes.last_step) and isfinite(last.loss) else None
            early = status in (EndStatus.STOPPED, EndStatus.INTERRUPTED)
            reason = (self.loop.reason or "a command: stop") if early else ""
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
        if lost_a_peer(error) and "sigint" in self.requests.received:
            time.sleep(SECOND_INTERRUPT_SECONDS)  # which also ends this rank, silently
        place, more = self._under_way or f"step {self.progress.step + 1}", ""
        self.nodes.call_failure_hooks(error)
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

    def _stop(self, reason: str) -> None:
        """Save and stop as soon as all ranks have agreed."""
        self.loop.reason = self.loop.reason or reason
        assert self.control.inbox is not None
        self.control.inbox.ask("moved", ControlWord.STOP)

    def _warn(self, message: str) -> None:
        self.records.warn(message, step=self.progress.step)

    def _shut_down(self, *, failed: bool) -> None:
        for node in self._order:
            # After a failure the other ranks may be gone: waiting for them would only hide the failure.
            if node.kind == "shutdown" and not (failed and node.op == "shutdown.leave"):
                self.beat.at(node.id, lasting=True)
                self.nodes.act(node)
        watch: Watchdog | None = self.resources.get("watch")
        if watch is not None:
            watch.close()


def _failed(status: str) -> bool:
    return EXIT_CODES[status] in (1, 3)
