"""What is written to a run directory, and what a resumed run takes back."""

import json
import resource

import pytest
from projects import Project

from xtrain.planner.load import plan_from_spec
from xtrain.runtime.checkpoint.transaction import Transaction
from xtrain.runtime.errors import EnvironmentFault
from xtrain.runtime.executor import Executor
from xtrain.runtime.observation.lines import JsonLines, records_since, trim_after
from xtrain.runtime.observation.records import Records


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_only_the_first_rank_writes_metrics_and_shared_events(tmp_path):
    for rank in (0, 1):
        records = Records.open(tmp_path, rank)
        records.metric({"step": 1, "loss": 2.0})
        records.event("checkpoint", step=1)
        records.event("failure", step=1, every_rank=True, rank=rank)
        records.own.write({"step": 1})
        records.close()
    assert len(lines(tmp_path / "metrics.jsonl")) == 1
    assert [e["event"] for e in lines(tmp_path / "events.jsonl")] == ["checkpoint", "failure", "failure"]
    assert (tmp_path / "ranks" / "00001.jsonl").exists()


def test_numbers_added_to_a_step_go_into_its_record_or_get_their_own(tmp_path):
    records = Records.open(tmp_path, 0)
    records.add_to_metric({"eval/web/loss": 1.5})
    records.metric({"step": 1, "loss": 2.0})
    records.flush(1)
    records.add_to_metric({"eval/web/loss": 1.4})
    records.flush(2)
    records.close()
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first == {"step": 1, "loss": 2.0, "eval/web/loss": 1.5}
    assert second["step"] == 2 and second["eval/web/loss"] == 1.4


def test_numbers_json_has_no_word_for_become_text(tmp_path):
    records = Records.open(tmp_path, 0)
    records.metric({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    records.close()
    assert lines(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": "nan", "grad_norm": "inf"}]


def test_steps_that_come_again_are_moved_aside(tmp_path):
    path, aside = tmp_path / "metrics.jsonl", tmp_path / "logs" / "superseded.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"step":3}\n{"step":')
    assert trim_after(path, 2, aside) == 2
    assert path.read_text() == '{"step":1}\n{"step":2}\n'
    assert aside.read_text() == '{"step":3}\n{"step":'
    assert trim_after(path, 2, aside) == 0
    assert trim_after(tmp_path / "none.jsonl", 0, aside) == 0


def test_half_a_line_is_ended_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"ev')
    for step in (3, 4):
        lines = JsonLines(path)
        lines.write({"step": step})
        lines.close()
    assert path.read_bytes() == b'{"step":1}\n{"step":2,"ev\n{"step":3}\n{"step":4}\n'
    assert [record["step"] for record in records_since(path, 0)] == [1, 3, 4]


def test_a_disk_that_takes_no_record_is_told_with_the_file(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.write({"step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, (15, before[1]))
    try:
        with pytest.raises(EnvironmentFault, match=r"metrics\.jsonl cannot be written: File too large") as told:
            lines.write({"step": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.value.code == "X706"
    assert [record["step"] for record in records_since(lines.path, 0)] == [1]


def test_what_was_measured_is_recorded_before_its_step_is_saved(tmp_path, monkeypatch):
    """A run that is killed right behind the save goes on behind the step, and will not measure it again."""
    found: list[list[dict]] = []
    run = Transaction.run

    def look_and_run(self, *arguments) -> None:
        found.append(lines(tmp_path / "run" / "metrics.jsonl"))
        run(self, *arguments)

    monkeypatch.setattr(Transaction, "run", look_and_run)
    monkeypatch.chdir(tmp_path)
    more = "every 2 steps eval lines { batches = 1 }\nevery 2 steps checkpoint\ncheckpoint { mode = sync }"
    spec = tmp_path / Project(tmp_path).spec(steps=2, more=more)
    spec.write_text(spec.read_text().replace("every 1 step log", "every 100 steps log"))
    plan = plan_from_spec(spec).plan
    assert plan is not None
    assert Executor(plan, tmp_path / "run", rank=0).run() == "done"
    assert "eval/lines/loss" in found[0][-1] and found[0][-1]["step"] == 2
