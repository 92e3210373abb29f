"""Records that could not become documents: counted, the first few kept, and fatal beyond a limit."""

from attrs import define, evolve

from xtrain.runtime.data.errors import DataError

MOST_SHOWN = 10


@define(kw_only=True, frozen=True)
class BadRecord:
    """One record that was left out: where it stands (`path` or `path:line`) and why."""

    origin: str
    reason: str


@define(kw_only=True, frozen=True)
class BadRecordReport:
    """How many records were left out, with the first `MOST_SHOWN` of them in reading order."""

    count: int = 0
    first: tuple[BadRecord, ...] = ()

    def including(self, record: BadRecord) -> "BadRecordReport":
        """This report with one more record."""
        first = (*self.first, record) if len(self.first) < MOST_SHOWN else self.first
        return evolve(self, count=self.count + 1, first=first)

    def check(self, limit: int | None) -> None:
        """Raise DataError listing the kept records if there are more than `limit` (None: any number is accepted)."""
        if limit is None or self.count <= limit:
            return
        raise DataError(
            f"{self.count} bad record{'s' if self.count > 1 else ''}, and the limit is {limit}:{self.listed}",
            remedy="Repair these records, or raise the bad record limit to leave them out.",
        )

    @property
    def listed(self) -> str:
        """A line of each record that is kept, each after a line break, and the number of others."""
        hidden = self.count - len(self.first)
        more = f"\n    and {hidden} more" if hidden else ""
        return "".join(f"\n    {record.origin}: {record.reason}" for record in self.first) + more
