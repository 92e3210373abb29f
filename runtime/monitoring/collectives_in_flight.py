"""What ranks were exchanging when nothing got on any more, read from the records that torch keeps of its collectives.

Each rank has written `<rank>.collectives.json`: the last collectives it has entered, in every group numbered from 1,
and whether they have ended. Side by side they say which rank has not come to where the others wait.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from attrs import frozen

from xtrain.regular_files import read_json

# What groups are for, by what they are called in torch, where that is not the name of an axis.
MEANT: Final = {
    "default_pg": "of all ranks",
    "shard": "along fsdp",
    "row": "of the ranks of a row",
    "ends of the pipeline": "of the ends of the pipeline",
    "saving": "of all ranks, to save",
}


@frozen
class CollectiveEntry:
    """A collective that a rank has entered. group: its name and what it is for; number: among those of the group."""

    group: tuple[str, str]
    number: int
    name: str
    sizes: str
    under_way: bool
    between_two: bool

    @property
    def what(self) -> str:
        """`all_reduce 118 of all ranks`, `all_gather 4 along fsdp`."""
        group = self.group[1].removeprefix("mesh_")
        return f"{self.name} {self.number} {MEANT.get(group, f'along {group}')}"


@frozen
class RankCollectives:
    """What one rank has told: its collectives in the order in which it entered them, and the ranks of its groups."""

    calls: tuple[CollectiveEntry, ...]
    groups: Mapping[str, tuple[int, ...]]

    @property
    def waits_in(self) -> CollectiveEntry | None:
        """The first one that has not ended."""
        return next((call for call in self.calls if call.under_way), None)

    def last_in(self, group: tuple[str, str]) -> CollectiveEntry | None:
        """The last one of a group that it has entered."""
        return next((call for call in reversed(self.calls) if call.group == group and not call.between_two), None)


def read_collectives(folder: Path, world: int, first: int = 0) -> dict[int, RankCollectives]:
    """What every rank has told that could, of `world` ranks from number `first` on; the groups that it tells of have
    ranks by the same numbers."""
    found = {}
    for rank in range(first, first + world):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            content = read_json(folder / f"{rank:05d}.collectives.json")
            entries = sorted(content["entries"], key=lambda entry: entry.get("time_created_ns", 0))
            named = content.get("groups", {}).items()
            groups = {name: tuple(first + each for each in ranks) for name, ranks in named}
            found[rank] = RankCollectives(calls=tuple(map(_call, entries)), groups=groups)
    return found


def _call(entry: dict[str, Any]) -> CollectiveEntry:
    name, between_two = entry["profiling_name"].partition(":")[2] or entry["profiling_name"], bool(entry["is_p2p"])
    return CollectiveEntry(
        group=(entry["process_group"][0], entry["process_group"][1]),
        number=entry["p2p_seq_id"] if between_two else entry["collective_seq_id"],
        name=name,
        sizes="×".join(map(str, entry["input_sizes"][0])) if entry["input_sizes"] else "",
        under_way=not entry["retired"] and entry["state"] != "completed",
        between_two=between_two,
    )


def read(found: Mapping[int, RankCollectives], world: int) -> list[str]:
    """What is to be seen of it, a sentence for each collective that ranks wait in; empty where none does."""
    waiting: dict[tuple[tuple[str, str], int], list[int]] = {}
    sentences = []
    for rank, collectives in sorted(found.items()):
        call = collectives.waits_in
        if call is not None and call.between_two:
            sentences.append(f"rank {rank} waits in {call.what}")
        elif call is not None:
            waiting.setdefault((call.group, call.number), []).append(rank)
    return [*(_sentence(group, number, ranks, found, world) for (group, number), ranks in waiting.items()), *sentences]


def _sentence(
    group: tuple[str, str], number: int, waiting: list[int], found: Mapping[int, RankCollectives], world: int
) -> str:
    calls = {rank: call for rank in waiting if (call := found[rank].waits_in) is not None}
    first = calls[waiting[0]]
    kinds = {(call.name, call.sizes) for call in calls.values()}
    if len(kinds) > 1:
        each = ", ".join(f"rank {rank} {call.name} of {call.sizes or 'nothing'}" for rank, call in calls.items())
        return f"ranks have entered different collectives as number {number} of one group: {each}"
    members = found[waiting[0]].groups.get(group[0]) or tuple(range(world))
    others = [rank for rank in members if rank not in waiting]
    behind = [rank for rank in others if rank in found and _number(found[rank].last_in(group)) < number]
    silent = [rank for rank in others if rank not in found]
    beyond = [rank for rank in others if rank in found and rank not in behind]
    wait = f"{_ranks(waiting)} {_verb(waiting, 'wait')} in {first.what}"
    parts = []
    if behind:
        parts.append(f"{_ranks(behind)} did not enter {first.what}")
        last = {call.what for rank in behind if (call := found[rank].last_in(group)) is not None}
        parts[-1] += f" (the last one there was {last.pop()})" if len(last) == 1 else ""
    if silent:
        parts.append(f"nothing is known of {_ranks(silent)}")
    if beyond:
        parts.append(f"{_ranks(beyond)} {_verb(beyond, 'have', 'has')} already left this collective")
    return f"{wait}; {'; '.join(parts)}" if parts else f"{wait}, which all ranks have entered"


def _number(call: CollectiveEntry | None) -> int:
    return 0 if call is None else call.number


def _verb(ranks: list[int], many: str, one: str = "") -> str:
    return many if len(ranks) > 1 else one or f"{many}s"


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 0, 1 and 3`; of many the first eight."""
    names = [str(rank) for rank in ranks]
    if len(names) == 1:
        return f"rank {names[0]}"
    shown = [*names[:8], f"{len(names) - 8} more"] if len(names) > 9 else names
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
