"""The state of a server from its rows and folders, with the place of everything that is not as it was written.

What is damaged is left out, so that the rest can be used: a model without one of its requests or without its snapshot
is `damaged`, and a checkpoint without its weights is no more.
"""

import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec
from msgspec.structs import replace

from xtrain.server.entries import Accepted, Done, FolderEntry, ModelEntry, Removed, Session, decoded, key_of
from xtrain.server.state import LASTS, QueuedWork, State, folder_of

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
    damage += [f"row `Accepted/{id}` is missing, of which there is the result" for id in results]
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
        damage.append(f"request {missing[0]} of {model.id} is missing, which its state is made of")
        model.damaged = model.damaged or LOST
    if model.session not in state.sessions:
        damage.append(f"row `Session/{model.session}` is missing, of which there is the model {model.id}")
        state.change(Session(model.session, model.owner, model.created, heard=model.created))


# folders of weights


def sealed(folder: Path) -> FolderEntry:
    """Return the entry of a folder with size and checksum of each file. Raises OSError."""
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
            return f": `{name[:100]}` is no name of a file in it"
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
