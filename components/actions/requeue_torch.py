"""`event.requeue`: ask Slurm to requeue the job."""

import os
import subprocess

from xtrain.records.events import RequeueEvent
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.nn.batch import Step, StepCall
from xtrain.runtime.observe.records import Records

PATIENCE_SECONDS = 60


@op("event.requeue")
def requeue(rank: Rank, records: Records, progress: Progress) -> StepCall:
    """Run `scontrol requeue` with this job's id on the first rank; warn if it fails."""

    def run(step: Step) -> None:
        if not rank.leads:
            return
        job = os.environ.get("SLURM_JOB_ID")
        failure = "this is not a Slurm job: SLURM_JOB_ID is not set" if job is None else ask_slurm(job)
        if failure is None and job is not None:
            records.event(RequeueEvent(step=progress.step, job=job))
        else:
            records.warn(f"requeue: {failure}", step=progress.step)

    return run


def ask_slurm(job: str) -> str | None:
    """Requeue a job; return None, or the reason of a failure."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    except FileNotFoundError:
        return "the command scontrol was not found"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"`{' '.join(command)}` failed: {error}"
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        return f"`{' '.join(command)}` failed with exit code {done.returncode}: {said or 'no output'}"
    return None
