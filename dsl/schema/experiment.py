"""What is run, where and on what: `experiment`, `workspace`, `launch`."""

from typing import Literal

from attrs import frozen

from xtrain.dsl.quantity import Quantity
from xtrain.dsl.schema.names import file_name, file_path
from xtrain.dsl.schema.setting import AUTO, Auto, Role, between, label, positive, rank_count, seed_range, setting


@frozen
class Experiment:
    """`experiment NAME { … }`: name, seed and length of the training."""

    name: str = label(check=file_name)
    seed: int = setting("random seed of initial weights, data order and sampling", default=0, check=seed_range)
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
        "folder of all runs, relative to the working folder", default="runs", check=file_path, role=Role.PATH
    )
    lineage: str | None = setting(
        "folder of related runs below the root; none: the experiment's name",
        default=None,
        check=file_name,
        role=Role.PATH,
    )
    run: str | None = setting(
        "name of the run's folder; none: a hash of the code and of the experiment",
        default=None,
        check=file_name,
        role=Role.PATH,
    )


@frozen
class Launch:
    """`launch { … }`: nodes, ranks and devices of a run, and when it stops."""

    nodes: int | Auto = setting(
        "number of nodes; auto: those of `cluster` if given there, else 1",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    ranks_per_node: int | Auto = setting(
        "ranks per node; auto: the devices of `cluster` if given there, else what the axes of `parallel` "
        "need, spread evenly",
        default=AUTO,
        check=rank_count,
        role=Role.MESH,
    )
    device: Literal["auto", "cpu", "cuda"] = setting(
        "device of a rank; auto: that of `cluster`, else cuda if available, else cpu",
        default="auto",
        role=Role.EXECUTION,
    )
    threads: int | Auto = setting(
        "CPU threads of a rank; auto: the cores of the node divided by its ranks",
        default=AUTO,
        check=between(1, 4096),
        role=Role.EXECUTION,
    )
    stop_deadline: Quantity = setting(
        "time for a rank to save and exit after a stop request, before it is killed",
        default=Quantity(300, "seconds"),
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
    )
    time_limit: Quantity | None = setting(
        "time after which the run saves and stops, counted from the start of the command",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="4 h",
    )
    stop_at: Quantity | None = setting(
        "steps, tokens, epochs or share of the budget at which the run stops; it can be resumed later",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="1000 steps",
    )
    stop_after: Quantity | None = setting(
        "training after which each start of the command stops",
        default=None,
        units=("steps", "tokens", "epochs", "%"),
        check=positive,
        role=Role.EXECUTION,
        example="200 steps",
    )
    stop_file: str | None = setting(
        "the run stops as soon as this file exists, relative to the working folder",
        default=None,
        check=file_path,
        role=Role.EXECUTION,
        example='"STOP"',
    )
