"""A `dataset` → what a node of the plan says of its source and of how its records are read."""

import json
from typing import Any, Final

from attrs import frozen

from xtrain.dsl.schema.data import Dataset
from xtrain.dsl.schema.losses import Loss
from xtrain.dsl.schema.setting import AUTO
from xtrain.planner.canonical import portable

# The last token of a document is read, and not only predicted.
ENDED = "ended"
# What a conversation is trained on if nobody says so.
TRAIN_ON = "assistant"


def source_args(dataset: Dataset, seed: int, loss: Loss) -> dict[str, Any]:
    """kind, patterns, options and reads. seed: of the experiment."""
    source = dataset.source
    return {
        "kind": source.kind,
        "patterns": source.patterns_read(),
        "options": source.options(seed),
        "reads": reads(dataset) | ({ENDED: True} if loss.head == "reward" and dataset.choices is None else {}),
    }


def reads(dataset: Dataset) -> dict[str, Any]:
    """form: text, chat, instruction, choices, preference or tokens; with it the fields of a record, and what is trained
    on."""
    if dataset.choices is not None:
        return {"form": "choices", **{name: getattr(dataset, name) for name in ("question", "choices", "answer")}}
    beside = _beside(dataset)
    if dataset.tokens is not None:
        return {"form": "tokens", "tokens": dataset.tokens, **beside}
    template: dict[str, Any] = {"template": "auto" if dataset.template is AUTO else portable(str(dataset.template))}
    template |= {name: getattr(dataset, name) for name in of_templates(dataset)}
    if dataset.has_pairs:
        fields = {"prompt": dataset.prompt, "chosen": dataset.chosen, "rejected": dataset.rejected}
        return {"form": "preference", **fields, **template, **beside}
    if dataset.messages is None and dataset.prompt is None:
        fields = {"text": dataset.text} if dataset.source.records == "fields" else {}
        return {"form": "text", **fields, **beside}
    common = {**template, "train_on": TRAIN_ON if dataset.train_on == "auto" else dataset.train_on, **beside}
    if dataset.messages is not None:
        return {"form": "chat", "messages": dataset.messages, **common}
    return {"form": "instruction", "prompt": dataset.prompt, "response": dataset.response, **common}


def of_templates(dataset: Dataset) -> list[str]:
    """The settings of chat templates, besides their names, that a spec has."""
    return (["template_arguments"] if dataset.template_arguments else []) + (["lost"] if dataset.lost != "warn" else [])


@frozen
class Beside:
    """A setting that names what is read beside the text of a record. words: what that is, as a plan says it. records:
    of which records, and needs: the settings one of which says that records are such; none: of any. numbers: losses
    read it."""

    words: str
    records: str = ""
    needs: tuple[str, ...] = ()
    numbers: bool = False


_PAIRS = ("pairs of `prompt` and `response`", ("response",))
_CHATS = ("conversations in `messages`", ("messages",))
_TALKS = ("conversations", ("messages", "response", "chosen"))
BESIDE: Final = {
    "input": Beside("further input in", *_PAIRS),
    "tools": Beside("tools in", *_TALKS),
    "system": Beside("the system's message in", *_TALKS),
    "mask": Beside("mask in", "token ids (`tokens`)", ("tokens",)),
    "label": Beside("label in", *_PAIRS, numbers=True),
    "message_train": Beside("trained messages by", *_CHATS),
    "message_weight": Beside("weights of messages by", *_CHATS, numbers=True),
    "columns": Beside("numbers along the tokens:", numbers=True),
    "values": Beside("numbers of a record:", numbers=True),
}


def _beside(dataset: Dataset) -> dict[str, Any]:
    """The settings of BESIDE that a spec has."""
    return {name: value for name in BESIDE if (value := getattr(dataset, name))}


def form_text(reads: dict[str, Any]) -> str:
    """Of conversations, pairs and token ids: their fields, and what of them is trained on; of questions their fields;
    empty for plain text with nothing beside it."""
    beside = [f"{each.words} {_fields_text(reads[name])}" for name, each in BESIDE.items() if name in reads]
    beside += ["one eos more behind each, so that its last token is read"] if ENDED in reads else []
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
            return f"questions in {fields[0]} with choices in {fields[1]}, the right one in {fields[2]}"
        case "tokens":
            return f"token ids in `{reads['tokens']}`"
    template = "the tokenizer's template" if reads["template"] == "auto" else f"template {reads['template']}"
    if given := reads.get("template_arguments"):
        template += f" with {', '.join(f'{name} = {json.dumps(value)}' for name, value in sorted(given.items()))}"
    if "lost" in reads:
        template += " (a record of which it does not write all is bad)" if reads["lost"] == "error" else ""
        template += " (it may leave anything out)" if reads["lost"] == "allow" else ""
    if reads["form"] == "preference":
        prompt = "the prompt inside" if reads["prompt"] is None else f"the prompt in `{reads['prompt']}`"
        return f"pairs of answers, `{reads['chosen']}` preferred to `{reads['rejected']}`, {prompt}, by {template}"
    fields = f"`{reads['messages']}`" if reads["form"] == "chat" else f"`{reads['prompt']}` and `{reads['response']}`"
    records = "conversations in" if reads["form"] == "chat" else "pairs of"
    trained = {"assistant": "the assistant's turns", "last": "the assistant's last turn", "all": "everything"}
    return f"{records} {fields} by {template}, trained on {trained[reads['train_on']]}"
