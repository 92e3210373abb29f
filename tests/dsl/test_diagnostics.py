"""The text and JSON forms of diagnostics, their order, and the mistakes that must be told together."""

import json

import pytest

from xtrain.dsl.diagnostics.diagnostic import Diagnostic, Diagnostics, Fix, SourceText, render


def test_the_format_of_the_definition():
    text = "\n" * 22 + "  pp 4 { stages_per_rnak = 2 }\n"
    source = SourceText("specs/moe.xtrain", text)
    start = text.index("stages")
    diagnostic = Diagnostic(
        severity="error", code="X203", message="unknown setting `stages_per_rnak` in `pp`",
        span=source.span(start, start + 15), hint="did you mean `stages_per_rank`?",
        notes=(("settings of `pp`: schedule, stages_per_rank", None),),
    )  # fmt: skip
    assert render(diagnostic) == (
        "specs/moe.xtrain:23:10: error[X203]: unknown setting `stages_per_rnak` in `pp`\n"
        "   23 |   pp 4 { stages_per_rnak = 2 }\n"
        "      |          ^^^^^^^^^^^^^^^ did you mean `stages_per_rank`?\n"
        "note: settings of `pp`: schedule, stages_per_rank"
    )
    assert "\x1b[" not in render(diagnostic) and "\x1b[1;31m" in render(diagnostic, color=True)


def test_a_long_line_is_cut_around_the_range():
    text = "a" * 500 + "HERE" + "b" * 500
    diagnostic = Diagnostic(severity="error", code="X101", message="m", span=SourceText("s", text).span(500, 504))
    _, line, carets = render(diagnostic).split("\n")
    assert len(line) < 180 and line.count("…") == 2
    assert line[carets.index("^") : carets.rindex("^") + 1] == "HERE"


def test_no_character_of_a_file_reaches_the_terminal_as_a_command():
    wild = "a\x1b[31m\x07\u202e\ud800\nb"
    source = SourceText(f"{wild}.json", f"\t{wild.replace(chr(10), '')} = 1")
    diagnostic = Diagnostic(severity="error", code="X522", message=f"`{wild}` is not known", span=source.span(1, 10),
                            hint=f"remove {wild}", notes=((wild, source.span(1, 2)), (wild, None)))  # fmt: skip
    title, line, carets, *notes = render(diagnostic).split("\n")
    shown = r"a\u{1b}[31m\u{7}\u{202e}\u{d800}"
    assert title == rf"{shown}\nb.json:1:2: error[X522]: `{shown}\nb` is not known"
    assert line == f"    1 |     {shown}b = 1" and carets.startswith(f"      |     {'^' * len(shown)} remove a")
    assert len(notes) == 4 and all(each.isprintable() for each in notes)


def test_json_has_places_and_the_fix():
    source = SourceText("s.xtrain", "a = 1\nbb = 2\n")
    diagnostic = Diagnostic(severity="warning", code="W201", message="m", span=source.span(6, 8),
                            notes=(("n", source.span(0, 1)),), fix=Fix(source.span(6, 8), "cc"))  # fmt: skip
    found = json.loads(json.dumps(diagnostic.to_json()))
    assert (found["path"], found["line"], found["column"], found["end_column"]) == ("s.xtrain", 2, 1, 3)
    assert found["notes"] == [
        {"message": "n", "path": "s.xtrain", "line": 1, "column": 1, "end_line": 1, "end_column": 2}
    ]
    assert found["fix"]["replacement"] == "cc" and found["fix"]["line"] == 2


def test_source_order_without_twins():
    first, second = SourceText("a", "xyz", order=0), SourceText("b", "xyz", order=1)
    found = Diagnostics()
    for span in (second.span(0, 1), first.span(2, 3), first.span(0, 1), first.span(2, 3)):
        found.error("X101", "m", span)
    assert [(d.span.source.path, d.span.start) for d in found] == [("a", 0), ("a", 2), ("b", 0)]


def test_five_unrelated_mistakes_are_all_reported_in_order(codes):
    text = """
experiment quickstart { budget = 600 stps }
model qwen3 { dim = "192", leyers = 4 }
optimizer adamw { lr = }
every 10 steps evaluate stdlib
batch { micro = 10 steps + 3 tokens, accumulate = widht * 2, rows = 0 }
scheduler cosin
"""
    assert codes(text) == ["X107", "X301", "X203", "X106", "X214", "X303", "X202", "X304", "X305"]


@pytest.mark.parametrize(("text", "expected"), [
    ("let a = [ * ]", "a value or `]`"),
    ("let a = ->", "a value"),
    ("let a = { : }", "a name, a string or `}`"),
    ("let *", "a name"),
    ("param a *", "`=`"),
])  # fmt: skip
def test_what_may_stand_instead_of_an_unexpected_sign(load, text, expected):
    (found,) = [d for d in load(text).diagnostics if d.code == "X101"]
    assert found.hint == f"expected {expected}"


def test_fixes_can_be_applied(load):
    text = 'batch { sequence: "512", micro = 4.0 }\nparallel { tp = 2 }\noptimizer adamw { lr 1e-3; lr2 = 3 }'
    loaded = load(text)
    fixes = [d.fix for d in loaded.diagnostics if d.fix]
    assert len(fixes) == 6
    whole = loaded.sources[0].text
    for span, replacement in sorted(fixes, key=lambda fix: -fix.span.start):
        whole = whole[: span.start] + replacement + whole[span.end :]
    assert whole.endswith(
        "batch { sequence = 512, micro = 4 }\nparallel { tp 2 }\noptimizer adamw { lr = 1e-3, lr2 = 3 }"
    )


def test_a_block_where_a_setting_belongs_is_reported_wherever_it_is_written(load):
    again = "log { tensorboard { a = 1 } }\n"
    for text in ("log { tensorboard {}\n tensorboard {} }", 2 * again):
        found = [(d.code, d.span.text) for d in load(text).diagnostics]
        assert found == 2 * [("X210", "tensorboard")], text
