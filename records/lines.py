"""Lines of a run's files: the base classes of records and events, and their one writer and reader.

Every line is one JSON object.
"""

import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field

from xtrain.regular_files import open_regular


def doc(meaning: str, unit: str = "") -> Meta:
    """Return the documentation of a key, with the unit of its value."""
    return Meta(description=meaning, extra={"unit": unit})


def in_words(meaning: str = "in words") -> Meta:
    """Return the documentation of a key with free text, which may quote any value; `free_texts` finds such keys."""
    return Meta(description=meaning, extra={"unit": "", "in_words": True})


def one_of(words: Iterable[str]) -> str:
    """Return the allowed words of a value, as documentation names them."""
    *others, last = (f"`{word}`" for word in words)
    return f"{', '.join(others)} or {last}"


class Record(Struct, kw_only=True):
    """One line of a file, with a field for every key of a fixed name. Records are not modified after creation.

    A field without a default is always written, as null if it is None; a field with a default is left out if it has
    that value. Lines may come from older and newer versions: a missing key, or one with a value of another type, is
    read as None (or an empty text, list or map).
    """

    step: Annotated[int | None, doc("number of the optimizer step, from 1", "steps")]
    time: Annotated[float | None, doc("when the record was written, since 1970 (UTC)", "s")] = field(
        default_factory=time.time
    )
    rest: dict[str, Any] = field(default_factory=dict, name="")
    """Keys without a field: keys that contain a name, and keys of other versions of xtrain."""


AnyRecord = TypeVar("AnyRecord", bound=Record)


class Event(Record, tag_field="event", tag=""):
    """An event after `step` optimizer steps. Its class defines its meaning."""

    @property
    def event(self) -> str:
        """Name of the event, the key `event`: `run_start`, `eval`, …."""
        return kind_of(type(self))


def kind_of(event: type[Event]) -> str:
    """Return the name of an event in its line: `run_start`, `eval`, …."""
    return str(event.__struct_config__.tag)


@cache
def free_texts(kind: type[Record]) -> tuple[str, ...]:
    """Return the fields of a record that are documented by `in_words`."""
    hints = get_type_hints(kind, include_extras=True).items()
    notes = ((name, note) for name, hint in hints if get_origin(hint) is Annotated for note in hint.__metadata__)
    return tuple(name for name, note in notes if (note.extra or {}).get("in_words"))


def event_types(module: str) -> dict[str, type[Event]]:
    """Return the events of a module by name, in the order of their classes."""
    return {kind_of(kind): kind for kind in Event.__subclasses__() if kind.__module__ == module}


class UnknownEvent(Event, tag=""):
    """An event of another version of xtrain, or a line without a name: all its keys are in `rest`."""

    @property
    def event(self) -> str:
        name = self.rest["event"]
        return "" if name is None else str(name)


NON_FINITE: Final = frozenset({"nan", "inf", "-inf"})
_NO_DEFAULT: Final = object()
_OBJECTS: Final = msgspec.json.Decoder(dict[str, Any])
# msgspec cannot compare a key that holds half of a character with the names of fields.
_OTHER_TYPE: Final = (msgspec.ValidationError, UnicodeEncodeError)
_DAMAGED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


# writing --------------------------------------------------------------------------------------------------------------


def line_of(record: Record) -> bytes:
    """Return the line of a record, with its line end."""
    return json_line(as_object(record))


def json_line(found: dict[str, Any]) -> bytes:
    """Return a JSON object as a line, with its line end."""
    plain = {key: plain_value(value) for key, value in found.items()}
    try:
        return _ENCODER.encode(plain) + b"\n"
    except UnicodeEncodeError:  # file names may be invalid text
        text = json.dumps(msgspec.to_builtins(plain), separators=(",", ":"), ensure_ascii=False)
        return (text + "\n").encode(errors="backslashreplace")


def as_object(record: Record) -> dict[str, Any]:
    """Return a record's keys and values in the order in which they are written."""
    found: dict[str, Any] = {
        key: value for key, value in (("step", record.step), ("time", record.time)) if value is not None
    }
    kind = type(record).__struct_config__.tag
    if kind:
        found["event"] = kind
    for name, key, default in _layout(type(record)):
        value = getattr(record, name)
        if value is not default:
            found[key] = value
    return found | record.rest if record.rest else found


