"""Trackers of the user's own: classes that are read from their text, and chosen inside `log`."""

import json
import re
from pathlib import Path

import jsonschema
import pytest

from xtrain.dsl.load import load_spec
from xtrain.dsl.reference.json_schema import json_schema
from xtrain.dsl.reference.text import own_functions
from xtrain.dsl.spec_text import spec_json
from xtrain.planner.load import plan_from_path
from xtrain.planner.review.page import render
from xtrain.planner.review.resumable import resumable

PARTS = '''\
from xtrain import optimizer, tracker

raise SystemExit("this file was run")

@tracker
class Notes:
    """Notes in a file."""
    def __init__(self): ...
    def open(self, context, file: str = "notes", every: int = 1): ...
    def metrics(self, record, more=1): ...
    def close(self, *how): ...

@optimizer()
def mine(groups): ...
'''
BASE = re.sub("optimizer .*", "", (Path(__file__).parent / "data" / "quickstart.xtrain").read_text())


@pytest.fixture
def own(load, tmp_path):
    """Load a text with a file of parts beside it."""

    def run(text, parts=PARTS, sets=()):
        (tmp_path / "parts.py").write_text(parts)
        usual = "" if "optimizer" in text else "optimizer adamw { lr = 1e-3 }"
        (tmp_path / "plain.xtrain").write_text(f"{BASE}\n{usual}")
        (tmp_path / "spec.xtrain").write_text(f'{BASE}\n{usual}\n{text}\nuse "parts.py"')
        return load_spec("spec.xtrain", sets)

    return run


