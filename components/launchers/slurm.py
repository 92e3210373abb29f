"""`launcher slurm { … }`: a job of Slurm."""

from collections.abc import Iterator
from typing import Any, Final

from attrs import frozen

from ...dsl.quantity import Quantity
from ...dsl.schema.component import named
from ...dsl.schema.launchers import LAUNCHERS, Launcher
from ...dsl.schema.names import some_text
from ...dsl.schema.setting import AUTO, Auto, Role, at_least, not_negative, positive, setting
from ...planner.units import plural, seconds_text

# Slurm looks once a minute whose time is nearly over, and may send a signal so many seconds early.
EARLY: Final = 60


@LAUNCHERS.register()
@frozen
class Slurm(Launcher):
    """`launcher slurm { … }`: a job of Slurm, which is put back into the queue when its time is over."""

    kind: str = named("slurm")
    partition: str | None = setting(
        "partition; none: that of the site", default=None, check=some_text, role=Role.EXECUTION, example='"gpu"'
    )
    account: str | None = setting(
        "account that is charged; none: that of the user", default=None, check=some_text, role=Role.EXECUTION
    )
    qos: str | None = setting(
        "quality of service; none: that of the user", default=None, check=some_text, role=Role.EXECUTION
    )
    time: Quantity | None = setting(
        "time limit of a start of the job; none: that of the partition",
        default=None,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="4 h",
    )
    warn: Quantity | Auto = setting(
        "how long before its time limit the run is asked to save and stop (SIGUSR1); auto: launch.stop_deadline and a "
        "minute",
        default=AUTO,
        units=("seconds",),
        check=positive,
        role=Role.EXECUTION,
        example="10 min",
    )
    requeues: int = setting(
        "how often the job is put back into the queue when its time was over before the run was",
        default=100,
        check=not_negative,
        role=Role.EXECUTION,
        example="20",
    )
    gpus: int | Auto = setting(
        "number of GPUs of each node; auto: one for each rank, and none where ranks compute on CPUs",
        default=AUTO,
        check=not_negative,
        role=Role.EXECUTION,
        example="8",
    )
    cpus: int | None = setting(
        "CPUs of each node; none: all of them, and nobody else is on the node",
        default=None,
        check=at_least(1),
        role=Role.EXECUTION,
        example="64",
    )
    memory: Quantity | None = setting(
        "memory of each node; none: what the partition gives",
        default=None,
        units=("bytes",),
        check=positive,
        role=Role.EXECUTION,
        example="900 GiB",
    )
    container: str | None = setting(
        "image in which ranks run, by the plugin pyxis (`srun --container-image`); none: they run as the job does",
        default=None,
        check=some_text,
        role=Role.EXECUTION,
        example='"/images/xtrain.sqsh"',
    )
    mounts: tuple[str, ...] = setting(
        "folders that are seen in the container, as `/outside:/inside`",
        default=(),
        role=Role.EXECUTION,
        example='["/data:/data"]',
    )
    setup: tuple[str, ...] = setting(
        "lines of bash that each node runs first", default=(), role=Role.EXECUTION, example='["module load cuda"]'
    )
    secrets: tuple[str, ...] = setting(
        "environment variables that must be set where the job is submitted, and are set in it; their values are "
        "written nowhere",
        default=(),
        role=Role.EXECUTION,
        example='["WANDB_API_KEY"]',
    )
    options: tuple[str, ...] = setting(
        "further options of sbatch", default=(), role=Role.EXECUTION, example='["--constraint=h100"]'
    )

    def says(self) -> str:
        said = [f"partition {self.partition}" if self.partition else "the usual partition"]
        if isinstance(self.time, Quantity):
            said.append(seconds_text(self.time.value))
        said.append(f"up to {plural(self.requeues, 'requeue')}" if self.requeues else "not put back into the queue")
        return ", ".join(said)

    def mistakes(self, launch: Any) -> Iterator[tuple[str, str, str]]:
        lead = self.lead(launch.stop_deadline.value)
        if isinstance(self.time, Quantity) and self.time.value <= lead:
            what = f"the run is asked to stop {seconds_text(lead)} before the end of {seconds_text(self.time.value)}"
            yield (
                "time",
                what,
                f"give it more time than that, or set warn or launch.stop_deadline lower than {lead:g} s",
            )
        for option in self.options:
            if not option.startswith("-"):
                yield "options", f"`{option}` is no option of sbatch", "write it as `--name=value`"

    def lead(self, stop_deadline: float) -> float:
        """Seconds before the time limit at which the signal is asked for. stop_deadline: seconds."""
        return stop_deadline + EARLY if isinstance(self.warn, Auto) else self.warn.value
