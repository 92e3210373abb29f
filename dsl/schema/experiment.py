"""What is run, where and on what: `experiment`, `workspace`, `launch`."""

from typing import Literal

from attrs import frozen

from ..quantity import Quantity
from .names import file_name, file_path
from .setting import AUTO, Auto, Role, at_least, label, positive, setting


@frozen
class Experiment:
    """`experiment NAME { … }`: the name, the seed and the length of the training."""

    name: str = label(check=file_name)
    seed: int = setting("seed of initialisation, data order and sampling", default=0, check=at_least(0))
    budget: Quantity = setting(
        "how long to train",
        units=("steps", "tokens", "epochs"),
        check=positive,
        role=Role.BUDGET,
        example="600 steps",
    )


@frozen
class Workspace:
    """`workspace { … }`: where runs are written."""

    root: str = setting(
        "folder that holds all runs, relative to the working folder", default="runs", check=file_path, role=Role.PATH
    )
    lineage: str | None = setting(
        "folder of related runs below the root; the experiment's name unless given",
        default=None,
        check=file_name,
        role=Role.PATH,
    )
    run: str | None = setting(
        "name of the run's folder; made of the code and the configuration unless given",
        default=None,
        check=file_name,
        role=Role.PATH,
    )


@frozen
class Launch:
    """`launch { … }`: the machines the ranks run on."""

    nodes: int | Auto = setting(
        "number of machines; auto: those of `cluster` where it says so, else 1",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    ranks_per_node: int | Auto = setting(
        "ranks on each machine; auto: the devices of `cluster` where it says so, else what the axes of `parallel` "
        "need, spread evenly",
        default=AUTO,
        check=at_least(1),
        role=Role.MESH,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "kind of device a rank computes on; auto: that of `cluster`, else cuda where there is one, else cpu",
        default="auto",
        role=Role.EXECUTION,
    )
    threads: int | Auto = setting(
        "CPU threads of one rank; auto: the cores of the machine shared evenly by its ranks",
        default=AUTO,
        check=at_least(1),
        role=Role.EXECUTION,
    )
    stop_deadline: Quantity = setting(
        "time a rank has, after a stop was asked for, to save and leave before it is ended",
        default=Quantity(300, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
    )
    time_limit: Quantity | None = setting(
        "time after which a start of the run saves and stops, counted from the command",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="4 h",
    )
    stop_at: Quantity | None = setting(
        "steps, tokens, epochs or share of the budget at which the run stops, to be gone on with later",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="1000 steps",
    )
    stop_after: Quantity | None = setting(
        "how much each start of the run trains before it stops",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="200 steps",
    )
    stop_file: str | None = setting(
        "a file that stops the run as soon as it is there, relative to the working folder",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"STOP"',
    )
