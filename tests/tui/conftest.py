"""A recorded run that every view can be shown."""

import json
from pathlib import Path
from typing import Any

import pytest

Record = dict[str, Any]
START = 1_700_000_000.0


def event(kind: str, at: float, step: int = 0, /, **fields: Any) -> Record:
    return {"time": START + at, "step": step, "event": kind, **fields}


def metrics(step: int, at: float, **fields: Any) -> Record:
    return {
        "step": step,
        "time": START + at,
        "loss": 4.0 - step / 200,
        "grad_norm": 0.8125,
        "lr": 3e-3,
        "tokens": step * 10_000,
        "tokens_per_second": 12_345.0,
        "step_seconds": 0.85,
        "data_seconds": 0.01,
        "memory_bytes": 1_300_000_000,
        "phase": "stable",
        **fields,
    }


@pytest.fixture
def recorded() -> list[Record]:
    """Start-up, 600 steps logged every 60, an evaluation, samples, a checkpoint, trouble, and the end."""
    records = [
        event("run_start", 0, run_id="a1b2c3d-e4f5", plan_id="e4f5a6", name="shakespeare", world_size=4, device="cpu",
            steps=600, attempt=1, directory="runs/x", resumed_step=None),
        event("setup_begin", 0.1, node="setup.bootstrap"),
        event("setup", 0.4, node="setup.bootstrap", seconds=0.31, detail="gloo, 4 ranks"),
        event("setup_begin", 0.5, node="setup.weights"),
        event("setup", 12.8, node="setup.weights", seconds=12.3, detail="initialised from seed 42"),
        event("setup_done", 13, seconds=13.0),
    ]  # fmt: skip
    records += [metrics(step, 13 + 0.85 * step) for step in range(60, 601, 60)]
    records += [
        event("eval", 116, 120, node="tick.eval", dataset="held[bold]out", loss=2.0, tokens=65536, batches=16,
            seconds=1),
        event("generate", 116.5, 120, node="tick.generate",
            samples=[{"prompt": "ROMEO:", "text": "\nWhat \x1b[31mlight\x07 猫\nis this?"}], seconds=0.2),
        event("checkpoint", 117, 120, node="tick.save", path="checkpoints/step-120", bytes=150_000_000, seconds=0.41),
        event("warning", 118, 120, message="the loader is slow\nraise data.workers"),
        event("nonfinite", 170, 180, loss=float("nan"), grad_norm=float("inf")),
        event("skipped", 170, 180, reason="the gradient was not finite"),
        event("run_end", 530, 600, status="done", seconds=530.0, loss=1.0),
    ]  # fmt: skip
    return sorted(records, key=lambda record: record["time"])


@pytest.fixture
def failed(recorded: list[Record]) -> list[Record]:
    """The same run, ended by rank 2 after step 180."""
    return [record for record in recorded if record["step"] <= 180] + [
        event(
            "failure", 171, 180, rank=2, error="RuntimeError: boom", traceback="Traceback:\n  line\nRuntimeError: boom"
        ),
        event("run_end", 172, 180, status="failed", seconds=172.0, loss=None),
    ]


def append(directory: Path, *records: Record) -> None:
    """Write records where a rank would."""
    directory.mkdir(parents=True, exist_ok=True)
    for record in records:
        name = "events.jsonl" if "event" in record else "metrics.jsonl"
        with (directory / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.fixture(name="append")
def _append() -> Any:
    return append


@pytest.fixture(name="metrics")
def _metrics() -> Any:
    return metrics


@pytest.fixture(name="event")
def _event() -> Any:
    return event
