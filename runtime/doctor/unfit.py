"""What does not fit, and what to do about it."""

from typing import Any

from attrs import asdict, frozen


@frozen(kw_only=True)
class Unfit:
    """code: of a diagnostic; one that begins with X keeps the run from working, one with W does not. what: is wrong, as
    a clause. do: about it. host: where it was found."""

    code: str
    what: str
    do: str
    host: str = ""

    @property
    def stops(self) -> bool:
        """Whether the run would not work."""
        return self.code.startswith("X")

    def __str__(self) -> str:
        where = f"{self.host}: " if self.host else ""
        return f"{'error' if self.stops else 'warning'}[{self.code}]: {where}{self.what}\n  {self.do}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
