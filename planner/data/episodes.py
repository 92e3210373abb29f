"""Rules on episodes: conversations of rollouts with an environment."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.data import TEMPLATES, Dataset, is_template_text
from xtrain.dsl.schema.data_components import tokenizer_kind
from xtrain.dsl.schema.policy import Environment, Rollout
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec import Spec
from xtrain.plan.data import TokenizerUnreadable
from xtrain.text.units import plural

RolloutProblem = tuple[str, str, str, str]
"""(rule, path, message, hint)."""
_READS_TOOLS: Final = re.compile(r"\btools\b")


def problems_of_episodes(spec: Spec, rollout: Rollout, documents: list[str]) -> Iterator[RolloutProblem]:
    """Yield problems of environments, of the room for episodes, and of what else rewards them. documents: datasets that
    have their prompts."""
    yield from _names(spec, rollout)
    if rollout.environment is None:
        if rollout.turns != Rollout().turns:
            message = "a conversation with an `environment` has turns, and a completion is one answer"
            yield "turns", "rollout.turns", message, "remove it, or add `environment = NAME`"
        return
    if spec.reward is not None:
        message = f"the environment `{rollout.environment}` rewards its episodes itself"
        yield "environment.reward", "reward", message, "remove `reward`, and return rewards in `step` or `finish`"
    needed = rollout.group * rollout.turns * rollout.max_tokens
    if needed > spec.batch.sequence:
        message = f"{plural(rollout.group, 'episode')} with {plural(rollout.turns, 'turn')} of {rollout.max_tokens:,} "
        message += f"tokens take {needed:,} positions without what the environment says, and the row that holds them "
        message += f"has {spec.batch.sequence:,}"
        hint = f"write `sequence = {2 * needed}`, or lower turns, max_tokens or group"
        yield "environment.room", "rollout.turns", message, hint
    for name in documents:
        yield from _documents(spec, spec.datasets[name])


def _names(spec: Spec, rollout: Rollout) -> Iterator[RolloutProblem]:
    named = {f"{path}.environment": action.asks_in() for path, action in spec.actions if action.asks() is not None}
    for path, name in {"rollout.environment": rollout.environment, **named}.items():
        if name is not None and name not in spec.environments:
            known = ", ".join(spec.environments) or "none"
            hint = did_you_mean(name, spec.environments) or f"environments of this spec: {known}"
            yield "environment.name", path, f"there is no environment `{name}`", hint
        elif name is not None and rollout.environment is None:
            message = "an evaluation has episodes only if rollouts have them"
            yield "environment.eval", path, message, "remove it, or add `environment = NAME` to `rollout`"
    for name in spec.environments:
        if name not in (rollout.environment, *named.values()):
            hint = f"write `rollout {{ environment = {name} }}`, or remove it"
            yield f"environment.{name}", f"environment.{name}", f"nothing uses the environment `{name}`", hint


def _documents(spec: Spec, dataset: Dataset) -> Iterator[RolloutProblem]:
    """Yield problems of documents whose prompts are the tasks of episodes, and of the template of conversations."""
    path, who = f"dataset.{dataset.name}", f"dataset {dataset.name}"
    if dataset.tokens is not None:
        message = f"{who}: an environment has conversations, and token ids come without a template"
        yield f"data.{dataset.name}", f"{path}.tokens", message, 'name texts: `prompt = "prompt", response = "answer"`'
        return
    if dataset.tools is not None:
        message = f"{who}: the model may call the tools of the environment, not those of a record"
        yield f"data.{dataset.name}", f"{path}.tools", message, "remove `tools`"
    wanted = {spec.rollout.environment if spec.rollout is not None else None}
    wanted |= {action.asks_in() for _, action in spec.actions if action.asks() == dataset.name}
    with_tools = [name for name in wanted if name is not None and _has_tools(spec.environments.get(name))]
    text = _template(dataset, spec.tokenizer.source) if with_tools else None
    if with_tools and text is not None and _READS_TOOLS.search(text) is None:
        message = f"{who}: its chat template does not write `tools`, and the environment `{with_tools[0]}` has some: "
        message += "the model would not know them"
        hint = "name a template that writes them, such as the one of an instruction-tuned model"
        yield f"environment.template.{dataset.name}", f"{path}.template", message, hint


def _has_tools(environment: Environment | None) -> bool:
    return environment is not None and bool(environment.tools)


def _template(dataset: Dataset, tokenizer: str) -> str | None:
    """Return the text of the template of a dataset, "" for a built-in one, none of which has tools; None if it cannot
    be read here, which other rules report."""
    template = dataset.template
    if template is AUTO:
        try:
            return tokenizer_kind(tokenizer).template(tokenizer)
        except TokenizerUnreadable:
            return None
    name = str(template)
    if name in TEMPLATES:
        return ""
    if is_template_text(name):
        return name
    readable = os.path.isfile(name) and os.access(name, os.R_OK)  # noqa: PTH113 (any text is a name to it)
    return Path(name).read_text(encoding="utf-8", errors="replace") if readable else None
