"""At which step a run begins that goes on from a state of another one, and whether its budget reaches behind that."""

import re
from pathlib import Path
from typing import Final

from ..dsl.spec import Spec
from .arithmetic import Arithmetic
from .rules.findings import Findings
from .stops import limit_args

# The name of a full checkpoint, with its optimizer steps.
CHECKPOINT: Final = re.compile(r"ckpt-s(\d{12})")
# The pointers to one.
NAMES: Final = ("latest", "best")


def begins_at(path: Path) -> int | None:
    """The steps behind the state that `checkpoint.from` means: a checkpoint, a pointer to one, or the latest of a
    folder of checkpoints or of a run. None where names do not tell; whether it is sound the run finds out."""
    if path.suffix == ".pt":
        path = path.with_suffix("") if path.stem in NAMES else path.parent
    try:
        for pointer in (path, path / "latest", path / "checkpoints" / "latest"):
            if pointer.name in NAMES and pointer.is_file():
                match = CHECKPOINT.fullmatch(pointer.read_text(encoding="utf-8").strip())
                return int(match[1]) if match else None
        match = CHECKPOINT.fullmatch(path.name)
        return int(match[1]) if match and path.is_dir() else None
    except (OSError, UnicodeDecodeError):
        return None


def check_beginning(spec: Spec, batch: Arithmetic, found: Findings) -> None:
    """A run counts its steps on from those of the state that it begins with.

    No more than a warning: a run that has checkpoints of its own goes on from these, wherever the other one is by now.
    """
    origin = spec.checkpoint.from_
    step = begins_at(Path(origin)) if origin is not None else None
    if step is None:
        return
    begins = f"{origin} is a state of step {step:,}"
    if batch.steps is not None and step >= batch.steps:
        message = f"{begins} and the budget ends with step {batch.steps:,}: a run that begins there trains nothing"
        hint = (
            f"the steps of the state count: use more, such as `budget = {step + batch.steps} steps`; "
            "for its weights alone, from step 0: checkpoint.pretrained"
        )
        found.warn("checkpoint.from", "W608", "experiment.budget", message, hint)
    stop = limit_args(spec.launch, batch).get("stop_at")
    if stop is not None and step >= stop:
        message = f"{begins} and stop_at is step {stop:,}: a run that begins there stops before its first step"
        found.warn("checkpoint.from.stop_at", "W608", "launch.stop_at", message, f"use more than {step} steps")
