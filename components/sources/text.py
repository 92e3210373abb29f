"""`text("…")`: plain text."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class Text(FileSource):
    """`text("data/*.txt", …)`: files of plain UTF-8 text, one document each (also .gz and .zst)."""

    kind = "text"
    sample = "data/*.txt"
    ends = ("",)
    flat = True
    reads_later = True
