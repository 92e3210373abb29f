"""Records and units of sources: the content of documents, and values that are invalid.

A unit is the part of a source that is read at once; a record becomes one document. Bad records are counted, the first
few are kept, and too many of them end the run.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from attrs import define, evolve, field, frozen

from xtrain.runtime.base.errors import DataError

Form = Literal["text", "chat", "instruction", "choices", "preference", "tokens"]
TrainOn = Literal["assistant", "last", "all"]
Lost = Literal["error", "warn", "allow"]
Message = dict[str, Any]
"""`role`, a string, and all further keys of the record for the template. `content` is a string or a list of parts, each
with its `text`; a message with `tool_calls` may have none."""


def named_values(fields: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Return the entries of an object sorted by name, as in a plan that was read back."""
    return tuple(sorted(dict(fields).items()))


@frozen(kw_only=True)
class Reads:
    """Fields of a record that are read, and their form."""

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
    drop_system: bool = False
    message_train: str | None = None
    message_weight: str | None = None
    columns: tuple[tuple[str, str], ...] = field(default=(), converter=named_values)
    """Numbers per token: their name, and the field that has them."""
    values: tuple[tuple[str, str], ...] = field(default=(), converter=named_values)
    """Numbers of the whole record, in the same way; `label` is not among them."""
    template: str = "auto"
    train_on: TrainOn = "assistant"
    lost: Lost = "warn"
    """When a template leaves out content: `warn`: the record is bad if a message, a call or all tools are left out
    completely; `error`: always; `allow`: never."""
    template_arguments: tuple[tuple[str, Any], ...] = field(default=(), converter=named_values)
    """Further values for the template, by name."""
    ended: bool = False
    """Each document, or side of a pair, gets one more eos: its last token, which would only be a label, is then read
    too."""

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Reads":
        """Return the `reads` of a plan. Raises TypeError for a setting that does not exist."""
        return cls(**settings)

    @property
    def fields(self) -> tuple[str, ...]:
        """Fields that are read; a dot leads into an object: `meta.text`."""
        beside = (self.input, self.label, self.tools, self.system, self.mask)
        numbers = (name for _, name in (*self.columns, *self.values))
        return tuple(dict.fromkeys((*self._content, *(name for name in beside if name is not None), *numbers)))

    def has(self, column: str) -> bool:
        """Return True if a field is read that has this name, or lies inside of what has it."""
        return any(f"{name}.".startswith(f"{column}.") for name in self.fields)

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
        """Fields whose type in a table is checked: texts; for `chat` lists of messages; for `instruction` either."""
        return () if self.form in ("preference", "tokens") else self._content

    @property
    def beside(self) -> dict[str, Any]:
        """Optional fields that are read, as JSON: setting → field."""
        names = ("input", "label", "tools", "system", "mask", "message_train", "message_weight")
        optional: dict[str, Any] = {name: value for name in names if (value := getattr(self, name)) is not None}
        optional |= {name: dict(fields) for name in ("columns", "values") if (fields := getattr(self, name))}
        return optional | {name: True for name in ("drop_system", "ended") if getattr(self, name)}

    @property
    def value_names(self) -> tuple[str, ...]:
        """Names of the numbers of whole documents."""
        names = {name for name, _ in self.values} | ({"label"} if self.label is not None else set())
        return tuple(sorted(names))


@frozen(kw_only=True, eq=False)
class TokenIds:
    """A document that is already tokenized."""

    ids: np.ndarray
    """Integers [tokens]."""
    trained: np.ndarray | None = None
    """Predicted tokens, bool [tokens]. None: all."""


@frozen(kw_only=True)
class SyntheticRecord:
    """A document of the `synthetic` source. It is written during encoding, because its tokens depend on the
    tokenizer."""

    seed: int
    index: int
    tokens: int
    """Number of tokens, with bos and eos."""


@frozen(kw_only=True)
class ChoiceQuestion:
    """A text with possible continuations. right: number of the correct choice."""

    text: str
    choices: tuple[str, ...]
    right: int


@frozen(kw_only=True)
class Conversation:
    """Messages with further facts."""

    messages: list[Message]
    prompt: int = 0
    """Number of messages that are the prompt: only later ones are predicted. 0: no prompt."""
    tools: list[Any] | None = None
    """Definitions of the functions that the assistant may call, for the template."""


@frozen(kw_only=True)
class PreferencePair:
    """Two answers to one prompt, of which the first is preferred.

    Either conversations that begin with the same `prompt` messages, or texts, whose common prefix is the prompt.
    """

    chosen: str | list[Message]
    rejected: str | list[Message]
    prompt: int = 0
    tools: list[Any] | None = None


