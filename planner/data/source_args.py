"""A `dataset` → what a node of the plan says of its source and of how its records are read."""

from typing import Any

from ...dsl.schema.data import Dataset
from ...dsl.schema.setting import AUTO
from ..canonical import portable

# What a conversation is trained on if nobody says so.
TRAIN_ON = "assistant"


def source_args(dataset: Dataset, seed: int) -> dict[str, Any]:
    """kind, patterns, options and reads. seed: of the experiment."""
    source = dataset.source
    return {
        "kind": source.kind,
        "patterns": source.patterns_read(),
        "options": source.options(seed),
        "reads": reads(dataset),
    }


def reads(dataset: Dataset) -> dict[str, Any]:
    """form: text, chat, instruction or choices; with it the fields of a record, and what is trained on."""
    if dataset.choices is not None:
        return {"form": "choices", **{name: getattr(dataset, name) for name in ("question", "choices", "answer")}}
    if dataset.messages is None and dataset.prompt is None:
        fields = {"text": dataset.text} if dataset.source.records == "fields" else {}
        return {"form": "text", **fields}
    common: dict[str, Any] = {
        "template": "auto" if dataset.template is AUTO else portable(str(dataset.template)),
        "train_on": TRAIN_ON if dataset.train_on == "auto" else dataset.train_on,
    }
    if dataset.messages is not None:
        return {"form": "chat", "messages": dataset.messages, **common}
    return {"form": "instruction", "prompt": dataset.prompt, "response": dataset.response, **common}


def form_text(reads: dict[str, Any]) -> str:
    """Of conversations and pairs: their fields, and what of them is trained on; of questions their fields; empty for
    plain text."""
    if reads["form"] == "text":
        return ""
    if reads["form"] == "choices":
        fields = [f"`{reads[name]}`" for name in ("question", "choices", "answer")]
        return f"questions in {fields[0]} with choices in {fields[1]}, the right one in {fields[2]}"
    fields = f"`{reads['messages']}`" if reads["form"] == "chat" else f"`{reads['prompt']}` and `{reads['response']}`"
    records = "conversations in" if reads["form"] == "chat" else "pairs of"
    trained = {"assistant": "the assistant's turns", "last": "the assistant's last turn", "all": "everything"}
    template = "the tokenizer's template" if reads["template"] == "auto" else f"template {reads['template']}"
    return f"{records} {fields} by {template}, trained on {trained[reads['train_on']]}"
