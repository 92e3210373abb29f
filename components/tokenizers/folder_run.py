"""A `tokenizer.json`, by the package `tokenizers`."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from xtrain.plan.data import TokenizerUnreadable, find_chat_template
from xtrain.plan.vocabulary import AddedToken, find_special_tokens, read_side_files
from xtrain.runtime.base.bounded import BeyondBounds, Bounded
from xtrain.runtime.base.errors import DataError
from xtrain.runtime.feed.tokenizers import PIECE, Placed, TextTokenizer, TokenBytes, joined, token_bytes

MOST_GROWTH: Final = 64
"""Maximum of characters that a normalizer may produce from one."""
# Runs of every ASCII character, on which patterns with nested repetitions are slow.
PROBES: Final = tuple(f"{chr(code) * 62}{end}" for code in range(32, 127) for end in ("", " !"))
VERSION: Final = 2  # increase it when the same text would give other ids


def open_tokenizer(source: str, base: Path) -> TextTokenizer:
    """Open the tokenizer folder or file at a path from `base`. Raises DataError as HuggingFaceTokenizer does."""
    return HuggingFaceTokenizer(base / source)


class HuggingFaceTokenizer:
    """A `tokenizer.json` with the tokens added by its companion files; bos and eos are declared there or found by name.

    Special tokens written out in a text are encoded as plain characters: a document that quotes `<|endoftext|>` does
    not end there. Truncation and padding set in the file are disabled. Raises DataError if the file is missing or
    unreadable, or if there is neither a bos nor an eos.
    """

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise DataError(
                "no such tokenizer", path=path, remedy="Give a folder holding `tokenizer.json`, or the file itself."
            )
        self._path, self._content = path, path.read_bytes()
        self._added: tuple[AddedToken, ...] = ()
        try:
            described = json.loads(self._content)
            if (growth := _growth(described.get("normalizer"))) > MOST_GROWTH:
                message = f"its normalizer makes up to {growth:,} characters of one, and {MOST_GROWTH} are allowed"
                raise DataError(message, path=path, remedy="Use the tokenizer.json of a published model.")
            with self._panics():
                before = _backend(self._content, ()).get_added_tokens_decoder()
            side = read_side_files(path.parent, described)
            self._added = side.added
            self._backend = _backend(self._content, self._added)
            Bounded(self._probe).map(PROBES)
            vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
            special = find_special_tokens(path.parent, side, vocabulary)
            self.chat_template = find_chat_template(path.parent)
        except TokenizerUnreadable as problem:
            raise DataError(problem.message, path=problem.path, remedy=problem.remedy) from problem
        except BeyondBounds as problem:
            raise DataError(f"the tokenizer {problem} for 64 characters", path=path) from problem
        except DataError:
            raise
        except RecursionError as error:
            raise DataError("not a tokenizer: nested too deep", path=path) from error
        except Exception as error:  # the package raises bare Exception
            raise DataError(f"not a tokenizer: {error}", path=path) from error
        self.name = str(directory)
        self.bos = special.bos
        self.eos = special.eos
        self.has_bos = special.own_bos
        added = self._backend.get_added_tokens_decoder()
        named = {token: each.content for token, each in added.items() if each.special}
        named |= {token: self._backend.id_to_token(token) for token in (self.bos, self.eos)}
        self.specials = frozenset(named)
        self.special_names = {name: token for token, name in named.items()}
        # The largest id, not the number of entries: vocabularies have holes.
        self.vocab_size = max(vocabulary.values()) + 1
        changed = {token: repr(each) for token, each in sorted(added.items()) if repr(each) != repr(before.get(token))}
        decisive = f"|{self.bos}|{self.eos}|{VERSION}" + (f"|{changed}" if changed else "")
        self.fingerprint = blake2b(self._content + decisive.encode(), digest_size=16).hexdigest()

    @property
    def begins_with(self) -> tuple[int, ...]:
        """Return the token ids that the post-processor adds at the beginning."""
        with_specials, plain = (self._backend.encode("a", add_special_tokens=each).ids for each in (True, False))
        before = next(at for at in range(len(with_specials) + 1) if with_specials[at : at + len(plain)] == plain)
        return tuple(with_specials[:before])

    @property
    def bytes_of(self) -> TokenBytes | None:
        """Bytes of each token, from `token_bytes`."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        added = self._backend.get_added_tokens_decoder().keys()
        return token_bytes(self._content, vocabulary, added, self.specials, self.vocab_size)

    def __getstate__(self) -> dict[str, Any]:
        # Pickling a backend loses its treatment of special tokens.
        return {name: value for name, value in self.__dict__.items() if name not in ("_backend", "_rendered_backend")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._backend = _backend(self._content, self._added)

    @cached_property
    def _rendered_backend(self) -> Any:
        backend = _backend(self._content, self._added)
        backend.encode_special_tokens = False
        # It would exclude blanks from the tokens' places.
        backend.post_processor = None
        return backend

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, uint32 [tokens]."""
        (ids,) = self.encode_batch([text])
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Encode each text, on all cores unless TOKENIZERS_PARALLELISM disables it."""
        short = [text for text in texts if len(text) <= PIECE]
        with self._panics():
            encodings = iter(self._backend.encode_batch_fast(short, add_special_tokens=False) if short else ())
        return [
            np.asarray(next(encodings).ids, dtype=np.uint32) if len(text) <= PIECE else joined(text, self._placed)
            for text in texts
        ]

    def _placed(self, text: str) -> Placed:
        with self._panics():
            return _placed(self._backend.encode(text, add_special_tokens=False))

    def _probe(self, text: str) -> None:
        with self._panics():
            self._backend.encode(text)

    @contextmanager
    def _panics(self) -> Iterator[None]:
        """Raise DataError if the package panics, which is not an Exception."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            message = f"the tokenizer fails on a text: {next(iter(str(error).splitlines()), 'panic')}"
            raise DataError(message, path=self._path, remedy="Use the tokenizer.json of a published model.") from None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; special tokens and ids beyond the vocabulary are left out."""
        known = [int(token) for token in ids if 0 <= token < self.vocab_size and token not in (self.bos, self.eos)]
        with self._panics():
            return self._backend.decode(known, skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """Return the token's text in `tokenizer.json`; `⟨7⟩` for an unknown id."""
        return self._backend.id_to_token(token) or f"⟨{token}⟩"

    def encode_rendered(self, texts: Sequence[str]) -> list[Placed]:
        """Return the ids, uint32, and places of the tokens of rendered conversations."""
        with self._panics():
            encodings = self._rendered_backend.encode_batch(list(texts), add_special_tokens=False)
        return list(map(_placed, encodings))


def _placed(encoding: Any) -> Placed:
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    return Placed(ids=np.asarray(encoding.ids, dtype=np.uint32), starts=places[:, 0], ends=places[:, 1])


def _growth(normalizer: Any) -> int:
    """Return the maximum growth factor of characters by replacements, if no pattern matches the empty text."""
    if not isinstance(normalizer, dict):
        return 1
    if normalizer.get("type") == "Sequence":
        return prod(map(_growth, normalizer.get("normalizers") or ()))
    if normalizer.get("type") != "Replace":
        return 1
    pattern = normalizer.get("pattern") or {}
    return max(1, -(-len(normalizer.get("content") or "") // max(1, len(pattern.get("String", "")))))


def _backend(content: bytes, added: Sequence[AddedToken]) -> Any:
    import tokenizers

    backend: Any = tokenizers.Tokenizer.from_str(content.decode())
    backend.add_tokens([tokenizers.AddedToken(**token._asdict()) for token in added])
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True
    return backend
