"""What a plan prints as a default is the default: written into the spec, it compiles to the same plan."""

from pathlib import Path

import pytest

from xtrain.dsl.load import load_spec
from xtrain.plan.views import spell
from xtrain.planner.graph.provenance import settings_provenance
from xtrain.planner.load import plan_from_path

ROOT = Path(__file__).parents[2]
SPECS = ("chat", "curriculum", "grpo_cpu", "moe_cpu", "pipeline_cpu", "adapter_cpu", "dpo_cpu", "llama_8b_64gpu")
OPTIMIZERS = ("adafactor", "muon", "sgd", "adamw8bit")
BARE = """experiment bare {{ budget = 2000 steps }}
model qwen3 {{ dim = 32, layers = 1, heads = 2, kv_heads = 1, ffn = 64 }}
tokenizer bytes
dataset d {{ source = python_stdlib(), holdout = 5% }}
batch {{ sequence = 64, rows = 4 }}
optimizer {optimizer} {{ lr = 1e-3 }}
"""


def compiled(path, sets=()):
    found = plan_from_path(path, sets)
    assert found.plan is not None, found.diagnostics.render()
    return found.plan


def printed(plan, prefix=""):
    return [each for each in plan.provenance if each.origin == "default" and each.path.startswith(prefix)]


def is_of_trigger(entry):
    return entry.path.startswith(("every.", "on."))


@pytest.fixture
def specs(tmp_path, monkeypatch):
    """The path of a spec by its name: one of specs/, or the bare one with an optimizer."""
    for path in (path for path in (ROOT / "specs").iterdir() if path.is_file()):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for optimizer in OPTIMIZERS:
        (tmp_path / f"{optimizer}.xtrain").write_text(BARE.format(optimizer=optimizer))
    # A chain that is written packs conversations by `auto` only if it says so.
    talks = BARE.format(optimizer="adamw").replace(
        "python_stdlib()", 'jsonl("a.jsonl"), messages = "messages", template = "plain"'
    )
    (tmp_path / "talks.xtrain").write_text(talks)
    (tmp_path / "a.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    monkeypatch.chdir(tmp_path)
    return lambda name: tmp_path / f"{name}.xtrain"


@pytest.mark.parametrize("name", [*SPECS, *OPTIMIZERS, "talks"])
def test_settings_that_are_written_as_they_are_printed_change_nothing(specs, name):
    plan = compiled(specs(name))
    given = [f"{each.path}={each.value}" for each in printed(plan) if not is_of_trigger(each)]
    assert len(given) > 80
    again = compiled(specs(name), given)
    values = {each.path: each.value for each in plan.provenance}
    assert {each.path: each.value for each in again.provenance} == values
    assert again.id == plan.id


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.xtrain")), ids=lambda path: path.stem)
def test_every_written_block_has_its_values_in_the_plan(path):
    spec = load_spec(path).require()
    written = {path.partition(".")[0] for path, origin in spec.origins.items() if origin.span is not None}
    found = {entry.path.partition(".")[0] for entry in settings_provenance(spec) if entry.origin != "default"}
    assert written - {"sweep"} == found  # a plan is of one trial


@pytest.mark.parametrize("name", [*SPECS, *OPTIMIZERS, "talks"])
def test_ticks_and_events_that_are_written_as_they_are_printed_change_nothing(specs, name):
    plan = compiled(specs(name))
    ticks = [f"every {each.value} {each.path.removeprefix('every.')}" for each in printed(plan, "every.") if each.how]
    events = [f"on {each.path.removeprefix('on.')} {each.value}" for each in printed(plan, "on.") if each.how]
    assert events
    text = specs(name).read_text(encoding="utf-8")
    first = [line for line in events if line.startswith("on finish")]  # it comes before what else is done
    lines = [*first, text, *ticks, *(line for line in events if line not in first)]
    specs(name).write_text("\n".join(lines), encoding="utf-8")
    again = compiled(specs(name))
    assert again.id == plan.id and not [each for each in printed(again) if each.how and is_of_trigger(each)]


@pytest.mark.parametrize("last", ["pack", "pack(auto)", "pack(multipack, group = 10)", "pack(align = 2)"])
@pytest.mark.parametrize("before", ["", 'fill_in_middle(rate = 10%, prefix = "<p>") -> '])
def test_the_chain_is_printed_with_its_settings(specs, last, before):
    chain = f"to_tensor -> flatten -> {before}shift_tokens -> {last}"
    spec = load_spec(specs("sgd"), [f"collate={chain}"]).require()
    assert spell(spec.collate) == chain


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-6, "1e-06"), (10000.0, "10000"), (1.19209289e-07, "1.19209289e-07"), ((), "[]"), (("a", "b"), '["a", "b"]'),
     ((0.9, 0.95), "[0.9, 0.95]"), ({}, "{}"), (None, "none"), (True, "true"), ("runs", "runs")],
)  # fmt: skip
def test_spelling(value, text):
    assert spell(value) == text
