"""Starting point of a run (a checkpoint, weights of a run or folder, or nothing), and checks that it fits the plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from attrs import define, field, frozen

from xtrain.dsl.checking.config_json import SnapshotMissing, find_snapshot
from xtrain.plan.arithmetic import arithmetic_of
from xtrain.plan.checkpoints import (
    ALIAS,
    POINTERS,
    CheckpointMismatch,
    Pointer,
    checkpoint_contents,
    mismatches,
    origin_contents,
    weight_mismatches,
)
from xtrain.plan.groups import alone
from xtrain.plan.peft import PeftFolder, PeftUnreadable, read_peft
from xtrain.plan.plan import Plan
from xtrain.plan.step_sizes import past_of
from xtrain.plan.weight_files import WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.regular_files import read_regular
from xtrain.runtime.base.errors import EnvironmentFault, NothingLeft, ResumeRefused
from xtrain.runtime.base.locks import HeldLock, hold_for_reading
from xtrain.runtime.base.process import is_restart
from xtrain.runtime.store.checkpoints import CheckpointEntry, CheckpointFolder, entry_of, epoch_named

FINISHED: Final = "finished"
POINTER_NAMED: Final[dict[str, Pointer]] = {pointer: pointer for pointer in POINTERS}


@frozen(kw_only=True)
class StartingPoint:
    """Starting point of a run, as far as names and sizes tell.

    entry: the full state; None without one. own: the state is the run's own. anew: earlier work in the directory has
    another starting point and must be moved aside.
    """

    entry: CheckpointEntry | None
    own: bool
    anew: bool

    @property
    def step(self) -> int:
        return self.entry.step if self.entry is not None else 0


def starting_point(plan: Plan, directory: Path) -> StartingPoint:
    """Choose the starting point of the run in `directory`.

    Raises EnvironmentFault if the named checkpoint does not exist, ResumeRefused if the run has checkpoints and none is
    complete.
    """
    if plan.serves:  # clients load what the server has kept
        return StartingPoint(entry=None, own=False, anew=False)
    args = plan.node("setup.resume").args
    folder = CheckpointFolder(directory / "checkpoints")
    resume = args["resume"] or is_restart()
    own = folder.latest() if resume else None
    named = args["origin"]
    if own is not None and (named is None or _began_there(own, named)):
        return StartingPoint(entry=own, own=True, anew=False)
    if resume and own is None and (broken := folder.published()):
        flaws = "; ".join(f"{entry.name}: {entry.flaws()[0]}" for entry in reversed(broken))
        raise ResumeRefused(
            f"no checkpoint in {folder.root} is complete ({flaws}); to start from scratch: checkpoint.resume = false"
        )
    anew = own is not None or not resume
    if named is None:
        return StartingPoint(entry=None, own=False, anew=anew)
    entry = find(Path(named))
    if anew and directory.resolve() in entry.path.resolve().parents:
        raise EnvironmentFault(
            "X720",
            f"checkpoint.from names a checkpoint of this run, {entry.name}; give the new run another name with "
            "workspace.run",
        )
    return StartingPoint(entry=entry, own=False, anew=anew)


def origin_of(entry: CheckpointEntry) -> str | None:
    """Return the `checkpoint.from` that a checkpoint's run began with."""
    return (entry.state().get("begun_from") or {}).get("from")


def _began_there(own: CheckpointEntry, named: str) -> bool:
    """Return True if the run began at the path in `checkpoint.from`, however it is written: absolute, or through a
    link.

    The same text is enough: a folder may have moved with its contents.
    """
    begun = own.state().get("begun_from") or {}
    if not begun:
        return False
    place = str(Path(named).resolve())
    return named == begun["from"] or place in (begun.get("place", str(Path(begun["from"]).resolve())), begun["path"])


