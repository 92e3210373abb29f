"""Axes of plots: round ticks, and labels in the unit of the values."""

import itertools
import math
from typing import Literal

Unit = Literal["number", "count", "share", "bytes", "seconds"]

# (what one of it is, its sign), ascending. What is smaller than the first one is written with a power of ten.
_SCALES: dict[Unit, tuple[tuple[float, str], ...]] = {
    "number": ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T")),
    "count": ((1, ""), (1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T")),
    "share": ((0.01, "%"),),
    "bytes": tuple((1024.0**power, sign) for power, sign in enumerate(("B", "KiB", "MiB", "GiB", "TiB"))),
    "seconds": ((1e-6, "µs"), (1e-3, "ms"), (1, "s"), (60, "min"), (3600, "h"), (86400, "d")),
}
# Times and bytes have a gap between figure and sign, as everywhere else in these views.
_APART: tuple[Unit, ...] = ("bytes", "seconds")
# From here on a number is written with a power of ten, whatever its unit.
_A_WALL = 1e6
# An axis changes to the larger unit only from this many on: `90 s`, not `1.5 min`.
_ENOUGH: dict[str, float] = {"min": 3, "h": 3, "d": 3}


def ticks(low: float, high: float, most: int, unit: Unit = "number") -> list[float]:
    """Return at most about `most` round values from `low` to `high`, at equal distances."""
    if not math.isfinite(high - low) or most < 1:
        return []
    if not high > low:
        return [low]
    scale, _ = _scale(max(abs(low), abs(high)), unit)
    step = _round_step((high - low) / scale / most)
    if unit == "count":
        step = max(step, 1 / scale)
    first, last = math.ceil(low / scale / step - 1e-9), math.floor(high / scale / step + 1e-9)
    return [number * step * scale for number in range(first, last + 1)][: 4 * most]


def log_ticks(low: float, high: float, most: int, unit: Unit = "number") -> list[float]:
    """Return round values of a logarithmic axis between two positive ones: powers of ten, if there are at least two."""
    if not 0 < low < high < math.inf or most < 1:
        return [low] if 0 < low < math.inf else []
    # A share is counted in percent, but a power of ten of either is one of the other.
    powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
    if len(powers) >= 2:
        every = math.ceil(len(powers) / most)
        return [10.0**power for power in powers if power % every == 0]
    around = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    between = [digit * 10.0**power for power in around for digit in (1, 2, 5)]
    inside = [value for value in between if low <= value <= high]
    return inside if 2 <= len(inside) <= most else ticks(low, high, most, unit)


def labels(values: list[float], unit: Unit = "number") -> list[str]:
    """Return the labels of one axis: one unit for all, and just enough digits to distinguish them."""
    if not values:
        return []
    largest = max(map(abs, values))
    scale, sign = _scale(largest, unit)
    gaps = [b - a for a, b in itertools.pairwise(values) if b > a]
    digits = _digits((min(gaps) if gaps else largest / 100) / scale)
    if unit == "count" and scale == 1:
        digits = 0
    return [_joined(_figure(value / scale, digits), sign if value else "", unit) for value in values]


def own_labels(values: list[float], unit: Unit = "count") -> list[str]:
    """Return each value in its own unit and without trailing zeros: `0 500 1k 1.5k`, for an axis with room between
    them."""
    gaps = [b - a for a, b in itertools.pairwise(values) if b > a]
    found = []
    for value in values:
        scale, sign = _scale(abs(value), unit)
        digits = _digits((min(gaps) if gaps else abs(value) / 1000 or 1) / scale)
        if unit == "count" and digits > 4:
            found.append(f"{value:,.0f}")
            continue
        found.append(_joined(_without_zeros(_figure(value / scale, digits)), sign if value else "", unit))
    return found


def short_label(value: float, unit: Unit = "number") -> str:
    """Return a single value to about three digits, without trailing zeros."""
    scale, sign = _scale(abs(value), unit)
    return _joined(_without_zeros(_figures(value / scale, 3)), sign, unit)


def one_label(value: float, unit: Unit = "number") -> str:
    """Return a single value in its own unit, to about five digits."""
    if not math.isfinite(value):
        return str(value)
    scale, sign = _scale(abs(value), unit)
    whole = value == int(value) and (unit == "count" or abs(value) < 1000) and unit != "bytes"
    if whole and scale == 1:
        return _joined(f"{value:.0f}", sign, unit)
    return _joined(_figures(value / scale, 5), sign, unit)


def _joined(figure: str, sign: str, unit: Unit) -> str:
    return f"{figure} {sign}" if sign and unit in _APART else figure + sign


def _figures(value: float, number: int) -> str:
    if not abs(value) < _A_WALL:
        return f"{value:.2e}"
    digits = 0 if value == 0 else max(0, number - 1 - math.floor(math.log10(abs(value)) + 1e-9))
    return _figure(value, min(digits, 6))


def _without_zeros(figure: str) -> str:
    return figure.rstrip("0").rstrip(".") if "." in figure else figure


def _scale(largest: float, unit: Unit) -> tuple[float, str]:
    """Return the largest unit that fits into a value, else a power of ten."""
    scales = _SCALES[unit]
    if unit == "number" and 0 < largest < 1e-3:
        power = max(math.floor(math.log10(largest)), -308)  # smaller powers of ten are zero in a float
        return 10.0**power, f"e{power}"
    found = scales[0]
    for scale, sign in scales:
        if largest >= scale * _ENOUGH.get(sign, 1) * (1 - 1e-9):
            found = (scale, sign)
    return found


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least)) if least > 0 else 1.0
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= least * (1 - 1e-9))


def _digits(step: float) -> int:
    """Return the number of decimal places that distinguish multiples of `step`."""
    return min(9, max(0, -math.floor(math.log10(step) + 1e-9))) if step > 0 else 0


def _figure(value: float, digits: int) -> str:
    figure = f"{value:.{digits}f}" if abs(value) < _A_WALL else f"{value:.2e}"
    return figure.removeprefix("-") if float(figure) == 0 else figure


def exact(value: float) -> str:
    """Return a number with all its digits, as in the file; whole numbers with separators between thousands."""
    whole = abs(value) < 2**53 and value == int(value) if math.isfinite(value) else False
    return f"{int(value):,}" if whole else repr(value)
