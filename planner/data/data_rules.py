"""Rules about data: which dataset is trained on, whether evaluations can be made, the order of the collate chain."""

import os
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from attrs import frozen

from xtrain.dsl.diagnostics.fixes import renamed
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.actions import Action
from xtrain.dsl.schema.collators import row_link
from xtrain.dsl.schema.data import TEMPLATES
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.schema.tokenizers import tokenizer_kind
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.planner.data.chain import check_chain
from xtrain.planner.data.form_rules import check_forms, has_turns
from xtrain.planner.data.loss_rules import check_reads
from xtrain.planner.data.mixture_rules import check_training
from xtrain.planner.data.rollout_rules import check_rollout
from xtrain.planner.data.tokenizer_folder import TokenizerUnreadable, markers
from xtrain.planner.findings import Findings
from xtrain.planner.schedule.mixing import amount, amounts


def check_data(spec: Spec, found: Findings) -> None:
    """Check everything about data but the phases."""
    check_training(spec, found)
    check_forms(spec, found)
    check_files(spec, found)
    _check_evaluations(spec, found)
    _check_used(spec, found)
    check_chain(spec, found)
    _check_group(spec, found)


def evaluated(spec: Spec) -> dict[str, str]:
    """Dataset name → path of the first action that evaluates on it."""
    found: dict[str, str] = {}
    for path, action in actions_of(spec):
        if (dataset := action.held_out()) is not None:
            found.setdefault(dataset, f"{path}.dataset")
    return found


def actions_of(spec: Spec) -> Iterator[tuple[str, Action]]:
    """(path, action) of all ticks and events."""
    for kind, triggers in (("every", spec.ticks), ("on", spec.events)):
        for number, trigger in enumerate(triggers):
            for place, action in enumerate(trigger.actions):
                yield f"{kind}.{number}.actions.{place}", action


def _check_used(spec: Spec, found: Findings) -> None:
    """Every dataset is trained on or evaluated, and those that are have what the loss reads."""
    phases = (None, *spec.phases.values())
    mixes = [amounts(spec, phase) for phase in phases]
    training, evaluations = {name for mixed in mixes for name, taken in mixed.items() if taken > 0}, evaluated(spec)
    check_rollout(spec, training, found)
    if spec.rollout is None:  # else it makes what the loss reads
        check_reads(spec, training, set(evaluations), found)
    for name in spec.datasets:
        switched_off = name in spec.mixture.weights and not amount(spec.mixture.weights[name])
        if name not in training and name not in evaluations and not switched_off and not found.failed:
            hint = "give it a weight in `mixture`, evaluate it, or remove it"
            if spec.mixture.weights.get(name):
                hint = (
                    f"at temperature {spec.mixture.temperature:g} its share is 0: raise its weight or the temperature"
                )
            elif not is_plain(name):
                hint = "rename it to letters, digits and `_`, and give it a weight"
            found.warn(f"data.used.{name}", "W506", f"dataset.{name}", f"nothing uses the dataset `{name}`", hint)


def _check_evaluations(spec: Spec, found: Findings) -> None:
    for name, path in evaluated(spec).items():
        rule = f"data.eval.{name}"
        dataset = spec.datasets.get(name)
        if dataset is None:
            known = ", ".join(spec.datasets) or "none"
            hint = did_you_mean(name, spec.datasets) or f"datasets of this spec: {known}"
            fix_at = partial(renamed, word=name, candidates=spec.datasets)
            found.fail(rule, "X501", path, f"`eval` of the unknown dataset `{name}`", hint, fix_at)
        elif dataset.holdout.fraction == 0:
            hint = f"set `holdout = 1%` in `dataset {name}`"
            found.fail(rule, "X504", path, f"`eval` of `{name}`, which has no held-out part", hint)
        else:
            found.passed(rule, f"`{name}` holds out {dataset.holdout}")


def _check_group(spec: Spec, found: Findings) -> None:
    """Only documents that are taken out of their order are packed in groups."""
    problem = row_link(spec.collate).useless()
    if problem is not None:
        found.fail("data.group", "X509", "collate", *problem)


# files, folders and templates on this machine ------------------------------------------------------------------------

# What is not there may come, or lie on the machines that run: a warning. What is there and is something else is an
# error.


