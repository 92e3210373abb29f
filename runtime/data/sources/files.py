"""The files that the patterns of a source match."""

import os
from collections.abc import Callable
from glob import glob
from pathlib import Path

from xtrain.runtime.data.errors import DataError


def matched(patterns: tuple[str, ...], base: Path, folder: Callable[[Path], bool] | None = None) -> tuple[Path, ...]:
    """The files that patterns match, each once, by name; and the folders among them that `folder` takes for files.

    Raises DataError for a pattern that matches none, and for what is neither a file nor a folder.
    """
    unique = {path for pattern in patterns for path in _match(pattern, base, folder)}
    return tuple(sorted(unique, key=lambda path: name_of(path, base)))


def _match(pattern: str, base: Path, folder: Callable[[Path], bool] | None) -> list[Path]:
    # Path.glob takes no absolute pattern. root_dir, not a joined one: a `[` in the base's own name is no glob.
    paths = [base / name for name in glob(pattern, root_dir=base, recursive=True)]  # noqa: PTH207
    files: list[Path] = []
    for path in paths:
        if path.is_file() or (folder is not None and path.is_dir() and folder(path)):
            files.append(path)
        elif not path.is_dir():
            raise DataError("a broken link, or not a regular file", path=path, remedy="Take it out of the pattern.")
    if not files and paths:
        remedy = f"Name the files in it, for example `{pattern.rstrip('/')}/*`."
        raise DataError(f"pattern matches a folder, not a file: {base / pattern}", remedy=remedy)
    if not files and os.path.isfile(base / pattern):  # noqa: PTH113  is_file raises for names that are too long
        return [base / pattern]  # a name with the signs of a pattern
    if not files:
        written = "; a `[` that belongs to a name is written `[[]`" if "[" in pattern else ""
        raise DataError(
            f"pattern matches no file: {base / pattern}",
            remedy=f"Correct the pattern; relative ones start at {base}{written}.",
        )
    return files


def name_of(path: Path, base: Path) -> str:
    """What a file is called: by its path from `base`, or else by its own."""
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()
