"""`xtrain run SPEC|PLAN`: compile, show, launch, follow; the same command under torchrun is a rank."""

import argparse
import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import add_sets, ranks

if TYPE_CHECKING:
    from ..planner.load import Compiled
    from ..runtime.launch import Ended
    from ..runtime.workspace import Workspace

STATUS_OF_SIGNAL: dict[int | None, str] = {
    signal.SIGTERM: "stopped",
    signal.SIGHUP: "stopped",
    signal.SIGINT: "interrupted",
}
VIEWS = ("console", "plain", "json", "none")


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
    parser.add_argument("--ui", choices=VIEWS, help="how to show the run (default: console on a terminal, else plain)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..planner.load import plan_from_path

    compiled = plan_from_path(arguments.spec, arguments.sets, arguments.world)
    if not compiled.report_to(sys.stderr):
        return 2
    compiled = _settled(compiled, arguments)
    if compiled is None:
        return 2
    # Until the agent takes over, a stop request finds nothing that would have to be saved.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: os._exit(75))
    from ..runtime.data.errors import DataError
    from ..runtime.errors import EnvironmentFault
    from ..runtime.launch import is_worker

    try:
        return _run_worker(compiled, arguments.ui) if is_worker() else _run_launcher(compiled, arguments.ui)
    except EnvironmentFault as fault:
        print(f"error[{fault.code}]: {fault}", file=sys.stderr)
        return 3
    except DataError as error:
        print(f"error[X507]: {error}", file=sys.stderr)
        return 3


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
    from ..runtime.launch import launch
    from ..runtime.preflight import check_machine, check_one_machine
    from ..runtime.workspace import open_workspace
    from ..tui.view import choose_ui

    plan = compiled.plan
    assert plan is not None
    ui = choose_ui(ui, sys.stdout)
    check_one_machine(plan)
    _remark(check_machine(plan, plan.mesh.world_size))
    workspace = open_workspace(plan, compiled.resolved_text)
    if ui in ("console", "plain"):
        print(render_summary(plan), flush=True)
    if workspace.elsewhere:
        run_id = workspace.elsewhere[-1].name
        print(
            f"note: the code has changed since this experiment was last run, so it begins anew; to go on from there "
            f"under the changed code: --set workspace.run={run_id}",
            file=sys.stderr,
        )
    events = workspace.directory / "events.jsonl"
    begin = _size(events)
    with _Following(workspace, ui):
        args = plan.node("setup.bootstrap").args
        ended = launch(
            workspace.directory,
            workspace.attempt,
            ranks=plan.mesh.world_size,
            stop_seconds=args["stop_deadline_seconds"],
        )
        end = _conclude(workspace, _records_since(events, begin), ended)
    return end["exit_code"]


def _remark(remarks: list[str]) -> None:
    for remark in remarks:
        print(f"warning[W707]: {remark}", file=sys.stderr)


def _conclude(workspace: "Workspace", said: list[dict], ended: "Ended") -> dict:
    """The run's last record, written here where no rank could: after a failure, or when all were killed."""
    from ..runtime.outcome import EXIT_CODES
    from ..runtime.records import JsonLines

    end = next((e for e in reversed(said) if e["event"] == "run_end"), None)
    if end is not None:
        return end
    lines = JsonLines(workspace.directory / "events.jsonl")
    failures = [e for e in said if e["event"] == "failure"]
    spoken = {e["rank"] for e in failures}
    step = max((m["step"] for m in _records_since(workspace.directory / "metrics.jsonl", 0)), default=0)
    for rank, reason in ended.causes().items():
        if rank not in spoken:
            log = workspace.directory / "logs" / workspace.attempt
            error = f"{reason}; what it printed is under {log}"
            lines.write(_event("failure", step, rank=rank, error=error, traceback="", exit_code=1))
            failures.append({"exit_code": 1})
    # A stop request that comes before the loop has begun finds nothing to save; one that no rank answered is a failure.
    begun = any(e["event"] == "setup_done" for e in said)
    status = "failed" if failures or begun else STATUS_OF_SIGNAL.get(ended.signal, "failed")
    if status == "failed" and not failures:
        error = "the ranks were ended before they had saved"
        lines.write(_event("failure", step, rank=None, error=error, traceback="", exit_code=1))
    exit_code = 3 if any(e["exit_code"] == 3 for e in failures) else EXIT_CODES[status]
    end = _event("run_end", step, status=status, exit_code=exit_code, seconds=None, loss=None)
    lines.write(end)
    lines.close()
    return end


def _run_worker(compiled: "Compiled", ui: str | None) -> int:
    """One rank that someone else has started; the first one keeps the directory and shows the run."""
    from ..runtime.errors import EnvironmentFault
    from ..runtime.launch import Ended
    from ..runtime.outcome import EXIT_CODES
    from ..runtime.preflight import check_devices, check_world, find_devices
    from ..runtime.worker import leave, run_rank
    from ..runtime.workspace import locate, open_workspace, read_code
    from ..tui.view import choose_ui

    plan = compiled.plan
    assert plan is not None
    first, here = os.environ["RANK"] == "0", os.environ.get("LOCAL_WORLD_SIZE")
    speaks = os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"  # one rank of a machine
    try:
        check_world(plan, int(os.environ["WORLD_SIZE"]), int(here) if here else None)
    except EnvironmentFault:
        if speaks:
            raise
        return 3
    if here and speaks:
        _remark(check_devices(plan, find_devices(plan, int(here))))
    if not first:
        directory = locate(plan, read_code(Path(plan.spec).resolve().parent))
        leave(EXIT_CODES[run_rank(plan, directory)])
    workspace = open_workspace(plan, compiled.resolved_text)
    begin = _size(workspace.directory / "events.jsonl")
    with _Following(workspace, choose_ui(ui, sys.stdout)):
        status = run_rank(plan, workspace.directory)
        _conclude(workspace, _records_since(workspace.directory / "events.jsonl", begin), Ended())
    leave(EXIT_CODES[status])
    return EXIT_CODES[status]


class _Following:
    """Shows the run from its files, in a thread, until the block ends."""

    def __init__(self, workspace: "Workspace", ui: str) -> None:
        from ..tui.view import follow

        directory = workspace.directory
        self._finished = threading.Event()
        offsets = {name: _size(directory / name) for name in ("metrics.jsonl", "events.jsonl")}
        options = {"ui": ui, "offsets": offsets, "finished": self._finished}
        self._thread = threading.Thread(target=follow, args=(directory,), kwargs=options, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._finished.set()
        self._thread.join(timeout=10)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _records_since(path: Path, offset: int) -> list[dict]:
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(offset)
        lines = file.read().splitlines()
    found = []
    for line in lines:
        with suppress(ValueError):  # a torn line, of a disk that was full
            found.append(json.loads(line))
    return found


def _event(event: str, step: int, **fields: object) -> dict:
    return {"time": time.time(), "step": step, "event": event, **fields}
