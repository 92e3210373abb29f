"""Reading ahead: what is read in time, in order, is what the step would have read; and it ends when it is to."""

import threading
import time

import pytest
import torch
from attrs import asdict, evolve
from examples import drawn
from hypothesis import given
from hypothesis import strategies as st

from xtrain.runtime.feed.microbatch import Microbatch
from xtrain.runtime.feed.reading_ahead import ReadingAhead, pinned
from xtrain.runtime.inspect.trace import full_rows, with_numbers

CPU = torch.device("cpu")


def batch(step: int) -> Microbatch:
    return Microbatch(
        input_ids_BS=torch.tensor([[step]]),
        labels_BS=None,
        positions_BS=torch.zeros(1, 1),
        real_BS=torch.ones(1, 1),
        cumulative_lengths=torch.tensor([0, 1]),
        real_lengths=torch.tensor([1]),
        num_valid=1,
    )


class Source:
    """Counts what is read, and raises or waits where it is told to."""

    def __init__(self, failing: int | None = None) -> None:
        self.read: list[int] = []
        self.failing = failing
        self.closed = 0
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self, first: int, until: int):
        try:
            for step in range(first, until):
                assert self.may_go_on.wait(20)
                if step == self.failing:
                    raise ValueError(f"step {step} cannot be read")
                self.read.append(step)
                yield [batch(step)]
        finally:
            self.closed += 1


def ahead(source: Source, count: int = 2, end: int = 10) -> ReadingAhead:
    return ReadingAhead(source, ahead=count, end=lambda: end, device=CPU)


def number(microbatches: list[Microbatch]) -> int:
    ids = microbatches[0].input_ids_BS
    assert ids is not None
    return int(ids)


def eventually(what) -> bool:
    deadline = time.monotonic() + 10
    while not what() and time.monotonic() < deadline:
        time.sleep(0.002)
    return what()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reading ahead"]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 4))
@drawn(20, 400)
def test_any_order_of_steps_gives_each_its_own(steps: list[int], count: int):
    reading = ahead(Source(), count)
    try:
        assert [number(reading.take(step)) for step in steps] == steps
    finally:
        reading.close()
    assert not readers()


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_steps_are_read_before_they_are_asked_for_and_no_more(count: int):
    source = Source()
    reading = ahead(source, count)
    reading.take(4)
    assert eventually(lambda: source.read == list(range(4, 5 + count)))
    time.sleep(0.02)
    assert source.read == list(range(4, 5 + count))
    reading.take(5)
    assert eventually(lambda: source.read == list(range(4, 6 + count)))
    reading.close()
    assert source.closed == 1 and not readers()


def test_nothing_is_read_beyond_the_end_unless_it_is_asked_for():
    source = Source()
    reading = ahead(source, 5, end=4)
    assert [number(reading.take(step)) for step in range(4)] == [0, 1, 2, 3]
    assert eventually(lambda: source.closed == 1)
    assert source.read == [0, 1, 2, 3] and eventually(lambda: not readers())
    assert number(reading.take(4)) == 4
    reading.close()


def test_what_reading_raises_is_raised_by_the_step_that_needs_it():
    reading = ahead(Source(failing=3), 8)
    time.sleep(0.02)
    assert [number(reading.take(step)) for step in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(ValueError, match="step 3 cannot be read"):
            reading.take(3)
    assert number(reading.take(4)) == 4
    reading.close()
    assert not readers()


def test_a_reader_that_waits_is_stopped():
    source = Source()
    reading = ahead(source)
    reading.take(0)
    source.may_go_on.clear()
    threading.Timer(0.05, source.may_go_on.set).start()
    reading.close()
    assert not readers()
    reading.close()  # once more is no harm


def test_the_step_waits_no_longer_than_for_what_is_not_read_yet():
    source = Source()
    reading = ahead(source, 3)
    reading.take(0)
    assert eventually(lambda: len(source.read) == 4)
    source.may_go_on.clear()  # who waited for it would wait for ever
    assert [number(reading.take(step)) for step in (1, 2, 3)] == [1, 2, 3]
    threading.Timer(0.1, source.may_go_on.set).start()
    begin = time.monotonic()
    reading.take(4)
    assert time.monotonic() - begin > 0.05
    reading.close()


def test_all_that_a_device_is_given_is_pinned(monkeypatch):
    """What is not is copied while the host waits."""

    def tensors(batch):
        units = {} if batch.units is None else {**asdict(batch.units, recurse=False), **batch.units.values}
        every = {**asdict(batch, recurse=False), **batch.columns, **units}
        return {name: each for name, each in every.items() if isinstance(each, torch.Tensor)}

    whole = with_numbers(full_rows(4, 8, dataset=0), "pair", ["weight"], ["margin"])
    whole = evolve(whole, in_row_BS=whole.positions_BS, text_BS=whole.positions_BS)
    done = set()

    def pin(tensor):
        copy = tensor.clone()
        done.add(id(copy))
        return copy

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found = tensors(pinned(whole))
    assert found.keys() == tensors(whole).keys()
    assert {name for name, each in found.items() if id(each) not in done} == {"cumulative_lengths", "real_lengths"}
    for name, each in tensors(whole).items():
        assert torch.equal(found[name], each), name
