"""`Architecture` from `model` of a spec, with reasons for derived numbers, and the reference model of a loss."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import evolve

from xtrain.contracts.models import PlannedModel
from xtrain.dsl.checking.model_folder import family_in_folder, settings_in_folder
from xtrain.dsl.schema.adapters import Adapter, TaskAdapters
from xtrain.dsl.schema.component import UserComponent, planned
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.losses import ADAPTER_OFF, INITIAL, PRECOMPUTED, ReferredLoss
from xtrain.dsl.schema.model import FAMILIES, ModelFolder
from xtrain.dsl.schema.model_config import HARMLESS_TO_CODE, is_metadata
from xtrain.dsl.schema.setting import Auto, resuming_of, settings_of
from xtrain.dsl.spec import Spec
from xtrain.plan.architecture import EMBEDDING, HEAD, Architecture, ParameterSpec
from xtrain.plan.data import TokenizerMissing, TokenizerUnreadable
from xtrain.plan.findings import Findings, checks
from xtrain.plan.groups import alone, check_groups, check_tasks
from xtrain.plan.parameters import check_frozen, check_indexers, covers
from xtrain.plan.peft import PeftFolder
from xtrain.plan.resolved import Shape
from xtrain.plan.weight_files import WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.plan.weight_layout import assign, has_rewards
from xtrain.planner.derive.adapters import ADAPTER_RULE as RULE
from xtrain.planner.derive.adapters import check_adapter, check_adapter_files, read_adapter

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


REFERENCE_CODE: Final = "X444"
REFERENCE_RULE: Final = "loss.reference"
REFERENCE_PATH: Final = "loss.reference"
BY_HAND: Final = "write `reference = precomputed`, and give the datasets a column `ref_logprobs`"
# Settings of a model that do not decide what its weights compute.
FREE: Final = ("loss", "elsewhere")


def reference_files(spec: Spec) -> WeightFiles | None:
    """Return the weights of a reference that is a model of its own. Raises WeightsUnreadable."""
    loss = spec.loss
    folder = loss.reference_folder if isinstance(loss, ReferredLoss) else None
    return None if folder is None else read_weight_files(folder)


def refers_in_each_step(spec: Spec) -> bool:
    """Return True if each step runs one more forward of the model for the loss's reference: of completions, or of
    answers to the prompts of others. Otherwise a reference is computed before the first step, or there is none."""
    return spec.loss.mismatched or (spec.rollout is not None and bool(spec.loss.computed))


def kept_tensors(resolved: "Resolved", tensors: Iterable[ParameterSpec]) -> list[ParameterSpec]:
    """Return the parameters whose values a run with rollouts stores for its reference, because training changes
    them."""
    loss = resolved.spec.loss
    if resolved.spec.rollout is None or not isinstance(loss, ReferredLoss) or not loss.computed:
        return []
    off = loss.reference == ADAPTER_OFF
    return [each for each in tensors if each.trained and not (off and each.adapter)]


@checks(
    "loss.reference",
    reads="loss.* {model} checkpoint.pretrained checkpoint.from collate experiment.seed precision.params",
)
def check_reference(spec: Spec, architecture: Architecture, found: Findings) -> None:
    """Report why the reference of the loss cannot be computed."""
    loss = spec.loss
    if not isinstance(loss, ReferredLoss) or not loss.computed:
        return
    if problem := _of_documents(spec) or _of_weights(spec, loss.reference) or _of_folder(spec, loss, architecture):
        found.fail(REFERENCE_RULE, REFERENCE_CODE, REFERENCE_PATH, *problem)
    else:
        found.passed(REFERENCE_RULE, f"{loss.reference} is computed with the model of the run")


ReferenceProblem = tuple[str, str]


def _of_documents(spec: Spec) -> ReferenceProblem | None:
    """Return the fault if collators change documents: log-probabilities are computed of documents as stored."""
    for link in spec.collate:
        if isinstance(link, UserComponent) or link.changes:
            name = link.function if isinstance(link, UserComponent) else link.name
            return f"`{name}` of collate changes documents, but a reference needs them unchanged", BY_HAND
    return None


def _of_weights(spec: Spec, reference: str) -> ReferenceProblem | None:
    """Return the fault if the reference names weights that do not exist."""
    if reference == ADAPTER_OFF and not spec.is_adapted:
        return "adapter_off is the model under an adapter, and there is no adapter", "write `reference = initial`"
    named, drawn = spec.checkpoint.from_, spec.model.folder is None or spec.model.weights == "none"
    own = named is None or not drawn or spec.is_adapted
    if reference in (INITIAL, ADAPTER_OFF) and not own and not _drew_the_same(spec, str(named)):
        message = "the run resumes the state of another run, so its initial weights are random numbers"
        return message, "name the folder of the reference, or start from `checkpoint { pretrained }`"
    return None


def _drew_the_same(spec: Spec, named: str) -> bool:
    """Return True if the run whose state a run begins with has drawn the same initial weights, as replays do."""
    from xtrain.dsl.load import load_spec
    from xtrain.plan.serialise import PlanError, load_plan

    for folder in (Path(named), *Path(named).parents[:2]):
        try:
            plan = load_plan(folder / "plan.json")
        except PlanError:
            continue
        other = load_spec(plan.spec, (), {plan.spec: plan.spec_text}).spec
        if other is None or other.checkpoint.pretrained is not None:
            return False
        drawn = [(each.model, each.experiment.seed, each.precision.params) for each in (spec, other)]
        further = other.checkpoint.from_
        return drawn[0] == drawn[1] and (further is None or _drew_the_same(other, further))
    return False


def _has_files(folder: str, digest: str) -> bool:
    """Return True if the modeling files of a folder have a digest."""
    from xtrain.dsl.checking.model_code import source_digest

    return Path(folder).is_dir() and source_digest(folder) == digest


def _of_folder(spec: Spec, loss: ReferredLoss, architecture: Architecture) -> ReferenceProblem | None:
    """Return the fault unless the model in the folder is computed like the run's model."""
    folder = loss.reference_folder
    if folder is None:
        return None
    code = architecture.own.get("code")
    if code is not None and "remote" in code and not _has_files(folder, code["digest"]):
        message = f"{folder} cannot be a reference: it has other modeling files than the model of the run"
        return message, f"give a folder with the same files, or one of `{INITIAL}`, `{ADAPTER_OFF}`, `{PRECOMPUTED}`"
    means, diagnostics = settings_in_folder(folder, code=spec.model.code)
    if diagnostics.has_errors:
        why = diagnostics.errors[0].message.replace(str(Path(folder).absolute()), folder)
        words = f"`{INITIAL}`, `{ADAPTER_OFF}`, `{PRECOMPUTED}`"
        return f"{folder} cannot be a reference: {why}", f"give the folder of a model, or one of {words}"
    family, other = architecture.family, "give a model of the same architecture"
    if code is None and (theirs := family_in_folder(folder)) != family:
        return f"`family` is {theirs} in {folder}, and {family} in the model of the run", other
    if code is not None:
        from xtrain.dsl.checking.model_code import read_config

        ours, read = code["config"], read_config(ModelFolder(path=folder))
        names = (name for name in ours.keys() | read.keys() if ours.get(name) != read.get(name))
        if different := sorted(name for name in names if not is_metadata(name, HARMLESS_TO_CODE)):
            return f"`{different[0]}` in the config.json of {folder} differs from the run's model", other
    else:
        from xtrain.plan.exported_config import read_differences

        meaning = resuming_of(FAMILIES[family])
        for difference in read_differences(architecture.base, means):
            name, _, values = difference.partition(" ")
            if meaning.get(name.replace(".", "_")) not in FREE:
                return f"`{name}` of the model in {folder} is {values}", other
    try:
        assign(architecture, read_weight_files(folder))
    except WeightsUnreadable as problem:
        return str(problem), problem.hint
    except ValueError as problem:
        return f"the weights of {folder} do not fit the model: {problem}", other
    return None


