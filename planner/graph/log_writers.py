"""Who takes the records of a run besides its own files: the nodes of `log { … }`, and the rules for it."""

from typing import Any, Final

from attrs import fields

from ...dsl.schema.log import Wandb
from ...dsl.spec import Spec
from ..findings import Findings
from .builder import Builder

TENSORBOARD: Final = "setup.log.tensorboard"
WANDB: Final = "setup.log.wandb"
# Package → the node that needs it.
NEEDED_BY: Final = {"tensorboard": TENSORBOARD, "wandb": WANDB}
# What W&B takes of a name.
LONGEST_NAME: Final = 128
LONGEST_TAG: Final = 64
NOT_IN_NAMES: Final = r"/\#?%:"


def add_writers(graph: Builder, spec: Spec, last: str) -> str:
    """Add a node for each that is on; the last node of the setup."""
    if spec.log.tensorboard:
        does = "the first rank writes what it records for TensorBoard as well, to tensorboard/, beside training"
        last = graph.add("setup", TENSORBOARD, does, args={"folder": "tensorboard"}, after=(last,))
    chosen = spec.log.wandb
    if chosen.project is not None:
        args: dict[str, Any] = {each.name: getattr(chosen, each.name) for each in fields(Wandb)}
        args["tags"] = list(chosen.tags)
        sends = f"sends what it records to W&B, project {chosen.project}"
        if chosen.mode == "offline":
            sends = f"keeps what it records for W&B, project {chosen.project}, in wandb/"
        last = graph.add("setup", WANDB, f"the first rank {sends}, beside training", args=args, after=(last,))
    return last


def check_log(spec: Spec, found: Findings) -> None:
    """Names must be such that W&B takes them."""
    chosen = spec.log.wandb
    for name in ("project", "entity", "name", "group"):
        value, path = getattr(chosen, name), f"log.wandb.{name}"
        if value is None:
            continue
        wrong = _flaw_of_name(value, project=name == "project")
        if wrong:
            hint = f'use letters, digits, `-`, `_` and `.`, as in {name} = "pretraining"'
            found.fail(path, "X622", path, f"{name} {wrong}, and W&B takes no such name", hint)
        else:
            found.passed(path, f"{len(value)} characters")
    for tag in chosen.tags:
        if not 1 <= len(tag) <= LONGEST_TAG:
            message = f"a tag has {len(tag)} characters, and W&B takes 1 to {LONGEST_TAG}"
            path = "log.wandb.tags"
            found.fail(path, "X622", path, message, "use shorter tags, and `notes` for sentences")
            return
    if chosen.tags:
        found.passed("log.wandb.tags", f"{len(chosen.tags)} of 1 to {LONGEST_TAG} characters")


def _flaw_of_name(value: str, *, project: bool) -> str:
    if not value.strip():
        return "is empty"
    if len(value) > LONGEST_NAME:
        return f"has {len(value)} characters, more than {LONGEST_NAME}"
    bad = next((sign for sign in value if sign in NOT_IN_NAMES), "") if project else ""
    return f"has a `{bad}`" if bad else ""
