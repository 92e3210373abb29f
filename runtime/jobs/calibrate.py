"""Measured step times of runs, for a calibration."""

import math
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Final

from xtrain.plan.calibration import PlannedTiming, TimedPart, TimedRun
from xtrain.plan.serialise import PlanError, load_plan
from xtrain.planner.costs.times import timing_of_plan
from xtrain.records.events import events_since
from xtrain.records.lines import objects_since
from xtrain.records.names import EVENTS_FILE, METRICS_FILE
from xtrain.records.training_events import RunStartEvent
from xtrain.regular_files import read_json
from xtrain.runtime.observe.provenance import ENVIRONMENT

LEAST_RECORDS: Final = 3
COMPUTED: Final = ("products", "scaled products", "attention")
SENT: Final = ("link", "network")


class Untimed(ValueError):
    """Run without usable step times; the message says why."""


def timed_runs(paths: Iterable[Path]) -> Iterator[tuple[Path, TimedRun | Untimed]]:
    """Yield the runs at some paths or below them, each once, with their step times or the reason why there are none."""
    seen = set()
    for path in paths:
        plans = [path / "plan.json"] if (path / "plan.json").is_file() else sorted(path.rglob("plan.json"))
        for directory in (file.parent for file in plans):
            if directory.resolve() in seen:
                continue
            seen.add(directory.resolve())
            try:
                yield directory, timed_run(directory)
            except (Untimed, PlanError, OSError) as problem:
                yield directory, Untimed(str(problem))


def timed_run(directory: Path) -> TimedRun:
    """Return the step times of a run since its last start. Raises Untimed, PlanError and OSError."""
    plan = load_plan(directory / "plan.json")
    timing = timing_of_plan(plan)
    if timing is None:
        raise Untimed("its plan has no step time: write `cluster` in its spec")
    events = events_since(directory / EVENTS_FILE)
    start = next((event for event in reversed(events) if isinstance(event, RunStartEvent)), None)
    since = (start is not None and start.time) or 0.0
    records = _records(directory / METRICS_FILE, since)
    if len(records) < LEAST_RECORDS:
        raise Untimed(
            f"{LEAST_RECORDS} records with `step_seconds` are needed since its last start; it has {len(records)}"
        )
    seconds = [record["step_seconds"] for record in records]
    spread = quantiles(seconds, n=10, method="inclusive")
    return TimedRun(
        source=str(directory),
        plan=plan.id,
        torch=read_json(directory / ENVIRONMENT)["torch"],
        date=f"{datetime.fromtimestamp(records[-1]['time'], UTC):%Y-%m-%d}",
        samples=len(records),
        seconds=median(seconds),
        low=spread[0],
        high=spread[-1],
        timing=timing,
        parts=tuple(_parts(directory, since, timing)) if start is not None and start.device == "cpu" else (),
    )


def _parts(directory: Path, since: float, timing: PlannedTiming) -> Iterator[TimedPart]:
    """Yield computation and communication by the nodes' times on the slowest rank. Nodes of a GPU are asynchronous, and
    nodes of a pipeline wait for other ranks: then the whole step alone is used."""
    if timing.shape["bubble"]:
        return
    ranks = [_records(path, since) for path in sorted((directory / "ranks").glob("*.jsonl"))]
    waited = [fmean(record.get("comm_seconds") or 0.0 for record in records) for records in ranks if records]
    nodes = [
        fmean((record.get("node_seconds") or {}).get("step.forward_backward", 0.0) for record in records)
        for records in ranks
        if records
    ]
    computed = max(map(float.__sub__, nodes, waited), default=0.0)
    measured = (("computation", computed, COMPUTED), ("communication", max(waited, default=0.0), SENT))
    for name, seconds, kinds in measured:
        share = sum(timing.shares[kind] for kind in kinds)
        if seconds > 0 and share > 0:
            yield TimedPart(
                name=name,
                seconds=seconds,
                planned=share * timing.seconds,
                shares={kind: timing.shares[kind] / share for kind in kinds},
            )


def _records(path: Path, since: float) -> list[dict[str, Any]]:
    """Return the records with a step time since some second."""
    return [
        record
        for record in objects_since(path)
        if isinstance(record.get("time"), int | float) and record["time"] >= since
        if isinstance(seconds := record.get("step_seconds"), int | float) and 0 < seconds < math.inf
    ]