GROWS: Final = "tokenizer"
"""`vocab` of a model in a folder that gets rows for all ids of the tokenizer."""


@checks("model.layers model.block", reads="model.*")
def derive_architecture(spec: Spec, found: Findings) -> Shape:
    """Resolve every `auto` of `model`. Unresolvable values are reported and replaced, so that checks can continue."""
    values, why = spec.model.resolved()
    reasons = {f"model.{name}": reason for name, reason in why.items()}
    if "head_dim" in settings_of(type(spec.model)):  # otherwise the family decides the width of heads
        values["head_dim"] = _head_dim(spec, reasons, found)
    if values.get("rope", {}).get("scaling") == "longrope":
        scaling = spec.model.rope.of_rows(spec.batch.sequence)
        values["rope"] = scaling.resolved()
        if scaling != spec.model.rope:
            reasons["model.rope.divisors"] = f"rows of {spec.batch.sequence}, original {scaling.original}"
    values["vocab"] = _vocab(spec, reasons, found)
    values["layers"] += values.get("mtp", 0)
    if not spec.loss.of_logits:
        values |= {"head": "reward", "tie_embeddings": False}
    architecture = Architecture.from_values({"family": spec.model.family, **values})
    composed = planned(spec.model, PlannedModel).composed(
        architecture,
        lambda wrong: found.fail("model.block", "X223", "model.family", wrong.message, wrong.hint, span=wrong.span),
    )
    architecture = evolve(architecture, own={**architecture.own, **composed})
    adapter_files: dict[str, PeftFolder] = {}
    adapters: dict[str, Adapter] = {}
    for task, (block, rule, written) in _written_adapters(spec).items():
        adapter, files, why = read_adapter(spec, written, architecture, found, block, rule)
        reasons |= why | {f"{block}.{name}": reason for name, reason in _reasons(adapter)}
        adapters[task] = evolve(adapter.resolved(), from_=None)
        if files is not None:
            adapter_files[task] = files
    if spec.adapter is not None:
        architecture = evolve(architecture, adapter=adapters[""])
    elif spec.tasks:
        architecture = evolve(architecture, adapter=TaskAdapters(tasks=adapters))
    if architecture.is_moe:
        _check_routing(architecture, found)
    if (unfit := evolve(spec.model, vocab=architecture.vocab).unfit()) is not None:
        setting, message, hint = unfit
        found.fail("model.layers", "X433", f"model.{setting}", message, hint)
    _check_heads(architecture, found)
    _check_rope(spec, architecture, found)
    check_frozen(spec, architecture, found)
    check_indexers(spec, architecture, found)
    check_tasks(spec, architecture, found)
    check_adapter(spec, architecture, found)
    if not found.fails(RULE):  # an adapter that does not fit does not say which parameters there are
        check_groups(spec, architecture, found)
    if spec.parametrization is not None:
        from xtrain.plan.parametrization import check_parametrization

        check_parametrization(spec, architecture, found)
    for task, files in adapter_files.items():
        if task and not found.fails(f"model.tasks.{task}") and not found.fails("model.tasks"):
            check_adapter_files(
                alone(architecture, task), files, found, f"task.{task}.adapter", f"model.adapter_files.{task}"
            )
        elif not task:
            check_adapter_files(architecture, files, found)
    weights = _weights(spec, architecture, found) if loads_weights(spec) else None
    check_reference(spec, architecture, found)
    return Shape(architecture, reasons, weights, adapter_files)


