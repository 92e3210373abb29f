"""Contracts of data components: checks of sources, and nodes of the links of `collate`."""

import os
from collections.abc import Callable, Mapping
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from xtrain.dsl.schema.data_components import Link, Source
from xtrain.dsl.schema.setting import file_path, label
from xtrain.lazy_attrs import frozen
from xtrain.plan.canonical import portable
from xtrain.plan.findings import Findings, checks

if TYPE_CHECKING:
    from xtrain.plan.resolved import Resolved


class PlannedSource(Source):
    """Base class of all sources."""

    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Findings) -> None:
        """Check the files of the source and report to `found`. dataset: its name. vocabulary: returns the number of
        tokens, or None if that is unknown here."""


@frozen
class FileSource(PlannedSource):
    """Source of files; relative patterns start at the working folder."""

    patterns: tuple[str, ...] = label(check=file_path)

    takes_folders: ClassVar[bool] = False
    """A pattern may match folders."""
    flat: ClassVar[bool] = False
    """The identity is a plain list of patterns, as earlier versions wrote it."""

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

    @checks("data.files.*", reads="dataset.{}.source")
    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Findings) -> None:
        """Warn of patterns without a file, as files may be added later or lie on other machines; report folders as
        errors."""
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
    except ValueError:  # a zero byte, which no path contains
        return False


def _is_file(name: str) -> bool:
    """Return True if a file has this name, pattern characters included; Path.is_file raises for long names."""
    return os.path.isfile(name)  # noqa: PTH113


def _has_file(pattern: str) -> bool:
    return _is_file(pattern) or any(not Path(name).is_dir() for name in iglob(pattern, recursive=True))  # noqa: PTH207


class PlannedLink(Link):
    """Base class of all links of `collate`."""

    def args(self, resolved: "Resolved") -> dict[str, Any]:
        """Return the JSON arguments of the link's node."""
        return {}

    def axes(self, resolved: "Resolved") -> tuple[str, ...]:
        """Return the mesh axes along which ranks do different work in the link."""
        return ()

    def does(self, resolved: "Resolved") -> str:
        """Return the description of the link's node."""
        raise NotImplementedError
