"""Whether a checkpoint is of the model, and of the stream of rows, that a plan speaks of."""

from ...planner.graph.checkpoint_fit import Misfit, kept, misfits, weight_misfits
from ...planner.plan import Plan
from ..errors import ResumeRefused
from .layout import Entry

MOST = 3


def check_model(plan: Plan, entry: Entry) -> None:
    """Raise ResumeRefused unless what the checkpoint says of itself fits the plan."""
    _refuse(entry, misfits(entry.state(), kept(plan)))


def check_weights(plan: Plan, entry: Entry) -> None:
    """Raise ResumeRefused unless its weights are those of the plan's model."""
    _refuse(entry, weight_misfits(entry.state(), kept(plan)))


def _refuse(entry: Entry, found: list[Misfit]) -> None:
    if found:
        more = f"; and {len(found) - MOST} more differences" if len(found) > MOST else ""
        raise ResumeRefused(f"{entry.path} does not fit: {'; '.join(map(str, found[:MOST]))}{more}")
