"""The model that completions are scored with: a folder with a head of rewards, which ranks have beside that of the run.

Of its forward nothing is kept: its memory is its weights, and the widest of what a block computes at once.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.losses import LOSSES
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.findings import Findings
from xtrain.planner.model.derive import Shape, derive_architecture
from xtrain.planner.model.inventory import count_parameters, flops_per_token
from xtrain.planner.model.sampling import completion_positions
from xtrain.planner.model.teacher import other_tokens, teacher_text
from xtrain.planner.units import BYTES
from xtrain.planner.weights.files import CONFIG
from xtrain.planner.weights.fit import has_rewards

if TYPE_CHECKING:
    from xtrain.planner.resolved import Resolved

RULE: Final = "reward.folder"
PATH: Final = "reward.folder"
NAME: Final = "scorer"


def read_scorer(spec: Spec, arch: Architecture, found: Findings) -> Shape | None:
    """The model that completions are scored with, which must be one that xtrain computes, with a head of rewards and of
    the same tokens; None where there is none, or after reporting what is wrong with it."""
    folder = None if spec.reward is None else spec.reward.model_folder
    if folder is None or spec.rollout is None:
        return None
    if not os.path.isfile(Path(folder) / CONFIG):  # noqa: PTH113 (any text is a name to it)
        hint = "paths are relative to the working folder; a run needs it, and so does the estimate of its memory"
        found.warn(RULE, "W501", PATH, f"the reward model {folder} has no {CONFIG}", hint)
        return None
    shape, problem = _shape(folder, spec)
    if shape is None:
        code, message = problem
        hint = "give a folder that `xtrain export` has written of a run with a loss of rewards, or that of an "
        found.fail(RULE, code, PATH, message, f"{hint}AutoModelForSequenceClassification with one label")
        return None
    if (apart := other_tokens(spec, arch, folder, shape.architecture.vocab, "reward model")) is not None:
        found.fail(RULE, "X441", PATH, apart, "take one with the same tokenizer and vocabulary")
    else:
        found.passed(RULE, f"{folder} is a {shape.architecture.family} with a head of rewards")
    return shape


def _shape(folder: str, spec: Spec) -> tuple[Shape | None, tuple[str, str]]:
    """The model in the folder; or None, and the code and the message of what is wrong with it."""
    loss = next(name for name, each in LOSSES.items() if each.head == "reward")
    params = spec.precision.params
    text = teacher_text(folder, spec.tokenizer.source, sequence=8, rows=1, precision=params, device="cpu")
    loaded = load_spec(NAME, (), {NAME: f"{text}loss {loss} {{ }}\n"})
    errors = loaded.diagnostics.errors
    if loaded.spec is not None:
        own = Findings(loaded.spec)
        shape = derive_architecture(loaded.spec, own)
        errors = own.diagnostics.errors
        if not errors and shape.weights is not None and has_rewards(shape.architecture, shape.weights):
            return shape, ("", "")
    if errors:
        return None, (errors[0].code, f"{folder} is no reward model: {errors[0].message}")
    return None, ("X524", f"{folder} is no reward model: it has no head of rewards, `score.weight`")


@frozen
class ScoringModel:
    """What a rank that scores has beside the model of the run. bytes: of its weights; working: of the forward of a
    group. flops: of the forward of all completions of a step."""

    digest: str
    architecture: Architecture
    bytes: int
    working: int
    flops: int


def scorer_of(run: "Resolved") -> ScoringModel | None:
    """The model that completions are scored with; None where there is none, or none yet."""
    rollout, shape = run.spec.rollout, run.scorer
    if rollout is None or shape is None or shape.weights is None:
        return None
    arch, size = shape.architecture, BYTES[run.formats.compute]
    positions, group = completion_positions(run, rollout), rollout.group
    # The residual stream twice, and of a block its feed-forward layer, or queries, keys, values and what comes of them.
    widest = max(3 * arch.ffn, 2 * arch.heads * arch.head_dim + 2 * arch.kv_heads * arch.head_dim)
    return ScoringModel(
        digest=shape.weights.digest,
        architecture=arch,
        bytes=count_parameters(arch).total * size,
        working=group * positions * (2 * arch.dim + widest) * size,
        flops=run.batch.rows * group * positions * flops_per_token(arch, positions) // 3,
    )


def scorer_bytes(run: "Resolved", pp: int) -> tuple[int, int]:
    """Of a rank of a pipeline coordinate, always and while it scores. The first rank of those with the same rows has
    the model."""
    scorer = scorer_of(run) if pp == 0 else None
    return (0, 0) if scorer is None else (scorer.bytes, scorer.working)
