"""Rules on datasets: form of records, datasets that are trained on, evaluations, order of the collate chain."""

import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from xtrain.contracts.actions import PlannedAction
from xtrain.contracts.data import PlannedSource, scheme_of
from xtrain.dsl.diagnostics.suggest import did_you_mean, renamed
from xtrain.dsl.schema.component import planned
from xtrain.dsl.schema.data import TEMPLATES, Dataset, is_template_text
from xtrain.dsl.schema.data_components import SOURCES, row_link, tokenizer_kind
from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.lazy_attrs import frozen
from xtrain.plan.amounts import amount, amounts
from xtrain.plan.data import BESIDE, DROPPED, TokenizerUnreadable, check_chain, markers, of_templates
from xtrain.plan.findings import Findings, checks
from xtrain.planner.data.training import check_reads, check_rollout, check_training

TEXT = "text"  # the default field of plain text
CHAT = "messages"
PAIRS = ("prompt", "response")
QUESTIONS = ("choices", "question", "answer")
ANSWERS = ("chosen", "rejected")
TOKENS = "tokens"
MESSAGE_KEYS = ("message_train", "message_weight")
# Values that a template gets with every conversation.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


@checks("data.form.*", reads="{records}")
def check_forms(spec: Spec, found: Findings) -> None:
    """Check that every dataset is read in one form, and that its source has the named fields."""
    for dataset in spec.datasets.values():
        problem = _problem(dataset)
        if problem is None:
            found.passed(f"data.form.{dataset.name}", _said(dataset))
            continue
        code, setting, message, hint = problem
        path = f"dataset.{dataset.name}.{setting}"
        found.fail(f"data.form.{dataset.name}", code, path, f"dataset {dataset.name}: {message}", hint)


def has_turns(dataset: Dataset) -> bool:
    """Return True if the records are conversations or pairs that a template writes, and no setting contradicts that."""
    # If answers include the prompt, only the records show whether they are texts or messages.
    turns = dataset.messages is not None or dataset.prompt is not None
    turns = turns or (dataset.has_pairs and dataset.template is not AUTO)
    return turns and _problem(dataset) is None


Problem = tuple[str, str, str, str]


def _problem(dataset: Dataset) -> Problem | None:
    return (
        _fields(dataset) or _questions(dataset) or _answers(dataset) or _tokens(dataset) or _form(dataset)
        or _beside(dataset) or _numbers(dataset) or _template(dataset)
    )  # fmt: skip


def _fields(dataset: Dataset) -> Problem | None:
    """Return (code, setting, message, hint) if a field is named but records of this source have no fields."""
    source = dataset.source
    if source.records == "fields":
        return None
    named = [name for name in (CHAT, *PAIRS, QUESTIONS[0], *ANSWERS, TOKENS) if getattr(dataset, name) is not None]
    named += [name for name in BESIDE if getattr(dataset, name)]
    named += [TEXT] if dataset.text != TEXT else []
    if not named:
        return None
    what = "token ids" if source.records == "tokens" else "whole documents"
    message = f"{source.kind} gives {what}, which have no field `{named[0]}`"
    *others, last = (name for name, each in SOURCES.items() if each.records == "fields")
    return "X517", named[0], message, f"leave `{named[0]}` out; {', '.join(others)} and {last} have fields"


def _questions(dataset: Dataset) -> Problem | None:
    """Return the fault if questions are read or used in contradictory ways."""
    choices, *fields = QUESTIONS
    if dataset.choices is None:
        unused = [name for name in fields if getattr(dataset, name) != name]
        hint = f'name the field of the choices: `{choices} = "{choices}"`, or remove `{unused[0]}`' if unused else ""
        return ("X516", unused[0], f"`{unused[0]}` is for questions with `{choices}`", hint) if unused else None
    source = dataset.source
    if not source.has_lists:
        *others, last = (name for name, each in SOURCES.items() if each.has_lists)
        known = f"{', '.join(others)} and {last}" if others else last
        message = f"{source.kind} gives fields of text, and `{choices}` is a list of texts"
        return "X517", choices, message, f"read questions by {known}, or with a source of your own"
    others = [name for name in (CHAT, *PAIRS, *ANSWERS, TOKENS) if getattr(dataset, name) is not None]
    others += [name for name in BESIDE if getattr(dataset, name)]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else ["template"] if dataset.template is not AUTO else []
    others += ["oversized"] if dataset.oversized != "split" else []
    if others:
        message = f"records are questions (`{choices}`), and `{others[0]}` does not apply to these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{choices}`"
    if dataset.holdout.fraction != 1:
        return "X516", "holdout", "questions are evaluated, never trained on", "write `holdout = 100%`"
    return None


