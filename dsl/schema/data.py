"""What the model learns from: `dataset` and its sources, `batch`, the links of `collate`."""

from typing import Literal

from attrs import frozen

from ..quantity import Quantity
from .setting import AUTO, Auto, Role, at_least, setting, share


@frozen
class PythonStdlib:
    """`python_stdlib()`: the top-level modules of the running interpreter's standard library, a document each."""


@frozen
class Text:
    """`text("data/*.txt", …)`: files of plain UTF-8 text, a document each."""

    patterns: tuple[str, ...]


@frozen
class JsonLines:
    """`jsonl("data/*.jsonl", …)`: files with a JSON object a line (also .gz); `text` of the dataset names the field."""

    patterns: tuple[str, ...]


Source = PythonStdlib | Text | JsonLines


@frozen
class Dataset:
    """`dataset NAME { … }`: documents, and the share of them kept for evaluation."""

    name: str
    source: Source = setting("where the documents come from", example="python_stdlib()")
    text: str = setting("name of the field that holds the text of a JSON record", default="text")
    holdout: Quantity = setting(
        "share of the tokens kept for evaluation, in whole documents; 100%: evaluation only",
        default=Quantity(0, "%"),
        units=("%",),
        check=share,
    )
    oversized: Literal["split", "truncate", "skip", "error"] = setting(
        "what happens to a document longer than a row", default="split"
    )
    bad_records: int = setting(
        "unreadable records that are reported and left out before the run fails", default=0, check=at_least(0)
    )


@frozen
class Batch:
    """`batch { … }`: what one optimizer step sees."""

    sequence: int = setting("length of a row in tokens", check=at_least(2), example="512")
    micro: int = setting("rows of one microbatch on one data rank", default=1, check=at_least(1), role=Role.MESH)
    accumulate: int | Auto = setting(
        "microbatches of one step; auto: what `rows` needs, else 1", default=AUTO, check=at_least(1), role=Role.MESH
    )
    rows: int | Auto = setting(
        "rows of one step over all data ranks; auto: micro × accumulate × data ranks", default=AUTO, check=at_least(1)
    )


@frozen
class ToTensor:
    """`to_tensor`: token segments into tensors."""


@frozen
class Flatten:
    """`flatten`: rows of samples into one list of samples."""


@frozen
class ShiftTokens:
    """`shift_tokens`: labels are the inputs shifted by one, inside each document."""


@frozen
class Pack:
    """`pack(sequential)`: samples into rows of equal length."""

    method: Literal["sequential", "multipack", "best_fit"] = setting("how rows are filled", default="sequential")
    group: int | Auto = setting(
        "documents that are packed together, in their order; auto: 100,000; sequential has none",
        default=AUTO,
        check=at_least(1),
    )
    align: int | Auto = setting(
        "documents are padded to a multiple of so many positions; auto: 2 · ring where there is a ring, else 1",
        default=AUTO,
        check=at_least(1),
    )


@frozen
class Shard:
    """`shard`: the part of each row that a rank of context parallel holds; added where cp is above 1."""


Link = ToTensor | Flatten | ShiftTokens | Pack | Shard
DEFAULT_CHAIN: tuple[Link, ...] = (ToTensor(), Flatten(), ShiftTokens(), Pack())
