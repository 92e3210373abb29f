"""Numbers as people read them: bytes, counts, floating-point operations."""

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "uint8": 1}  # of one number of a format

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COUNTS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))
_FLOPS = (("ZF", 10**21), ("EF", 10**18), ("PF", 10**15), ("TF", 10**12), ("GF", 10**9), ("MF", 10**6))
_RATES = (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3))
# Suffix, seconds, and how many of it there must be.
_SECONDS = (("d", 86_400, 2), ("h", 3_600, 2), ("min", 60, 2), ("s", 1, 1), ("ms", 1e-3, 1), ("µs", 1e-6, 1))


def _scaled(value: float, steps: tuple[tuple[str, int], ...], rest: str) -> str:
    for suffix, size in steps:
        if abs(value) >= 0.9995 * size:  # what would be shown as 1024 or 1000 of the smaller unit
            shown = value / size
            return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2}f} {suffix}"
    return f"{value:g}{rest}" if float(value).is_integer() else f"{value:.3g}{rest}"


def bytes_text(count: float) -> str:
    """`1.90 GiB`; binary units, three figures."""
    return _scaled(count, _BYTES, " B")


def flops_text(count: float) -> str:
    """`51.5 GF`: floating-point operations, three figures."""
    return _scaled(count, _FLOPS, " F")


def count_text(count: float) -> str:
    """`8.03B`; decimal units, three figures, as parameters and tokens are counted."""
    return _scaled(count, _COUNTS, "").replace(" ", "")


def seconds_text(count: float) -> str:
    """`4.10 s`, `73.2 ms`, `15.2 h`; three figures. Two of a longer unit are needed before it is used."""
    for suffix, size, least in _SECONDS:
        if count >= least * size:
            return f"{_three(count / size)} {suffix}"
    return "0 s" if count <= 0 else "under 1 µs"


def rate_text(count: float, unit: str) -> str:
    """`989 TFLOP/s`, `450 GB/s`: decimal units, as data sheets have them, without noughts behind the point."""
    for prefix, size in _RATES:
        if count >= size:
            shown = _three(count / size)
            return f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown} {prefix}{unit}"
    return f"{count:g} {unit}"


def amount_text(count: float) -> str:
    """`2,604`, `15.2`, `0.037`: hours, prices; no more than three figures behind the thousands."""
    return f"{count:,.0f}" if 100 <= count < 1e15 else f"{count:.3g}"


def _three(value: float) -> str:
    """With three figures, or all of those before the point as long as somebody reads them."""
    if value >= 1e15:
        return f"{value:.2e}"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def amount_in_epochs(count: float) -> str:
    """`1 epoch`, `0.5 epochs`, `3 epochs`."""
    return f"{count:,g} epoch{'' if count == 1 else 's'}"


def plural(count: int, noun: str) -> str:
    """`1 step`, `1,000 steps`, `2 matrices`."""
    many = {"matrix": "matrices"}.get(noun, f"{noun}es" if noun.endswith(("tch", "ss")) else f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"


def times_text(count: int) -> str:
    """`never`, `once`, `1,000 times`."""
    return "never" if count == 0 else "once" if count == 1 else f"{count:,} times"


WIDTH = 100