def _answers(dataset: Dataset) -> Problem | None:
    """Return the fault unless both answers are named, in no other form of record."""
    if not dataset.has_pairs:
        return None
    for name, other in (ANSWERS, ANSWERS[::-1]):
        if getattr(dataset, other) is None:
            return "X516", name, f"`{name}` without `{other}`", f"name the field of the other answer: `{other} = …`"
    others = [name for name in (CHAT, PAIRS[1], TOKENS) if getattr(dataset, name) is not None]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else []
    if others:
        message = f"records are pairs of answers (`{ANSWERS[0]}`), and `{others[0]}` does not apply to these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{ANSWERS[0]}`"
    return None


def _tokens(dataset: Dataset) -> Problem | None:
    """Return the fault if token ids are combined with text."""
    if dataset.tokens is None:
        return None
    others = [name for name in (CHAT, *PAIRS, "tools", "system") if getattr(dataset, name) is not None]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else ["template"] if dataset.template is not AUTO else []
    if others:
        message = f"records are token ids (`{TOKENS}`), and `{others[0]}` does not apply to these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{TOKENS}`"
    return None


def _beside(dataset: Dataset) -> Problem | None:
    """Return the fault if a further field does not belong to the form of the record."""
    if dataset.drop_system and (dataset.messages is None or dataset.system is not None):
        if dataset.messages is None:
            return "X516", DROPPED, f"`{DROPPED}` is for conversations in `messages`", "remove it, or name their field"
        return "X516", DROPPED, f"`{DROPPED}` leaves out what `system` adds", "keep one of them"
    for name, each in BESIDE.items():
        if not each.needs or getattr(dataset, name) is None:
            continue
        if all(getattr(dataset, other) is None for other in each.needs):
            return "X516", name, f"`{name}` is for {each.records}", f"remove `{name}`, or name their field"
        if name in MESSAGE_KEYS and dataset.train_on == "all":
            message = f"`{name}` chooses among the turns of the assistant, and `train_on = all` takes every token"
            return "X516", name, message, f"leave out `train_on` or `{name}`"
    return None


def _numbers(dataset: Dataset) -> Problem | None:
    """Return the fault unless every number that losses read has one origin and one name that is valid for a file."""
    for setting in ("columns", "values"):
        for name, field in getattr(dataset, setting).items():
            if not is_plain(name) or not field:
                what = f"`{name}` is not a name" if field else f"`{name}` has no field"
                hint = "write names of letters, digits and `_`, and the field of each"
                return "X516", setting, f"{setting}: {what}", hint
    if dataset.message_weight is not None and WEIGHTS in dataset.columns:
        message = "`message_weight` and `columns` both give the column `weights`"
        return "X516", "columns", message, "keep one of them"
    if dataset.label is not None and "label" in dataset.values:
        return "X516", "values", "`label` and `values` both give the value `label`", "keep one of them"
    return None


def _template(dataset: Dataset) -> Problem | None:
    """Return the fault if settings of chat templates are used without conversations, or replace values that templates
    always get."""
    if (named := of_templates(dataset)) and not dataset.has_answers:
        message = f"`{named[0]}` is for conversations, which a chat template writes"
        return "X516", named[0], message, f"remove `{named[0]}`, or name the field of the messages"
    for name in dataset.template_arguments:
        if name in GIVEN or name.startswith("_"):
            message = f"template_arguments: `{name}` is not an argument that can be set"
            return "X516", "template_arguments", message, f"remove `{name}`"
    return None


