"""Models next to the trained one: teacher and reward model from folders, and sampling with its key-value cache.

A reward model keeps nothing of its forward: its memory is its weights and the widest intermediate values of a block.
"""

import json
import os
from collections.abc import Set
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import evolve

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.schema.policy import KEPT, SEEN, SHARES, Rollout
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import tokenizer_text
from xtrain.lazy_attrs import frozen
from xtrain.plan.architecture import Architecture, name_in_block
from xtrain.plan.data import TokenizerUnreadable
from xtrain.plan.findings import Findings, checks
from xtrain.plan.parameters import count_parameters, flops_per_token
from xtrain.plan.resolved import Shape
from xtrain.plan.weight_files import CONFIG, WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.plan.weight_layout import assign, has_rewards
from xtrain.planner.derive.model import derive_architecture
from xtrain.text.units import BYTES, bytes_text

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved, TrainedKind


def cache_bytes(resolved: "Resolved", prompts: int, positions: int) -> int:
    """Return the cache bytes on the rank with the most: every layer's numbers for every prompt, for all positions or
    the positions of its window.

    Ranks of context and data parallelism hold the whole cache; ranks of tensor parallelism their own heads.
    """
    arch, tp, pipeline = resolved.architecture, resolved.size("tp"), resolved.pipeline
    width = BYTES[resolved.formats.compute]
    exact, of_layer = max(BYTES["fp32"], width) // width, dict[int, int]()
    for kind in resolved.kinds:
        plain = plain_parameters(resolved, kind)
        numbers = sum(each.cached(arch, tp, positions, plain, exact) for each in kind.block.layers())
        of_layer |= dict.fromkeys(kind.layers, numbers)
    spans = [[pipeline.spans[stage] for stage in own] for own in pipeline.owners]
    most = max(sum(of_layer[layer] for first, last in own for layer in range(first, last + 1)) for own in spans)
    return prompts * most * width


def computes_again(resolved: "Resolved") -> bool:
    """Return True if each token of a text that is continued computes all positions before it again."""
    code = resolved.architecture.own.get("code")
    return code is not None and not (code["caches"] == "kernels" or (code["caches"] and resolved.size("pp") == 1))


def cache_text(resolved: "Resolved", size: int) -> str:
    """Return what is kept of earlier positions while texts are continued. size: bytes of `cache_bytes`."""
    if computes_again(resolved):
        return "without a cache: each token computes all positions before it again"
    if resolved.architecture.own.get("code", {}).get("caches") == "own":
        return "in a cache of transformers, whose memory is not counted"
    return f"key-value cache: {bytes_text(size)} a rank"


def plain_parameters(resolved: "Resolved", kind: "TrainedKind") -> Set[str]:
    """Return the parameters of a block that are stored in a number format, have no adapter, and are multiplied as
    stored, as required by `Layer.cached`."""
    # Imported here because the language loads this file with the actions, without a plan.
    from xtrain.plan.parameters import block_tensors

    tensors = block_tensors(resolved.inventory, kind.first)
    adapted = {each.adapter for each in tensors}
    scaled = {f"{module}.weight" for module in kind.scaled}
    plain = (name_in_block(each.name) for each in tensors if not each.quantised and each.name not in adapted)
    return {name for name in plain if name not in scaled}


# Copies of the logits of all completions: original, exact, as probabilities, and sorted or summed.
LOGITS = 4
# Bytes of a token with its log-probability in a checkpoint.
TOKEN_BYTES = 16


def completion_positions(resolved: "Resolved", rollout: Rollout) -> int:
    """Return the positions of a row that a completion and its prompt take together."""
    return resolved.batch.sequence // rollout.group // resolved.align * resolved.align


def longest_prompt(resolved: "Resolved", rollout: Rollout) -> int:
    """Return the maximum number of tokens of a prompt; the last token of a completion takes no position. Below 1 if
    rows are too short."""
    return completion_positions(resolved, rollout) + 1 - rollout.max_tokens


