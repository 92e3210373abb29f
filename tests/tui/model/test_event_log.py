"""The events of a run and the ends of its logs."""

from collections.abc import Collection
from pathlib import Path

from made_runs import MadeRun, made_run
from read_records import events

from xtrain.records.training_events import SkippedEvent
from xtrain.tui.model import event_log as log_tails
from xtrain.tui.model.event_log import LOG_BYTES, MAX_ENTRIES, MAX_LOGS, EventReader, LogReader
from xtrain.tui.model.reader import RunReader


def test_events_by_kind_and_text(tmp_path: Path) -> None:
    log = EventReader(tmp_path)
    log.take(events({"time": 1.0, "step": 2, "event": "warning", "message": "The loader is SLOW"}, {
        "time": 2.0, "step": 3, "event": "checkpoint", "path": "checkpoints/a", "bytes": 5, "seconds": 1.0,
    }, {"event": "warning"}, {}))  # fmt: skip
    found = log.log()
    assert [entry.number for entry in found.entries] == [0, 1, 2, 3]
    assert found.kinds == {"warning": 2, "checkpoint": 1, "": 1}
    assert [entry.number for entry in found.filtered(text="slow")] == [0]
    assert [entry.number for entry in found.filtered(text="CHECK")] == [1]
    assert [entry.number for entry in found.filtered(kinds={"warning"})] == [0, 2]
    assert found.filtered(kinds=set()) == () and found.filtered() == found.entries


def test_of_many_events_the_newest_are_kept(tmp_path: Path) -> None:
    log = EventReader(tmp_path)
    log.take(SkippedEvent(step=i, time=float(i), reason="x") for i in range(MAX_ENTRIES + 10))
    found = log.log()
    assert len(found.entries) == MAX_ENTRIES and found.forgotten == 10 and found.entries[0].number == 10


def test_ends_of_logs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(log_tails, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(log_tails, "REST", 0.0)
    run = made_run(tmp_path / "run", logged=2)
    log = EventReader(run.directory)
    log.look()
    (tail,) = log.log().logs
    assert tail.name == "rank 0 stdout" and not tail.cut and len(tail.lines) == 100
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
    assert [each.name for each in log.log().logs] == ["rank 0 stdout"]


def test_what_ranks_print_is_found_where_the_agent_puts_it(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", "experts", end="running", logged=2)
    for rank in range(4):
        run.print(rank, "stderr", f"a word of rank {rank}\n")
    (run.directory / "logs" / "notify.log").write_text("sent\n")
    (run.directory / "logs" / "stuck-1").mkdir()
    (run.directory / "logs" / "stuck-1" / "other.log").write_text("no log of an attempt\n")
    names = [f"rank {rank} stderr" for rank in range(4)]
    found = logs(run)
    assert sorted(found) == sorted(["notify.log", "rank 0 stdout", *names])
    assert found["rank 2 stderr"] == ("a word of rank 2",)
    assert list(logs(run, {2, 3}))[:2] == ["rank 2 stderr", "rank 3 stderr"]
    run.attempt = 2
    run.print(1, "stderr", "another attempt\n")
    assert logs(run) == {"notify.log": ("sent",), "rank 1 stderr": ("another attempt",)}


def test_of_many_ranks_a_failed_one_is_found(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="waiting")
    for rank in range(1100):
        run.print(rank, "stderr", f"{rank}\n")
    found = logs(run, {1099})
    assert len(found) == MAX_LOGS and next(iter(found)) == "rank 1099 stderr"


def test_the_failed_rank_is_the_first_of_a_board(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", end="failed", logged=2)
    run.print(1, "stderr", "Traceback\n")
    assert RunReader(run.directory).poll(1.0).events.logs[0].name == "rank 1 stderr"


def logs(run: MadeRun, failed: Collection[int] = ()) -> dict[str, tuple[str, ...]]:
    reader = LogReader(run.directory)
    reader.look(failed)
    return {tail.name: tail.lines for tail in reader.tails}
