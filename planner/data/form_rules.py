"""Rules about the form of records: text, conversations, pairs, tokens, each with the settings it has and no others."""

from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.schema.sources import SOURCES
from xtrain.dsl.spec import Spec
from xtrain.dsl.spec_text import is_plain
from xtrain.planner.data.source_args import BESIDE, of_templates
from xtrain.planner.findings import Findings

TEXT = "text"  # the field of plain text unless a spec names another
CHAT = "messages"
PAIRS = ("prompt", "response")
QUESTIONS = ("choices", "question", "answer")
ANSWERS = ("chosen", "rejected")
TOKENS = "tokens"
MESSAGE_KEYS = ("message_train", "message_weight")
# What a template is given of every conversation.
GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


def check_forms(spec: Spec, found: Findings) -> None:
    """Every dataset is read in one form, and its source has the fields that are named."""
    for dataset in spec.datasets.values():
        problem = _problem(dataset)
        if problem is None:
            found.passed(f"data.form.{dataset.name}", _said(dataset))
            continue
        code, setting, message, hint = problem
        path = f"dataset.{dataset.name}.{setting}"
        found.fail(f"data.form.{dataset.name}", code, path, f"dataset {dataset.name}: {message}", hint)


def has_turns(dataset: Dataset) -> bool:
    """Whether its records are conversations or pairs that a template writes, and nothing contradicts that."""
    # Of answers with the prompt inside, the records say whether they are texts or messages.
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
    """A field is named, and records of this source have none. As (code, setting, message, hint)."""
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
    """Questions are read and used in one way."""
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
        return "X517", choices, message, f"read questions by {known}, or by a source of your own"
    others = [name for name in (CHAT, *PAIRS, *ANSWERS, TOKENS) if getattr(dataset, name) is not None]
    others += [name for name in BESIDE if getattr(dataset, name)]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else ["template"] if dataset.template is not AUTO else []
    others += ["oversized"] if dataset.oversized != "split" else []
    if others:
        message = f"records are questions (`{choices}`), and `{others[0]}` is not for these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{choices}`"
    if dataset.holdout.fraction != 1:
        return "X516", "holdout", "questions are evaluated, never trained on", "write `holdout = 100%`"
    return None


def _answers(dataset: Dataset) -> Problem | None:
    """Two answers come together, and are no other form of record."""
    if not dataset.has_pairs:
        return None
    for name, other in (ANSWERS, ANSWERS[::-1]):
        if getattr(dataset, other) is None:
            return "X516", name, f"`{name}` without `{other}`", f"name the field of the other answer: `{other} = …`"
    others = [name for name in (CHAT, PAIRS[1], TOKENS) if getattr(dataset, name) is not None]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else []
    if others:
        message = f"records are pairs of answers (`{ANSWERS[0]}`), and `{others[0]}` is not for these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{ANSWERS[0]}`"
    return None


def _tokens(dataset: Dataset) -> Problem | None:
    """Token ids are no text."""
    if dataset.tokens is None:
        return None
    others = [name for name in (CHAT, *PAIRS, "tools", "system") if getattr(dataset, name) is not None]
    others += [TEXT] if dataset.text != TEXT else []
    others += ["train_on"] if dataset.train_on != "auto" else ["template"] if dataset.template is not AUTO else []
    if others:
        message = f"records are token ids (`{TOKENS}`), and `{others[0]}` is not for these"
        return "X516", others[0], message, f"leave out `{others[0]}` or `{TOKENS}`"
    return None


def _beside(dataset: Dataset) -> Problem | None:
    """What is read beside the text of a record belongs to its form."""
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
    """Every number that losses read has one name, which can be that of a file, and one origin."""
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
    """Settings of chat templates belong to conversations, and do not replace what templates are given anyway."""
    if (named := of_templates(dataset)) and not dataset.has_answers:
        message = f"`{named[0]}` is for conversations, which a chat template writes"
        return "X516", named[0], message, f"remove `{named[0]}`, or name the field of the messages"
    for name in dataset.template_arguments:
        if name in GIVEN or name.startswith("_"):
            message = f"template_arguments: `{name}` is not an argument that can be set"
            return "X516", "template_arguments", message, f"remove `{name}`"
    return None


def _form(dataset: Dataset) -> Problem | None:
    """Settings that contradict each other."""
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
