"""Whoever takes the records besides the files: what hangs or fails there never reaches training."""

import threading

import pytest
from made_records import event, log

from xtrain.records.lines import Event
from xtrain.records.metrics import StepMetrics
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.observe import records as module
from xtrain.runtime.observe.records import Records, RecordSink


class Taker:
    """A writer that notes what it is given, and fails or hangs where it is told to."""

    name, seconds, local = "the taker", 0.3, True

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.calls, self.free = fails_at, [], threading.Event()
        self.free.set()

    def _called(self, what: str, detail: object = None) -> None:
        assert self.free.wait(30)
        self.calls.append((what, detail))
        if what == self.fails_at:
            raise RuntimeError("no such host\nand much more")

    def begin(self) -> None:
        self._called("begin", threading.current_thread().name)

    def metric(self, record: StepMetrics) -> None:
        self._called("metric", record.step)

    def event(self, record: Event) -> None:
        self._called("event", record.event)

    def rest(self, *, must: bool) -> None:
        if must:
            self._called("rest")

    def end(self, exit_code: int) -> None:
        self._called("end", exit_code)


@pytest.fixture
def run(tmp_path):
    """`run(taker)`: records of a run that a taker is told of, and what was warned of."""

    def begin(taker: Taker) -> tuple[Records, list[str]]:
        records, warned = Records.open(tmp_path, 0), []
        records.sinks.append(RecordSink(taker, warned.append))
        records.sinks[0].begin()
        return records, warned

    return begin


def test_it_gets_everything_in_order_in_a_thread_of_its_own(run):
    taker = Taker()
    records, warned = run(taker)
    log(records, 1)
    records.event(event("eval", 1))
    records.settle()
    log(records, 2)
    records.end_sinks(75, 10)
    records.close()
    wanted = [("begin", "the taker"), ("metric", 1), ("event", "eval"), ("rest", None), ("metric", 2), ("end", 75)]
    assert taker.calls == wanted and warned == []


@pytest.mark.parametrize("where", ["begin", "metric", "event", "rest", "end"])
def test_one_that_fails_is_reported_once_and_gets_no_more(run, where: str):
    taker = Taker(fails_at=where)
    records, warned = run(taker)
    for step in (1, 2):
        log(records, step)
        records.event(event("eval", step))
    records.settle()
    records.end_sinks(0, 10)
    records.close()
    assert warned == ["the taker gets no more records: no such host; metrics.jsonl is complete"]
    assert [what for what, _ in taker.calls].count(where) == 1 and taker.calls[-1][0] == where


def test_one_that_hangs_holds_up_nothing_and_what_it_loses_is_counted(run, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.2)
    taker = Taker()
    records, warned = run(taker)
    records.sinks[0]._queue.room = 50
    taker.free.clear()
    for step in range(100):
        log(records, step)
        records.event(event("eval", step))
    records.settle()
    records.settle()  # it is not waited for again
    records.end_sinks(0, 10)
    records.close()
    # All this came back while the taker took nothing.
    assert warned[0] == "the taker did not finish within 0.3 s, and was abandoned"
    assert "records were not sent to the taker, which was too slow" in warned[1]
    taker.free.set()


def test_what_one_says_at_its_end_is_not_given_to_one_that_has_ended(tmp_path):
    records, takers = Records.open(tmp_path, 0), [Taker(), Taker(fails_at="end")]
    for taker in takers:
        records.sinks.append(RecordSink(taker, lambda message: records.warn(message, step=1)))
    records.end_sinks(0, 10)
    records.close()
    assert [what for what, _ in takers[0].calls] == ["begin", "end"]
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1


def test_a_warning_that_finds_no_room_on_the_disk_harms_nothing(tmp_path):
    said: list[str] = []

    def warn(message: str) -> None:
        said.append(message)
        raise EnvironmentFault("X706", "no room")

    taken = RecordSink(Taker(fails_at="begin"), warn)
    taken.begin()
    taken.end(0)
    assert len(said) == 1
