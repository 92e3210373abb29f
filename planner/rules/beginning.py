"""With what a run begins: whether it is there, at which step that is, and whether the budget reaches behind that."""

from pathlib import Path
from typing import Final

from attrs import frozen

from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.graph.checkpoint_names import ALIAS, FOLDER, FULL, STATE, look_at
from xtrain.planner.graph.saving import pretrained
from xtrain.planner.schedule.arithmetic import Arithmetic
from xtrain.planner.schedule.step_sizes import StepSizes, past_of
from xtrain.planner.schedule.stops import limit_args
from xtrain.regular_files import read_json, read_regular

# The pointers to a full checkpoint.
NAMES: Final = ("latest", "best")


@frozen
class CheckpointState:
    """The state that `checkpoint.from` means: its step, and the rows of the steps before it, None where it does not say
    so."""

    step: int
    past: StepSizes | None


def begins_at(path: Path) -> CheckpointState | None:
    """The state that `checkpoint.from` means: a checkpoint, a pointer to one, or the latest of a folder of checkpoints
    or of a run. None where names do not tell; whether it is intact the run finds out."""
    if path.suffix == ALIAS:
        path = path.with_suffix("") if path.stem in NAMES else path.parent
    try:
        for pointer in (path, path / "latest", path / "checkpoints" / "latest"):
            if pointer.name in NAMES and pointer.is_file():
                path = pointer.parent / read_regular(pointer, 1000).decode().strip()
                match = FULL.fullmatch(path.name)
                return CheckpointState(int(match[1]), _past(path)) if match else None
        match = FULL.fullmatch(path.name)
        return CheckpointState(int(match[1]), _past(path)) if match and path.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None


def _past(checkpoint: Path) -> StepSizes | None:
    try:
        return past_of(read_json(checkpoint / STATE))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None


def resumed_batch(spec: Spec, batch: Arithmetic) -> Arithmetic:
    """Return the steps of a run where it is resumed with another batch, else `batch`.

    Lengths must fit into what is left there. A run with another batch is named by `workspace.run` or `checkpoint.from`.
    """
    beginning, workspace = None, spec.workspace
    if batch.done_steps or not batch.rows:
        return batch
    if workspace.run is not None and spec.checkpoint.resume:
        beginning = begins_at(Path(workspace.root) / (workspace.lineage or spec.experiment.name) / workspace.run)
    if beginning is None and spec.checkpoint.from_ is not None:
        beginning = begins_at(Path(spec.checkpoint.from_))
    if beginning is None or beginning.past is None:
        return batch
    ahead = batch.resumed(beginning.past, beginning.step, beginning.past.before(beginning.step))
    return batch if ahead.past is None else ahead


def check_beginning(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """What a run begins with has to be a checkpoint, and the run counts its steps on from those of a full state."""
    for setting, named in (("from", spec.checkpoint.from_), ("pretrained", pretrained(spec))):
        if named is not None:
            _check_place(spec, setting, named, found)
    _check_step(spec, batch, found)


def _check_place(spec: Spec, setting: str, named: str, found: Findings) -> None:
    """What is not there may come, or lie on the machines that run; what is there must be a checkpoint."""
    rule, path, there = f"checkpoint.{setting}.place", f"checkpoint.{setting}", look_at(Path(named))
    if there == "full" or (there == "weights" and setting == "pretrained"):
        found.passed(rule, f"{named} holds {'weights' if there == 'weights' else 'a checkpoint'}")
        return
    if there in ("missing", "later"):
        message = f"{path}: {named} does not exist" if there == "missing" else f"{path}: {named} has no checkpoint yet"
        found.warn(rule, "W501", path, message, "paths are relative to the working folder; the run looks again")
        return
    message, hint = (
        f"{path}: {named} is neither a checkpoint nor a run",
        "give a run, or a checkpoint `ckpt-s…` of a run",
    )
    if there == "weights":
        message = f"{path}: {named} holds weights alone"
        hint = "use `pretrained` for weights alone, or give a full checkpoint (`ckpt-s…`)"
    if _may_go_on(spec):
        found.warn(rule, "W501", path, message, f"{hint}; a resumed run does not need it")
    else:
        found.fail(rule, "X720", path, message, hint)


def _may_go_on(spec: Spec) -> bool:
    """Whether a run of this name has saved something: it goes on from that. Which one is this run, code decides too."""
    runs = Path(spec.workspace.root) / (spec.workspace.lineage or spec.experiment.name)
    return spec.checkpoint.resume and next(runs.glob(f"*/{FOLDER}/ckpt-s*"), None) is not None


def _check_step(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """A run counts its steps on from those of the state that it begins with.

    No more than a warning: a run that has checkpoints of its own goes on from these, wherever the other one is by now.
    """
    origin = spec.checkpoint.from_
    beginning = begins_at(Path(origin)) if origin is not None else None
    if beginning is None:
        return
    step, counts, more = beginning.step, "steps", f"{beginning.step + (batch.steps or 0)} steps"
    batch = resumed_batch(spec, batch)
    if batch.budget_tokens is not None and beginning.past is not None:
        tokens = batch.budget_tokens + beginning.past.before(step) * batch.sequence
        counts, more = "tokens", f"{tokens} tokens"
    begins = f"{origin} is a checkpoint of step {step:,}"
    if batch.steps is not None and step >= batch.steps:
        message = f"{begins} and the budget ends with step {batch.steps:,}: nothing is left to train"
        hint = (
            f"the {counts} of the checkpoint count: use more, such as `budget = {more}`; "
            "for the weights alone, from step 0: checkpoint.pretrained"
        )
        found.warn("checkpoint.from", "W608", "experiment.budget", message, hint)
    stop = limit_args(spec.launch, batch).get("stop_at")
    if stop is not None and step >= stop:
        message = f"{begins} and stop_at is step {stop:,}: the run stops before its first step"
        found.warn("checkpoint.from.stop_at", "W608", "launch.stop_at", message, f"use more than {step} steps")
