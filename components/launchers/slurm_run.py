"""The job of a run in Slurm: its script, and Slurm commands."""

import os
import re
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from shlex import quote
from subprocess import TimeoutExpired
from typing import Any, Final

from xtrain.dsl.schema.cluster import Launcher
from xtrain.dsl.values import Quantity
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.jobs.submitted import PLAN_FILE, EndedJob, Job, QueueState
from xtrain.runtime.observe.stopping import answer_of
from xtrain.version import __version__

SCRIPT: Final = "job.sh"
# Slurm states of a job that has not started, and of a job that is running.
WAITING: Final = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
THERE: Final = ("CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT")
# Options of sbatch whose variable (SBATCH_…) has another name, or which other options contradict.
OTHER_VARIABLES: Final = {
    "time": ("TIMELIMIT",), "mem": ("MEM_PER_NODE", "MEM_PER_CPU", "MEM_PER_GPU"), "requeue": ("NO_REQUEUE",),
    "no-requeue": ("REQUEUE",), "cpus-per-task": ("EXCLUSIVE",),
}  # fmt: skip
# Variables of sbatch that do not fit a run's job.
NEVER: Final = ("ARRAY_INX", "WAIT")

BODY: Final = """\
set -u

# In the background, so that a signal to this shell is handled while the run continues.
start_run() {{
  {srun} &
  step=$!
  # The signal may have come while the run was being started.
  [ "$over" -eq 0 ] || tell_run
  # A signal ends the wait, and not the run.
  while
    wait "$step"
    code=$?
    [ "$code" -gt 128 ] && kill -0 "$step" 2> /dev/null
  do :; done
  step=
}}

tell_run() {{
  [ -z "$step" ] || kill -USR1 "$step" 2> /dev/null
}}

step=
over=0
trap 'over=1; tell_run' USR1

for start in $(seq 0 {restarts}); do
  # A later start of this job resumes the run, whatever the spec says about new commands.
  export XTRAIN_RESTART=$((start + ${{SLURM_RESTART_COUNT:-0}}))
  start_run
  # 1 is a run that failed, above 128 one that was killed; all else would come out the same again.
  [ "$code" -eq 1 ] || [ "$code" -gt 128 ] || break
  [ "$over" -eq 0 ] || break
done
{again}exit "$code"
"""
AGAIN: Final = """\
# 75: saved and stopped; 138: SIGUSR1 came before the run could handle it. The run resumes when the job starts again.
if [ "$over" -eq 1 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {requeues} ]; then
  case "$code" in
    75 | 138) scontrol requeue "$SLURM_JOB_ID" ;;
  esac
fi
"""
# The job ends with the first machine. On other machines a killed launcher is restarted and brings its replica groups
# back; signals go to the launcher, not to this shell.
OF_GROUPS: Final = """\
[ "$SLURM_NODEID" -ne 0 ] || exec {run}
trap : USR1 TERM INT
while {run}; [ "$?" -eq 137 ]; do sleep 1; done
exit 0"""
ELEMENT: Final = """\
scripts=({scripts})
logs=({logs})
exec bash "${{scripts[$SLURM_ARRAY_TASK_ID]}}" >> "${{logs[$SLURM_ARRAY_TASK_ID]}}" 2>&1
"""


