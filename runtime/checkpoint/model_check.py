"""Whether a checkpoint is of the model, and of the stream of rows, that a plan speaks of."""

from xtrain.planner.graph.checkpoint_fit import (
    CheckpointMismatch,
    checkpoint_contents,
    mismatches,
    origin_contents,
    weight_mismatches,
)
from xtrain.planner.plan import Plan
from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.errors import ResumeRefused

MOST = 3


def check_model(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless what the checkpoint says of itself fits the plan."""
    _refuse(entry, mismatches(entry.state(), checkpoint_contents(plan)))


def check_weights(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless its weights are those of the plan's model."""
    _refuse(entry, weight_mismatches(entry.state(), checkpoint_contents(plan)))


def check_origin(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless a run of the plan can begin with its weights, be it with an adapter beside them."""
    _refuse(entry, weight_mismatches(entry.state(), origin_contents(plan, entry.state())))


def check_base(entry: CheckpointEntry, base: str | None) -> None:
    """Raise ResumeRefused unless an adapter was trained on this base; `base` is its digest, None without an adapter."""
    trained_on = entry.state().get("base_content")
    if trained_on != base:
        raise ResumeRefused(
            f"{entry.path} is of an adapter that was trained on the base {trained_on}, and the weights that were read "
            f"are the base {base}: begin with the folder or checkpoint that it was trained on"
        )


def _refuse(entry: CheckpointEntry, found: list[CheckpointMismatch]) -> None:
    if found:
        more = f"; and {len(found) - MOST} more differences" if len(found) > MOST else ""
        raise ResumeRefused(f"{entry.path} does not fit: {'; '.join(map(str, found[:MOST]))}{more}")
