"""Turns records into documents: arrays of tokens, with bos and eos, and which of them are to be predicted."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from ..records.bad_records import BadRecord
from ..records.records import ChoiceQuestion, Message, Reads, SourceRecord, SyntheticRecord, TokenIds
from ..records.texts import strings
from .chat_template import ChatTemplate, TemplateRefusal, load_template, reserved
from .chat_turns import Span, assistant_spans
from .synthetic import Lexicon
from .tokenizers import Placed, TextTokenizer

VERSION = 1  # raise it whenever the same records would give other tokens
# A tokenizer takes hundreds of bytes of memory for a character: longer texts are encoded in pieces.
PIECE = 1 << 20
LONGEST_CONVERSATION = 1 << 24  # characters


@frozen(kw_only=True, eq=False)
class TokenDocument:
    """The tokens of one document."""

    ids: np.ndarray
    """uint16 or uint32 [tokens], bos and eos included; two at least."""
    trained: np.ndarray | None = None
    """bool [tokens]: which are to be predicted. None: all. The first of a document never is, as nothing precedes it."""
    choice: tuple[int, int, int, int] | None = None
    """Of a choice behind its question: its number there, 1 if it is the right one, its characters and its bytes."""


class DocumentEncoder:
    """Makes documents of records. It can be pickled.

    - Text is laid out `bos, text…, eos`. Texts of more than a million characters are encoded in pieces, cut between
      lines or words where there are any.
    - A conversation is what its template writes, with bos in front if that has none and the tokenizer has one of its
      own, and eos behind unless its last token that is not blank is eos. That eos is predicted if what it follows is.
      Special tokens are those that the template writes: a content that spells one is a bad record.
    - Token ids stay as they are: without a bos of their own they get none.
    - A question becomes a document for each choice, as EleutherAI's lm-evaluation-harness scores them: begun as the
      tokenizer begins texts by itself, without eos, a space between them; what is predicted are the tokens of both
      together without as many as the question has alone.
    """

    def __init__(self, tokenizer: TextTokenizer, reads: Mapping[str, Any], base: Path | None = None) -> None:
        """`base`: where the path of a template starts; the working folder if it is not given.

        Raises DataError for a template that cannot be used.
        """
        self.tokenizer = tokenizer
        self.reads = Reads.of(reads)
        self.dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
        self.template: ChatTemplate | None = None
        if self.reads.form in ("chat", "instruction"):
            self.template = load_template(self.reads.template, tokenizer, base or Path.cwd())

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.tokenizer.vocab_size

    @property
    def covers(self) -> dict[str, Any]:
        """Everything that decides which tokens a record becomes, as JSON."""
        covered: dict[str, Any] = {
            "version": VERSION,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.vocab_size,
            "form": self.reads.form,
        }
        if self.template is not None:
            covered |= {"template": self.template.text, "train_on": self.reads.train_on}
        return covered

    def encode(self, records: Sequence[SourceRecord]) -> "list[TokenDocument | tuple[TokenDocument, ...] | BadRecord]":
        """A document, those of the choices of a question, or the reason why there is none, for each record, in their
        order."""
        if not records:
            return []
        contents: list[Any] = [record.content for record in records]
        match contents[0]:
            case str():
                found = self._texts(contents)
            case TokenIds():
                found = self._tokens(contents)
            case ChoiceQuestion():
                found = self._questions(contents)
            case SyntheticRecord():
                found = [TokenDocument(ids=self._between(self._lexicon.write(record))) for record in contents]
            case _:
                found = self._conversations(contents)
        return [
            BadRecord(origin=record.origin, reason=each) if isinstance(each, str) else each
            for record, each in zip(records, found, strict=True)
        ]

    # Each of these gives a document or the reason why there is none.

    def _texts(self, texts: list[str]) -> list[TokenDocument | str]:
        if max(map(len, texts)) <= PIECE:
            encoded = self.tokenizer.encode_batch(texts)
        else:
            encoded = [np.concatenate([self.tokenizer.encode(piece) for piece in _pieces(text)]) for text in texts]
        return [
            TokenDocument(ids=self._between(ids)) if len(ids) else "the tokenizer gives no tokens for this text"
            for ids in encoded
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

    def _conversations(self, conversations: list[list[Message]]) -> list[TokenDocument | str]:
        written = [self._written(messages) for messages in conversations]
        texts = [each[0] for each in written if not isinstance(each, str)]
        placed = iter(self.tokenizer.encode_rendered(texts) if texts else ())
        return [each if isinstance(each, str) else self._document(*each, next(placed)) for each in written]

    def _written(self, messages: list[Message]) -> tuple[str, list[Span]] | str:
        """The conversation as text and what is to be predicted of it; or the reason why there is none."""
        assert self.template is not None
        for number, message in enumerate(messages, start=1):
            for text in strings(message):
                if (spelt := self._reserved.search(text)) is not None:
                    return f"message {number} contains the special token {spelt[0]}"
        if sum(len(message["content"]) for message in messages) > LONGEST_CONVERSATION:
            return f"a conversation of more than {LONGEST_CONVERSATION:,} characters"
        try:
            if self.reads.train_on == "all":
                text = self.template.render(messages).text
                spans = [(0, len(text))]
            else:
                text, spans = assistant_spans(self.template, messages, last=self.reads.train_on == "last")
        except TemplateRefusal as refusal:
            return str(refusal)
        if not any(text[start:end].strip() for start, end in spans):
            return "the assistant says nothing in it"
        return text, spans

    def _document(self, text: str, spans: list[Span], placed: Placed) -> TokenDocument | str:
        ids, trained = placed.ids, _within(placed, spans, len(text))
        bos, eos = self.tokenizer.bos, self.tokenizer.eos
        blanks = len(text) - len(text.lstrip())
        written = np.flatnonzero((placed.ends > blanks) & (placed.starts < len(text.rstrip())))
        if not len(written):
            return "the tokenizer gives no tokens for this conversation"
        front = [bos] if self.tokenizer.has_bos and ids[written[0]] != bos else []
        back = [eos] if ids[written[-1]] != eos else []
        laid = np.concatenate([np.array(front, self.dtype), ids.astype(self.dtype), np.array(back, self.dtype)])
        if self.reads.train_on == "all":
            return TokenDocument(ids=laid)
        mask = np.concatenate([[False] * len(front), trained, [trained[-1]] * len(back)])
        return TokenDocument(ids=laid, trained=mask.astype(bool))

    @cached_property
    def _reserved(self) -> re.Pattern[str]:
        assert self.template is not None
        return reserved(self.tokenizer, self.template)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_reserved", "_lexicon")}


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


def _pieces(text: str) -> list[str]:
    pieces, start = [], 0
    while len(text) - start > PIECE:
        stop = start + PIECE
        for sign in ("\n", " "):
            cut = text.rfind(sign, start + PIECE // 2, stop)
            if cut > start:
                stop = cut
                break
        pieces.append(text[start:stop])
        start = stop
    return [*pieces, text[start:]]
