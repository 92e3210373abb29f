"""Memory of a rank by purpose, as JSON and text, and the report of a rank that ran out of memory."""

import gc
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from attrs import asdict, define, field
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from xtrain.plan.estimates import Memory
from xtrain.plan.plan import Plan
from xtrain.runtime.base.device import MemoryNow, peak_bytes
from xtrain.runtime.base.state import Rank, Resources
from xtrain.runtime.nn.averages import WeightAverages
from xtrain.runtime.nn.axes import own_part
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.text.units import bytes_text, table

PARTIAL = ".partial"


def folder_of(directory: Path) -> Path:
    """Return the folder of all reports."""
    return directory / "profile"


def file_of(folder: Path, rank: int, ending: str) -> Path:
    """Return the file of a rank."""
    return folder / f"rank-{rank:05d}.{ending}"


def from_first(rank: Rank, number: Callable[[], int]) -> int:
    """Share a number that only the first rank knows. Collective."""
    return int(summed(rank, number() if rank.is_first else 0)[0])


def summed(rank: Rank, *numbers: float) -> list[float]:
    """Sum numbers over all ranks. Collective."""
    if rank.world_size == 1:
        return list(numbers)
    shared = torch.tensor(numbers, dtype=torch.float64, device=rank.device)
    dist.all_reduce(shared)
    return shared.tolist()


def count_reports(directory: Path, begin: str) -> int:
    """Count the folders with a name prefix: repeated steps must not overwrite earlier reports."""
    with suppress(OSError):
        return sum(path.name.startswith(begin) for path in folder_of(directory).iterdir())
    return 0


def report_name(name: str, number: int) -> str:
    """Return the name of a folder that `number` others precede."""
    return f"{name}-{number + 1}" if number else name


def sweep(directory: Path) -> None:
    """Remove unfinished files of killed processes."""
    with suppress(OSError):
        for path in folder_of(directory).glob(f"*/*{PARTIAL}"):
            path.unlink(missing_ok=True)


def write_whole(path: Path, write: Callable[[Path], Any]) -> int:
    """Write a file under a temporary name and rename it; return its bytes. A failed write leaves no file.

    Raises any error of `write`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + PARTIAL)
    try:
        write(beside)
        size = beside.stat().st_size
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return size


def write_json(path: Path, content: Any) -> int:
    """Write JSON; return the bytes of the file. Raises OSError."""
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    return write_whole(path, lambda beside: beside.write_text(text, encoding="utf-8"))


# In the order in which shared storage is counted.
CATEGORIES: Final = ("parameters", "gradients", "optimizer", "averages", "unsharded", "buffers", "other")
LARGEST: Final = 10


@define
class MemoryByCategory:
    """Bytes by category: on the computing device, and in host memory if that is another device.

    optimizer: the moments; step counters are `other`. unsharded: parameters gathered by FSDP. other: all other tensors
    known to Python, without those that only autograd holds. largest: the largest of the others, as (bytes, type,
    shape).
    """

    device: dict[str, int] = field(factory=lambda: dict.fromkeys(CATEGORIES, 0))
    host: dict[str, int] = field(factory=lambda: dict.fromkeys(CATEGORIES, 0))
    largest: list[tuple[int, str, list[int]]] = field(factory=list)


def memory_by_category(
    model: ModelParts | None, optimizer: Optimizer | None, averages: Iterable[Tensor], device: torch.device
) -> MemoryByCategory:
    """Measure all live tensors. model, optimizer: None before they exist. averages: of the parameters."""
    memory, seen = MemoryByCategory(), set[int]()
    # The optimizer has this rank's pieces, even while FSDP has gathered the model's parameters.
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    else:
        parameters = [] if model is None else [*model.parameters()]
    named: dict[str, Iterable[Tensor | None]] = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters],
        "optimizer": () if optimizer is None else moments(optimizer),
        "averages": averages,
        "unsharded": () if model is None else _gathered(model),
        "buffers": [] if model is None else [buffer for _, buffer in model.named_buffers()],
        "other": _alive(),
    }
    others: list[tuple[int, str, list[int]]] = []
    for category in CATEGORIES:
        for tensor in named[category]:
            piece = None if tensor is None else own_part(tensor)
            size = _new_bytes(piece, seen)
            if piece is None or not size:
                continue
            where = memory.device if piece.device.type == device.type else memory.host
            where[category] += size
            if category == "other":
                others.append((size, str(piece.dtype).removeprefix("torch."), list(piece.shape)))
    memory.largest = sorted(others, reverse=True)[:LARGEST]
    return memory


def moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that an optimizer keeps, without its step counters."""
    for state in optimizer.state.values():
        yield from (tensor for tensor in state.values() if tensor.dim())


