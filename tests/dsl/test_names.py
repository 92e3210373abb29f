"""Names that become folders are one folder each, wherever they are given; paths are what a system can open."""

import pytest

from xtrain.planner.load import check_loaded

LONG = "x" * 201
WRONG = {
    "..": "not the path", ".": "not the path", "": "empty", " ": "empty", "a/b": "not contain `/`",
    "../a": "not contain `/`", "/etc": "not contain `/`", "a\\\\b": "not contain `\\`", "a\\nb": "U+000A",
    "a\\u{0}": "U+0000", LONG: "200 bytes", "ä" * 101: "200 bytes, not 202",
}  # fmt: skip
PLACES = {
    "workspace.run": 'workspace {{ run = "{}" }}',
    "workspace.lineage": 'workspace {{ lineage = "{}" }}',
    "experiment.name": 'experiment "{}"',
    "dataset": 'dataset "{}" {{ source = python_stdlib() }}',
    "phase": 'phase "{}" {{ from = 50% }}',
}


def errors(result):
    return [(d.code, d.message, d.span) for d in result.diagnostics.errors]


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("place", PLACES)
def test_a_name_that_is_no_folder_is_refused_where_it_stands(load, place, name):
    ((code, message, span),) = errors(load(PLACES[place].format(name)))
    assert code == "X304" and WRONG[name] in message and span.text == f'"{name}"', message


@pytest.mark.parametrize("path", ["workspace.run", "workspace.lineage", "experiment.name"])
def test_from_the_command_line_as_well(load, path):
    ((code, _, span),) = errors(load("", f'{path}=".."'))
    assert (code, span.source.path, span.text) == ("X304", "--set", '".."')
    assert not errors(load("", f'{path}="a~b c.1"'))


@pytest.mark.parametrize("name", ["mine", "~a b", "..a", "-", "ä" * 100, "2026.1"])
def test_other_names_are_taken(load, name):
    for text in PLACES.values():
        assert not errors(load(text.format(name))), text


@pytest.mark.parametrize(
    "text",
    ['workspace { root = "a\\u{0}" }', 'launch { stop_file = "a\\u{0}" }', 'checkpoint { from = "a\\u{0}" }',
        'checkpoint { pretrained = "a\\u{0}" }', 'dataset web { source = text("b", "a\\u{0}") }',
        'dataset web { source = huggingface("a\\u{0}") }',
        'dataset web { source = text("b"), messages = "m", template = "a\\u{0}" }', 'tokenizer "a\\u{0}"'],
)  # fmt: skip
def test_no_path_has_a_zero_in_it(load, text):
    ((code, message, span),) = errors(load(text))
    assert code == "X304" and "U+0000" in message and span.text == '"a\\u{0}"'


@pytest.mark.parametrize(
    "text",
    ['include "LONG.xtrain"', 'use "LONG"', 'use "LONG.py"', 'tokenizer "LONG"', 'loss distill { teacher = "LONG" }',
        'loss distill { teacher = "LONG", live = true }', 'checkpoint { from = "LONG" }',
        'checkpoint { pretrained = "LONG" }', 'dataset stdlib { source = text("LONG") }',
        'dataset stdlib { source = huggingface("./LONG") }',
        'dataset stdlib { source = jsonl("b"), messages = "m", template = "LONG" }',
        'use "parts.py"\nloss grpo\nrollout { group = 2, max_tokens = 4 }\nreward model { folder = "LONG" }'],
)  # fmt: skip
@pytest.mark.parametrize("long", ["x" * 300, "x/" * 3000])
def test_a_name_that_no_file_can_have_is_a_name_of_no_file(load, text, long):
    result = load(text.replace("LONG", long))
    said = check_loaded(result).render()
    assert long[:100] in said
