"""The events of a run and the ends of its logs."""

from pathlib import Path

from made_runs import made_run

from xtrain.tui.model import event_log
from xtrain.tui.model.event_log import LOG_BYTES, MAX_ENTRIES, EventReader


def test_events_by_kind_and_text(tmp_path: Path) -> None:
    log = EventReader(tmp_path)
    log.take([
        {"time": 1.0, "step": 2, "event": "warning", "message": "The loader is SLOW"},
        {"time": 2.0, "step": 3, "event": "checkpoint", "path": "checkpoints/a", "bytes": 5, "seconds": 1.0},
        {"event": "warning"},
        {},
    ])  # fmt: skip
    found = log.log()
    assert [entry.number for entry in found.entries] == [0, 1, 2, 3]
    assert found.kinds == {"warning": 2, "checkpoint": 1, "": 1}
    assert [entry.number for entry in found.filtered(text="slow")] == [0]
    assert [entry.number for entry in found.filtered(text="CHECK")] == [1]
    assert [entry.number for entry in found.filtered(kinds={"warning"})] == [0, 2]
    assert found.filtered(kinds=set()) == () and found.filtered() == found.entries


def test_of_many_events_the_newest_are_kept(tmp_path: Path) -> None:
    log = EventReader(tmp_path)
    log.take({"time": float(i), "step": i, "event": "skipped", "reason": "x"} for i in range(MAX_ENTRIES + 10))
    found = log.log()
    assert len(found.entries) == MAX_ENTRIES and found.forgotten == 10 and found.entries[0].number == 10


def test_ends_of_logs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(event_log, "LOOK_SECONDS", 0.0)
    run = made_run(tmp_path / "run", logged=2)
    log = EventReader(run.directory)
    log.look()
    (tail,) = log.log().logs
    assert tail.name == "rank-00000.log" and not tail.cut and len(tail.lines) == 100
    version = log.log().version
    log.look()
    assert log.log().version == version
    path = run.directory / "logs" / "long.log"
    path.write_bytes(b"half of a line\n" * 10_000 + b"the \x1b[31mend\xff")
    log.look()
    long = log.log().logs[0]
    assert long.name == "long.log" and long.cut and long.lines[-1] == "the \ufffd[31mend\ufffd"
    assert long.lines[0] == "half of a line" and sum(map(len, long.lines)) <= LOG_BYTES
    path.unlink()
    log.look()
    assert [each.name for each in log.log().logs] == ["rank-00000.log"]
