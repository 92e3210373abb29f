"""Training data: `dataset`, `mixture`, `phase` and `batch`."""

from typing import Any, Final, Literal

from xtrain.dsl.schema.data_components import Source
from xtrain.dsl.schema.losses import WEIGHTS
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    Range,
    Role,
    at_least,
    between,
    file_name,
    file_path,
    label,
    not_negative,
    positive,
    setting,
    share,
)
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen


def is_template_text(template: str) -> bool:
    """Return True if a `template` is itself the text of a Jinja template, not a name or a path."""
    return "{{" in template or "{%" in template


# Built-in conversation templates → the texts that delimit turns.
TEMPLATES = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "plain": (),
}


@frozen
class Dataset:
    """`dataset NAME { … }`: a data source, the format of its records, and the share held out for evaluation.

    A record with fields is plain text in one field (`text`), a conversation (`messages`), or a pair of `prompt` and
    `response`; conversations and pairs train only on the answers, unless `train_on` says otherwise. With `choices` it
    is a multiple-choice question, used for evaluation only; with `chosen` and `rejected` two answers, of which the
    first is preferred; with `tokens` token ids.
    """

    name: str = label(check=file_name)
    source: Source = setting("where the documents come from", example="python_stdlib()")
    text: str = setting("name of the field with the text of a record", default="text")
    messages: str | None = setting(
        "name of the field with a conversation, a list of messages with `role` and `content`; none: no conversations",
        default=None,
        example='"messages"',
    )
    prompt: str | None = setting(
        "name of the field with the prompt; none: no pairs", default=None, example='"question"'
    )
    response: str | None = setting(
        "name of the field with the response; none: no pairs", default=None, example='"answer"'
    )
    choices: str | None = setting(
        "name of the field with the choices of a question, a list of texts; none: no questions",
        default=None,
        example='"choices"',
        added=True,
    )
    question: str = setting(
        "with `choices`, name of the field with the text before a choice", default="question", added=True
    )
    answer: str = setting(
        "with `choices`, name of the field with the correct choice: its number, from 0, or its text",
        default="answer",
        added=True,
    )
    chosen: str | None = setting(
        "name of the field with the preferred one of two answers, a text or a list of messages; with `prompt`, or "
        "with the prompt inside; none: no preference pairs",
        default=None,
        example='"chosen"',
        added=True,
    )
    rejected: str | None = setting(
        "with `chosen`, name of the field with the other answer", default=None, example='"rejected"', added=True
    )
    label: str | None = setting(
        "with `prompt` and `response`, name of the field that says whether the response is desirable, true or "
        "false; none: no labels",
        default=None,
        example='"label"',
        added=True,
    )
    tokens: str | None = setting(
        "name of the field with the token ids of a document; none: no token ids",
        default=None,
        example='"tokens"',
        added=True,
    )
    mask: str | None = setting(
        "with `tokens`, name of the field with a loss mask, 1 or 0 for each token, or with labels, −100 for a "
        "token without loss; none: all tokens have a loss",
        default=None,
        example='"mask"',
        added=True,
    )
    columns: dict[str, str] = setting(
        "per-token numbers that a loss reads → their field: with `tokens` a list of the same length, else one "
        "number for all tokens of the record",
        default={},
        example='{ advantages: "advantages" }',
        added=True,
    )
    values: dict[str, str] = setting(
        "per-record numbers that a loss reads → their field",
        default={},
        example='{ margin: "margin" }',
        added=True,
    )
    input: str | None = setting(
        "with `prompt`, name of a field whose text is appended to the prompt after an empty line; it may be empty",
        default=None,
        example='"input"',
        added=True,
    )
    tools: str | None = setting(
        "name of the field with the functions that the assistant may call, a list or its JSON text, for the "
        "template; none: no tools",
        default=None,
        example='"tools"',
        added=True,
    )
    system: str | None = setting(
        "name of the field with the system message; it may be empty; none: as in the messages",
        default=None,
        example='"system"',
        added=True,
    )
    drop_system: bool = setting(
        "with `messages`, leave out the system message, for chat templates that accept none", default=False, added=True
    )
    message_train: str | None = setting(
        "with `messages`, key of a message that says whether it is trained on, true or false; messages without it "
        "follow `train_on`; none: all messages do",
        default=None,
        example='"train"',
        added=True,
    )
    message_weight: str | None = setting(
        "with `messages`, key of a message with the weight of its loss, the column `weights`; messages without it "
        "have 1; none: no weights",
        default=None,
        example='"weight"',
        added=True,
    )
    train_on: Literal["auto", "assistant", "last", "all"] = setting(
        "tokens with a loss: all turns of the assistant, its last turn, or all tokens; auto: assistant",
        default="auto",
    )
    template: str | Auto = setting(
        "chat template: `chatml`, `llama3`, `plain`, the path of a Jinja template, or its text; auto: the tokenizer's "
        "template",
        default=AUTO,
        check=file_path,
        example='"chatml"',
    )
    template_arguments: dict[str, bool | int | float | str] = setting(
        "additional variables of the chat template, by name",
        default={},
        example="{ enable_thinking: false }",
        added=True,
    )
    lost: Literal["error", "warn", "allow"] = setting(
        "if the chat template does not write all of a conversation: warn: it is counted, and the record is bad if "
        "a message, a call or the tools are missing entirely; error: the record is bad; allow: it is counted",
        default="warn",
        added=True,
    )
    holdout: Quantity = setting(
        "share of the tokens held out for evaluation, in whole documents; 100%: evaluation only",
        default=Quantity(0, "%"),
        units=("%",),
        check=share,
    )
    oversized: Literal["auto", "split", "truncate", "skip", "error"] = setting(
        "treatment of a document longer than a row: split: continue in the next row; truncate: cut its end; skip: "
        "leave it out; auto: truncate conversations and responses to a prompt, split other documents; preference "
        "pairs and labelled responses are never split but skipped",
        default="auto",
    )
    bad_records: int = setting(
        "unreadable records that are reported and skipped before the run fails", default=0, check=at_least(0)
    )
    deduplicate: float | Literal["none", "exact"] = setting(
        "exact: leave out documents with the same tokens and numbers as an earlier document of the dataset; a number: "
        "those that resemble an earlier one at least so much (share of common runs of 5 words, by MinHash)",
        default="none",
        check=Range(low=0.1, high=1.0),
        example="0.8",
        added=True,
    )
    decontaminate: tuple[str, ...] = setting(
        "files of benchmarks, JSON lines: leave out documents that share 13 words in a row with one of their records",
        default=(),
        example='["bench.jsonl"]',
        added=True,
    )
    min_tokens: int = setting(
        "leave out documents with fewer tokens; of questions with choices, those with a shorter choice",
        default=0,
        check=not_negative,
        example="64",
        added=True,
    )
    without: tuple[int, ...] = setting(
        "documents that are never trained on, by their number as in `xtrain data show`: rows are packed and drawn "
        "with them, and then lose their tokens",
        default=(),
        check=not_negative,
        example="[12, 40]",
        added=True,
    )

    def __attrs_post_init__(self) -> None:
        if self.oversized == "auto":  # the effective value, for plans
            object.__setattr__(self, "oversized", "truncate" if self.is_conversation else "split")

    @property
    def is_conversation(self) -> bool:
        """True if a document is a conversation or one answer to a prompt, without a label."""
        return self.has_answers and not self.has_pairs and self.label is None

    @property
    def has_pairs(self) -> bool:
        """True if a document is a pair of answers."""
        return self.chosen is not None or self.rejected is not None

    @property
    def has_answers(self) -> bool:
        """True if a document is a conversation, an answer to a prompt, or a pair of answers."""
        return self.messages is not None or self.response is not None or self.has_pairs

    @property
    def long_documents(self) -> str:
        """Treatment of a document longer than a row; a pair, or a response with a label, is never split."""
        whole = self.has_pairs or self.label is not None
        return "skip" if whole and self.oversized == "split" else self.oversized

    @property
    def gives_columns(self) -> tuple[str, ...]:
        """Per-token numbers that losses can read, by name."""
        return tuple(sorted({*self.columns, *((WEIGHTS,) if self.message_weight is not None else ())}))

    @property
    def gives_values(self) -> tuple[str, ...]:
        """Per-document numbers that losses can read, by name."""
        return tuple(sorted({*self.values, *(("label",) if self.label is not None else ())}))


