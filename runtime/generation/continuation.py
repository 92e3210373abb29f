"""A text that grows token by token, as it is shown, and where it ends."""

from collections.abc import Iterable, Sequence
from typing import Self

from attrs import define, field, frozen

from xtrain.runtime.data.documents.tokenizers import TextTokenizer

# So many tokens before new ones are decoded with them: tokenizers write some tokens otherwise where a text begins.
CONTEXT = 5
BROKEN = "\ufffd"


@frozen
class TextEnds:
    """What ends a text besides eos: tokens, and texts, which are not part of it."""

    tokens: frozenset[int]
    texts: tuple[str, ...] = ()

    @classmethod
    def of(cls, tokenizer: TextTokenizer, texts: Iterable[str] = ()) -> Self:
        """A text that is the name of a special token is that token: it is in no text that is decoded."""
        tokens, others = {tokenizer.eos}, []
        for text in texts:
            ids = tokenizer.encode_rendered([text])[0].ids.tolist()
            if len(ids) == 1 and ids[0] in tokenizer.specials:
                tokens.add(ids[0])
            else:
                others.append(text)
        return cls(frozenset(tokens), tuple(others))


@define(eq=False)
class Continuation:
    """What follows a prompt. Characters are part of `text` once all their bytes are there.

    most: tokens that are added at most. done: nothing follows. cut: as it has so many, without an end.
    """

    tokenizer: TextTokenizer
    prompt: Sequence[int]
    ends: TextEnds
    most: int
    text: str = ""
    done: bool = False
    cut: bool = False
    added: int = 0
    _ids: list[int] = field(init=False)
    _known: int = field(init=False)
    _shown: int = field(default=0, init=False)
    _begin: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self._ids = list(self.prompt[-CONTEXT:])
        self._known = len(self._ids)

    def add(self, token: int) -> None:
        """Take the next token; those behind the end are of no account."""
        if self.done:
            return
        if token in self.ends.tokens:
            self.finish()
            return
        self.added += 1
        self._ids.append(token)
        self._read(whole=False)
        if not self.done and self.added == self.most:
            self.cut = True
            self.finish()

    def finish(self) -> None:
        """Nothing follows."""
        if not self.done:
            self._read(whole=True)
            self.done = True

    def _read(self, *, whole: bool) -> None:
        """Decode what is new. Half a character waits for its other bytes, unless there are none to come (`whole`)."""
        before = self.tokenizer.decode(self._ids[self._begin : self._known])
        after = self.tokenizer.decode(self._ids[self._begin :])
        if len(after) <= len(before) or (after.endswith(BROKEN) and not whole):
            return
        self._begin, self._known = self._known, len(self._ids)
        seen = len(self.text)
        self.text += after[len(before) :]
        found = [self.text.find(end, max(0, seen - len(end) + 1)) for end in self.ends.texts]
        if places := [place for place in found if place >= 0]:
            self.text = self.text[: min(places)]
            self.done = True

    def news(self) -> str:
        """What has become certain since the last call: not what may be the beginning of an end."""
        upto = len(self.text) if self.done else len(self.text) - self._doubtful()
        new = self.text[self._shown : upto]
        self._shown = max(self._shown, upto)
        return new

    def _doubtful(self) -> int:
        """Characters at the end of the text that begin a text which would end it."""
        return max((_overlap(self.text, end) for end in self.ends.texts), default=0)


def _overlap(text: str, end: str) -> int:
    """The most characters at the end of `text` that `end` begins with, without being all of it."""
    return next((count for count in range(min(len(end) - 1, len(text)), 0, -1) if text.endswith(end[:count])), 0)
