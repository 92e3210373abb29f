"""How numbers and foreign texts read, the same in every view."""

import math
import re
from typing import Final

UNKNOWN: Final = "n/a"

# Text sampled from a model, or an error of a library, must not control the terminal: control characters, direction
# marks that reorder a line, and lone surrogates that cannot be encoded.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(value: object) -> str:
    """Return a text with plain line ends and spaces for tabs; characters that could move a cursor become `�`."""
    plain = str(value).replace("\r\n", "\n").expandtabs(4)
    return _UNPRINTABLE.sub("\ufffd", plain)


def number(value: object) -> float | None:
    """Return `value` as a float if it is a number (not a bool, nor an integer above all floats), else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def whole(value: object) -> int | None:
    """Return `value` as an int if it is a finite number, else None."""
    found = number(value)
    return int(found) if found is not None and abs(found) < 1e18 else None


def text(value: object) -> str:
    """Return `value` as text; None is empty."""
    return "" if value is None else str(value)


def decimal(value: float | None, digits: int) -> str:
    """Return fixed digits where they are significant, and scientific notation for very small or large values."""
    if value is None:
        return "–"
    if value == 0 or not math.isfinite(value) or 10.0**-digits * 10 <= abs(value) < 1e5:
        return f"{value:.{digits}f}"
    return f"{value:.2e}"


def count(value: float | None) -> str:
    """Return `950`, `12.3k`, `1.2M`, `3.4B`, `5.6T`."""
    if value is None or not math.isfinite(value):
        return "–"
    for unit in ("", "k", "M", "B"):
        if abs(value) < 999.95:
            return f"{value:.1f}{unit}" if unit else f"{value:.0f}"
        value /= 1000
    return f"{value:.1f}T"


def size(num_bytes: float | None) -> str:
    """Return `512 B`, `12.3 MiB`, `1.4 GiB`: binary units, as memory is counted."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1023.95:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float | None) -> str:
    """Return a planning time: `8s`, `6m48s`, `1h05m`, `2d03h`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def took(seconds: float | None) -> str:
    """Return a duration: `0.31 s`, `12.3 s`, `2m05s`."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.995:
        return f"{seconds:.2f} s"
    return f"{seconds:.1f} s" if seconds < 99.95 else duration(seconds)


def brief(seconds: float | None) -> str:
    """Return a duration in three digits and at most seven cells, however short: `37.1 µs`, `6.54 ms`, `1.25 s`,
    `2m05s`."""
    if seconds is None or not math.isfinite(seconds) or seconds >= 0.9995:
        return took(seconds)
    if seconds <= 5e-9:
        return "0 ms"
    micro = 1e6 * seconds
    if micro < 1:
        return f"{micro:.2f} µs"
    return f"{micro:.3g} µs" if micro < 999.5 else f"{micro / 1e3:.3g} ms"


def perplexity(loss: float | None) -> float | None:
    """Return e^loss; None where it is meaningless (no loss, not finite, or above any vocabulary size)."""
    return math.exp(loss) if loss is not None and math.isfinite(loss) and loss < 20 else None


def share(value: float | None) -> str:
    """Return `41.3%`, or `n/a` where unknown."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.1%}"


def plural(value: int, noun: str) -> str:
    """Return `1 rank`, `2 ranks`."""
    return f"{value:,} {noun}" if value == 1 else f"{value:,} {noun}s"