def _form(dataset: Dataset) -> Problem | None:
    """Return the fault if settings contradict each other."""
    pair = [name for name in PAIRS if getattr(dataset, name) is not None]
    if dataset.messages is not None and pair:
        hint = "keep the one that the records have"
        return "X516", pair[0], f"records are conversations (`{CHAT}`) or pairs (`{pair[0]}`), not both", hint
    if len(pair) == 1 and not dataset.has_pairs:
        other = PAIRS[1 - PAIRS.index(pair[0])]
        message = f"`{pair[0]}` without `{other}`"
        return "X516", pair[0], message, f"name the field of the {other}, or use `text` for plain text"
    form = CHAT if dataset.messages is not None else PAIRS[0] if pair else ""
    if dataset.has_pairs or dataset.tokens is not None:
        return None
    if form and dataset.text != TEXT:
        message = f"`{TEXT}` is for plain text, and with `{form}` the records are not plain text"
        return "X516", TEXT, message, f"leave out `{TEXT}` or `{form}`"
    if not form:
        unused = ["train_on"] if dataset.train_on != "auto" else ["template"] if dataset.template is not AUTO else []
        if unused:
            message = f"`{unused[0]}` is for conversations and pairs, and these records are plain text"
            return "X516", unused[0], message, 'name the field: `messages = "messages"`, or remove it'
    return None


def _said(dataset: Dataset) -> str:
    if dataset.messages is not None:
        return f"conversations in `{dataset.messages}`"
    if dataset.choices is not None:
        return f"questions in `{dataset.question}` with choices in `{dataset.choices}`"
    if dataset.has_pairs:
        return f"pairs of answers in `{dataset.chosen}` and `{dataset.rejected}`"
    if dataset.tokens is not None:
        return f"token ids in `{dataset.tokens}`"
    if dataset.prompt is not None:
        return f"pairs of `{dataset.prompt}` and `{dataset.response}`"
    return "plain text"


def check_data(spec: Spec, found: Findings) -> None:
    """Check everything about data except the phases."""
    check_training(spec, found)
    check_forms(spec, found)
    check_files(spec, found)
    _check_benchmarks(spec, found)
    _check_evaluations(spec, found)
    _check_used(spec, found)
    check_chain(spec, found)
    _check_group(spec, found)


def evaluated(spec: Spec) -> dict[str, str]:
    """Return dataset name → path of the first action that evaluates on it."""
    found: dict[str, str] = {}
    for path, action in spec.actions:
        if (dataset := action.held_out()) is not None:
            found.setdefault(dataset, f"{path}.dataset")
    return found


def _check_used(spec: Spec, found: Findings) -> None:
    """Check that every dataset is trained on or evaluated, and that it has the fields that the loss reads."""
    phases = (None, *spec.phases.values())
    mixes = [amounts(spec, phase) for phase in phases]
    training, evaluations = {name for mixed in mixes for name, taken in mixed.items() if taken > 0}, evaluated(spec)
    check_rollout(spec, training, found)
    if spec.rollout is None:  # a rollout makes what the loss reads itself
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


@checks("data.eval.*", reads="dataset dataset.*.name dataset.{}.holdout {evaluated}")
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


@checks("data.group", reads="collate")
def _check_group(spec: Spec, found: Findings) -> None:
    """Check that documents are packed in groups only if they are reordered."""
    problem = row_link(spec.collate).useless()
    if problem is not None:
        found.fail("data.group", "X509", "collate", *problem)


# files, folders and templates on this machine ------------------------------------------------------------------------

# A missing file is a warning: it may appear later, or exist on the machines that run. A file of the wrong kind is an
# error.


@checks("data.template.*", reads="{records} tokenizer.source")
@checks("data.prompts.*", reads="{}.chat {all_records} tokenizer.source")
def check_files(spec: Spec, found: Findings) -> None:
    """Check the files, folder and template of every dataset, and the templates of prompts."""
    for dataset in spec.datasets.values():
        planned(dataset.source, PlannedSource).check(dataset.name, lambda: _vocabulary(spec.tokenizer.source), found)
        if has_turns(dataset):
            path = f"dataset.{dataset.name}"
            template = None if dataset.template is AUTO else str(dataset.template)
            needs = f"{path}.{'messages' if dataset.messages is not None else 'prompt'}"
            use = TemplateUse(
                f"data.template.{dataset.name}", f"{path}.template", needs, f"dataset {dataset.name}",
                tuple(dataset.template_arguments),
            )  # fmt: skip
            use.check(template, spec.tokenizer.source, found)
    for path, action in spec.actions:
        template = planned(action, PlannedAction).template(spec)
        if template is not None:
            use = TemplateUse(f"data.prompts.{path}", f"{path}.chat", f"{path}.chat", action.kind)
            use.check(None if template == "auto" else template, spec.tokenizer.source, found)


