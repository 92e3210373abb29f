"""Why a worker group has ended before its time, put together from its records and from what the launcher saw."""

import signal

from attrs import frozen

from xtrain.planner.units import seconds_text
from xtrain.records.control_words import ControlState, ControlWord
from xtrain.records.end_status import EndStatus
from xtrain.records.event import Event
from xtrain.records.run_events import ControlEvent, FailureEvent, RunEndEvent, SignalEvent, StopEvent, StuckEvent
from xtrain.records.start_events import SetupDoneEvent
from xtrain.runtime.launch.launch import Ended
from xtrain.runtime.outcome import EXIT_CODES, STATUS_OF_SIGNAL


@frozen(kw_only=True)
class FailureCause:
    """A worker group that has not come to its end.

    reason: one line. ranks: those it began with, as far as that is known. again: it is nothing that all ranks have
    agreed on, so that a restart may get further. begun: its set-up was done.
    """

    reason: str
    ranks: tuple[int, ...]
    again: bool
    begun: bool


def find_failure_cause(said: list[Event], ended: Ended) -> FailureCause | None:
    """The cause, by the events of a worker group and how its processes ended; None if ranks have ended the run."""
    if any(isinstance(event, RunEndEvent) for event in said):
        return None
    failures = failures_in(said)
    final = ended.signal is not None or any(failure.exit_code == 3 or failure.agreed for failure in failures)
    final = final or EXIT_CODES[EndStatus.ENVIRONMENT] in ended.failures.values()
    final = final or stopped_early(said, ended) is not None or _was_to_stop(said)
    reason, ranks = _first_cause(said, failures, ended)
    begun = any(isinstance(event, SetupDoneEvent) for event in said)
    return FailureCause(reason=reason, ranks=ranks, again=not final, begun=begun)


def _was_to_stop(said: list[Event]) -> bool:
    """Whether all ranks had agreed to stop: whoever asked for that does not want a restart."""
    return any(
        isinstance(event, SignalEvent | StopEvent)
        or (isinstance(event, FailureEvent) and event.stopping)
        or (isinstance(event, ControlEvent) and _stops(event))
        for event in said
    )


def _stops(event: ControlEvent) -> bool:
    return event.command == ControlWord.STOP and event.state != ControlState.REFUSED


def failures_in(said: list[Event]) -> list[FailureEvent]:
    return [event for event in said if isinstance(event, FailureEvent)]


def exit_code_of(said: list[Event]) -> int:
    """That of the end that ranks have written."""
    return next(event.exit_code or 0 for event in reversed(said) if isinstance(event, RunEndEvent))


def stopped_early(said: list[Event], ended: Ended) -> str | None:
    """How the run ends if ranks were asked to stop by signals of their own before there was anything to save."""
    signals = {-code for code in ended.failures.values() if code < 0}
    failures = failures_in(said)
    own = [failure for failure in failures if not failure.lost]
    reported = {failure.rank for failure in failures}
    left = [rank for rank, code in ended.failures.items() if code > 0 and rank not in reported]
    # Who left by itself is the reason why the agent has sent SIGTERM to the others.
    if own or left or not signals or not signals <= STATUS_OF_SIGNAL.keys():
        return None
    if any(isinstance(event, SetupDoneEvent | StuckEvent) for event in said):
        return None
    return EndStatus.INTERRUPTED if signal.SIGINT in signals else EndStatus.STOPPED


def _first_cause(said: list[Event], failures: list[FailureEvent], ended: Ended) -> tuple[str, tuple[int, ...]]:
    """What came first: ranks that stood still, those that were killed, those that raised, those that merely left.

    SIGTERM is what the agent sends to all others once a rank has ended.
    """
    stuck = next((event for event in said if isinstance(event, StuckEvent)), None)
    if stuck is not None and stuck.ranks:
        ranks = tuple(stuck.ranks)
        where = f" in {stuck.node}" if stuck.node else ""
        return f"{_names(ranks)} made no progress{where} for {seconds_text(stuck.seconds or 0.0)}", ranks
    ends = ended.causes()
    ended_by = {rank: -code for rank, code in ended.failures.items() if code < 0}
    killed = {rank: ends[rank] for rank, number in ended_by.items() if number != signal.SIGTERM}
    if killed:
        return _each(killed), tuple(sorted(killed))
    raised = [(failure.rank, failure.error) for failure in failures if not failure.lost]
    own = {rank: f"failed: {_first_line(error)}" for rank, error in raised if rank is not None}
    if own:
        return _each(own), tuple(sorted(own))
    left = {rank: ends[rank] for rank in ends if rank not in ended_by and rank not in {e.rank for e in failures}}
    if not left:
        left = {rank: ends[rank] for rank in ended_by}
    if left:
        return _each(left), tuple(sorted(left))
    if failures:
        return _first_line(failures[0].error), ()
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
