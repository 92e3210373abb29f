"""Numbers, sizes, durations and counts for people, and Markdown tables of them.

The functions that take None are for values of other programs' files, which may be missing, not finite, or not numbers.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1}  # bytes per number of a format

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COUNTS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))
_FLOPS = (("ZF", 10**21), ("EF", 10**18), ("PF", 10**15), ("TF", 10**12), ("GF", 10**9), ("MF", 10**6))
_RATES = (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
# Suffix, seconds, and from how many of it the unit is used.
_SECONDS = (("d", 86_400, 2), ("h", 3_600, 2), ("min", 60, 2), ("s", 1, 1), ("ms", 1e-3, 1), ("µs", 1e-6, 1))


def _scaled(value: float, steps: tuple[tuple[str, int], ...], rest: str) -> str:
    for suffix, size in steps:
        if abs(value) >= 0.9995 * size:  # would be shown as 1024 or 1000 of the smaller unit
            shown = value / size
            return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2}f} {suffix}"
    return f"{value:g}{rest}" if float(value).is_integer() else f"{value:.3g}{rest}"


def bytes_text(count: float) -> str:
    """Return `1.90 GiB`; binary units, three figures."""
    return _scaled(count, _BYTES, " B")


def flops_text(count: float) -> str:
    """Return `51.5 GF`: floating-point operations, three figures."""
    return _scaled(count, _FLOPS, " F")


def count_text(count: float) -> str:
    """Return `8.03B`; decimal units, three figures, as parameters and tokens are counted."""
    return _scaled(count, _COUNTS, "").replace(" ", "")


def seconds_text(count: float) -> str:
    """Return `4.10 s`, `73.2 ms`, `15.2 h`; three figures. A longer unit is used from two of it."""
    for suffix, size, least in _SECONDS:
        if count >= least * size:
            return f"{_three(count / size)} {suffix}"
    return "0 s" if count <= 0 else "under 1 µs"


def rate_text(count: float, unit: str) -> str:
    """Return `989 TFLOP/s`, `450 GB/s`: decimal units, as in data sheets, without trailing zeros."""
    for prefix, size in _RATES:
        if count >= size:
            shown = _three(count / size)
            return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {prefix}{unit}"
    return f"{count:g} {unit}"


def amount_text(count: float) -> str:
    """Return `2,604`, `15.2`, `0.037`: hours, prices; at most three figures after the thousands."""
    return f"{count:,.0f}" if 100 <= count < 1e15 else f"{count:.3g}"


def _three(value: float) -> str:
    """Return three figures, or all of those before the point up to a readable length."""
    if value >= 1e15:
        return f"{value:.2e}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def amount_in_epochs(count: float) -> str:
    """Return `1 epoch`, `0.5 epochs`, `3 epochs`."""
    return f"{count:,g} epoch{'' if count == 1 else 's'}"


def plural(count: int, noun: str) -> str:
    """Return `1 step`, `1,000 steps`, `2 matrices`."""
    many = {"matrix": "matrices"}.get(noun, f"{noun}es" if noun.endswith(("tch", "ss")) else f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"


def consecutive(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return runs of consecutive numbers: the first and the last number of each."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def times_text(count: int) -> str:
    """Return `never`, `once`, `1,000 times`."""
    return "never" if count == 0 else "once" if count == 1 else f"{count:,} times"


WIDTH = 100


UNKNOWN: Final = "n/a"

# Text sampled from a model, or an error of a library, must not control the terminal: control characters, direction
# marks that reorder a line, and lone surrogates that cannot be encoded.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


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


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int) -> list[str]:
    """Return the lines of a table. texts: number of leading text columns, aligned left; numbers are aligned right."""
    widths = [max(len(row[at]) for row in (head, *rows)) for at in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.ljust(width) if at < texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    rule = ["-" * width if at < texts else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return [line(head), f"| {' | '.join(rule)} |", *map(line, rows)]
