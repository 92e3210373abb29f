"""Documents: records encoded as arrays of tokens, with bos and eos and a mask of the tokens to predict.

`Lexicon` draws the texts of synthetic datasets: a small language with frequent and rare words in phrases that can be
learned. All draws come from a counter-based hash, not from a library's generator. So a document depends only on the
seed and its number, in every process, order and version of numpy.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.runtime.base.bounded import BeyondBounds, Bounded
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.chat.template import ChatTemplate, load_template
from xtrain.runtime.feed.chat.turns import Span
from xtrain.runtime.feed.chat.writer import ConversationWriter, WrittenConversation
from xtrain.runtime.feed.records import (
    BadRecord,
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
from xtrain.runtime.feed.tokenizers import Placed, TextTokenizer

WORDS = 2048
SUCCESSORS = 4  # words that may follow one within a phrase
PHRASE = 4  # words
_ONSETS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_LEAST_LENGTH = 3  # bos, a token, eos


def lengths(seed: int, indices: np.ndarray, mean: int, spread: float) -> np.ndarray:
    """Return the numbers of tokens of the documents `indices` (uint64 [documents]), log-normal with this mean, at least
    3, int64."""
    first, second = _uniform(_key(seed, indices, 0)), _uniform(_key(seed, indices, 1))
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    drawn = np.exp(math.log(mean) - spread**2 / 2 + spread * normal)
    return np.maximum(np.rint(drawn), _LEAST_LENGTH).astype(np.int64)


@frozen(kw_only=True, eq=False)
class Lexicon:
    """Tokens of every word as the tokenizer writes it inside a text, then of every word's form at the end of a
    phrase."""

    tokens: np.ndarray
    """Concatenated over words."""
    offsets: np.ndarray
    """int64 [2 · WORDS + 1]."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "Lexicon":
        """Tokenize all words; if the tokenizer knows too few of them, single tokens are the words."""
        pieces = tokenizer.encode_batch([f" {word}" for word in _words()] + [f" {word}." for word in _words()])
        ids = np.concatenate(pieces)
        if min(map(len, pieces)) == 0 or len(np.unique(ids)) < len(_VOWELS):
            plain = np.setdiff1d(np.arange(tokenizer.vocab_size), [tokenizer.bos, tokenizer.eos])
            plain = plain if len(plain) else np.array([tokenizer.eos])
            ids = plain[np.arange(2 * WORDS) % len(plain)]
            return cls(tokens=ids, offsets=np.arange(2 * WORDS + 1))
        return cls(tokens=ids, offsets=np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]))

    def write(self, record: SyntheticRecord) -> np.ndarray:
        """Return the tokens of a document between bos and eos: exactly `record.tokens - 2`."""
        count = record.tokens - 2
        sizes = np.diff(self.offsets)
        words = _words_of(record, -(-count // int(sizes.min())))
        size = sizes[words]
        ends = np.cumsum(size)
        # Position of each token in `tokens`: where its word begins there, and how far into the word it is.
        places = np.repeat(self.offsets[words] - (ends - size), size) + np.arange(ends[-1])
        return self.tokens[places[:count]]


def _words_of(record: SyntheticRecord, count: int) -> np.ndarray:
    """Return the numbers of `count` words: phrases whose first word has rank r with frequency 1 / r."""
    phrases = -(-count // PHRASE)
    base = _key(record.seed, np.array([record.index], dtype=np.uint64), 2)
    hashes = _mix(base + np.arange(phrases * PHRASE, dtype=np.uint64)).reshape(phrases, PHRASE)
    words = np.empty((phrases, PHRASE), dtype=np.int64)
    words[:, 0] = np.minimum((WORDS + 1) ** _uniform(hashes[:, 0]), WORDS).astype(np.int64) - 1
    for place in range(1, PHRASE):
        words[:, place] = _successors()[words[:, place - 1], hashes[:, place] % np.uint64(SUCCESSORS)]
    words[:, -1] += WORDS
    return words.reshape(-1)[:count]


@lru_cache(maxsize=1)
def _words() -> tuple[str, ...]:
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    words = []
    for rank in range(WORDS):
        word, rest = "", rank
        while not word or rest:
            rest, last = divmod(rest, len(syllables))
            word += syllables[last]
        words.append(word)
    return tuple(words)


@lru_cache(maxsize=1)
def _successors() -> np.ndarray:
    """Return the words that may follow each word, int64 [WORDS, SUCCESSORS]."""
    uniform = _uniform(_mix(np.arange(WORDS * SUCCESSORS, dtype=np.uint64)))
    ranks = np.minimum((WORDS + 1) ** uniform, WORDS).astype(np.int64) - 1
    return ranks.reshape(WORDS, SUCCESSORS)


def _key(seed: int, indices: np.ndarray, purpose: int) -> np.ndarray:
    start = _mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    return _mix(_mix(start + indices) + np.uint64(purpose))


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash with splitmix64: a bijection of 64-bit numbers whose results look random."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(values: np.ndarray) -> np.ndarray:
    """Return numbers in [0, 1) of 53 bits."""
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53


VERSION = 1  # raise it whenever the same records would give other tokens
MESSAGES = 3  # the version for conversations


@frozen(kw_only=True, eq=False)
class TokenDocument:
    """The tokens of one document."""

    ids: np.ndarray
    """uint16 or uint32 [tokens], at least two, with bos and eos."""
    trained: np.ndarray | None = None
    """Predicted tokens, bool [tokens]; None: all. The first one never is, as nothing precedes it."""
    choice: tuple[int, int, int, int] | None = None
    """For a choice with its question: its number, 1 if it is the right one, its characters and its bytes."""
    first: int | None = None
    """For a pair: number of tokens of the preferred side, which comes first."""
    columns: dict[str, np.ndarray] = field(factory=dict)
    """Numbers per token, float32 [tokens] each, by name."""
    values: dict[str, float] = field(factory=dict)
    """Numbers of the whole document, by name."""
    lost: tuple[str, ...] = ()
    """Kinds of content that the template left out of a conversation."""


class DocumentEncoder:
    """Encoder of records as documents. Can be pickled.

    - Text is laid out `bos, text…, eos`.
    - A conversation is the text that its template writes, with bos before it if the text has none and the tokenizer
      has one, and eos after it unless its last token that is not blank is eos. That eos is predicted if the text
      before it is predicted and does not end with a special token of the turn. Special tokens are only those that the
      template writes: a content that spells one is a bad record.
    - Token ids are kept: they get no bos or eos.
    - A question becomes a document for each choice, as EleutherAI's lm-evaluation-harness scores them: with the
      tokenizer's own beginning, without eos, a space between question and choice. Predicted are the tokens of both
      together after the number of tokens that the question has alone.
    - A pair is one document: its preferred side, then the other one, each with bos and eos of its own. Predicted of
      a side are the assistant's answers after the prompt, whose tokens must be the first ones of both sides; of two
      texts, the tokens after their common prefix.
    - Documents that get rewards, and sides of pairs, have one more eos, as rewards are read at the token before it.
    """

    def __init__(self, tokenizer: TextTokenizer, reads: Mapping[str, Any], base: Path | None = None) -> None:
        """Load the template. base: folder that its path is relative to; default: the working folder.

        Raises DataError for an unusable template.
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
        """Everything that determines the tokens of a record, as JSON."""
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
        """Return a document, the documents of a question's choices, or a bad record for each record, in order."""
        if not records:
            return []
        contents: list[Any] = [
            record.content.content if isinstance(record.content, Numbered) else record.content for record in records
        ]
        match contents[0]:
            case str():
                documents = self._texts(contents)
            case TokenIds():
                documents = self._tokens(contents)
            case ChoiceQuestion():
                documents = self._questions(contents)
            case SyntheticRecord():
                documents = [TokenDocument(ids=self._between(self._lexicon.write(record))) for record in contents]
            case PreferencePair():
                documents = self._pairs(contents)
            case _:
                documents = self._conversations(contents)
        return [
            BadRecord(origin=record.origin, reason=document)
            if isinstance(document, str)
            else _with_numbers(self._ended(document) if self.reads.ended else document, record)
            for record, document in zip(records, documents, strict=True)
        ]

    # Each of these returns a document or the reason why there is none.

    def _texts(self, texts: list[str]) -> list[TokenDocument | str]:
        return [
            TokenDocument(ids=self._between(ids)) if len(ids) else "the tokenizer gives no tokens for this text"
            for ids in self.tokenizer.encode_batch(texts)
        ]

    def _questions(self, questions: list[ChoiceQuestion]) -> list[tuple[TokenDocument, ...] | str]:
        # Spaces at the end of a question belong to the choice: tokens begin with spaces and do not end with them.
        texts = [text for q in questions for text in (q.text.rstrip(), *(f"{q.text} {c}" for c in q.choices))]
        encoded = iter(self.tokenizer.encode_batch(texts))
        return [self._question(q, next(encoded), [next(encoded) for _ in q.choices]) for q in questions]

    def _question(
        self, question: ChoiceQuestion, alone: np.ndarray, wholes: list[np.ndarray]
    ) -> tuple[TokenDocument, ...] | str:
        begun = np.concatenate([self.tokenizer.begins_with, alone]).astype(self.dtype)
        if not len(begun):
            return "the tokenizer gives no tokens for this question"
        documents = []
        for number, (choice, whole) in enumerate(zip(question.choices, wholes, strict=True)):
            scored = whole[len(alone) :].astype(self.dtype)
            if not len(scored):
                return f"the tokenizer gives no tokens for choice {number} after this question"
            ids = np.concatenate([begun, scored])
            facts = (number, int(number == question.right), len(choice), len(choice.encode()))
            documents.append(TokenDocument(ids=ids, trained=np.arange(len(ids)) >= len(begun), choice=facts))
        return tuple(documents)

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
        documents = []
        for pair in pairs:
            both = [next(texts if isinstance(side, str) else conversations) for side in (pair.chosen, pair.rejected)]
            documents.append(self._pair(*both))
        return documents

    def _pair(self, first: TokenDocument | str, second: TokenDocument | str) -> TokenDocument | str:
        for name, side in ((self.reads.chosen, first), (self.reads.rejected, second)):
            if isinstance(side, str):
                return f"field `{name}`: {side}"
        assert isinstance(first, TokenDocument) and isinstance(second, TokenDocument)
        if np.array_equal(first.ids, second.ids):
            return f"fields `{self.reads.chosen}` and `{self.reads.rejected}` have the same tokens"
        masks = [side.trained for side in (first, second)]
        if masks[0] is None or masks[1] is None:
            # The common prefix of two texts is the prompt.
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
        good = [one for one in written if not isinstance(one, str)]
        placed = iter(self.tokenizer.encode_rendered([one.text for one in good]) if good else ())
        prompts = [one.prompt for one in good if one.prompt]
        begun = iter(self.tokenizer.encode_rendered(prompts) if prompts else ())
        return [
            one if isinstance(one, str) else self._document(one, next(placed), next(begun) if one.prompt else None)
            for one in written
        ]

    def _rendered(self, conversations: Sequence[list[Message] | Conversation]) -> list[WrittenConversation | str]:
        """Render conversations. Raises DataError for a template that takes too much time or memory."""
        try:
            return self._written.map(conversations)
        except BeyondBounds as problem:
            path = None if self.template is None else self.template.origin
            remedy = "Use another template; this one does not end, or writes unlimited text."
            raise DataError(f"the template {problem} for one conversation", path=path, remedy=remedy) from problem

    def _document(self, written: WrittenConversation, placed: Placed, prompt: Placed | None) -> TokenDocument | str:
        text = written.text
        ids, trained = placed.ids, _within(placed, written.spans, len(text))
        if prompt is not None and not np.array_equal(prompt.ids, ids[: len(prompt.ids)]):
            return "the prompt has other tokens alone than before the answer"
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

    def _ended(self, document: TokenDocument | tuple[TokenDocument, ...]) -> TokenDocument:
        """Add one eos, not predicted if there is a mask, to a document or each side of a pair."""
        assert isinstance(document, TokenDocument), "questions with choices have no rewards"
        places = [len(document.ids)] if document.first is None else [document.first, len(document.ids)]
        return evolve(
            document,
            ids=np.insert(document.ids, places, self.tokenizer.eos),
            trained=None if document.trained is None else np.insert(document.trained, places, False),
            first=None if document.first is None else document.first + 1,
            columns={name: np.insert(column, places, 0.0) for name, column in document.columns.items()},
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lexicon"}


def _seconds_more(conversation: list[Message] | Conversation) -> float:
    """Return the processor time that a conversation's length adds for templates: a second per 200,000 characters."""
    return content_size(conversation) / 200_000


def _with_numbers(
    document: TokenDocument | tuple[TokenDocument, ...], record: SourceRecord
) -> TokenDocument | tuple[TokenDocument, ...]:
    """Return a document with the numbers of its record; a number of the whole record goes to every token."""
    numbers = record.content
    if not isinstance(numbers, Numbered):
        return document
    assert isinstance(document, TokenDocument), "questions with choices have no numbers"
    count = len(document.ids)
    columns = {
        name: column if isinstance(column, np.ndarray) else np.full(count, column, dtype=np.float32)
        for name, column in numbers.columns.items()
    }
    return evolve(document, columns=document.columns | columns, values=numbers.values)


def _within(placed: Placed, spans: list[Span], length: int) -> np.ndarray:
    """Return the mask of tokens with a character in a span, bool [tokens]. A token without characters counts by its
    position.

    A token that begins in a header and ends in the assistant's text counts too: otherwise its part of that text would
    never be predicted.
    """
    inside = np.zeros(length + 1, dtype=np.int64)
    for start, end in spans:
        inside[start:end] = 1
    before = np.concatenate([[0], np.cumsum(inside)])
    ends = np.where(placed.ends > placed.starts, placed.ends, placed.starts + 1)
    return before[ends] > before[placed.starts]
