"""`Interval`: the value of a setting that takes a range of whole numbers, as `2..4`."""

from attrs import frozen


@frozen
class Interval:
    """All whole numbers from `low` to `high`, both included; `low` is never above `high`."""

    low: int
    high: int

    def __contains__(self, number: int) -> bool:
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return f"{self.low}..{self.high}"