def total_steps(plan: Plan, start: StartingPoint) -> int | None:
    """Return the total steps of a run from its starting point; None until the data is counted.

    A budget in tokens counts the checkpoint's tokens: its steps may have had other batch sizes.
    """
    if start.entry is None or plan.timeline.budget_tokens is None:
        return plan.timeline.steps
    past = past_of(start.entry.state())
    if past is None:
        return plan.timeline.steps
    return arithmetic_of(plan).resumed(past, start.step, past.before(start.step)).steps


def left_to_train(plan: Plan, start: StartingPoint, steps: int | None = None) -> bool:
    """Return True if the budget has steps after the starting point. steps: of the budget, if the plan does not know
    them; True while they are unknown."""
    total = total_steps(plan, start) if steps is None else steps
    return start.entry is None or total is None or start.step < total


def check_left(plan: Plan, start: StartingPoint, directory: Path, steps: int | None = None) -> None:
    """Raise NothingLeft if the starting point already has all steps of the budget (see `left_to_train`).

    A run stopped after its last step still has its final work to do; a finished run reports this itself.
    """
    if left_to_train(plan, start, steps):
        return
    step, total = start.step, total_steps(plan, start) if steps is None else steps
    if start.own and (step == total or finished_step(directory) == step):
        return
    ends = f"the budget ends with step {total:,}: nothing is left to train"
    if start.own:
        raise NothingLeft(
            f"the run is at step {step:,}, and {ends}; use a larger experiment.budget, or '{step} steps' to end the "
            "run there"
        )
    named = plan.node("setup.resume").args["origin"]
    raise NothingLeft(
        f"checkpoint.from is {named}, a state of step {step:,}, and {ends}; these steps count: use more than {step} in "
        "experiment.budget, or checkpoint.pretrained for the weights alone"
    )


def finished_step(directory: Path) -> int | None:
    """Return the step at which the run in a directory finished, including its final work; None if it has not."""
    try:
        return int(read_regular(directory / FINISHED, 100))
    except (OSError, ValueError):
        return None


def has_finished(plan: Plan, start: StartingPoint, directory: Path) -> bool:
    """Return True if a run has finished at its starting point and the budget has no further step.

    False while the steps of the budget are unknown.
    """
    return start.own and not left_to_train(plan, start) and finished_step(directory) == start.step


def begun_from(plan: Plan, start: StartingPoint) -> dict[str, Any] | None:
    """Return the description of a run's starting point for its checkpoints."""
    if start.entry is None:
        return None
    if start.own:
        return start.entry.state().get("begun_from")
    named = plan.node("setup.resume").args["origin"]
    place = str(Path(named).resolve())
    return {"from": named, "place": place, "path": str(start.entry.path.resolve()), "step": start.entry.step}


# Attempts to find a checkpoint while its run removes old ones.
_SEARCHES: Final = 3


def find(path: Path, *, weights: bool = False) -> CheckpointEntry:
    """Return the checkpoint that a path names: a checkpoint, a pointer to one, `epoch-2` in a folder of checkpoints or
    a run, or the latest of a folder or run.

    weights: accept weights alone, and prefer the weights of a finished run. Raises EnvironmentFault.
    """
    entry = _found(path, weights)
    if entry is None:
        what = "checkpoint" if weights else "full checkpoint"
        raise EnvironmentFault("X720", f"there is no {what} at {path}: it is neither a checkpoint nor a run with one")
    if not weights and not entry.is_full:
        raise EnvironmentFault("X720", f"{path} holds weights alone; checkpoint.from needs a full checkpoint (ckpt-s…)")
    if flaws := entry.flaws():
        raise EnvironmentFault("X720", f"the checkpoint {entry.path} is damaged: {flaws[0]}")
    return entry


def find_to_read(find_now: Callable[[], CheckpointEntry]) -> tuple[CheckpointEntry, HeldLock]:
    """Find a checkpoint and keep its run from removing it while the returned lock is open.

    find_now: see `find` or `find_named`; called again if the checkpoint is removed meanwhile. Raises EnvironmentFault.
    """
    left = _SEARCHES
    while True:
        left -= 1
        try:
            entry = find_now()
        except EnvironmentFault as fault:
            # It may have been removed in the meantime; the pointers name another one then.
            if fault.code != "X720" or not left:
                raise
            continue
        if (lock := hold_for_reading(entry.path)) is not None:
            return entry, lock


