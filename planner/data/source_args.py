"""A `dataset` → what a node of the plan says of its source and of how its records are read."""

from typing import Any

from ...dsl.blocks import SOURCES
from ...dsl.schema.data import WITH_FIELDS, WITH_PATTERNS, Dataset, HuggingFace, Source, Synthetic, Tokens, UserCall
from ...dsl.schema.setting import AUTO, Auto
from ..canonical import portable

_KINDS = {kind: name for name, kind in SOURCES.items()}
# What a conversation is trained on if nobody says so.
TRAIN_ON = "assistant"


def kind_of(source: Source) -> str:
    """The kind of reader: as the source is called in a spec; `python` for the user's own."""
    return "python" if isinstance(source, UserCall) else _KINDS[type(source)]


def source_args(dataset: Dataset, seed: int) -> dict[str, Any]:
    """kind, patterns, options and reads. seed: of the experiment."""
    source = dataset.source
    return {
        "kind": kind_of(source),
        "patterns": [portable(p) for p in source.patterns] if isinstance(source, WITH_PATTERNS) else [],
        "options": _options(source, seed),
        "reads": reads(dataset),
    }


def folder_or_name(name: str) -> str:
    """One spelling for one path; what says that it is a folder goes on saying so, or another name would be fetched."""
    path = portable(name)
    return f"./{path}" if name.startswith("./") and not path.startswith(("..", "/")) else path


def _options(source: Source, seed: int) -> dict[str, Any]:
    match source:
        case HuggingFace():
            return {"name": folder_or_name(source.name), "config": source.config, "split": source.split}
        case Tokens():
            dtype = None if source.dtype == "auto" else source.dtype
            return {"dtype": dtype, "separator": None if isinstance(source.separator, Auto) else source.separator}
        case Synthetic():
            own = seed if isinstance(source.seed, Auto) else source.seed
            return {"documents": source.documents, "length": source.length, "spread": source.spread, "seed": own}
        case UserCall():
            return user_args(source)
    return {}


def user_args(call: UserCall) -> dict[str, Any]:
    """What is called of the user's own, and with what."""
    arguments = {name: _json(value) for name, value in call.arguments.items()}
    return {"module": call.module, "function": call.function, "digest": call.digest, "arguments": arguments}


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json(each) for name, each in value.items()}
    return [_json(each) for each in value] if isinstance(value, tuple) else value


def reads(dataset: Dataset) -> dict[str, Any]:
    """form: text, chat or instruction; with it the fields of a record, and what is trained on."""
    if dataset.messages is None and dataset.prompt is None:
        fields = {"text": dataset.text} if isinstance(dataset.source, WITH_FIELDS) else {}
        return {"form": "text", **fields}
    told: dict[str, Any] = {
        "template": "auto" if dataset.template is AUTO else portable(str(dataset.template)),
        "train_on": TRAIN_ON if dataset.train_on == "auto" else dataset.train_on,
    }
    if dataset.messages is not None:
        return {"form": "chat", "messages": dataset.messages, **told}
    return {"form": "instruction", "prompt": dataset.prompt, "response": dataset.response, **told}


def origin_text(source: Source) -> str:
    """Where documents come from, in words for people."""
    match source:
        case HuggingFace():
            parts = [source.name, *([source.config] if source.config else []), source.split]
            return f"the Hugging Face dataset {' · '.join(parts)}"
        case Synthetic():
            return f"{source.documents:,} documents of a made-up language"
        case UserCall():
            return f"what {source.function}() of {source.module} gives"
    if isinstance(source, WITH_PATTERNS):
        return ", ".join(portable(pattern) for pattern in source.patterns)
    return "Python's standard library"


def form_text(reads: dict[str, Any]) -> str:
    """Of conversations and pairs: their fields, and what of them is trained on; empty for plain text."""
    if reads["form"] == "text":
        return ""
    fields = f"`{reads['messages']}`" if reads["form"] == "chat" else f"`{reads['prompt']}` and `{reads['response']}`"
    records = "conversations in" if reads["form"] == "chat" else "pairs of"
    trained = {"assistant": "the assistant's turns", "last": "the assistant's last turn", "all": "everything"}
    template = "the tokenizer's template" if reads["template"] == "auto" else f"template {reads['template']}"
    return f"{records} {fields} by {template}, trained on {trained[reads['train_on']]}"
