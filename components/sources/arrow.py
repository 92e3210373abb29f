"""`arrow("…")`: tables in files of Apache Arrow (feather of version 2 is arrow)."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class Arrow(FileSource):
    """`arrow("data/*.arrow", …)`: Arrow files (stream or file format), one record per row."""

    kind = "arrow"
    sample = "data/*.arrow"
    ends = (".arrow",)
    beginnings = ((b"ARROW1\x00\x00", "an arrow file"),)
    records = "fields"
