"""What readers give: units of a source, which are read at once, and records, of which documents are made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from attrs import define, frozen

Form = Literal["text", "chat", "instruction", "choices"]
TrainOn = Literal["assistant", "last", "all"]
Message = dict[str, Any]
"""`role` and `content`, both strings, and whatever else the record says, for the template."""


@frozen(kw_only=True)
class Reads:
    """Which fields of a record are read, and as what."""

    form: Form = "text"
    text: str = "text"
    messages: str = "messages"
    prompt: str = "prompt"
    response: str = "response"
    question: str = "question"
    choices: str = "choices"
    answer: str = "answer"
    template: str = "auto"
    train_on: TrainOn = "assistant"

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "Reads":
        """The `reads` of a plan. Raises TypeError for a setting that does not exist."""
        return cls(**settings)

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that are read; a dot leads into an object: `meta.text`."""
        match self.form:
            case "text":
                return (self.text,)
            case "chat":
                return (self.messages,)
            case "instruction":
                return (self.prompt, self.response)
            case "choices":
                return (self.question, self.choices, self.answer)


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


Content = str | list[Message] | TokenIds | SyntheticRecord | ChoiceQuestion


@define
class SourceRecord:
    """What one document is made of, or those of a question, and where it was read: `path`, `path:line`, or words that
    say so.

    All records of one source have contents of one type.
    """

    content: Content
    origin: str

    @property
    def size(self) -> int:
        """Characters, or tokens of what is tokenised, about."""
        content = self.content
        if isinstance(content, str):
            return len(content)
        if isinstance(content, TokenIds):
            return len(content.ids)
        if isinstance(content, SyntheticRecord):
            return content.tokens
        if isinstance(content, ChoiceQuestion):
            return len(content.text) * len(content.choices) + sum(map(len, content.choices))
        return sum(len(message["content"]) for message in content)


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