def check_files(spec: Spec, found: Findings) -> None:
    """The files, folder and template of every dataset, and the templates of prompts."""
    for dataset in spec.datasets.values():
        dataset.source.check(dataset.name, lambda: _vocabulary(spec.tokenizer.source), found)
        if has_turns(dataset):
            path = f"dataset.{dataset.name}"
            template = None if dataset.template is AUTO else str(dataset.template)
            needs = f"{path}.{'messages' if dataset.messages is not None else 'prompt'}"
            use = TemplateUse(
                f"data.template.{dataset.name}", f"{path}.template", needs, f"dataset {dataset.name}",
                tuple(dataset.template_arguments),
            )  # fmt: skip
            use.check(template, spec.tokenizer.source, found)
    for path, action in actions_of(spec):
        template = action.template(spec)
        if template is not None:
            use = TemplateUse(f"data.prompts.{path}", f"{path}.chat", f"{path}.chat", action.kind)
            use.check(None if template == "auto" else template, spec.tokenizer.source, found)


def _vocabulary(tokenizer: str) -> int | None:
    """How many tokens it has; None if it cannot be read."""
    try:
        return tokenizer_kind(tokenizer).size(tokenizer)
    except TokenizerUnreadable:
        return None


@frozen
class TemplateUse:
    """Who names a chat template where, or has none of its own. needs: the setting for which there has to be one.
    arguments: names of what the template is given besides the conversation."""

    rule: str
    path: str
    needs: str
    who: str
    arguments: tuple[str, ...] = ()

    def check(self, template: str | None, tokenizer: str, found: Findings) -> None:
        """It is one that is built in, a file, or that of the tokenizer (None)."""
        known = ", ".join(TEMPLATES)
        if template is None:
            self._check_own(tokenizer, found)
        elif template in TEMPLATES:
            self._report(template, f"template {template}", TEMPLATES[template], tokenizer, found, "")
        elif os.path.isfile(template):  # noqa: PTH113 (any text is a name to it)
            text = Path(template).read_text(encoding="utf-8", errors="replace") if os.access(template, os.R_OK) else ""
            self._report(template, f"template {template}", markers(text), tokenizer, found, text)
        elif os.path.exists(template):  # noqa: PTH110
            hint = f"name a file; built in are {known}"
            found.fail(self.rule, "X507", self.path, f"{self.who}: template {template} is not a file", hint)
        else:
            hint = did_you_mean(template, TEMPLATES) or f"built in are {known}; paths start at the working folder"
            found.warn(self.rule, "W501", self.path, f"{self.who}: there is no template {template}", hint)

    def _check_own(self, tokenizer: str, found: Findings) -> None:
        """Where nobody names a template, the tokenizer has to have one."""
        problem = "has no chat template"
        try:
            if (text := tokenizer_kind(tokenizer).template(tokenizer)) is not None:
                name = f"the template of tokenizer {tokenizer}"
                self._report(name, name, markers(text), tokenizer, found, text)
                return
        except TokenizerUnreadable as error:
            if error.path is None:  # of the tokenizer itself, which another rule speaks of
                found.unknown(self.rule, f"the template of tokenizer {tokenizer} is looked for when the run starts")
                return
            problem = f"has none that can be read: {error}"
        setting, named = (path.rpartition(".")[2] for path in (self.needs, self.path))
        message = f"{self.who}: `{setting}` needs a template, and `tokenizer {tokenizer}` {problem}"
        does = "write" if setting == named else "add"
        hint = f'{does} `{named} = "{next(iter(TEMPLATES))}"` ({", ".join(TEMPLATES)}), or the path of a Jinja template'
        found.fail(self.rule, "X507", self.needs, message, hint)

    def _report(
        self, name: str, evidence: str, written: Iterable[str], tokenizer: str, found: Findings, text: str
    ) -> None:
        """There is a template; what sets turns apart in it should be tokens. written: those texts. text: of the
        template, "" of one that reads no arguments."""
        if unread := [argument for argument in self.arguments if not re.search(rf"\b{re.escape(argument)}\b", text)]:
            message = f"{self.who}: {name} does not read `{unread[0]}`, so that nothing would become of this argument"
            place = f"{self.path.rpartition('.')[0]}.template_arguments"
            hint = f"remove `{unread[0]}`, or write its name as the template does"
            found.fail(self.rule, "X507", place, message, hint)
            return
        try:
            whole = tokenizer_kind(tokenizer).whole(tokenizer)
        except TokenizerUnreadable:  # another rule speaks of it
            whole = None
        if apart := [] if whole is None else [text for text in written if text not in whole]:
            shown = ", ".join(f"`{text}`" for text in apart[:4]) + (" …" if len(apart) > 4 else "")
            message = f"{self.who}: {name} writes {shown}, which tokenizer {tokenizer} splits into several tokens"
            hint = "add it as a special token to the files of the tokenizer, or name a template that fits the tokenizer"
            found.warn(self.rule, "W507", self.path, message, hint)
        else:
            found.passed(self.rule, evidence)
