"""Boards made by hand: a plan as small as it may be, and ranks that tell what a test needs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve
from read_records import events, reduce_all

from xtrain.records.metrics import RankMetrics
from xtrain.records.status import Heartbeat
from xtrain.tui.model.board import Board
from xtrain.tui.model.event_log import EventLog, LogEntry
from xtrain.tui.model.life import Life, OneRank, Ranks
from xtrain.tui.model.planned import Planned, planned
from xtrain.tui.state import RunState

Record = dict[str, Any]
STEPS = ("step.fetch", "step.forward_backward", "step.optimizer")


def small_plan(
    axes: Mapping[str, int] | None = None, *, expert_axes: Mapping[str, int] | None = None, **content: Any
) -> Planned:
    """Nodes of every kind in few numbers, over a mesh of these sizes, outer to inner."""
    axes, expert_axes = axes or {"fsdp": 2}, expert_axes or {}
    world = 1
    for size in axes.values():
        world *= size

    def node(id: str, kind: str, does: str = "", over: Sequence[str] = (), **args: Any) -> Record:
        return {"id": id, "kind": kind, "op": args.pop("op", id), "args": args, "axes": list(over), "does": does}

    nodes = [
        node("setup.bootstrap", "setup", "ranks meet", list(axes), seed=7),
        node("setup.loader", "setup", "shuffle rows"),
        node("collate.pack", "collate", "rows of 256"),
        node("step.fetch", "step", "take rows"),
        node("step.forward_backward", "step", "2 microbatches", list(axes), accumulate=2),
        node("step.optimizer", "step", "adamw"),
        node("tick.log", "tick", "one record"),
        node("tick.eval.web", "tick", "loss on web", op="tick.eval"),
        node("tick.checkpoint", "tick", "save all"),
        node("event.sigterm.checkpoint", "event", "save all, before the run ends", op="tick.checkpoint"),
        node("event.control.checkpoint", "event", "save all, as asked", op="tick.checkpoint"),
        node("shutdown.leave", "shutdown", "leave together"),
    ]
    chain = [
        ("setup.bootstrap", "collate.pack", ""), ("collate.pack", "setup.loader", "microbatches"),
        ("setup.loader", "step.fetch", "rows"), ("step.fetch", "step.forward_backward", ""),
        ("step.forward_backward", "step.optimizer", "gradients"), ("step.optimizer", "tick.log", ""),
        ("step.optimizer", "tick.eval.web", ""), ("step.optimizer", "tick.checkpoint", ""),
        ("step.optimizer", "shutdown.leave", ""),
    ]  # fmt: skip
    tick = {"steps": None, "tokens": None, "seconds": None, "count": None, "stop": False}
    plan = planned(
        {"id": "p", "name": "small", "mesh": {"world_size": world, "ranks_per_node": 8, "axes": axes,
                "expert_axes": expert_axes, "strides": _strides(axes) | _strides(expert_axes), "crosses_nodes": []},
            "timeline": {
                "steps": 100,
                "ticks": [tick | {"nodes": ["tick.log"], "steps": 5, "count": 20},
                    tick | {"nodes": ["tick.eval.web", "tick.checkpoint"], "steps": 40, "count": 2},
                    tick | {"nodes": ["tick.checkpoint"], "seconds": 600.0}],
                "reactions": [{"event": "sigterm", "nodes": ["event.sigterm.checkpoint"], "stop": True, "count": None}],
                "commands": [
                    {"name": name, "nodes": ["event.control.checkpoint"], "stop": name == "stop", "counts": ""}
                    for name in ("stop", "save")
                ],
            }, "estimates": {"tokens_per_step": 1000, "classes": [], "times": None},
            "graph": {"nodes": nodes, "edges": [dict(zip(("before", "after", "data"), e, strict=True)) for e in chain]},
            **content},
    )  # fmt: skip
    assert plan is not None
    return plan


def _strides(axes: Mapping[str, int]) -> dict[str, int]:
    found, stride = {}, 1
    for name in reversed(axes):
        found[name] = stride
        stride *= axes[name]
    return found


def a_beat(rank: int = 0, **fields: Any) -> Heartbeat:
    """The line of a rank that gets on."""
    values: Record = {
        "rank": rank, "host": f"host{rank // 8}", "pid": 100 + rank, "born": 0, "attempt": 1, "alive": 3, "time": 0.0,
        "step": 41, "node": "step.forward_backward", "marks": 400, "within": 3, "lasting": False, "idle": 0.2,
        "place": "", "debugger": False,
    }  # fmt: skip
    return Heartbeat(**values | fields)


def a_rank(rank: int, plan: Planned | None = None, *, step_seconds: float | None = 0.5, **fields: Any) -> OneRank:
    """A rank that is alive and has told numbers of step 40."""
    seconds = step_seconds or 0.0
    values: Record = {
        "coordinates": plan.coordinates(rank) if plan else {},
        "machine": plan.machine(rank) if plan else None,
        "last": RankMetrics(step=40),
        "step": 40,
        "step_seconds": step_seconds,
        "data_seconds": 0.004,
        "comm_seconds": 0.06,
        "busy_seconds": seconds - 0.06,
        "memory_bytes": 1000.0,
        "node_seconds": {"step.fetch": 0.1, "step.forward_backward": seconds - 0.15, "step.optimizer": 0.05},
        "beat": a_beat(rank),
        "pulse": "alive",
    }
    return OneRank(rank=rank, **values | fields)


def some_ranks(plan: Planned, **own: Mapping[int, Any]) -> Ranks:
    """All ranks of a plan. own: of a field, its value on some ranks, as `step_seconds={3: 0.9}`."""
    ranks = [
        a_rank(rank, plan, **{name: values[rank] for name, values in own.items() if rank in values})
        for rank in range(plan.world_size)
    ]
    return Ranks(world_size=plan.world_size, all=tuple(ranks))


def entries(*records: Record) -> EventLog:
    """Events as the log holds them."""
    found = tuple(
        LogEntry(number=place, time=event.time, step=event.step, kind=event.event, text="", event=event)
        for place, event in enumerate(events(*records))
    )
    return EventLog(entries=found, version=len(found))


def started(**fields: Any) -> Record:
    start: Record = {
        "event": "run_start", "time": 0.0, "step": 0, "run_id": "r", "plan_id": "p", "name": "small", "world_size": 2,
        "device": "cpu", "steps": 100, "attempt": 1, "resumed_step": None, "directory": "/runs/r",
    }  # fmt: skip
    return start | fields


def a_board(plan: Planned | None = None, *, records: Sequence[Record] = (), **fields: Any) -> Board:
    """A run that trains. records: what has led to its state."""
    board = Board(
        directory=Path("/runs/r"),
        now=100.0,
        version=1,
        run=reduce_all(RunState(), records),
        planned=plan,
        ranks=some_ranks(plan) if plan else Ranks(),
        life=Life(state="training"),
    )
    return evolve(board, **fields)
