"""Records of steps wait in a queue, and never a step for a disk: order, bounds, faults and the end."""

import json
import os
import threading
import time

import pytest
from made_records import event, log

from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.json_lines import BackgroundLines, BackgroundQueue, JsonLinesFile, QueuedLines, Sizes
from xtrain.runtime.observe import records as module
from xtrain.runtime.observe.records import Records


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def taken(folder) -> int:
    """Bytes of records of steps."""
    return sum(path.stat().st_size for path in folder.glob("metrics.jsonl"))


@pytest.fixture
def disk(monkeypatch):
    """A disk that takes nothing while it is `held`."""
    free, write = threading.Event(), os.write
    free.set()

    def waiting_write(fd: int, content: bytes) -> int:
        assert free.wait(30)
        return write(fd, content)

    monkeypatch.setattr("xtrain.runtime.base.json_lines.os.write", waiting_write)
    yield free
    free.set()


def opened(folder, room: int) -> Records:
    records, writer = Records.open(folder, 0), BackgroundLines(room=room)
    records.writer = writer
    records.metrics, records.own = (QueuedLines(each.lines, writer) for each in (records.metrics, records.own))
    return records


def test_what_an_event_speaks_of_lies_in_the_files_before_it(tmp_path, disk):
    records, seen = Records.open(tmp_path, 0), []
    disk.clear()
    for step in range(1, 50):
        log(records, step)
    threading.Timer(0.2, disk.set).start()
    records.event(event("checkpoint", 49))
    seen = [record["step"] for record in lines(tmp_path / "metrics.jsonl")]
    assert seen == list(range(1, 50))
    assert [event["event"] for event in lines(tmp_path / "events.jsonl")] == ["checkpoint"]
    records.close()


def test_a_step_does_not_wait_for_a_disk_that_hangs_and_what_is_lost_is_counted(tmp_path, disk):
    records = opened(tmp_path, room=100)
    disk.clear()
    for step in range(1, 101):
        log(records, step, loss=1.0)
        records.own.write(RankMetrics(step=step))
    assert not taken(tmp_path), "all were handed over while the disk took nothing"
    assert records.metrics.lost > 20 and records.own.lost > 20
    lost = records.metrics.lost
    disk.set()
    records.settle()
    for step in (101, 102):
        log(records, step, loss=1.0)
    records.own.write(RankMetrics(step=101))
    records.close()
    found = lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in found[-2:]] == [101, 102]
    assert [record.get("dropped") for record in found[-3:]] == [None, lost, lost]
    assert len(found) + lost == 102
    assert lines(tmp_path / "ranks" / "00000.jsonl")[-1]["dropped"] == records.own.lost
    (warning,) = lines(tmp_path / "events.jsonl")
    assert warning["event"] == "warning" and "records were dropped" in warning["message"] and warning["step"] == 101


def test_an_event_waits_once_for_a_disk_that_hangs(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(module, "EVENT_SECONDS", 0.3)
    monkeypatch.setattr(Records._event, "__defaults__", (0.3,))
    records = Records.open(tmp_path, 0)
    disk.clear()
    waited, wait = [], records.writer._queue.deliver
    monkeypatch.setattr(records.writer._queue, "deliver", lambda *given: waited.append(given[1]) or wait(*given))
    for number in range(20):
        records.event(event("eval", number))
    assert waited == [0.3]
    disk.set()
    records.close()
    assert [event["step"] for event in lines(tmp_path / "events.jsonl")] == list(range(20))


def test_a_disk_that_takes_no_record_is_reported_at_the_next_step(tmp_path):
    records = Records.open(tmp_path, 0)
    (tmp_path / "metrics.jsonl").mkdir()  # nothing can be appended to a folder
    log(records, 1)
    until = time.monotonic() + 60
    with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl cannot be written: Is a directory") as fault:
        while time.monotonic() < until:
            records.flush(1)
    assert fault.value.code == "X706"
    with pytest.raises(EnvironmentFault):
        records.settle()  # nothing may be published behind a record that is missing
    records.event(event("failure", 1))  # another file, which takes it
    records.close()
    assert lines(tmp_path / "events.jsonl")[0]["event"] == "failure"


def test_a_disk_that_is_waited_for_no_longer_is_reported(tmp_path, disk, monkeypatch):
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.2)
    records = Records.open(tmp_path, 0)
    log(records, 1)
    records.settle(1)
    disk.clear()
    log(records, 2)
    records.settle(2)
    disk.set()
    records.close()
    (warning,) = lines(tmp_path / "events.jsonl")
    assert (warning["event"], warning["step"]) == ("warning", 2)
    assert warning["message"].startswith("rank 0: ") and "did not write all records within 0.2 s" in warning["message"]


