"""What a rank held when it ran out of memory, in `logs/memory-<attempt>/`: nobody can ask it later.

It is looked at while the error is still being handled, so that what was alive where it was raised is alive still.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch

from xtrain.planner.units import bytes_text
from xtrain.runtime.profiling.found import found, planned_of
from xtrain.runtime.profiling.places import file_of, write_json, write_whole
from xtrain.runtime.profiling.snapshot_text import of_rank
from xtrain.runtime.state import Resources

# What allocators say, those of torch for a CPU and a GPU, of libraries of NVIDIA, of C++ and of the system.
SAYS: Final = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
NOTE: Final = """\
Looked at when the error had been raised: what the step had made by then is among `other`, but for what a graph of
autograd alone keeps. The plan's figures are those of the peak of a step.
"""


def ran_out(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that there is no memory left."""
    cause: BaseException | None = error
    while cause is not None:
        says_so = isinstance(cause, RuntimeError | OSError) and SAYS.search(str(cause)) is not None
        if says_so or isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def write(directory: Path, attempt: int, resources: Resources, error: BaseException, place: str) -> str:
    """Write what this rank holds, beside what is planned of it; what is to be said of that, in a line.

    place: the node under way. Never raises: what cannot be written is missing.
    """
    if "rank" not in resources:  # it has not begun yet
        return ""
    try:
        return _written(directory / "logs" / f"memory-{attempt}", resources, error, place)
    except Exception as fault:  # there is no memory left, or no disk
        return f"the memory report could not be written: {_line(fault)}"


def _written(folder: Path, resources: Resources, error: BaseException, place: str) -> str:
    rank, step = resources["rank"], resources["progress"].step
    model, optimizer, ema = (resources.get(name) for name in ("model", "optimizer", "ema"))
    own = found(rank, step, model, optimizer, ema, planned_of(resources["plan"], rank))
    own |= {"node": place, "error": _line(error)}
    write_json(file_of(folder, rank.rank, "json"), own)
    page = file_of(folder, rank.rank, "md")
    write_whole(page, lambda beside: beside.write_text(_page(own), encoding="utf-8"))
    if rank.device.type == "cuda":
        with suppress(Exception):
            pickle = file_of(folder, rank.rank, "pickle")
            write_whole(pickle, lambda beside: torch.cuda.memory._dump_snapshot(str(beside)))
    parts = [f"the rank held {bytes_text(sum(own['held'].values()))} in tensors"]
    if own["allocator"] is not None:
        parts.append(f"{bytes_text(own['allocator']['reserved_bytes'])} reserved on the device")
    elif "resident_bytes" in own["process"]:
        parts.append(f"{bytes_text(own['process']['resident_bytes'])} as a process")
    parts.append(f"and {bytes_text(own['planned']['allocated'])} are planned at the peak of a step")
    return f"{', '.join(parts)}; report: {page}"


def _page(own: dict[str, Any]) -> str:
    lines = [f"# Rank {own['rank']} out of memory in step {own['step'] + 1:,}, {own['node']}", "", own["error"], ""]
    others = [
        f"- {bytes_text(each['bytes'])}, {each['type']} of {' × '.join(map(str, each['shape'])) or 'one number'}"
        for each in own["largest_others"]
    ]
    return "\n".join([*lines, *of_rank(own), "", NOTE, "The largest of `other`:", "", *(others or ["- none"]), ""])


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
