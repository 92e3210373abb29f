"""`config.json` of a model folder: strict JSON with the place of every key, and its family.

Repositories are looked up in the cache of huggingface_hub, without that package.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from json.decoder import JSONDecodeError, JSONDecoder
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Remediable, SourceText, Span
from xtrain.dsl.diagnostics.suggest import did_you_mean
from xtrain.dsl.schema.model import FAMILIES, ModelFolder
from xtrain.dsl.schema.model_config import QUANTISATION, USUAL, ModelConfig, is_metadata
from xtrain.lazy_attrs import frozen

MOST_DIGITS: Final = 40  # of a whole number: more than any size has


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is too large")
    return number


def _whole(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"{text[:MOST_DIGITS]}… is too large")
    return int(text)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these keys. Raises ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"`{twice}` is given twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _infinity(name: str) -> Any:
    """Return infinity as transformers 5 writes it; earlier versions wrote `Infinity`. Raises ValueError for NaN."""
    return _refuse_constant(name) if name == "NaN" else {"__float__": name}


def _decoder(constant: Callable[[str], Any]) -> JSONDecoder:
    return JSONDecoder(parse_constant=constant, parse_float=_finite, parse_int=_whole, object_pairs_hook=_once)


# Raise ValueError for duplicate keys, oversized numbers and NaN, and the first for infinity; RecursionError for deeply
# nested lists.
STRICT: Final = _decoder(_refuse_constant)
OF_TRANSFORMERS: Final = _decoder(_infinity)


_REPO: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def names_repo(text: str) -> bool:
    """Return True if a text has the form of a hub repository: `organisation/name`."""
    return "/" in text and _REPO.fullmatch(text) is not None


class SnapshotMissing(Remediable):
    """A snapshot that the cache does not have; hint: what to do."""


def cache_folder() -> Path:
    """Return the cache folder by the rules of huggingface_hub: HF_HUB_CACHE, else `hub` in HF_HOME, else its folder in
    the user's cache."""
    if named := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return _expanded(named)
    home = os.environ.get("HF_HOME")
    if home is None:
        home = f"{os.environ.get('XDG_CACHE_HOME', '~/.cache')}/huggingface"
    return _expanded(home) / "hub"