def sampling_cache_bytes(resolved: "Resolved", rollout: Rollout) -> int:
    """Return the cache bytes of the completions of a microbatch, on the rank with the most. Episodes of different
    lengths end at the same position, before a turn of each."""
    positions = completion_positions(resolved, rollout)
    positions += rollout.max_tokens if rollout.environment is not None else 0
    return cache_bytes(resolved, resolved.batch.micro * rollout.group, positions)


def kept_completions_bytes(resolved: "Resolved", rollout: Rollout) -> int:
    """Return the bytes of completions, at full length and without texts, in a checkpoint after the first of several
    steps whose completions are sampled at once. The first step's completions are included if they are used again."""
    steps = rollout.stale or rollout.steps - (rollout.updates == 1)
    waiting = steps * resolved.batch.rows * rollout.group
    positions = completion_positions(resolved, rollout)
    experts = positions * replayed_width(resolved) * BYTES["fp32"]
    tokens = rollout.max_tokens if rollout.environment is None else positions + 1
    return waiting * (tokens * (TOKEN_BYTES + sum(sampler_widths(resolved).values()) * BYTES["fp32"]) + experts)


def replayed_width(resolved: "Resolved") -> int:
    """Return how many numbers a token needs to record the experts that it was sent to in sampling; 0 without replay."""
    arch, rollout = resolved.architecture, resolved.spec.rollout
    return len(arch.expert_layers) * arch.experts_per_token if rollout is not None and rollout.replay_routing else 0


def sampler_widths(resolved: "Resolved") -> dict[str, int]:
    """Return how many numbers of each sampled token the sampler records, by the name of their column."""
    rollout, vocabulary = resolved.spec.rollout, resolved.architecture.vocab
    if rollout is None:
        return {}
    widths = {KEPT: min(rollout.top_k or vocabulary, vocabulary)} if rollout.logprobs == "processed" else {}
    if rollout.compare is not None:
        widths |= {SEEN: min(rollout.compare, vocabulary), SHARES: min(rollout.compare, vocabulary) + 1}
    return widths


def recorded_bytes(resolved: "Resolved") -> int:
    """Return the bytes of what sampling records of tokens for the microbatches that are on a device at once."""
    microbatches = resolved.batch.accumulate if resolved.size("pp") > 1 else 1
    width = replayed_width(resolved) + sum(sampler_widths(resolved).values())
    return microbatches * resolved.positions * width * BYTES["fp32"]


def sampling_bytes(resolved: "Resolved") -> int:
    """Return the bytes that sampling allocates in addition to weights, gradients and states: the cache, logits, and
    values for drawing."""
    rollout = resolved.spec.rollout
    answers = any(action.asks() is not None for _, action in resolved.spec.actions)
    if rollout is None or (resolved.spec.engine is not None and not answers):
        return 0
    exact = max(BYTES["fp32"], BYTES[resolved.formats.compute])
    logits = resolved.batch.micro * rollout.group * resolved.architecture.vocab * exact
    return sampling_cache_bytes(resolved, rollout) + LOGITS * logits


TEACHER_RULE: Final = "loss.teacher"
TEACHER_PATH: Final = "loss.teacher"
TEACHER_CODE: Final = "X441"
TEACHER_NAME: Final = "teacher"


def teacher_text(
    folder: str,
    tokenizer: str,
    *,
    sequence: int,
    rows: int,
    precision: str,
    device: str,
    drawn: bool = False,
    tp: int = 1,
) -> str:
    """Return a spec whose model is the teacher alone. tokenizer: as named by a spec or a plan. drawn: only the shape
    comes from the folder. tp: ranks that cut its matrices; all other ranks have rows of their own."""
    return (
        "experiment teacher { seed = 1, budget = 1 steps }\n"
        f"model {json.dumps(folder, ensure_ascii=False)} {'{ weights = none }' if drawn else ''}\n"
        f"tokenizer {tokenizer_text(tokenizer)}\n"
        "dataset made { source = synthetic() }\n"
        f"batch {{ sequence = {sequence}, rows = {rows} }}\n"
        f"precision {{ params = {precision} }}\n"
        "optimizer sgd { lr = 1 }\n"
        f"parallel {{ tp {tp} }}\n"
        f"launch {{ device = {device} }}\n"
    )


@frozen
class TeacherShape:
    """Teacher as read by a spec of its own, with the files of its weights."""

    spec: Spec
    architecture: Architecture
    weights: WeightFiles | None = None


