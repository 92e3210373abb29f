"""`xtrain run SPEC|PLAN`: compile, show, launch, follow; the same command under torchrun is a rank."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_sets, ranks
from .counting import counted
from .following import Following

if TYPE_CHECKING:
    from ..planner.load import Compiled
    from ..runtime.workspace import Workspace

VIEWS = ("tui", "console", "plain", "json", "none")


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "run",
        help="train as a spec or a reviewed plan says",
        description="Compile a spec (or take a plan.json as it is) and train on local ranks. A run that was stopped "
        "goes on when the same command is given again.",
        epilog="example: xtrain run specs/quickstart.xtrain --world 2 --set experiment.budget='100 steps'",
    )
    parser.add_argument("spec", help="a .xtrain spec or a plan.json")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: what the spec's axes need)")
    add_sets(parser)
    parser.add_argument(
        "--accept-drift", action="store_true", help="run a plan.json although its spec or xtrain has changed since"
    )
    parser.add_argument(
        "--ui",
        choices=VIEWS,
        help="how to show the run: tui opens the dashboard (default: console on a terminal, else plain)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..planner.load import plan_from_path

    os.environ["XTRAIN_BEGAN"] = str(time.time())  # what launch.time_limit counts from, also for the ranks
    if arguments.ui == "tui" and (reason := _no_dashboard()):
        if os.environ.get("RANK", "0") == "0":
            print(f"xtrain run: no dashboard can be opened here: {reason}", file=sys.stderr)
        return 2
    # Of ranks that someone else has started one looks: what it finds wrong ends all of them.
    looks = os.environ.get("RANK", "0") == "0"
    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world, counted if looks else None)
    if not compiled.report_to(sys.stderr):
        return 2
    compiled = _settled(compiled, arguments)
    if compiled is None:
        return 2
    # Until the agent takes over, a stop request finds nothing that would have to be saved.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: os._exit(75))
    from ..runtime.data.errors import DataError
    from ..runtime.errors import EnvironmentFault
    from ..runtime.gangs.launch import is_worker

    try:
        return _run_worker(compiled, arguments.ui) if is_worker() else _run_launcher(compiled, arguments.ui)
    except EnvironmentFault as fault:
        print(f"error[{fault.code}]: {fault}", file=sys.stderr)
        return 3
    except DataError as error:
        print(f"error[X507]: {error}", file=sys.stderr)
        return 3


def _no_dashboard() -> str:
    """Why a run that is started here cannot be shown in a dashboard, and what to do instead; empty if it can."""
    from ..runtime.gangs.launch import is_worker

    if is_worker():
        return "this process is one rank of several; use --ui plain, and `xtrain watch` in another terminal"
    from ..tui.board.terminal import why_not

    reason = why_not()
    return reason and f"{reason}; use --ui plain or --ui json, and `xtrain watch` in a terminal"


def _settled(compiled: "Compiled", arguments: argparse.Namespace) -> "Compiled | None":
    """The plan with a note of how it was made; None if it was saved, and something has changed since."""
    from attrs import evolve

    from ..planner.load import is_saved

    plan = compiled.plan
    assert plan is not None
    if not is_saved(arguments.spec):
        if arguments.accept_drift:
            print("xtrain run: --accept-drift is for a saved plan, and this is a spec", file=sys.stderr)
            return None
        from ..planner.changes.made import signed

        return evolve(compiled, plan=signed(plan, arguments.sets, arguments.world))
    from ..planner.changes.drift import accepted, find_drift
    from ..planner.pages.text import shows_color

    found = find_drift(plan)
    if arguments.accept_drift:
        found = accepted(found)
    if found.has_errors or os.environ.get("RANK", "0") == "0":  # of warnings one rank is enough
        sys.stderr.write(found.render(color=shows_color(sys.stderr)))
    return None if found.has_errors else compiled


def _run_launcher(compiled: "Compiled", ui: str | None) -> int:
    from ..planner.pages.render import render_summary
    from ..planner.units import plural
    from ..runtime.gangs.preflight import check_machine, check_one_machine
    from ..runtime.gangs.restarts import Gangs
    from ..runtime.gangs.worlds import fewer_ranks
    from ..runtime.workspace import open_workspace
    from ..tui.lines.view import choose_ui
    from .dashboard import Dashboard

    plan = compiled.plan
    assert plan is not None
    opens, ui = ui == "tui", choose_ui("console" if ui == "tui" else ui, sys.stdout)
    check_one_machine(plan)
    if smaller := fewer_ranks(plan, again=False):
        wanted, fewer = plan.mesh.world_size, smaller.mesh.world_size
        _remark([f"there are fewer devices than {wanted} ranks need: {plural(fewer, 'rank')} are started"])
        plan = smaller
    _remark(check_machine(plan, plan.mesh.world_size))
    workspace = open_workspace(plan, compiled.resolved_text)
    _tell_changes(workspace)
    if ui in ("console", "plain"):
        print(render_summary(plan), flush=True)
    _tell_elsewhere(workspace)
    with Dashboard(workspace) if opens else Following(workspace, ui):
        return Gangs(plan=plan, workspace=workspace).run()


def _tell_changes(workspace: "Workspace") -> None:
    """Say what is not as it was when the run was last started, and what had to make way."""
    if workspace.aside:
        print(f"note: {workspace.aside.text()}", file=sys.stderr)
    if workspace.same:
        print(
            f"note: {workspace.same} is a run of the same experiment, whose paths are written in other words; this one "
            f"begins anew; to go on with that: --set workspace.run={workspace.same.name}",
            file=sys.stderr,
        )
    if workspace.changes:
        print("note: since the last start of this run has changed:", file=sys.stderr)
        for text in workspace.changes:
            print(f"  {text}", file=sys.stderr)


def _tell_elsewhere(workspace: "Workspace") -> None:
    """Say where this experiment was run last, if that was under other code."""
    if workspace.elsewhere is not None:
        print(
            f"note: the code has changed since this experiment was last run, so it begins anew; to go on from there "
            f"under the changed code: --set workspace.run={workspace.elsewhere.name}",
            file=sys.stderr,
        )


def _remark(remarks: list[str]) -> None:
    for remark in remarks:
        print(f"warning[W707]: {remark}", file=sys.stderr)


def _run_worker(compiled: "Compiled", ui: str | None) -> int:
    """One rank that someone else has started; the first one keeps the directory and shows the run."""
    from ..runtime.errors import EnvironmentFault
    from ..runtime.gangs.conclusion import conclude
    from ..runtime.gangs.fall import fall_of
    from ..runtime.gangs.launch import Ended
    from ..runtime.gangs.preflight import check_devices, check_world, find_devices
    from ..runtime.gangs.worlds import plan_of_started
    from ..runtime.observation.lines import records_since, size_of
    from ..runtime.observation.packages import check_packages
    from ..runtime.outcome import EXIT_CODES
    from ..runtime.provenance.code import read_code
    from ..runtime.worker import leave, run_rank
    from ..runtime.workspace import locate, open_workspace
    from ..tui.lines.view import choose_ui

    plan = compiled.plan
    assert plan is not None
    first, here = os.environ["RANK"] == "0", os.environ.get("LOCAL_WORLD_SIZE")
    speaks = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"  # one rank of a machine
    try:
        plan = plan_of_started(plan, int(os.environ["WORLD_SIZE"]))
        check_world(plan, int(os.environ["WORLD_SIZE"]), int(here) if here else None)
    except EnvironmentFault:
        if speaks:
            raise
        return 3
    if first:
        check_packages(plan)
    if here and speaks:
        _remark(check_devices(plan, find_devices(plan, int(here))))
    if not first:
        directory = locate(plan, read_code(Path(plan.spec).resolve().parent))
        leave(EXIT_CODES[run_rank(plan, directory)])
    workspace = open_workspace(plan, compiled.resolved_text)
    _tell_changes(workspace)
    _tell_elsewhere(workspace)
    events = workspace.directory / "events.jsonl"
    begin = size_of(events)
    following = Following(workspace, choose_ui(ui, sys.stdout))

    def end() -> None:
        said = records_since(events, begin)
        if fall := fall_of(said, Ended()):
            conclude(workspace, said, Ended(), fall)

    def give_up(code: int) -> None:
        end()
        following.close()
        leave(code)

    with following:
        status = run_rank(plan, workspace.directory, give_up)
        end()
    leave(EXIT_CODES[status])
    return EXIT_CODES[status]