def _written_adapters(spec: Spec) -> dict[str, tuple[str, str, Adapter]]:
    """Return task → (path in the spec, rule, adapter); the adapter of the spec itself is under an empty name."""
    if spec.adapter is not None:
        return {"": ("adapter", RULE, spec.adapter)}
    return {
        name: (f"task.{name}.adapter", f"model.tasks.{name}", task.adapter)
        for name, task in spec.tasks.items()
        if task.adapter is not None
    }


def _reasons(adapter: Adapter) -> Iterator[tuple[str, str]]:
    """Yield (setting, reason) for settings that were `auto`."""
    for name, (_, why) in adapter.auto().items():
        if isinstance(getattr(adapter, name), Auto):
            yield name, why


def loads_weights(spec: Spec) -> bool:
    """Return True if a run starts with the weights of the model's folder instead of another run's."""
    other = spec.checkpoint.pretrained is not None and (spec.checkpoint.from_ is None or spec.is_adapted)
    return spec.model.folder is not None and spec.model.weights == "auto" and not other


@checks("model.folder", reads="model.* checkpoint.pretrained checkpoint.from loss.kind")
def _weights(spec: Spec, architecture: Architecture, found: Findings) -> WeightFiles | None:
    """Return the files of the folder after checking them against the model."""
    assert spec.model.folder is not None
    rule = path = "model.folder"
    try:
        files = read_weight_files(spec.model.folder.path)
    except WeightsUnreadable as problem:
        found.fail(rule, "X524", path, str(problem), problem.hint)
        return None
    try:
        assign(architecture, files, grows=spec.model.vocab == GROWS)
    except ValueError as problem:
        message = f"the weights of {spec.model.folder} do not fit the model: {problem}"
        hint = "use weights and config.json of one model"
        if architecture.has_logits and has_rewards(architecture, files):
            hint = "it is a reward model: choose a reward loss, such as bradley_terry"
        found.fail(rule, "X524", path, message, hint)
        return None
    if files.coding != spec.model.coding:
        message = f"no matrix of {spec.model.folder} is stored as {spec.model.coding}, as its config.json says"
        found.fail(rule, "X524", path, message, "remove `quantization_config` if the files are not quantized")
        return None
    found.passed(rule, f"all {len(files.tensors):,} tensors of {spec.model.folder} are assigned to the model")
    return files


