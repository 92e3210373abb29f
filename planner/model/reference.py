"""The reference model of a loss: whether its log-probabilities can be computed with the model of the run."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from xtrain.dsl.checking.model_folder import family_in_folder, settings_in_folder
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL, PRECOMPUTED, ReferredLoss
from xtrain.dsl.schema.model import FAMILIES
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture, ParameterSpec
from xtrain.planner.findings import Findings
from xtrain.planner.weights.config_file import read_differences
from xtrain.planner.weights.files import WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.planner.weights.fit import assign

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

CODE: Final = "X444"
RULE: Final = "loss.reference"
PATH: Final = "loss.reference"
BY_HAND: Final = "write `reference = precomputed`, and give the datasets a column `ref_logprobs`"
# Settings of a model that do not decide what its weights compute.
FREE: Final = ("loss", "elsewhere")


def reference_files(spec: Spec) -> WeightFiles | None:
    """The weights of a reference that is a model of its own. Raises WeightsUnreadable."""
    loss = spec.loss
    folder = loss.reference_folder if isinstance(loss, ReferredLoss) else None
    return None if folder is None else read_weight_files(folder)


def refers_in_each_step(spec: Spec) -> bool:
    """Whether each step runs the model forward once more, for what its loss compares with: of completions, or of
    answers behind the prompts of others. Else a reference is computed before the first step, or there is none."""
    return spec.loss.mismatched or (spec.rollout is not None and bool(spec.loss.computed))


def kept_tensors(run: "Resolved", tensors: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    """What a run with rollouts keeps of the reference that it compares completions with, as training changes it."""
    loss = run.spec.loss
    if run.spec.rollout is None or not isinstance(loss, ReferredLoss) or not loss.computed:
        return []
    off = loss.reference == ADAPTER_OFF
    return [each for each in tensors if each.trained and not (off and each.adapter)]


def check_reference(spec: Spec, architecture: Architecture, found: Findings) -> None:
    """Report why the reference of the loss cannot be computed."""
    loss = spec.loss
    if not isinstance(loss, ReferredLoss) or not loss.computed:
        return
    if problem := _of_documents(spec) or _of_weights(spec, loss.reference) or _of_folder(spec, loss, architecture):
        found.fail(RULE, CODE, PATH, *problem)
    else:
        found.passed(RULE, f"{loss.reference} is computed with the model of the run")


Problem = tuple[str, str]


def _of_documents(spec: Spec) -> Problem | None:
    """Log-probabilities are those of documents as they are stored."""
    for link in spec.collate:
        if isinstance(link, UserComponent) or link.changes:
            name = link.function if isinstance(link, UserComponent) else link.name
            return f"`{name}` of collate changes documents, and a reference is computed of them as they are", BY_HAND
    return None


def _of_weights(spec: Spec, reference: str) -> Problem | None:
    """There must be weights that are meant."""
    if reference == ADAPTER_OFF and not spec.is_adapted:
        return "adapter_off is the model under an adapter, and there is no adapter", "write `reference = initial`"
    drawn = spec.model.folder is None or spec.model.weights == "none"
    if reference in (INITIAL, ADAPTER_OFF) and spec.checkpoint.from_ is not None and drawn and not spec.is_adapted:
        message = "the run goes on with the state of another run, so its initial weights are random numbers"
        return message, "name the folder of the reference, or begin with `checkpoint { pretrained }`"
    return None


def _of_folder(spec: Spec, loss: ReferredLoss, architecture: Architecture) -> Problem | None:
    """The model in a folder must be computed as that of the run is."""
    folder = loss.reference_folder
    if folder is None:
        return None
    means, diagnostics = settings_in_folder(folder)
    if diagnostics.has_errors:
        why = diagnostics.errors[0].message.replace(str(Path(folder).absolute()), folder)
        words = f"`{INITIAL}`, `{ADAPTER_OFF}`, `{PRECOMPUTED}`"
        return f"{folder} is no reference: {why}", f"give the folder of a model, or one of {words}"
    family, other = architecture.family, "give a model of the same architecture"
    if (theirs := family_in_folder(folder)) != family:
        return f"`family` is {theirs} in {folder}, and {family} in the model of the run", other
    meaning = FAMILIES[family].resuming
    for difference in read_differences(architecture.base, means):
        name, _, values = difference.partition(" ")
        if meaning.get(name.replace(".", "_")) not in FREE:
            return f"`{name}` of the model in {folder} is {values}", other
    try:
        assign(architecture, read_weight_files(folder))
    except WeightsUnreadable as problem:
        return str(problem), problem.hint
    except ValueError as problem:
        return f"the weights of {folder} are not those of the model: {problem}", other
    return None
