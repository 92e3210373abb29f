"""The folder of a model as it is when a run begins, held against the plan that was made of it."""

from typing import Any

from xtrain.dsl.checking.hub_cache import SnapshotMissing, find_snapshot
from xtrain.planner.model.peft import PeftFolder, PeftUnreadable, read_peft
from xtrain.planner.model.tasks import alone
from xtrain.planner.plan import Plan
from xtrain.planner.weights.files import WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.runtime.errors import EnvironmentFault


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
