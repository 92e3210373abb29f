"""Descriptions that child processes make of code, and the user's cache that keeps them.

Planning has no torch: what code computes is described by a process of its own. Code of a spec's author is executed
there, except in commands that execute nothing.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from xtrain.dsl.schema.model import EXECUTES

DESCRIPTION: Final = 21  # changes with the content of descriptions
LONGEST: Final = 600  # seconds
PACKAGE: Final = __name__.partition(".dsl.")[0]


class ChildFailed(Exception):
    """A child process that wrote no description, or was not started."""


@lru_cache(maxsize=16)
def inspected(module: str, content: str, about: str, versions: tuple[str, ...], *more: str) -> Mapping[str, Any]:
    """Return what a module of `runtime/inspect`, which executes code of the spec's author, writes about `content`; from
    the cache if it was asked before. about: a line that is printed before. versions: that the result depends on. more:
    arguments of the module.

    Raises ChildFailed.
    """
    path = place_of(module, content, *versions)
    found = kept(path, lambda _: True)
    if found is None:
        found = run_child(module, content, about, *more, executes=True)
        if "problem" not in found:
            store(path, found)
    return found


def place_of(*parts: str) -> Path:
    """Return the file in the cache of a description that depends on `parts`."""
    key = hashlib.sha256("\n".join((str(DESCRIPTION), *parts)).encode()).hexdigest()[:32]
    return _cache() / f"{key}.json"


def run_child(module: str, content: str, about: str, *more: str, executes: bool) -> Mapping[str, Any]:
    """Run a module of `runtime/inspect` in a child process. executes: it executes code of the spec's author. Raises
    ChildFailed."""
    if executes and not EXECUTES.get():
        raise ChildFailed("this command does not execute it; `xtrain plan` does, and keeps what it finds")
    print(about, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        given, result = Path(folder) / "given.json", Path(folder) / "description.json"
        given.write_text(content, encoding="utf-8")
        command = [sys.executable, "-m", f"{PACKAGE}.runtime.inspect.{module}", str(given), str(result), *more]
        done = None
        try:
            done = subprocess.run(
                command,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LONGEST, check=False,
            )  # fmt: skip
            return json.loads(result.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired as error:
            raise ChildFailed(f"it took more than {LONGEST} seconds") from error
        except (OSError, ValueError) as error:
            lines = [] if done is None else done.stderr.strip().splitlines()
            raise ChildFailed(lines[-1] if lines else str(error)) from error


def kept(path: Path, fits: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any] | None:
    """Return a description in the cache that `fits`; None without one, or if its file is damaged."""
    try:
        checksum, _, text = path.read_text(encoding="utf-8").partition("\n")
        if checksum != hashlib.sha256(text.encode()).hexdigest():
            return None
        found = json.loads(text)
        return found if fits(found) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(root).expanduser() / "xtrain" / "models"
    except RuntimeError:  # a user without a home
        return Path(tempfile.gettempdir()) / f"xtrain-{os.getuid()}" / "models"


def store(path: Path, found: Mapping[str, Any]) -> None:
    """Write a description after its checksum, if the cache can be written."""
    text = json.dumps(found)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        Path(file.name).replace(path)
    except OSError:
        pass
