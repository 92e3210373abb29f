"""The journal of servers before they had a database, read once: frames of length, CRC-32 and entry (MessagePack)."""

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from xtrain.server.entries import Accepted, Change, Done, Removed, encoded, key_of
from xtrain.server.keys import OWNER
from xtrain.server.loading import sealed
from xtrain.server.state import QueuedWork, State

FOLDER: Final = "journal"
CONVERTED: Final = "journal.converted"
KEYLESS: Final = ("anyone", "first")  # owners on a server without keys
_HEAD: Final = struct.Struct("<II")
_NAME: Final = re.compile(r"journal-[0-9]{6}\.bin")


class ChangedEntry(Struct, tag=True):
    """Changes without a request; in a rewritten journal, first all existing entries."""

    changes: list[Change]


class OldDone(Done, tag="Done"):
    """Result in the old journal. kept: False: the result was removed."""

    kept: bool = True


_DECODER: Final = msgspec.msgpack.Decoder(ChangedEntry | Accepted | OldDone)


def converted(folder: Path, damage: list[str]) -> dict[str, bytes]:
    """Return the rows of a server with a journal in its folder, and add the place of each damage. The journal is not
    changed. Raises OSError."""
    files = sorted(path for path in (folder / FOLDER).iterdir() if _NAME.fullmatch(path.name))
    if len(files) > 1 and not files[-1].stat().st_size:
        damage.append(f"{FOLDER}/{files[-1].name} is empty, and has another before it")
        files.pop()
    state, requests, results = State(), dict[str, Accepted](), dict[str, Done]()
    for at, content in _frames(files[-1], damage) if files else ():
        try:
            entry = _DECODER.decode(content)
        except msgspec.DecodeError as error:
            damage.append(f"{FOLDER}/{files[-1].name}, byte {at}: {error}")
            continue
        if isinstance(entry, ChangedEntry):
            for change in entry.changes:
                _change(state, change)
        elif isinstance(entry, Accepted):
            entry.owner = _owner(entry.owner)
            requests[entry.id] = entry
            state.accept(QueuedWork(entry, size=len(entry.body)))
        elif (work := state.works.get(entry.id)) is not None:
            for change in entry.changes:
                _change(state, change)
            state.finish(work, entry)
            results[entry.id] = Done(entry.id, entry.time, entry.failed, entry.media, entry.body, [], entry.repeated)
            if not entry.kept:
                state.drop(work)
    tables = (state.sessions, state.models, state.checkpoints, state.samplers)
    rows = {key_of(one): state.row_of(one) for table in tables for one in table.values()}
    for entry in requests.values():
        if entry.id in state.works or state.repeats(entry):
            rows[key_of(entry)] = encoded(entry)
    rows |= {key_of(done): encoded(done) for id, done in results.items() if id in state.works}
    for name in state.used_folders():
        if (folder / "weights" / name).is_dir():
            rows[f"FolderEntry/{name}"] = encoded(sealed(folder / "weights" / name))
    return rows


def _frames(path: Path, damage: list[str]) -> Iterator[tuple[int, bytes]]:
    """Yield position and content of every intact frame."""
    content, at = path.read_bytes(), 0
    while at < len(content):
        length, checksum = _HEAD.unpack(content[at : at + _HEAD.size].ljust(_HEAD.size, b"\0"))
        frame = content[at + _HEAD.size : at + _HEAD.size + length]
        if not frame or len(frame) != length or zlib.crc32(frame) != checksum:
            damage.append(f"{FOLDER}/{path.name}, byte {at}: no whole frame begins here")
            if not frame or len(frame) != length:
                return
        else:
            yield at, frame
        at += _HEAD.size + length


def _change(state: State, change: Change) -> None:
    if not isinstance(change, Removed) and hasattr(change, "owner"):
        change.owner = _owner(change.owner)  # pyright: ignore[reportAttributeAccessIssue]
    state.change(change)


def _owner(name: str) -> str:
    """Map the owner of a server without keys to the owner of the key that exists now."""
    return OWNER if name in KEYLESS else name
