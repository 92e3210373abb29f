"""Values of environment variables in texts that are handed on: they are where a text is used, and in no file or
message."""

import json
from typing import get_args

import pytest

from xtrain.dsl.checking.context import Context
from xtrain.dsl.checking.convert import convert, settled
from xtrain.dsl.diagnostics.diagnostic import SourceText, Span
from xtrain.dsl.evaluation.values import Value
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.actions import ACTIONS
from xtrain.dsl.schema.data_components import LINKS, SOURCES
from xtrain.dsl.schema.run import TRACKERS
from xtrain.dsl.schema.setting import Setting, settings_of
from xtrain.dsl.values import EnvText, HiddenText, Variable, filled, hidden, masked, value_of, variables_in
from xtrain.plan.serialise import dumps, from_json
from xtrain.planner.load import plan_from_text
from xtrain.planner.review.diff import compare_plans, render_diff
from xtrain.planner.review.page import render
from xtrain.records.events import EVENT_TYPES, FailureEvent
from xtrain.records.lines import free_texts
from xtrain.records.training_events import ExportEvent
from xtrain.runtime.base.errors import EnvironmentFault
from xtrain.runtime.base.ops import Op
from xtrain.runtime.base.packages import package_faults
from xtrain.runtime.base.user_parts import part_of, user_source
from xtrain.runtime.observe.records import Records

SPEC = """experiment small { budget = 4 steps }
model llama { dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 48 }
tokenizer bytes
dataset lines { source = python_stdlib() }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
let key = env("KEY")
on finish notify("curl -H '" + key + "' " + env("HOST", "local"))
on loss_spike notify("echo " + env("KEY"))
"""


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("KEY", "SECRET123")
    monkeypatch.setenv("HOST", "hidden.example")


