"""What the model learns from: `dataset` and its sources, `batch`, the links of `collate`."""

from typing import Any, Literal

from attrs import field, frozen

from ..quantity import Quantity
from .names import file_name, file_path
from .setting import AUTO, Auto, Role, at_least, label, not_negative, positive, setting, share


@frozen
class PythonStdlib:
    """`python_stdlib()`: the modules of Python's standard library, one document each."""


@frozen
class Text:
    """`text("data/*.txt", …)`: files of plain UTF-8 text, one document each (also .gz and .zst)."""

    patterns: tuple[str, ...] = label(check=file_path)


@frozen
class JsonLines:
    """`jsonl("data/*.jsonl", …)`: files with one JSON object per line (also .gz and .zst), one record each."""

    patterns: tuple[str, ...] = label(check=file_path)


@frozen
class Parquet:
    """`parquet("data/*.parquet", …)`: Parquet files, one record per row."""

    patterns: tuple[str, ...] = label(check=file_path)


@frozen
class Arrow:
    """`arrow("data/*.arrow", …)`: Arrow files (stream or file format), one record per row."""

    patterns: tuple[str, ...] = label(check=file_path)


@frozen
class HuggingFace:
    """`huggingface("org/name or folder", …)`: a dataset of the Hugging Face library, from the hub or a local folder."""

    name: str = label(check=file_path)
    config: str | None = setting(
        "configuration of the dataset; none: its only configuration", default=None, example='"en"'
    )
    split: str = setting("split of the dataset", default="train")


@frozen
class Tokens:
    """`tokens("shards/*.npy", …)`: files of token ids, used without tokenizing.

    A .npy file, bare numbers, the pair .bin and .idx of Megatron, a shard with the header of nanogpt or llm.c, or the
    folder of a token store that xtrain has made.
    """

    patterns: tuple[str, ...] = label(check=file_path)
    dtype: Literal["auto", "uint8", "uint16", "uint32", "int32", "int64"] = setting(
        "integer type; auto: that of a .npy file, uint16 for any other file", default="auto"
    )
    separator: int | Auto = setting(
        "id that ends a document; auto: the tokenizer's end of text", default=AUTO, check=at_least(0)
    )


@frozen
class Synthetic:
    """`synthetic(…)`: random documents of a made-up language, for tests without data.

    Its words follow each other by rules that can be learned, the same for every seed: a seed picks the documents.
    """

    documents: int = setting("number of documents", default=10_000, check=at_least(1))
    length: int = setting("mean length of a document, in tokens", default=512, check=at_least(3))
    spread: float = setting(
        "standard deviation of the logarithm of the lengths; 0: all have the same length",
        default=0.5,
        check=not_negative,
    )
    seed: int | Auto = setting("seed of the documents; auto: that of the experiment", default=AUTO, check=at_least(0))


@frozen
class UserCall:
    """`name(…)`: a source, or a link of `collate`, that is a function of your own; `use` makes it known.

    module: path of the file, or dotted name. digest: of the file's content. arguments: by name, in the order of the
    function's parameters. takes, gives: what a link takes and gives; empty for a source. does: the first line of its
    docstring.
    """

    module: str
    function: str
    digest: str
    arguments: dict[str, Any]
    takes: str = ""
    gives: str = ""
    does: str = field(default="", eq=False)


Source = PythonStdlib | Text | JsonLines | Parquet | Arrow | HuggingFace | Tokens | Synthetic | UserCall
TEMPLATES = ("chatml", "llama3", "plain")  # of conversations, that need no file
WITH_PATTERNS = (Text, JsonLines, Parquet, Arrow, Tokens)
WITH_FIELDS = (JsonLines, Parquet, Arrow, HuggingFace, UserCall)  # records that have fields


@frozen
class Dataset:
    """`dataset NAME { … }`: a data source, the format of its records, and the share held out for evaluation.

    A record with fields is plain text in one field (`text`), a conversation (`messages`), or a pair of `prompt` and
    `response`; of the last two only what is to be answered is trained on, unless `train_on` says otherwise.
    """

    name: str = label(check=file_name)
    source: Source = setting("where the documents come from", example="python_stdlib()")
    text: str = setting("name of the field that holds the text of a record", default="text")
    messages: str | None = setting(
        "name of the field that holds a conversation, a list of messages with `role` and `content`; none: no "
        "conversations",
        default=None,
        example='"messages"',
    )
    prompt: str | None = setting(
        "name of the field that holds the prompt; none: no pairs", default=None, example='"question"'
    )
    response: str | None = setting(
        "name of the field that holds the response; none: no pairs", default=None, example='"answer"'
    )
    train_on: Literal["auto", "assistant", "last", "all"] = setting(
        "which tokens count for the loss: all turns of the assistant, its last turn, or all tokens; auto: assistant",
        default="auto",
    )
    template: str | Auto = setting(
        "chat template: `chatml`, `llama3`, `plain`, or the path of a Jinja template; auto: that of the tokenizer",
        default=AUTO,
        check=file_path,
        example='"chatml"',
    )
    holdout: Quantity = setting(
        "share of the tokens held out for evaluation, in whole documents; 100%: evaluation only",
        default=Quantity(0, "%"),
        units=("%",),
        check=share,
    )
    oversized: Literal["split", "truncate", "skip", "error"] = setting(
        "what happens to a document longer than a row", default="split"
    )
    bad_records: int = setting(
        "unreadable records that are reported and skipped before the run fails", default=0, check=at_least(0)
    )


