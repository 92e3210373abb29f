"""Blocks whose names are the user's own: `mixture`, maps, and phases; from text to a spec and back."""

import pytest

from xtrain.components.sources.huggingface import HuggingFace
from xtrain.components.sources.synthetic import Synthetic
from xtrain.components.sources.tokens import Tokens
from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema.data import Mixture, Phase
from xtrain.dsl.schema.setting import AUTO
from xtrain.dsl.syntax.format import format_source
from xtrain.dsl.values import Quantity

TWO = "dataset web { source = synthetic() }\ndataset code { source = synthetic() }\n"


def spec_of(load, text, *sets):
    return load(text, *sets).require()


def test_a_mixture_is_a_map_of_what_is_written(load):
    spec = spec_of(load, f"{TWO}let w = 2\nmixture {{ web = w * 0.25, code = 1 }}")
    assert spec.mixture == Mixture(weights={"web": 0.5, "code": 1.0}, temperature=1.0)
    assert all(type(weight) is float for weight in spec.mixture.weights.values())
    assert spec.origins["mixture.web"].kind == "let" and spec.origins["mixture.code"].kind == "text"
    assert spec.origins["mixture.temperature"].kind == "default"
    name = spec.origins["mixture.code.name"].span
    assert name is not None and name.text == "code"


def test_weights_are_numbers_or_epochs(load):
    text = f"{TWO}let n = 2\nmixture {{ web = n * 1.5 epochs, code = 1 epoch }}\n"
    spec = spec_of(load, f"{text}phase late {{ from = 50%, mix = {{ web: 0.5 epochs, code: 2 }} }}", "mixture.code=0")
    assert spec.mixture.weights == {"web": Quantity(3, "epochs"), "code": 0.0}
    assert spec.phases["late"].mix == {"web": Quantity(0.5, "epochs"), "code": 2.0}


@pytest.mark.parametrize("mix", ["{ web: -1 }", "{ web: -1 epochs, code: 1 }"])
def test_no_weight_of_a_phase_is_negative(load, mix):
    found = load(f"{TWO}phase late {{ from = 50%, mix = {mix} }}").diagnostics
    assert [error.code for error in found] == ["X304"]


def test_without_a_mixture_there_is_none(load):
    spec = spec_of(load, "")
    assert spec.mixture == Mixture() and spec.phases == {} and spec.origins["mixture"].kind == "default"


def test_a_later_mixture_wins_name_by_name(load):
    spec = spec_of(load, f"{TWO}mixture {{ web = 1, temperature = 2 }}\nmixture {{ code = 3, web = 2 }}")
    assert spec.mixture == Mixture(weights={"web": 2.0, "code": 3.0}, temperature=2.0)


def test_a_later_phase_wins_setting_by_setting(load):
    text = "phase late { from = 10%, mix = { web: 1, code: 2 } }\nphase early { from = 5 steps }\n"
    later = 'include "first.xtrain"\nphase late { mix = { code: 3 }, lr_scale = 0.5 }'
    spec = load(later, first=TWO + text).require()
    assert list(spec.phases) == ["late", "early"]
    assert spec.phases["late"] == Phase(name="late", from_=Quantity(10, "%"), mix={"code": 3.0}, lr_scale=0.5)
    place = spec.origins["phase.late.mix.code.name"].span
    assert place is not None and place.text == "code" and spec.origins["phase.late.from"].kind == "text"


@pytest.mark.parametrize(("change", "expected"), [
    ("mixture.web=0.25", {"web": 0.25, "code": 1.0}),
    ("mixture.other=2", {"web": 1.0, "code": 1.0, "other": 2.0}),  # whether it is a dataset, the planner knows
    ("mixture.web=1 / 4", {"web": 0.25, "code": 1.0}),
])  # fmt: skip
def test_weights_can_be_set(load, change, expected):
    spec = spec_of(load, f"{TWO}mixture {{ web = 1, code = 1 }}", change)
    assert spec.mixture.weights == expected
    path = change.partition("=")[0]
    assert spec.origins[path].kind == spec.origins[f"{path}.name"].kind == "set"


