"""Finds the modules of Python's standard library."""

import sysconfig
from pathlib import Path

from xtrain.components.sources.text_run import TextFiles
from xtrain.runtime.feed.sources.files import matched
from xtrain.runtime.feed.sources.source import OpenedSource, SourceRequest


def open_source(request: SourceRequest) -> OpenedSource:
    """Open the files of this interpreter's standard library. Bad records are allowed, because users cannot repair its
    files."""
    base = Path(sysconfig.get_path("stdlib"))
    files = matched(("*.py",), base)
    return OpenedSource(reader=TextFiles(files=files), files=files, base=base, any_bad_records=True)
