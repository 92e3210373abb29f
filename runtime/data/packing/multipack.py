"""Best-fit-decreasing in groups, dealt to threads: whole groups, or ranges of a group where there are few of them."""

from itertools import pairwise

import numpy as np
from attrs import frozen

from xtrain.runtime.data.packing.counting import CUTS, FULL, count, count_segments
from xtrain.runtime.data.packing.groups import pack_groups, place_range, placements_for, plan
from xtrain.runtime.data.packing.rows import index_type
from xtrain.runtime.data.packing.threads import in_threads

# Documents that are sorted at once: their numbers take 2 MiB, which a core has to itself.
BLOCK = 1 << 19

# Where each row ends, after where the first begins; segments that do not begin where their document does, and where
# they begin; filled positions.
_Packed = tuple[np.ndarray, np.ndarray, np.ndarray, int]


@frozen(kw_only=True, eq=False)
class Task:
    """Documents to be packed, and how."""

    lengths: np.ndarray
    """Tokens of each document, int32 or int64, contiguous and read-only: kernels are compiled for one kind of array."""
    group: int
    capacity: int
    align: int
    policy: int
    most: int
    """Positions that no document or remainder has more of, at most `capacity`."""
    regular: bool
    """Whether all documents have a position and fit into a row."""
    segments: int
    """As many as there may be at most, and so `cuts`."""
    cuts: int
    block: int

    @property
    def index(self) -> type[np.signedinteger]:
        """For segments and documents."""
        return index_type(self.segments)

    @property
    def counts(self) -> type[np.unsignedinteger]:
        return np.uint32 if self.index is np.int32 else np.uint64


def pack_documents(task: Task, document: np.ndarray, threads: int) -> _Packed:
    """Fill `document` [segments] with the documents of the rows, by up to `threads` threads; the rows."""
    groups = -(-len(task.lengths) // task.group)
    if threads > 1 and groups < threads:
        parts, base = [], 0
        for number in range(groups):
            parts.append(_group(task, document, number, base, threads))
            base = int(parts[-1][0][-1])
    else:
        parts = _spans(task, document, list(pairwise([groups * part // threads for part in range(threads + 1)])))
    if len(parts) == 1:
        return parts[0]
    offsets = np.concatenate([parts[0][0][:1], *(part[0][1:] for part in parts)])
    cuts, starts = (np.concatenate([part[column] for part in parts]) for column in (1, 2))
    return offsets, cuts, starts, sum(part[3] for part in parts)


def _spans(task: Task, document: np.ndarray, spans: list[tuple[int, int]]) -> list[_Packed]:
    """Some whole groups for each thread."""

    def counted(first: int, last: int) -> tuple[int, int]:
        part = task.lengths[first * task.group : last * task.group]
        return (len(part), 0) if task.regular else count_segments(part, task.capacity, task.policy)

    def packed(first: int, last: int, base: int, segments: int, cuts: int) -> _Packed:
        offsets = np.empty(segments + 1, dtype=task.index)
        offsets[0] = base
        cut_segments, cut_starts = np.empty((2, cuts), dtype=np.int64)
        rows, noted, positions = pack_groups(
            task.lengths, task.group, first, last, task.capacity, task.align, task.policy, task.most,
            np.empty(0, task.counts), task.block, document, offsets, cut_segments, cut_starts,
        )  # fmt: skip
        return offsets[: rows + 1], cut_segments[:noted], cut_starts[:noted], positions

    sizes = in_threads(counted, spans) if len(spans) > 1 else [(task.segments, task.cuts)]
    bases = np.cumsum([0, *(segments for segments, _ in sizes)]).tolist()
    return in_threads(packed, [(*span, base, *size) for span, base, size in zip(spans, bases, sizes, strict=False)])


def _group(task: Task, document: np.ndarray, number: int, base: int, threads: int) -> _Packed:
    """A group by several threads: its documents are dealt to them in ranges."""
    first = number * task.group
    lengths = task.lengths[first : first + task.group]
    ranges = list(enumerate(pairwise([len(lengths) * part // threads for part in range(threads + 1)])))
    sizes, remainders = np.zeros((2, threads, task.capacity + 2), dtype=task.counts)
    extra = np.zeros((threads, 2), dtype=np.int64)

    def counted(part: int, bounds: tuple[int, int]) -> None:
        count(lengths[slice(*bounds)], task.capacity, task.policy, sizes[part], remainders[part], extra[part])

    in_threads(counted, ranges)
    full, cuts = extra[:, FULL].sum(), extra[:, CUTS].sum()
    offsets = np.empty(len(lengths) + full + 1, dtype=task.index)
    offsets[0] = base
    begins = np.empty(task.capacity // task.align + 1, dtype=task.counts)
    tables = np.empty((2, placements_for(len(lengths), task.most), 4), dtype=task.counts)
    layout = (task.capacity, task.align, task.most)
    placements, _, planned, positions = plan(sizes, remainders, extra, *layout, begins, *tables, offsets)
    cut_segments, cut_starts = np.empty((2, cuts), dtype=np.int64)

    def placed(part: int, bounds: tuple[int, int]) -> None:
        before, noted = extra[:part, FULL].sum(), extra[:part, CUTS].sum()
        place_range(
            lengths[slice(*bounds)], first + bounds[0], part, task.capacity, task.align, task.policy, task.most,
            sizes, remainders, begins, placements, task.block, base + before, document, offsets[full:],
            cut_segments[noted:], cut_starts[noted:],
        )  # fmt: skip

    in_threads(placed, ranges)
    return offsets[: full + planned + 1], cut_segments, cut_starts, positions
