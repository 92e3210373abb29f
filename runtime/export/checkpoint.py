"""Which weights of a run are exported, where a person names a checkpoint from outside the run."""

from pathlib import Path

from xtrain.planner.plan import Plan
from xtrain.runtime.checkpoint.chosen_weights import averaged_flaw, prefix, published
from xtrain.runtime.checkpoint.layout import CheckpointEntry
from xtrain.runtime.checkpoint.model_check import check_weights
from xtrain.runtime.checkpoint.sidecar import flaws
from xtrain.runtime.checkpoint.sources import find, find_named, find_to_read
from xtrain.runtime.errors import EnvironmentFault, ExportFailed
from xtrain.runtime.export.adapter import AdapterExport, check_adapter_exportable
from xtrain.runtime.export.export import Export, check_exportable
from xtrain.runtime.export.merging import Merging
from xtrain.runtime.export.tasks import plan_of, stored_names
from xtrain.runtime.files.locks import HeldLock
from xtrain.runtime.provenance.metadata import started_in
from xtrain.runtime.training.ema import Which


def export_of(
    plan: Plan,
    directory: Path,
    *,
    checkpoint: str | None,
    averaged: bool | None,
    dtype: str | None,
    most: int,
    dequantise: bool = False,
    merges: bool = False,
    task: str | None = None,
) -> Export:
    """The export of a run's checkpoint. merges: with its adapter put into the model; task: that of one of several.

    checkpoint, averaged: as of `chosen`. Raises EnvironmentFault where there is none, it is of another model, or it has
    no such weights.
    """
    check_exportable(plan, dequantise=dequantise, merges=merges)
    own = plan_of(plan, task) if merges else plan
    entry, weights, held = chosen(plan, directory, checkpoint=checkpoint, averaged=averaged)
    # The paths of a run are relative to where it was started, not to where it is exported.
    base = started_in(directory)
    return Export(
        plan=own,
        run=directory,
        base=base,
        tensors=entry.path,
        prefix=prefix(entry, weights),
        weights=weights,
        state={**entry.state(), "step": entry.step},
        dtype=dtype,
        most=most,
        dequantise=dequantise,
        merging=Merging(own, base, entry, stored_names(plan, task)) if merges else None,
        held=held,
    )


def adapter_export_of(
    plan: Plan,
    directory: Path,
    *,
    checkpoint: str | None,
    averaged: bool | None,
    dtype: str | None,
    task: str | None = None,
) -> AdapterExport:
    """The export of the adapter of a run's checkpoint, the rest as of `export_of`."""
    own = plan_of(plan, task)
    check_adapter_exportable(own)
    entry, weights, held = chosen(plan, directory, checkpoint=checkpoint, averaged=averaged)
    return AdapterExport(
        plan=own,
        run=directory,
        base=started_in(directory),
        tensors=entry.path,
        prefix=prefix(entry, weights),
        weights=weights,
        state={**entry.state(), "step": entry.step},
        dtype=dtype,
        names=stored_names(plan, task),
        held=held,
    )


def chosen(
    plan: Plan, directory: Path, *, checkpoint: str | None, averaged: bool | None
) -> tuple[CheckpointEntry, Which, HeldLock]:
    """Return a checkpoint of a run, which of its weights are taken, and what keeps the run from removing it.

    checkpoint: as `find_named` takes it, None: the weights of the finished run, else the latest state. averaged: its
    averaged weights, None: those that the run publishes. Raises EnvironmentFault.
    """
    if checkpoint is None and not any((directory / "checkpoints").glob("*-s*")):
        raise EnvironmentFault("X708", f"{directory} has no checkpoint yet")
    entry, held = find_to_read(
        lambda: find(directory, weights=True) if checkpoint is None else find_named(directory, checkpoint)
    )
    check_weights(plan, entry)
    if averaged is not None and (flaw := averaged_flaw(entry, averaged=averaged)):
        other = "; another checkpoint of the run may have them, see `xtrain checkpoint show`" if entry.is_full else ""
        raise ExportFailed(f"{entry.name} {flaw}{other}")
    return entry, published(entry) if averaged is None else "averaged" if averaged else "trained", held


def check_sound(tensors: Path) -> None:
    """Read a whole checkpoint and compare its checksums. Raises EnvironmentFault that names a damaged file."""
    if found := flaws(tensors, content=True):
        raise EnvironmentFault("X720", f"the checkpoint {tensors} is damaged: {'; '.join(found)}")
