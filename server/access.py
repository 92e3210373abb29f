"""Limits of a server, and the keys of its clients. Sizes are bytes, times seconds."""

import hmac
import os
import re
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from attrs import define, field, frozen


@frozen(kw_only=True)
class ServerLimits:
    """Limits of a server. body: bytes of a request, also unpacked. rows: rows of a request; clients are asked to split
    larger ones. tokens: tokens of the rows of a request. samples: samples of a request. queue, queue_bytes: waiting
    requests; beyond that clients are asked to retry later (429). results: bytes of results kept on disk. answered:
    fetched results that are kept, the newest. sessions: connected sessions. models: their models. connections: with
    or without a request. samplers: unnamed weights per session; beyond that the oldest are removed. checkpoints:
    named checkpoints per owner. free: bytes of the disk left free. together: tokens of one engine call.

    silence: maximum time of a connection without a request. poll: time that `retrieve_future` waits. gap: time that a
    request waits for its predecessors. quiet, idle: time without a request from a session's client after which the
    session loses its claim to memory that others need, and after which its models are unloaded. fetched, unfetched:
    time that results are kept. sample_wait: time that a sample waits for its turn. forgotten: time after which unnamed
    weights of an ended or idle session are removed. snapshot_steps, snapshot_bytes: maximum work repeated when a model
    is restored.
    """

    body: int = 64 * 2**20
    rows: int = 1024
    tokens: int = 2**20
    samples: int = 256
    queue: int = 1024
    queue_bytes: int = 512 * 2**20
    results: int = 2**30
    answered: int = 2**14
    sessions: int = 256
    models: int = 1000
    connections: int = 4096
    samplers: int = 64
    checkpoints: int = 1000
    free: int = 2**29
    together: int = 2**16

    silence: float = 15.0
    poll: float = 22.0
    gap: float = 120.0
    quiet: float = 60.0
    idle: float = 1800.0
    fetched: float = 600.0
    unfetched: float = 3600.0
    sample_wait: float = 1800.0
    forgotten: float = 7 * 86400.0
    snapshot_steps: int = 50
    snapshot_bytes: int = 64 * 2**20


OWNER: Final = "owner"  # owner of a key without a name
REFUSAL: Final = "the key (X-API-Key) is missing or wrong: show the one that the server was started with, or printed"
_VISIBLE: Final = re.compile("[!-~]+")


@define(eq=False)
class Keys:
    """Owner → key, at least one. Keys are visible ASCII characters, which every client can send in a header."""

    of: Mapping[str, str] = field(repr=False)

    def __attrs_post_init__(self) -> None:
        if not self.of or not all(map(_VISIBLE.fullmatch, self.of.values())):
            raise ValueError("there must be keys, of visible ASCII characters")

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a key of the owner `owner`, or `NAME=KEY` for each of several owners, separated by spaces. Raises
        ValueError, whose text contains no part of a key."""
        words = text.split()
        if not words:
            raise ValueError("it is empty")
        for number, word in enumerate(words, start=1):
            if not _VISIBLE.fullmatch(word):
                raise ValueError(f"word {number} of {len(words)} contains a character that is not visible ASCII")
        if len(words) == 1 and "=" not in text:
            return cls({OWNER: words[0]})
        of: dict[str, str] = {}
        for number, word in enumerate(words, start=1):
            owner, equals, key = word.partition("=")
            if not (owner and equals and key):
                raise ValueError(f"word {number} of {len(words)} is not `NAME=KEY`")
            if owner in of or key in of.values():
                raise ValueError(f"word {number} has the name or the key of one before")
            of[owner] = key
        return cls(of)

    @classmethod
    def kept(cls, path: Path) -> Self:
        """Read the key of a file. A missing file is created, readable only by this user, so that a restarted server has
        the same key. Raises OSError, and ValueError for a file without a key."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{_checked(secrets.token_hex(20))}\n")
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        key = path.read_text("ascii", "replace").strip()
        if key != _checked(key[4:44]):
            raise ValueError("it is not as it was written")
        return cls({OWNER: key})

    def owner(self, given: bytes) -> str | None:
        """Return the owner of a key. All keys are compared in constant time."""
        found = None
        for owner, key in self.of.items():
            if hmac.compare_digest(given, key.encode()):
                found = owner
        return found


def _checked(digits: str) -> str:
    """Return a key: 40 digits and their CRC-32. The SDK only sends keys that begin with `tml-`."""
    return f"tml-{digits}{zlib.crc32(digits.encode()):08x}"
