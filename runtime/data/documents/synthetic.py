"""A small made-up language to try things out with: frequent words and rare ones, in phrases that can be learned.

Everything is drawn by a counter-based hash, not by the generator of a library: a document depends on the seed and its
number alone, in whatever process, order or version of numpy it is made.
"""

import math
from functools import lru_cache

import numpy as np
from attrs import frozen

from xtrain.runtime.data.documents.tokenizers import TextTokenizer
from xtrain.runtime.data.records.records import SyntheticRecord

WORDS = 2048
SUCCESSORS = 4  # words that may follow one within a phrase
PHRASE = 4  # words
_ONSETS = "bdfgklmnprstvz"
_VOWELS = "aeiou"
_LEAST_LENGTH = 3  # bos, a token, eos


def lengths(seed: int, indices: np.ndarray, mean: int, spread: float) -> np.ndarray:
    """Tokens of the documents `indices` (uint64 [documents]), log-normal of the given mean, at least 3, int64."""
    first, second = _uniform(_key(seed, indices, 0)), _uniform(_key(seed, indices, 1))
    normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    drawn = np.exp(math.log(mean) - spread**2 / 2 + spread * normal)
    return np.maximum(np.rint(drawn), _LEAST_LENGTH).astype(np.int64)


@frozen(kw_only=True, eq=False)
class Lexicon:
    """The tokens of every word, as a tokenizer writes it in the middle of a text; behind them, those of its form that
    ends a phrase."""

    tokens: np.ndarray
    """All of them, one word after the other."""
    offsets: np.ndarray
    """int64 [2 · WORDS + 1]."""

    @classmethod
    def of(cls, tokenizer: TextTokenizer) -> "Lexicon":
        """Have the tokenizer write all words; if it knows too few of them, words are single tokens of its."""
        pieces = tokenizer.encode_batch([f" {word}" for word in _words()] + [f" {word}." for word in _words()])
        ids = np.concatenate(pieces)
        if min(map(len, pieces)) == 0 or len(np.unique(ids)) < len(_VOWELS):
            plain = np.setdiff1d(np.arange(tokenizer.vocab_size), [tokenizer.bos, tokenizer.eos])
            plain = plain if len(plain) else np.array([tokenizer.eos])
            ids = plain[np.arange(2 * WORDS) % len(plain)]
            return cls(tokens=ids, offsets=np.arange(2 * WORDS + 1))
        return cls(tokens=ids, offsets=np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]))

    def write(self, record: SyntheticRecord) -> np.ndarray:
        """The tokens of a document between bos and eos: exactly `record.tokens - 2`."""
        count = record.tokens - 2
        sizes = np.diff(self.offsets)
        words = _words_of(record, -(-count // int(sizes.min())))
        size = sizes[words]
        ends = np.cumsum(size)
        # Position of each token in `tokens`: where its word begins there, and how far into the word it is.
        places = np.repeat(self.offsets[words] - (ends - size), size) + np.arange(ends[-1])
        return self.tokens[places[:count]]


def _words_of(record: SyntheticRecord, count: int) -> np.ndarray:
    """Numbers of `count` words: phrases that begin with a word of any rank, 1 / rank being how often it comes."""
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
    found = []
    for rank in range(WORDS):
        word, rest = "", rank
        while not word or rest:
            rest, last = divmod(rest, len(syllables))
            word += syllables[last]
        found.append(word)
    return tuple(found)


@lru_cache(maxsize=1)
def _successors() -> np.ndarray:
    """int64 [WORDS, SUCCESSORS]."""
    uniform = _uniform(_mix(np.arange(WORDS * SUCCESSORS, dtype=np.uint64)))
    ranks = np.minimum((WORDS + 1) ** uniform, WORDS).astype(np.int64) - 1
    return ranks.reshape(WORDS, SUCCESSORS)


def _key(seed: int, indices: np.ndarray, purpose: int) -> np.ndarray:
    start = _mix(np.array([seed % (1 << 64)], dtype=np.uint64))
    return _mix(_mix(start + indices) + np.uint64(purpose))


def _mix(values: np.ndarray) -> np.ndarray:
    """splitmix64: a bijection of 64-bit numbers whose results look random."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _uniform(values: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1) of 53 bits."""
    return (values >> np.uint64(11)).astype(np.float64) * 2.0**-53
