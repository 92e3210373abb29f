"""Who may call: keys of clients, and the owners that they stand for."""

import hmac
from collections.abc import Mapping
from typing import Final, Self

from attrs import field, frozen

ANYONE: Final = "anyone"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@frozen
class Keys:
    """Owner → key. Without keys everyone who reaches the server is one owner: only for loopback addresses."""

    of: Mapping[str, str] = field(factory=dict, repr=False)

    @classmethod
    def read(cls, text: str) -> Self:
        """A key, whose owner is `owner`, or `NAME=KEY` for each of several owners, with spaces between them. Raises
        ValueError, which has nothing of a key."""
        words = text.split()
        if len(words) == 1 and "=" not in text:
            return cls({"owner": words[0]})
        of: dict[str, str] = {}
        for number, word in enumerate(words, start=1):
            owner, equals, key = word.partition("=")
            if not (owner and equals and key):
                raise ValueError(f"word {number} of {len(words)} is no `NAME=KEY`")
            if owner in of or key in of.values():
                raise ValueError(f"word {number} has the name or the key of one before")
            of[owner] = key
        if not of:
            raise ValueError("it is empty")
        return cls(of)

    def owner(self, given: str | None) -> str | None:
        """Whose key it is. All keys are compared in full, so that the time says nothing of them."""
        if not self.of:
            return ANYONE
        raw = (given or "").encode()
        found = None
        for owner, key in self.of.items():
            if hmac.compare_digest(raw, key.encode()):
                found = owner
        return found


def refused_address(host: str, keys: Keys) -> str | None:
    """Why a server with these keys does not listen at an address; None: it may."""
    if keys.of or host in LOOPBACK:
        return None
    return f"{host} can be reached from other machines, and there is no key: set one, or listen at 127.0.0.1"
