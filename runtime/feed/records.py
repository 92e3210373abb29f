"""Records and units of sources: the content that documents are made of, and values that are invalid.

A unit is the part of a source that is read at once; a record becomes one document. Bad records are counted, the first
few are kept, and too many of them end the run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from attrs import define, evolve, field, frozen

from xtrain.runtime.base.data_errors import DataError

Form = Literal["text", "chat", "instruction", "choices", "preference", "tokens"]
TrainOn = Literal["assistant", "last", "all"]
Lost = Literal["error", "warn", "allow"]
Message = dict[str, Any]
"""`role`, a string, and whatever else the record says, for the template. `content` is a string or a list of parts, each
with its `text`; it may be missing from a message with `tool_calls`."""


def named_values(fields: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Return the entries of an object in the order of their names, as those of a plan that was read back are."""
    return tuple(sorted(dict(fields).items()))


@frozen(kw_only=True)
class Reads:
    """Which fields of a record are read, and as what."""

    form: Form = "text"
    text: str = "text"
    messages: str = "messages"
    prompt: str | None = "prompt"
    response: str = "response"
    question: str = "question"
    choices: str = "choices"
    answer: str = "answer"
    chosen: str = "chosen"
    rejected: str = "rejected"
    tokens: str = "tokens"
    mask: str | None = None
    input: str | None = None
    label: str | None = None
    tools: str | None = None
    system: str | None = None
    message_train: str | None = None
    message_weight: str | None = None
    columns: tuple[tuple[str, str], ...] = field(default=(), converter=named_values)
    """Numbers along the tokens: what they are called, and the field that has them."""
    values: tuple[tuple[str, str], ...] = field(default=(), converter=named_values)
    """Numbers of the record as a whole, in the same way; `label` is not among them."""
    template: str = "auto"
    train_on: TrainOn = "assistant"
    lost: Lost = "warn"
    """Where a template does not write all of a conversation: with `warn` the record is bad if a message, a call or the
    tools are lost as a whole, with `error` in any case, with `allow` never."""
    template_arguments: tuple[tuple[str, Any], ...] = field(default=(), converter=named_values)
    """What else the template is given, by name."""
    ended: bool = False
    """Behind each document, or side of a pair, comes one eos more: its last token, which would only be a label, is then
    read too."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Reads":
        """The `reads` of a plan. Raises TypeError for a setting that does not exist."""
        return cls(**settings)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read; a dot leads into an object: `meta.text`."""
        beside = (self.input, self.label, self.tools, self.system, self.mask)
        numbers = (name for _, name in (*self.columns, *self.values))
        return tuple(dict.fromkeys((*self._content, *(name for name in beside if name is not None), *numbers)))

    @property
    def _content(self) -> tuple[str, ...]:
        match self.form:
            case "text":
                return (self.text,)
            case "chat":
                return (self.messages,)
            case "instruction":
                assert self.prompt is not None
                return (self.prompt, self.response)
            case "choices":
                return (self.question, self.choices, self.answer)
            case "preference":
                prompt = () if self.prompt is None else (self.prompt,)
                return (*prompt, self.chosen, self.rejected)
            case "tokens":
                return (self.tokens,)

    @property
    def typed(self) -> tuple[str, ...]:
        """Those whose type in a table is checked: texts, of `chat` a list of messages, of `instruction` either."""
        return () if self.form in ("preference", "tokens") else self._content

    @property
    def beside(self) -> dict[str, Any]:
        """What is read beside the fields that every record of this form has, as JSON: setting → field."""
        names = ("input", "label", "tools", "system", "mask", "message_train", "message_weight")
        found: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        found |= {name: dict(fields) for name in ("columns", "values") if (fields := getattr(self, name))}
        return found | ({"ended": True} if self.ended else {})

    @property
    def value_names(self) -> tuple[str, ...]:
        """The numbers of every document as a whole, by name."""
        names = {name for name, _ in self.values} | ({"label"} if self.label is not None else set())
        return tuple(sorted(names))


@frozen(kw_only=True, eq=False)
class TokenIds:
    """A document that is tokenised already."""

    ids: np.ndarray
    """Integers [tokens]."""
    trained: np.ndarray | None = None
    """bool [tokens]: which are to be predicted. None: all."""


@frozen(kw_only=True)
class SyntheticRecord:
    """A document of the `synthetic` source: it is made when it is encoded, as its tokens depend on the tokenizer."""

    seed: int
    index: int
    tokens: int
    """All of them, bos and eos included."""


@frozen(kw_only=True)
class ChoiceQuestion:
    """A text, and what may follow it. right: number of the choice that should."""

    text: str
    choices: tuple[str, ...]
    right: int


@frozen(kw_only=True)
class Conversation:
    """Messages, with more than a plain list of them says."""

    messages: list[Message]
    prompt: int = 0
    """So many messages are the prompt: only what follows is predicted. 0: none are set apart."""
    tools: list[Any] | None = None
    """Definitions of the functions that the assistant may call, for the template."""


