"""Quantities: a number with a unit, as `2k steps`, `20B tokens`, `1 GiB`, `10%` or `30 min` say it."""

from attrs import field, frozen

# Spelling in a spec → (the unit it is stored in, how many of that unit one of it is).
UNITS: dict[str, tuple[str, int | float]] = {
    "step": ("steps", 1),
    "steps": ("steps", 1),
    "token": ("tokens", 1),
    "tokens": ("tokens", 1),
    "epoch": ("epochs", 1),
    "epochs": ("epochs", 1),
    "sample": ("samples", 1),
    "samples": ("samples", 1),
    "s": ("seconds", 1),
    "min": ("seconds", 60),
    "h": ("seconds", 3600),
    "d": ("seconds", 86400),
    "B": ("bytes", 1),
    "KiB": ("bytes", 2**10),
    "MiB": ("bytes", 2**20),
    "GiB": ("bytes", 2**30),
    "%": ("%", 1),
}


@frozen
class Quantity:
    """`value` of `unit`, where `unit` is one of steps, tokens, epochs, samples, seconds, bytes, %."""

    value: int | float
    unit: str = field()

    @property
    def fraction(self) -> float:
        """The share a percentage stands for: `10%` is 0.1."""
        assert self.unit == "%"
        return self.value / 100

    def __str__(self) -> str:
        if self.unit == "%":
            return f"{self.value:g}%"
        if isinstance(self.value, int):
            return f"{self.value:,} {self.unit}"
        return f"{self.value:g} {self.unit}"
