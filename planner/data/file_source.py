"""`FileSource`: what sources have in common that read files, named by patterns."""

import os
from collections.abc import Callable, Mapping
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from xtrain.dsl.schema.names import file_path
from xtrain.dsl.schema.setting import label
from xtrain.dsl.schema.sources import Source
from xtrain.planner.canonical import portable

if TYPE_CHECKING:
    from xtrain.planner.findings import Findings


@frozen
class FileSource(Source):
    """A source of files; relative patterns start at the working folder."""

    patterns: tuple[str, ...] = label(check=file_path)

    takes_folders: ClassVar[bool] = False
    """Whether what a pattern matches may be a folder."""
    flat: ClassVar[bool] = False
    """Whether its identity is that of earlier versions, which had its patterns alone in no list of their own."""

    def patterns_read(self) -> list[str]:
        return [portable(pattern) for pattern in self.patterns]

    def does(self) -> str:
        return ", ".join(self.patterns_read())

    @classmethod
    def shown(cls, args: Mapping[str, Any]) -> str:
        return f"{args['kind']} {', '.join(args['patterns'])}"

    def identity(self, seed: int) -> Any:
        name, (_, *rest) = super().identity(seed)
        return [name, self.patterns_read() if self.flat else [self.patterns_read(), *rest]]

    @classmethod
    def placed(cls, given: Any, place: Callable[[str], str]) -> Any:
        patterns, *rest = [given] if cls.flat else given
        found = [place(pattern) for pattern in patterns]
        return found if cls.flat else [found, *rest]

    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: "Findings") -> None:
        """Files that are not there may come, or lie on the machines that run: a warning. A folder is an error."""
        rule, path = f"data.files.{dataset}", f"dataset.{dataset}.source"
        missing = [pattern for pattern in self.patterns if not _matches(pattern)]
        folders = [p for p in self.patterns if p not in missing and not (self.takes_folders or _has_file(p))]
        if folders:
            shown = ", ".join(f'"{pattern}"' for pattern in folders)
            hint = f'name the files in it: "{folders[0].rstrip("/")}/*"'
            found.fail(rule, "X507", path, f"dataset {dataset}: only folders match {shown}, no file", hint)
        elif missing:
            shown = ", ".join(f'"{pattern}"' for pattern in missing)
            hint = "patterns are relative to the working folder; the run looks again"
            found.warn(rule, "W501", path, f"dataset {dataset}: no file matches {shown}", hint)
        else:
            found.passed(rule, f"files match {', '.join(self.patterns)}")


def _matches(pattern: str) -> bool:
    try:
        # Path.glob refuses absolute patterns.
        return next(iglob(pattern, recursive=True), None) is not None or _is_file(pattern)  # noqa: PTH207
    except ValueError:  # a zero byte, which no path has
        return False


def _is_file(name: str) -> bool:
    """Return True for a name with the signs of a pattern that a file really has; Path.is_file raises for long ones."""
    return os.path.isfile(name)  # noqa: PTH113


def _has_file(pattern: str) -> bool:
    return _is_file(pattern) or any(not Path(name).is_dir() for name in iglob(pattern, recursive=True))  # noqa: PTH207
