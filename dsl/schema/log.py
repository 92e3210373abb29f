"""Who else takes the records of a run: `log`."""

from typing import Literal

from attrs import frozen

from .setting import Role, setting


@frozen
class Wandb:
    """`wandb { project = "…" }`: Weights & Biases, with the package `wandb`; its files are in `wandb/` of the run."""

    project: str | None = setting(
        "W&B project; none: W&B is not used", default=None, role=Role.EXECUTION, example='"pretraining"'
    )
    entity: str | None = setting(
        "user or team of the project; none: that of the login", default=None, role=Role.EXECUTION
    )
    name: str | None = setting(
        "name of the run in W&B; none: the experiment and the run's folder", default=None, role=Role.EXECUTION
    )
    group: str | None = setting("group of runs in W&B; none: no group", default=None, role=Role.EXECUTION)
    tags: tuple[str, ...] = setting("tags of the run in W&B", default=(), role=Role.EXECUTION, example='["baseline"]')
    notes: str | None = setting("notes about the run in W&B", default=None, role=Role.EXECUTION)
    mode: Literal["online", "offline"] = setting(
        "online, or offline: nothing is sent until `wandb sync`", default="online", role=Role.EXECUTION
    )


@frozen
class Log:
    """`log { … }`: TensorBoard and Weights & Biases, in addition to the run's own files."""

    tensorboard: bool = setting(
        "write TensorBoard event files to `tensorboard/` of the run; needs the package `tensorboard`",
        default=False,
        role=Role.EXECUTION,
    )
    wandb: Wandb = setting("Weights & Biases", default=Wandb(), role=Role.EXECUTION)
