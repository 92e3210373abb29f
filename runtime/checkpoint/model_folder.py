"""The folder of a model as it is when a run begins, held against the plan that was made of it."""

from ...dsl.checking.hub_cache import SnapshotMissing, find_snapshot
from ...planner.plan import Plan
from ...planner.weights.files import WeightFiles, WeightsUnreadable, read_weight_files
from ..errors import EnvironmentFault


def check_folder(plan: Plan) -> None:
    """Raise EnvironmentFault if a plan begins with the weights of a folder and they are not those it was made for."""
    args = next((node.args for node in plan.nodes if node.op == "setup.read_weights"), None)
    if args is not None:
        try:
            planned_files(**args)
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
