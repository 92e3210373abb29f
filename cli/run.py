"""`xtrain run SPEC|PLAN`: compile, show, launch, follow; under torchrun the same command is a rank."""

import argparse
import os
import signal
import sys
import time
from types import FrameType
from typing import TYPE_CHECKING

from xtrain.cli.following import Following
from xtrain.cli.verb import (
    Refused,
    add_certificate,
    add_node,
    add_sets,
    counted,
    demand_certificate,
    ranks,
    report,
    say_own_code,
)
from xtrain.dsl.diagnostics.diagnostic import Diagnostics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from xtrain.plan.plan import Plan
    from xtrain.planner.load import Compiled
    from xtrain.runtime.base.hosts import NodePlace
    from xtrain.runtime.store.run_directory import RunDirectory

VIEWS = ("tui", "console", "plain", "json", "none")


HELP = "train a spec or a reviewed plan"
DESCRIPTION = (
    "Compile a spec (or take a plan.json unchanged) and train on local ranks. The same command resumes a stopped run."
)
EPILOG = "example: xtrain run specs/quickstart.xtrain --world 2 --set experiment.budget='100 steps'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="a .xtrain spec or a plan.json")
    parser.add_argument("--world", type=ranks, metavar="N", help="number of ranks (default: as the spec's axes need)")
    add_sets(parser)
    add_node(parser)
    parser.add_argument(
        "--accept-drift", action="store_true", help="run a plan.json although its spec or xtrain has changed"
    )
    add_certificate(parser)
    parser.add_argument(
        "--ui",
        choices=VIEWS,
        help="how to show the run: tui opens the dashboard (default: console on a terminal, else plain)",
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="show every set-up node and unknown amount (console and plain)"
    )


def run(arguments: argparse.Namespace) -> int:
    from xtrain.cli.run_sweep import drive

    def placed(plan: "Plan") -> "NodePlace | None":
        from xtrain.runtime.base.hosts import node_place

        return node_place(plan, arguments.node, arguments.meet)

    if (status := drive(arguments)) is not None:
        return status
    return start(lambda: _compiled(arguments), arguments.ui, placed=placed, verbose=arguments.verbose)


def start(
    compiled: "Callable[[], Compiled]",
    ui: str | None,
    opened: "Callable[[Path], None]" = lambda directory: None,
    placed: "Callable[[Plan], NodePlace | None]" = lambda plan: None,
    *,
    verbose: bool = False,
) -> int:
    """Train the plan of `compiled` on ranks started here, or as one rank of another launcher.

    compiled: raises Refused. opened: called with the run directory by the launcher of the ranks. placed: returns this
    machine's place among several, None for a single one.
    """
    from xtrain.plan.graph import groups_node
    from xtrain.runtime.base.process import BEGAN, is_worker, note_of_rank
    from xtrain.runtime.jobs.launch import OF_NODE

    def ready() -> "Compiled":
        found = compiled()
        _stop_at_once()
        return found

    os.environ[BEGAN] = str(time.monotonic())  # for the ranks too
    if is_worker():
        from xtrain.cli.started import is_first, join, lead, say_who
        from xtrain.runtime.base.process import die_with_launcher

        if (code := say_who()) is not None:
            return code
        if {"TORCHELASTIC_RUN_ID", OF_NODE} & os.environ.keys():
            die_with_launcher(os.getppid())
        return lead(ready, ui, _print_notes, verbose=verbose) if is_first() else join()
    if note := note_of_rank():
        print(f"note: {note}", file=sys.stderr, flush=True)
    found = ready()
    assert found.plan is not None
    place = placed(found.plan)
    if place is not None and groups_node(found.plan) is None:
        return _run_node(found.plan, place)
    if place is not None and place.index:
        return _run_follower(found.plan, place)
    return _run_launcher(found, ui, opened, place, verbose=verbose)


def _compiled(arguments: argparse.Namespace) -> "Compiled":
    """Compile the spec and report its diagnostics. Raises Refused."""
    from xtrain.planner.load import plan_from_path

    if arguments.ui == "tui" and (reason := _no_dashboard()):
        raise Refused(2, f"xtrain run: no dashboard can be opened here: {reason}")
    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world, counted)
    if not _is_said_by_a_rank(compiled.plan, arguments):
        compiled.report_to(sys.stderr)
    if compiled.plan is None:
        raise _refused(compiled.diagnostics)
    if compiled.plan.serves:
        raise Refused(2, "xtrain run: this is a server spec; start it with `xtrain serve`")
    demand_certificate(compiled.plan, arguments.require_certificate)
    return _settled(compiled, arguments)


