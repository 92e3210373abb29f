"""What a run has raised and not yet taken back: its alerts, from the records `alert`."""

from attrs import frozen

from .events import text, whole
from .tail import Record
from .words import number


@frozen(kw_only=True)
class Raised:
    """`alert`: something is not as it should be. kind: `loss_spike`, `nonfinite`, `slow`, `starvation`, `memory`,
    `disk` or `stalled`; message: in words; value, limit: where it is a number; ranks: those it is about, may be empty.

    time: seconds since 1970, and step: at which it was raised.
    """

    kind: str
    message: str
    value: float | None
    limit: float | None
    ranks: tuple[int, ...]
    step: int | None
    time: float | None

    @classmethod
    def of(cls, record: Record) -> "Raised":
        ranks = record.get("ranks")
        found = map(whole, ranks) if isinstance(ranks, list) else ()
        return cls(
            kind=text(record.get("kind")),
            message=text(record.get("message")),
            value=number(record.get("value")),
            limit=number(record.get("limit")),
            ranks=tuple(rank for rank in found if rank is not None),
            step=whole(record.get("step")),
            time=number(record.get("time")),
        )


def is_cleared(record: Record) -> bool:
    """Whether a record `alert` says that it is over."""
    return record.get("state") == "cleared"


def after(raised: tuple[Raised, ...], record: Record) -> tuple[Raised, ...]:
    """What is raised once a record `alert` has been taken in: of each kind one at most, the latest last."""
    alert = Raised.of(record)
    others = tuple(each for each in raised if each.kind != alert.kind)
    return others if is_cleared(record) else (*others, alert)