@checks("loss.teacher", reads="loss.* model.* tokenizer.source")
@checks("loss.top", reads="loss.top model.* tokenizer.source")
def check_teacher(spec: Spec, arch: Architecture, found: Findings) -> TeacherShape | None:
    """Return the teacher, which must be a model that xtrain computes, with the same tokens; None after reporting
    otherwise. A missing folder may appear later, unless the teacher computes alongside the model."""
    teacher = spec.loss.learns_from
    if teacher is None:
        return None
    if teacher.top >= arch.vocab and not teacher.live:
        message = f"`top` is {teacher.top:,}, and the vocabulary has {arch.vocab:,} tokens"
        found.fail("loss.top", TEACHER_CODE, "loss.top", message, f"use less, such as top = {max(1, arch.vocab // 4)}")
    if not os.path.isfile(Path(teacher.folder) / CONFIG):  # noqa: PTH113 (any text is a name to it)
        message, hint = f"the teacher {teacher.folder} has no {CONFIG}", "paths are relative to the working folder"
        if teacher.live:
            found.fail(
                TEACHER_RULE, TEACHER_CODE, TEACHER_PATH, message, f"{hint}; a teacher that is live is part of the plan"
            )
        else:
            hint += "; `xtrain data teach` needs it, and the run looks again"
            found.warn(TEACHER_RULE, "W501", TEACHER_PATH, message, hint)
        return None
    shape = _teacher_shape(spec, teacher.folder, found)
    if shape is None:
        return None
    if (problem := other_tokens(spec, arch, teacher.folder, shape.architecture.vocab)) is not None:
        hint = "use a teacher with the same tokenizer and vocabulary, such as a larger model of the family"
        found.fail(TEACHER_RULE, TEACHER_CODE, TEACHER_PATH, problem, hint)
        return None
    try:
        files = read_weight_files(teacher.folder)
        assign(shape.architecture, files)
    except (WeightsUnreadable, ValueError) as problem:
        message = f"the teacher {teacher.folder}: {problem}"
        found.fail(TEACHER_RULE, "X524", TEACHER_PATH, message, "use weights and config of one model")
        return None
    found.passed(TEACHER_RULE, f"{teacher.folder} is a {shape.architecture.family} with {arch.vocab:,} tokens")
    return evolve(shape, weights=files)


def _teacher_shape(spec: Spec, folder: str, found: Findings) -> TeacherShape | None:
    """Return the model in the folder; None after reporting why it is invalid."""
    params = spec.precision.params
    text = teacher_text(folder, spec.tokenizer.source, sequence=8, rows=1, precision=params, device="cpu", drawn=True)
    loaded = load_spec(TEACHER_NAME, (), {TEACHER_NAME: text})
    errors = loaded.diagnostics.errors
    if loaded.spec is not None:
        own = Findings(loaded.spec)
        shape = derive_architecture(loaded.spec, own)
        errors = own.diagnostics.errors
        if not errors:
            return TeacherShape(loaded.spec, shape.architecture)
    hint = f'use a folder that `model "{folder}"` accepts'
    found.fail(TEACHER_RULE, errors[0].code, TEACHER_PATH, f"the teacher {folder}: {errors[0].message}", hint)
    return None


def other_tokens(spec: Spec, arch: Architecture, folder: str, theirs: int, who: str = "teacher") -> str | None:
    """Return text on the difference between the tokens of a model in a folder and the run's tokens; None if they are
    equal. theirs: the size of its vocabulary. who: description of the model."""
    if theirs != arch.vocab:
        return f"the {who} {folder} has a vocabulary of {theirs:,}, and the model one of {arch.vocab:,}"
    from xtrain.plan.vocabulary import differing_token  # few specs need it

    source = spec.tokenizer.source
    try:
        apart = differing_token(tokenizer_kind(source).location(source), folder)
    except TokenizerUnreadable:  # one of them has no tokenizer file, or another rule reports it
        return None
    return apart and f"the tokenizer of the {who} {folder} differs: {apart}"


SCORER_RULE: Final = "reward.folder"
SCORER_PATH: Final = "reward.folder"
SCORER_NAME: Final = "scorer"


