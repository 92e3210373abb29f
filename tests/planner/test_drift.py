"""A saved plan is refused when its spec or xtrain has changed since, and runs where neither has."""

import json
import shutil
from pathlib import Path

import pytest
import rooms
from attrs import evolve

from xtrain.cli.main import main
from xtrain.plan.plan import Plan
from xtrain.plan.serialise import ROOMS, dumps, from_json, load_plan, signed, source_fingerprint
from xtrain.planner.load import plan_from_spec, plan_from_text
from xtrain.planner.review.changes import accepted, find_drift, plan_command

ROOT = Path(__file__).parents[2]
SETS = ("optimizer.lr=5e-4", "experiment.name=other")


@pytest.fixture
def spec(tmp_path, load, monkeypatch) -> Path:
    """The small spec as a file of the working folder."""
    monkeypatch.chdir(tmp_path)
    load()
    return Path("spec.xtrain")


def saved(spec: Path, sets: tuple[str, ...] = (), world: int | None = None) -> Plan:
    plan = plan_from_spec(spec, sets, world).plan
    assert plan is not None
    Path("plan.json").write_text(dumps(signed(plan, sets, world)))
    return load_plan("plan.json")


def codes(plan: Plan) -> list[str]:
    return [each.code for each in find_drift(plan)]


def edit(spec: Path, old: str, new: str) -> None:
    text = spec.read_text()
    assert old in text
    spec.write_text(text.replace(old, new))


@pytest.mark.parametrize(("sets", "world"), [((), None), (SETS, None), (SETS, 4), ((), 2)])
def test_a_plan_of_today_is_no_drift(spec, sets, world):
    plan = saved(spec, sets, world)
    assert plan.origin is not None and (plan.origin.sets, plan.origin.world) == (sets, world)
    assert codes(plan) == []


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.xtrain")), ids=lambda path: path.stem)
def test_the_text_that_a_plan_carries_gives_the_plan(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = plan_from_spec(path).plan
    assert plan is not None
    again = plan_from_text(plan.spec_text, f"{plan.spec} (stored)", world=plan.mesh.world_size).plan
    assert again is not None and again.id == plan.id


def test_the_note_is_no_part_of_the_id(spec):
    plan = saved(spec)
    assert evolve(plan, origin=None).id == from_json(json.loads(dumps(evolve(plan, origin=None)))).id == plan.id


def test_a_plan_that_is_saved_again_keeps_its_note(spec):
    plan = saved(spec, SETS)
    assert main(["plan", "plan.json", "--out", "again.json"]) == 0
    assert load_plan("again.json") == plan
    assert main(["plan", "spec.xtrain", "--world", "2", "--set", SETS[0], "--out", "new.json"]) == 0
    origin = load_plan("new.json").origin
    assert origin is not None and (origin.sets, origin.world) == (SETS[:1], 2)


def test_a_spec_that_changed_is_refused_with_what_changed(spec):
    plan = saved(spec, ("experiment.seed=7",), 2)
    edit(spec, "lr = 1e-3", "lr = 2e-3")
    (error,) = find_drift(plan)
    assert (error.severity, error.code) == ("error", "X710")
    assert "spec.xtrain" in error.message and plan.id in error.message
    notes = [note for note, _ in error.notes]
    assert notes == ["optimizer.lr was 0.001 and is 0.002 now (spec.xtrain:6:24)"]
    assert "xtrain plan spec.xtrain --world 2 --set experiment.seed=7 --out plan.json" in (error.hint or "")
    assert "--accept-drift" in (error.hint or "")


@pytest.mark.parametrize("change", ["# a comment\n", "\nscheduler constant\n", "\nevery 1 step log\n"])
def test_a_spec_that_says_the_same_otherwise_is_no_drift(spec, change):
    plan = saved(spec)
    spec.write_text(spec.read_text() + change)
    assert codes(plan) == []


def test_an_override_hides_what_it_replaces(spec):
    plan = saved(spec, ("optimizer.lr=5e-4",))
    edit(spec, "lr = 1e-3", "lr = 2e-3")
    assert codes(plan) == []


def test_an_included_file_belongs_to_the_spec(spec):
    Path("part.xtrain").write_text("optimizer adamw { lr = 1e-3 }\n")
    edit(spec, "optimizer adamw { lr = 1e-3 }", 'include "part.xtrain"')
    plan = saved(spec)
    Path("part.xtrain").write_text("optimizer adamw { lr = 3e-3 }\n")
    assert codes(plan) == ["X710"]


def test_a_spec_that_has_no_plan_any_more(spec):
    plan = saved(spec)
    edit(spec, "lr = 1e-3", "lr = -1")
    (error,) = find_drift(plan)
    assert error.code == "X710" and "no plan now" in error.message
    assert error.notes[0][0].startswith("X")


def test_a_missing_spec_is_worth_a_word_only(spec):
    plan = saved(spec)
    spec.unlink()
    (warning,) = find_drift(plan)
    assert (warning.severity, warning.code) == ("warning", "W705")


def test_a_plan_is_taken_elsewhere_with_or_without_its_spec(spec, tmp_path, monkeypatch):
    plan = saved(spec, SETS)
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy("plan.json", there)
    monkeypatch.chdir(there)
    assert codes(load_plan("plan.json")) == ["W705"]
    shutil.copy(tmp_path / "spec.xtrain", there)
    assert codes(load_plan("plan.json")) == []
    monkeypatch.chdir(tmp_path)
    assert codes(load_plan("there/plan.json")) == []
    assert load_plan("there/plan.json") == plan


def test_another_code_is_refused_even_if_it_plans_the_same(spec):
    plan = saved(spec)
    assert plan.origin is not None
    other = evolve(plan, origin=evolve(plan.origin, source="0" * 16))
    (error,) = find_drift(other)
    assert error.code == "X711" and "other source files" in error.message
    assert "it would make the same plan" in error.notes[0][0]
    older = evolve(plan, origin=evolve(plan.origin, source="0" * 16, version="0.0.1"))
    assert "0.0.1 then" in find_drift(older).errors[0].message


def test_another_code_that_plans_otherwise_says_so(spec):
    plan = saved(spec)
    assert plan.origin is not None
    stale = evolve(plan, id="f" * 16, origin=evolve(plan.origin, source="0" * 16))
    assert f"not {'f' * 16}" in find_drift(stale).errors[0].notes[0][0]
    unplanned = evolve(plan, spec_text="nonsense", origin=evolve(plan.origin, source="0" * 16))
    assert "cannot plan the spec" in find_drift(unplanned).errors[0].notes[0][0]


def test_the_text_of_the_plan_can_be_changed_by_hand_but_not_unseen(spec):
    plan = saved(spec)
    changed = evolve(plan, spec_text=plan.spec_text.replace("lr = 0.001", "lr = 0.5"))
    assert changed.spec_text != plan.spec_text
    spec.unlink()
    assert codes(changed) == ["W705", "X710"]
    assert find_drift(changed).errors[0].notes[0][0].startswith("optimizer.lr was 0.001 and is 0.5 now")


def test_a_tokenizer_belongs_to_what_a_plan_is_made_of(spec):
    vocabulary = {chr(97 + i): i for i in range(20)} | {"<s>": 20, "</s>": 21}

    def write(words: dict[str, int]) -> None:
        model = {"type": "WordLevel", "vocab": words, "unk_token": "a"}
        Path("tok").mkdir(exist_ok=True)
        Path("tok/tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": []}))

    write(vocabulary)
    edit(spec, "tokenizer bytes", 'tokenizer "tok"')
    plan = saved(spec)
    assert plan.architecture.vocab == 22
    write({**vocabulary, "more": 22})
    (error,) = find_drift(plan)
    assert error.code == "X710" and "now gives a different plan" in error.message
    assert any("model.vocab was 22 and is 23 now" in note for note, _ in error.notes)


