"""How the model learns: `loss`, `optimizer`, `scheduler`, `checkpoint`."""

from typing import Literal

from attrs import frozen

from ..metric import Metric
from ..quantity import Quantity
from .names import file_path
from .setting import Role, at_least, momentum_pair, not_negative, positive, setting, share


@frozen
class Loss:
    """`loss cross_entropy { … }`: the mean over all valid tokens of the step, on all ranks together."""

    kind: Literal["cross_entropy"]
    z_loss: float = setting("weight of the mean squared log-sum-exp of the logits", default=0.0, check=not_negative)
    chunk: Quantity = setting(
        "logits are computed in chunks of at most this size in fp32",
        default=Quantity(2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
    )


@frozen
class Optimizer:
    """`optimizer adamw { … }`: the optimizer; no weight decay for norms, biases and embeddings."""

    kind: Literal["adamw"]
    lr: float = setting("peak learning rate, reached after warm-up", check=positive, example="3e-4")
    betas: tuple[float, ...] = setting("exponential decay of the two moments", default=(0.9, 0.95), check=momentum_pair)
    eps: float = setting("added to the denominator for numerical stability", default=1e-8, check=positive)
    weight_decay: float = setting("decoupled weight decay of matrices", default=0.1, check=not_negative)
    clip: float | None = setting(
        "gradients are clipped to this global norm; none: no clipping", default=1.0, check=positive
    )


@frozen
class Scheduler:
    """`scheduler KIND { … }`: the learning-rate schedule; without this block the rate is constant."""

    kind: Literal["cosine", "linear", "constant", "wsd"]
    warmup: Quantity = setting(
        "length of the linear warm-up", default=Quantity(0, "steps"), units=("steps", "epochs", "%"), check=share
    )
    floor: Quantity = setting(
        "learning rate at the end, as a share of `lr`",
        default=Quantity(0, "%"),
        units=("%",),
        check=share,
        only=("cosine", "linear", "wsd"),
    )
    decay: Quantity = setting(
        "length of the final decay",
        default=Quantity(10, "%"),
        units=("steps", "epochs", "%"),
        check=share,
        only=("wsd",),
    )
    shape: Literal["linear", "cosine", "sqrt"] = setting("shape of the final decay", default="linear", only=("wsd",))


@frozen
class Checkpoint:
    """`checkpoint { … }`: what a run starts from, how checkpoints are saved, and how many are kept."""

    from_: str | None = setting(
        "start from the full state of this checkpoint, or of the latest checkpoint of this other run",
        default=None, check=file_path, example='"runs/a/b"',
    )  # fmt: skip
    resume: bool = setting("resume from the latest checkpoint of this run", default=True, role=Role.EXECUTION)
    pretrained: str | None = setting(
        "start from the weights alone of this checkpoint or run", default=None, check=file_path,
        example='"runs/a/b"',
    )  # fmt: skip
    verify: Literal["content", "sizes"] = setting(
        "what is compared before a checkpoint is loaded: checksums of all files, or their sizes",
        default="content",
        role=Role.EXECUTION,
    )
    enabled: bool = setting("false: no checkpoints are saved; loading still works", default=True, role=Role.CADENCE)
    backend: Literal["dcp", "file"] = setting(
        "dcp: every rank writes its part; file: one process writes one file, which torch.load reads",
        default="dcp",
        role=Role.EXECUTION,
    )
    mode: Literal["sync", "async", "async_pinned"] = setting(
        "sync: training waits; async: a copy in host memory is written in the background, pinned with async_pinned",
        default="sync",
        role=Role.EXECUTION,
    )
    overlap: Literal["wait", "latest"] = setting(
        "a save that is due during another: wait for the other, or put the save off until the other is done",
        default="wait",
        role=Role.CADENCE,
    )
    keep: int | None = setting(
        "number of newest checkpoints to keep, besides the best; none: all",
        default=3,
        check=at_least(1),
        role=Role.CADENCE,
    )
    best: Metric | None = setting(
        "the checkpoint with the lowest value of this metric is the best", default=None, role=Role.CADENCE,
        example="eval.web.loss",
    )  # fmt: skip
    model: bool = setting(
        "also save the weights alone when the run has ended, for publishing", default=True, role=Role.CADENCE
    )
    failures: int | None = setting(
        "failed saves in a row after which the run ends; none: never", default=3, check=at_least(1), role=Role.EXECUTION
    )
