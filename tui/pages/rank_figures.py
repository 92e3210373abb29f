"""Figures of ranks, their heat levels, and sentences about ranks that are lost, stuck, silent or slow."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from attrs import field, frozen
from numpy import ndarray

from xtrain.records.events import StuckEvent
from xtrain.records.names import EndStatus
from xtrain.records.training_events import RunStartEvent
from xtrain.text.units import brief, consecutive, duration, size
from xtrain.tui.event_text import cause
from xtrain.tui.model.board import Board
from xtrain.tui.model.life import OneRank, Straggler
from xtrain.tui.model.planned import Planned, PlannedAxis
from xtrain.tui.pages.node_times import StepTime, StepTimes

LEVELS = 10


@frozen(kw_only=True)
class Scale:
    """Ten levels between nine ascending edges: a value on level n has reached n edges. words: formats a value."""

    edges: tuple[float, ...]
    words: Callable[[float], str] = field(eq=False, repr=False)

    def levels(self, values: ndarray) -> ndarray:
        """Return the level of each value, 0 to 9; -1 for NaN."""
        found = np.searchsorted(np.asarray(self.edges), np.nan_to_num(values), side="right")
        return np.where(np.isnan(values), -1, found)

    def bounds(self, groups: int) -> list[str]:
        """Return the formatted lower edges of `groups` equally wide groups of levels, without the first."""
        step = LEVELS // groups
        return [self.words(self.edges[step * group - 1]) for group in range(1, groups)]


def between(low: float, high: float, words: Callable[[float], str]) -> Scale:
    """Return a scale of ten levels of equal width from `low` to `high`."""
    width = (high - low) / LEVELS or 1.0
    return Scale(edges=tuple(low + width * number for number in range(1, LEVELS)), words=words)


def around(values: ndarray, words: Callable[[float], str], spread: float = 0.1) -> Scale:
    """Return a scale from the smallest to the largest value, at least `spread` of the median to both sides: ranks that
    hardly differ look alike."""
    known = values[~np.isnan(values)]
    if not len(known):
        return between(0.0, 1.0, words)
    middle = float(np.median(known))
    low = min(float(known.min()), middle * (1 - spread))
    return between(low, max(float(known.max()), middle * (1 + spread)), words)


def from_zero(values: ndarray, words: Callable[[float], str], least: float) -> Scale:
    """Return a scale from zero to the largest value, at least to `least`."""
    known = values[~np.isnan(values)]
    most = float(known.max()) if len(known) else 0.0
    return between(0.0, max(most, least) or 1.0, words)


@frozen(kw_only=True)
class Heat:
    """Cells of a grid: each shows the worst of its ranks, with its state, value and level.

    rank: -1 for a cell without ranks. state: the highest of its ranks. The worst rank is the one in the worst state; in
    equal states, the one with the greatest value.
    """

    rank: ndarray = field(eq=False, repr=False)
    state: ndarray = field(eq=False, repr=False)
    value: ndarray = field(eq=False, repr=False)
    level: ndarray = field(eq=False, repr=False)


def heat(cell_of: ndarray, num_cells: int, values: ndarray, states: ndarray, scale: Scale) -> Heat:
    """Return the cells from the value (NaN where unknown) and the state of every rank."""
    filled = np.where(np.isnan(values), -np.inf, values)
    # Ascending by cell, state and value, of equal ones the lowest rank last: the last one of each cell is its worst.
    order = np.lexsort((-np.arange(len(values)), filled, states, cell_of))
    cells = cell_of[order]
    last = np.append(cells[1:] != cells[:-1], True) if len(cells) else np.empty(0, dtype=bool)
    worst, place = order[last], cells[last]
    rank = np.full(num_cells, -1)
    state, value = np.zeros(num_cells, dtype=np.int64), np.full(num_cells, np.nan)
    rank[place], state[place], value[place] = worst, states[worst], values[worst]
    return Heat(rank=rank, state=state, value=value, level=scale.levels(value))


def numbers(found: Sequence[float | None]) -> ndarray:
    """Return the values as an array, NaN for None."""
    return np.array([np.nan if value is None else value for value in found], dtype=np.float64)


# Less than this share of the median step counts as little, whatever the other ranks have.
LITTLE = 0.05
# Ages at which progress is a level older, in seconds.
AGES = (2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@frozen
class Figure:
    """Figure of a rank. title: its name; says: its meaning in a sentence; of: its value, None where a rank has not sent
    it."""

    key: str
    title: str
    says: str
    of: Callable[[OneRank], float | None] = field(eq=False, repr=False)
    words: Callable[[float], str] = field(eq=False, repr=False)


def age(rank: OneRank) -> float | None:
    """Return the seconds without progress: counted by the rank itself, plus the time since its last heartbeat."""
    return None if rank.beat is None else rank.beat.idle + rank.seconds_silent


def seconds_ago(seconds: float) -> str:
    """Return an age without needless fractions: `3 s`, `2m05s`."""
    return f"{seconds:.0f} s" if seconds < 59.5 else duration(seconds)


STEP = Figure("step", "step time", "seconds of a step, averaged since the last record", lambda r: r.step_seconds, brief)
WORK = Figure(
    "work", "own work",
    "seconds of a step without communication, over the newest records: the others wait for the rank with the most",
    lambda rank: rank.busy_seconds, brief,
)  # fmt: skip
DATA = Figure("data", "data wait", "seconds of a step spent waiting for rows", lambda rank: rank.data_seconds, brief)
COMMUNICATION = Figure(
    "communication", "communication", "seconds of a step spent in communication, waiting for other ranks included",
    lambda rank: rank.comm_seconds, brief,
)  # fmt: skip
MEMORY = Figure("memory", "memory", "peak memory of a rank in bytes", lambda rank: rank.memory_bytes, size)
PROGRESS = Figure("progress", "heartbeat", "seconds without progress: since the last mark of a rank", age, seconds_ago)
FIGURES = (STEP, WORK, DATA, COMMUNICATION, MEMORY, PROGRESS)


def planned_memory(plan: Planned | None, device: str) -> dict[int, int]:
    """Return the planned tensor bytes of a rank, by pipeline coordinate; empty for a CPU, where a process holds more
    than the plan counts."""
    if plan is None or device == "cpu":
        return {}
    return {found.pp: found.allocated_bytes for found in plan.classes if found.allocated_bytes}


def expected(rank: OneRank, memory: Mapping[int, int]) -> int | None:
    """Return the planned bytes of one rank, from `planned_memory`."""
    return memory.get(rank.coordinates.get("pp", 0))


@frozen(kw_only=True)
class Measured:
    """One figure of all ranks. values: NaN where unknown; against_plan: values are shares of the planned value."""

    figure: Figure
    values: ndarray = field(eq=False, repr=False)
    scale: Scale = field(eq=False, repr=False)
    against_plan: bool = False

    @property
    def median(self) -> float | None:
        known = self.values[~np.isnan(self.values)]
        return float(np.median(known)) if len(known) else None

    def words(self, value: float | None) -> str:
        return "–" if value is None or value != value else self.scale.words(value)


def measure(ranks: Sequence[OneRank], figure: Figure, memory: Mapping[int, int]) -> Measured:
    """Return the figure of every rank, with a suitable scale. memory: see `planned_memory`."""
    values = numbers([figure.of(rank) for rank in ranks])
    if figure is PROGRESS:
        return Measured(figure=figure, values=values, scale=Scale(edges=AGES, words=figure.words))
    if figure is MEMORY:
        if memory:
            shares = values / numbers([expected(rank, memory) for rank in ranks])
            scale = between(0.0, 1.0, lambda share: f"{share:.0%}")
            return Measured(figure=figure, values=shares, scale=scale, against_plan=True)
        return Measured(figure=figure, values=values, scale=around(values, figure.words))
    if figure in (DATA, COMMUNICATION):
        steps = numbers([rank.step_seconds for rank in ranks])
        known = steps[~np.isnan(steps)]
        least = LITTLE * float(np.median(known)) if len(known) else 0.0
        return Measured(figure=figure, values=values, scale=from_zero(values, figure.words, least))
    return Measured(figure=figure, values=values, scale=around(values, figure.words))


def device_of(board: Board) -> str:
    """Return `cpu` or `cuda`, the device of the run; empty before its start record."""
    return board.run.start.device if board.run.start else ""


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


def states(board: Board) -> States:
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


def _blamed(board: Board) -> dict[int, Blame]:
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


def sentences(board: Board, found: States, times: Mapping[str, StepTime]) -> list[tuple[str, int]]:
    """Return sentences on ranks, each with its state, the worst first; one sentence if all is well."""
    ranks, axes = tuple(board.ranks), real_axes(board)
    said: list[tuple[str, int]] = []
    for state in (GONE, STUCK, SILENT):
        numbers = [int(rank) for rank in np.flatnonzero(found.of == state)]
        if len(numbers) > NAMED:
            words = {GONE: "are gone", STUCK: "make no progress", SILENT: "send no heartbeat any more"}[state]
            said.append((f"{len(numbers):,} ranks {words}: {listed(numbers)}{common(ranks, numbers)}", state))
        else:
            # The fault comes first, as a narrow screen may cut the rest.
            faulty = [(number, ranks[number]) for number in numbers]
            said += [(f"rank {n:,} {_fault(rank, found, state)}{where(rank, axes)}", state) for n, rank in faulty]
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


def _well(board: Board, ranks: Sequence[OneRank]) -> str:
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


def real_axes(board: Board) -> tuple[str, ...]:
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
    ranges = consecutive(sorted(numbers))
    shown = [f"{low:,}" if low == high else f"{low:,}–{high:,}" for low, high in ranges[:most]]
    left = sum(high - low + 1 for low, high in ranges[most:])
    return ", ".join(shown) + (f" and {left:,} more" if left else "")


def current_step(rank: OneRank) -> int | None:
    """Return the current step of a rank, counted from 1; else the last step it reported."""
    return rank.beat.step if rank.beat else rank.step


@frozen(kw_only=True, eq=False)
class RankFacts:
    """Facts of the Ranks screen. axes, expert_axes: of the mesh, outer to inner. real: names of the axes with a size
    above 1. machines: their number. memory: planned bytes by pipeline coordinate. said: sentences, each with the
    state it is about. over: the run has ended."""

    ranks: tuple[OneRank, ...] = field(repr=False)
    states: States
    axes: tuple[PlannedAxis, ...] = ()
    expert_axes: tuple[PlannedAxis, ...] = ()
    real: tuple[str, ...] = ()
    machines: int = 1
    memory: Mapping[int, int] = field(factory=dict)
    times: Mapping[str, StepTime] = field(factory=dict, repr=False)
    said: tuple[tuple[str, int], ...] = ()
    over: bool = False
    _measured: dict[str, Measured] = field(factory=dict, init=False, repr=False)

    def figure(self, figure: Figure) -> Measured:
        """Return a figure of all ranks; computed on first use."""
        if figure.key not in self._measured:
            self._measured[figure.key] = measure(self.ranks, figure, self.memory)
        return self._measured[figure.key]

    @property
    def experts(self) -> bool:
        """True if experts use the ranks as a different mesh."""
        return any(axis.size > 1 for axis in self.expert_axes if axis.name == "ep")


class RankFactRows:
    """Cached facts of a board; node times are computed again only after a new report."""

    def __init__(self) -> None:
        self._times = StepTimes()

    def of(self, board: Board) -> RankFacts | None:
        """Return the facts of `board`; None while no ranks are known."""
        if not len(board.ranks):
            return None
        plan, found, times = board.planned, states(board), self._times.of(board.ranks)
        machines = {rank.beat.host if rank.beat else rank.machine for rank in board.ranks}
        return RankFacts(
            ranks=tuple(board.ranks),
            axes=plan.axes if plan else (),
            expert_axes=plan.expert_axes if plan else (),
            real=real_axes(board),
            machines=len(machines),
            memory=planned_memory(plan, device_of(board)),
            states=found,
            times=times,
            said=tuple(sentences(board, found, times)),
            over=board.life.over,
        )
