"""`tick.log`: metrics of a run, reduced over ranks before they are written."""

import time
from math import inf, isfinite
from typing import Any

import torch
import torch.distributed as dist

from xtrain.plan.plan import Plan
from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.runtime.base.device import READINGS, DeviceGauges, MemoryNow, peak_bytes
from xtrain.runtime.base.ops import op
from xtrain.runtime.base.state import Progress, Rank
from xtrain.runtime.feed.setup import Feed
from xtrain.runtime.loop.alerts import AlertMonitor
from xtrain.runtime.loop.metrics import IndexerMetrics, RouterMetrics, Window
from xtrain.runtime.nn.batch import Step
from xtrain.runtime.nn.transformer import ModelParts
from xtrain.runtime.observe.heartbeat import WAITS
from xtrain.runtime.observe.records import Records
from xtrain.text.units import plural


@op("tick.log")
def log(
    plan: Plan,
    model: ModelParts,
    feed: Feed,
    rank: Rank,
    records: Records,
    progress: Progress,
    window: Window,
    alerts: AlertMonitor | None = None,
):
    """Write the record of the step: loss, gradient norm and learning rate. Times are those of the slowest rank; times
    and the per-dataset losses of a mixture are averaged over the steps since the last record. Skipped steps and the
    first step after a start have no times; a record of only such steps has no rates."""
    routers, indexers = RouterMetrics.of(plan, model, rank), IndexerMetrics.of(plan, model, rank)
    memory_now, gauges = MemoryNow(rank.device), DeviceGauges(rank.device)
    planned_bytes = alerts.planned_bytes if alerts is not None else None
    rows_before = feed.rows_taken(progress.step)

    def run(step: Step) -> None:
        if progress.step in (step.index, window.logged):  # no step has ended, or another tick logged it
            return
        steps = max(1, window.timed)
        averages = [total / steps for total in (window.seconds, window.data_seconds, window.comm_seconds)]
        peak = peak_bytes(rank.device)
        of_plan = peak / planned_bytes if planned_bytes else 0.0
        # Three numbers on every GPU, so that ranks with and without NVML can be reduced. The least utilization counts.
        own_gauges = gauges.take()
        signed = {name: -value if name == "gpu_utilization" else value for name, value in own_gauges.items()}
        read = [signed.get(name, -inf) for name in READINGS] if rank.device.type == "cuda" else []
        slowest = [*averages, float(peak), of_plan, *read]
        if rank.world_size > 1:
            shared = torch.tensor(slowest, dtype=torch.float64, device=rank.device)
            dist.all_reduce(shared, op=dist.ReduceOp.MAX)
            slowest = shared.tolist()
        seconds, data_seconds, comm_seconds, memory, of_plan, *read = slowest
        gpus: dict[str, Any] = {
            name: abs(value) for name, value in zip(READINGS, read, strict=False) if isfinite(value)
        }
        if alerts is not None:
            alerts.logged(window.timed, seconds * window.timed, data_seconds * window.timed, of_plan)
        now, timed = time.time(), window.timed > 0
        learned = isfinite(step.loss) and isfinite(step.grad_norm)
        rates: dict[str, Any] = window.rates.of(window.counted, seconds * window.timed) if timed else {}
        taken = feed.rows_taken(progress.step)
        rows = {f"rows/{name}": count for name, count in taken.items()}
        norms = {f"grad_norm/{name}": norm for name, norm in step.task_norms.items()} if learned else {}
        routed = routers.take(window.rows) | indexers.take(window.rows) if window.steps else {}
        metrics = StepMetrics(
            step=progress.step,
            time=now,
            loss=step.loss if learned else None,
            objective=step.objective if learned else None,
            reward=step.reward if learned else None,
            grad_norm=step.grad_norm if learned else None,
            lr=step.lr if learned else None,
            tokens=progress.tokens,
            epoch=feed.epoch(progress.step),
            tokens_per_second=window.counted.positions / window.timed / seconds if timed else None,
            step_seconds=seconds if timed else None,
            data_seconds=data_seconds if timed else None,
            memory_bytes=int(memory),
            phase=feed.phase(step.index).name,
            valid_tokens=window.valid_tokens,
            replicas=None if rank.replica is None else [*rank.replica.taking_part],
            replica_rows=None if rank.replica is None else window.rows,
            comm_seconds=comm_seconds if timed and WAITS.measured else None,
            rest=window.losses.take() | rows | routed | norms | (step.metrics if learned else {}),
            **rates,
            **gpus,
        )
        records.log(metrics)
        since = {name: count - rows_before.get(name, 0) for name, count in taken.items()}
        for name in window.losses.unlabelled(since):
            message = f"dataset {name} has given {plural(since[name], 'row')} since this start, and no valid "
            message += "token: are all of its labels masked?"
            records.warn(message, step=progress.step)
        own_seconds, own_data, own_comm = (round(average, 6) for average in averages)
        nodes = {node: round(total / steps, 6) for node, total in window.node_seconds.items()}
        held: dict[str, Any] = memory_now.take() | own_gauges
        own = RankMetrics(
            step=progress.step,
            time=now,
            step_seconds=own_seconds if timed else None,
            data_seconds=own_data if timed else None,
            comm_seconds=own_comm if timed and WAITS.measured else None,
            memory_bytes=peak,
            node_seconds=nodes if timed else None,
            **held,
        )
        records.own.write(own)
        window.clear()
        window.logged = progress.step

    return run