@define(eq=False)
class HeldCheckpoints:
    """Checkpoints that their runs do not remove until they have been read."""

    _locks: list[HeldLock] = field(factory=list)

    def find(self, find_now: Callable[[], CheckpointEntry]) -> CheckpointEntry:
        """Find a checkpoint as `find_to_read` does, and hold it."""
        entry, lock = find_to_read(find_now)
        self._locks.append(lock)
        return entry

    def find_start(self, plan: Plan, directory: Path) -> StartingPoint:
        """Return the starting point of a run, and hold its checkpoint."""
        while (start := starting_point(plan, directory)).entry is not None:
            if (lock := hold_for_reading(start.entry.path)) is not None:  # else another run has removed it
                self._locks.append(lock)
                break
        return start

    def close(self) -> None:
        for lock in self._locks:
            lock.close()


def find_for_reading(directory: Path, checkpoint: str | None) -> tuple[CheckpointEntry, HeldLock]:
    """Return a checkpoint of a run, as `find_to_read` does. checkpoint: see `find_named`; None: the weights of the
    finished run, or else the latest state. Raises EnvironmentFault."""
    if checkpoint is None and not any((directory / "checkpoints").glob("*-s*")):
        raise EnvironmentFault("X708", f"{directory} has no checkpoint yet")
    return find_to_read(
        lambda: find(directory, weights=True) if checkpoint is None else find_named(directory, checkpoint)
    )


def find_named(directory: Path, name: str) -> CheckpointEntry:
    """Return the checkpoint of a run by pointer (`latest`, `best`, `model`), name (`ckpt-s…`), step (`500`) or epoch
    (`epoch-2`), or by any path that `find` accepts.

    Raises EnvironmentFault that lists the existing checkpoints.
    """
    folder = CheckpointFolder(directory / "checkpoints")
    if name in POINTERS or (Path(name).name == name and not Path(name).exists()):
        number = epoch_named(name)
        own = None if number is None else folder.at_epoch(number)
        if name.isdecimal():
            own = entry_of(folder.path(int(name))) or entry_of(folder.model_path(int(name)))
        elif number is None:
            own = entry_of(folder.root / (folder.named(POINTER_NAMED[name]) if name in POINTER_NAMED else name))
        if own is None:
            named = [pointer for pointer in POINTERS if folder.named(pointer)]
            ended = [entry.state().get("epoch_ended") for entry in folder.entries()]
            known = [*named, *(f"epoch-{epoch}" for epoch in ended if epoch is not None)]
            known += [entry.name for entry in (*folder.published(), *folder.models())]
            there = f"there are {', '.join(known)}" if known else "the run has no checkpoint yet"
            raise EnvironmentFault("X720", f"{directory} has no checkpoint {name}; {there}")
        return find(own.path, weights=True)
    return find(Path(name), weights=True)


def _found(path: Path, weights: bool) -> CheckpointEntry | None:
    if path.suffix == ALIAS and path.is_file():
        # An alias next to the pointers belongs to its pointer's target; any other lies inside a checkpoint.
        path = path.with_suffix("") if path.stem in POINTER_NAMED else path.parent
    if path.name in POINTER_NAMED and path.is_file():
        return CheckpointFolder(path.parent).pointed(POINTER_NAMED[path.name])
    if entry := entry_of(path):
        return entry
    if (number := epoch_named(path.name)) is not None and not path.exists():
        folders = (CheckpointFolder(path.parent / "checkpoints"), CheckpointFolder(path.parent))
        return next((entry for folder in folders if (entry := folder.at_epoch(number)) is not None), None)
    for folder in (CheckpointFolder(path / "checkpoints"), CheckpointFolder(path)):
        latest, model = folder.latest(), folder.pointed("model") if weights else None
        if model is not None and (latest is None or model.step >= latest.step):
            return model
        if latest is not None:
            return latest
    return None


