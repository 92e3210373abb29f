"""The last record of a run, written by the launcher where no rank could: after a failure, or when all were killed."""

import time
from signal import SIGINT, Signals
from typing import Any

from ...planner.stops import SIGNALS
from ..control.signals import EVENTS
from ..errors import EnvironmentFault
from ..observation.lines import JsonLines, records_since
from ..outcome import EXIT_CODES, STATUS_OF_SIGNAL
from ..workspace import Workspace
from .fall import Fall, stopped_early
from .launch import Ended


def conclude(
    workspace: Workspace, said: list[dict[str, Any]], ended: Ended, fall: Fall, *, report: str = ""
) -> dict[str, Any]:
    """Write the causes that nobody has told, then how the run has ended; returns that last record.

    said: the events of the last gang. report: what is to be said of the gangs before it.
    """
    lines = JsonLines(workspace.directory / "events.jsonl")
    failures = [e for e in said if e["event"] == "failure"]
    step = max((m["step"] for m in records_since(workspace.directory / "metrics.jsonl", 0)), default=0)
    # A stop request that comes before the loop has begun finds nothing to save; one that no rank answered is a failure.
    begun = any(e["event"] == "setup_done" for e in said)
    early = "interrupted" if ended.at_once else stopped_early(said, ended)
    if early is not None:
        reason = "Ctrl-C was pressed a second time" if ended.at_once else f"{fall.reason} before the first step"
        numbers = {int(SIGINT)} if ended.at_once else {-code for code in ended.failures.values() if code < 0}
        return _stopped(lines, step, early, numbers, reason)
    asked = STATUS_OF_SIGNAL.get(ended.signal)
    untold = untold_causes(said, ended)
    status = asked if asked and not (failures or untold or begun) else "failed"
    if ended.signal is not None and status != "failed":
        reason = f"{ended.who} received {Signals(ended.signal).name} {ended.when}"
        return _stopped(lines, step, status, {ended.signal}, reason)
    log = workspace.directory / "logs" / workspace.attempt
    told: list[tuple[int | None, str]] = [
        (rank, f"{reason}{_unsaid(ended.failures[rank])}; its output is in {log}") for rank, reason in untold.items()
    ]
    if not failures and not told:
        told = [(None, "the ranks were killed before they had saved" if ended.signal else fall.reason)]
    if report:
        told.append((None, report))
    for rank, error in told:
        found = rank is not None and ended.failures.get(rank) == EXIT_CODES["environment"]
        fields = {"exit_code": 3, "code": "X706"} if found else {"exit_code": 1}
        failures.append(event("failure", step, rank=rank, error=error, traceback="", **fields))
        lines.write(failures[-1])
    code = 3 if any(e["exit_code"] == 3 for e in failures) else EXIT_CODES[status]
    return _end(lines, step, status, code, fall.reason)


def _unsaid(exit_code: int) -> str:
    """What may be the matter with a rank that found a fault of its environment, and could not write that down."""
    return ", and could not record the reason: is the disk full?" if exit_code == EXIT_CODES["environment"] else ""


def _stopped(lines: JsonLines, step: int, status: str, numbers: set[int], reason: str) -> dict[str, Any]:
    """Of several signals the one is named that a rank would have answered first."""
    name = min((EVENTS[Signals(number)] for number in numbers), key=SIGNALS.index)
    lines.write(event("signal", step, name=name, reason=reason))
    return _end(lines, step, status, EXIT_CODES[status], reason)


def _end(lines: JsonLines, step: int, status: str, exit_code: int, reason: str) -> dict[str, Any]:
    end = event("run_end", step, status=status, exit_code=exit_code, seconds=None, loss=None, reason=reason)
    lines.write(end)
    lines.close()
    return end


def untold_causes(said: list[dict[str, Any]], ended: Ended) -> dict[int, str]:
    """Rank → how it ended, of those that had no chance to tell, or have left without a word.

    Where all ranks have agreed on a failure a single rank speaks for all: that others left as well is no news. Where
    ranks were found to stand still one failure names all of them, and the rest was ended because of them.
    """
    if any(e["event"] == "stuck" for e in said):
        return {}
    failures = [e for e in said if e["event"] == "failure"]
    spoken = {e["rank"] for e in failures}
    agreed = any(e.get("agreed") for e in failures)
    causes = {rank: reason for rank, reason in ended.causes().items() if rank not in spoken}
    return {rank: reason for rank, reason in causes.items() if not agreed or ended.failures[rank] < 0}


def report_fault(workspace: Workspace, step: int, fault: EnvironmentFault) -> list[dict[str, Any]]:
    """Write what is wrong with the environment where the launcher itself has found it; the records that say so."""
    lines = JsonLines(workspace.directory / "events.jsonl")
    said = event("failure", step, rank=None, error=str(fault), traceback="", exit_code=3, code=fault.code)
    lines.write(said)
    lines.close()
    return [said]


def event(kind: str, step: int, **fields: object) -> dict[str, Any]:
    """A record of `events.jsonl`."""
    return {"time": time.time(), "step": step, "event": kind, **fields}