def plain_value(value: Any) -> Any:
    """Convert numbers that are not finite to text: readers other than Python would reject the line or read null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(float(value))
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return {key: plain_value(item) for key, item in value.items()} if isinstance(value, dict) else value


@cache
def _layout(kind: type[Record]) -> tuple[tuple[str, str, Any], ...]:
    """Return the fields of a record after the first ones, with their keys, and the defaults that are left out."""
    own = [each for each in msgspec.structs.fields(kind) if each.name not in ("step", "time", "rest")]
    return tuple((each.name, each.encode_name, _NO_DEFAULT if each.required else each.default) for each in own)


def _builtin(value: Any) -> Any:
    """Convert numbers and texts of other libraries, whose types derive from Python's."""
    for kind in (float, int, str):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


_ENCODER: Final = msgspec.json.Encoder(enc_hook=_builtin)

# reading --------------------------------------------------------------------------------------------------------------


def objects(block: bytes) -> tuple[list[dict[str, Any]], int]:
    """Return the objects in complete lines, in order, and the number of lines without one: truncated, or not an
    object."""
    try:
        return _OBJECTS.decode_lines(block), 0
    except _DAMAGED:
        pass  # parse line by line, to lose no more than the damaged lines
    found = [object_of(line) for line in block.split(b"\n") if line.strip()]
    whole = [each for each in found if each is not None]
    return whole, len(found) - len(whole)


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if there is none."""
    try:
        return _OBJECTS.decode(line)
    except _DAMAGED:
        pass
    try:  # takes NaN and Infinity, which other writers than ours may use
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def objects_since(path: Path, offset: int = 0) -> list[dict[str, Any]]:
    """Return the objects in a file from a byte offset on. The last line may lack its end; truncated lines, as on a full
    disk, are left out. Empty without a file. Raises OSError."""
    with suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(offset)
        return objects(file.read())[0]
    return []


def read(kind: type[AnyRecord], found: dict[str, Any]) -> AnyRecord:
    """Read a JSON object as a record. Fields of an unexpected type stay in its `rest`."""
    if "time" in found:
        try:
            record = msgspec.convert(found, kind)
        except _OTHER_TYPE:
            return _read_by_key(kind, found)
        if unknown := {key: value for key, value in found.items() if key not in _keys(kind)}:
            record.rest = unknown
        return record
    return _read_by_key(kind, found)


def read_all(kind: type[AnyRecord], found: Iterable[dict[str, Any]]) -> list[AnyRecord]:
    return [read(kind, each) for each in found]


@cache
def _keys(kind: type[Record]) -> frozenset[str]:
    """Return every key that is read as a field, and the key of the event's name."""
    tag = kind.__struct_config__.tag_field
    return frozenset(kind.__struct_encode_fields__) - {""} | ({tag} if tag else set())


def _read_by_key(kind: type[AnyRecord], found: dict[str, Any]) -> AnyRecord:
    values, rest = {}, {key: value for key, value in found.items() if key not in _keys(kind)}
    for name, key, type_, default in _types(kind):
        values[name] = default
        if key in found:
            try:
                values[name] = _as_type(type_, found[key])
            except (*_OTHER_TYPE, OverflowError):
                rest[key] = found[key]
    return kind(**values, rest=rest)


@cache
def _types(kind: type[Record]) -> tuple[tuple[str, str, Any, Any], ...]:
    """Return name, key, type and missing value of every field except `rest`."""
    hints = get_type_hints(kind)
    fields = [each for each in msgspec.structs.fields(kind) if each.name != "rest"]
    has_default = {each.name: each.default is not msgspec.NODEFAULT for each in fields}  # the time of a reader is none
    return tuple(
        (f.name, f.encode_name, hints[f.name], f.default if has_default[f.name] else _empty(hints[f.name]))
        for f in fields
    )


def _empty(type_: Any) -> Any:
    return None if NoneType in get_args(type_) else (get_origin(type_) or type_)()


def _as_type(type_: Any, value: Any) -> Any:
    """Convert a value to a field's type, dropping items of other types. Raises ValidationError."""
    try:
        return msgspec.convert(value, type_)
    except _OTHER_TYPE:
        kinds = [kind for kind in get_args(type_) if kind is not NoneType] if NoneType in get_args(type_) else [type_]
        kind = kinds[0]
        if kind is float and isinstance(value, str) and value in NON_FINITE:
            return float(value)
        if kind is int and isinstance(value, float) and value.is_integer():
            return int(value)
        if get_origin(kind) is dict and isinstance(value, dict):
            return {str(key): item for key, item in _items(get_args(kind)[1], value.items())}
        if get_origin(kind) is list and isinstance(value, list):
            return [item for _, item in _items(get_args(kind)[0], enumerate(value))]
        raise


def _items(type_: Any, found: Iterable[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    for key, item in found:
        with suppress(*_OTHER_TYPE, OverflowError):
            yield key, _as_type(type_, item)
