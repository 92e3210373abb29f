"""Finds the modules of Python's standard library."""

import sysconfig
from pathlib import Path

from ...runtime.data.sources.files import matched
from ...runtime.data.sources.reader import OpenedSource, SourceRequest
from .text_run import TextFiles


def open_source(request: SourceRequest) -> OpenedSource:
    """Those of this interpreter; nobody repairs its files."""
    base = Path(sysconfig.get_path("stdlib"))
    files = matched(("*.py",), base)
    return OpenedSource(reader=TextFiles(files=files), files=files, base=base, any_bad_records=True)