@frozen(kw_only=True)
class PreferencePair:
    """Two answers to one prompt, of which the first is preferred.

    Either conversations that begin with the same `prompt` messages; or texts, whose common beginning is the prompt.
    """

    chosen: str | list[Message]
    rejected: str | list[Message]
    prompt: int = 0
    tools: list[Any] | None = None


@frozen(kw_only=True, eq=False)
class Numbered:
    """A record with numbers beside it."""

    content: "Content"
    columns: dict[str, float | np.ndarray]
    """One number for all tokens of the document, or float32 [tokens]."""
    values: dict[str, float]


Content = str | list[Message] | TokenIds | SyntheticRecord | ChoiceQuestion | Conversation | PreferencePair | Numbered


def content_size(content: Content) -> int:
    """Characters, or tokens of what is tokenised, about."""
    match content:
        case str():
            return len(content)
        case TokenIds():
            return len(content.ids)
        case SyntheticRecord():
            return content.tokens
        case ChoiceQuestion():
            return len(content.text) * len(content.choices) + sum(map(len, content.choices))
        case Conversation():
            return content_size(content.messages)
        case PreferencePair():
            return content_size(content.chosen) + content_size(content.rejected)
        case Numbered():
            return content_size(content.content)
        case _:
            return sum(len(content_text(message)) for message in content)


def content_text(message: Message) -> str:
    """The content of a message, the parts of a list as one."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@define
class SourceRecord:
    """What one document is made of, or those of a question, and where it was read: `path`, `path:line`, or words that
    say so.

    All records of one source have contents of one type; messages may be a list or a conversation.
    """

    content: Content
    origin: str

    @property
    def size(self) -> int:
        """Characters, or tokens of what is tokenised, about."""
        return content_size(self.content)


@frozen(kw_only=True)
class SourceUnit:
    """A part of a source that is read at once, in this process or another; it can be pickled."""

    size: int
    """Bytes of input it takes."""
    part: Any
    """Which part it is; known to the reader that gave it."""
    path: Path | None = None
    line: int | None = None
    """Number of its first line or row."""


@frozen
class Unusable:
    """Why there is no document in what was read."""

    reason: str


MOST_SHOWN = 10


@define(kw_only=True, frozen=True)
class BadRecord:
    """One record that was left out: where it stands (`path` or `path:line`) and why."""

    origin: str
    reason: str


@define(kw_only=True, frozen=True)
class BadRecordReport:
    """How many records were left out, with the first `MOST_SHOWN` of them in reading order."""

    count: int = 0
    first: tuple[BadRecord, ...] = ()

    def including(self, record: BadRecord) -> "BadRecordReport":
        """This report with one more record."""
        first = (*self.first, record) if len(self.first) < MOST_SHOWN else self.first
        return evolve(self, count=self.count + 1, first=first)

    def check(self, limit: int | None) -> None:
        """Raise DataError listing the kept records if there are more than `limit` (None: any number is accepted)."""
        if limit is None or self.count <= limit:
            return
        raise DataError(
            f"{self.count} bad record{'s' if self.count > 1 else ''}, and the limit is {limit}:{self.listed}",
            remedy="Repair these records, or raise the bad record limit to leave them out.",
        )

    @property
    def listed(self) -> str:
        """A line of each record that is kept, each after a line break, and the number of others."""
        hidden = self.count - len(self.first)
        more = f"\n    and {hidden} more" if hidden else ""
        return "".join(f"\n    {record.origin}: {record.reason}" for record in self.first) + more


def checked(text: object, what: str) -> str | Unusable:
    """`text`, if it is one with something in it; `what` names it in the reason why it is not."""
    if not isinstance(text, str):
        return Unusable(f"{what} is {described(text)}, not a string")
    if not text:
        return Unusable(f"{what} is empty")
    fault = not_text(text)
    return text if fault is None else Unusable(f"{what} {fault}")


def not_text(text: str) -> str | None:
    """What keeps a string from being text: half of a surrogate pair has no UTF-8 form, though JSON can spell it."""
    if text.isascii():  # known without looking at the characters
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has an unpaired surrogate at character {error.start}"
    return None


def decoded(data: bytes) -> str | Unusable:
    """UTF-8 as text, without a byte order mark at its start."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start}")
    return text or Unusable("empty text")


def described(value: object) -> str:
    """What kind of value it is, in words of JSON."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"


def strings(value: object) -> Iterator[str]:
    """Every string in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from strings(inner)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key `{next(name for name in names if names.count(name) > 1)}` appears twice")
    return fields


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a valid JSON number")


parsed: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse).decode
"""Return the value of a JSON text. Raises ValueError, also for NaN and a key that appears twice, and RecursionError."""


LARGEST = float(np.finfo(np.float32).max)


def as_number(value: Any, what: str) -> float | Unusable:
    """A finite number, as float32 can hold it."""
    if isinstance(value, Unusable):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return Unusable(f"{what} is {described(value)}, not a number")
    if value != value:
        return Unusable(f"{what} is NaN")
    # Whole numbers are compared as they are: those of JSON can be too large for a float of any kind.
    if abs(value) > LARGEST:
        return Unusable(f"{what} is {shown(value)}, too large for float32")
    return float(value)


def shown(value: Any) -> str:
    """A number in a few digits; of anything else what it is."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else described(value)
