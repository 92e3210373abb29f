"""Loading of a server's state from rows, folders and old journals, with the place of everything that is damaged.

Servers without a database had a journal: frames of length, CRC-32 and entry (MessagePack). It is read once.
"""

import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from xtrain.server.access import OWNER
from xtrain.server.state import (
    LASTS,
    Accepted,
    Change,
    Done,
    FolderEntry,
    ModelEntry,
    QueuedWork,
    Removed,
    Session,
    State,
    decoded,
    encoded,
    folder_of,
    key_of,
)

PIECE: Final = 2**20
READERS: Final = 4  # threads that read weights
LOST: Final = "a part of this model was lost when the store of the server was damaged"


def load(rows: Iterable[tuple[str, bytes]], damage: list[str], kept: dict[str, bytes] | None = None) -> State:
    """Apply rows in the order in which they were first written. kept: receives the contents of requests and results."""
    state, requests, results, sizes = State(), dict[str, Accepted](), dict[str, Done](), dict[str, int]()
    for key, content in rows:
        try:
            entry = decoded(content)
            if key_of(entry) != key:
                raise msgspec.DecodeError(f"it is of {key_of(entry)}")
        except msgspec.DecodeError as error:
            damage.append(f"row `{key}`: {error}")
            continue
        if isinstance(entry, Accepted):
            requests[entry.id], sizes[entry.id] = entry, len(entry.body)
            model = state.models.get(entry.queue)
            if model is not None and entry.seq in model.repeated:
                entry.body = b""  # loaded again when it is needed
        elif isinstance(entry, Done):
            results[entry.id] = entry
            if entry.id in requests:
                requests[entry.id].body = b""
        else:
            state.change(entry)
        if kept is not None and isinstance(entry, Accepted | Done):
            kept[key] = content
    for entry in requests.values():
        _take(state, QueuedWork(entry, size=sizes[entry.id], lasting=LASTS), results.pop(entry.id, None), damage)
    damage += [f"row `Accepted/{id}` is missing, but its result exists" for id in results]
    for model in list(state.models.values()):
        _check_model(state, model, damage)
    return state


def _take(state: State, work: QueuedWork, done: Done | None, damage: list[str]) -> None:
    entry, model = work.entry, state.models.get(work.entry.queue)
    repeated = model is not None and entry.seq in model.repeated
    if model is not None and repeated:
        state.history.setdefault(model.id, {})[entry.seq] = (entry.id, work.size)
    if done is not None:
        state.accept(work)
        state.finish(work, done)
        work.promise = LASTS
    elif model is not None and entry.seq < model.next and not repeated:
        damage.append(f"row `Done/{entry.id}` is missing: the result of request {entry.seq} of {model.id}")
    elif not repeated:
        state.accept(work)


def _check_model(state: State, model: ModelEntry, damage: list[str]) -> None:
    if missing := sorted(set(model.repeated) - state.history.get(model.id, {}).keys()):
        damage.append(f"request {missing[0]} of {model.id} is missing, which its state depends on")
        model.damaged = model.damaged or LOST
    if model.session not in state.sessions:
        damage.append(f"row `Session/{model.session}` is missing, but its model {model.id} exists")
        state.change(Session(model.session, model.owner, model.created, heard=model.created))


# folders of weights


def sealed(folder: Path) -> FolderEntry:
    """Return the folder entry with size and checksum of each file. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return FolderEntry(folder.name, {path.relative_to(folder).as_posix(): _measured(path) for path in paths})


def check_weights(state: State, weights: Path, damage: list[str]) -> None:
    """Check every byte of the referenced folders against the stored checksums."""
    names = sorted(state.used_folders())
    with ThreadPoolExecutor(READERS) as readers:
        problems = list(readers.map(lambda name: _problem(weights, state.folders.get(name)), names))
    for name, problem in zip(names, problems, strict=True):
        if problem is None:
            continue
        things = [state.checkpoints, state.samplers, state.models]
        of = [one for table in things for one in list(table.values()) if folder_of(one) == name]
        damage.append(f"weights/{name}{problem} (of {', '.join(one.id for one in of)})")
        for one in of:
            if isinstance(one, ModelEntry):
                state.change(replace(one, damaged=one.damaged or LOST, snapshot=None))
            else:
                state.change(Removed(type(one).__name__, one.id))  # pyright: ignore[reportArgumentType]


def _problem(weights: Path, entry: FolderEntry | None) -> str | None:
    """Return how a folder differs from its entry, as text that follows its name; None if it does not differ."""
    if entry is None:
        return ": its checksums are missing"
    for name, written in entry.files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            return f": `{name[:100]}` is not a file name"
        try:
            size, checksum = _measured(weights / entry.id / path)
        except OSError as error:
            return f"/{name}: {error.strerror}"
        if size != written[0]:
            return f"/{name} has {size} bytes, and {written[0]} were written"
        if checksum != written[1]:
            return f"/{name}: its checksum is wrong"
    return None


def _measured(path: Path) -> tuple[int, int]:
    """Return the bytes and CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return size, checksum


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
            damage.append(f"{FOLDER}/{path.name}, byte {at}: no valid frame begins here")
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