def _gathered(model: ModelParts) -> Iterator[Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            group: Any = module._get_fsdp_state()._fsdp_param_group
            for parameter in group.fsdp_params if group is not None else ():
                yield from parameter.all_gather_outputs


def _alive() -> Iterator[Tensor]:
    """Yield all tensors of this process that Python knows."""
    # By type: `isinstance` can run code of the objects.
    return (candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor))


def _new_bytes(piece: Tensor | None, seen: set[int]) -> int:
    """Return the bytes of a storage that is not in `seen` yet; 0 without one."""
    if piece is None or piece.device.type == "meta":
        return 0
    try:
        storage = piece.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):
        return 0  # without a storage: sparse tensors and wrappers
    if not address or address in seen:
        return 0
    seen.add(address)
    return size


STATES: Final = ("parameters", "gradients", "optimizer", "averages")
NOTES: Final = """\
Measured between two steps: memory that only a step needs is missing, and the plan's figures for it are peaks. `other`
is all other tensors that Python knows.
"""


def snapshot_text(ranks: Sequence[Mapping[str, Any]], *, node: str, world: int, note: str = "") -> str:
    """Return the page for the JSON of each rank, in order. note: a sentence about when it was taken."""
    head = ranks[0]
    device = "GPU" if head["allocator"] else "CPU"
    lines = [f"# Memory after step {head['step']:,}", ""]
    lines += [f"`{node}`, {len(ranks)} of {world:,} ranks; memory of the {device}. {note}".rstrip(), ""]
    lines += [f"## Rank {head['rank']}", ""]
    lines += [*rank_table(head), "", NOTES]
    rows = [
        (
            str(rank["rank"]),
            *(bytes_text(_bytes(rank, name)) for name in STATES),
            bytes_text(_bytes(rank, "other")),
            bytes_text(_most(rank)),
            bytes_text(rank["planned"]["allocated"]),
        )
        for rank in ranks
    ]
    peak = "peak allocated" if head["allocator"] else "peak resident"
    lines += ["## All that were looked at", ""]
    lines += [*table(("rank", *STATES, "other", peak, "planned peak"), rows, texts=0), ""]
    return "\n".join(lines)


def rank_table(one: Mapping[str, Any]) -> list[str]:
    """Return the table of one rank: planned and held memory."""
    return table(("what", "planned", "held"), _rows(one), texts=1)


