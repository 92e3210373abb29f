"""Which errors say that there is no memory left, and that looking at what is held never gets in the way of them."""

import json
from types import SimpleNamespace

import pytest
import torch
from one_rank import one_rank

from xtrain.plan.estimates import Memory
from xtrain.runtime.base.state import Progress
from xtrain.runtime.loop import memory_report as out_of_memory
from xtrain.runtime.loop.memory_report import ran_out, write

CPU = torch.device("cpu")


def raised_from(cause: BaseException) -> RuntimeError:
    error = RuntimeError("a collator has failed")
    error.__cause__ = cause
    return error


def of_torch() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize(("error", "yes"), [
    (MemoryError(), True),
    (of_torch(), True),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
    (RuntimeError("std::bad_alloc"), True),
    (RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
    (OSError(12, "Cannot allocate memory"), True),
    (raised_from(MemoryError()), True),
    (RuntimeError("shapes do not fit"), False),
    (ValueError("out of memory lane"), False),
    (raised_from(KeyError("memory")), False),
])  # fmt: skip
def test_what_counts_as_out_of_memory(error, yes):
    assert ran_out(error) is yes


@pytest.fixture
def resources():
    rank = one_rank(3, world_size=4, coordinates={"pp": 0, "tp": 0})
    classes = [SimpleNamespace(pp=0, memory=Memory(parameters=480, gradients=480, optimizer=960, activations=2**20))]
    plan = SimpleNamespace(estimates=SimpleNamespace(classes=classes))
    return {"rank": rank, "plan": plan, "progress": Progress(step=6)}


def test_a_rank_that_has_no_model_yet_reports_what_there_is(tmp_path, resources):
    tensor = torch.zeros(1 << 20)
    said = write(tmp_path, 2, resources, MemoryError(), "setup.weights")
    page = tmp_path / "logs" / "memory-2" / "rank-00003.md"
    assert said.endswith(f"report: {page}")
    found = json.loads(page.with_suffix(".json").read_text())
    assert found["held"]["parameters"] == 0 and found["held"]["other"] >= tensor.nbytes
    text = page.read_text()
    assert "out of memory in step 7, setup.weights" in text and "MemoryError" in text and "1048576" in text


def test_what_cannot_be_looked_at_or_written_is_said_in_a_line(tmp_path, resources, monkeypatch):
    assert write(tmp_path, 1, {}, MemoryError(), "setup.bootstrap") == ""
    (tmp_path / "logs").write_text("no folder")
    assert write(tmp_path, 1, resources, MemoryError(), "step.clip").startswith(
        "the memory report could not be written: "
    )

    def again(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(out_of_memory, "rank_memory", again)
    assert write(tmp_path, 1, resources, MemoryError(), "x") == "the memory report could not be written: MemoryError"
