"""Who else takes the records of a run: `log`."""

from typing import Literal

from attrs import frozen

from .setting import Role, setting


@frozen
class Wandb:
    """`wandb { project = "…" }`: Weights & Biases, with the package `wandb`; files lie in `wandb/` of the run."""

    project: str | None = setting(
        "project the run belongs to; none: nothing is sent", default=None, role=Role.EXECUTION, example='"pretraining"'
    )
    entity: str | None = setting(
        "user or team the project belongs to; none: that of the login", default=None, role=Role.EXECUTION
    )
    name: str | None = setting(
        "how the run is called there; none: the experiment and the run's folder", default=None, role=Role.EXECUTION
    )
    group: str | None = setting("runs that are shown together; none: in none", default=None, role=Role.EXECUTION)
    tags: tuple[str, ...] = setting("words to find the run by", default=(), role=Role.EXECUTION, example='["baseline"]')
    notes: str | None = setting("a few sentences about the run", default=None, role=Role.EXECUTION)
    mode: Literal["online", "offline"] = setting(
        "offline: nothing is sent, `wandb sync` does so later", default="online", role=Role.EXECUTION
    )


@frozen
class Log:
    """`log { … }`: who takes the records of a run besides its own files, which are always written."""

    tensorboard: bool = setting(
        "write event files for TensorBoard to `tensorboard/` of the run, with the package `tensorboard`",
        default=False,
        role=Role.EXECUTION,
    )
    wandb: Wandb = setting("Weights & Biases", default=Wandb(), role=Role.EXECUTION)
