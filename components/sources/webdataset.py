"""`webdataset("…")`: samples in tar files."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class WebDataset(FileSource):
    """`webdataset("shards/*.tar", …)`: tar files (also .gz and .zst) as of WebDataset: neighbouring members of one name
    are a record, whose fields are their extensions."""

    kind = "webdataset"
    sample = "shards/*.tar"
    ends = (".tar",)
    records = "fields"
    has_lists = True
