"""`mds("…")`: samples in shards of MosaicML's Streaming."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class MosaicShards(FileSource):
    """`mds("data/*.mds", …)`: shards as of MosaicML's Streaming (also .mds.zstd and .mds.gz), one record per sample."""

    kind = "mds"
    sample = "data/*.mds"
    ends = (".mds", ".mds.zstd")
    records = "fields"
