"""Recording of some steps with torch's profiler, and where the time went according to the trace."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from attrs import define, field, frozen
from torch.profiler import ProfilerActivity, record_function
from torch.profiler.profiler import _KinetoProfile

from xtrain.runtime.observe.heartbeat import HeartbeatWriter

STEP = "ProfilerStep#"
"""Prefix of a step's number in a trace: the name that tools for traces look for."""


@define(kw_only=True, eq=False)
class ProfileRecorder:
    """Recorder of one trace: `prepare` some steps earlier to warm up, `start`, `begin_step`s, `stop`, `write`.

    Each may raise errors of torch and of the disk.
    """

    beat: HeartbeatWriter | None
    profiler: Any
    _step: Any = field(default=None, init=False)
    _node: Any = field(default=None, init=False)
    _state: str = field(default="", init=False)  # prepared or started; empty before and after

    @classmethod
    def of(
        cls, device: torch.device, *, shapes: bool, stacks: bool, memory: bool, beat: HeartbeatWriter | None = None
    ) -> "ProfileRecorder":
        """Create a recorder for this rank's CPU, and its GPU if it has one."""
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        profiler = _KinetoProfile(activities=activities, record_shapes=shapes, with_stack=stacks, profile_memory=memory)
        return cls(profiler=profiler, beat=beat)

    def prepare(self) -> None:
        """Start observing operations without keeping them."""
        self.profiler.prepare_trace()
        self._state = "prepared"

    def start(self) -> None:
        """Start keeping operations."""
        if not self._state:
            self.prepare()
        self.profiler.start_trace()
        self._state = "started"
        if self.beat is not None:
            self.beat.on_node = self._at

    def begin_step(self, number: int) -> None:
        """End the current step and begin another."""
        self._leave()
        self._step = record_function(f"{STEP}{number}")
        self._step.__enter__()

    def stop(self) -> None:
        """Stop keeping operations; free a prepared trace."""
        state, self._state = self._state, ""
        if self.beat is not None:
            self.beat.on_node = None
        if state == "prepared":
            self.profiler.start_trace()  # torch can only end a prepared trace by starting it
        self._leave()
        if state:
            self.profiler.stop_trace()

    def write(self, path: Path) -> None:
        """Write the trace in Chrome's format."""
        self.profiler.export_chrome_trace(str(path))

    def _at(self, node: str) -> None:
        """Begin a node of the plan."""
        if self._node is not None:
            self._node.__exit__(None, None, None)
        self._node = record_function(node)
        self._node.__enter__()

    def _leave(self) -> None:
        node, step, self._node, self._step = self._node, self._step, None, None
        for annotation in (node, step):
            if annotation is not None:
                annotation.__exit__(None, None, None)


class TornTrace(Exception):
    """File without a complete trace."""


@frozen
class TraceEntry:
    """Entry of a trace. begin, end: seconds of the trace's clock. line: its thread or stream."""

    category: str
    name: str
    begin: float
    end: float
    line: tuple[str, str]