# A share of the rows, or how often an epoch of the mixture repeats all rows of a dataset.
Weight = float | Quantity


@frozen
class Mixture:
    """`mixture { … }`: the weight of each dataset: `web = 0.8, code = 0.2`.

    A weight is a share of the training rows; rows are packed nearly full, so it is a share of the tokens too. Weights
    need not add up to 1. In epochs, `web = 1 epoch, code = 3 epochs` says how often an epoch of the mixture repeats
    every row of a dataset. Without this block exactly one dataset is trained on.
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
        "shares are weights to the power of 1 / temperature: above 1 more even, below 1 less even; 0 stays 0; not "
        "with weights in epochs",
        default=1.0,
        check=positive,
    )
    exact: bool = setting(
        "true: every step takes exactly these shares of its rows; false: shares hold over longer stretches, and "
        "single steps differ by a few rows",
        default=False,
        added=True,
    )


# Settings of routers that a phase may change; the architecture has them under the same names.
BIAS_SPEED: Final = "router_bias_speed"
ROUTER: Final = ("router_aux_loss", "router_z_loss", BIAS_SPEED)


def _of_routers(doc: str, name: str, example: str) -> Any:
    return setting(
        f"{doc} in this phase; none: `model {{ router {{ {name} }} }}`",
        default=None,
        check=not_negative,
        example=example,
        added=True,
    )


@frozen
class Phase:
    """`phase NAME { … }`: another mixture or learning rate from a given step until the next phase begins."""

    name: str = label(check=file_name)
    from_: Quantity = setting(
        "start of the phase: a number of steps, tokens or epochs, or a share of the budget",
        units=("steps", "tokens", "epochs", "%"),
        check=share,
        example="90%",
    )
    mix: dict[str, Weight] = setting(
        "weights that differ from `mixture`; other datasets keep their weights",
        default={},
        units=("epochs",),
        check=not_negative,
        example="{ web: 0.3, code: 0.7 }",
    )
    lr_scale: float = setting("factor on the learning rate of the scheduler", default=1.0, check=positive)
    mtp_weight: float | None = setting(
        "loss weight of the modules that predict further tokens in this phase; none: the model's weight",
        default=None,
        check=not_negative,
        example="0.1",
        added=True,
    )
    router_aux_loss: float | None = _of_routers("weight of the load-balancing loss of routers", "aux_loss", "0.0")
    router_z_loss: float | None = _of_routers("weight of the z-loss of routers", "z_loss", "1e-4")
    router_bias_speed: float | None = _of_routers("update step of the load-balancing biases", "bias_speed", "0.0")

    @property
    def router(self) -> dict[str, float]:
        """Settings of routers in this phase, by the name of the architecture's."""
        found = {name: getattr(self, name) for name in ROUTER}
        return {name: value for name, value in found.items() if value is not None}