def _rows(one: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    planned = one["planned"]
    rows = [
        (name, bytes_text(planned[name]), bytes_text(_bytes(one, name)))
        for name in STATES
        if planned[name] or _bytes(one, name)
    ]
    rows += [
        (name, bytes_text(planned[name]) if name in planned else "", bytes_text(_bytes(one, name)))
        for name in ("unsharded", "buffers", "other")
    ]
    rows += [
        (f"{name}, at the peak", bytes_text(planned[name]), "")
        for name in ("unreduced", "activations", "loss", "working", "reserve")
        if planned[name]
    ]
    known = sum(one["held"].values())
    rows.append(("all of it", bytes_text(planned["total"]), bytes_text(known)))
    allocator: Mapping[str, int] = one["allocator"] or {}
    rows += [(f"allocator: {_words(name)}", "", bytes_text(size)) for name, size in allocator.items()]
    rows += [(f"process: {_words(name)}", "", bytes_text(size)) for name, size in one["process"].items()]
    return rows


def _bytes(one: Mapping[str, Any], name: str) -> int:
    """Return the bytes held on the device, plus those that the plan keeps in host memory."""
    host: Mapping[str, int] = one["held_in_host"] or {}
    return one["held"][name] + (host.get(name, 0) if name in STATES else 0)


def _most(one: Mapping[str, Any]) -> int:
    return one["allocator"]["peak_allocated_bytes"] if one["allocator"] else one["process"]["peak_bytes"]


def _words(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def rank_memory(
    rank: Rank,
    step: int,
    model: ModelParts | None,
    optimizer: Optimizer | None,
    ema: WeightAverages | None,
    planned: Memory,
) -> dict[str, Any]:
    """Measure this rank. planned: of its pipeline coordinate. Resources that set-up has not created hold nothing."""
    device = rank.device
    averages = averages_of(model, ema)
    seen = memory_by_category(model, optimizer, averages, device)
    on_gpu = device.type == "cuda"
    return {
        "rank": rank.rank,
        "step": step,
        "time": time.time(),
        "device": device.type,
        "coordinates": rank.coordinates,
        "held": seen.device,
        "held_in_host": seen.host if on_gpu else None,
        "largest_others": [{"bytes": size, "type": type, "shape": shape} for size, type, shape in seen.largest],
        "allocator": _allocator(device, sum(seen.device.values())) if on_gpu else None,
        "process": {**MemoryNow(torch.device("cpu")).take(), "peak_bytes": peak_bytes(torch.device("cpu"))},
        "planned": {**asdict(planned), "allocated": planned.allocated_bytes, "total": planned.total_bytes},
    }


def planned_of(plan: Plan, rank: Rank) -> Memory:
    """Return the planned memory of the largest rank with this rank's pipeline coordinate."""
    return next(rank_class.memory for rank_class in plan.estimates.classes if rank_class.pp == rank.coordinates["pp"])


def _allocator(device: torch.device, known: int) -> dict[str, int]:
    """Return the statistics of a GPU's allocator. unknown_bytes: allocated and held by no tensor known to Python."""
    stats = torch.cuda.memory_stats(device)
    allocated = stats["allocated_bytes.all.current"]
    return {
        "allocated_bytes": allocated,
        "reserved_bytes": stats["reserved_bytes.all.current"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "unknown_bytes": allocated - known,
    }


def averages_of(model: ModelParts | None, ema: WeightAverages | None) -> list[Tensor]:
    """Return the averages of parameters, as the plan counts them."""
    if model is None or ema is None:
        return []
    return [ema.averages[name] for name, _ in model.named_parameters()]


# Messages of allocators: torch on CPU and GPU, NVIDIA's libraries, C++ and the system.
SAYS: Final = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory|bad_alloc|_ALLOC_FAILED",
    re.IGNORECASE,
)
NOTE: Final = """\
Measured after the error was raised: tensors that the step had made by then are in `other`, except those that only
autograd holds. The plan's figures are peaks of a step.
"""


def ran_out(error: BaseException) -> bool:
    """Return True if an error, or a cause of it, means that memory ran out."""
    cause: BaseException | None = error
    while cause is not None:
        says_so = isinstance(cause, RuntimeError | OSError) and SAYS.search(str(cause)) is not None
        if says_so or isinstance(cause, MemoryError | torch.OutOfMemoryError):
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def write(directory: Path, attempt: int, resources: Resources, error: BaseException, place: str) -> str:
    """Write the planned and held memory of this rank; return a line that summarizes it.

    place: the running node. Never raises: a file that cannot be written is left out.
    """
    if "rank" not in resources:  # before set-up
        return ""
    try:
        folder = directory / "logs" / f"memory-{attempt}"
        return write_memory(folder, resources, _line(error), place, why="out of memory")
    except Exception as fault:  # no memory left, or no disk
        return f"the memory report could not be written: {_line(fault)}"


def write_memory(folder: Path, resources: Resources, error: str, place: str, why: str = "failed") -> str:
    """Write the planned and held memory of this rank as `rank-N.json`, `.md` and, on a GPU, `.pickle`; return a line
    that summarizes it. error: as a line. why: the page was written, in words."""
    rank, step = resources["rank"], resources["progress"].step
    model, optimizer, ema = (resources.get(name) for name in ("model", "optimizer", "ema"))
    own = rank_memory(rank, step, model, optimizer, ema, planned_of(resources["plan"], rank))
    own |= {"node": place, "error": error}
    write_json(file_of(folder, rank.rank, "json"), own)
    page = file_of(folder, rank.rank, "md")
    write_whole(page, lambda beside: beside.write_text(_page(own, why), encoding="utf-8"))
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


def _page(own: dict[str, Any], why: str) -> str:
    lines = [f"# Rank {own['rank']} {why} in step {own['step'] + 1:,}, {own['node']}", "", own["error"], ""]
    others = [
        f"- {bytes_text(tensor['bytes'])}, {tensor['type']} of {' × '.join(map(str, tensor['shape'])) or 'one number'}"
        for tensor in own["largest_others"]
    ]
    return "\n".join([*lines, *rank_table(own), "", NOTE, "The largest of `other`:", "", *(others or ["- none"]), ""])


def _line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
