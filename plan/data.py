"""Data in a plan: links of the collate chain, files of sources, arguments of a dataset's node, and chat templates."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from xtrain.dsl.schema.component import UserComponent
from xtrain.dsl.schema.data import Dataset, is_template_text
from xtrain.dsl.schema.data_components import (
    KINDS,
    LINKS,
    LOCAL_MICROBATCH,
    MICROBATCH,
    RAW_ROWS,
    Link,
    usual_chain,
)
from xtrain.dsl.schema.losses import Loss
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.spec import Spec
from xtrain.plan.canonical import portable
from xtrain.plan.findings import Findings, checks
from xtrain.plan.plan import Node, Plan


def resolve_chain(spec: Spec, ring: int, ulysses: int) -> tuple[Link, ...]:
    """Return the links of `collate`. The link that the layout decides on is included exactly with context parallelism,
    or if a collator follows it."""
    (cut,) = (link for link in LINKS.values() if link.by_layout)
    if ring * ulysses > 1:
        return spec.collate if any(link.by_layout for link in spec.collate) else (*spec.collate, cut())
    behind = any(not link.by_layout and link.takes == LOCAL_MICROBATCH for link in spec.collate)
    return tuple(link for link in spec.collate if behind or not link.by_layout)


def own_modules(plan: Plan) -> dict[str, str]:
    """Return module of the user's code, as named in the plan → its digest."""
    calls = (node.args.get("options") or node.args.get("user") or node.args for node in plan.nodes)
    family = plan.architecture.own.get("user", {})
    return {call["module"]: call["digest"] for call in (family, *calls) if "module" in call and "digest" in call}


def code_of(plan: Plan) -> tuple[str, ...]:
    """Return the user's code that a plan runs, for display: modules, modeling files and shell commands, without
    components of installed packages."""
    commands = (node.args["command"] for node in plan.nodes if isinstance(node.args.get("command"), str))
    place = plan.architecture.own.get("code", {}).get("remote")
    files = () if place is None else (f"modeling files of {place.get('folder') or place['repo']}",)
    return (*own_modules(plan), *files, *(f"`{command}`" for command in dict.fromkeys(commands)))


def call_text(call: Mapping[str, Any]) -> str:
    """Return a call of the user's code, from a node's arguments: `warm of parts.py (1a2b3c4d), up = 0.5`."""
    given = "".join(f", {name} = {value}" for name, value in call["arguments"].items())
    given += "".join(f", env({name}) with digest {digest[:8]}" for name, digest in call.get("variables", {}).items())
    return f"{call['function']} of {call['module']} ({call['digest'][:8]}){given}"


def node_ids(links: tuple[Link, ...]) -> list[str]:
    """Return the id of each link's node; repeated names are numbered from the second on."""
    found: list[str] = []
    names = [link.name for link in links]
    for place, name in enumerate(names):
        number = names[: place + 1].count(name)
        found.append(f"collate.{name}" if number == 1 else f"collate.{name}.{number}")
    return found


def changes_documents(node: Node) -> bool:
    """Return True if documents differ after the link of a node."""
    link = LINKS.get(node.op.partition(".")[2])
    return node.op == "collate.user" or (link is not None and link.changes)


@checks("data.collate", reads="collate")
def check_chain(spec: Spec, found: Findings) -> None:
    """Check that each link accepts the output of the link before it, from the rows of the reader to the input of a
    model."""
    given, before = RAW_ROWS, "the reader"
    for link in spec.collate:
        if link.takes != given:
            message = f"collate: `{link.name}` takes {link.takes}, but {before} gives {given}"
            found.fail("data.collate", "X508", "collate", message, _hint(spec, link, given))
            return
        given, before = link.gives, f"`{link.name}`"
    if given not in (MICROBATCH, LOCAL_MICROBATCH):
        message = f"collate: a model takes a {MICROBATCH}, but {before} gives {given}"
        found.fail("data.collate", "X508", "collate", message, _hint(spec, None, given))
        return
    found.passed("data.collate", " -> ".join(link.name for link in spec.collate))


