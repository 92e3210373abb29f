"""`xtrain run` as a rank of another launcher (torchrun, srun).

The first rank compiles the plan, opens the run directory, shows the run and reports its end. The other ranks wait until
they are admitted, and read the plan from the directory.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from traceback import print_exc
from typing import TYPE_CHECKING

from xtrain.cli.following import Following
from xtrain.cli.verb import Refused, refusals
from xtrain.records.events import FailureEvent, events_since
from xtrain.records.names import EVENTS_FILE, EndStatus
from xtrain.runtime.base.errors import EXIT_CODES, EnvironmentFault, exit_process
from xtrain.runtime.base.json_lines import size_of
from xtrain.runtime.base.process import (
    RESTART,
    check_rank_variables,
    is_restart,
    launcher_id,
    note_of_rank,
    write_cause,
)
from xtrain.runtime.jobs.launch import Ended, exit_code_of, failures_in, find_failure_cause

if TYPE_CHECKING:
    from xtrain.plan.plan import Plan
    from xtrain.planner.load import Compiled
    from xtrain.runtime.jobs.rendezvous import RendezvousHost
    from xtrain.runtime.store.run_directory import RunDirectory


def say_who() -> int | None:
    """Report settings taken from the environment before slow work starts. Return an exit code if the rank variables are
    invalid."""
    try:
        with refusals():
            check_rank_variables()
    except Refused as refused:
        return refused.show()
    if note := note_of_rank():
        print(f"note: {note}", file=sys.stderr, flush=True)
    return None


def is_first() -> bool:
    return os.environ["RANK"] == "0"


def lead(
    compiled: "Callable[[], Compiled]", ui: str | None, notes: "Callable[[RunDirectory], None]", *, verbose: bool
) -> int:
    """Run the first rank. compiled: returns the plan or raises Refused. notes: reports the state of an opened
    directory."""
    from xtrain.runtime.jobs.rendezvous import RendezvousHost

    host: RendezvousHost | None = None
    try:
        with refusals():
            # Before slow work: the other ranks wait there, and notice if this rank ends.
            host = RendezvousHost.open() if int(os.environ["WORLD_SIZE"]) > 1 else None
        found = compiled()
        with refusals():
            plan = _checked(found)
            workspace = _opened(plan, found.resolved_text, found.directory)
    except Refused as refused:
        code = refused.show()
        write_cause(str(refused))
        if host is not None:
            host.send_away(code)
        exit_process(code)
        return code
    notes(workspace)
    return First(workspace, plan, host).run(ui, verbose=verbose)


def join() -> int:
    """Run any rank but the first. It prints nothing, as the first rank does, but writes its own records. Reports a
    missing first rank."""
    from xtrain.runtime.jobs.rendezvous import CannotTakePart, RendezvousMember, SentAway
    from xtrain.runtime.loop.worker import run_rank
    from xtrain.runtime.observe.provenance import planned
    from xtrain.runtime.observe.stopping import end_at_once

    end_at_once()
    try:
        member = RendezvousMember.arrive()
        try:
            directory = Path(member.answer["directory"])
            plan = planned(directory, member.answer["plan"])
            _check_place(plan)
        except EnvironmentFault as fault:
            member.cannot(fault.code, str(fault))
            raise SentAway(3) from None
        os.environ.update(member.answer["environment"])
        store = member.ready()
    except SentAway as away:
        write_cause("", of_first=True)
        exit_process(away.code)
        return away.code
    except CannotTakePart as fault:
        said = f"error[{fault.code}]: {fault}"
        print(said, file=sys.stderr)
        write_cause(said)
        exit_process(3)
        return 3
    status = run_rank(plan, directory, store=store)
    if EXIT_CODES[status]:
        write_cause("", of_first=True)
    exit_process(EXIT_CODES[status])
    return EXIT_CODES[status]


def _checked(found: "Compiled") -> "Plan":
    """Return the plan for the ranks that were started. Raises EnvironmentFault."""
    from xtrain.runtime.base.packages import check_packages
    from xtrain.runtime.jobs.restarts import plan_of_started
    from xtrain.runtime.loop.preflight import check_groups

    assert found.plan is not None
    check_groups(found.plan)
    plan = plan_of_started(found.plan, int(os.environ["WORLD_SIZE"]))
    _check_place(plan)
    check_packages(plan)
    return plan


def _check_place(plan: "Plan") -> None:
    """Check this machine's ranks and devices against the plan, on one rank per machine. Raises EnvironmentFault."""
    from xtrain.runtime.base.hosts import check_own_name
    from xtrain.runtime.base.limits import check_limits
    from xtrain.runtime.loop.preflight import check_devices, check_world, device_of, find_devices

    here = os.environ.get("LOCAL_WORLD_SIZE")
    is_local_first = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"
    count = int(here) if here else 1
    check_limits(plan, device_of(plan), count)
    if is_local_first:
        check_world(plan, int(os.environ["WORLD_SIZE"]), int(here) if here else None)
        if plan.launch["nodes"] > 1:
            check_own_name(os.environ["MASTER_ADDR"])
    if here and is_local_first:
        for remark in check_devices(plan, find_devices(plan, int(here))):
            print(f"warning[W707]: {remark}", file=sys.stderr)


