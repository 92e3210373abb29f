"""What tests of resuming put into ranks: notes of what each step read, death in the middle of one, what was loaded."""

import hashlib
import json
import os
import signal
import time
from functools import wraps
from typing import Any

from attrs import asdict, evolve
from gang_mutations import StepCall, mutation, rebind
from torch import Tensor

from xtrain.runtime.checkpoint.layout import CheckpointFolder
from xtrain.runtime.ops import OPS, load_ops
from xtrain.runtime.state import Step


@mutation
def noted(die_in: int = 0, saved: int = 0) -> None:
    """Every rank adds a digest of what each step gives it to read to `samples/<rank>.jsonl`.

    die_in: all ranks are killed in this step, counted from 1, when its gradients are there and its update is not, and
    not before `latest` names the checkpoint of step `saved`. 0: nobody dies.
    """
    directories = []

    def write_down(call: StepCall, given: dict[str, Any]) -> StepCall:
        directories.append(given["records"].directory)
        folder = given["records"].directory / "samples"
        folder.mkdir(exist_ok=True)

        def run(step: Step) -> None:
            call(step)
            with (folder / f"{given['rank'].rank}.jsonl").open("a") as lines:
                lines.write(json.dumps([step.index + 1, _digest(step)]) + "\n")

        return run

    def die(call: StepCall, given: dict[str, Any]) -> StepCall:
        folder = CheckpointFolder(directories[0] / "checkpoints")

        def run(step: Step) -> None:
            if step.index + 1 == die_in:
                while folder.named() != folder.path(saved).name:
                    time.sleep(0.005)
                os.kill(os.getpid(), signal.SIGKILL)
            call(step)

        return run

    rebind("step.fetch", write_down)
    if die_in:
        rebind("step.optimizer", die)


def _digest(step: Step) -> str:
    """Of every tensor of every microbatch, in order."""
    found = hashlib.sha256()
    for microbatch in step.microbatches:
        for name, value in sorted(asdict(microbatch, recurse=False).items()):
            if isinstance(value, Tensor):
                found.update(f"{name} {tuple(value.shape)}".encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


@mutation
def loaded() -> None:
    """Every rank writes what it holds right after it has resumed into the folder `loaded`, as `gang_rank.save` does."""
    load_ops()
    original = OPS["setup.resume"]

    @wraps(original.function)
    def resume(**given: Any) -> Any:
        from gang_rank import save

        result = original.function(**given)
        save(given["model"], given["optimizer"], given["records"].directory, given["rank"].rank, "loaded")
        return result

    OPS["setup.resume"] = evolve(original, function=resume)
