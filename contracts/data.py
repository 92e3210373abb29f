"""Contracts of data components: checks of sources, and nodes of the links of `collate`."""

import os
import re
from collections.abc import Callable, Mapping
from glob import iglob
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

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

    folder_files: ClassVar[tuple[str, ...]] = ()
    """Names of files by which a folder that a pattern matches is read as one file; empty: folders are not read."""
    beside: ClassVar[Mapping[str, str]] = {}
    """Suffix of a file → suffix of a file next to it that is read with it."""
    reads_later: ClassVar[bool] = False
    """True if a unit names files that are read with it; else it carries their content."""
    flat: ClassVar[bool] = False
    """The identity is a plain list of patterns, as earlier versions wrote it."""

    def patterns_read(self) -> list[str]:
        return [pattern if scheme_of(pattern) else portable(pattern) for pattern in self.patterns]

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
        found = [pattern if scheme_of(pattern) else place(pattern) for pattern in patterns]
        return found if cls.flat else [found, *rest]

    @checks("data.files.*", reads="dataset.{}.source")
    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Findings) -> None:
        """Warn of patterns without a file, as files may be added later or lie on other machines; report folders as
        errors."""
        rule, path = f"data.files.{dataset}", f"dataset.{dataset}.source"
        if wrong := next(filter(None, map(_problem_of_url, self.patterns)), None):
            found.fail(rule, "X507", path, f"dataset {dataset}: {wrong[0]}", wrong[1])
            return
        local = [pattern for pattern in self.patterns if not scheme_of(pattern)]
        missing = [pattern for pattern in local if not _matches(pattern)]
        folders = [p for p in local if p not in missing and not (self.folder_files or _has_file(p))]
        if folders:
            shown = ", ".join(f'"{pattern}"' for pattern in folders)
            hint = f'name the files in it: "{folders[0].rstrip("/")}/*"'
            found.fail(rule, "X507", path, f"dataset {dataset}: only folders match {shown}, no file", hint)
        elif missing:
            shown = ", ".join(f'"{pattern}"' for pattern in missing)
            hint = "patterns are relative to the working folder; the run looks again"
            found.warn(rule, "W501", path, f"dataset {dataset}: no file matches {shown}", hint)
        else:
            there = [f"files match {', '.join(local)}"] if local else []
            remote = [pattern for pattern in self.patterns if scheme_of(pattern)]
            found.passed(rule, "; ".join([*there, *([f"{', '.join(remote)}: listed by the run"] if remote else [])]))


SCHEMES: Final = ("s3", "gs", "az", "hf", "http", "https")
"""Schemes of the documentation; fsspec may know others."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SIGNED: Final = re.compile(r"[?&](x-amz-signature|x-goog-signature|signature|sig|token|access_token)=", re.I)


def scheme_of(pattern: str) -> str:
    """Return the scheme of a URL in lower case; empty for a path."""
    match = _SCHEME.match(pattern)
    return match[1].lower() if match else ""


def has_wildcard(url: str) -> bool:
    """Return True if a URL is a pattern. The `?` of a web server begins its query."""
    return any(sign in url for sign in ("*[" if scheme_of(url) in ("http", "https") else "*?["))


def _problem_of_url(pattern: str) -> tuple[str, str] | None:
    """Return what is wrong with a URL, and what to write instead."""
    scheme = scheme_of(pattern)
    if not scheme:
        return None
    if not _is_known(scheme):
        return f'"{pattern}": no file system is named {scheme}', f"one of {', '.join(f'{name}://' for name in SCHEMES)}"
    rest = pattern.partition("://")[2]
    if ("@" in rest.partition("/")[0] and ":" in rest.partition("@")[0]) or _SIGNED.search(pattern):
        return "a URL with credentials would store them in plans", "give them in the environment of the run"
    if not rest.strip("/") or ("/" not in rest.strip("/") and scheme not in ("http", "https")):
        return f'"{pattern}" names no object', f"such as {scheme}://bucket/data/*.jsonl"
    return None


def _is_known(scheme: str) -> bool:
    if scheme in SCHEMES:
        return True
    try:
        from fsspec import available_protocols
    except ImportError:
        return True  # the run says what to install
    return scheme in available_protocols()


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
