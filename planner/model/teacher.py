"""The model that a loss learns from: a folder, read as a spec of its own that begins with it."""

import json
import os
from pathlib import Path
from typing import Final

from attrs import evolve, frozen

from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.tokenizers import TOKENIZERS
from xtrain.dsl.spec import Spec
from xtrain.planner.architecture import Architecture
from xtrain.planner.data.tokenizer_folder import TokenizerUnreadable
from xtrain.planner.findings import Findings
from xtrain.planner.model.derive import derive_architecture
from xtrain.planner.weights.files import CONFIG, WeightFiles, WeightsUnreadable, read_weight_files
from xtrain.planner.weights.fit import assign

RULE: Final = "loss.teacher"
PATH: Final = "loss.teacher"
CODE: Final = "X441"
NAME: Final = "teacher"


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
    """A spec whose model is the teacher alone. tokenizer: as a spec or a plan names it. drawn: the shape alone is that
    of the folder. tp: ranks that cut its matrices; all others have rows of their own."""
    source = tokenizer if tokenizer in TOKENIZERS else json.dumps(tokenizer, ensure_ascii=False)
    return (
        "experiment teacher { seed = 1, budget = 1 steps }\n"
        f"model {json.dumps(folder, ensure_ascii=False)} {'{ weights = none }' if drawn else ''}\n"
        f"tokenizer {source}\n"
        "dataset made { source = synthetic() }\n"
        f"batch {{ sequence = {sequence}, rows = {rows} }}\n"
        f"precision {{ params = {precision} }}\n"
        "optimizer sgd { lr = 1 }\n"
        f"parallel {{ tp {tp} }}\n"
        f"launch {{ device = {device} }}\n"
    )


@frozen
class TeacherShape:
    """A teacher as a spec of its own reads it, with the files of its weights."""

    spec: Spec
    architecture: Architecture
    weights: WeightFiles | None = None


def check_teacher(spec: Spec, arch: Architecture, found: Findings) -> TeacherShape | None:
    """The teacher must be a model that xtrain computes, of the same tokens; None where it is not. A folder that is not
    there may come, unless the teacher computes beside the model."""
    teacher = spec.loss.learns_from
    if teacher is None:
        return None
    if teacher.top >= arch.vocab and not teacher.live:
        message = f"`top` is {teacher.top:,}, and the vocabulary has {arch.vocab:,} tokens"
        found.fail("loss.top", CODE, "loss.top", message, f"use less, such as top = {max(1, arch.vocab // 4)}")
    if not os.path.isfile(Path(teacher.folder) / CONFIG):  # noqa: PTH113 (any text is a name to it)
        message, hint = f"the teacher {teacher.folder} has no {CONFIG}", "paths are relative to the working folder"
        if teacher.live:
            found.fail(RULE, CODE, PATH, message, f"{hint}; a teacher that is live is part of the plan")
        else:
            hint += "; `xtrain data teach` needs it, and the run looks again"
            found.warn(RULE, "W501", PATH, message, hint)
        return None
    shape = _shape(spec, teacher.folder, found)
    if shape is None:
        return None
    if (problem := other_tokens(spec, arch, teacher.folder, shape.architecture.vocab)) is not None:
        hint = "take a teacher with the same tokenizer and vocabulary, such as a larger model of the family"
        found.fail(RULE, CODE, PATH, problem, hint)
        return None
    try:
        files = read_weight_files(teacher.folder)
        assign(shape.architecture, files)
    except (WeightsUnreadable, ValueError) as problem:
        message = f"the teacher {teacher.folder}: {problem}"
        found.fail(RULE, "X524", PATH, message, "take weights and config of one model")
        return None
    found.passed(RULE, f"{teacher.folder} is a {shape.architecture.family} with {arch.vocab:,} tokens")
    return evolve(shape, weights=files)


def _shape(spec: Spec, folder: str, found: Findings) -> TeacherShape | None:
    """The model in the folder; None after reporting what is wrong with it."""
    params = spec.precision.params
    text = teacher_text(folder, spec.tokenizer.source, sequence=8, rows=1, precision=params, device="cpu", drawn=True)
    loaded = load_spec(NAME, (), {NAME: text})
    errors = loaded.diagnostics.errors
    if loaded.spec is not None:
        own = Findings(loaded.spec)
        shape = derive_architecture(loaded.spec, own)
        errors = own.diagnostics.errors
        if not errors:
            return TeacherShape(loaded.spec, shape.architecture)
    hint = f'take a folder of a model that `model "{folder}"` takes'
    found.fail(RULE, errors[0].code, PATH, f"the teacher {folder}: {errors[0].message}", hint)
    return None


def other_tokens(spec: Spec, arch: Architecture, folder: str, theirs: int, who: str = "teacher") -> str | None:
    """How the tokens of a model in a folder differ from those of the run, if they do. theirs: the size of its
    vocabulary. who: what it is, in words."""
    if theirs != arch.vocab:
        return f"the {who} {folder} has a vocabulary of {theirs:,}, and the model one of {arch.vocab:,}"
    from xtrain.planner.data.vocabulary import differing_token  # few specs need it

    source = spec.tokenizer.source
    try:
        apart = differing_token(source, folder)
    except TokenizerUnreadable:  # one of them is no file of tokens, or says what it is elsewhere
        return None
    return apart and f"the tokenizer of the {who} {folder} is another one: {apart}"