def _hint(spec: Spec, link: Link | None, given: str) -> str:
    """Return the usual chain; with the user's own collators, say which values this place and its neighbor handle."""
    if not any(isinstance(each, UserComponent) for each in spec.collate):
        answers = any(each.has_answers for each in spec.datasets.values() if each.holdout.fraction < 1)
        return f"write `collate = {' -> '.join(each.written for each in usual_chain(answers))}`"
    if isinstance(link, UserComponent):
        giver = next((name for name, each in LINKS.items() if each.gives == link.takes and not each.changes), None)
        return f"put `{link.function}` after `{giver}`" if giver else f"put `{link.function}` first"
    if link is not None and KINDS.index(link.takes) < KINDS.index(given):
        return f"leave `{link.name}` out: its work is already done"
    needed = next(name for name, each in LINKS.items() if each.takes == given and not each.changes)
    return f"`{needed}` takes {given}: write it next"


# Files with chat templates; the first one with a template is used.
CHAT_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# Texts that separate turns in templates and should therefore be tokens: `<|im_start|>`, `<start_of_turn>`.
_MARKERS: Final = re.compile(r"<[|｜][^<>|｜\s'\"+{}~]+[|｜]>|</?[a-z]+_of_[a-z]+>")
_COMMENTS: Final = re.compile(r"\{#.*?#\}", re.DOTALL)


class TokenizerUnreadable(Exception):
    """Unreadable tokenizer: a file is missing, is not a tokenizer, or a file next to it is invalid; the text says
    which."""

    def __init__(self, message: str, path: Path | None = None, remedy: str | None = None) -> None:
        super().__init__(message if path is None else f"{path.as_posix()}: {message}")
        self.message, self.path, self.remedy = message, path, remedy


class TokenizerMissing(TokenizerUnreadable):
    """Unreadable path; another machine may have the file, or this one later."""


def find_chat_template(folder: Path) -> str | None:
    """Return the text of the template next to a `tokenizer.json`; None if there is none.

    Of several named templates, return `default`. Raises TokenizerUnreadable for an invalid file.
    """
    for name in CHAT_FILES:
        path = folder / name
        if not path.is_file():
            continue
        try:
            content: Any = path.read_text(encoding="utf-8")
            if path.suffix == ".json":
                content = json.loads(content)
                content = content.get("chat_template") if isinstance(content, dict) else None
        except (OSError, ValueError, RecursionError) as error:
            raise TokenizerUnreadable(f"cannot be read: {error}", path=path) from error
        template = _default(content, path)
        if template is not None:
            return template
    return None


def markers(template: str) -> tuple[str, ...]:
    """Return the texts that separate turns in a template, in order of appearance."""
    return tuple(dict.fromkeys(_MARKERS.findall(_COMMENTS.sub("", template))))


def _default(content: Any, path: Path) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(each, dict) for each in content):
        content = {each.get("name"): each.get("template") for each in content}
    if isinstance(content, dict) and isinstance(content.get("default"), str):
        return content["default"]
    raise TokenizerUnreadable(
        "its chat templates have no `default`", path=path, remedy="Name the file of one as `template`."
    )


# The last token of a document is an input as well as a target.
ENDED = "ended"
# Conversations lose their system message.
DROPPED = "drop_system"
# Default of the part of a conversation that is trained on.
TRAIN_ON = "assistant"


def source_args(dataset: Dataset, seed: int, loss: Loss) -> dict[str, Any]:
    """Return kind, patterns, options and reads of a dataset's source. seed: of the experiment."""
    source = dataset.source
    return {
        "kind": source.kind,
        "patterns": source.patterns_read(),
        "options": source.options(seed),
        "reads": reads(dataset) | ({ENDED: True} if not loss.of_logits and dataset.choices is None else {}),
    }


def reads(dataset: Dataset) -> dict[str, Any]:
    """Return the form of a record (text, chat, instruction, choices, preference or tokens), its fields, and the part
    that is trained on."""
    if dataset.choices is not None:
        return {"form": "choices", **{name: getattr(dataset, name) for name in ("question", "choices", "answer")}}
    beside = {name: value for name in BESIDE if (value := getattr(dataset, name))}
    if dataset.tokens is not None:
        return {"form": "tokens", "tokens": dataset.tokens, **beside}
    given = "auto" if dataset.template is AUTO else str(dataset.template)
    template: dict[str, Any] = {"template": given if is_template_text(given) else portable(given)}
    template |= {name: getattr(dataset, name) for name in of_templates(dataset)}
    if dataset.has_pairs:
        fields = {"prompt": dataset.prompt, "chosen": dataset.chosen, "rejected": dataset.rejected}
        return {"form": "preference", **fields, **template, **beside}
    if dataset.messages is None and dataset.prompt is None:
        fields = {"text": dataset.text} if dataset.source.records == "fields" else {}
        return {"form": "text", **fields, **beside}
    common = {**template, "train_on": TRAIN_ON if dataset.train_on == "auto" else dataset.train_on, **beside}
    if dataset.messages is not None:
        dropped = {DROPPED: True} if dataset.drop_system else {}
        return {"form": "chat", "messages": dataset.messages, **common, **dropped}
    return {"form": "instruction", "prompt": dataset.prompt, "response": dataset.response, **common}


