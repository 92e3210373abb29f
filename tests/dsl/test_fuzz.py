"""No spec, however broken, shows a traceback; and what does not load says why, with a place."""

import itertools
from pathlib import Path

import pytest
from examples import drawn
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xtrain.dsl.diagnostics.diagnostic import Diagnostics, SourceText, render
from xtrain.dsl.load import load_spec
from xtrain.dsl.syntax.format import format_source
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.dsl.syntax.parser import parse_file
from xtrain.planner.load import check_from_spec

DATA = Path(__file__).parent / "data"
TEXTS = [(DATA / f"{name}.xtrain").read_text(encoding="utf-8") for name in ("quickstart", "every_form")]
FRAGMENTS = ["{", "}", "(", ")", "[", "]", ",", "=", "==", ":", "->", "..", '"', '"""', "'", "#", "\n", "then",
             "every", "on", "let", "include", "%", "**", "//", "1f1b", "9k", "10 steps", ".", "-", "\\", "\0", "é",
             "“", ";", "none", "auto", "\t", "1e999", "0x1", "collate", "every 1 step log"]  # fmt: skip
FEW = drawn(20, 1000, suppress_health_check=[HealthCheck.function_scoped_fixture])


def words(text):
    """A text cut at the borders of its tokens, blanks included."""
    borders = sorted(
        {0, len(text), *(b for t in tokenize(SourceText("", text), Diagnostics()) for b in (t.start, t.end))}
    )
    return [text[a:b] for a, b in itertools.pairwise(borders)]


WORDS = [words(text) for text in TEXTS]


@st.composite
def mutants(draw):
    """A good spec with up to four words or characters deleted, doubled, swapped or replaced."""
    parts = list(draw(st.sampled_from([*WORDS, *map(list, TEXTS)])))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(parts) - 2))
        match draw(st.integers(0, 4)):
            case 0:
                del parts[place]
            case 1:
                parts.insert(place, parts[place])
            case 2:
                parts[place], parts[place + 1] = parts[place + 1], parts[place]
            case 3:
                parts[place] = draw(st.sampled_from(FRAGMENTS))
            case _:
                parts.insert(place, draw(st.sampled_from(FRAGMENTS)))
    return "".join(parts)


def check(path, text):
    """Load a text: it gives a spec, or errors of which one has a place; and everything can be rendered."""
    path.write_text(text, encoding="utf-8", newline="")
    loaded = load_spec(path)
    errors = loaded.diagnostics.errors
    assert (loaded.spec is None) == bool(errors)
    assert not errors or any(error.span is not None for error in errors)
    for diagnostic in loaded.diagnostics:
        assert render(diagnostic) and diagnostic.to_json()
    return loaded


@pytest.fixture
def place(tmp_path):
    (tmp_path / "cluster.xtrain").write_text((DATA / "cluster.xtrain").read_text())
    return tmp_path / "spec.xtrain"


@FEW
@given(mutants())
def test_mutants_load_or_say_why(place, text):
    loaded = check(place, text)
    if loaded.spec is not None:
        place.write_text(loaded.resolved_text(), encoding="utf-8")
        assert load_spec(place).spec == loaded.spec


@FEW
@given(st.lists(st.sampled_from([*FRAGMENTS, " ", "a", "model", "tp 2", "x = 1"]), max_size=30).map(" ".join))
def test_word_salad_loads_or_says_why(place, text):
    assert check(place, text).spec is None


@FEW
@given(st.text(max_size=60))
def test_any_text_loads_or_says_why(place, text):
    assert check(place, text.encode("utf-8", "ignore").decode()).spec is None


@pytest.mark.parametrize("text", TEXTS)
def test_every_prefix_loads_or_says_why(place, text):
    for end in range(0, len(text), 29):
        check(place, text[:end])


@FEW
@given(mutants())
def test_the_formatter_keeps_the_tree_and_is_idempotent(text):
    source = SourceText("spec", text)
    diagnostics = Diagnostics()
    tree = parse_file(source, diagnostics)
    if diagnostics.has_errors:
        return
    formatted = format_source(source)
    again = SourceText("spec", formatted)
    assert parse_file(again, Diagnostics()) == tree
    assert format_source(again) == formatted
    comments = [[t.text.rstrip() for t in tokenize(s, Diagnostics()) if t.type == "COMMENT"] for s in (source, again)]
    assert comments[0] == comments[1]


SETS = st.lists(st.one_of(st.text(max_size=20), st.tuples(
    st.sampled_from(["optimizer.lr", "parallel.tp", "dataset.stdlib.source", "workspace.root", "collate", "model"]),
    st.sampled_from([*FRAGMENTS, "1", "a b", '"x"', "to_tensor -> flatten"]),
).map("=".join)), max_size=3)  # fmt: skip


@FEW
@given(SETS)
def test_any_set_loads_or_says_why(sets):
    loaded = load_spec(DATA / "quickstart.xtrain", [text.encode("utf-8", "ignore").decode() for text in sets])
    assert (loaded.spec is None) == loaded.diagnostics.has_errors
    loaded.diagnostics.render(color=True)


@pytest.mark.parametrize(("text", "code"), [
    (f'tokenizer "{"a" * 5000}"', "X505"),
    ('tokenizer "a\\u{0}b"', "X304"),
    ('tokenizer ""', "X505"),
    (f'dataset more {{ source = text("{"a" * 5000}/*") }}', "W501"),
    ('dataset more { source = text("a\\u{0}/*") }', "X304"),
    ('dataset more { source = text("[") }', "W501"),
    (f'include "{"a" * 5000}"', "X120"),
    ('include "a\\u{0}b"', "X120"),
    ("a {" * 2000 + "}" * 2000, "X130"),
    ("every 1 step log {" + "a {" * 2000 + "}" * 2001, "X130"),
    ("\n".join(f"let a{n} = a{n + 1}" for n in range(2000)), "X307"),
    ("\n".join(f"let a{n} = -[1 + (2 * f({{ x: a{n + 1} }}))]" for n in range(300)), "X307"),
    ("a { {", "X101"),  # nothing above that it could be joined to
])  # fmt: skip
def test_what_fuzzing_has_found(text, code):
    found = check_from_spec("spec.xtrain", (), {"spec.xtrain": TEXTS[0] + text})
    assert code in [d.code for d in found]
    assert all(d.fix.span.text != d.fix.text for d in found if d.fix)


def test_files_that_include_one_another_without_end():
    texts = {f"{n}.xtrain": f'include "{n + 1}.xtrain"\n' for n in range(2000)}
    found = check_from_spec("0.xtrain", (), texts)
    (error,) = found.errors
    assert error.code == "X120" and "too many files" in error.message
    assert len(error.all_notes) == 100
