"""Why a gang of ranks has ended before its time, put together from its records and from what the launcher saw."""

import signal
from typing import Any

from attrs import frozen

from ...planner.units import seconds_text
from ..outcome import EXIT_CODES, STATUS_OF_SIGNAL
from .launch import Ended

Event = dict[str, Any]


@frozen(kw_only=True)
class Fall:
    """A gang that has not come to its end.

    reason: one line. ranks: those it began with, as far as that is known. again: it is nothing that all ranks have
    agreed on, so that another gang may get further. begun: its set-up was done.
    """

    reason: str
    ranks: tuple[int, ...]
    again: bool
    begun: bool


def fall_of(said: list[Event], ended: Ended) -> Fall | None:
    """What to make of the events of one gang and of how its processes ended; None if ranks have ended the run."""
    if any(event["event"] == "run_end" for event in said):
        return None
    failures = [event for event in said if event["event"] == "failure"]
    final = ended.signal is not None or any(event["exit_code"] == 3 or event.get("agreed") for event in failures)
    final = final or EXIT_CODES["environment"] in ended.failures.values()
    final = final or stopped_early(said, ended) is not None or _was_to_stop(said)
    reason, ranks = _first_cause(said, failures, ended)
    begun = any(event["event"] == "setup_done" for event in said)
    return Fall(reason=reason, ranks=ranks, again=not final, begun=begun)


def _was_to_stop(said: list[Event]) -> bool:
    """Whether all ranks had agreed to stop: whoever asked for that does not want another gang."""
    asked = any(event["event"] in ("signal", "stop") or event.get("stopping") for event in said)
    return asked or any(
        event["event"] == "control" and event.get("command") == "stop" and event.get("state") != "refused"
        for event in said
    )


def stopped_early(said: list[Event], ended: Ended) -> str | None:
    """How the run ends if ranks were asked to stop by signals of their own before there was anything to save."""
    signals = {-code for code in ended.failures.values() if code < 0}
    own = [event for event in said if event["event"] == "failure" and not event.get("lost")]
    told = {event["rank"] for event in said if event["event"] == "failure"}
    left = [rank for rank, code in ended.failures.items() if code > 0 and rank not in told]
    # Who left by itself is the reason why the agent has sent SIGTERM to the others.
    if own or left or not signals or not signals <= STATUS_OF_SIGNAL.keys():
        return None
    if any(event["event"] in ("setup_done", "stuck") for event in said):
        return None
    return "interrupted" if signal.SIGINT in signals else "stopped"


def _first_cause(said: list[Event], failures: list[Event], ended: Ended) -> tuple[str, tuple[int, ...]]:
    """What came first: ranks that stood still, those that were killed, those that raised, those that merely left.

    SIGTERM is what the agent sends to all others once a rank has ended.
    """
    stuck = next((event for event in said if event["event"] == "stuck"), None)
    if stuck is not None and stuck.get("ranks"):
        ranks = tuple(stuck["ranks"])
        where = f" in {stuck['node']}" if stuck.get("node") else ""
        return f"{_names(ranks)} made no progress{where} for {seconds_text(stuck['seconds'])}", ranks
    ends = ended.causes()
    ended_by = {rank: -code for rank, code in ended.failures.items() if code < 0}
    killed = {rank: ends[rank] for rank, number in ended_by.items() if number != signal.SIGTERM}
    if killed:
        return _each(killed), tuple(sorted(killed))
    raised = [event for event in failures if event["rank"] is not None and not event.get("lost")]
    own = {event["rank"]: f"failed: {_first_line(event['error'])}" for event in raised}
    if own:
        return _each(own), tuple(sorted(own))
    left = {rank: ends[rank] for rank in ends if rank not in ended_by and rank not in {e["rank"] for e in failures}}
    if not left:
        left = {rank: ends[rank] for rank in ended_by}
    if left:
        return _each(left), tuple(sorted(left))
    if failures:
        return _first_line(failures[0]["error"]), ()
    return "the ranks exited without reporting a reason", ()


def _each(reasons: dict[int, str]) -> str:
    """`rank 1 was killed by SIGKILL`; ranks with the same reason together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, reason in sorted(reasons.items()):
        ranks_of.setdefault(reason, []).append(rank)
    parts = []
    for reason, ranks in ranks_of.items():
        verb = ("was " if len(ranks) == 1 else "were ") if reason.startswith("killed") else ""
        parts.append(f"{_names(tuple(ranks))} {verb}{reason}")
    return "; ".join(parts)


def _names(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"ranks {shown}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