@frozen(kw_only=True, eq=False)
class Numbered:
    """A record with numbers for its tokens or document."""

    content: "Content"
    columns: dict[str, float | np.ndarray]
    """One number for all tokens of the document, or float32 [tokens]."""
    values: dict[str, float]


Content = str | list[Message] | TokenIds | SyntheticRecord | ChoiceQuestion | Conversation | PreferencePair | Numbered


def content_size(content: Content) -> int:
    """Return the approximate number of characters, or of tokens if it is tokenized."""
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
    """Return the content of a message, with the parts of a list joined."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@define
class SourceRecord:
    """Content of one document, or of a question's documents, and its origin: `path`, `path:line`, or words.

    All records of a source have contents of one type; messages may be a list or a conversation.
    """

    content: Content
    origin: str

    @property
    def size(self) -> int:
        """Approximate number of characters, or of tokens if it is tokenized."""
        return content_size(self.content)


@frozen(kw_only=True)
class SourceUnit:
    """A part of a source that is read at once, in any process. Can be pickled."""

    size: int
    """Bytes of input it takes."""
    part: Any
    """Identifies the part to the reader that created it."""
    path: Path | None = None
    line: int | None = None
    """Number of its first line or row."""


@frozen
class Unusable:
    """The reason why a record has no document."""

    reason: str


MOST_SHOWN = 10


@define(kw_only=True, frozen=True)
class BadRecord:
    """One record that was left out: where it is (`path` or `path:line`) and why."""

    origin: str
    reason: str


@define(kw_only=True, frozen=True)
class BadRecordReport:
    """Number of left-out records, with the first `MOST_SHOWN` of them in reading order."""

    count: int = 0
    first: tuple[BadRecord, ...] = ()

    def including(self, record: BadRecord) -> "BadRecordReport":
        """Return this report with one more record."""
        first = (*self.first, record) if len(self.first) < MOST_SHOWN else self.first
        return evolve(self, count=self.count + 1, first=first)

    def check(self, limit: int | None) -> None:
        """Raise DataError listing the kept records if there are more than `limit` (None: any number is accepted)."""
        if limit is None or self.count <= limit:
            return
        raise DataError(
            f"{self.count} bad record{'s' if self.count > 1 else ''}, but the limit is {limit}:{self.listed}",
            remedy="Repair these records, or raise the bad record limit to leave them out.",
        )

    @property
    def listed(self) -> str:
        """A line for each kept record, each after a line break, and the number of others."""
        hidden = self.count - len(self.first)
        more = f"\n    and {hidden} more" if hidden else ""
        return "".join(f"\n    {record.origin}: {record.reason}" for record in self.first) + more


def checked(text: object, what: str) -> str | Unusable:
    """Return `text` if it is a non-empty valid string, else the reason; `what` names it there."""
    if not isinstance(text, str):
        return Unusable(f"{what} is {described(text)}, not a string")
    if not text:
        return Unusable(f"{what} is empty")
    fault = not_text(text)
    return text if fault is None else Unusable(f"{what} {fault}")


def not_text(text: str) -> str | None:
    """Return why a string is not valid text, else None: an unpaired surrogate has no UTF-8 form, though JSON can spell
    it."""
    if text.isascii():  # needs no look at the characters
        return None
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has an unpaired surrogate at character {error.start}"
    return None


def decoded(data: bytes) -> str | Unusable:
    """Decode UTF-8, without a byte order mark at its start."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Unusable(f"invalid UTF-8 at byte {error.start}")
    return text or Unusable("empty text")


def described(value: object) -> str:
    """Return the JSON type of a value in words."""
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
    """Yield every string in a JSON value, keys included."""
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
"""Decoder of JSON text. Raises ValueError, also for NaN and a repeated key, and RecursionError."""


LARGEST = float(np.finfo(np.float32).max)


def as_number(value: Any, what: str) -> float | Unusable:
    """Return a finite number that float32 can hold."""
    if isinstance(value, Unusable):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return Unusable(f"{what} is {described(value)}, not a number")
    if value != value:
        return Unusable(f"{what} is NaN")
    # Integers are compared without conversion: JSON's can be too large for any float.
    if abs(value) > LARGEST:
        return Unusable(f"{what} is {shown(value)}, too large for float32")
    return float(value)


def shown(value: Any) -> str:
    """Return a number in a few digits; the type of anything else."""
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else described(value)
