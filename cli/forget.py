"""`xtrain forget RUN DOCUMENT…`: retrain a run from before it saw documents, without them."""

import argparse
import json
import sys
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from xtrain.cli.replay import replayed, window_of, without_sets
from xtrain.cli.run_data import DOCUMENT_HELP, RunData, enter
from xtrain.cli.verb import RUN_HELP, Refused, run_named
from xtrain.text.units import plural

if TYPE_CHECKING:
    import numpy as np

    from xtrain.runtime.jobs.replay import ReplayWindow
    from xtrain.runtime.store.checkpoints import CheckpointEntry

HELP = "retrain a run from before it saw documents, without them"
DESCRIPTION = (
    "Find the first step that trained on the documents, and train the run again from the last checkpoint before that "
    "step, without them. The result equals, bit for bit, the run that never had them. A file next to it says so."
)
EPILOG = """\
The retrained run is below `…-replays`, with `forgotten.json`: the documents, the step and the checkpoint before it, the
plan, and digests of the old and the new checkpoint. The same command resumes an interrupted retraining.

examples:
  xtrain forget RUN data/web.jsonl:1204
  xtrain forget RUN 'web#77' data/private.jsonl

exit codes: 0 retrained, 1 the run was not trained on the documents, 2 the command line is wrong, 3 it cannot be
retrained exactly; else the exit code of the run
"""
FORGOTTEN: Final = "forgotten.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("run_directory", metavar="RUN", help=RUN_HELP)
    parser.add_argument("documents", metavar="DOCUMENT", nargs="+", help=DOCUMENT_HELP)
    parser.add_argument("--json", action="store_true", help="print only the content of forgotten.json")


def run(arguments: argparse.Namespace) -> int:
    """Run `xtrain forget`. The help lists the exit statuses."""
    directory = enter(run_named(arguments.run_directory, 3))
    data = RunData(directory)
    removed = data.named(arguments.documents)
    count = plural(sum(map(len, removed.values())), "document")
    first = _first_sight(data, removed)
    if first is None:
        print(f"{directory.name} was not trained on {count}: there is nothing to forget")
        return 1
    window = _window(directory, first)
    replay, code = replayed(window, without_sets(directory, removed), None, "none" if arguments.json else None)
    if replay is None:
        print("xtrain forget: the run did not get to its end; the same command resumes it", file=sys.stderr)
        return code or 1
    said = _written(window, replay, removed, data, first)
    if arguments.json:
        print(json.dumps(said))
    else:
        began = f"the checkpoint of step {window.begin:,}" if window.entry is not None else "the beginning"
        print(f"{count} forgotten: first trained on in step {first:,}, retrained from {began} to step {window.last:,}")
        print(f"{replay}: equal, bit for bit, to the run that never had them; see {replay / FORGOTTEN}")
    return 0


def _first_sight(data: RunData, removed: "dict[str, np.ndarray]") -> int | None:
    """Return the first step that trained on a document; None without any. Raises Refused (3) if a run that this one
    began with did."""
    found: list[int] = []
    for run in data.runs:
        steps = [
            int(part.steps.min())
            for stretch in run.stretches
            for name, documents in removed.items()
            if name in stretch.prepared
            for part in stretch.sightings(name, documents)
            if len(part.steps)
        ]
        if steps and run is not data.runs[-1]:
            message = f"the run began with the weights of {run.directory}, which saw them in step {min(steps):,}"
            raise Refused(3, f"xtrain forget: {message}; forget them there, and train this run again")
        found = steps
    return min(found, default=None)


def _window(directory: Path, first: int) -> "ReplayWindow":
    """Return the steps to train again. Raises Refused (3) if they would not be the run without the documents, and
    EnvironmentFault without a state before them."""
    from xtrain.runtime.store.history import changed_within
    from xtrain.tui.model.find import runs_below

    if any(run.state == "running" for run in runs_below(directory)):
        raise Refused(3, "xtrain forget: the run is still running; stop it first with `xtrain control`")
    window = window_of(directory, first, None)
    if changed := changed_within(directory, window.begin, window.last):
        message = f"the run was resumed with another plan, or rolled back, at step {changed[0]:,}"
        raise Refused(3, f"xtrain forget: {message}: the steps from step {first:,} on cannot be repeated with one plan")
    if not window.unchanged():
        message = "this xtrain makes another plan of the recorded spec than the run had"
        raise Refused(3, f"xtrain forget: {message}; use the version that trained it")
    return window


def _written(
    window: "ReplayWindow", replay: Path, removed: "dict[str, np.ndarray]", data: RunData, first: int
) -> dict[str, Any]:
    """Write what was forgotten next to the retrained run. Raises Refused (3) if a row still has a document."""
    from xtrain.plan.serialise import source_fingerprint
    from xtrain.runtime.base.files import write
    from xtrain.runtime.feed.document_search import origins_of
    from xtrain.runtime.observe.provenance import plan_in
    from xtrain.runtime.store.checkpoints import CheckpointFolder
    from xtrain.version import __version__

    plan, again = plan_in(window.directory), plan_in(replay)
    for run in RunData(replay).runs:
        for stretch in run.stretches:
            for name, documents in removed.items():
                if any(len(part.steps) for part in stretch.sightings(name, documents)):
                    raise Refused(3, f"xtrain forget: {replay} was trained on documents of {name}; remove it")
    old, new = (CheckpointFolder(each / "checkpoints").latest() for each in (window.directory, replay))
    assert new is not None
    datasets = {each.name: each for each in data.searched()}
    said = {
        "run": window.directory.name,
        "plan": plan.id,
        "retrained": replay.name,
        "retrained_plan": again.id,
        "documents": {
            name: {str(each): origin for each, origin in origins_of(datasets[name], set(documents.tolist())).items()}
            for name, documents in removed.items()
        },
        "first_step": first,
        "from_checkpoint": None if window.entry is None else _bound(window.entry),
        "checkpoint": _bound(new),
        "old_checkpoint": None if old is None else _bound(old),
        "xtrain": __version__,
        "code": source_fingerprint(),
        "equals": "the run with `dataset { without }` of these documents from its first step, bit for bit",
    }
    write(replay / FORGOTTEN, json.dumps(said, indent=1) + "\n")
    return said


def _bound(entry: "CheckpointEntry") -> dict[str, str]:
    """Return the name of a checkpoint and a digest of the sizes and checksums of its files."""
    files = json.dumps(entry.state()["files"], sort_keys=True)
    return {"name": entry.name, "sha256": sha256(files.encode()).hexdigest()}
