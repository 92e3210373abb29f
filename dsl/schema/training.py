"""How the model learns: `loss`, `optimizer`, `scheduler`, `checkpoint`."""

from typing import Literal

from attrs import frozen

from ..metric import Metric
from ..quantity import Quantity
from .names import file_path
from .setting import Role, at_least, momentum_pair, not_negative, positive, setting, share


@frozen
class Loss:
    """`loss cross_entropy { … }`: summed over valid tokens, divided once by their number in the whole step."""

    kind: Literal["cross_entropy"]
    z_loss: float = setting("weight of the mean squared log-sum-exp of the logits", default=0.0, check=not_negative)
    chunk: Quantity = setting(
        "largest piece of fp32 logits alive at once",
        default=Quantity(2**30, "bytes"),
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
    )


@frozen
class Optimizer:
    """`optimizer adamw { … }`: updates parameters from gradients; norms, biases and embeddings do not decay."""

    kind: Literal["adamw"]
    lr: float = setting("peak learning rate, reached after warm-up", check=positive, example="3e-4")
    betas: tuple[float, ...] = setting("decay of the two moments", default=(0.9, 0.95), check=momentum_pair)
    eps: float = setting("added to the root of the second moment", default=1e-8, check=positive)
    weight_decay: float = setting("decoupled decay of matrices", default=0.1, check=not_negative)
    clip: float | None = setting("largest global gradient norm; none: no clipping", default=1.0, check=positive)


@frozen
class Scheduler:
    """`scheduler KIND { … }`: the learning rate as a closed form of the step."""

    kind: Literal["cosine", "linear", "constant", "wsd"]
    warmup: Quantity = setting(
        "linear rise to the peak", default=Quantity(0, "steps"), units=("steps", "epochs", "%"), check=share
    )
    floor: Quantity = setting(
        "learning rate at the end, as a share of the peak",
        default=Quantity(0, "%"),
        units=("%",),
        check=share,
        only=("cosine", "linear", "wsd"),
    )
    decay: Quantity = setting(
        "length of the final fall",
        default=Quantity(10, "%"),
        units=("steps", "epochs", "%"),
        check=share,
        only=("wsd",),
    )
    shape: Literal["linear", "cosine", "sqrt"] = setting("form of the final fall", default="linear", only=("wsd",))


@frozen
class Checkpoint:
    """`checkpoint { … }`: where a run begins, how its state is saved, and what is kept."""

    from_: str | None = setting(
        "begin with the full state of this checkpoint, or of the latest of this run", default=None, check=file_path,
        example='"runs/a/b"',
    )  # fmt: skip
    resume: bool = setting("go on from the latest checkpoint of this run", default=True, role=Role.EXECUTION)
    pretrained: str | None = setting(
        "begin with the weights of this checkpoint or run, and nothing else of it", default=None, check=file_path,
        example='"runs/a/b"',
    )  # fmt: skip
    verify: Literal["content", "sizes"] = setting(
        "what is compared before a checkpoint is loaded: checksums of all files, or their sizes",
        default="content",
        role=Role.EXECUTION,
    )
    enabled: bool = setting("whether anything is saved; reading is not touched", default=True, role=Role.CADENCE)
    backend: Literal["dcp", "file"] = setting(
        "dcp: every rank writes its part; file: one process writes one file, which torch.load reads",
        default="dcp",
        role=Role.EXECUTION,
    )
    mode: Literal["sync", "async", "async_pinned"] = setting(
        "sync: training waits; async: it goes on beside a copy in host memory, page-locked with async_pinned",
        default="sync",
        role=Role.EXECUTION,
    )
    overlap: Literal["wait", "latest"] = setting(
        "a save that is due while one is being written: wait for that, or save as soon as it is done",
        default="wait",
        role=Role.CADENCE,
    )
    keep: int | None = setting(
        "newest checkpoints that are kept, the best not counted; none: all",
        default=3,
        check=at_least(1),
        role=Role.CADENCE,
    )
    best: Metric | None = setting(
        "metric whose least value at a save makes that the best one", default=None, role=Role.CADENCE,
        example="eval.web.loss",
    )  # fmt: skip
    model: bool = setting(
        "save the weights alone when the run has ended, for publishing", default=True, role=Role.CADENCE
    )
    failures: int | None = setting(
        "failed saves in a row that end the run; none: none do", default=3, check=at_least(1), role=Role.EXECUTION
    )