def test_it_is_a_block_of_log_whose_settings_are_the_parameters_of_open(own):
    loaded = own("log { tensorboard = true, Notes { every = 2 } }", sets=("log.Notes.file=n",))
    assert loaded.spec is not None, loaded.diagnostics.render()
    tensorboard, notes = loaded.spec.log.trackers()
    assert (tensorboard.kind, notes.kind) == ("tensorboard", "Notes")
    assert notes.call()["arguments"] == {"file": "n", "every": 2} and loaded.spec.used == ["parts.py"]
    Path("again.xtrain").write_text(loaded.resolved_text())
    again = load_spec("again.xtrain")
    assert not again.diagnostics and again.spec == loaded.spec
    written = json.loads(json.dumps(spec_json(loaded.spec)))
    assert written["log"]["Notes"] == {"file": "n", "every": 2}
    jsonschema.validate(written, json_schema())
    del written["use"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(written, json_schema())


def test_its_node_calls_it_and_the_experiment_stays_the_same(own):
    own("log { Notes {} }")
    plan = plan_from_path("spec.xtrain").plan
    node = plan.node("setup.log.Notes")
    assert node.op == "setup.log.user" and node.args["user"]["arguments"] == {"file": "notes", "every": 1}
    assert node.does == "the first rank passes records to Notes of parts.py (Notes in a file), during training"
    assert "also to Notes of parts.py" in render(plan)
    plain = plan_from_path("plain.xtrain").plan
    assert plan.config_id == plain.config_id
    other = plan_from_path("spec.xtrain", ("log.Notes.every=3",)).plan
    for before, after in ((plain, plan), (plan, plain), (plan, other)):
        verdict = resumable(before, after)
        assert (verdict.kind, verdict.effect) == ("safe", "none")
        assert {reason.path for reason in verdict.reasons} == {"log.Notes"}


# (text, code, part of the message, part of the hint or the notes)
CHOSEN = [
    ("log { Note {} }", "X203", "unknown setting `Note`", "`Notes`"),
    ("log { Notes = true }", "X210", "`Notes` is a block", None),
    ("log { Notes { evry = 1 } }", "X203", "unknown setting `evry`", "`every`"),
    ('log { Notes { every = "x" } }', "X301", "`every` must be a whole number", None),
    ("log { Notes { every = 10 steps } }", "X302", "`every` is a plain number", None),
    ("optimizer Notes { lr = 1 }", "X219", "`Notes` is a tracker", "`log { NAME { … } }`"),
    ("log { tensorboard = true }", "W204", "nothing declared in", "Notes"),
]


@pytest.mark.parametrize(("text", "code", "message", "hint"), CHOSEN)
def test_its_settings_are_checked(own, text, code, message, hint):
    (found,) = own(text).diagnostics
    assert found.code == code and message in found.message
    assert hint is None or hint in f"{found.hint} {[note for note, _ in found.all_notes]}"


OPEN = "    def open(self, context): ...\n"
METRICS = "    def metrics(self, record): ...\n"
# (what stands behind the imports, part of the message, text of the line that it points at)
DECLARED = [
    ("@tracker\ndef f(context): ...", "`f` is a function", "def f"),
    ("@optimizer()\nclass F: ...", "`F` is a class", "class F"),
    (f"@tracker\nclass F:\n{METRICS}", "`F` has no `open`", "class F"),
    (f"@tracker\nclass F(lib.Base):\n{METRICS}", "`F` has no `open` in this file, and `lib.Base` is not read",
        "class F"),
    (f"class B(F):\n{METRICS}\n@tracker\nclass F(B): ...", "`F` has no `open`", "class F"),
    (f"class B:\n    def open(self, c, *a): ...\n@tracker\nclass F(B):\n{METRICS}", "any argument", "def open"),
    (f"class B:\n{OPEN}\n@tracker\nclass F(B): ...", "`F` would receive nothing", "class F"),
    (f"@tracker\nclass F:\n{OPEN}", "`F` would receive nothing", "class F"),
    (f"@tracker\nclass F:\n    async def open(self, context): ...\n{METRICS}", "is an async function", "async"),
    (f"@tracker\nclass F:\n    def open(self): ...\n{METRICS}", "no parameter for `self` and `context`", "def open"),
    (f"@tracker\nclass F:\n    def open(self, c, *a): ...\n{METRICS}", "accepts any argument", "def open"),
    (f"@tracker\nclass F:\n    def open(self, c, a=f()): ...\n{METRICS}", "only when the code is run", "def open"),
    (f"@tracker\nclass F:\n{OPEN}    def event(self): ...\n", "`event` of `F` must take only `record`", "def event"),
    (f"@tracker\nclass F:\n{OPEN}    def event(self, r, *, n): ...\n", "`event` of `F` must take", "def event"),
    (f"@tracker\nclass F:\n{OPEN}    def metrics(self, a, b): ...\n", "`metrics` of `F` must take", "def metrics"),
    (f"@tracker\nclass F:\n    def __init__(self, a): ...\n{OPEN}{METRICS}", "created without arguments", "__init__"),
    (f"@tracker(3)\nclass F:\n{OPEN}{METRICS}", "takes no arguments", "@tracker"),
    (f"def f():\n    @tracker\n    class F:\n    {OPEN}    {METRICS}", "inside something else", "class F"),
]  # fmt: skip


@pytest.mark.parametrize(("parts", "message", "line"), DECLARED)
def test_declarations_are_checked_in_the_users_file(own, parts, message, line):
    (found,) = own("", f"from xtrain import optimizer, tracker\n{parts}\n").diagnostics
    assert found.code == "X223" and message in found.message
    assert found.span.source.path == "parts.py" and line in found.span.source.line(found.span.line)


def test_names_of_trackers_are_taken_and_classes_may_inherit(own):
    (found,) = own("", f"from xtrain import tracker\n@tracker\nclass wandb:\n{OPEN}{METRICS}").diagnostics
    assert found.code == "X224"
    text = f"from xtrain import tracker\n@tracker\nclass F(Base):\n{OPEN}"
    assert not own("log { F {} }", text).diagnostics
    base = f"class B:\n    def open(self, context, level: int = 1): ...\n{METRICS}"
    base += "class C(B):\n    def metrics(self, a): ...\n"
    text = f"from xtrain import tracker\n{base}@tracker\nclass F(C, object): ...\n"
    loaded = own("log { F { level = 2 } }", text)
    assert loaded.spec is not None, loaded.diagnostics.render()
    assert [tracker.given() for tracker in loaded.spec.log.trackers()] == [{"level": 2}]


def test_what_an_unreadable_file_may_declare_is_no_second_mistake(own):
    (found,) = own("log { Notes {} }", "def f(:\n").diagnostics
    assert found.code == "X222"


def test_docs_say_what_a_class_declares(own):
    own("")
    text = own_functions("parts.py", None)  # type: ignore[arg-type]
    assert "Notes  tracker, of parts.py:6" in text and "a tracker is chosen by `log { Notes { … } }`" in text
    assert 'file  string; default "notes"' in text