@checks("data.decontaminate.*", reads="dataset.{}.decontaminate")
def _check_benchmarks(spec: Spec, found: Findings) -> None:
    for name, dataset in spec.datasets.items():
        rule, path = f"data.decontaminate.{name}", f"dataset.{name}.decontaminate"
        for file in dataset.decontaminate:
            if scheme_of(file):
                message = f"dataset {name}: benchmarks are files of this machine, not URLs such as {file}"
                found.fail(rule, "X507", path, message, "download it, and name the file")
            elif os.path.isdir(file):  # noqa: PTH112
                found.fail(rule, "X507", path, f"dataset {name}: {file} is a folder, not a file", "name its files")
            elif not os.path.isfile(file):  # noqa: PTH113
                hint = "write the path of a file, not a pattern, relative to the working folder; the run looks again"
                found.warn(rule, "W501", path, f"dataset {name}: there is no file {file}", hint)
            else:
                found.passed(rule, f"{file} is a file")


def _vocabulary(tokenizer: str) -> int | None:
    """Return the number of tokens of a tokenizer; None if it cannot be read."""
    try:
        return tokenizer_kind(tokenizer).size(tokenizer)
    except TokenizerUnreadable:
        return None


@frozen
class TemplateUse:
    """Use of a chat template, named or not. who: the user of the template. needs: the setting that requires one.
    arguments: names of arguments that the template gets in addition to the conversation."""

    rule: str
    path: str
    needs: str
    who: str
    arguments: tuple[str, ...] = ()

    def check(self, template: str | None, tokenizer: str, found: Findings) -> None:
        """Check that a template is built in, is a text or a file, or belongs to the tokenizer (None)."""
        known = ", ".join(TEMPLATES)
        if template is None:
            self._check_own(tokenizer, found)
        elif template in TEMPLATES:
            self._report(template, f"template {template}", TEMPLATES[template], tokenizer, found, "")
        elif is_template_text(template):
            self._report("template of the spec", "template of the spec", markers(template), tokenizer, found, template)
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
        """Check that the tokenizer has a template, as none is named."""
        problem = "has no chat template"
        try:
            if (text := tokenizer_kind(tokenizer).template(tokenizer)) is not None:
                name = f"the template of tokenizer {tokenizer}"
                self._report(name, name, markers(text), tokenizer, found, text)
                return
        except TokenizerUnreadable as error:
            if error.path is None:  # a fault of the tokenizer itself, which another rule reports
                found.unknown(self.rule, f"the template of tokenizer {tokenizer} is looked for when the run starts")
                return
            problem = f"has an unreadable template: {error}"
        setting, named = (path.rpartition(".")[2] for path in (self.needs, self.path))
        message = f"{self.who}: `{setting}` needs a template, and `tokenizer {tokenizer}` {problem}"
        does = "write" if setting == named else "add"
        hint = f'{does} `{named} = "{next(iter(TEMPLATES))}"` ({", ".join(TEMPLATES)}), or the path of a Jinja template'
        found.fail(self.rule, "X507", self.needs, message, hint)

    def _report(
        self, name: str, evidence: str, written: Iterable[str], tokenizer: str, found: Findings, text: str
    ) -> None:
        """Report a template; the texts that separate turns in it should be tokens. written: those texts. text: of the
        template, "" if it reads no arguments."""
        if unread := [argument for argument in self.arguments if not re.search(rf"\b{re.escape(argument)}\b", text)]:
            message = f"{self.who}: {name} does not read `{unread[0]}`, so this argument would have no effect"
            place = f"{self.path.rpartition('.')[0]}.template_arguments"
            hint = f"remove `{unread[0]}`, or write its name as the template does"
            found.fail(self.rule, "X507", place, message, hint)
            return
        try:
            whole = tokenizer_kind(tokenizer).whole(tokenizer)
        except TokenizerUnreadable:  # another rule reports it
            whole = None
        if apart := [] if whole is None else [text for text in written if text not in whole]:
            shown = ", ".join(f"`{text}`" for text in apart[:4]) + (" …" if len(apart) > 4 else "")
            message = f"{self.who}: {name} writes {shown}, which tokenizer {tokenizer} splits into several tokens"
            hint = "add it as a special token to the files of the tokenizer, or name a template that fits the tokenizer"
            found.warn(self.rule, "W507", self.path, message, hint)
        else:
            found.passed(self.rule, evidence)
