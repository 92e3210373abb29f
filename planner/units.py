"""Numbers as people read them: bytes, counts, floating-point operations."""

_BYTES = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_COUNTS = (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3))
_FLOPS = (("ZF", 10**21), ("EF", 10**18), ("PF", 10**15), ("TF", 10**12), ("GF", 10**9), ("MF", 10**6))


def _scaled(value: float, steps: tuple[tuple[str, int], ...], rest: str) -> str:
    for suffix, size in steps:
        if abs(value) >= size:
            shown = value / size
            return f"{shown:.{0 if shown >= 100 else 1 if shown >= 10 else 2}f} {suffix}"
    return f"{value:g}{rest}"


def bytes_text(count: float) -> str:
    """`1.90 GiB`; binary units, three figures."""
    return _scaled(count, _BYTES, " B")


def flops_text(count: float) -> str:
    """`51.5 GF`: floating-point operations, three figures."""
    return _scaled(count, _FLOPS, " F")


def count_text(count: float) -> str:
    """`8.03B`; decimal units, three figures, as parameters and tokens are counted."""
    return _scaled(count, _COUNTS, "").replace(" ", "")


def plural(count: int, noun: str) -> str:
    """`1 step`, `1,000 steps`, `2 matrices`."""
    many = {"batch": "batches", "microbatch": "microbatches", "matrix": "matrices"}.get(noun, f"{noun}s")
    return f"{count:,} {noun if count == 1 else many}"
