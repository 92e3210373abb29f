"""Descriptions of models that transformers' own code computes, made by a child process and kept in the user's cache.

A description depends on the config and on the versions of transformers and torch, so it is made once for each.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.diagnostics.diagnostic import Remediable
from xtrain.dsl.schema.model import ModelFolder

DESCRIPTION: Final = 16  # changes with the content of descriptions
EXTRA: Final = "pip install 'xtrain[transformers]'"
OLDEST: Final = 5  # the first version whose conversions of weights can be read
LONGEST: Final = 600  # seconds
PACKAGE: Final = __name__.partition(".dsl.")[0]


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


def describe(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of a model with the keys of a `config.json`, as `runtime/inspect/model_code.py` makes it.

    Raises CodeUnusable.
    """
    found = _described(json.dumps(config, sort_keys=True))
    if "problem" in found:
        raise CodeUnusable(found["problem"], found["hint"])
    return found


@lru_cache(maxsize=16)
def _described(config: str) -> Mapping[str, Any]:
    versions = code_versions()
    of = "\n".join((str(DESCRIPTION), *map(" ".join, versions.items()), config))
    key = hashlib.sha256(of.encode()).hexdigest()[:32]
    path = _cache() / f"{key}.json"
    found = _kept(path)
    if found is None:
        found = _inspected(config, versions)
        if "problem" not in found:  # what another package may cure
            _store(path, found)
    return {**{name: value for name, value in found.items() if name != "source"}, "versions": versions}


def source_digest(path: str) -> str:
    """Return 16 hex digits over a source file. Raises OSError."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _kept(path: Path) -> Mapping[str, Any] | None:
    """Return a description in the cache; None without one, if its file is damaged, or if the code has changed since."""
    try:
        checksum, _, text = path.read_text(encoding="utf-8").partition("\n")
        if checksum != hashlib.sha256(text.encode()).hexdigest():
            return None
        found = json.loads(text)
        return found if source_digest(found["source"]) == found["digest"] else None
    except (OSError, ValueError):
        return None


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(root).expanduser() / "xtrain" / "models"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"xtrain-{os.getuid()}" / "models"


def _store(path: Path, found: Mapping[str, Any]) -> None:
    """Write a description after its checksum, if the cache can be written."""
    text = json.dumps(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        Path(file.name).replace(path)
    except OSError:
        pass


def _inspected(config: str, versions: Mapping[str, str]) -> Mapping[str, Any]:
    """Run the child process; return the description, or the problem and a hint. Raises CodeUnusable."""
    kind = json.loads(config).get("model_type")
    message = f"reading the code of {kind} in transformers {versions['transformers']} (once for each config)"
    print(message, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "config.json", Path(folder) / "description.json"
        given.write_text(config, encoding="utf-8")
        module = f"{PACKAGE}.runtime.inspect.model_code"
        done = None
        try:
            done = subprocess.run(
                [sys.executable, "-m", module, str(given), str(result)],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST, check=False,
            )  # fmt: skip
            found = json.loads(result.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired as error:
            message = f"the code of {kind} could not be inspected within {LONGEST} seconds"
            raise CodeUnusable(message, "use a model type that xtrain has") from error
        except (OSError, ValueError) as error:
            lines = [] if done is None else done.stderr.strip().splitlines()
            last = lines[-1] if lines else str(error)
            raise CodeUnusable(f"the code of {kind} cannot be inspected: {last}", "use another model") from error
    return found
