"""What a run directory says of what was run, what earlier starts had, and what has changed since."""

import json
import math
import subprocess
from pathlib import Path

import pytest
import yaml
from attrs import evolve
from faulty_disk import Death, FaultyDisk
from hypothesis import given
from hypothesis import strategies as st

from xtrain.plan.canonical import fingerprint
from xtrain.plan.plan import Plan
from xtrain.plan.views import default_text, non_defaults
from xtrain.planner.load import plan_from_spec
from xtrain.runtime.base import files as durable
from xtrain.runtime.base.errors import EnvironmentFault, ResumeRefused
from xtrain.runtime.observe import provenance as metadata
from xtrain.runtime.observe.provenance import CodeUnread, CodeVersion, read_before, to_yaml, written_by
from xtrain.runtime.store.run_directory import MOST, find_changes, open_workspace

SPEC = """
experiment small { budget = 20 steps }
model qwen3 { dim = 32, layers = 2, heads = 4, kv_heads = 2 }
tokenizer bytes
dataset noise { source = synthetic() }
batch { sequence = 64, micro = 1, rows = 4 }
optimizer adamw { lr = 3e-3, eps = 1e-8 }
scheduler constant {}
workspace { run = "one" }
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    """`make("a.b=c", …)`: a plan of the spec, which lies in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.xtrain").write_text(SPEC)

    def plan(*sets: str) -> Plan:
        result = plan_from_spec("spec.xtrain", sets)
        assert result.plan is not None, result.diagnostics.render()
        return result.plan

    return plan


def start(plan: Plan):
    opened = open_workspace(plan, plan.spec_text)
    opened.lock.close()
    return opened


def read(opened, name: str) -> dict:
    return yaml.safe_load((opened.directory / "metadata" / name).read_text())


def git(folder: Path, *arguments: str) -> None:
    command = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(command, check=True, capture_output=True)


# YAML -----------------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=12)


@given(st.dictionaries(st.text(), VALUES))
def test_yaml_says_what_was_said(value):
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize("text", ["yes", "on", "1", "1e-8", "0x1f", "null", "~", "- a", "a: b", "#", "", " a", "\x85"])
def test_a_text_stays_a_text(text):
    assert yaml.safe_load(to_yaml({text: [text]})) == {text: [text]}


def test_small_numbers_are_numbers_for_either_version_of_yaml():
    assert to_yaml({"eps": 1e-08}) == "eps: 1.0e-08\n"


# The files ------------------------------------------------------------------------------------------------------------


def test_the_canonical_settings_are_what_the_id_of_the_experiment_hashes(make):
    plan = make("optimizer.eps=1e-7")
    opened = start(plan)
    found = read(opened, "config.canonical.yaml")
    assert fingerprint(found) == plan.config_id and math.isclose(found["optimizer"]["eps"], 1e-7)
    found["optimizer"]["eps"] = 1e-6
    assert fingerprint(found) != plan.config_id


def test_the_full_settings_are_all_and_the_differences_those_that_somebody_chose(make):
    opened = start(make("batch.prefetch=2", "checkpoint.keep=none"))
    full = read(opened, "config.full.yaml")
    assert full["model.norm_eps"] == 1e-6 and full["model.heads"] == 4 and full["checkpoint.keep"] is None
    assert full["model.tie_embeddings"] is False and full["collate"].startswith("to_tensor ->")
    chosen = read(opened, "config.diff.yaml")["from_defaults"]
    assert chosen.keys() < full.keys()
    assert chosen["optimizer.lr"] == 0.003 and chosen["checkpoint.keep"] is None
    # written, and what would be there anyway
    assert "batch.prefetch" not in chosen and "optimizer.eps" not in chosen and "model.norm_eps" not in chosen


def test_every_default_that_a_plan_shows_is_the_default(make):
    plan = make()
    defaults = {entry.path: entry.value for entry in plan.provenance if entry.origin == "default"}
    known = {path: text for path in defaults if (text := default_text(path)) is not None}
    assert len(known) > 50 and {path: defaults[path] for path in known} == known
    assert {entry.path for entry in non_defaults(plan)} >= {"model.family", "optimizer.kind", "batch.rows"}


def test_code_versions_and_machine_are_written(make, tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "own.py").write_text("a = 1\n")
    git(tmp_path, "add", "own.py")
    git(tmp_path, "commit", "-q", "-m", "one")
    (tmp_path / "own.py").write_text("a = 2\n")
    opened = start(make())
    version = read(opened, "git.yaml")
    assert version["dirty"] is True and len(version["code_id"]) == 8 and len(version["sha"]) == 40
    assert "+a = 2" in (opened.directory / "metadata/git.diff").read_text()
    environment = read(opened, "environment.json")
    assert environment["attempt"] == opened.attempt and environment["code_id"] == version["code_id"]
    said = written_by(opened.directory)
    assert said["code_id"] == version["code_id"] and {"xtrain", "torch", "python", "source"} < said.keys()


# Later starts ---------------------------------------------------------------------------------------------------------


def attempts(opened) -> dict[str, set[str]]:
    folder = opened.directory / "metadata" / "attempts"
    return {each.name: {path.name for path in each.iterdir()} for each in folder.iterdir()} if folder.exists() else {}


