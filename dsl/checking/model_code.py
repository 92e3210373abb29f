"""Descriptions of models that transformers' own code computes, made by a child process and kept in the user's cache.

A description depends on the config and on the versions of transformers and torch, so it is made once for each.
"""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.checking.inspections import ChildFailed, kept, place_of, run_child, store
from xtrain.dsl.diagnostics.diagnostic import Remediable
from xtrain.dsl.schema.model import ModelFolder

EXTRA: Final = "pip install 'xtrain[transformers]'"
OLDEST: Final = 5  # the first version whose conversions of weights can be read


class CodeUnusable(Remediable):
    """A model whose code cannot be used; hint: what to do."""


def read_config(folder: ModelFolder) -> dict[str, Any]:
    """Return the `config.json` of a folder that was read before. Raises OSError."""
    return json.loads((Path(folder.path) / "config.json").read_text(encoding="utf-8"))


def code_versions() -> dict[str, str]:
    """Return the installed versions of transformers and torch. Raises CodeUnusable."""
    try:
        versions = {name: version(name) for name in ("transformers", "torch")}
    except PackageNotFoundError as error:
        message = f"transformers' code computes this model, and the package {error.name} is missing"
        raise CodeUnusable(message, EXTRA) from error
    if int(versions["transformers"].split(".")[0]) < OLDEST:
        message = f"transformers {versions['transformers']} is too old to compute this model, which needs {OLDEST}.0"
        raise CodeUnusable(message, EXTRA)
    return versions


def describe(config: Mapping[str, Any], remote: str = "") -> Mapping[str, Any]:
    """Return the description of a model with the keys of a `config.json`, as `runtime/inspect/model_code.py` makes it.

    remote: folder whose own modeling files compute it, and are executed; empty: transformers' code does. Raises
    CodeUnusable.
    """
    try:
        digest = source_digest(remote) if remote else ""
    except OSError as error:
        message = f"the modeling files of {remote} cannot be read: {error.strerror or error}"
        raise CodeUnusable(message, "give a folder with config.json and its modeling files") from error
    found = _described(json.dumps(config, sort_keys=True), remote, digest)
    if "problem" in found:
        raise CodeUnusable(found["problem"], found["hint"])
    return found


@lru_cache(maxsize=16)
def _described(config: str, remote: str, digest: str) -> Mapping[str, Any]:
    versions = code_versions()
    path = place_of(*map(" ".join, versions.items()), config, digest)
    found = kept(path, lambda found: source_digest(found["source"]) == found["digest"])
    if found is None:
        found = _inspected(config, versions, remote)
        if "problem" not in found:  # what another package may cure
            store(path, found)
    return {**{name: value for name, value in found.items() if name != "source"}, "versions": versions}


def code_files(folder: Path) -> dict[str, bytes]:
    """Return the Python files in a folder and below, by path. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*.py") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def source_digest(path: str) -> str:
    """Return 16 hex digits over a source file, or over the Python files of a folder. Raises OSError."""
    if not (folder := Path(path)).is_dir():
        return hashlib.sha256(folder.read_bytes()).hexdigest()[:16]
    found = hashlib.sha256()
    for name, content in code_files(folder).items():
        found.update(f"{name}\0{len(content)}\0".encode() + content)
    return found.hexdigest()[:16]


def _inspected(config: str, versions: Mapping[str, str], remote: str) -> Mapping[str, Any]:
    """Run the child process; return the description, or the problem and a hint. Raises CodeUnusable."""
    kind = json.loads(config).get("model_type")
    whose = f"{remote}, which is executed" if remote else f"transformers {versions['transformers']}"
    about = f"reading the code of {kind} in {whose} (once for each config)"
    try:
        return run_child("model_code", config, about, *([remote] if remote else []), executes=bool(remote))
    except ChildFailed as failure:
        hint = "run `xtrain plan` on the spec, or use another model" if remote else "use another model"
        raise CodeUnusable(f"the code of {kind} cannot be inspected: {failure}", hint) from failure
