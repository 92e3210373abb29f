"""`launcher slurm { … }`: a Slurm job."""

import re
from collections.abc import Iterator, Mapping
from math import ceil
from typing import Final

from xtrain.contracts.actions import PlannedLauncher
from xtrain.dsl.schema.cluster import LAUNCHERS
from xtrain.dsl.schema.component import named
from xtrain.dsl.schema.setting import (
    AUTO,
    Auto,
    at_least,
    execution_setting,
    not_negative,
    one_line,
    positive,
    variable_name,
)
from xtrain.dsl.spec import Spec
from xtrain.dsl.values import Quantity
from xtrain.lazy_attrs import frozen
from xtrain.text.units import plural, seconds_text

# Slurm checks time limits once a minute, and may send a signal this many seconds early.
EARLY: Final = 60
# sbatch accepts no longer time for a signal.
LONGEST_LEAD: Final = 65_535
# Options of sbatch that a job sets already, or that would break the job, short and long → the corresponding setting, if
# any.
OWN_OPTIONS: Final[Mapping[str, str]] = {
    "J job-name": "", "D chdir": "", "o output": "", "a array": "", "W wait": "", "h help": "", "V version": "",
    "parsable": "", "test-only": "", "wrap": "", "open-mode": "",
    "N nodes": "launch.nodes", "n ntasks": "launch.ranks_per_node", "ntasks-per-node": "launch.ranks_per_node",
    "c cpus-per-task": "launcher.cpus", "gpus-per-node": "launcher.gpus", "mem": "launcher.memory",
    "t time": "launcher.time", "signal": "launcher.warn", "requeue": "launcher.requeues",
    "no-requeue": "launcher.requeues", "p partition": "launcher.partition", "A account": "launcher.account",
    "q qos": "launcher.qos",
}  # fmt: skip
_OPTION: Final = re.compile(r"-(?:-(?P<long>[a-z][a-z-]*)|(?P<short>[A-Za-z]))")


@LAUNCHERS.register()
@frozen
class Slurm(PlannedLauncher):
    """`launcher slurm { … }`: a Slurm job, requeued when its time is over."""

    obeys_restarts = True
    kind: str = named("slurm")
    partition: str | None = execution_setting(
        "partition; none: the site's default", default=None, check=one_line, example='"gpu"'
    )
    account: str | None = execution_setting("account to charge; none: the user's default", default=None, check=one_line)
    qos: str | None = execution_setting("quality of service; none: the user's default", default=None, check=one_line)
    time: Quantity | None = execution_setting(
        "time limit of each start of the job; none: the partition's limit",
        default=None,
        units=("seconds",),
        check=positive,
        example="4 h",
    )
    warn: Quantity | Auto = execution_setting(
        "time before the limit at which the run is asked to save and stop (SIGUSR1); auto: launch.stop_deadline plus "
        "one minute",
        default=AUTO,
        units=("seconds",),
        check=positive,
        example="10 min",
    )
    requeues: int = execution_setting(
        "maximum number of requeues when the time limit ends the job before the run has finished",
        default=100,
        check=not_negative,
        example="20",
    )
    gpus: int | Auto = execution_setting(
        "number of GPUs of each node; auto: one for each rank, and none where ranks compute on CPUs",
        default=AUTO,
        check=not_negative,
        example="8",
    )
    cpus: int | None = execution_setting(
        "CPUs of each node; none: all CPUs, with exclusive use of the node",
        default=None,
        check=at_least(1),
        example="64",
    )
    memory: Quantity | None = execution_setting(
        "memory of each node; none: the partition's default",
        default=None,
        units=("bytes",),
        check=positive,
        example="900 GiB",
    )
    container: str | None = execution_setting(
        "container image of the ranks, started by the plugin pyxis (`srun --container-image`); none: no container",
        default=None,
        check=one_line,
        example='"/images/xtrain.sqsh"',
    )
    mounts: tuple[str, ...] = execution_setting(
        "folders mounted in the container, as `/outside:/inside`", default=(), check=one_line, example='["/data:/data"]'
    )
    setup: tuple[str, ...] = execution_setting(
        "lines of bash that each node runs first", default=(), example='["module load cuda"]'
    )
    secrets: tuple[str, ...] = execution_setting(
        "environment variables passed from the submitting shell to the job; they must be set there, and their values "
        "are not written to files",
        default=(),
        check=variable_name,
        example='["WANDB_API_KEY"]',
    )
    options: tuple[str, ...] = execution_setting(
        "additional options of sbatch", default=(), check=one_line, example='["--constraint=h100"]'
    )

    def says(self) -> str:
        said = [f"partition {self.partition}" if self.partition else "the default partition"]
        if isinstance(self.time, Quantity):
            said.append(seconds_text(self.time.value))
        said.append(f"up to {plural(self.requeues, 'requeue')}" if self.requeues else "no requeues")
        return ", ".join(said)

    def mistakes(self, spec: Spec) -> Iterator[tuple[str, str, str]]:
        yield from self.few_gpus(spec)
        lead = self.lead(spec.launch.stop_deadline.value)
        if isinstance(self.time, Quantity) and self.time.value <= lead:
            what = f"the run is asked to stop {seconds_text(lead)} before the end of {seconds_text(self.time.value)}"
            yield (
                "time",
                what,
                f"give it more time than that, or set warn or launch.stop_deadline lower than {lead} s",
            )
        if lead > LONGEST_LEAD:
            what = f"the run would be asked to stop {seconds_text(lead)} before the end, and Slurm allows at most "
            yield "warn", what + seconds_text(LONGEST_LEAD), "set warn, or launch.stop_deadline, lower than that"
        for option in self.options:
            if (problem := _problem_of_option(option)) is not None:
                yield "options", f"`{option}` {problem[0]}", problem[1]
        for mount in self.mounts:
            if not all(mount.partition(":/")[::2]) or not mount.startswith("/") or "," in mount:
                yield "mounts", f"`{mount}` is not a pair of folders", "write it as `/outside:/inside`"

    def idle(self) -> Iterator[tuple[str, str]]:
        if self.container is None:
            yield "mounts", "no `container` is given"

    def lead(self, stop_deadline: float) -> int:
        """Return the seconds before the time limit at which the signal is sent. stop_deadline: seconds."""
        return ceil(stop_deadline + EARLY if isinstance(self.warn, Auto) else self.warn.value)


def _problem_of_option(option: str) -> tuple[str, str] | None:
    """Return the problem of an sbatch option and the fix; None for a valid option."""
    found = _OPTION.match(option)
    if found is None:
        return "is not an option of sbatch", "write it as `--name=value`"
    for names, said_by in OWN_OPTIONS.items():
        *short, long = names.split()
        if found["long"] == long or found["short"] in short:
            if said_by:
                return f"repeats {said_by}", "set that, and remove the option"
            return "does not go with the job of a run", "remove it"
    return None
