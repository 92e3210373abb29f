"""`jsonl("…")`: lines of JSON."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class JsonLines(FileSource):
    """`jsonl("data/*.jsonl", …)`: files with one JSON object per line, or one array of objects (also .gz and .zst), one
    record each."""

    kind = "jsonl"
    sample = "data/*.jsonl"
    ends = (".json",)
    records = "fields"
    has_lists = True
    flat = True