def _opened(plan: "Plan", text: str, directory: Path | None) -> "RunDirectory":
    """Open the run directory. Decides for all ranks whether this start resumes an earlier start of the same launcher,
    because elastic agents count restarts only of their own ranks."""
    from xtrain.runtime.observe.provenance import launcher_before, read_code
    from xtrain.runtime.store.run_directory import locate, open_workspace

    directory = directory or locate(plan, read_code(Path(plan.spec).resolve().parent))
    counted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0
    again = is_restart() or counted or launcher_before(directory) == launcher_id()
    os.environ[RESTART] = str(int(again))
    return open_workspace(plan, text, directory)


class First:
    """The first rank, which admits the others, runs, and writes the run's end."""

    def __init__(self, workspace: "RunDirectory", plan: "Plan", host: "RendezvousHost | None") -> None:
        self._workspace, self._plan, self._host = workspace, plan, host
        self._events = workspace.directory / EVENTS_FILE
        self._begin = size_of(self._events)
        self._following: Following | None = None
        self._ending = Lock()

    def run(self, ui: str | None, *, verbose: bool) -> int:
        from xtrain.runtime.jobs.rendezvous import CannotTakePart
        from xtrain.runtime.loop.worker import run_rank
        from xtrain.runtime.observe.stopping import answer_at_once
        from xtrain.tui.lines.view import choose_ui

        directory = self._workspace.directory
        answer_at_once(self._stop)
        self._following = Following(self._workspace, choose_ui(ui, sys.stdout), verbose=verbose)
        with self._following:
            try:
                environment = {RESTART: os.environ[RESTART]}
                answer = {"directory": str(directory), "plan": self._plan.id, "environment": environment}
                store = self._host.admit(**answer) if self._host else None
            except CannotTakePart as fault:
                from xtrain.runtime.jobs.restarts import report_fault

                report_fault(self._workspace, 0, fault)
                status = EndStatus.ENVIRONMENT
            else:
                status = run_rank(self._plan, directory, self._give_up, store=store, answered=True)
            self._end(Ended())
        exit_process(EXIT_CODES[status])
        return EXIT_CODES[status]

    def _stop(self, number: int) -> None:
        """End after a signal before training, perhaps while this rank waits for missing ones. Runs in any thread."""
        self._end_and_leave(Ended(signal=number, who="the first rank"))

    def _give_up(self, code: int) -> None:
        self._end_and_leave(Ended(), code)

    def _end_and_leave(self, ended: "Ended", code: int | None = None) -> None:
        """End the run and the process, from any thread. A failure here must also end the process, because no other code
        would."""
        left = 1
        try:
            end = self._end(ended)
            left = end if code is None else code
            if self._following is not None:
                self._following.close()
        except Exception:
            print_exc()
        finally:
            exit_process(left)

    def _end(self, ended: "Ended") -> int:
        """Write the run's end, unless a rank has; return the exit code. The first of several threads does it; the
        others wait forever, because it also ends the process."""
        from xtrain.runtime.jobs.restarts import conclude

        self._ending.acquire()
        said = events_since(self._events, self._begin)
        cause = find_failure_cause(said, ended)
        if cause is None:
            return exit_code_of(said)
        try:
            exit_code = conclude(self._workspace, said, ended, cause)
        except EnvironmentFault as fault:  # the disk accepts no record
            print(f"error[{fault.code}]: {fault}", file=sys.stderr)
            write_cause(f"error[{fault.code}]: {fault}")
            return EXIT_CODES[EndStatus.ENVIRONMENT]
        if exit_code in (EXIT_CODES[EndStatus.FAILED], EXIT_CODES[EndStatus.ENVIRONMENT]):
            failures = failures_in(events_since(self._events, self._begin))
            write_cause("\n".join(_cause(failure) for failure in failures if not failure.lost) or cause.reason)
        return exit_code


def _cause(failure: "FailureEvent") -> str:
    code = f"error[{failure.code}]: " if failure.code else "error: "
    who = "" if failure.rank in (None, 0) or failure.agreed else f"rank {failure.rank}: "
    return f"{code}{who}{failure.error}"
