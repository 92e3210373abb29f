"""`state.json` of a checkpoint: counters, what it rests on, and size and checksum of every file beside it.

Written last: a folder without it, or with one that does not fit its files, is no checkpoint.
"""

import json
import stat
from pathlib import Path
from typing import Annotated, Any

import msgspec

from xtrain.planner.canonical import SEAL, digest
from xtrain.planner.graph.checkpoint_names import STATE
from xtrain.regular_files import read_json
from xtrain.runtime.checkpoint.checksums import DIGEST_BYTES, file_checksums
from xtrain.runtime.files import durable

LATE_METRICS = "metrics.json"
# The file without which there is nothing to read: of many files the one that says what lies where, or the only one.
METADATA = ".metadata"
TENSORS = "state.pt"
FORMAT = 2


Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class _Average(msgspec.Struct):
    updates: Count
    decay: float | None = None


class _BegunFrom(msgspec.Struct):
    path: str
    step: Count


class _Stored(msgspec.Struct):
    """Kinds of the values of a sidecar that are shown or computed with, each of which may be left out."""

    step: Count = 0
    tokens: Count = 0
    metrics: dict[str, float] = {}
    time: Seconds | None = None
    plan_id: str | None = None
    config_id: str | None = None
    world_size: Count = 0
    steps: Count | None = None
    epoch: float | None = None
    epoch_ended: Count | None = None
    ema: _Average | None = None
    begun_from: _BegunFrom | None = None
    made_by: dict[str, str] | None = None
    model: dict[str, Any] | None = None
    tensors: dict[str, list[Count]] | list[str] | None = None
    params: str | None = None
    nonfinite: dict[str, Any] | None = None
    record: dict[str, Any] | None = None
    files: dict[str, Any] = {}


def write_sidecar(folder: Path, state: dict[str, Any], checksums: dict[str, str]) -> None:
    """Seal a folder in which everything else has been written. `checksums`: of every file in it. Raises OSError."""
    files = {name: {"bytes": (folder / name).stat().st_size, "checksum": sum} for name, sum in checksums.items()}
    content = {"format": FORMAT, **state, "files": files}
    durable.write(folder / STATE, json.dumps({**content, "seal": _seal(content)}, indent=1))


def read_sidecar(folder: Path) -> dict[str, Any]:
    """Raises OSError or ValueError where there is none that can be read."""
    content = read_json(folder / STATE)
    if not isinstance(content, dict):
        raise ValueError("not an object")
    try:
        msgspec.convert(content, _Stored)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    return content


def write_late_metrics(folder: Path, metrics: dict[str, float]) -> None:
    """Keep what was measured of a state when it was saved already, beside what is sealed. Raises OSError."""
    durable.write(folder / LATE_METRICS, json.dumps(metrics, indent=1))


def read_late_metrics(folder: Path) -> dict[str, float]:
    """Metric → value; empty where nothing was measured behind the save, or that cannot be read."""
    try:
        found = read_json(folder / LATE_METRICS)
    except (OSError, ValueError):
        return {}
    numbers = isinstance(found, dict) and all(isinstance(value, int | float) for value in found.values())
    return found if numbers else {}


def flaws(folder: Path, *, content: bool = False, part: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a published checkpoint; empty if nothing is.

    Sizes are compared, which takes no time; with `content` checksums too, which reads all of it. part: (i, n) reads the
    i-th of n parts of the files, for n processes that share the work.
    """
    try:
        state = read_sidecar(folder)
        files = {name: _recorded(record) for name, record in state["files"].items()}
    except FileNotFoundError:
        return [f"{STATE} is missing"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{STATE} cannot be read"]
    if "seal" in state and state["seal"] != _seal({name: value for name, value in state.items() if name != "seal"}):
        return [f"{STATE} has changed since it was written"]
    if METADATA not in files and TENSORS not in files:
        return [f"{STATE} names neither {METADATA} nor {TENSORS}"]
    if strange := next((name for name in files if Path(name).name != name), None):
        return [f"{STATE} names {strange!r}, which is no file of the checkpoint"]
    found = [flaw for name, (size, _) in files.items() if (flaw := _size_flaw(folder / name, size))]
    if found or not content:
        return found
    # Dealt by size, so that no process has all the large ones.
    names = sorted(files, key=lambda name: (files[name][0], name))[part[0] :: part[1]]
    known = [name for name in names if files[name][1]]  # the first format had no checksums
    try:
        sums = file_checksums(folder / name for name in known)
    except OSError as error:
        return [f"{error.filename or folder} cannot be read: {error.strerror}"]
    return [f"{name} has changed since it was written" for name in known if sums[name] != files[name][1]]


def total_bytes(state: dict[str, Any]) -> int:
    """Of all files but the sidecar itself."""
    return sum(_recorded(record)[0] for record in state["files"].values())


def _recorded(record: Any) -> tuple[int, str]:
    """(bytes, checksum) of a file; the first format had only the bytes."""
    return (record, "") if isinstance(record, int) else (record["bytes"], record["checksum"])


def _size_flaw(file: Path, size: int) -> str:
    try:
        mode, found = file.stat().st_mode, file.stat().st_size
    except OSError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(mode):
        return f"{file.name} is not a regular file"
    return "" if found == size else f"{file.name} has {found:,} of {size:,} bytes"


def _seal(content: dict[str, Any]) -> str:
    return digest(content, SEAL, size=DIGEST_BYTES)
