"""Which weights of a run are exported, where a person names a checkpoint from outside the run."""

from pathlib import Path

from ...planner.plan import Plan
from ..checkpoint.chosen_weights import averaged_flaw, prefix, published
from ..checkpoint.model_check import check_weights
from ..checkpoint.sidecar import flaws
from ..checkpoint.sources import find, find_named
from ..errors import EnvironmentFault, ExportFailed
from ..provenance.metadata import started_in
from ..training.ema import Which
from .export import Export, check_exportable


def export_of(
    plan: Plan,
    directory: Path,
    *,
    checkpoint: str | None,
    averaged: bool | None,
    dtype: str | None,
    most: int,
    dequantise: bool = False,
) -> Export:
    """The export of a run's checkpoint.

    checkpoint: as `find_named` takes it, None: the weights of the finished run, else the latest state. averaged: its
    averaged weights, None: those that the run publishes. Raises EnvironmentFault where there is none, it is of another
    model, or it has no such weights.
    """
    check_exportable(plan, dequantise=dequantise)
    if checkpoint is None and not any((directory / "checkpoints").glob("*-s*")):
        raise EnvironmentFault("X708", f"{directory} has no checkpoint yet")
    entry = find(directory, weights=True) if checkpoint is None else find_named(directory, checkpoint)
    check_weights(plan, entry)
    if averaged is not None and (flaw := averaged_flaw(entry, averaged=averaged)):
        other = "; another checkpoint of the run may have them, see `xtrain checkpoint show`" if entry.is_full else ""
        raise ExportFailed(f"{entry.name} {flaw}{other}")
    chosen: Which = published(entry) if averaged is None else "averaged" if averaged else "trained"
    # The paths of a run are relative to where it was started, not to where it is exported.
    return Export(
        plan=plan,
        run=directory,
        base=started_in(directory),
        tensors=entry.path,
        prefix=prefix(entry, chosen),
        weights=chosen,
        state={**entry.state(), "step": entry.step},
        dtype=dtype,
        most=most,
        dequantise=dequantise,
    )


def check_sound(export: Export) -> None:
    """Read the whole checkpoint and compare its checksums. Raises EnvironmentFault that names a damaged file."""
    if found := flaws(export.tensors, content=True):
        raise EnvironmentFault("X720", f"the checkpoint {export.tensors} is damaged: {'; '.join(found)}")
