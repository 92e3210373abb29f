"""Who may call: keys of clients, and the owners that they stand for."""

import hmac
from collections.abc import Mapping
from typing import Final

from attrs import field, frozen

ANYONE: Final = "anyone"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@frozen
class Keys:
    """Owner → key. Without keys everyone who reaches the server is one owner: only for loopback addresses."""

    of: Mapping[str, str] = field(factory=dict, repr=False)

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
