"""`parquet("…")`: tables in files of Apache Parquet."""

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.lazy_attrs import frozen


@SOURCES.register()
@frozen
class Parquet(FileSource):
    """`parquet("data/*.parquet", …)`: Parquet files, one record per row."""

    kind = "parquet"
    sample = "data/*.parquet"
    ends = (".parquet",)
    beginnings = ((b"PAR1\x15", "a parquet file"),)
    records = "fields"
