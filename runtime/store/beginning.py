"""The beginning of a run: a checkpoint, weights of a run or folder, or nothing; and checks that they fit the plan."""

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
    """What a run begins with, as far as can be told from names and sizes.

    entry: the full state, None for none. own: whether it is the run's own. anew: what the run has done before is of
    another beginning, and has to make way.
    """

    entry: CheckpointEntry | None
    own: bool
    anew: bool

    @property
    def step(self) -> int:
        return self.entry.step if self.entry is not None else 0


def starting_point(plan: Plan, directory: Path) -> StartingPoint:
    """Choose for the run in `directory`.

    Raises EnvironmentFault if what is named is not there, ResumeRefused if the run has checkpoints and none is whole.
    """
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
    """What `checkpoint.from` was when a checkpoint's run began."""
    return (entry.state().get("begun_from") or {}).get("from")


def _began_there(own: CheckpointEntry, named: str) -> bool:
    """Whether a run began where `checkpoint.from` says, in whatever words: an absolute path, or one through a link.

    The same words are enough: a folder may have moved with all that lies in it.
    """
    begun = own.state().get("begun_from") or {}
    if not begun:
        return False
    place = str(Path(named).resolve())
    return named == begun["from"] or place in (begun.get("place", str(Path(begun["from"]).resolve())), begun["path"])


def total_steps(plan: Plan, start: StartingPoint) -> int | None:
    """Return the steps of the whole run from where it begins; None until the data is counted.

    A budget in tokens counts those of the checkpoint, whose steps may have had other batches.
    """
    if start.entry is None or plan.timeline.budget_tokens is None:
        return plan.timeline.steps
    past = past_of(start.entry.state())
    if past is None:
        return plan.timeline.steps
    return arithmetic_of(plan).resumed(past, start.step, past.before(start.step)).steps


def left_to_train(plan: Plan, start: StartingPoint, steps: int | None = None) -> bool:
    """Whether the budget goes on behind the state that a run begins with. steps: of the budget, where the plan does not
    know them; True where nobody does yet."""
    total = total_steps(plan, start) if steps is None else steps
    return start.entry is None or total is None or start.step < total


def check_left(plan: Plan, start: StartingPoint, directory: Path, steps: int | None = None) -> None:
    """Raise NothingLeft if a run begins with a state that has all steps of the budget (see `left_to_train`).

    A run that was cut off behind its last step has its end left to do; one that has ended says so by itself.
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
    """The step at which the run in a directory has ended with all that was to happen at its end; None if it has not."""
    try:
        return int(read_regular(directory / FINISHED, 100))
    except (OSError, ValueError):
        return None


def has_finished(plan: Plan, start: StartingPoint, directory: Path) -> bool:
    """Return True if a run has ended with the state that it begins with, and its budget has no further step.

    False where the steps of the budget are not known until the data is counted.
    """
    return start.own and not left_to_train(plan, start) and finished_step(directory) == start.step


def begun_from(plan: Plan, start: StartingPoint) -> dict[str, Any] | None:
    """What the checkpoints of a run say of its beginning."""
    if start.entry is None:
        return None
    if start.own:
        return start.entry.state().get("begun_from")
    named = plan.node("setup.resume").args["origin"]
    place = str(Path(named).resolve())
    return {"from": named, "place": place, "path": str(start.entry.path.resolve()), "step": start.entry.step}


# How often a checkpoint is looked for, of a run that removes old ones meanwhile.
_SEARCHES: Final = 3


def find(path: Path, *, weights: bool = False) -> CheckpointEntry:
    """The checkpoint that a path means: itself, a pointer to it, `epoch-2` in a folder of checkpoints or in a run, the
    latest of either.

    weights: weights alone will do, and those of a finished run are the first choice. Raises EnvironmentFault.
    """
    entry = _found(path, weights)
    if entry is None:
        what = "checkpoint" if weights else "full checkpoint"
        raise EnvironmentFault(
            "X720", f"there is no {what} at {path}: the path is not a run with a checkpoint, and not a checkpoint"
        )
    if not weights and not entry.is_full:
        raise EnvironmentFault("X720", f"{path} holds weights alone; checkpoint.from needs a full checkpoint (ckpt-s…)")
    if flaws := entry.flaws():
        raise EnvironmentFault("X720", f"the checkpoint {entry.path} is damaged: {flaws[0]}")
    return entry


def find_to_read(find_now: Callable[[], CheckpointEntry]) -> tuple[CheckpointEntry, HeldLock]:
    """Find a checkpoint, and keep its run from removing it while what comes with it stays open.

    find_now: as `find` or `find_named`; called again if the checkpoint is removed meanwhile. Raises EnvironmentFault.
    """
    left = _SEARCHES
    while True:
        left -= 1
        try:
            entry = find_now()
        except EnvironmentFault as fault:
            # It may have been removed while it was looked at; the pointers name another one then.
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


def find_named(directory: Path, name: str) -> CheckpointEntry:
    """The checkpoint of a run that a pointer (`latest`, `best`, `model`), a name of its own (`ckpt-s…`), its step
    (`500`) or the epoch it ends (`epoch-2`) means, or what any other path means, as in `find`.

    Raises EnvironmentFault, which says what there is.
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
            known = [*named, *(f"epoch-{each}" for each in ended if each is not None)]
            known += [entry.name for entry in (*folder.published(), *folder.models())]
            there = f"there are {', '.join(known)}" if known else "the run has no checkpoint yet"
            raise EnvironmentFault("X720", f"{directory} has no checkpoint {name}; {there}")
        return find(own.path, weights=True)
    return find(Path(name), weights=True)


def _found(path: Path, weights: bool) -> CheckpointEntry | None:
    if path.suffix == ALIAS and path.is_file():
        # A file beside the pointers is that of what its pointer names; else it is the one in a checkpoint.
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


def check_folder(plan: Plan) -> None:
    """Raise EnvironmentFault if a plan begins with the files of a folder and they are not those it was made for."""
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
    """The files of a folder, or of a snapshot in the cache of huggingface_hub on this machine. Raises OSError where
    they are not those of the plan."""
    try:
        found = folder or find_snapshot(repo, revision)[0]
        files = read_weight_files(found)
    except (SnapshotMissing, WeightsUnreadable) as problem:
        raise OSError(f"{problem}; {problem.hint}") from problem
    if files.digest != digest:
        raise OSError(f"{found} has other files, or another config.json, than when the plan was made; plan again")
    return files


def planned_scorer(folder: str, digest: str = "", **_: Any) -> WeightFiles:
    """The files of the model that scores completions. Raises OSError where they are not those of the plan, which may
    have been made before they were there."""
    if not digest:
        raise OSError(f"there was no reward model in {folder} when the plan was made; plan again when it is there")
    return planned_files(digest, folder)


def planned_adapter(plan: Plan, folder: str, digest: str, task: str = "") -> PeftFolder:
    """The adapter in a folder that PEFT has saved. task: whose it is, of several. Raises OSError where it is not that
    of the plan."""
    adapter = (alone(plan.architecture, task) if task else plan.architecture).adapter
    assert adapter is not None
    try:
        found = read_peft(folder, plan.architecture.base, adapter.peft_keys)
    except PeftUnreadable as problem:
        raise OSError(f"{problem}; {problem.hint}") from problem
    if found.digest != digest:
        raise OSError(f"{folder} has another adapter than when the plan was made; plan again")
    return found
