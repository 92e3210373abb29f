"""What somebody should look at now: what the run itself has raised, and what only an onlooker can see."""

from typing import Literal

from attrs import frozen

from xtrain.tui.model.life import Life
from xtrain.tui.model.ranks import OneRank, Ranks
from xtrain.tui.state import RunState
from xtrain.tui.words import duration, plural

# With more ranks than these, only some are named.
NAMED = 8
# An observation must last this long: a run that is killed loses its ranks one after the other.
SETTLE_SECONDS = 2.0


@frozen(kw_only=True)
class Alert:
    """Alert that is currently raised.

    kind: kind of the event (`loss_spike`, `nonfinite`, `stalled`, `starvation`, `memory`, `disk`, …), or what the
    dashboard sees: `silent` (ranks send no heartbeat), `idle` (ranks make no progress), `lost` (the run is gone without
    a record). message: in words. value, limit: if it is a number. ranks: the affected ranks, may be empty. since:
    seconds since 1970; step: at which it was raised. source: who raised it. id: constant while the alert is the same
    one; a toast is shown for a new id.
    """

    id: str
    kind: str
    message: str
    value: float | None = None
    limit: float | None = None
    ranks: tuple[int, ...] = ()
    since: float | None = None
    step: int | None = None
    source: Literal["run", "dashboard"] = "run"


class AlertTracker:
    """Collector of alerts, which remembers since when each is raised."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}

    def alerts(self, run: RunState, ranks: Ranks, life: Life, now: float) -> tuple[Alert, ...]:
        """Return all raised alerts: first those of the run, then those that the dashboard sees. now: seconds since
        1970."""
        said = [
            Alert(
                id=f"{each.kind}@{each.time}",
                kind=each.kind,
                message=each.message,
                value=each.value,
                limit=each.limit,
                ranks=tuple(each.ranks),
                since=each.time,
                step=each.step,
            )
            for each in run.raised
            if not life.over
        ]
        seen = {kind: found for kind, found in _seen(run, ranks, life, said).items() if found[0]}
        self._since = {kind: self._since.get(kind, now) for kind in seen}
        lasting = {kind for kind, since in self._since.items() if kind == "lost" or now - since >= SETTLE_SECONDS}
        return (*said, *(self._alert(kind, *found) for kind, found in seen.items() if kind in lasting))

    def _alert(self, kind: str, message: str, ranks: list[OneRank]) -> Alert:
        since = self._since[kind]
        return Alert(
            id=f"{kind}@{since}",
            kind=kind,
            message=message,
            ranks=tuple(each.rank for each in ranks),
            since=since,
            source="dashboard",
        )


def _seen(run: RunState, ranks: Ranks, life: Life, said: list[Alert]) -> dict[str, tuple[str, list[OneRank]]]:
    """Return what the dashboard sees, by kind: a sentence, empty if all is well, and the affected ranks."""
    if life.state == "lost":
        return {"lost": (f"The run ended without reporting it: {life.why}", [])}
    if life.over or run.failures or run.restarting:
        return {}  # the run itself has reported the state of its ranks
    silent = [each for each in ranks if each.pulse in ("silent", "gone")]
    idle = [each for each in ranks if each.pulse == "idle"]
    if any(each.kind == "stalled" for each in said):
        idle = []
    return {"silent": (_silent(silent), silent), "idle": (_idle(idle), idle)}


def _silent(ranks: list[OneRank]) -> str:
    if not ranks:
        return ""
    if all(each.pulse == "gone" for each in ranks):
        return f"{_named(ranks)} {_have(ranks)} no running process"
    longest = max(each.seconds_silent for each in ranks)
    return f"{_named(ranks)} {_have(ranks)} sent no heartbeat for {duration(longest)}"


def _idle(ranks: list[OneRank]) -> str:
    if not ranks:
        return ""
    longest = max(each.beat.idle for each in ranks if each.beat is not None)
    places = {each.beat.node for each in ranks if each.beat is not None}
    where = f", in {places.pop()}" if len(places) == 1 else ""
    return f"{_named(ranks)} {_have(ranks)} made no progress for {duration(longest)}{where}"


def _have(ranks: list[OneRank]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _named(ranks: list[OneRank]) -> str:
    numbers = ", ".join(str(each.rank) for each in ranks[:NAMED])
    if len(ranks) > NAMED:
        return f"{plural(len(ranks), 'rank')} ({numbers}, …)"
    return f"Rank {numbers}" if len(ranks) == 1 else f"Ranks {numbers}"