class SlurmJobs:
    """Slurm jobs; an id is a Slurm number, for a trial with its array index: `17_2`."""

    def files(self, job: Job) -> dict[str, str]:
        return {SCRIPT: _script(job)}

    def submit(self, job: Job) -> str:
        _check_secrets(job.launcher)
        return _submit(job.files / SCRIPT)

    def states(self, launcher: Launcher, ids: Sequence[str]) -> dict[str, QueueState]:
        # squeue prints a line per array element, and none for jobs that ended some time ago.
        answer = answer_of(
            "squeue", "--noheader", "--array", "--states=all", "--jobs", ",".join(ids), "--format", "%i %T %r",
            refused=["Invalid job id"],
        )  # fmt: skip
        lines = [words for line in (answer or "").splitlines() if len(words := line.split(maxsplit=2)) > 1]
        found = {
            id: QueueState(
                over=word not in (*WAITING, *THERE),
                word=word,
                why="".join(why).strip().removeprefix("None"),
                waits=word in WAITING,
            )
            for id, word, *why in lines
        }
        return {id: found.get(id, QueueState(over=True, word="gone")) for id in ids}

    def cancel(self, launcher: Launcher, id: str) -> None:
        answer_of("scancel", id)

    # Trials: elements of an array, whose name is that under which they are found ------------------------------------

    def trial_files(self, jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> dict[Path, str]:
        scripts = {job.files / SCRIPT: _script(job) for job in jobs}
        return {_array_file(jobs, name): _array(jobs, name, logs), **scripts}

    def submit_trials(self, jobs: Sequence[Job], name: str) -> list[str]:
        _check_secrets(jobs[0].launcher)
        return _elements(_submit(_array_file(jobs, name)), jobs)

    def find_trials(self, jobs: Sequence[Job], name: str) -> list[str] | None:
        # %F: the number shared by all elements of an array.
        answer = answer_of("squeue", "--noheader", "--states=all", "--name", name, "--format", "%F")
        numbers = (answer or "").split()
        return _elements(numbers[0], jobs) if numbers else None

    def stop(self, launcher: Launcher, id: str) -> None:
        # Signal the run, not the script: it saves, exits with 75, and is not requeued.
        for option in ("--state=PENDING", "--signal=TERM"):
            answer_of("scancel", option, id, refused=["Invalid job id"])

    def collect(self, launcher: Launcher, id: str) -> EndedJob:
        answer = answer_of("scontrol", "--oneliner", "show", "job", id, refused=["Invalid job id", "not found"])
        found = re.search(r"\bExitCode=(\d+):(\d+)", answer or "")
        if found is None:
            return EndedJob()
        code, number = map(int, found.groups())
        return EndedJob(code=-number if number else code)


LAUNCHER: Final = SlurmJobs()


def _check_secrets(launcher: Any) -> None:
    missing = [name for name in launcher.secrets if not os.environ.get(name)]
    if missing:
        message = f"launcher.secrets names {' and '.join(missing)}, and there is no such environment variable here"
        raise EnvironmentFault("X709", f"{message}; set it where the job is submitted")


def _submit(script: Path) -> str:
    hint = "see with `squeue --me` whether there is one"
    try:
        answer = answer_of("sbatch", "--parsable", str(script), environment=_environment(script)) or ""
    except EnvironmentFault as fault:
        if isinstance(fault.__cause__, TimeoutExpired):
            raise EnvironmentFault(fault.code, f"{fault}, and may have submitted a job; {hint}") from fault
        raise
    # The number alone on its line, or with a cluster's name; some sites print other lines too.
    numbers = re.findall(r"^(\d+)(?:;.*)?$", answer, re.MULTILINE)
    if not numbers:
        message = f"sbatch accepted {script} without printing a job number: {answer.strip() or 'no output'}"
        raise EnvironmentFault("X461", f"{message}; {hint}")
    return numbers[-1]


def _environment(script: Path) -> dict[str, str]:
    """Return this process's environment without variables by which sbatch would override the script, and without those
    of an `srun --pty` shell, which would make the run believe it is inside that step."""
    lines = re.findall(r"^#SBATCH '?--([a-z-]+)", script.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in lines for name in OTHER_VARIABLES.get(line, (line.replace("-", "_").upper(),))}
    dropped = {f"SBATCH_{name}" for name in (*names, *NEVER)}
    return {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("SLURM_PTY_")
    }


def _elements(array: str, jobs: Sequence[Job]) -> list[str]:
    return [f"{array}_{number}" for number in range(len(jobs))]


def _array_file(jobs: Sequence[Job], name: str) -> Path:
    return jobs[0].files.parent / f"{name}.sh"


def _array(jobs: Sequence[Job], name: str, logs: Sequence[Path]) -> str:
    """Return the script of a job array. Each element is the job of a trial, and writes to the trial's log."""
    options = _options(jobs[0], name, _array_file(jobs, name).with_name(f"{name}.out"))
    head = "\n".join(f"#SBATCH {each}" for each in (*options, f"--array=0-{len(jobs) - 1}"))
    made = f"# Generated by xtrain {__version__} for plans {', '.join(job.plan.id for job in jobs)}."
    words = " ".join(quote(str(job.files / SCRIPT)) for job in jobs)
    files = " ".join(quote(str(each)) for each in logs)
    return f"#!/bin/bash\n{head}\n{made}\n{ELEMENT.format(scripts=words, logs=files)}"


def _script(job: Job) -> str:
    launcher = job.launcher
    asks_itself = any(node.op == "event.requeue" for node in job.plan.nodes)
    again = AGAIN.format(requeues=launcher.requeues) if launcher.requeues and not asks_itself else ""
    # On a single machine, and with replica groups, xtrain itself restarts ranks.
    restarts = job.plan.launch["restarts"] if job.nodes > 1 and not job.nodes_may_leave else 0
    head = "\n".join(f"#SBATCH {option}" for option in _options(job, job.plan.name, job.files / "slurm-%j.out"))
    made = f"# Generated by xtrain {__version__} for plan {job.plan.id}."
    return f"#!/bin/bash\n{head}\n{made}\n{BODY.format(srun=_srun(job, launcher), restarts=restarts, again=again)}"


def _options(job: Job, name: str, output: Path) -> list[str]:
    """Return the options of sbatch. output: its name may contain Slurm patterns, its folder may not. Raises
    EnvironmentFault."""
    launcher = job.launcher
    for folder in (job.folder, output.parent):
        if "\n" in str(folder):  # an option ends with its line
            message = f"a script of Slurm cannot name the folder {str(folder)!r}, which has a line break in its name"
            raise EnvironmentFault("X461", f"{message}; use a folder without one")
    lead = launcher.lead(job.plan.launch["stop_deadline_seconds"])
    folder = str(output.parent).replace("\\", "\\\\").replace("%", "%%")
    named = (("partition", launcher.partition), ("account", launcher.account), ("qos", launcher.qos))
    return [
        f"--job-name={quote(name)}",
        f"--chdir={quote(str(job.folder))}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={job.gpus}"] if job.gpus else []),
        f"--cpus-per-task={launcher.cpus}" if launcher.cpus else "--exclusive",
        *([f"--mem={ceil(launcher.memory.value / 2**20)}M"] if isinstance(launcher.memory, Quantity) else []),
        *(f"--{name}={quote(value)}" for name, value in named if value),
        *([f"--time={_time(launcher.time)}"] if isinstance(launcher.time, Quantity) else []),
        f"--signal=B:USR1@{lead}",
        *(["--no-kill"] if job.nodes_may_leave else []),
        "--requeue" if launcher.requeues else "--no-requeue",
        "--open-mode=append",
        *(["--export=ALL"] if launcher.secrets else []),
        f"--output={quote(f'{folder}/{output.name}')}",
        *(quote(option) for option in launcher.options),
    ]