def test_what_an_earlier_start_had_is_kept_where_a_later_one_has_something_else(make):
    first = start(make())
    spec = (first.directory / "spec.xtrain").read_bytes()
    assert attempts(first) == {}
    again = start(evolve(make("optimizer.lr=1e-3")))
    earlier = again.directory / "metadata/attempts" / first.attempt
    assert attempts(again)[first.attempt] >= {"spec.xtrain", "plan.json", "config.full.yaml", "environment.json"}
    assert (earlier / "spec.xtrain").read_bytes() == spec != (again.directory / "spec.xtrain").read_bytes()
    assert yaml.safe_load((earlier / "config.full.yaml").read_text())["optimizer.lr"] == 0.003
    found = read(again, "config.diff.yaml")["from_the_start_before"]
    assert found == {"attempt": first.attempt, "values": {"optimizer.lr": {"before": 0.003, "now": 0.001}}}


def test_a_start_that_is_cut_off_anywhere_loses_nothing_of_the_one_before(make, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    plans = [make(), make("optimizer.lr=1e-3"), make("optimizer.lr=1e-4")]
    code = CodeVersion(sha="1" * 40, code_id="1" * 8, diff=b"")
    described = [metadata.describe(plan, plan.spec_text, code, f"attempt-{i}", None) for i, plan in enumerate(plans)]
    disk = FaultyDisk()
    for at in range(1000):
        directory = tmp_path / f"cut-{at}"
        metadata.write(directory, described[0], None)
        disk = FaultyDisk(at)
        with monkeypatch.context() as patch:
            patch.setattr(durable, "os", disk)
            try:
                metadata.write(directory, described[1], read_before(directory))
            except Death:
                pass
            else:
                break
        before = read_before(directory)
        assert before is not None
        metadata.write(directory, described[2], before)
        earlier = directory / "metadata/attempts"
        for name, content in described[0].items():
            copy = earlier / "attempt-0" / name.removeprefix("metadata/")
            assert (copy if copy.exists() else directory / name).read_bytes() == content, (at, name)
        for name, content in described[1].items():  # nothing of the first start is taken for one of the second
            copy = earlier / "attempt-1" / name.removeprefix("metadata/")
            assert not copy.exists() or copy.read_bytes() == content, (at, name)
        assert (directory / "plan.json").read_bytes() == described[2]["plan.json"]
    assert disk.count > 30


def test_what_has_changed_is_said_and_recorded(make):
    first = start(make())
    assert first.changes == ()
    assert start(make()).changes == ()
    again = start(make("optimizer.lr=1e-3", "experiment.budget=19 steps"))
    assert again.changes == ("optimizer.lr 0.003 → 0.001", "experiment.budget 20 steps → 19 steps")
    lines = (again.directory / "events.jsonl").read_text().splitlines()
    (event,) = map(json.loads, lines)
    assert event["event"] == "changed" and event["verdict"] == "safe" and event["changes"] == list(again.changes)


def test_other_code_and_other_versions_are_changes(make):
    plan = make()
    before = read_before(start(plan).directory)
    assert before is not None
    then = {**before.environment, "torch": "1.0", "code_id": "1a2b3c4d", "source": "0" * 16}
    found = find_changes(
        evolve(before, environment=then), plan, CodeVersion(sha="0" * 40, code_id="5e6f7a8b", diff=b""), 0
    )
    code, torch, source = found.texts
    assert code == "code 1a2b3c4d → 5e6f7a8b" and torch.startswith("torch 1.0 → ") and "source files" in source
    assert found.verdict == "same"
    unreadable = find_changes(evolve(before, environment=then, plan=None), plan, None, 0)
    assert unreadable.texts[0] == "code 1a2b3c4d → no checkout" and unreadable.verdict == ""
    unread = find_changes(evolve(before, environment=then, plan=None), plan, CodeUnread("`git` is not installed"), 0)
    assert unread.texts[0] == "code 1a2b3c4d → could not be read"


def test_many_changes_become_a_short_list(make):
    before = read_before(start(make()).directory)
    assert before is not None
    sets = ("lr=1e-3", "eps=1e-6", "weight_decay=0", "clip=2", "betas=[0.8, 0.9]")
    more = ("checkpoint.keep=9", "checkpoint.failures=9", "batch.prefetch=5", "launch.stop_deadline=9 s")
    found = find_changes(before, make(*(f"optimizer.{each}" for each in sets), *more), None, 0)
    assert len(found.texts) == MOST + 1 and found.texts[-1] == "and 1 more"


def test_what_cannot_go_on_is_refused_before_anything_is_overwritten(make, monkeypatch):
    first = start(make())
    found = find_changes(read_before(first.directory), make("optimizer.lr=1e-3", "model.dim=64"), None, 5)
    with pytest.raises(ResumeRefused, match="model dim 32 → 64"):
        found.refuse_if_unfit(first.directory)
    files = {path: path.read_bytes() for path in first.directory.rglob("*") if path.is_file()}

    def refuse(*_: object) -> None:
        raise ResumeRefused("it does not fit")

    monkeypatch.setattr("xtrain.runtime.store.run_directory._check_start", refuse)
    with pytest.raises(EnvironmentFault):
        start(make("optimizer.lr=1e-3"))
    assert {path: path.read_bytes() for path in first.directory.rglob("*") if path.is_file()} == files


def test_a_run_that_begins_anew_is_compared_with_nothing(make):
    first = start(make())
    (first.directory / "metrics.jsonl").write_text('{"step": 3}\n')
    again = start(make("optimizer.lr=1e-3", "checkpoint.resume=false"))
    assert again.changes == () and attempts(again) == {}
    assert "from_the_start_before" not in read(again, "config.diff.yaml")
