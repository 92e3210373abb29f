"""What is written to a run directory, and what a resumed run takes back."""

import json
import resource
from types import SimpleNamespace

import pytest
from made_records import event, log, metrics
from projects import Project

from xtrain.planner.load import plan_from_spec
from xtrain.records.lines import objects_since
from xtrain.records.metrics import RankMetrics, StepMetrics
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.json_lines import JsonLinesFile, last_step, trim_after
from xtrain.runtime.loop.executor import Executor
from xtrain.runtime.observe.records import Records


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_the_first_rank_writes_metrics_and_shared_events(tmp_path):
    for rank in (0, 1):
        records = Records.open(tmp_path, rank)
        log(records, 1, loss=2.0)
        records.event(event("checkpoint", 1))
        records.event(event("failure", 1, rank=rank), every_rank=True)
        records.own.write(RankMetrics(step=1))
        records.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert [e["event"] for e in lines(tmp_path / "events.jsonl")] == ["checkpoint", "failure", "failure"]
    assert (tmp_path / "ranks" / "00001.jsonl").exists()


@pytest.mark.parametrize(("text", "step"), [
    (None, 0), ("", 0), ('{"step": 2}\n{"step": 3}\n', 3), ('{"step": 2}\n{"step', 0), ('{"loss": 2.0}\n', 0),
    ('{"step": "2"}\n', 0), ("[2]\n", 0), (f'{{"step": 2, "more": "{"x" * 100_000}"}}\n\n', 2),
])  # fmt: skip
def test_the_last_step_of_a_file(tmp_path, text, step):
    path = tmp_path / "metrics.jsonl"
    if text is not None:
        path.write_text(text)
    assert last_step(path) == step


@pytest.mark.parametrize("first", ["log", "eval"])
def test_a_step_has_one_record_whatever_comes_first(tmp_path, first):
    records = Records.open(tmp_path, 0)
    both = [lambda: records.log(metrics(1, time=5.0, loss=2.0)), lambda: records.measured({"eval/web/loss": 1.5})]
    for report in both if first == "log" else reversed(both):
        report()
    records.flush(1)
    records.measured({"eval/web/loss": 1.4})
    records.flush(2)
    records.flush(3)
    records.close()
    one, two = lines(tmp_path / "metrics.jsonl")
    assert one == {"step": 1, "time": 5.0, "loss": 2.0, "eval/web/loss": 1.5}
    assert two["step"] == 2 and two["eval/web/loss"] == 1.4


@pytest.mark.parametrize("size", [1, 700_000])
@pytest.mark.parametrize("again", [False, True])
def test_what_is_measured_behind_a_record_that_is_written_is_added_to_it(tmp_path, again, size):
    """Also by another start of the run, and where lines are long."""
    path = tmp_path / "metrics.jsonl"
    records, taken = Records.open(tmp_path, 0), []
    for step in (1, 2, 3):
        log(records, step, time=float(step), loss=2.0, more="x" * size)
    if again:
        records.close()
        records = Records.open(tmp_path, 0)
    records.sinks.append(SimpleNamespace(metric=taken.append))  # type: ignore[arg-type]
    records.measured({"eval/web/loss": float("nan")})
    records.flush(3)
    assert lines(path)[-1] == {"step": 3, "time": 3.0, "loss": 2.0, "more": "x" * size, "eval/web/loss": "nan"}
    log(records, 4, time=4.0)
    records.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3, 4] and not path.with_suffix(".tmp").exists()
    assert taken[0].step == 3 and taken[0].time > 3 and taken[0].loss is None
    assert taken[0].rest == {"eval/web/loss": pytest.approx(float("nan"), nan_ok=True)}


def test_nothing_is_added_to_the_record_of_another_step(tmp_path, monkeypatch):
    """The record of step 2 found no room to wait in: what is measured behind it has a line of its own."""
    records = Records.open(tmp_path, 0)
    log(records, 1, time=1.0, loss=2.0)
    with monkeypatch.context() as full:
        full.setattr(records.writer, "write", lambda *given: False)
        log(records, 2, time=2.0, loss=2.0)
    records.measured({"eval/web/loss": 1.5})
    records.flush(2)
    records.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert "eval/web/loss" not in first and (second["step"], second["eval/web/loss"]) == (2, 1.5)


def test_numbers_json_has_no_word_for_become_text(tmp_path):
    records = Records.open(tmp_path, 0)
    log(records, 1, loss=float("nan"), grad_norm=float("inf"))
    records.close()
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line.pop("time") and line == {"step": 1, "loss": "nan", "grad_norm": "inf"}


