"""Readings of GPUs, with a stub of NVML's library, and their place in the records of a run and of a rank."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from xtrain.components.actions import log_torch
from xtrain.runtime.base.device import READINGS, DeviceGauges


class NVMLError(Exception):
    """As pynvml raises it."""


@pytest.fixture
def nvml(monkeypatch):
    """A stub of pynvml for one device; `calls` counts its readings, `lacks` names those that fail."""
    stub = SimpleNamespace(calls=[], lacks=set(), NVMLError_DriverNotLoaded=NVMLError, nvmlInit=lambda: None)

    def reading(name, value):
        def read(handle, *sensor):
            assert handle == 0
            stub.calls.append(name)
            if name in stub.lacks:
                raise NVMLError(name)
            return value

        return read

    stub.nvmlDeviceGetHandleByIndex = int
    stub.nvmlDeviceGetUtilizationRates = reading("utilization", SimpleNamespace(gpu=87, memory=40))
    stub.nvmlDeviceGetTemperature = reading("temperature", 61)
    stub.nvmlDeviceGetPowerUsage = reading("power", 512_400)
    monkeypatch.setitem(sys.modules, "pynvml", stub)
    monkeypatch.setattr(torch.cuda, "pynvml", stub, raising=False)
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", True)
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", lambda device: 0)
    return stub


def test_readings_have_units_of_the_records(nvml):
    taken = DeviceGauges(torch.device("cuda")).take()
    assert taken == {"gpu_utilization": 0.87, "gpu_temperature": 61.0, "gpu_power": 512.4}


def test_a_reading_that_fails_is_left_out_and_not_tried_again(nvml):
    nvml.lacks = {"utilization"}  # as on a MIG slice
    found = DeviceGauges(torch.device("cuda"))
    assert found.take().keys() == {"gpu_temperature", "gpu_power"} == found.take().keys()
    assert nvml.calls.count("utilization") == 1 and nvml.calls.count("power") == 2


def test_a_cpu_and_a_machine_without_the_package_have_none(nvml, monkeypatch):
    assert DeviceGauges(torch.device("cpu")).take() == {} and nvml.calls == []
    monkeypatch.setattr(torch.cuda, "_HAS_PYNVML", False)
    monkeypatch.setattr(torch.cuda, "_PYNVML_ERR", ImportError(), raising=False)
    assert DeviceGauges(torch.device("cuda")).take() == {}


@pytest.mark.parametrize(("others", "expected"), [
    ({}, {"gpu_utilization": 0.87, "gpu_temperature": 61.0, "gpu_power": 512.4}),
    ({"gpu_utilization": 0.5, "gpu_temperature": 80.0}, {"gpu_utilization": 0.5, "gpu_temperature": 80.0,
                                                         "gpu_power": 512.4}),
    (None, {"gpu_utilization": 0.87, "gpu_temperature": 61.0, "gpu_power": 512.4}),  # a rank without the package
])  # fmt: skip
def test_the_record_has_the_worst_of_all_ranks(nvml, monkeypatch, others, expected):
    """The first rank's records of a step on two GPUs; the other rank's numbers come with the reduction."""
    written, own = [], []
    window = SimpleNamespace(
        timed=1, seconds=1.0, data_seconds=0.0, comm_seconds=0.0, logged=None, steps=0, valid_tokens=4, rows=1,
        node_seconds={}, counted=SimpleNamespace(positions=4), rates=SimpleNamespace(of=lambda *_: {}),
        losses=SimpleNamespace(take=dict, unlabelled=lambda rows: []), clear=lambda: None,
    )  # fmt: skip
    records = SimpleNamespace(log=written.append, own=SimpleNamespace(write=own.append), warn=None)
    feed = SimpleNamespace(
        rows_taken=lambda step: {}, epoch=lambda step: 0.0, phase=lambda index: SimpleNamespace(name="t")
    )
    monkeypatch.setattr(log_torch, "peak_bytes", lambda device: 7)
    monkeypatch.setattr(log_torch, "MemoryNow", lambda device: SimpleNamespace(take=dict))
    for metrics in (log_torch.RouterMetrics, log_torch.IndexerMetrics):
        monkeypatch.setattr(metrics, "of", lambda *_: SimpleNamespace(take=lambda rows: {}))
    monkeypatch.setattr(torch, "tensor", lambda numbers, **_: torch.DoubleTensor(numbers))

    def reduced(shared, op):
        theirs = [-torch.inf] * 3
        if others is not None:
            theirs = [-others.get("gpu_utilization", 1.0), others.get("gpu_temperature", 0.0), 100.0]
        torch.maximum(shared, torch.DoubleTensor([0.0] * 5 + theirs), out=shared)

    monkeypatch.setattr(log_torch.dist, "all_reduce", reduced)
    rank = SimpleNamespace(device=torch.device("cuda"), world_size=2, replica=None)
    progress = SimpleNamespace(step=3, tokens=12)
    parts: Any = (None, None, feed, rank, records, progress, window)
    step: Any = SimpleNamespace(
        index=2, loss=1.0, grad_norm=1.0, objective=None, reward=None, lr=0.1, task_norms={}, metrics={}
    )
    log_torch.log(*parts)(step)
    assert {name: getattr(written[0], name) for name in READINGS} == expected
    assert own[0].gpu_utilization == 0.87 and own[0].gpu_power == 512.4
