"""Values of environment variables in commands: they are where the command runs, and in no file or message."""

import json

import pytest

from xtrain.dsl.env_text import EnvText, Variable, filled, hidden, shown, variables_in
from xtrain.dsl.load import load_spec
from xtrain.planner.load import plan_from_text
from xtrain.planner.report.render import render
from xtrain.planner.serialise import dumps, from_json

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
    assert text == "a x by" and shown(text) == "a env(KEY) benv(HOST)"
    assert shown(EnvText.of("a ", Variable("KEY", "x"))) == "a x" and shown("env(KEY)") == "env(KEY)"
    environment = {"KEY": "env(HOST)", "HOST": "h", "OTHER": "o"}
    assert filled("a env(KEY) env(OTHER) env(HOST)", {"KEY", "HOST"}, environment) == "a env(HOST) env(OTHER) h"
    with pytest.raises(ValueError, match="HOST is not set here"):
        filled("env(HOST)", {"HOST"}, {})
