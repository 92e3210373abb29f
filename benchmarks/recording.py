"""What a logged step costs the main thread: a record of `metrics.jsonl` and one of `ranks/`, handed over or written.

    OMP_NUM_THREADS=1 python benchmarks/recording.py

Between two steps the main thread multiplies matrices for some milliseconds, as a step does. Each figure is the median
and the 99th percentile of the time from the first call to the last, in microseconds, and the processor time of the main
thread alone. `direct` writes both lines itself; `queued` is what a run does; `tensorboard` and `wandb` (offline) have a
thread each beside that, where their packages are installed. Prints one JSON line.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

import torch
from msgspec.structs import replace

from xtrain.components.trackers.tensorboard_run import TensorBoardWriter
from xtrain.components.trackers.wandb_run import WandbWriter
from xtrain.plan.hardware import is_installed
from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.runtime.base.json_lines import JsonLinesFile
from xtrain.runtime.observe.records import Records, RecordSink, RecordWriter

Report = Callable[[StepMetrics, RankMetrics], None]


def record_of(step: int) -> StepMetrics:
    names = ("loss", "grad_norm", "lr", "tokens_per_second", "step_seconds", "data_seconds", "tflops", "comm_seconds")
    numbers = {name: 0.1234567890123 * step + place for place, name in enumerate(names)}
    return replace(StepMetrics(step=step, tokens=step << 20, memory_bytes=1 << 34, phase="x"), **numbers)


def own_of(step: int) -> RankMetrics:
    nodes = {f"step.node_{number}": 0.012345 for number in range(12)}
    return RankMetrics(step=step, memory_bytes=1 << 34, node_seconds=nodes)


def timed(report: Report, steps: int) -> dict[str, float]:
    """What `report` costs, in microseconds a step."""
    left_MM, right_MM = torch.randn(384, 384), torch.randn(384, 384)
    passed, worked = [], []
    for step in range(steps):
        for _ in range(4):
            left_MM @ right_MM
        records = record_of(step), own_of(step)
        begin, before = time.perf_counter(), time.thread_time()
        report(*records)
        worked.append(time.thread_time() - before)
        passed.append(time.perf_counter() - begin)
    figures = {"median": median(passed), "p99": quantiles(passed, n=100)[98], "processor": median(worked)}
    return {name: round(value * 1e6, 1) for name, value in figures.items()}


def direct(folder: Path, steps: int) -> dict[str, float]:
    metrics, own = JsonLinesFile(folder / "metrics.jsonl"), JsonLinesFile(folder / "own.jsonl")
    return timed(lambda record, of_rank: (metrics.write(record), own.write(of_rank), None)[-1], steps)


def queued(folder: Path, steps: int, *writers: RecordWriter) -> dict[str, float]:
    records = Records.open(folder, 0)
    records.sinks += [RecordSink(writer, print) for writer in writers]
    for sink in records.sinks:
        sink.begin()
        sink._queue.deliver(None, 60)

    def report(record: StepMetrics, of_rank: RankMetrics) -> None:
        records.log(record)
        records.flush(record.step or 0)
        records.own.write(of_rank)

    found = timed(report, steps)
    records.end_sinks(0, 60)
    records.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args().steps
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for kind in ("direct", "queued", "tensorboard", "wandb"):
            folder = root / kind
            folder.mkdir()
            if kind == "direct":
                found[kind] = direct(folder, steps)
            elif kind == "queued":
                found[kind] = queued(folder, steps)
            elif is_installed(kind):
                found[kind] = queued(folder, steps, writer_of(kind, folder))
    print(json.dumps(found))


def writer_of(kind: str, folder: Path) -> RecordWriter:
    if kind == "tensorboard":
        return TensorBoardWriter(folder=folder / "tensorboard", step=0, texts={})
    chosen = dict.fromkeys(("entity", "name", "group", "notes"), None) | {"project": "recording", "tags": []}
    config = {"experiment": {"name": "recording"}}
    return WandbWriter(directory=folder, mode="offline", chosen=chosen, config=config, rolled_back=0, warn=print)


if __name__ == "__main__":
    main()
