"""Context parallel: how a row's sequence is spread over ring and ulysses ranks."""

from math import gcd

from xtrain.dsl.schema.parallel import Cp
from xtrain.dsl.schema.setting import Auto
from xtrain.planner.findings import Findings


def split_context(
    cp: Cp, heads: int, kv_heads: int, reasons: dict[str, str], found: Findings
) -> tuple[int, int] | None:
    """(ring, ulysses) of `cp`; `heads` and `kv_heads` are those of one tensor-parallel rank."""
    size, ring, ulysses = cp.size, cp.ring, cp.ulysses
    if isinstance(ring, Auto) and isinstance(ulysses, Auto):
        ulysses, why = choose_ulysses(size, heads, kv_heads)
        ring = size // ulysses
        if size > 1:
            reasons["parallel.cp.ulysses"] = why
            reasons["parallel.cp.ring"] = f"cp {size} / ulysses {ulysses}"
    elif isinstance(ring, Auto) and isinstance(ulysses, int):
        ring = max(size // ulysses, 1)
        reasons["parallel.cp.ring"] = f"cp {size} / ulysses {ulysses}"
    elif isinstance(ulysses, Auto) and isinstance(ring, int):
        ulysses = max(size // ring, 1)
        reasons["parallel.cp.ulysses"] = f"cp {size} / ring {ring}"
    assert isinstance(ring, int) and isinstance(ulysses, int)
    if ring * ulysses != size:
        message = f"ring {ring} · ulysses {ulysses} = {ring * ulysses}, but cp is {size}"
        found.fail(
            "mesh.cp", "X413", "parallel.cp", message, f"write `cp {ring * ulysses}`, or leave ring and ulysses auto"
        )
        return None
    if size > 1:
        found.passed("mesh.cp", f"cp {size} = ring {ring} · ulysses {ulysses}")
    return ring, ulysses


def choose_ulysses(cp: int, heads: int, kv_heads: int) -> tuple[int, str]:
    """How much of `cp` exchanges sequence for heads, and why; the rest passes keys and values around a ring.

    Ulysses moves each activation once, a ring moves all keys and values size - 1 times: as much ulysses as heads allow.
    """
    if (by_kv := gcd(cp, kv_heads)) > 1:
        return by_kv, f"the largest divisor of cp {cp} that divides the {kv_heads} key/value heads of a tp rank"
    if kv_heads == 1 and (by_heads := gcd(cp, heads)) > 1:
        why = f"1 key/value head a tp rank cannot be divided; {by_heads} divides its {heads} query heads"
        return by_heads, why
    return 1, f"{kv_heads} key/value heads a tp rank share no divisor with cp {cp}"


def heads_allow(ulysses: int, heads: int, kv_heads: int) -> bool:
    """Whether `ulysses` ranks can share the heads of a tp rank.

    Each takes whole query heads. Of key/value heads each takes whole ones too, or, where they are fewer than the ranks,
    as many ranks as go into each take a copy of it.
    """
    divides = kv_heads % ulysses if ulysses <= kv_heads else ulysses % kv_heads
    return heads % ulysses == 0 and divides == 0
