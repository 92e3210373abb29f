"""Rows after the user's collators, as a step takes them, for `xtrain data show`."""

from collections.abc import Callable
from itertools import pairwise

import torch

from xtrain.plan.plan import Plan
from xtrain.runtime.base.state import Rank
from xtrain.runtime.feed.dataset_view import SegmentInRow
from xtrain.runtime.feed.microbatch import IGNORE_INDEX, Microbatch
from xtrain.runtime.feed.packing.stored_rows import RawRow
from xtrain.runtime.feed.reading_process import chain_of


def collated(plan: Plan) -> Callable[[RawRow], list[SegmentInRow]]:
    """Return the function that applies a plan's collate chain to a row, with the positions of all ranks together.

    Raises PartFailed, as the returned function does, if the user's code cannot be loaded or fails.
    """
    axes = {axis.name: 0 for axis in plan.mesh.axes}
    alone = Rank(
        rank=0, local_rank=0, world_size=1, data_rank=0, data_ranks=1, device=torch.device("cpu"), pipeline_ranks=1,
        coordinates=axes,
    )  # fmt: skip
    stages = [stage for stage in chain_of(plan, alone).stages if not stage.cuts]

    def collate_row(row: RawRow) -> list[SegmentInRow]:
        value: list[RawRow] | Microbatch = [row]
        for stage in stages:
            value = stage(value)
        assert isinstance(value, Microbatch)
        return laid(value)

    return collate_row


def laid(batch: Microbatch) -> list[SegmentInRow]:
    """Return the segments of whole rows without padding, each with its next token if a label has it."""
    assert batch.input_ids_BS is not None and batch.labels_BS is not None
    inputs, labels = batch.input_ids_BS.flatten().tolist(), batch.labels_BS.flatten().tolist()
    segments = []
    for (first, _), real in zip(pairwise(batch.cumulative_lengths.tolist()), batch.real_lengths.tolist(), strict=True):
        if real == 0:
            continue
        ids, wanted = inputs[first : first + real], labels[first : first + real]
        # Only a label has the token after the last position.
        ids += [label for label in wanted[-1:] if label != IGNORE_INDEX]
        trained = [False, *(label != IGNORE_INDEX for label in wanted)]
        other = sum(label not in (IGNORE_INDEX, token) for label, token in zip(wanted, ids[1:], strict=False))
        segments.append(SegmentInRow(ids=ids, trained=trained[: len(ids)], positions=real, other=other))
    return segments