@checks("reward.folder", reads="reward reward.* rollout model.* precision.params tokenizer.source")
def read_scorer(spec: Spec, arch: Architecture, found: Findings) -> Shape | None:
    """Return the model that scores completions, which must be one that xtrain computes, with a reward head and the same
    tokens; None if there is none, or after reporting why it is invalid."""
    folder = None if spec.reward is None else spec.reward.model_folder
    if folder is None or spec.rollout is None:
        return None
    if not os.path.isfile(Path(folder) / CONFIG):  # noqa: PTH113 (any text is a name to it)
        hint = "paths are relative to the working folder; a run needs it, and so does the estimate of its memory"
        found.warn(SCORER_RULE, "W501", SCORER_PATH, f"the reward model {folder} has no {CONFIG}", hint)
        return None
    shape, problem = _scorer_shape(folder, spec)
    if shape is None:
        code, message = problem
        hint = "give an export of a run with a reward loss, or the folder of an "
        found.fail(SCORER_RULE, code, SCORER_PATH, message, f"{hint}AutoModelForSequenceClassification with one label")
        return None
    if (apart := other_tokens(spec, arch, folder, shape.architecture.vocab, "reward model")) is not None:
        found.fail(SCORER_RULE, "X441", SCORER_PATH, apart, "use one with the same tokenizer and vocabulary")
    else:
        found.passed(SCORER_RULE, f"{folder} is a {shape.architecture.family} with a reward head")
    return shape


def _scorer_shape(folder: str, spec: Spec) -> tuple[Shape | None, tuple[str, str]]:
    """Return the model in the folder, or None with the code and the message of the fault."""
    loss = next(name for name, each in LOSSES.items() if each.head == "reward")
    params = spec.precision.params
    text = teacher_text(folder, spec.tokenizer.source, sequence=8, rows=1, precision=params, device="cpu")
    loaded = load_spec(SCORER_NAME, (), {SCORER_NAME: f"{text}loss {loss} {{ }}\n"})
    errors = loaded.diagnostics.errors
    if loaded.spec is not None:
        own = Findings(loaded.spec)
        shape = derive_architecture(loaded.spec, own)
        errors = own.diagnostics.errors
        if not errors and shape.weights is not None and has_rewards(shape.architecture, shape.weights):
            return shape, ("", "")
    if errors:
        return None, (errors[0].code, f"{folder} is not a reward model: {errors[0].message}")
    return None, ("X524", f"{folder} is not a reward model: it has no reward head, `score.weight`")


@frozen
class ScoringModel:
    """Reward model on a rank that scores, in addition to the trained model. bytes: of its weights; working: of the
    forward of a group. flops: of the forward of all completions of a step."""

    digest: str
    architecture: Architecture
    bytes: int
    working: int
    flops: int


def scorer_of(resolved: "Resolved") -> ScoringModel | None:
    """Return the model that scores completions; None if there is none, or its folder does not exist yet."""
    rollout, shape = resolved.spec.rollout, resolved.scorer
    if rollout is None or shape is None or shape.weights is None:
        return None
    arch, size = shape.architecture, BYTES[resolved.formats.compute]
    positions, group = completion_positions(resolved, rollout), rollout.group
    # The residual stream twice, and of a block its feed-forward layer, or queries, keys, values and their products.
    widest = max(3 * arch.ffn, 2 * arch.heads * arch.head_dim + 2 * arch.kv_heads * arch.head_dim)
    return ScoringModel(
        digest=shape.weights.digest,
        architecture=arch,
        bytes=count_parameters(arch).total * size,
        working=group * positions * (2 * arch.dim + widest) * size,
        flops=resolved.batch.rows * group * positions * flops_per_token(arch, positions) // 3,
    )


def scorer_bytes(resolved: "Resolved", pp: int) -> tuple[int, int]:
    """Return the bytes of the reward model on a rank of a pipeline coordinate, always and while it scores. Of the ranks
    with the same rows, the first one has the model."""
    scorer = scorer_of(resolved) if pp == 0 else None
    return (0, 0) if scorer is None else (scorer.bytes, scorer.working)
