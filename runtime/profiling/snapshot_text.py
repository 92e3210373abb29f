"""`summary.md` of a memory snapshot: what ranks hold, beside the plan's figures."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from xtrain.planner.units import bytes_text
from xtrain.runtime.profiling.tables import table

STATES: Final = ("parameters", "gradients", "optimizer", "averages")
NOTES: Final = """\
Looked at between two steps: what a step alone needs is not there then, and the plan's figures for it are those of the
peak. `other` is tensors that Python knows of and that belong to none of these.
"""


def snapshot_text(found: Sequence[Mapping[str, Any]], *, node: str, world: int, note: str = "") -> str:
    """The page, of the JSON of one rank each, in their order. note: a sentence about when it was taken."""
    head = found[0]
    lines = [f"# Memory after step {head['step']:,}", ""]
    lines += [f"`{node}`, {len(found)} of {world:,} ranks; memory of the {_device(head)}. {note}".rstrip(), ""]
    lines += [f"## Rank {head['rank']}", ""]
    lines += [*of_rank(head), "", NOTES]
    rows = [
        (
            str(each["rank"]),
            *(bytes_text(_bytes(each, name)) for name in STATES),
            bytes_text(_bytes(each, "other")),
            bytes_text(_most(each)),
            bytes_text(each["planned"]["allocated"]),
        )
        for each in found
    ]
    peak = "peak allocated" if head["allocator"] else "peak resident"
    lines += ["## All that were looked at", ""]
    lines += [*table(("rank", *STATES, "other", peak, "planned peak"), rows, texts=0), ""]
    return "\n".join(lines)


def of_rank(one: Mapping[str, Any]) -> list[str]:
    """The table of one rank: what it holds beside what is planned."""
    return table(("what", "planned", "held"), _rows(one), texts=1)


def _rows(one: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    planned = one["planned"]
    rows = [(name, bytes_text(planned[name]), bytes_text(_bytes(one, name))) for name in STATES if _there(one, name)]
    rows += [
        (name, bytes_text(planned[name]) if name in planned else "", bytes_text(_bytes(one, name)))
        for name in ("unsharded", "buffers", "other")
    ]
    rows += [
        (f"{name}, at the peak", bytes_text(planned[name]), "")
        for name in ("unreduced", "activations", "loss", "working", "reserve")
        if planned[name]
    ]
    known = sum(one["held"].values())
    rows.append(("all of it", bytes_text(planned["total"]), bytes_text(known)))
    allocator: Mapping[str, int] = one["allocator"] or {}
    rows += [(f"allocator: {_words(name)}", "", bytes_text(size)) for name, size in allocator.items()]
    rows += [(f"process: {_words(name)}", "", bytes_text(size)) for name, size in one["process"].items()]
    return rows


def _there(one: Mapping[str, Any], name: str) -> bool:
    return bool(one["planned"][name] or _bytes(one, name))


def _bytes(one: Mapping[str, Any], name: str) -> int:
    """Held on the device, and in host memory what the plan has put there."""
    host: Mapping[str, int] = one["held_in_host"] or {}
    return one["held"][name] + (host.get(name, 0) if name in STATES else 0)


def _most(one: Mapping[str, Any]) -> int:
    return one["allocator"]["peak_allocated_bytes"] if one["allocator"] else one["process"]["peak_bytes"]


def _device(one: Mapping[str, Any]) -> str:
    return "GPU" if one["allocator"] else "CPU"


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")