WANTED = frozenset({"cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "user_annotation"})
_HEAD = '"traceEvents"'


def entries_of(path: Path) -> Iterator[TraceEntry]:
    """Yield every entry that a summary uses. Raises TornTrace if the trace is incomplete, OSError."""
    text = path.read_text(encoding="utf-8", errors="replace")
    at = text.find("[", text.find(_HEAD))
    if _HEAD not in text or at < 0 or not text.rstrip().endswith("}"):
        raise TornTrace(f"{path} holds no whole trace")
    decode = json.JSONDecoder(strict=False).raw_decode
    try:
        at = _next(text, at + 1)
        while text[at] != "]":
            content, at = decode(text, at)
            if content.get("ph") == "X" and content.get("cat") in WANTED:
                begin = content["ts"] / 1e6
                line = (str(content.get("pid")), str(content.get("tid")))
                yield TraceEntry(content["cat"], content["name"], begin, begin + content.get("dur", 0) / 1e6, line)
            at = _next(text, at)
            at = _next(text, at + 1) if text[at] == "," else at
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise TornTrace(f"{path} cannot be read as a trace: {error}") from error


def _next(text: str, at: int) -> int:
    """Return the next position that is not blank."""
    while text[at].isspace():
        at += 1
    return at


# Purpose of an operation.
Kind = Literal["matmul", "attention", "communication", "copies", "other"]

# Tried in this order. GPU kernels are named by cuBLAS, CUTLASS, cuDNN, flash attention, NCCL and Inductor.
_COMMUNICATION: Final = re.compile(
    r"nccl|gloo:|^c10d::|^_c10d_functional::|record_param_comms|AllReduce|ReduceScatter|AllGather"
)
_ATTENTION: Final = re.compile(r"attention|flash|fmha|sdpa|flex_", re.IGNORECASE)
_MATMUL: Final = re.compile(
    r"^aten::(_?addmm|_?mm|bmm|baddbmm|addbmm|addmv|matmul|linear|linear_backward|einsum|mv|dot|_grouped_mm|_scaled_mm"
    r"|_scaled_grouped_mm|_addmm_activation|mkldnn_\w*linear\w*)$"
    r"|gemm|gemv|nvjet|cutlass|cublas|wgmma|_mm_|matmul|^triton_tem|splitKreduce|dot_kernel",
    re.IGNORECASE,
)
_COPIES: Final = re.compile(r"copy|memcpy|memset|^aten::(_?to|clone|contiguous|pin_memory|zero_|fill_)$", re.IGNORECASE)
# They only call others: their own time is waiting, or nothing.
_CALLERS: Final = re.compile(r"^(autograd::|torch::autograd::)|Backward\d*$|^[^:]*$")
# These compute by themselves.
_COMPILED: Final = re.compile(r"^(Torch-Compiled Region|CompiledFunction|## Call Compiled)")

# Set of instants: sorted, disjoint intervals, n rows (begin, end).
Intervals = np.ndarray
NOTHING: Intervals = np.empty((0, 2))

MOST_OPERATORS: Final = 30
# Priority of kinds that overlap. GPU kernels run at the same time, and a copy hidden by them costs nothing; CPU
# operations contain one another.
_ON_GPU: Final[tuple[Kind, ...]] = ("attention", "matmul", "other", "copies")
_ON_CPU: Final[tuple[Kind, ...]] = ("attention", "matmul", "copies", "other")
_NODE: Final = re.compile(r"(step|tick|event)\.[\w.-]+")


@frozen(kw_only=True)
class Operator:
    """Totals of one operation or kernel. seconds: without the operations that it calls."""

    name: str
    kind: Kind
    calls: int
    seconds: float


@frozen(kw_only=True)
class Summary:
    """Time of several steps. device: `gpu` or `cpu`, whose time it is. Seconds are totals over all steps.

    shares: of `seconds`, by kind, adding up to 1; `exposed` is communication that nothing overlapped, `idle` time in
    which nothing ran. communication: all of it, hidden or not. nodes: by node of the plan, on the CPU.
    """

    rank: int
    first: int
    last: int
    device: str
    seconds: float
    step_seconds: tuple[float, ...]
    shares: dict[str, float]
    communication: float
    nodes: dict[str, float]
    operators: tuple[Operator, ...]


@define
class _TraceTotal:
    calls: int = 0
    seconds: float = 0.0


@define
class _Sorted:
    """Entries of a trace by type."""

    steps: dict[int, TraceEntry] = field(factory=dict)
    marks: list[TraceEntry] = field(factory=list)
    operations: list[TraceEntry] = field(factory=list)
    kernels: list[TraceEntry] = field(factory=list)
    transfers: list[TraceEntry] = field(factory=list)


def summarise(entries: Iterable[TraceEntry], *, rank: int, first: int, last: int) -> Summary:
    """Summarize steps first to last of a trace. Raises TornTrace if it lacks some of them."""
    entries_by_type = _sorted(entries)
    steps = [entries_by_type.steps[number] for number in range(first, last + 1) if number in entries_by_type.steps]
    if len(steps) != last - first + 1:
        raise TornTrace(f"the trace has {len(steps)} of steps {first} to {last}")
    begin, end = steps[0].begin, steps[-1].end
    if entries_by_type.kernels:
        end = max(end, max(kernel.end for kernel in entries_by_type.kernels))
        totals, busy = _of_kernels(entries_by_type.kernels), _busy(entries_by_type.kernels)
        order = _ON_GPU
    else:
        totals, busy = _of_operations(entries_by_type)
        order = _ON_CPU
    nodes: dict[str, float] = defaultdict(float)
    for mark in entries_by_type.marks:
        nodes[mark.name] += max(min(mark.end, end) - max(mark.begin, begin), 0.0)
    window: dict[Kind, Intervals] = {kind: clipped(intervals, begin, end) for kind, intervals in busy.items()}
    seconds = end - begin
    operators = [
        Operator(name=name, kind=kind_of(name), calls=total.calls, seconds=total.seconds)
        for name, total in sorted(totals.items(), key=lambda item: -item[1].seconds)[:MOST_OPERATORS]
    ]
    return Summary(
        rank=rank,
        first=first,
        last=last,
        device="gpu" if entries_by_type.kernels else "cpu",
        seconds=seconds,
        step_seconds=tuple(step.end - step.begin for step in steps),
        shares=_shares(window, order, seconds),
        communication=length(window.get("communication", NOTHING)) / seconds,
        nodes=dict(nodes),
        operators=tuple(operators),
    )


def _sorted(entries: Iterable[TraceEntry]) -> _Sorted:
    entries_by_type = _Sorted()
    for entry in entries:
        if entry.category == "cpu_op":
            entries_by_type.operations.append(entry)
        elif entry.category != "user_annotation":
            entries_by_type.kernels.append(entry)
        elif entry.name.startswith(STEP):
            entries_by_type.steps[int(entry.name.removeprefix(STEP))] = entry
        elif entry.name.startswith("gloo:"):
            entries_by_type.transfers.append(entry)
        elif _NODE.fullmatch(entry.name):
            entries_by_type.marks.append(entry)
    return entries_by_type


def _busy(entries: Iterable[TraceEntry]) -> dict[Kind, Intervals]:
    pairs: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for entry in entries:
        pairs[kind_of(entry.name)].append((entry.begin, entry.end))
    return {kind: union(intervals) for kind, intervals in pairs.items()}


def _shares(busy: dict[Kind, Intervals], order: Sequence[Kind], seconds: float) -> dict[str, float]:
    """Return the shares of time by kind, each instant counted for the first kind in `order` that has it."""
    taken, shares = NOTHING, {}
    for kind in (*order, "communication"):
        own = busy.get(kind, NOTHING)
        shares[kind] = length(minus(own, taken)) / seconds
        taken = union([*taken, *own])  # pyright: ignore[reportArgumentType]
    ordered = {kind: shares[kind] for kind in ("matmul", "attention", "other", "copies")}
    return {**ordered, "exposed": shares["communication"], "idle": max(1 - length(taken) / seconds, 0.0)}


def _of_kernels(kernels: Iterable[TraceEntry]) -> dict[str, _TraceTotal]:
    totals: dict[str, _TraceTotal] = defaultdict(_TraceTotal)
    for kernel in kernels:
        total = totals[kernel.name]
        total.calls += 1
        total.seconds += kernel.end - kernel.begin
    return totals


def _of_operations(entries: _Sorted) -> tuple[dict[str, _TraceTotal], dict[Kind, Intervals]]:
    """Total a CPU trace: operations on threads that transfer data do not count as computation."""
    transferring = {transfer.line for transfer in entries.transfers}
    lines: dict[tuple[str, str], list[TraceEntry]] = defaultdict(list)
    for operation in entries.operations:
        if operation.line not in transferring:
            lines[operation.line].append(operation)
    totals = _of_kernels(entries.transfers)
    for line in lines.values():
        _add_own_time(line, totals)
    working = [operation for line in lines.values() for operation in line if not only_calls(operation.name)]
    return totals, _busy([*working, *entries.transfers])


def _add_own_time(line: list[TraceEntry], totals: dict[str, _TraceTotal]) -> None:
    """Add every operation's time, without the operations inside it, to the totals."""
    line.sort(key=lambda entry: (entry.begin, -entry.end))
    around: list[TraceEntry] = []
    for entry in line:
        while around and around[-1].end <= entry.begin:
            around.pop()
        seconds = entry.end - entry.begin
        if around and not only_calls(around[-1].name):
            totals[around[-1].name].seconds -= seconds
        if not only_calls(entry.name):
            total = totals[entry.name]
            total.calls += 1
            total.seconds += seconds
        around.append(entry)


# Kinds of operations --------------------------------------------------------------------------------------------------


@cache  # a million entries have a few hundred names
def kind_of(name: str) -> Kind:
    """Return the kind of an operation or kernel."""
    if _COMMUNICATION.search(name):
        return "communication"
    if _ATTENTION.search(name):
        return "attention"
    if _MATMUL.search(name):
        return "matmul"
    return "copies" if _COPIES.search(name) else "other"


@cache
def only_calls(name: str) -> bool:
    """Return True if a CPU operation does nothing itself, such as an autograd node around the work of a backward."""
    return _COMPILED.match(name) is None and _CALLERS.search(name) is not None


# Sets of instants -----------------------------------------------------------------------------------------------------


def union(pairs: Iterable[tuple[float, float]] | Intervals) -> Intervals:
    """Return the union of pairs, which may overlap and come in any order."""
    intervals = np.asarray(pairs if isinstance(pairs, np.ndarray) else list(pairs), dtype=np.float64).reshape(-1, 2)
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return NOTHING
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    until = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate(([True], intervals[1:, 0] > until[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((intervals[first, 0], until[last]), axis=1)


def minus(one: Intervals, other: Intervals) -> Intervals:
    """Return the instants of `one` that are not in `other`."""
    if not len(one) or not len(other):
        return one
    # Sweep over all interval ends, counting how many intervals of each set cover the stretch after each.
    at = np.concatenate((one[:, 0], one[:, 1], other[:, 0], other[:, 1]))
    inside = np.repeat((1, -1, 0, 0), (len(one), len(one), len(other), len(other)))
    outside = np.repeat((0, 0, 1, -1), (len(one), len(one), len(other), len(other)))
    order = np.argsort(at, kind="stable")
    at, inside, outside = at[order], inside[order].cumsum(), outside[order].cumsum()
    only_inside = (inside[:-1] > 0) & (outside[:-1] == 0)
    return union(np.stack((at[:-1][only_inside], at[1:][only_inside]), axis=1))


def clipped(intervals: Intervals, begin: float, end: float) -> Intervals:
    """Return the part between two instants."""
    within = np.clip(intervals, begin, end)
    return within[within[:, 1] > within[:, 0]]


def length(intervals: Intervals) -> float:
    return float((intervals[:, 1] - intervals[:, 0]).sum())
