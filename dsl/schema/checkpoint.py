"""`checkpoint`: what a run starts from, and what it saves."""

from typing import Literal

from attrs import frozen

from xtrain.dsl.metric import MeasuredNumber
from xtrain.dsl.schema.names import file_path
from xtrain.dsl.schema.setting import Role, at_least, setting


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
        "number of newest checkpoints to keep, and the best if it is not one of them; none: all",
        default=3,
        check=at_least(1),
        role=Role.CADENCE,
    )
    best: MeasuredNumber | None = setting(
        "the checkpoint with the best value of this metric of an evaluation or a hook is the best", default=None,
        role=Role.CADENCE, example="eval.web.loss",
    )  # fmt: skip
    best_is: Literal["auto", "lowest", "highest"] = setting(
        "the better value of `best`; auto: lowest of losses, highest of accuracies and rewards, unknown of others",
        default="auto",
        role=Role.CADENCE,
        added=True,
    )
    model: bool = setting(
        "also save the weights alone when the run has ended, for publishing", default=True, role=Role.CADENCE
    )
    failures: int | None = setting(
        "failed saves in a row after which the run ends; none: never", default=3, check=at_least(1), role=Role.EXECUTION
    )

    @property
    def best_is_highest(self) -> bool:
        """Whether a higher value of `best` is better."""
        return "highest" in (self.best_is, self.best.better if self.best and self.best_is == "auto" else None)