def test_phases_can_be_set(load):
    text = f"{TWO}mixture {{ web = 1, code = 1 }}\nphase late {{ from = 50% }}"
    spec = spec_of(load, text, "phase.late.from=10 steps", "phase.late.mix={ web: 3 }", "phase.late.lr_scale=0.1")
    assert spec.phases["late"] == Phase(name="late", from_=Quantity(10, "steps"), mix={"web": 3.0}, lr_scale=0.1)
    (error,) = load(text, "phase.lat.from=10 steps").diagnostics
    assert error.code == "X217" and "`late`" in (error.hint or "")


@pytest.mark.parametrize(("value", "expected"), [("auto", AUTO), ("chatml", "chatml"), ('"auto"', "auto")])
def test_auto_is_a_word_where_text_may_be_automatic(load, value, expected):
    spec = spec_of(load, 'dataset chat { source = jsonl("a"), messages = "m" }', f"dataset.chat.template={value}")
    assert spec.datasets["chat"].template == expected


def test_sources_with_settings(load):
    spec = spec_of(
        load,
        'dataset a { source = huggingface("o/n", split = "test") }\ndataset b { source = synthetic(3, 9, seed = 1) }\n'
        'dataset c { source = tokens("x.npy", "y.bin", dtype = "uint32", separator = 5) }',
    )
    assert spec.datasets["a"].source == HuggingFace(name="o/n", split="test")
    assert spec.datasets["b"].source == Synthetic(documents=3, length=9, seed=1)
    assert spec.datasets["c"].source == Tokens(patterns=("x.npy", "y.bin"), dtype="uint32", separator=5)


ROUND = f"""{TWO}dataset chat {{ source = tokens("a", separator = 0) }}
mixture {{ web = 0.5, chat = 1e-7, code = 0, temperature = 3 }}
phase one {{ from = 1.5M tokens, mix = {{ web: 0, "code": 2, }} }}
phase "two words" {{ from = 12.5%, mix = {{}}, lr_scale = 1e-3 }}
phase often {{ from = 50%, mix = {{ web: 0.5 epochs, "code": 2 epochs }} }}
"""


def test_the_resolved_text_is_the_same_spec(load, tmp_path):
    loaded = load(ROUND)
    again = tmp_path / "again.xtrain"
    again.write_text(loaded.resolved_text())
    assert load_spec(again).require() == loaded.require()
    assert load_spec(again).resolved_text() == loaded.resolved_text()


def test_fmt_writes_maps_and_mixtures_in_the_one_style():
    ragged = "mixture{web=0.8,code=0.2}\nphase   late {from=90%,mix={web:0.3,code:0.7},lr_scale=2}\n"
    neat = "mixture { web = 0.8, code = 0.2 }\nphase late { from = 90%, mix = { web: 0.3, code: 0.7 }, lr_scale = 2 }\n"
    assert format_source(SourceText("s", ragged)) == neat == format_source(SourceText("s", neat))


@pytest.mark.parametrize(("text", "code", "replacement"), [
    ("mixture { web 0.8 }", "X210", "web = 0.8"),
    ("mixture { web = 80% }", "X302", "0.8"),
    ("mixture { web = 2 steps }", "X302", "2"),
    ('mixture { web = "0.8" }', "X301", "0.8"),
    ("mixture = { web: 0.8 }", "X210", " { web = 0.8 }"),
    ("phase late { from = 10%, mix = { web: 20% } }", "X302", "0.2"),
    ("phase late { form = 10% }", "X203", "from"),
    ("batch { prefech = 2 }", "X203", "prefetch"),
    ('dataset other { source = "a.parquet" }', "X301", 'parquet("a.parquet")'),
    ('dataset web { source = jsonl("a"), mesages = "m" }', "X203", "messages"),
])  # fmt: skip
def test_what_can_be_fixed_for_certain(load, text, code, replacement):
    found = load(f"{TWO}{text}").diagnostics
    (fix,) = [each.fix for each in found if each.code == code]
    assert fix is not None and fix.text == replacement


def test_a_broken_weight_makes_only_itself_unknown(load):
    loaded = load(f'{TWO}mixture {{ web = "1", code = 1 }}\nphase late {{ from = 10%, mix = {{ web: none }} }}')
    assert loaded.unknown_settings == {"mixture.web", "phase.late.mix"}
    assert loaded.draft is not None and loaded.draft.mixture.weights.keys() == {"web", "code"}
    assert load(f"{TWO}mixture {{ web 1 }}").unknown_settings == {"mixture.*"}