MOST = 3


def check_model(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless the checkpoint's description fits the plan."""
    _refuse(entry, mismatches(entry.state(), checkpoint_contents(plan)))


def check_weights(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless the checkpoint's weights fit the plan's model."""
    _refuse(entry, weight_mismatches(entry.state(), checkpoint_contents(plan)))


def check_origin(plan: Plan, entry: CheckpointEntry) -> None:
    """Raise ResumeRefused unless a run of the plan can start from the checkpoint's weights, with or without an
    adapter."""
    _refuse(entry, weight_mismatches(entry.state(), origin_contents(plan, entry.state())))


def check_base(entry: CheckpointEntry, base: str | None) -> None:
    """Raise ResumeRefused unless an adapter was trained on this base. base: its digest, None without an adapter."""
    trained_on = entry.state().get("base_content")
    if trained_on != base:
        raise ResumeRefused(
            f"the adapter in {entry.path} was trained on the base {trained_on}, but the weights that were read are the "
            f"base {base}: start from the folder or checkpoint that it was trained on"
        )


def _refuse(entry: CheckpointEntry, differences: list[CheckpointMismatch]) -> None:
    if differences:
        more = f"; and {len(differences) - MOST} more differences" if len(differences) > MOST else ""
        raise ResumeRefused(f"{entry.path} does not fit: {'; '.join(map(str, differences[:MOST]))}{more}")


def check_folder(plan: Plan) -> None:
    """Raise EnvironmentFault if the plan starts from files of a folder and the files have changed since planning."""
    try:
        for node in plan.nodes:
            if node.op == "setup.read_weights":
                planned_files(**{name: value for name, value in node.args.items() if name != "grows"})
            elif node.op == "setup.scorer":
                planned_scorer(**node.args)
            elif node.op == "setup.read_teacher":
                planned_files(node.args["digest"], node.args["folder"])
            elif node.op == "setup.reference" and "digest" in node.args:
                planned_files(node.args["digest"], node.args["reference"])
            elif node.op == "setup.read_adapter":
                planned_adapter(plan, **node.args)
    except OSError as error:
        raise EnvironmentFault("X524", str(error)) from error


def planned_files(digest: str, folder: str = "", repo: str = "", revision: str = "") -> WeightFiles:
    """Return the weight files of a folder, or of a snapshot in the cache of huggingface_hub. Raises OSError if they
    have changed since planning."""
    try:
        place = folder or find_snapshot(repo, revision)[0]
        files = read_weight_files(place)
    except (SnapshotMissing, WeightsUnreadable) as problem:
        raise OSError(f"{problem}; {problem.hint}") from problem
    if files.digest != digest:
        raise OSError(f"{place} has other files, or another config.json, than when the plan was made; plan again")
    return files


def planned_scorer(folder: str, digest: str = "", **_: Any) -> WeightFiles:
    """Return the files of the reward model. Raises OSError if they have changed since planning, or did not
    exist then."""
    if not digest:
        raise OSError(f"there was no reward model in {folder} when the plan was made; plan again when it is there")
    return planned_files(digest, folder)


def planned_adapter(plan: Plan, folder: str, digest: str, task: str = "") -> PeftFolder:
    """Return the PEFT adapter in a folder. task: the task it is for, of several. Raises OSError if it has changed since
    planning."""
    adapter = (alone(plan.architecture, task) if task else plan.architecture).adapter
    assert adapter is not None
    try:
        adapter_folder = read_peft(folder, plan.architecture.base, adapter.peft_keys)
    except PeftUnreadable as problem:
        raise OSError(f"{problem}; {problem.hint}") from problem
    if adapter_folder.digest != digest:
        raise OSError(f"{folder} has another adapter than when the plan was made; plan again")
    return adapter_folder