def _is_said_by_a_rank(plan: "Plan | None", arguments: argparse.Namespace) -> bool:
    """Return True if another process reports the diagnostics: the first rank of several machines (which runs this
    command too), or with replica groups the launcher of the first machine."""
    from xtrain.plan.graph import groups_node
    from xtrain.runtime.base.hosts import in_slurm_step, node_index
    from xtrain.runtime.base.process import is_worker

    if plan is None or is_worker() or plan.launch["nodes"] == 1:
        return False
    if groups_node(plan) is not None:
        return node_index(arguments.node) > 0
    return arguments.node is not None or in_slurm_step()


def _refused(diagnostics: Diagnostics) -> Refused:
    """Return a refusal whose errors are already shown."""
    errors = Diagnostics()
    for each in diagnostics.errors:
        errors.add(each)
    return Refused(2, errors.render(color=False).rstrip(), shown=True)


def _stop_at_once() -> None:
    """Exit at once on a stop request until the ranks are started: there is nothing to save."""
    from xtrain.runtime.base.errors import EXIT_CODES, STATUS_OF_SIGNAL
    from xtrain.runtime.observe.stopping import stop_signals

    def stop(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        os.write(2, f"xtrain run: stopped by {name} before the ranks were started\n".encode())
        os._exit(EXIT_CODES[STATUS_OF_SIGNAL[number]])

    for number in stop_signals():
        signal.signal(number, stop)


def _no_dashboard() -> str:
    """Return why a run started here cannot have a dashboard, and what to do instead; empty if it can."""
    from xtrain.runtime.base.process import is_worker

    if is_worker():
        return "this process is one rank of several; use --ui plain, and `xtrain watch` in another terminal"
    from xtrain.tui.board.terminal import why_not

    reason = why_not()
    return reason and f"{reason}; use --ui plain or --ui json, and `xtrain watch` in a terminal"


def _settled(compiled: "Compiled", arguments: argparse.Namespace) -> "Compiled":
    """Return the plan with a note of how it was made. Raises Refused for a saved plan if something has changed
    since."""
    from attrs import evolve

    from xtrain.planner.load import is_saved

    plan = compiled.plan
    assert plan is not None
    if not is_saved(arguments.spec):
        if arguments.accept_drift:
            raise Refused(2, "xtrain run: --accept-drift is for a saved plan, not for a spec")
        from xtrain.plan.serialise import signed

        return evolve(compiled, plan=signed(plan, arguments.sets, arguments.world))
    from xtrain.planner.review.changes import accepted, find_drift

    found = find_drift(plan)
    if arguments.accept_drift:
        found = accepted(found)
    if found.has_errors or not _is_said_by_a_rank(plan, arguments):
        report(found)
    if found.has_errors:
        raise _refused(found)
    if not _is_said_by_a_rank(plan, arguments):
        say_own_code(plan, arguments.spec)
    return evolve(compiled, directory=_lies_in(plan, arguments))


def _lies_in(plan: "Plan", arguments: argparse.Namespace) -> "Path | None":
    """Return the run directory of a saved plan if the directory is a copy of another one; None for the original, or a
    plan elsewhere."""
    from pathlib import Path

    from xtrain.runtime.observe.provenance import ENVIRONMENT, read_code
    from xtrain.runtime.store.run_directory import locate

    folder = Path(arguments.spec).resolve().parent
    if not (folder / ENVIRONMENT).is_file():
        return None
    named = locate(plan, read_code(Path(plan.spec).resolve().parent))
    if named.resolve() == folder:
        return None
    if not _is_said_by_a_rank(plan, arguments):
        print(f"note: the plan in the run directory {folder} is used instead of {named}", file=sys.stderr)
    return folder


def _run_node(plan: "Plan", place: "NodePlace") -> int:
    """Run the ranks of this machine, each with this same command."""
    from xtrain.runtime.jobs.launch import run_node

    nodes, each = plan.launch["nodes"], plan.launch["ranks_per_node"]
    return run_node(place, nodes, each, [sys.executable, "-P", "-m", "xtrain", *sys.argv[1:]])


def _run_follower(plan: "Plan", place: "NodePlace") -> int:
    """Run the ranks of this machine under the launcher of the first machine."""
    from xtrain.runtime.base.hosts import check_own_name
    from xtrain.runtime.jobs.machines import follow_first_node
    from xtrain.runtime.loop.preflight import check_machine

    def check() -> None:
        check_own_name(place.host)
        _remark(check_machine(plan, plan.mesh.ranks_per_node))

    print(
        f"node {place.index}: its ranks are started by node 0, at {place.host}:{place.port}, which shows the run",
        flush=True,
    )
    return follow_first_node(place, plan.id, check, plan.launch["stop_deadline_seconds"])


def _run_launcher(
    compiled: "Compiled", ui: str | None, opened: "Callable[[Path], None]", place: "NodePlace | None", *, verbose: bool
) -> int:
    """Run the launcher of this machine. place: its place if it is the first of several machines."""
    from xtrain.cli.following import Dashboard
    from xtrain.planner.review.page import render_summary
    from xtrain.records.names import EndStatus
    from xtrain.runtime.base.errors import EXIT_CODES
    from xtrain.runtime.base.hosts import check_own_name
    from xtrain.runtime.jobs.machines import FirstNode, OneNode
    from xtrain.runtime.jobs.restarts import RestartLoop, fewer_ranks
    from xtrain.runtime.loop.preflight import check_machine, check_one_machine
    from xtrain.runtime.store.run_directory import open_workspace
    from xtrain.text.units import plural
    from xtrain.tui.lines.view import choose_ui

    plan = compiled.plan
    assert plan is not None
    opens, ui = ui == "tui", choose_ui("console" if ui == "tui" else ui, sys.stdout)
    if place is None:
        check_one_machine(plan)
    else:
        check_own_name(place.host)
    if smaller := fewer_ranks(plan, again=False):
        wanted, fewer = plan.mesh.world_size, smaller.mesh.world_size
        _remark([f"there are fewer devices than {wanted} ranks: {plural(fewer, 'rank')} are started instead"])
        plan = smaller
    machines = OneNode() if place is None else FirstNode.open(plan, place)
    code = EXIT_CODES[EndStatus.ENVIRONMENT]
    try:
        _remark(check_machine(plan, plan.mesh.ranks_per_node))
        workspace = open_workspace(plan, compiled.resolved_text, compiled.directory)
        _print_notes(workspace)
        opened(workspace.directory)
        if ui in ("console", "plain"):
            print(render_summary(workspace.plan, said=tuple(compiled.diagnostics), verbose=verbose), flush=True)
        with Dashboard(workspace) if opens else Following(workspace, ui, verbose=verbose):
            code = RestartLoop(plan=plan, workspace=workspace, machines=machines).run()
    finally:
        machines.close(code)
    return code


def _print_notes(workspace: "RunDirectory") -> None:
    """Report changes since the run's last start, files that were moved aside, and the run's last step."""
    from xtrain.runtime.store.beginning import finished_step

    step, total = finished_step(workspace.directory), workspace.plan.timeline.steps
    if step is not None and total is not None and step >= total:
        print(
            f"note: this run has finished: step {step:,} of {total:,} is done, and nothing is trained; a larger "
            "experiment.budget continues it",
            file=sys.stderr,
        )
    if workspace.aside:
        print(f"note: {workspace.aside.text()}", file=sys.stderr)
    if workspace.unread:
        print(
            f"note: the code of the checkout could not be read ({workspace.unread}); the run is "
            f"{workspace.directory}, whatever code it was started with; to choose another: --set workspace.run=NAME",
            file=sys.stderr,
        )
    if workspace.changes:
        print("note: changed since the last start of this run:", file=sys.stderr)
        for text in workspace.changes:
            print(f"  {text}", file=sys.stderr)
    if workspace.other is not None:
        print(f"note: {workspace.other.text()}", file=sys.stderr)


def _remark(remarks: list[str]) -> None:
    for remark in remarks:
        print(f"warning[W707]: {remark}", file=sys.stderr)
