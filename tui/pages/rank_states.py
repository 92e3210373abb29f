"""Which ranks somebody should look at, and a sentence about each: gone, stuck, silent, slow."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import field, frozen
from numpy import ndarray

from xtrain.records.end_status import EndStatus
from xtrain.records.run_events import StuckEvent
from xtrain.records.start_events import RunStartEvent
from xtrain.tui.event_text import cause
from xtrain.tui.model.ranks import OneRank, Straggler
from xtrain.tui.pages.node_times import StepTime
from xtrain.tui.pages.rank_figures import age, seconds_ago
from xtrain.tui.words import brief

if TYPE_CHECKING:
    from xtrain.tui.model.board import Board

# The worse, the greater: of the ranks of a cell the worst is shown.
FINE, UNKNOWN, SLOW, OVER, SILENT, STUCK, GONE = range(7)
WORDS = {
    FINE: "", UNKNOWN: "no heartbeat", SLOW: "slow", OVER: "over plan", SILENT: "silent", STUCK: "stuck", GONE: "gone",
}  # fmt: skip
# Sentences name this many ranks of a kind, and count the others.
NAMED = 3
# A node is named if it causes this share of a rank's delay.
NAMED_SHARE = 0.25


@frozen(kw_only=True)
class Blame:
    """Report of a `stuck` event on a rank. state: `stopped`, `ended`, `frozen`, `stuck`, `unknown`."""

    state: str
    node: str
    place: str
    seconds: float | None


@frozen(kw_only=True)
class States:
    """States of the ranks. of: state of every rank. blamed, failed: reports of the run, by rank. slow: stragglers, by
    rank."""

    of: ndarray = field(eq=False, repr=False)
    blamed: Mapping[int, Blame] = field(factory=dict)
    failed: Mapping[int, str] = field(factory=dict)
    slow: Mapping[int, Straggler] = field(factory=dict)

    def troubled(self) -> list[int]:
        """Return the ranks with a problem, the worst first."""
        found = np.flatnonzero(self.of >= SLOW)
        return [int(rank) for rank in found[np.argsort(-self.of[found], kind="stable")]]


def states(board: "Board") -> States:
    """Return the current states of all ranks; a run that ended normally has none to examine."""
    ranks = tuple(board.ranks)
    found = np.full(len(ranks), FINE)
    failed = {f.rank: cause(f) for f in board.run.failures if f.rank is not None and not f.lost}
    if board.life.state == "ended" and board.life.status not in ("", EndStatus.FAILED):
        return States(of=found)
    if board.run.restarting:  # the known ranks have ended
        return States(of=np.full(len(ranks), UNKNOWN))
    blamed = _blamed(board)
    # Who waits, or is not there any more, is not slow.
    slow = {each.rank: each for each in board.ranks.stragglers()} if board.life.state == "training" else {}
    for place, rank in enumerate(ranks):
        if rank.rank in failed:
            found[place] = GONE
        elif rank.rank in blamed:
            found[place] = GONE if blamed[rank.rank].state == "ended" else STUCK
        elif board.life.state != "ended":
            found[place] = _of_pulse(rank, rank.rank in slow)
    return States(of=found, blamed=blamed, failed=failed, slow=slow)


def _of_pulse(rank: OneRank, slow: bool) -> int:
    if rank.pulse == "gone":
        return GONE
    if rank.pulse == "idle":
        return STUCK
    if rank.pulse == "silent":
        return SILENT
    if rank.pulse == "unknown" and not rank.last:
        return UNKNOWN
    return SLOW if slow else FINE


def _blamed(board: "Board") -> dict[int, Blame]:
    """Return the reports of this start's `stuck` events, the latest of each rank."""
    found: dict[int, Blame] = {}
    for entry in reversed(board.events.entries):
        if isinstance(entry.event, RunStartEvent):
            break
        said = entry.event
        if isinstance(said, StuckEvent):
            blame = Blame(state=said.state, node=said.last_node or said.node, place=said.place, seconds=said.seconds)
            for rank in said.ranks:
                found.setdefault(rank, blame)
    return found


def sentences(board: "Board", found: States, times: Mapping[str, StepTime]) -> list[tuple[str, int]]:
    """Return sentences on ranks, each with its state, the worst first; one sentence if all is well."""
    ranks, axes = tuple(board.ranks), real_axes(board)
    said: list[tuple[str, int]] = []
    for state in (GONE, STUCK, SILENT):
        numbers = [int(rank) for rank in np.flatnonzero(found.of == state)]
        if len(numbers) > NAMED:
            words = {GONE: "are gone", STUCK: "make no progress", SILENT: "send no heartbeat any more"}[state]
            said.append((f"{len(numbers):,} ranks {words}: {listed(numbers)}{common(ranks, numbers)}", state))
        else:
            said += [(_trouble(ranks[rank], found, state, axes), state) for rank in numbers]
    slow = sorted(found.slow.values(), key=lambda each: -each.share)
    slow = [each for each in slow if found.of[each.rank] == SLOW]
    said += [(slow_words(ranks[each.rank], each, times, axes), SLOW) for each in slow[:NAMED]]
    if len(slow) > NAMED:
        said.append(
            (f"{len(slow) - NAMED:,} more ranks are slow: {listed([each.rank for each in slow[NAMED:]])}", SLOW)
        )
    said = said or [(_well(board, ranks), FINE)]
    if (old := board.ranks.seconds_old) and not board.life.over:
        said.append((f"heartbeats are up to {seconds_ago(old)} old: it takes that long to read them all", FINE))
    return said