@checks("model.head_dim", reads="model.dim model.heads model.head_dim")
def _head_dim(spec: Spec, reasons: dict[str, str], found: Findings) -> int:
    model = spec.model
    if not isinstance(model.head_dim, Auto):
        width = model.head_dim
    elif model.dim % model.heads == 0:
        width = model.dim // model.heads
        reasons["model.head_dim"] = f"dim {model.dim} / heads {model.heads}"
    else:
        message = f"heads {model.heads} do not divide dim {model.dim}"
        options = " or ".join(map(str, _nearest_divisors(model.dim, model.heads)))
        found.fail("model.head_dim", "X408", "model.heads", message, f"use heads {options}, or give head_dim")
        return 2
    if width % 2:
        message = f"head_dim {width} is odd, but rotary positions turn pairs"
        found.fail("model.head_dim", "X408", "model.head_dim", message, f"use head_dim {width + 1}")
    else:
        found.passed("model.head_dim", f"head_dim {width} is even")
    return width


def _nearest_divisors(number: int, wanted: int) -> list[int]:
    """Return the divisors of `number` next to `wanted`, which is not a divisor: one below and, if there is one, one
    above."""
    below = next(d for d in range(min(wanted, number), 0, -1) if number % d == 0)
    above = next((d for d in range(wanted + 1, number + 1) if number % d == 0), None)
    return [below] if above is None else [below, above]


@checks("model.groups", reads="{kv_heads}")
def _check_heads(architecture: Architecture, found: Findings) -> None:
    heads, kv_heads = architecture.heads, architecture.kv_heads
    if heads % kv_heads:
        divisor = next(d for d in range(min(kv_heads, heads), 0, -1) if heads % d == 0)
        message = f"kv_heads {kv_heads} do not divide heads {heads}"
        found.fail("model.groups", "X408", "model.kv_heads", message, f"use kv_heads {divisor}")
    else:
        found.passed("model.groups", f"{heads // kv_heads} query heads share each of {kv_heads} key/value heads")


