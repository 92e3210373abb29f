"""What a saved plan executes of its author's is said before it does, and where it may write."""

import pytest
from attrs import evolve

from xtrain.cli.verb import say_own_code
from xtrain.plan.serialise import PlanError, from_json, plan_id, to_json
from xtrain.planner.load import plan_from_text

SPEC = """experiment small { budget = 4 steps }
model llama { dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 48 }
tokenizer bytes
dataset lines { source = python_stdlib() }
batch { sequence = 64 }
optimizer adamw { lr = 1e-3 }
"""


def said(text: str, capsys) -> str:
    compiled = plan_from_text(SPEC + text, "small.xtrain")
    assert compiled.plan is not None, compiled.diagnostics.render()
    say_own_code(compiled.plan, "theirs/plan.json")
    return capsys.readouterr().err


def test_commands_are_named(capsys):
    assert said("", capsys) == ""
    warning = said('on finish notify("echo \x1b[2J hi")\n'.replace("\x1b", "\\u{1b}"), capsys)
    assert warning.startswith("warning: theirs/plan.json runs code of its author: `echo ") and "\x1b" not in warning


@pytest.mark.parametrize("values", [
    {"config_id": "../../../OUT"},
    {"config_id": "/OUT"},
    {"config_id": ""},
    {"name": "../OUT"},
    {"workspace": {"root": "runs", "lineage": "..", "run": None}},
    {"workspace": {"root": "runs", "lineage": None, "run": "../../OUT"}},
])  # fmt: skip
def test_a_plan_names_no_folder_outside_its_workspace(values):
    plan = plan_from_text(SPEC, "small.xtrain").plan
    assert plan is not None and from_json(to_json(plan)).id == plan.id
    changed = evolve(plan, **values)
    changed = evolve(changed, id=plan_id(changed))
    with pytest.raises(PlanError, match="the plan cannot be read: ValueError: its `"):
        from_json(to_json(changed))
