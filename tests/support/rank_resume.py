"""What tests of resuming put into ranks: notes of what each step read, death in the middle of one, what was loaded."""

import hashlib
import json
import os
import random
import signal
import time
from functools import wraps
from typing import Any

import numpy as np
import torch
from attrs import asdict, evolve
from rank_mutations import StepCall, mutation, rebind
from torch import Tensor

from xtrain.runtime.base import device as streams
from xtrain.runtime.base.ops import OPS, load_ops
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.store.checkpoints import CheckpointFolder


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
    """Every rank writes what it holds after resuming into the folder `loaded`, as `forked_rank.save` does."""
    load_ops()
    original = OPS["setup.resume"]

    @wraps(original.function)
    def resume(**given: Any) -> Any:
        from forked_rank import save

        result = original.function(**given)
        directory, rank = given["records"].directory, given["rank"].rank
        save(given["model"], given["optimizer"], directory, rank, "loaded", given.get("ema"))
        return result

    OPS["setup.resume"] = evolve(original, function=resume)


@mutation
def noise(left_out: str = "") -> None:
    """Every rank adds noise from the streams of torch, Python and numpy to its pieces of the weights, in each step.

    left_out: a stream that is not put back when a run goes on.
    """

    def shake(call: StepCall, given: dict[str, Any]) -> StepCall:
        pieces = [parameter for group in given["optimizer"].param_groups for parameter in group["params"]]

        @torch.no_grad()
        def run(step: Step) -> None:
            for parameter in pieces:
                drawn = torch.rand(()).item() + random.gauss(0.0, 1.0) + np.random.standard_normal()
                parameter.to_local().add_(1e-4 * drawn)
            call(step)

        return run

    rebind("step.optimizer", shake)  # a state that is being saved may not change before
    if left_out:
        original = streams.put_back
        vars(streams)["put_back"] = lambda found, device: original(
            {name: state for name, state in found.items() if name != left_out}, device
        )