# A share of the rows, or how often an epoch of the mixture takes all rows of a dataset.
Weight = float | Quantity


@frozen
class Mixture:
    """`mixture { … }`: the weight of each dataset: `web = 0.8, code = 0.2`.

    A weight is a share of the rows that are trained on; rows are packed nearly full, so it is one of the tokens too.
    Weights need not add up to 1. In epochs, `web = 1 epoch, code = 3 epochs`, they say how often each epoch of the
    mixture takes every row of a dataset. Without this block exactly one dataset is trained on.
    """

    weights: dict[str, Weight] = setting(
        "weight of the dataset of this name: a share of the rows, or epochs",
        default={},
        units=("epochs",),
        check=not_negative,
        names="dataset",
        example="0.8",
    )
    temperature: float = setting(
        "shares are weights to the power of 1 / temperature: above 1 more even, below 1 less; 0 stays 0; "
        "not with weights in epochs",
        default=1.0,
        check=positive,
    )


@frozen
class Phase:
    """`phase NAME { … }`: another mixture or learning rate from a given step on, until the next phase begins."""

    name: str = label(check=file_name)
    from_: Quantity = setting(
        "where it begins: a number of steps, tokens or epochs, or a share of the budget",
        units=("steps", "tokens", "epochs", "%"),
        check=share,
        example="90%",
    )
    mix: dict[str, Weight] = setting(
        "weights that differ from those of `mixture`; a dataset that is not named keeps its own",
        default={},
        units=("epochs",),
        check=not_negative,
        example="{ web: 0.3, code: 0.7 }",
    )
    lr_scale: float = setting("factor on the learning rate of the scheduler", default=1.0, check=positive)


@frozen
class Batch:
    """`batch { … }`: what one optimizer step sees."""

    sequence: int = setting("sequence length: tokens in a row (a packed sequence)", check=at_least(2), example="512")
    micro: int = setting(
        "micro-batch size: rows of a microbatch on a data rank", default=1, check=at_least(1), role=Role.MESH
    )
    accumulate: int | Auto = setting(
        "gradient accumulation: microbatches of a step; auto: what `rows` needs, else 1",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    rows: int | Auto = setting(
        "global batch size: rows of a step on all data ranks; auto: micro × accumulate × data ranks",
        default=AUTO,
        check=at_least(1),
    )
    prefetch: int = setting(
        "steps to read ahead while a step computes; 0: none",
        default=2,
        check=at_least(0),
        role=Role.EXECUTION,
    )
    workers: int = setting(
        "data worker processes of a rank; 0: a thread of the rank reads",
        default=0,
        check=at_least(0),
        role=Role.EXECUTION,
    )


@frozen
class ToTensor:
    """`to_tensor`: token arrays to tensors."""


@frozen
class Flatten:
    """`flatten`: rows of samples into one list of samples."""


@frozen
class ShiftTokens:
    """`shift_tokens`: labels are the inputs shifted by one, inside each document."""


@frozen
class Pack:
    """`pack(sequential)`: documents packed into rows of equal length."""

    method: Literal["sequential", "multipack", "best_fit"] = setting("how rows are filled", default="sequential")
    group: int | Auto = setting(
        "documents that are packed together; auto: 100,000; not for sequential",
        default=AUTO,
        check=at_least(1),
    )
    align: int | Auto = setting(
        "documents are padded to a multiple of this; auto: 2 · ring with ring attention, else 1",
        default=AUTO,
        check=at_least(1),
    )


@frozen
class Shard:
    """`shard`: the part of each row that a context-parallel rank holds; added automatically if cp is above 1."""


Link = ToTensor | Flatten | ShiftTokens | Pack | Shard | UserCall
DEFAULT_CHAIN: tuple[Link, ...] = (ToTensor(), Flatten(), ShiftTokens(), Pack())
