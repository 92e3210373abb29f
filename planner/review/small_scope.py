"""Scope of a small experiment: its actions, settings that differ from a plan, and what it does not cover."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import attrs

from xtrain.dsl.schema.actions import ACTIONS, TURN_OF_LOG, Action, OnEvent, Tick
from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data_components import TOKENIZERS, Tokenizer
from xtrain.dsl.schema.losses import ReferredLoss
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import value_text
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.plan.plan import Plan

SAVED: Final = 2
"""Step after which the resumed experiment begins."""
MERGED: Final = 3
"""Steps between changes of the base: the checkpoint has trained adapters, and a step follows the first change."""
APART: Final = (
    "origins", "path", "folder", "ticks", "events", "workspace", "cluster", "launch", "launcher", "log", "checkpoint",
)  # fmt: skip
"""Parts of a spec that a small experiment replaces as a whole."""


@frozen(kw_only=True)
class Shrunken:
    """A setting with another value in the small experiment, both as text."""

    setting: str
    before: str
    after: str


def action_like(fits: Callable[[type[Action]], object]) -> type[Action]:
    """Return the first kind of action that fits."""
    return next(action for action in ACTIONS.values() if fits(action))


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer of small experiments, which needs no files."""
    return Tokenizer(next(name for name, kind in TOKENIZERS.items() if not kind.of_files))


def small_ticks(spec: Spec) -> tuple[Tick, ...]:
    """Return the ticks: a record of every step with the author's own actions, a checkpoint, and the actions that
    change the base of adapters."""
    log = action_like(lambda action: action.records and action.turn == TURN_OF_LOG)
    save = action_like(lambda action: action.saves)
    kept = [action for tick in spec.ticks for action in tick.actions if _is_kept(action)]
    own, changes = (tuple(each for each in kept if each.changes_base is change) for change in (False, True))
    return (
        Tick(actions=(log(), *own), every=Quantity(1, "steps")),
        Tick(actions=(save(),), every=Quantity(SAVED, "steps")),
        *((Tick(actions=changes, every=Quantity(MERGED, "steps")),) if changes else ()),
    )


def _is_kept(action: Action) -> bool:
    return isinstance(action, UserComponent) or action.changes_base


def small_events(spec: Spec) -> tuple[OnEvent, ...]:
    """Return one evaluation at the end of each dataset that the spec evaluates."""
    evaluates = [action for _, action in spec.actions if action.uses_averages and hasattr(action, "batches")]
    found = {action.dataset: attrs.evolve(action, batches=None) for action in evaluates}  # pyright: ignore
    return (OnEvent(event="finish", actions=tuple(found.values())),) if found else ()


def uncovered_parts(spec: Spec, plan: Plan) -> Iterator[str]:
    """Yield what of a plan a small experiment on the CPU does not have."""
    yield "the sizes of the plan: overflows, memory and times are not proved"
    own = [name for name, dataset in spec.datasets.items() if isinstance(dataset.source, UserComponent)]
    if own:
        yield f"sources of your own: files with a few small records stand for {', '.join(own)}"
    if spec.tokenizer != byte_tokenizer():
        yield "the tokenizer: the tokens are bytes of the texts"
    if plan.launch["device"] != "cpu":
        yield "kernels of the GPU and NCCL: ranks compute on the CPU and communicate by gloo"
    formats = {spec.precision.params, spec.precision.compute} - {"auto", "fp64"}
    if "fp8" in formats:
        yield "products in fp8"
    if spec.precision.loss_scale is not None:
        yield "the scale of the loss, and steps whose gradients overflow in fp16"
    if spec.precision.rounded is not None:
        yield "the rounding of weights by qat"
    if formats - {"fp8"}:
        yield f"rounding in {', '.join(sorted(formats - {'fp8'}))}: everything is computed in fp64"
    if spec.compile.mode != "none":
        yield "compiled blocks: the same operations are computed one by one"
    if spec.parallel.fsdp.offload:
        yield "offloading to host memory"
    if spec.parallel.tp.overlap:
        yield "products of tensor parallelism that overlap with communication"
    if spec.model.attention not in ("auto", "documents", "blocks"):
        yield f"attention by {spec.model.attention}"
    optimizers = [spec.optimizer, *(group.optimizer for group in spec.groups.values() if group.optimizer)]
    if any(each.stochastic_rounding for each in optimizers):
        yield "stochastic rounding of weights"
    if any(each.states != "auto" for each in optimizers):
        yield "moments in another format than the weights"
    if spec.checkpoint.pretrained or spec.checkpoint.from_ or getattr(spec.model, "loads", False):
        yield "initial weights: they are drawn"
    if isinstance(spec.loss, ReferredLoss) and spec.loss.reference_folder is not None:
        yield "the reference model: the initial weights stand for it"
    if spec.loss.learns_from is not None:
        yield "the teacher: a live small model of the family of the student stands for it"
    if spec.reward is not None and not isinstance(spec.reward, UserComponent):
        yield "the reward: a pattern that about half of the completions match stands for it"
    if not isinstance(spec.scheduler, UserComponent):
        yield "the learning-rate schedule, which is constant here"
    dropped = {action.kind for _, action in spec.actions if not _is_kept(action)}
    kept = {action_like(lambda action: action.saves).kind, *(a.kind for _, a in spec.actions if hasattr(a, "batches"))}
    kept.add(action_like(lambda action: action.records and action.turn == TURN_OF_LOG).kind)
    if dropped - kept:
        yield f"the actions {', '.join(sorted(dropped - kept))}"


def changed_settings(before: Any, after: Any, plan: Plan, path: str = "") -> Iterator[Shrunken]:
    """Yield the settings that differ."""
    of_data = path.endswith(".source")
    if type(before) is type(after) and attrs.has(type(before)) and not isinstance(before, Quantity) and not of_data:
        for field in attrs.fields(type(before)):
            if field.name not in APART:
                name = f"{path}.{field.name.rstrip('_')}" if path else field.name
                yield from changed_settings(getattr(before, field.name), getattr(after, field.name), plan, name)
    elif isinstance(before, dict) and isinstance(after, dict):
        for name in filter(after.__contains__, before):
            yield from changed_settings(before[name], after[name], plan, f"{path}.{name}")
    elif before != after:
        texts = [_said(before), "records of a small file" if of_data else _said(after)]
        if before is AUTO:
            texts[0] = plan.value(path) or texts[0]
        if texts[0] != texts[1]:
            yield Shrunken(setting=path, before=texts[0], after=texts[1])


def _said(value: Any) -> str:
    try:
        return value_text(value)
    except (AssertionError, KeyError, TypeError, ValueError):
        return getattr(value, "kind", None) or type(value).__name__
