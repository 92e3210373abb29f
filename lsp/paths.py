"""Strings that are paths: which files may stand in one, and those that begin as it does."""

import os
from typing import Final

from xtrain.dsl import blocks
from xtrain.dsl.schema.names import file_path
from xtrain.dsl.schema.sources import SOURCES
from xtrain.lsp.place import Place
from xtrain.lsp.scope import WORDS, Scope, Scopes

_MOST: Final = 200  # maximum of files offered
_MODEL: Final = blocks.KINDS["model"]  # their label is a family, or the folder of a model


def files_wanted(scopes: Scopes, scope: Scope, place: Place, path: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the start folder of the path in a string, and its possible file endings (() for any); None if the string
    is not a path. path: of the spec."""
    first = place.item[0].type if place.item else ""
    ends = {"INCLUDE": (".xtrain",), "USE": (".py",)}.get(first)
    if ends is not None:
        return os.path.dirname(path), ends  # noqa: PTH120
    return (os.curdir, ()) if _is_path(scopes, scope, place) else None


def _is_path(scopes: Scopes, scope: Scope, place: Place) -> bool:
    """Return True if a string is a file of a source, or a label or setting that is a path."""
    called = scopes.called(place.inner) if place.inner.kind == "call" else None
    setting = scopes.setting(place)
    if called is not None and called.path in SOURCES and (setting is None or setting[0].path != called.path):
        return bool(SOURCES[called.path].sample)
    if setting is not None:
        found = scopes.attribute(*setting)
        return found is not None and found[1].check is file_path
    item = place.item
    block = scopes.block_of(scope, item[0].text) if len(item) == 1 and item[0].type in WORDS else None
    label = blocks.label_of(block) if block is not None else None
    return block is _MODEL or (label is not None and label.metadata.get("check") is file_path)


def files_beginning(written: str, base: str, ends: tuple[str, ...]) -> list[str]:
    """Return the names of files and folders (with a slash) that complete the last part of a path."""
    head, _, begun = written.rpartition("/")
    folder = os.path.join(base, head + "/" if written.startswith("/") else head)  # noqa: PTH118
    try:
        with os.scandir(folder or os.curdir) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (OSError, ValueError):  # there is no such folder, or it is not a path
        return []
    names = []
    for entry in entries:
        hidden = entry.name.startswith(".") and not begun
        if entry.name.startswith(begun) and not hidden and (entry.is_dir() or entry.name.endswith(ends or "")):
            names.append(f"{entry.name}/" if entry.is_dir() else entry.name)
    return names[:_MOST]