def of_templates(dataset: Dataset) -> list[str]:
    """Return the names of the settings of chat templates that a spec has, other than the template itself."""
    return (["template_arguments"] if dataset.template_arguments else []) + (["lost"] if dataset.lost != "warn" else [])


class Beside(NamedTuple):
    """Setting that names a field read in addition to the text of a record. words: its description in a plan. records:
    kind of records that it applies to. needs: settings, one of which marks such records; empty: any records.
    numbers: losses read it."""

    words: str
    records: str = ""
    needs: tuple[str, ...] = ()
    numbers: bool = False


_PAIRS = ("pairs of `prompt` and `response`", ("response",))
_CHATS = ("conversations in `messages`", ("messages",))
_TALKS = ("conversations", ("messages", "response", "chosen"))
BESIDE: Final = {
    "input": Beside("additional input in", *_PAIRS),
    "tools": Beside("tools in", *_TALKS),
    "system": Beside("the system's message in", *_TALKS),
    "mask": Beside("mask in", "token ids (`tokens`)", ("tokens",)),
    "label": Beside("label in", *_PAIRS, numbers=True),
    "message_train": Beside("trained messages by", *_CHATS),
    "message_weight": Beside("message weights by", *_CHATS, numbers=True),
    "columns": Beside("numbers per token:", numbers=True),
    "values": Beside("numbers per record:", numbers=True),
}


def form_text(reads: dict[str, Any]) -> str:
    """Return text on the fields of a record and the part that is trained on; empty for plain text without other
    fields."""
    beside = [f"{each.words} {_fields_text(reads[name])}" for name, each in BESIDE.items() if name in reads]
    beside += ["without system messages"] if DROPPED in reads else []
    beside += ["an additional eos after each, so that its last token is read"] if ENDED in reads else []
    return ", ".join(filter(None, [_content_text(reads), *beside]))


def _fields_text(fields: str | dict[str, str]) -> str:
    if isinstance(fields, str):
        return f"`{fields}`"
    return " and ".join(f"{name} in `{field}`" for name, field in sorted(fields.items()))


def _content_text(reads: dict[str, Any]) -> str:
    match reads["form"]:
        case "text":
            return ""
        case "choices":
            fields = [f"`{reads[name]}`" for name in ("question", "choices", "answer")]
            return f"questions in {fields[0]}, choices in {fields[1]}, correct choice in {fields[2]}"
        case "tokens":
            return f"token ids in `{reads['tokens']}`"
    template = "the tokenizer's template" if reads["template"] == "auto" else f"template {reads['template']}"
    template = "the template of the spec" if is_template_text(reads["template"]) else template
    if given := reads.get("template_arguments"):
        template += f" with {', '.join(f'{name} = {json.dumps(value)}' for name, value in sorted(given.items()))}"
    if "lost" in reads:
        template += " (records that it does not render completely are bad)" if reads["lost"] == "error" else ""
        template += " (it may omit content)" if reads["lost"] == "allow" else ""
    if reads["form"] == "preference":
        prompt = "the prompt in both" if reads["prompt"] is None else f"the prompt in `{reads['prompt']}`"
        return f"pairs of answers, `{reads['chosen']}` preferred to `{reads['rejected']}`, {prompt}, by {template}"
    fields = f"`{reads['messages']}`" if reads["form"] == "chat" else f"`{reads['prompt']}` and `{reads['response']}`"
    records = "conversations in" if reads["form"] == "chat" else "pairs of"
    trained = {"assistant": "the assistant's turns", "last": "the assistant's last turn", "all": "everything"}
    return f"{records} {fields} by {template}, trained on {trained[reads['train_on']]}"