@checks("model.rope", reads="model.rope.* batch.sequence")
def _check_rope(spec: Spec, architecture: Architecture, found: Findings) -> None:
    rope = architecture.rope
    if rope.scaling == "none":
        return
    angles = [angles for kind in architecture.kinds if (angles := kind.block.angles(architecture)) is not None]
    width = next((each.width for each in angles if each.rope == rope), architecture.head_dim)
    problem = rope.problem(spec.batch.sequence, width // 2)
    if problem is None:
        found.passed("model.rope", f"positions are scaled: {rope}")
    else:
        setting, message, hint = problem
        found.fail("model.rope", "X432", f"model.rope.{setting}", message, hint)


@checks("model.routing", reads="model.family model.experts model.experts_per_token")
def _check_routing(architecture: Architecture, found: Findings) -> None:
    chosen, experts = architecture.experts_per_token, architecture.experts
    if chosen > experts:
        message = f"experts_per_token {chosen} exceeds experts {experts}"
        found.fail("model.routing", "X412", "model.experts_per_token", message, f"use {experts} or fewer")
    else:
        found.passed("model.routing", f"{chosen} of {experts} experts a token")


@checks("data.tokenizer data.vocab", reads="tokenizer.source model.vocab")
def _vocab(spec: Spec, reasons: dict[str, str], found: Findings) -> int:
    source, vocab, folder = spec.tokenizer.source, spec.model.vocab, spec.model.folder
    written = spec.origins.get("tokenizer")  # a plan's spec, read again, has the places of written settings alone
    in_model = folder is not None and (written is None or written.kind == "default")
    try:
        size = tokenizer_kind(source).size(source)
    except TokenizerUnreadable as problem:
        missing, message = isinstance(problem, TokenizerMissing), f"tokenizer cannot be read: {problem}"
        if missing and not in_model and isinstance(vocab, int):
            hint = f"planned with vocab {vocab}; the run needs the tokenizer"
            found.warn("data.tokenizer", "W505", "tokenizer", message, hint)
            return vocab
        hint = "correct the path, write `tokenizer bytes`, or give `vocab` in `model` to plan without the tokenizer"
        if missing and in_model:
            message = f"the spec has no `tokenizer`, and the model's folder {folder} has no tokenizer.json"
            hint = 'write `tokenizer "folder"` or `tokenizer hub("organisation/name")`'
        elif not missing:
            hint = problem.remedy or "give the folder of a tokenizer, or write `tokenizer bytes`"
        found.fail("data.tokenizer", "X505", "model.folder" if in_model else "tokenizer", message, hint)
        return vocab if isinstance(vocab, int) else 2
    found.passed("data.tokenizer", f"`{source}` has {size:,} ids")
    if vocab == GROWS and folder is not None:
        return _grown(spec, size, reasons, found)
    if not isinstance(vocab, int):
        reasons["model.vocab"] = f"the size of tokenizer `{source}`"
        return size
    if vocab < size:
        message = f"vocab {vocab} is smaller than the {size} ids of the tokenizer"
        hint = f"use vocab {size}, or leave it auto"
        if folder is not None:
            hint = f"write `vocab = tokenizer` in `model`, which adds {size - vocab} rows to the embedding and the head"
        found.fail("data.vocab", "X506", "model.vocab", message, hint)
    else:
        found.passed("data.vocab", f"vocab {vocab:,} holds the {size:,} ids of the tokenizer")
    return vocab


def _grown(spec: Spec, size: int, reasons: dict[str, str], found: Findings) -> int:
    """Return the vocabulary of a model in a folder, with new rows for ids of the tokenizer that have none."""
    assert spec.model.folder is not None
    settings, diagnostics = settings_in_folder(spec.model.folder.path, code=spec.model.code)
    if diagnostics.has_errors:  # the file changed since the spec was read
        error = diagnostics.errors[0]
        found.fail("data.vocab", error.code, "model.folder", error.message, error.hint or "compile the spec again")
        return size
    stored = settings["vocab"]
    new = max(0, size - stored)
    reasons["model.vocab"] = f"{stored:,} rows of {spec.model.folder}, and {new:,} for further ids of the tokenizer"
    matrices = [f"{EMBEDDING}.weight"] + [f"{HEAD}.weight"] * (not spec.model.tie_embeddings)
    stays = any(covers(pattern, name) for pattern in spec.model.frozen for name in matrices)
    if new and (spec.is_adapted or stays):
        who = "an adapter leaves" if spec.is_adapted else "`frozen` leaves"
        message = f"`vocab = tokenizer` adds {new:,} rows, which {who} untrained"
        hint = "train the embedding and the head, or export the model once with the rows added and start from it"
        found.fail("data.vocab", "X506", "model.vocab", message, hint)
    else:
        found.passed("data.vocab", f"{stored:,} rows and {new:,} new ones hold the {size:,} ids of the tokenizer")
    return max(size, stored)