def _time(time: Quantity) -> str:
    """Return minutes and seconds, rounded up: Slurm reads 0:00 as no limit."""
    minutes, seconds = divmod(ceil(time.value), 60)
    return f"{minutes}:{seconds:02}"


def _srun(job: Job, launcher: Any) -> str:
    """Return the command that starts xtrain once per node, which starts the ranks there. A rank that exits does not end
    the others at once, because all of them are about to save. With replica groups, a machine that exits ends no
    other."""
    leaving = ["--no-kill", "--wait=0"] if job.nodes_may_leave else [f"--wait={job.patience}"]
    words = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *leaving]
    words += [f"--cpus-per-task={launcher.cpus}"] if launcher.cpus else []
    xtrain = f"{quote(job.python)} -P -m xtrain"
    if launcher.container:
        xtrain = "xtrain"
        words += [f"--container-image={quote(launcher.container)}", f"--container-workdir={quote(str(job.folder))}"]
        mounts = ",".join((f"{job.folder}:{job.folder}", f"{job.files}:{job.files}", *launcher.mounts))
        words += [f"--container-mounts={quote(mounts)}", "--no-container-mount-home"]
    run = f"{xtrain} run {quote(str(job.files / PLAN_FILE))} --accept-drift --ui plain"
    run = OF_GROUPS.format(run=run) if job.nodes_may_leave else f"exec {run}"
    return " ".join([*words, "bash", "-c", quote("\n".join((*launcher.setup, run)))])
