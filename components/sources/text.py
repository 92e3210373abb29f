"""`text("…")`: plain text."""

from attrs import frozen

from xtrain.dsl.schema.sources import SOURCES
from xtrain.planner.data.file_source import FileSource


@SOURCES.register()
@frozen
class Text(FileSource):
    """`text("data/*.txt", …)`: files of plain UTF-8 text, one document each (also .gz and .zst)."""

    kind = "text"
    sample = "data/*.txt"
    ends = ("",)
    flat = True
