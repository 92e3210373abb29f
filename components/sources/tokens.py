"""`tokens("…")`: documents that are already tokenized."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, Literal

from xtrain.contracts.data import FileSource
from xtrain.dsl.schema.data_components import SOURCES
from xtrain.dsl.schema.setting import AUTO, Auto, at_least, setting
from xtrain.lazy_attrs import frozen
from xtrain.plan.findings import Findings, checks

STORE_FILES: Final = ("meta.json", "tokens.bin")
"""Files by which a folder is taken for a token store."""


@SOURCES.register()
@frozen
class Tokens(FileSource):
    """`tokens("shards/*.npy", …)`: files of token ids, used without tokenizing.

    A .npy file, raw numbers, Megatron's pair of .bin and .idx, a shard with the header of nanogpt or llm.c, or the
    folder of a token store made by xtrain.
    """

    dtype: Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"] = setting(
        "integer type; auto: the type of a .npy file, uint16 for any other file", default="auto"
    )
    separator: int | Auto = setting(
        "id that ends a document; auto: the tokenizer's end of text", default=AUTO, check=at_least(0)
    )

    kind = "tokens"
    sample = "shards/*.npy"
    ends = (".npy", ".bin")
    beginnings = ((b"\x93NUMPY", "a .npy file"),)
    records = "tokens"
    folder_files = STORE_FILES
    beside: ClassVar[Mapping[str, str]] = {".bin": ".idx"}
    reads_later = True
    may_agree = ("separator", "dtype")

    def options(self, seed: int) -> dict[str, Any]:
        dtype = None if self.dtype == "auto" else self.dtype
        return {"dtype": dtype, "separator": None if isinstance(self.separator, Auto) else self.separator}

    @checks("data.separator.*", reads="dataset.{}.source tokenizer.source")
    def check(self, dataset: str, vocabulary: Callable[[], int | None], found: Findings) -> None:
        """Check that the document separator is an id of the tokenizer."""
        super().check(dataset, vocabulary, found)
        rule, path = f"data.separator.{dataset}", f"dataset.{dataset}.source"
        if not isinstance(self.separator, int) or (size := vocabulary()) is None:
            return
        if self.separator >= size:
            message = f"dataset {dataset}: separator {self.separator:,} is not one of the {size:,} token ids"
            found.fail(rule, "X507", path, message, "set `separator` to the id that ends documents in these files")
        else:
            found.passed(rule, f"separator {self.separator:,} is one of {size:,} tokens")
