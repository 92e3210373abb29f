"""Turns records into documents: arrays of tokens, with bos and eos, and which of them are to be predicted."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.runtime.data.documents.bounded import BeyondBounds, Bounded
from xtrain.runtime.data.documents.chat_template import ChatTemplate, load_template
from xtrain.runtime.data.documents.chat_turns import Span
from xtrain.runtime.data.documents.chat_writer import ConversationWriter, WrittenConversation
from xtrain.runtime.data.documents.synthetic import Lexicon
from xtrain.runtime.data.documents.tokenizers import Placed, TextTokenizer
from xtrain.runtime.data.errors import DataError
from xtrain.runtime.data.records.bad_records import BadRecord
from xtrain.runtime.data.records.records import (
    ChoiceQuestion,
    Conversation,
    Message,
    Numbered,
    PreferencePair,
    Reads,
    SourceRecord,
    SyntheticRecord,
    TokenIds,
    content_size,
)

VERSION = 1  # raise it whenever the same records would give other tokens
MESSAGES = 3  # the same of conversations


@frozen(kw_only=True, eq=False)
class TokenDocument:
    """The tokens of one document."""

    ids: np.ndarray
    """uint16 or uint32 [tokens], bos and eos included; two at least."""
    trained: np.ndarray | None = None
    """bool [tokens]: which are to be predicted. None: all. The first of a document never is, as nothing precedes it."""
    choice: tuple[int, int, int, int] | None = None
    """Of a choice behind its question: its number there, 1 if it is the right one, its characters and its bytes."""
    first: int | None = None
    """Of a pair: how many of the tokens are those of the preferred side, which comes first."""
    columns: dict[str, np.ndarray] = field(factory=dict)
    """Numbers along the tokens, float32 [tokens] each, by name."""
    values: dict[str, float] = field(factory=dict)
    """Numbers of the document as a whole, by name."""
    lost: tuple[str, ...] = ()
    """Kinds of what the template has left out of a conversation."""


class DocumentEncoder:
    """Makes documents of records. It can be pickled.

    - Text is laid out `bos, text…, eos`.
    - A conversation is what its template writes, with bos in front if that has none and the tokenizer has one of its
      own, and eos behind unless its last token that is not blank is eos. That eos is predicted if what it follows is,
      and is no special token that ends the turn itself.
      Special tokens are those that the template writes: a content that spells one is a bad record.
    - Token ids stay as they are: without a bos of their own they get none.
    - A question becomes a document for each choice, as EleutherAI's lm-evaluation-harness scores them: begun as the
      tokenizer begins texts by itself, without eos, a space between them; what is predicted are the tokens of both
      together without as many as the question has alone.
    - A pair is one document: its preferred side, then the other one, each with bos and eos of its own. What is
      predicted of a side are the answers of the assistant behind the prompt, whose tokens have to be the first ones of
      both; of two texts, all behind the tokens that they have in common.
    - Documents that get rewards, and sides of pairs, have one eos more, as rewards are read at the token before it.
    """

    def __init__(self, tokenizer: TextTokenizer, reads: Mapping[str, Any], base: Path | None = None) -> None:
        """`base`: where the path of a template starts; the working folder if it is not given.

        Raises DataError for a template that cannot be used.
        """
        self.tokenizer = tokenizer
        self.reads = Reads.of(reads)
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.template: ChatTemplate | None = None
        optional = self.reads.form == "preference" and self.reads.prompt is None and self.reads.template == "auto"
        if self.reads.form in ("chat", "instruction", "preference") and not (
            optional and tokenizer.chat_template is None
        ):
            self.template = load_template(
                self.reads.template, tokenizer, base or Path.cwd(), self.reads.template_arguments
            )
        writer = ConversationWriter(tokenizer, self.reads, self.template)
        self._written = Bounded(writer.written, _seconds_more)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.tokenizer.vocab_size

    @property
    def covers(self) -> dict[str, Any]:
        """Everything that decides which tokens a record becomes, as JSON."""
        covered: dict[str, Any] = {
            "version": VERSION if self.template is None else MESSAGES,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.vocab_size,
            "form": self.reads.form,
        }
        if self.template is not None:
            covered |= {"template": self.template.text, "train_on": self.reads.train_on, "lost": self.reads.lost}
            if self.template.arguments:
                covered["template_arguments"] = dict(self.template.arguments)
        if self.reads.beside:
            covered["beside"] = self.reads.beside
        return covered

    def encode(self, records: Sequence[SourceRecord]) -> "list[TokenDocument | tuple[TokenDocument, ...] | BadRecord]":
        """A document, those of the choices of a question, or the reason why there is none, for each record, in their
        order."""
        if not records:
            return []
        contents: list[Any] = [
            record.content.content if isinstance(record.content, Numbered) else record.content for record in records
        ]
        match contents[0]:
            case str():
                found = self._texts(contents)
            case TokenIds():
                found = self._tokens(contents)
            case ChoiceQuestion():
                found = self._questions(contents)
            case SyntheticRecord():
                found = [TokenDocument(ids=self._between(self._lexicon.write(record))) for record in contents]
            case PreferencePair():
                found = self._pairs(contents)
            case _:
                found = self._conversations(contents)
        return [
            BadRecord(origin=record.origin, reason=each)
            if isinstance(each, str)
            else _with_numbers(self._ended(each) if self.reads.ended else each, record)
            for record, each in zip(records, found, strict=True)
        ]

    # Each of these gives a document or the reason why there is none.

    def _texts(self, texts: list[str]) -> list[TokenDocument | str]:
        return [
            TokenDocument(ids=self._between(ids)) if len(ids) else "the tokenizer gives no tokens for this text"
            for ids in self.tokenizer.encode_batch(texts)
        ]

    def _questions(self, questions: list[ChoiceQuestion]) -> list[tuple[TokenDocument, ...] | str]:
        # Spaces at the end of a question belong to what follows: tokens begin with spaces and do not end with them.
        texts = [
            text for each in questions for text in (each.text.rstrip(), *(f"{each.text} {c}" for c in each.choices))
        ]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [self._question(each, next(encoded), [next(encoded) for _ in each.choices]) for each in questions]

    def _question(
        self, question: ChoiceQuestion, alone: np.ndarray, wholes: list[np.ndarray]
    ) -> tuple[TokenDocument, ...] | str:
        begun = np.concatenate([self.tokenizer.begins_with, alone]).astype(self.dtype)
        if not len(begun):
            return "the tokenizer gives no tokens for this question"
        found = []
        for number, (choice, whole) in enumerate(zip(question.choices, wholes, strict=True)):
            scored = whole[len(alone) :].astype(self.dtype)
            if not len(scored):
                return f"the tokenizer gives no tokens for choice {number} behind this question"
            ids = np.concatenate([begun, scored])
            facts = (number, int(number == question.right), len(choice), len(choice.encode()))
            found.append(TokenDocument(ids=ids, trained=np.arange(len(ids)) >= len(begun), choice=facts))
        return tuple(found)

    def _between(self, ids: np.ndarray) -> np.ndarray:
        laid = np.empty(len(ids) + 2, self.dtype)
        laid[0], laid[1:-1], laid[-1] = self.tokenizer.bos, ids, self.tokenizer.eos
        return laid

    def _tokens(self, documents: list[TokenIds]) -> list[TokenDocument | str]:
        everything = np.concatenate([document.ids for document in documents])
        if self._in_vocabulary(everything):
            return [
                TokenDocument(ids=document.ids.astype(self.dtype), trained=document.trained) for document in documents
            ]
        return [self._checked(document) for document in documents]

    def _checked(self, document: TokenIds) -> TokenDocument | str:
        if self._in_vocabulary(document.ids):
            return TokenDocument(ids=document.ids.astype(self.dtype), trained=document.trained)
        place = int(np.argmax((document.ids < 0) | (document.ids >= self.vocab_size)))
        wrong = int(document.ids[place])
        return f"its token {place} is {wrong}, which is not in the vocabulary of {self.vocab_size:,}"

    def _in_vocabulary(self, ids: np.ndarray) -> bool:
        return int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size

    @cached_property
    def _lexicon(self) -> Lexicon:
        return Lexicon.of(self.tokenizer)

    def _pairs(self, pairs: list[PreferencePair]) -> list[TokenDocument | str]:
        sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
        texts = iter(self._texts([side for side in sides if isinstance(side, str)]))
        conversations = iter(
            self._conversations(
                [
                    Conversation(messages=side, prompt=pair.prompt, tools=pair.tools)
                    for pair in pairs
                    for side in (pair.chosen, pair.rejected)
                    if not isinstance(side, str)
                ]
            )
        )
        found = []
        for pair in pairs:
            both = [next(texts if isinstance(side, str) else conversations) for side in (pair.chosen, pair.rejected)]
            found.append(self._pair(*both))
        return found

    def _pair(self, first: TokenDocument | str, second: TokenDocument | str) -> TokenDocument | str:
        for name, side in ((self.reads.chosen, first), (self.reads.rejected, second)):
            if isinstance(side, str):
                return f"field `{name}`: {side}"
        assert isinstance(first, TokenDocument) and isinstance(second, TokenDocument)
        if np.array_equal(first.ids, second.ids):
            return f"fields `{self.reads.chosen}` and `{self.reads.rejected}` have the same tokens"
        masks = [side.trained for side in (first, second)]
        if masks[0] is None or masks[1] is None:
            # Texts: the tokens that they have in common are the prompt.
            shorter = min(len(first.ids), len(second.ids))
            unlike = np.flatnonzero(first.ids[:shorter] != second.ids[:shorter])
            common = int(unlike[0]) if len(unlike) else shorter
            masks = [np.arange(len(side.ids)) >= max(common, 1) for side in (first, second)]
        return TokenDocument(
            ids=np.concatenate([first.ids, second.ids]),
            trained=np.concatenate(masks),  # pyright: ignore[reportArgumentType, reportCallIssue]
            first=len(first.ids),
            lost=tuple(dict.fromkeys((*first.lost, *second.lost))),
        )

    def _conversations(self, conversations: Sequence[list[Message] | Conversation]) -> list[TokenDocument | str]:
        written = self._rendered(conversations)
        good = [each for each in written if not isinstance(each, str)]
        placed = iter(self.tokenizer.encode_rendered([each.text for each in good]) if good else ())
        prompts = [each.prompt for each in good if each.prompt]
        begun = iter(self.tokenizer.encode_rendered(prompts) if prompts else ())
        return [
            each if isinstance(each, str) else self._document(each, next(placed), next(begun) if each.prompt else None)
            for each in written
        ]

    def _rendered(self, conversations: Sequence[list[Message] | Conversation]) -> list[WrittenConversation | str]:
        """Raises DataError for a template that takes too much time or memory."""
        try:
            return self._written.map(conversations)
        except BeyondBounds as problem:
            path = None if self.template is None else self.template.origin
            remedy = "Name another template; this one does not end, or makes texts of any length."
            raise DataError(f"the template {problem} for one conversation", path=path, remedy=remedy) from problem

    def _document(self, written: WrittenConversation, placed: Placed, prompt: Placed | None) -> TokenDocument | str:
        text = written.text
        ids, trained = placed.ids, _within(placed, written.spans, len(text))
        if prompt is not None and not np.array_equal(prompt.ids, ids[: len(prompt.ids)]):
            return "the tokens of the prompt alone are not those that it has in front of the answer"
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        blanks = len(text) - len(text.lstrip())
        visible = np.flatnonzero((placed.ends > blanks) & (placed.starts < len(text.rstrip())))
        if not len(visible):
            return "the tokenizer gives no tokens for this conversation"
        front = [bos] if self.tokenizer.has_bos and ids[visible[0]] != bos else []
        back = [eos] if ids[visible[-1]] != eos else []
        laid = np.concatenate([np.array(front, self.dtype), ids.astype(self.dtype), np.array(back, self.dtype)])
        if self.reads.train_on == "all" and prompt is None:
            return TokenDocument(ids=laid)
        closes = bool(trained[-1]) and not written.ended
        mask = np.concatenate([[False] * len(front), trained, [closes] * len(back)])
        columns = {}
        if written.weights is not None:
            weights = np.zeros(len(ids), dtype=np.float32)
            for span, weight in zip(written.spans, written.weights, strict=True):
                weights[_within(placed, [span], len(text))] = weight
            shares = [np.zeros(len(front)), weights, np.full(len(back), weights[-1] * closes)]
            columns[WEIGHTS] = np.concatenate(shares).astype(np.float32)
        return TokenDocument(ids=laid, trained=mask.astype(bool), columns=columns, lost=written.lost)

    def _ended(self, found: TokenDocument | tuple[TokenDocument, ...]) -> TokenDocument:
        """With one eos more behind a document, or each side of a pair, which is not to be predicted where that is said
        of the others."""
        assert isinstance(found, TokenDocument), "questions with choices have no rewards"
        places = [len(found.ids)] if found.first is None else [found.first, len(found.ids)]
        return evolve(
            found,
            ids=np.insert(found.ids, places, self.tokenizer.eos),
            trained=None if found.trained is None else np.insert(found.trained, places, False),
            first=None if found.first is None else found.first + 1,
            columns={name: np.insert(column, places, 0.0) for name, column in found.columns.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lexicon"}


def _seconds_more(conversation: list[Message] | Conversation) -> float:
    """Processor time that templates may take for the length of a conversation: a second for 200,000 characters."""
    return content_size(conversation) / 200_000


def _with_numbers(
    found: TokenDocument | tuple[TokenDocument, ...], record: SourceRecord
) -> TokenDocument | tuple[TokenDocument, ...]:
    """A document with the numbers of its record: one for the whole record is that of every token."""
    numbers = record.content
    if not isinstance(numbers, Numbered):
        return found
    assert isinstance(found, TokenDocument), "questions with choices have no numbers"
    count = len(found.ids)
    columns = {
        name: column if isinstance(column, np.ndarray) else np.full(count, column, dtype=np.float32)
        for name, column in numbers.columns.items()
    }
    return evolve(found, columns=found.columns | columns, values=numbers.values)


def _within(placed: Placed, spans: list[Span], length: int) -> np.ndarray:
    """Which tokens have a character in a span: bool [tokens]. One without characters is in it if its place is.

    So is a token that begins in a header and ends in what the assistant says: otherwise its part of that would never
    be predicted.
    """
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, end in spans:
        inside[start:end] = 1
    before = np.concatenate([[0], np.cumsum(inside)])
    ends = np.where(placed.ends > placed.starts, placed.ends, placed.starts + 1)
    return before[ends] > before[placed.starts]
