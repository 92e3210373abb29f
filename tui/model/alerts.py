"""What somebody should look at now: what the run itself has raised, and what only an onlooker can see."""

from typing import Literal

from attrs import frozen


@frozen(kw_only=True)
class Alert:
    """Something is not as it should be, and still is.

    kind: that of the event (`loss_spike`, `nonfinite`, `stalled`, `starvation`, `memory`, `disk`), or of what the
    dashboard sees: `silent` (ranks are not heard of), `idle` (ranks make no progress), `lost` (the run is gone without
    a word). message: in words. value, limit: where it is a number. ranks: those it is about, may be empty. since:
    seconds since 1970; step: at which it was raised. source: who has seen it. id: the same for as long as it is the
    same alert: a toast is for those whose id is new.
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