def test_steps_that_come_again_are_moved_aside(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "logs" / "superseded.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"step":3}\n{"step":')
    assert trim_after(path, 2, aside) == 2
    assert path.read_text() == '{"step":1}\n{"step":2}\n'
    assert aside.read_text() == '{"step":3}\n{"step":'
    assert trim_after(path, 2, aside) == 0
    assert trim_after(tmp_path / "none.jsonl", 0, aside) == 0


@pytest.mark.parametrize(("left", "kept"), [
    (b'{"step":1}\n{"step":2,"ev', b'{"step":1}\n{"step":2,"ev\n'),
    (b'{"step":1}\n' + bytes(100), b'{"step":1}\n'),  # after a power cut
    (b'{"step":1}\n{"st' + bytes(2_000_000), b'{"step":1}\n{"st\n'),
    (bytes(3), b""),
])  # fmt: skip
def test_what_a_crash_has_left_is_ended_and_the_next_line_is_whole(tmp_path, left, kept):
    path = tmp_path / "events.jsonl"
    path.write_bytes(left)
    for step in (3, 4):
        lines = JsonLinesFile(path)
        lines.write(StepMetrics(step=step, time=None))
        lines.close()
    assert path.read_bytes() == kept + b'{"step":3}\n{"step":4}\n'
    assert [record["step"] for record in objects_since(path)] == [1, 3, 4][not kept :]


def test_a_disk_that_takes_no_record_is_reported_with_the_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = JsonLinesFile(tmp_path / "metrics.jsonl")
    lines.write(StepMetrics(step=1, time=None))
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl cannot be written: File too large") as fault:
            lines.write(StepMetrics(step=2, time=None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert fault.value.code == "X706"
    assert [record["step"] for record in objects_since(lines.path)] == [1]


EVERY_ORDER = """
every 2 steps eval lines { batches = 1 }
every 2 steps log
every 3 steps log then eval lines { batches = 1 }
every 2 steps checkpoint then eval other
every 4 steps generate { prompts = ["a"], tokens = 2 } then log
dataset other { source = jsonl("data.jsonl"), holdout = 100% }
on finish eval lines then log
checkpoint { keep = none, model = false }
"""


STOPPED = "on stop_at eval other then log then checkpoint then stop"


def run_of(folder, name, steps=6, more=EVERY_ORDER, sets=()) -> str:
    """How a run in this process ends; its directory is `name`."""
    spec = folder / Project(folder).spec(steps=steps, more=more)
    plan = plan_from_spec(spec, sets).plan
    assert plan is not None
    return Executor(plan, folder / name, rank=0).run()


def without_times(directory) -> list[dict]:
    """Records with what is the same in every run of a plan."""
    measured = ("second", "time", "tflops", "memory")
    return [{k: v for k, v in line.items() if not any(m in k for m in measured)} for line in lines(directory)]


def test_every_step_has_one_line_however_a_run_comes_to_it(tmp_path, monkeypatch):
    """At once, or stopped with an evaluation, or killed right behind a save, and gone on with."""
    monkeypatch.chdir(tmp_path)
    assert run_of(tmp_path, "whole") == "done"
    expected = without_times(tmp_path / "whole" / "metrics.jsonl")
    assert [line["step"] for line in expected] == [1, 2, 3, 4, 5, 6]
    assert [("loss" in line, "eval/lines/loss" in line, "eval/other/loss" in line) for line in expected] == [
        (True, False, False), (True, True, True), (True, True, False), (True, True, True), (True, False, False),
        (True, True, True),
    ]  # fmt: skip
    assert [line["step"] for line in lines(tmp_path / "whole" / "ranks" / "00000.jsonl")] == [1, 2, 3, 4, 5, 6]

    assert run_of(tmp_path, "stopped", more=EVERY_ORDER + STOPPED, sets=("launch.stop_at=5 steps",)) == "stopped"
    path = tmp_path / "stopped" / "metrics.jsonl"
    assert "eval/other/loss" in lines(path)[-1] and len(lines(path)) == 5
    assert run_of(tmp_path, "stopped") == "done"
    found = without_times(path)
    assert all(found[4].pop(f"eval/other/{name}") for name in ("loss", "bits_per_byte")) and found == expected
    untimed = [line["step"] for line in lines(path) if "step_seconds" not in line]
    assert untimed == [1, 6], "the first step of each start is in no average"

    # Killed right behind a save, before the record of its step was written: the checkpoint has kept it.
    assert run_of(tmp_path, "killed", sets=("launch.stop_at=4 steps",)) == "stopped"
    path = tmp_path / "killed" / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines(path)[:3]))
    assert run_of(tmp_path, "killed") == "done"
    assert without_times(path) == expected
    assert not (tmp_path / "killed" / "metrics.tmp").exists()


def test_a_step_whose_evaluation_fails_is_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def fail(*given) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr("xtrain.components.actions.eval_torch.forwarded", fail)
    assert run_of(tmp_path, "run", more="every 1 step log then eval lines") == "failed"
    assert [line["step"] for line in lines(tmp_path / "run" / "metrics.jsonl") if "loss" in line] == [1]