@frozen
class Batch:
    """`batch { … }`: the rows of one optimizer step."""

    sequence: int = setting("sequence length: tokens in a row (a packed sequence)", check=at_least(2), example="512")
    pad_to: int | None = setting(
        "rows of a microbatch end at the next position divisible by this after their longest document, at `sequence` "
        "at most; none: all rows have `sequence` positions",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        example="128",
        added=True,
    )
    micro: int = setting(
        "microbatch size: rows of a microbatch on a data rank", default=1, check=at_least(1), role=Role.MESH
    )
    accumulate: int | Auto = setting(
        "gradient accumulation: microbatches per step; auto: as `rows` requires, else 1",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    rows: int | Auto = setting(
        "global batch size: rows of a step on all data ranks; auto: micro × accumulate × data ranks",
        default=AUTO,
        check=at_least(1),
    )
    ramp_from: int | None = setting(
        "rows of the first step, growing to `rows` over `ramp`; none: no ramp",
        default=None,
        check=at_least(1),
        example="32",
        added=True,
    )
    ramp: Quantity = setting(
        "with `ramp_from`, length of the ramp: a number of steps or tokens, or a share of the steps of the run",
        default=Quantity(10, "%"),
        units=("steps", "tokens", "%"),
        check=share,
        example="10%",
        added=True,
    )
    neftune: float = setting(
        "noise on embeddings in training (NEFTune, arXiv 2310.05914): uniform, up to this value divided by the "
        "square root of `sequence` times `dim`; 0: none",
        default=0.0,
        check=not_negative,
        example="5",
        added=True,
    )
    prefetch: int = setting(
        "steps to read ahead during a step; 0: none",
        default=2,
        check=at_least(0),
        role=Role.EXECUTION,
    )
    workers: int = setting(
        "data worker processes per rank; 0: a thread of the rank reads",
        default=0,
        check=between(0, 4096),
        role=Role.EXECUTION,
    )