def test_an_event_that_cannot_be_written_raises_where_it_was_reported(tmp_path):
    records = Records.open(tmp_path, 0)
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(EnvironmentFault, match=r"events\.jsonl cannot be written"):
        records.event(event("eval", 1))
    records.close()


def test_steps_are_rolled_back_when_their_records_have_been_written(tmp_path, disk):
    records = Records.open(tmp_path, 0)
    disk.clear()
    for step in range(1, 6):
        log(records, step)
    threading.Timer(0.2, disk.set).start()
    records.undo_after(3)
    log(records, 4, again=True)
    records.close()
    assert [record["step"] for record in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    (aside,) = (tmp_path / "logs").iterdir()
    assert [record["step"] for record in lines(aside)] == [4, 5]


def test_no_thread_is_left_and_what_is_reported_later_is_written(tmp_path):
    before = threading.active_count()
    records = Records.open(tmp_path, 1)
    assert threading.active_count() == before  # a rank that only begins has none
    records.own.write(RankMetrics(step=1))
    records.close()
    records.close()
    assert threading.active_count() == before
    records.event(event("failure", 1), every_rank=True)
    assert threading.active_count() == before
    assert len(lines(tmp_path / "events.jsonl")) == 1


def test_close_is_bounded(tmp_path, disk):
    records = Records.open(tmp_path, 0)
    disk.clear()
    log(records, 1)
    records.close(0.2)
    assert not taken(tmp_path), "it came back although the disk has taken nothing"
    disk.set()
    records.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_an_outlet_that_many_send_to_keeps_the_order_of_each():
    taken: list[tuple[int, int]] = []
    queue = BackgroundQueue("test", taken.append)

    def send(who: int) -> None:
        for number in range(300):
            queue.send((who, number))
            if number % 50 == 0:
                queue.close(5)

    threads = [threading.Thread(target=send, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert queue.close(5)
    for who in range(4):
        assert [number for other, number in taken if other == who] == list(range(300))


def test_records_with_long_lists_take_the_room_of_their_values():
    rest = {"moe/load/0": [0.5] * 64}
    assert Sizes().of(StepMetrics(step=1, rest=rest)) - Sizes().of(StepMetrics(step=1)) == 1 + 64
    nodes = {"a": 1.0, "b": 2.0}
    assert Sizes().of(RankMetrics(step=1, node_seconds=nodes)) - Sizes().of(RankMetrics(step=1)) == 2


def test_half_a_line_that_a_full_disk_has_left_is_ended(tmp_path, monkeypatch):
    path, write = tmp_path / "metrics.jsonl", os.write
    out = JsonLinesFile(path)

    def full(fd: int, content: bytes) -> int:
        write(fd, content[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("xtrain.runtime.base.json_lines.os.write", full)
    with pytest.raises(EnvironmentFault):
        out.write(StepMetrics(step=1, time=None))
    monkeypatch.undo()
    out.write(StepMetrics(step=2, time=None))
    out.close()
    assert path.read_bytes() == b'{"st\n{"step":2}\n'