def test_a_plan_that_does_not_say_how_it_was_made(spec):
    plan = evolve(saved(spec, SETS), origin=None)
    assert codes(plan) == ["W705"]
    edit(spec, "lr = 1e-3", "lr = 2e-3")
    assert codes(plan) == ["W705"], "whether --set was given is not known"
    assert codes(evolve(plan, id="f" * 16)) == ["W705", "X711"]


def test_accepted_drift_is_a_warning(spec):
    plan = saved(spec)
    edit(spec, "lr = 1e-3", "lr = 2e-3")
    (warning,) = accepted(find_drift(plan))
    assert (warning.severity, warning.code) == ("warning", "W706")
    assert "has changed" in warning.message and warning.notes and warning.hint is None


def test_the_command_that_plans_anew_can_be_typed(spec):
    plan = evolve(saved(spec, ("experiment.budget=10 steps",), 2), spec="a b.xtrain")
    assert plan_command(plan) == "xtrain plan 'a b.xtrain' --world 2 --set 'experiment.budget=10 steps'"


def test_the_fingerprint_covers_every_room_but_display_and_commands():
    assert {*rooms.ROOMS} - {*ROOMS} == {"api", "cli", "client", "lsp", "records", "tui"}


def test_the_fingerprint_is_of_names_and_contents(tmp_path):
    for room in ROOMS:
        (tmp_path / room).mkdir()
    file = tmp_path / "runtime" / "step.py"
    file.write_text("x = 1\n")
    first = source_fingerprint(tmp_path)
    source_fingerprint.cache_clear()
    assert source_fingerprint(tmp_path) == first
    (tmp_path / "runtime" / "notes.md").write_text("no source")
    seen = {first}
    for path, text in (
        (file, "x = 2\n"),
        (tmp_path / "dsl" / "words.lark", "a"),
        (tmp_path / "planner" / "new.py", ""),
        (tmp_path / "components" / "new_torch.py", ""),
    ):
        path.write_text(text)
        source_fingerprint.cache_clear()
        assert source_fingerprint(tmp_path) not in seen
        seen.add(source_fingerprint(tmp_path))
    file.rename(tmp_path / "runtime" / "other.py")
    source_fingerprint.cache_clear()
    assert source_fingerprint(tmp_path) not in seen
    source_fingerprint.cache_clear()
