"""Modules that predict further tokens, beside the rest of a spec."""

from collections.abc import Iterator
from typing import Final

from xtrain.dsl.spec import Spec
from xtrain.planner.findings import Findings
from xtrain.planner.mesh.layout import Layout
from xtrain.planner.mesh.pipeline import ZERO_BUBBLE
from xtrain.planner.model.derive import loads_weights

CODE: Final = "X445"
RULE: Final = "model.mtp"
PATH: Final = "model.mtp"

Problem = tuple[str, str]


def check_further(spec: Spec, layout: Layout, found: Findings) -> None:
    """Report why further tokens cannot be predicted."""
    if not spec.model.mtp:
        return
    problems = list(_problems(spec, layout))
    for message, hint in problems[:1]:
        found.fail(RULE, CODE, PATH, message, hint)
    if not problems:
        found.passed(RULE, f"{spec.model.mtp} behind the last block, with its embedding and its head")


def _problems(spec: Spec, layout: Layout) -> Iterator[Problem]:
    """(what is wrong, what to write)."""
    if not spec.loss.plain:
        yield (
            f"modules learn by the cross-entropy of each token, and the loss is {spec.loss.kind}",
            ("remove `mtp`, or choose the plain `loss cross_entropy`"),
        )
    if layout.size("pp") > 1 and spec.parallel.pp.schedule in ZERO_BUBBLE:
        yield (
            f"schedule {spec.parallel.pp.schedule} splits the backward, and that of modules, which begins at several "
            "losses, is not split",
            "use schedule 1f1b or interleaved_1f1b",
        )
    if spec.is_adapted:
        yield "an adapter is trained on the model as it is", "remove `mtp` or the adapter"
    if spec.model.frozen:
        yield "modules are trained with all of the model", "remove `mtp` or `frozen`"
    if loads_weights(spec) and not type(spec.model).stored.further_tokens:
        message = f"files of {spec.model.family} have no modules that predict further tokens"
        yield message, "remove `mtp`, or write `weights = none`"
    if spec.rollout is not None:
        yield "rollouts learn by a loss of policies", "remove `mtp` or `rollout`"
    if spec.step is not None:
        yield "a step of your own calls the model by itself", "remove `mtp` or `step`"
    if spec.compile.mode != "none":
        yield "modules call the embedding, which lies outside of the blocks that are compiled", "use compile none"
