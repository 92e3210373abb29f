"""Which of its checkpoints a run goes on from: the first whose content is what was written."""

from collections.abc import Callable

from xtrain.runtime.checkpoint.layout import CheckpointEntry, CheckpointFolder
from xtrain.runtime.checkpoint.sidecar import flaws
from xtrain.runtime.errors import ResumeRefused, StorageFailed
from xtrain.runtime.parallel.collective_errors import CollectiveErrors

# Told of every checkpoint that is passed over: (it, why).
Report = Callable[[CheckpointEntry, str], None]


def choose(
    folder: CheckpointFolder, collective: CollectiveErrors, *, content: bool, report: Report
) -> CheckpointEntry | None:
    """The checkpoint `latest` names or else the newest that is intact; None if the folder has none at all.

    content: read all of it and compare checksums, the files dealt among ranks. Collective, with one result for all.
    Raises ResumeRefused if there are checkpoints and none is intact: a run that began anew would hide that.
    """
    candidates = collective.first(folder.candidates)
    for entry in candidates:
        flaw = flaw_of(entry, collective, content=content)
        if not flaw:
            return entry
        report(entry, flaw)
    if candidates:
        raise ResumeRefused(
            f"no checkpoint in {folder.root} is intact; `xtrain checkpoint verify` says what is wrong with each, and "
            "checkpoint.resume = false starts from scratch"
        )
    return None


def flaw_of(entry: CheckpointEntry, collective: CollectiveErrors, *, content: bool) -> str:
    """What is wrong with a checkpoint; empty if nothing is. Collective, with one result for all."""
    part = (collective.rank, collective.size)
    try:
        found = collective.all(lambda: flaws(entry.path, content=content, part=part))
    except StorageFailed as failure:
        return str(failure)
    return next((flaw for each in found for flaw in each), "")
