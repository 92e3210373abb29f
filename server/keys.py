"""Who may call: keys of clients, and the owners that they stand for."""

import hmac
from collections.abc import Mapping
from typing import Final, Self

from attrs import define, field

ANYONE: Final = "anyone"  # who shows no key
FIRST: Final = "first"  # who was the first to show one
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@define(eq=False)
class Keys:
    """Owner → key. Without keys, which is for loopback addresses alone, the first key that is shown becomes that of an
    owner, and no other is taken; all who show none are another owner. One thread asks."""

    of: Mapping[str, str] = field(factory=dict, repr=False)
    _shown: str | None = field(default=None, init=False, repr=False)

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
            return self._of_no_keys(given)
        raw = (given or "").encode()
        found = None
        for owner, key in self.of.items():
            if hmac.compare_digest(raw, key.encode()):
                found = owner
        return found

    def _of_no_keys(self, given: str | None) -> str | None:
        if not given:
            return ANYONE
        if self._shown is None:
            self._shown = given
        return FIRST if hmac.compare_digest(given.encode(), self._shown.encode()) else None

    @property
    def refusal(self) -> str:
        """What is said to who is no owner."""
        if self.of:
            return "the key (X-API-Key) is missing or wrong"
        return (
            "the key (X-API-Key) is not the one that the first client has shown, which a server that was started "
            "without keys takes alone until it ends: show that one (TINKER_API_KEY), or start the server with "
            'XTRAIN_KEY="NAME=KEY NAME=KEY", which gives each owner a key'
        )


def refused_address(host: str, keys: Keys) -> str | None:
    """Why a server with these keys does not listen at an address; None: it may."""
    if keys.of or host in LOOPBACK:
        return None
    return f"{host} can be reached from other machines, and there is no key: set one, or listen at 127.0.0.1"