def planned(text: str = SPEC):
    compiled = plan_from_text(text, "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    return compiled


def test_a_plan_and_a_resolved_spec_have_names_in_place_of_values(monkeypatch):
    compiled = planned()
    plan = compiled.plan
    for text in (dumps(plan), compiled.resolved_text, render(plan, full=True), json.dumps(plan.config)):
        assert "SECRET123" not in text and "hidden.example" not in text
    assert "curl -H 'env(KEY)' env(HOST)" in dumps(plan)
    assert """"curl -H '" + env("KEY") + "' " + env("HOST")""" in compiled.resolved_text
    assert variables_in(plan.spec_text) == {"KEY", "HOST"}
    again = load_spec("small.xtrain", (), {"small.xtrain": compiled.resolved_text})
    assert again.resolved_text() == compiled.resolved_text and not again.diagnostics.has_errors
    # Another value is the same plan, and so the same run.
    monkeypatch.setenv("KEY", "other")
    assert planned().plan.id == plan.id and from_json(json.loads(dumps(plan))).id == plan.id


def test_plain_values_and_those_of_other_settings_are_written():
    text = SPEC.replace('env("KEY")', 'env("KEY", plain = true)') + 'workspace { root = env("HOST") }\n'
    plan = planned(text).plan
    assert "curl -H 'SECRET123' env(HOST)" in dumps(plan) and plan.workspace["root"] == "hidden.example"


@pytest.mark.parametrize("argument", ["plain = 1", "plain = false, other = true", "clear = true"])
def test_other_arguments(argument):
    loaded = load_spec("a.xtrain", (), {"a.xtrain": SPEC.replace('env("KEY")', f'env("KEY", {argument})', 1)})
    assert "SECRET123" not in loaded.diagnostics.render()
    assert loaded.diagnostics.has_errors == ("plain = 1" not in argument)


@pytest.mark.parametrize("setting", ['batch { micro = env("KEY") }', 'batch { micro = env("KEY", 1) }'])
def test_messages_do_not_have_values(setting):
    found = load_spec("a.xtrain", (), {"a.xtrain": SPEC + setting}).diagnostics
    assert found.has_errors and "SECRET123" not in found.render() + json.dumps([each.to_json() for each in found])


def test_commands_get_values_where_they_run():
    text = hidden(EnvText.of("a ", Variable("KEY", "x"), EnvText.of(" b", Variable("HOST", "y"))))
    assert text == "a env(KEY) benv(HOST)" and value_of(text) == "a x by"
    assert hidden("env(KEY)") == value_of("env(KEY)") == "env(KEY)"
    environment = {"KEY": "env(HOST)", "HOST": "h", "OTHER": "o"}
    assert filled("a env(KEY) env(OTHER) env(HOST)", {"KEY", "HOST"}, environment) == "a env(HOST) env(OTHER) h"
    nested = {"a": ["env(KEY)", 1], "b": {"c": "env(OTHER)"}}
    assert filled(nested, {"KEY"}, environment) == {"a": ["env(HOST)", 1], "b": {"c": "env(OTHER)"}}
    with pytest.raises(ValueError, match="HOST is not set here"):
        filled("env(HOST)", {"HOST"}, {})


def test_messages_have_names_for_values():
    environment = {"KEY": "secret", "LONG": "secret-of-all", "SHORT": "ab"}
    found = masked({"a": ["no secret-of-all, secret ab", 3]}, environment.keys(), environment)
    assert found == {"a": ["no env(LONG), env(KEY) ab", 3]}


def text_settings():
    """(block, name, type, if it is the label) of every text in the language."""
    classes = [*blocks.KINDS.values(), *(each for registry in registries() for each in registry.values())]
    for block in dict.fromkeys(classes):
        named = {name: attribute.type for name, (attribute, _) in settings_of(block).items()}
        label = blocks.label_of(block)
        if label is not None and label.type is str:
            named[label.name] = str
        label = "" if label is None else label.name
        yield from ((block, name, kind, name == label) for name, kind in named.items() if str in mentioned(kind))


def registries():
    seen = [getattr(block, "components", None) for block in blocks.KINDS.values()]
    return [ACTIONS, TRACKERS, SOURCES, LINKS, *(each for each in seen if each is not None)]


def mentioned(kind):
    return {kind} | {part for each in get_args(kind) for part in mentioned(each)}


def test_texts_that_are_handed_on_are_hidden_and_all_others_plain():
    secret, hides = EnvText.of("a ", Variable("KEY", "SECRET123")), set()
    for block, name, kind, is_label in text_settings():
        context = Context(name, name, block, Setting(doc=""), is_label=is_label)
        kept = settled(secret, context)
        if isinstance(kept, HiddenText):
            hides.add((getattr(block, "kind", ""), name))
        assert (type(kept), kept) in ((HiddenText, "a env(KEY)"), (str, "a SECRET123")), (block, name)
        if kind is str or kind == str | None:
            span = Span(SourceText("a", "a"), 0, 1)
            converted = convert(kind, Value(secret, span), context, None)  # type: ignore[arg-type]
            assert type(converted) is type(kept), (block, name)
    assert hides == {
        ("notify", "command"),
        *(("wandb", name) for name in ("project", "entity", "name", "group", "tags", "notes")),
        *((kind, name) for kind in PROJECTS for name in ("project", "name", "tags")),
        *(("mlflow", "uri"), ("trackio", "space"), ("aim", "repo"), ("comet", "workspace")),
        *(("swanlab", name) for name in ("workspace", "description")),
    }


PROJECTS = ("mlflow", "trackio", "comet", "swanlab", "aim")
PARTS = """from xtrain import collator, hook, source, tracker
@source
def lines(url, deep=None):
    yield f"{url} {deep}"
@collator(takes="rows of token tensors", gives="rows of token tensors")
def tag(row, url):
    return row
@hook("before_step")
def ping(run, url): ...
@tracker
class board:
    def open(self, run, url): ...
    def close(self, code): ...
"""
OWN = """use "parts.py"
experiment small { budget = 4 steps }
model llama { dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 48 }
tokenizer bytes
dataset own { source = lines("x:" + env("KEY"), deep = { a: [env("HOST"), 1] }) }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
collate = to_tensor -> tag(url = env("KEY")) -> flatten -> shift_tokens -> pack(sequential)
hook ping { url = env("KEY") }
log { board { url = env("KEY") }, wandb { project = env("HOST"), tags = [env("KEY")] } }
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts.py").write_text(PARTS)
    return tmp_path


def test_arguments_of_own_parts_and_trackers_are_hidden_and_arrive(own, monkeypatch):
    plan = planned(OWN).plan
    for text in (dumps(plan), plan.spec_text, render(plan, full=True), json.dumps(plan.config)):
        assert "SECRET123" not in text and "hidden.example" not in text and "env(" in text
    plan = from_json(json.loads(dumps(plan)))
    options = next(node.args["options"] for node in plan.nodes if node.op == "setup.data")
    assert list(user_source(options, own)) == ["x:SECRET123 {'a': ['hidden.example', 1]}"]
    for op, name in (("step.hook", "hook"), ("setup.log.user", "tracker")):
        part = part_of(name, next(node.args["user"] for node in plan.nodes if node.op.startswith(op)), own)
        assert part.arguments == {"url": "SECRET123"} and "SECRET123" not in repr(part)
    assert planned(OWN).plan.id == plan.id
    # A source that reads elsewhere is another experiment, and what was planned is not run with it.
    monkeypatch.setenv("KEY", "SECRET456")
    other = planned(OWN).plan
    assert other.config_id != plan.config_id
    with pytest.raises(EnvironmentFault, match="KEY, an argument of the source `lines`, has changed") as caught:
        list(user_source(options, own))
    assert caught.value.code == "X713" and "SECRET" not in str(caught.value)
    said = render_diff(compare_plans(plan, other), ("a", "b"))
    assert "SECRET" not in said and "options.variables.KEY" in said
    assert "unknown" not in said
    monkeypatch.delenv("KEY")
    assert next(fault.code for fault in package_faults(plan)) == "X709"
    with pytest.raises(EnvironmentFault, match="KEY is not set here"):
        list(user_source(options, own))


def test_a_text_shown_by_choice_is_an_argument_as_any_other(own):
    plan = planned(OWN.replace('env("KEY")', 'env("KEY", plain = true)')).plan
    options = next(node.args["options"] for node in plan.nodes if node.op == "setup.data")
    assert options["arguments"]["url"] == "x:SECRET123" and options["variables"].keys() == {"HOST"}


def test_trackers_get_values(own, monkeypatch):
    given = {}

    def log(trackers, project, tags, **rest):
        given.update(project=project, tags=tags)

    plan = planned(OWN).plan
    node = next(node for node in plan.nodes if node.op == "setup.log.wandb")
    assert node.args["project"] == "env(HOST)" and node.args["tags"] == ["env(KEY)"]
    Op("setup.log.wandb", log, None).bind(node, {"plan": plan, "trackers": None})()
    assert given == {"project": "hidden.example", "tags": ["SECRET123"]}
    monkeypatch.setenv("HOST", "a/b")
    said = plan_from_text(OWN, "small.xtrain").diagnostics.render()
    assert "has a `/`" in said and "a/b" not in said


def test_trials_read_values_for_themselves(own):
    swept = OWN + 'sweep { hook.ping.url in [env("KEY"), "b" + env("HOST")], objective = eval.own.loss }\n'
    loaded = load_spec("small.xtrain", (), {"small.xtrain": swept})
    assert loaded.spec is not None, loaded.diagnostics.render()
    text = str(loaded.spec.sweep)
    assert 'env("KEY")' in text and """"b" + env("HOST")""" in text and "SECRET123" not in text


def test_records_have_names_for_values(tmp_path):
    records = Records.open(tmp_path, 0)
    records.variables = frozenset({"KEY"})
    records.warn("no answer from SECRET123", step=3)
    records.event(FailureEvent(step=3, rank=0, error="SECRET123", exit_code=1, traceback="x SECRET123"))
    named = {"node": "n", "weights": "trained", "formats": {}, "bytes": 1, "seconds": 1.0}
    records.event(ExportEvent(step=3, path="models/SECRET123", **named))  # a path is looked up as it is
    records.close()
    *said, export = (tmp_path / "events.jsonl").read_text().splitlines()
    assert "SECRET123" not in str(said) and str(said).count("env(KEY)") == 3
    assert '"path":"models/SECRET123"' in export
    texts = {field for event in EVENT_TYPES.values() for field in free_texts(event)}
    assert texts == {"message", "reason", "detail", "error", "traceback", "note", "changes"}