def _well(board: "Board", ranks: Sequence[OneRank]) -> str:
    if board.life.state == "ended":
        return f"the run has ended: {board.life.in_words}"
    if board.life.state == "lost":
        return f"the run is lost: {board.life.why or 'its processes are gone'}"
    if board.life.state == "paused":
        return "the run is paused: all ranks wait"
    if board.run.restarting:
        return "the ranks are being restarted"
    if not any(rank.beat or rank.last for rank in ranks):
        return "no rank has sent a heartbeat yet"
    if not any(rank.step_seconds is not None for rank in ranks):
        return "all ranks make progress; no step has been logged yet"
    if len(ranks) == 1:
        return "the rank makes progress"
    if not board.ranks.measured:
        return "all ranks make progress; slow ranks are not detected (GPUs, compiled blocks)"
    return "all ranks make progress, and none is slower than the others"


def _trouble(rank: OneRank, found: States, state: int, axes: Sequence[str]) -> str:
    """Return the sentence on a rank with a problem; the fault comes first, as a narrow screen may cut the rest."""
    return f"rank {rank.rank:,} {_fault(rank, found, state)}{where(rank, axes)}"


def _fault(rank: OneRank, found: States, state: int) -> str:
    if rank.rank in found.failed:
        return f"failed: {(found.failed[rank.rank].strip() or 'without a word').splitlines()[0]}"
    if (blame := found.blamed.get(rank.rank)) is not None:
        what = {"ended": "has ended", "stopped": "is stopped", "frozen": "is frozen"}.get(blame.state, "is stuck")
        since = f" for {seconds_ago(blame.seconds)}" if blame.seconds is not None else ""
        at = f" at {blame.place}" if blame.place else ""
        return f"{what}{since}{f' in {blame.node}' if blame.node else ''}{at}"
    node = f" in {rank.beat.node}" if rank.beat and rank.beat.node else ""
    seen = f", last seen{node}" if node else ""
    if state == GONE:
        return f"is gone{seen}"
    if state == SILENT:
        return f"has sent no heartbeat for {seconds_ago(rank.seconds_silent)}{seen}"
    since = age(rank)
    at = f" at {rank.beat.place}" if rank.beat and rank.beat.place else ""
    return f"makes no progress{f' for {seconds_ago(since)}' if since is not None else ''}{node}{at}"


def slow_words(rank: OneRank, straggler: Straggler, times: Mapping[str, StepTime], axes: Sequence[str]) -> str:
    """Return a sentence on a straggler, such as `rank 5 works 31% longer than the others: 560 ms of a step against 430
    ms, 110 ms more in step.optimizer (fsdp 5, host n3)`. The node is named if it causes a large part of the delay."""
    said = (
        f"rank {rank.rank:,} works {straggler.share:.0%} longer than the others: {brief(straggler.seconds)} of a step "
        f"against {brief(straggler.median)}"
    )
    node, more = worst_node(rank, times)
    if node and more >= NAMED_SHARE * (straggler.seconds - straggler.median):
        said += f", {brief(more)} more in {node}"
    return said + where(rank, axes)


def worst_node(rank: OneRank, times: Mapping[str, StepTime]) -> tuple[str, float]:
    """Return the node with the largest excess over the median rank, and the excess in seconds."""
    more = {node: own - times[node].median for node, own in rank.node_seconds.items() if node in times}
    node = max(more, key=more.__getitem__, default="")
    return node, more.get(node, 0.0)


def real_axes(board: "Board") -> tuple[str, ...]:
    """Return the axes of the mesh with more than one rank."""
    return tuple(axis.name for axis in board.planned.axes if axis.size > 1) if board.planned else ()


def where(rank: OneRank, axes: Sequence[str]) -> str:
    """Return the coordinates on `axes`, and the host: ` (fsdp 5, tp 1, host n3)`."""
    parts = [f"{name} {rank.coordinates[name]}" for name in axes if name in rank.coordinates]
    parts += [f"host {rank.beat.host}"] if rank.beat and rank.beat.host else []
    return f" ({', '.join(parts)})" if parts else ""


def common(ranks: Sequence[OneRank], numbers: Sequence[int]) -> str:
    """Return what only these ranks have in common: `, all on host n3`, `, all with pp 2`."""
    chosen = [ranks[rank] for rank in numbers]
    hosts = {rank.beat.host if rank.beat else "" for rank in chosen}
    others = {rank.beat.host if rank.beat else "" for rank in ranks}
    if len(hosts) == 1 and len(others) > 1 and (host := hosts.pop()):
        return f", all on host {host}"
    for axis in chosen[0].coordinates:
        places = {rank.coordinates.get(axis) for rank in chosen}
        if len(places) == 1 and any(rank.coordinates.get(axis) not in places for rank in ranks):
            return f", all with {axis} {places.pop()}"
    return ""


def listed(numbers: Sequence[int], most: int = 6) -> str:
    """Return numbers as ranges, at most `most` of them: `3, 5–7, 12 and 40 more`."""
    ranges: list[list[int]] = []
    for value in sorted(numbers):
        if ranges and value == ranges[-1][1] + 1:
            ranges[-1][1] = value
        else:
            ranges.append([value, value])
    shown = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high in ranges[:most]]
    left = sum(high - low + 1 for low, high in ranges[most:])
    return ", ".join(shown) + (f" and {left:,} more" if left else "")


def current_step(rank: OneRank) -> int | None:
    """Return the current step of a rank, counted from 1; else the last step it reported."""
    return rank.beat.step if rank.beat else rank.step