def _expanded(path: str) -> Path:
    """Expand `~`; return the path unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def find_snapshot(repo: str, revision: str) -> tuple[str, str]:
    """Return (folder, commit) of a revision (branch, tag or commit) as it was when downloaded.

    Nothing is ever downloaded. Raises SnapshotMissing.
    """
    written = revision != "" and revision.isprintable() and not revision.startswith("/")
    if not written or not _REPO.fullmatch(repo) or ".." in f"{repo}/{revision}":
        raise SnapshotMissing(f"`{repo}` at `{revision}` is not a repository", 'write hub("organisation/name")')
    cache, commit = cache_folder(), revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = (_repo_folder(repo) / "refs" / revision).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            commit = ""
    snapshot = snapshot_folder(repo, commit)
    if not _COMMIT.fullmatch(commit) or not snapshot.is_dir():
        hint = f"download it first: xtrain fetch {repo}{'' if revision == 'main' else f' --revision {revision}'}"
        raise SnapshotMissing(f"{cache} does not have {repo} at revision {revision}", hint)
    return snapshot.as_posix(), commit


def snapshot_folder(repo: str, commit: str) -> Path:
    """Return the folder of a downloaded commit."""
    return _repo_folder(repo) / "snapshots" / commit


def _repo_folder(repo: str) -> Path:
    return cache_folder() / f"models--{repo.replace('/', '--')}"


CONFIG: Final = "config.json"
LARGEST: Final = 2**24  # bytes of a file
QUANTISED: Final = (QUANTISATION, "compression_config")


class ConfigUnreadable(Remediable):
    """A missing or unreadable `config.json`; hint: what to do."""


@frozen
class ConfigEntry:
    """A key of the file: its value, and the place of both."""

    value: Any
    span: Span


def _read(folder: ModelFolder, label: Span) -> SourceText:
    """Read `config.json` as a source. Raises ConfigUnreadable."""
    path = Path(folder.path)
    try:
        if not path.is_dir() and not os.path.lexists(path):
            hint = did_you_mean(folder.path, FAMILIES) or f"a family of {', '.join(FAMILIES)}, or the path of a folder"
            if names_repo(folder.path):
                hint = f'correct the path, or write hub("{folder.path}") for a downloaded repository of the hub'
            raise ConfigUnreadable(f"there is no folder `{folder}`", hint)
        if (path / CONFIG).exists() and not ((path / CONFIG).is_file() or (path / CONFIG).is_dir()):
            raise ConfigUnreadable(f"{(path / CONFIG).as_posix()} is not a regular file", "give a copy of the file")
        with (path / CONFIG).open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        message = f"{(path / CONFIG).as_posix()} cannot be read: {error.strerror or error}"
        raise ConfigUnreadable(message, f"give the folder of a model, with its {CONFIG} and weights") from error
    name = (path / CONFIG).as_posix()
    if len(content) > LARGEST:
        raise ConfigUnreadable(f"{name} is larger than {LARGEST >> 20} MiB", f"it is not a {CONFIG}")
    try:
        return SourceText.from_bytes(name, content, order=10_000, included_at=label)
    except UnicodeDecodeError as error:
        raise ConfigUnreadable(f"{name} is not UTF-8 text", "copy the file again") from error


def _keys(source: SourceText, begin: int = 0) -> dict[str, ConfigEntry]:
    """Return the keys of the file, or of the object that begins at `begin`. Raises ConfigUnreadable."""
    try:
        return dict(_scan(source, begin))
    except (ValueError, RecursionError) as error:
        why = f"line {error.lineno}: {error.msg}" if isinstance(error, JSONDecodeError) else str(error)
        raise ConfigUnreadable(f"{source.path} is not a JSON object: {why}", "copy the file again") from error


def _scan(source: SourceText, begin: int) -> Iterator[tuple[str, ConfigEntry]]:
    """Yield every key of the object with its place, each once. Raises ValueError."""
    text, names = source.text, set()

    def blank(place: int) -> int:
        while text[place : place + 1] in (" ", "\t", "\n"):
            place += 1
        return place

    def expect(signs: str, place: int) -> int:
        if text[place : place + 1] not in tuple(signs):
            raise JSONDecodeError(f"expected {' or '.join(signs)}", text, place)
        return place + 1

    inside = begin > 0
    place = blank(expect("{", blank(begin)))
    while text[place : place + 1] != "}":
        begin = place
        expect('"', place)
        name, place = OF_TRANSFORMERS.raw_decode(text, place)
        value, place = OF_TRANSFORMERS.raw_decode(text, blank(expect(":", blank(place))))
        if name in names:
            raise JSONDecodeError(f"`{name}` is given twice", text, begin)
        names.add(name)
        yield name, ConfigEntry(value, source.span(begin, place))
        place = blank(place)
        if text[place : place + 1] != "}":
            place = blank(expect(",}", place))
            expect('"', place)
    if not inside and blank(place + 1) != len(text):
        raise JSONDecodeError("something follows the object", text, place + 1)


def family_of(
    folder: ModelFolder, label: Span, diagnostics: Diagnostics, chosen: str = ""
) -> tuple[str, SourceText, dict[str, ConfigEntry]] | None:
    """Return the family of the model in a folder, the source and its keys; None after reporting that there is none.

    chosen: the family that the spec chooses by `code`, if it does. Raises ConfigUnreadable.
    """
    source = _read(folder, label)
    entries = _keys(source)
    configs = {name: each.config for name, each in FAMILIES.items() if each.config is not None}
    values = {name: entry.value for name, entry in entries.items()}
    of = {kind: name for name, config in _accepting(configs, values).items() for kind in config.types}
    entry = entries.get("model_type")
    if chosen and entry is not None and isinstance(entry.value, str):
        return chosen, source, entries
    wholes = {name: config.whole for name, config in configs.items() if config.whole is not None}
    named = {name: whole for name, whole in wholes.items() if entry is not None and entry.value == whole.model_type}
    parts = [name for name, whole in named.items() if _accepting({name: configs[name]}, values.get(whole.part))]
    if parts:
        return _part_of(parts, source, entries, diagnostics)
    if entry is not None and isinstance(entry.value, str) and entry.value not in of:
        return FAMILIES.unlisted, source, entries
    if entry is None or not isinstance(entry.value, str):
        what = "has no `model_type`" if entry is None else f"is of the model type {short_json(entry.value)}"
        message = f"{source.path} {what}, which xtrain does not support" if entry else f"{source.path} {what}"
        place = entry.span if entry is not None else source.span(0, 1)
        diagnostics.error("X521", message, place, hint=f"supported model types: {', '.join(of)}")
        return None
    family = of[entry.value]
    config = FAMILIES[family].config
    assert config is not None
    known = _is_of((*config.architectures, config.classifier), family, source, entries, diagnostics)
    return (family, source, entries) if known else None


def _accepting(configs: Mapping[str, ModelConfig], values: Any) -> dict[str, ModelConfig]:
    """Return the families that accept a config with these values, if these are an object."""
    given = values if isinstance(values, Mapping) else {}
    return {name: config for name, config in configs.items() if config.accepts is None or config.accepts(given)}


def _part_of(
    families: Sequence[str], source: SourceText, entries: dict[str, ConfigEntry], diagnostics: Diagnostics
) -> tuple[str, SourceText, dict[str, ConfigEntry]] | None:
    """Return the family, the source and the keys of the part of a model that belongs to one of these families; None
    after reporting that there is none.

    Raises ConfigUnreadable.
    """
    configs = {name: config for name in families if (config := FAMILIES[name].config) is not None}
    wholes = {name: config.whole for name, config in configs.items() if config.whole is not None}
    whole = wholes[families[0]]
    if not _is_of(whole.architectures, families[0], source, entries, diagnostics):
        return None
    entry = entries.get(whole.part)
    if entry is None or not isinstance(entry.value, dict):
        what = f"has no `{whole.part}`" if entry is None else f"has {short_json(entry.value)} as `{whole.part}`"
        place = source.span(0, 1) if entry is None else entry.span
        hint = "use an object with the keys of the text model"
        diagnostics.error("X522", f"{source.path} {what}", place, hint=hint)
        return None
    kind = entry.value.get("model_type")
    configs = _accepting(configs, entry.value)
    of: dict[Any, str] = {each: name for name, config in configs.items() for each in config.types}
    family = of.get(kind) if isinstance(kind, str) else None
    if kind is None:
        family = next(name for name, each in wholes.items() if each.unnamed and name in configs)
    if family is None:
        message = f"`{whole.part}` of {source.path} is of the model type {short_json(kind)}"
        hint = f"xtrain has {' and '.join(of)}; `code = transformers` computes others"
        diagnostics.error("X521", message, entry.span, hint=hint)
        return None
    whole = wholes[family]
    part = _keys(source, source.text.index("{", entry.span.start))
    replaces = (*whole.replaces, *((QUANTISATION,) if entries.get(QUANTISATION) is not None else ()))
    of_whole = {name: entries[name] for name in replaces if name in entries}
    understood = {"model_type", whole.part, *replaces}
    for name, each in entries.items():
        usual = name in USUAL and USUAL[name](each.value)
        if name not in understood and not usual and not is_metadata(name, whole.harmless) and each.value is not None:
            refuse_unknown(name, each, source, diagnostics)
    for name in whole.null:
        if name in part and part[name].value is not None:
            message = (
                f"`{name}` is {short_json(part[name].value)} in {source.path}, which affects the text model alone "
                "but not "
            )
            hint = "set it to null, or give the folder of the text model alone"
            diagnostics.error("X522", f"{message}the model with images", part[name].span, hint=hint)
    part = {name: each for name, each in part.items() if name not in replaces}
    return family, source, {"model_type": entries["model_type"], **part, **of_whole}


def _is_of(
    architectures: tuple[str, ...],
    family: str,
    source: SourceText,
    entries: dict[str, ConfigEntry],
    diagnostics: Diagnostics,
) -> bool:
    """Check that the file has one of these architectures; report it otherwise."""
    written = entries.get("architectures")
    if written is None or written.value is None:
        return True
    if isinstance(written.value, list) and len(written.value) == 1 and written.value[0] in architectures:
        return True
    message = (
        f"{source.path} has the architecture {short_json(written.value)}, which the family {family} does not support"
    )
    diagnostics.error("X521", message, written.span, hint=f"supported: {' and '.join(architectures)}")
    return False


def refuse_unknown(name: str, entry: ConfigEntry, source: SourceText, diagnostics: Diagnostics) -> None:
    if name in QUANTISED:
        message = f"{source.path} belongs to a quantized checkpoint: it has `{name}`"
        hint = "give a folder with weights in bf16, fp16 or fp32"
    else:
        message = f"`{name}` of {source.path} is unknown, and it may change what the model computes"
        hint = f"remove it from {CONFIG} if it has no effect"
    diagnostics.error("X522", message, entry.span, hint=hint)


def short_json(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
