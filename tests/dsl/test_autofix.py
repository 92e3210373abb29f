"""Fixes: what is certain is written, what is likely is not; and what was broken in a known way is put back."""

import random
import re
from functools import cache
from itertools import islice
from pathlib import Path

import examples
import pytest
from examples import drawn, each
from hypothesis import given
from hypothesis import strategies as st

from xtrain.dsl.autofix import PASSES, apply_fixes, fixable
from xtrain.dsl.diagnostics.diagnostic import Diagnostics, Fix, SourceText
from xtrain.dsl.diagnostics.suggest import certain, without
from xtrain.dsl.load import load_spec
from xtrain.dsl.schema import blocks
from xtrain.dsl.schema.setting import settings_of
from xtrain.dsl.syntax.lexer import tokenize
from xtrain.planner.load import check_from_spec

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).parent / "data"
GALLERY = Path(__file__).parent / "gallery"
BASE = (DATA / "quickstart.xtrain").read_text(encoding="utf-8")


def fix_all(text, **files):
    """A spec and what it includes, with the fixes of its diagnostics applied: all texts, the spec first."""
    texts = {"spec.xtrain": text, **{f"{stem}.xtrain": content for stem, content in files.items()}}
    found = apply_fixes(lambda changed: load_spec("spec.xtrain", (), {**texts, **changed}).diagnostics)
    return {**texts, **found.texts}, found


def line(text):
    """What becomes of one line that overrides a good spec."""
    base = 'include "good.xtrain"\n'
    return fix_all(base + text, good=BASE)[0]["spec.xtrain"].removeprefix(base)


@pytest.mark.parametrize(("before", "after"), [
    # names
    ("batch { sequense = 512 }", "batch { sequence = 512 }"),
    ("batch { Sequence = 512 }", "batch { sequence = 512 }"),
    ("model qwen3 { hidden_size = 192 }", "model qwen3 { dim = 192 }"),
    ("optimizer adamw { decay_weight = 0.1 }", "optimizer adamw { weight_decay = 0.1 }"),
    ("optimzer adamw { lr = 1e-3 }", "optimizer adamw { lr = 1e-3 }"),
    ("every 10 steps lgo", "every 10 steps log"),
    ("on SIGTERM checkpoint then stop", "on sigterm checkpoint then stop"),
    ("scheduler cosin", "scheduler cosine"),
    ("scheduler cosine { shpe = sqrt }", "scheduler cosine { shpe = sqrt }"),  # wsd has it, cosine does not
    ("parallel { cp 2 { fold = ring_olny } }", "parallel { cp 2 { fold = ring_only } }"),
    ("collate = to_tensor -> flaten -> shift_tokens -> pack", "collate = to_tensor -> flatten -> shift_tokens -> pack"),
    ("collate = to_tensor -> flatten -> shift_tokens -> pack(algin = 2)",
        "collate = to_tensor -> flatten -> shift_tokens -> pack(align = 2)"),
    ("let width = 4\nbatch { micro = widht }", "let width = 4\nbatch { micro = width }"),
    ("let width = 4\nbatch { micro = 2 * widht }", "let width = 4\nbatch { micro = 2 * width }"),
    ("model qwen3 { tie_embeddings = Ture }", "model qwen3 { tie_embeddings = true }"),
    # signs, commas, brackets
    ("batch { sequence: 512, micro == 8, rows := 32 }", "batch { sequence = 512, micro = 8, rows = 32 }"),
    ("let m = { a = 1, b: 2 }\nlet n = m", "let m = { a: 1, b: 2 }\nlet n = m"),
    ("batch { sequence = 512; micro = 8 }", "batch { sequence = 512, micro = 8 }"),
    ("batch { sequence = 512 micro = 8 }", "batch { sequence = 512, micro = 8 }"),
    ("optimizer adamw { betas = [0.9 0.95] }", "optimizer adamw { betas = [0.9, 0.95] }"),
    ("optimizer adamw { betas = [0.9, , 0.95] }", "optimizer adamw { betas = [0.9, 0.95] }"),
    ("optimizer adamw { betas = [0.9, 0.95 }", "optimizer adamw { betas = [0.9, 0.95] }"),
    ("optimizer adamw { betas = [0.9, 0.95]] }", "optimizer adamw { betas = [0.9, 0.95] }"),
    ("batch { micro = 8", "batch { micro = 8 }"),
    ("batch {\n  micro = 8  # rows\n", "batch {\n  micro = 8  # rows\n}\n"),
    ("batch { micro = 8 } }", "batch { micro = 8 } "),
    ("batch\n{\n  micro = 8\n}", "batch {\n  micro = 8\n}"),
    ("model qwen3 = { dim = 192 }", "model qwen3 { dim = 192 }"),
    ("model = qwen3 { dim = 192 }", "model qwen3 { dim = 192 }"),
    ("optimizer adamw (lr = 1e-3, clip = none)", "optimizer adamw { lr = 1e-3, clip = none }"),
    ("parallel { tp = 2, fsdp = auto }", "parallel { tp 2, fsdp auto }"),
    ("tokenizer = bytes", "tokenizer bytes"),
    ("optimizer adamw { lr 1e-3 }", "optimizer adamw { lr = 1e-3 }"),
    ("optimizer { lr = 1e-3, kind = adamw }", "optimizer { lr = 1e-3, kind = adamw }"),
    # strings and comments
    ("tokenizer 'bytes'", 'tokenizer "bytes"'),
    ("workspace { root = “runs” }", 'workspace { root = "runs" }'),
    ("workspace { root = runs }", 'workspace { root = "runs" }'),
    ('workspace { root = "runs }', 'workspace { root = "runs" }'),
    ('tokenizer "bytes  # plain', 'tokenizer "bytes"  # plain'),
    ("// a comment", "# a comment"),
    ("batch { micro = 8 } // a comment", "batch { micro = 8 } # a comment"),
    ("batch { micro = 8 // rows of a microbatch\n}", "batch { micro = 8 # rows of a microbatch\n}"),
    ('launch { "threads" = 2 }', "launch { threads = 2 }"),
    ('dataset a { source = text "a.txt" }', 'dataset a { source = text("a.txt") }'),
    ('dataset a { source = "a.txt" }', 'dataset a { source = text("a.txt") }'),
    ('dataset a { source = "a.jsonl" }', 'dataset a { source = jsonl("a.jsonl") }'),
    ("dataset a { source = python_stdlib }", "dataset a { source = python_stdlib() }"),
    # numbers and units
    ("scheduler cosine { warmup = 5 Steps }", "scheduler cosine { warmup = 5 steps }"),
    ("scheduler cosine { warmup = 10stpes }", "scheduler cosine { warmup = 10steps }"),
    ("scheduler cosine { warmup = 10 percent }", "scheduler cosine { warmup = 10% }"),
    ("every 30 minutes log", "every 30 min log"),
    ("every 20 B tokens log", "every 20B tokens log"),
    ("experiment x { budget = 20 billion tokens }", "experiment x { budget = 20B tokens }"),
    ("experiment x { budget = 1,000,000 steps }", "experiment x { budget = 1_000_000 steps }"),
    ("batch { sequence = 8 k }", "batch { sequence = 8k }"),
    ("batch { sequence = 0x200 }", "batch { sequence = 512 }"),
    ("optimizer adamw { eps = .5, clip = 5. }", "optimizer adamw { eps = 0.5, clip = 5.0 }"),
    ("let n = 3\nexperiment x { budget = n steps }", "let n = 3\nexperiment x { budget = n * 1 steps }"),
    ("loss cross_entropy { chunk = 512 mib }", "loss cross_entropy { chunk = 512 MiB }"),
    # types
    ('batch { sequence = "512", micro = 4.0 }', "batch { sequence = 512, micro = 4 }"),
    ("model qwen3 { tie_embeddings = yes, qk_norm = 0 }", "model qwen3 { tie_embeddings = true, qk_norm = false }"),
    ('model qwen3 { tie_embeddings = "Off" }', "model qwen3 { tie_embeddings = false }"),
    ("batch { sequence = 512 tokens, micro = [8] }", "batch { sequence = 512, micro = 8 }"),
    ("optimizer adamw { weight_decay = 10%, clip = null }", "optimizer adamw { weight_decay = 0.1, clip = none }"),
    ("dataset stdlib { holdout = 0.05 }", "dataset stdlib { holdout = 5% }"),
    ('every 10 steps generate { prompts = "def " }', 'every 10 steps generate { prompts = ["def "] }'),
    # statements
    ("every 10 steps: log", "every 10 steps log"),
    ("every 10 steps log\n  then checkpoint", "every 10 steps log then checkpoint"),
    ("every 10 steps log checkpoint", "every 10 steps log then checkpoint"),
    ("collate = to_tensor\n  -> flatten -> shift_tokens -> pack",
        "collate = to_tensor -> flatten -> shift_tokens -> pack"),
    ("batch { micro = 8, micro = 8 }", "batch { micro = 8 }"),
    ("batch {\n  micro = 8\n  micro = 8  # again\n}", "batch {\n  micro = 8\n    # again\n}"),
    # one thing at a time: a name that is fixed shows what is wrong with its value
    ('optimizer adamw { learning_rate == "1e-3" }', "optimizer adamw { lr = 1e-3 }"),
    ("model qwen3_moe { experts = 8, router = { aux_loss = 1e-3 } }",
        "model qwen3_moe { experts = 8, router { aux_loss = 1e-3 } }"),
])  # fmt: skip
def test_what_is_certain_is_written(before, after):
    assert line(before) == after


@pytest.mark.parametrize("text", [
    "model qwen4",  # another digit is another family
    "parallel { sp 2 }",  # tp, pp, ep, cp are as near
    "batch { micro = 8, micr = 4 }",  # `micro` is there already
    "batch { micro = 8, micro = 4 }",  # which of the two?
    "batch { sequence = 8K }",  # 8,000 or 8,192
    "batch { sequence = 1 KiB, micro = 4 min }",  # another setting was meant
    "batch { micro = 50% }",  # no whole number
    "loss cross_entropy { chunk = 512MB }",  # 10^6 or 2^20
    "scheduler cosine { warmup = 50 }",  # steps or a share
    "every 10 log",
    "clip = 1.0",  # in which block, behind what
    'workspace { root = "C:\\runs\\new" }',
    "batch {\n  sequence = 512 }\n  micro = 8\n}",  # the first brace is wrong, not the last
    "batch { sequence = 7 // 2 3 }",  # that divides
    'dataset a { source = text(["a.txt", "b.txt"]) }',
    "optimizer adamw { betas = 0.9 }",  # a list of one is no better
    "let width = 4\nlet a = widht\nbatch { micro = 2 * a }",  # the mistake is in another line
])  # fmt: skip
def test_what_is_only_likely_is_left(text):
    assert line(text) == text
    assert load_spec("s", (), {"s": BASE + text}).diagnostics.has_errors


def test_a_value_is_not_written_over_a_constant_that_is_wrong():
    """The mistake stands where the name is defined."""
    text = 'let rate = "1e-3"\noptimizer adamw { lr = rate }'
    assert line(text) == text


def test_a_name_that_is_taken_is_not_given_twice():
    assert line("batch { micro = 8, micr = 4, sequense = 64 }") == "batch { micro = 8, micr = 4, sequence = 64 }"


def test_included_files_get_their_own_fixes():
    text = 'include "good.xtrain"\ninclude "part.xtrain"\nbatch { micr = 4 }'
    texts, found = fix_all(text, good=BASE, part="optimizer { rl = 1e-3 }\n")
    assert texts["part.xtrain"] == "optimizer { lr = 1e-3 }\n"
    assert texts["spec.xtrain"].endswith("batch { micro = 4 }")
    assert sorted(found.texts) == ["part.xtrain", "spec.xtrain"] and not found.diagnostics
    assert [d.fix.text for d in found.fixed] == ["micro", "lr"]


def test_an_include_that_has_no_effect_goes_with_its_line():
    text = 'include "part.xtrain"\ninclude "part.xtrain"  \nbatch { micro = 4 }\n'
    assert fix_all(BASE + text, part="")[0]["spec.xtrain"] == BASE + 'include "part.xtrain"\nbatch { micro = 4 }\n'


def test_the_path_of_an_include_is_fixed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "cluster.xtrain").write_text("")
    assert fix_all('include "parts/clustre.xtrain"')[0]["spec.xtrain"] == 'include "parts/cluster.xtrain"'


def test_the_command_line_is_not_fixed():
    sets = ["optimzer.lr=1", 'batch.micro="4"']
    calls = []
    found = apply_fixes(
        lambda texts: calls.append(texts) or load_spec(DATA / "quickstart.xtrain", sets, texts).diagnostics
    )
    assert not found.texts and not found.fixed and len(found.diagnostics) == 2 and calls == [{}]
    assert any(d.fix for d in found.diagnostics) and fixable(found.diagnostics) == 0


# The engine -----------------------------------------------------------------------------------------------------------


def checker(text, *rules):
    """A check of `text` by rules: code, pattern, replacement. Each match is a mistake with a fix."""

    def check(texts):
        source = SourceText("s", texts.get("s", text))
        found = Diagnostics()
        for code, pattern, replacement in rules:
            for match in re.finditer(pattern, source.text):
                span = source.span(*match.span())
                found.error(code, pattern, span, fix=Fix(span, match.expand(replacement)))
        return found

    return check


def test_fixes_that_touch_wait_for_the_next_pass():
    found = apply_fixes(checker("ab ab", ("X201", "a", "x"), ("X201", "b", "y")))
    assert found.texts == {"s": "xy xy"} and [d.fix.text for d in found.fixed] == ["x", "x", "y", "y"]


def test_brackets_that_are_missing_at_one_place_are_one_fix():
    calls = []
    text = BASE + "parallel {\n  tp 2 {\n    sequence = true\n"
    found = apply_fixes(lambda texts: calls.append(texts) or load_spec("s", (), {"s": text, **texts}).diagnostics)
    assert found.texts["s"] == text[:-1] + "\n  }\n}\n" and len(calls) == 2
    assert line("optimizer adamw { betas = [0.9, 0.95") == "optimizer adamw { betas = [0.9, 0.95] }"


def test_a_fix_that_makes_things_worse_is_not_kept():
    check = checker("a b", ("X201", "b", "y"), ("X101", "q", "q"), ("X301", "a", "q"))  # syntax hides what comes after
    found = apply_fixes(check)
    assert found.texts == {"s": "a y"} and [d.code for d in found.diagnostics] == ["X301"]
    assert not apply_fixes(checker("a", ("X101", "q", "q"), ("X301", "a", "q"))).texts
    assert apply_fixes(checker("a", ("X301", "q", "q"), ("X101", "a", "qq"))).texts == {
        "s": "qq"
    }  # two that it has hidden


def test_fixes_that_never_end_are_stopped():
    calls = []
    check = checker("a", ("X201", "a+", r"\g<0>a"))
    assert not apply_fixes(lambda texts: calls.append(texts) or check(texts)).texts
    assert len(calls) <= 2 * PASSES + 1
    assert not apply_fixes(checker("a", ("X201", "a", "b"), ("X201", "b", "a"))).texts


@pytest.mark.parametrize(("text", "item", "after"), [
    ("a = 1\nb = 2\nc = 3", "b = 2", "a = 1\nc = 3"),
    ("  b = 2  ", "b = 2", ""),
    ("{ a = 1, b = 2 }", "b = 2", "{ a = 1 }"),
    ("{ b = 2, a = 1 }", "b = 2", "{ a = 1 }"),
    ("{ b = 2 }", "b = 2", "{  }"),
    ("{ a = 1\n  b = 2 }", "b = 2", "{ a = 1\n   }"),
    ("{\n  a = 1, b = 2\n}", "b = 2", "{\n  a = 1\n}"),
])  # fmt: skip
def test_without(text, item, after):
    source = SourceText("s", text)
    start = text.index(item)
    span, new = without(source.span(start, start + len(item)))
    assert new == "" and text[: span.start] + text[span.end :] == after


# Known mistakes, put back ---------------------------------------------------------------------------------------------

SPECS = [p for p in sorted((ROOT / "specs").glob("*.xtrain")) if "include" not in p.read_text(encoding="utf-8")]
SPECS += sorted((ROOT / "dsl" / "starters").glob("*.xtrain"))
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in SPECS} | {"quickstart": BASE}


def tokens(text, kind):
    """The tokens of a kind, comments left out."""
    return [t for t in tokenize(SourceText("s", text), Diagnostics()) if t.type == kind]


def swapped(word, dice):
    place = dice.randrange(len(word) - 1)
    return word[:place] + word[place + 1] + word[place] + word[place + 2 :]


def replaced(text, start, end, new):
    return text[:start] + new + text[end:]


def settings_in(text):
    """The names before `=`, with what follows them."""
    found = re.finditer(r"(?<=[{,\n ])([a-z_]{4,})( = )([^,}\n#]*[^,}\n# ])", text)
    return [match for match in found if not _in_comment(text, match)]


def _in_comment(text, match):
    return "#" in text[text.rfind("\n", 0, match.start()) + 1 : match.start()]


def break_name(text, dice):
    name = dice.choice(settings_in(text))
    return replaced(text, name.start(1), name.end(1), swapped(name[1], dice))


def break_sign(text, dice):
    name = dice.choice(settings_in(text))
    return replaced(text, name.start(2), name.end(2), dice.choice((": ", " == ", " := ")))


def break_case(text, dice):
    name = dice.choice(settings_in(text))
    return replaced(text, name.start(1), name.end(1), name[1].capitalize())


def break_number(text, dice):
    names = [m for m in settings_in(text) if re.fullmatch(r"[0-9.e+-]+", m[3])]
    name = dice.choice(names)
    return replaced(text, name.start(3), name.end(3), f'"{name[3]}"')


def break_unit(text, dice):
    units = [m for m in re.finditer(r"(?<=[0-9kBT] )(steps|tokens)\b", text) if not _in_comment(text, m)]
    unit = dice.choice(units)
    wrong = dice.choice((unit[1].upper(), swapped(unit[1], dice)))
    return replaced(text, unit.start(1), unit.end(1), wrong)


def break_comma(text, dice):
    commas = [t for t in tokens(text, "_COMMA") if text[t.end : t.end + 1] == " "]
    comma = dice.choice(commas)
    return replaced(text, comma.start, comma.end, "")


def break_block(text, dice):
    heads = list(re.finditer(r"^([a-z]{4,})(?= )", text, re.MULTILINE))
    heads = [m for m in heads if m[1] in blocks.KINDS]
    head = dice.choice(heads)
    return replaced(text, head.start(1), head.end(1), swapped(head[1], dice))


def break_quotes(text, dice):
    # In single quotes a backslash is taken as it stands, as TOML does: `\n` there is no line end.
    strings = [t for t in tokens(text, "STRING") if "'" not in t.text and "\\" not in t.text]
    string = dice.choice(strings)
    return replaced(text, string.start, string.end, f"'{string.text[1:-1]}'")


def break_bracket(text, dice):
    """Leave out a bracket that closes a list or a call before the end of its line."""
    brackets = [t for kind in ("RSQB", "RPAR") for t in tokens(text, kind) if text[t.end : t.end + 1] in " },\n"]
    bracket = dice.choice(brackets)
    return replaced(text, bracket.start, bracket.end, "")


def break_last_brace(text, dice):
    braces = [t for t in tokens(text, "RBRACE") if text[t.start - 1] == "\n"]
    brace = dice.choice(braces)
    return replaced(text, brace.start, brace.end, "")


MISTAKES = [
    break_name, break_sign, break_case, break_number, break_unit, break_comma, break_block, break_quotes,
    break_bracket, break_last_brace,
]  # fmt: skip


# As if it lay beside the examples, whose own parts it may use.
SPEC = str(Path(__file__).parents[2] / "specs" / "s.xtrain")


@cache
def judged(text):
    """What the whole checker says, the planner's rules included; of each text once."""
    return check_from_spec(SPEC, (), {SPEC: text})


def fixed(bad):
    return apply_fixes(lambda texts: judged({SPEC: bad, **texts}[SPEC]))


@drawn(8, 1000)
@given(st.sampled_from(sorted(TEXTS)), st.sampled_from(MISTAKES), st.integers(0, 10_000))
def test_a_known_mistake_is_put_back(name, mistake, seed):
    """What was broken once is whole again: the same spec, or, where two things can have been meant, the broken text."""
    good = TEXTS[name]
    try:
        bad = mistake(good, random.Random(seed))
    except IndexError:  # nothing of the kind in this spec
        return
    before = judged(bad)
    found = fixed(bad)
    after = found.texts.get(SPEC, bad)
    if not before.has_errors:
        assert not found.texts  # the mistake has another meaning, as `a - b` has without its comma
    elif found.texts:
        assert len(found.diagnostics.errors) < len(before.errors)
        loaded = load_spec(SPEC, (), {SPEC: after})
        assert loaded.spec is not None, loaded.diagnostics.render()
        assert loaded.spec == load_spec(SPEC, (), {SPEC: good}).spec
    assert judged(after).has_errors == found.diagnostics.has_errors


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_most_known_mistakes_are_fixed(mistake):
    """Of the mistakes that the last test allows to be left, most are not."""
    tried = whole = 0
    for seed in range(12):
        good = TEXTS[sorted(TEXTS)[seed % len(TEXTS)]]
        try:
            bad = mistake(good, random.Random(seed))
        except IndexError:
            continue
        if judged(bad).has_errors:
            found = fixed(bad)
            tried, whole = tried + 1, whole + (not found.diagnostics.has_errors)
    # Behind `(` a setting of the block may be an argument: mostly nobody knows where such a bracket is missing.
    share = 0.3 if mistake is break_bracket else 0.8
    assert tried >= 4 and whole >= share * tried, (whole, tried)


def every_name():
    """(names among which one is looked for, name) for all fields of the schema."""
    for block in (*blocks.KINDS.values(), *blocks.ACTIONS.values(), *blocks.nested(blocks.KINDS["parallel"]).values()):
        names = tuple(settings_of(block))
        yield from ((names, name) for name in names)
    yield from ((tuple(blocks.KINDS), kind) for kind in blocks.KINDS)


def test_one_slip_of_a_finger_never_leads_to_another_name():
    some = islice(every_name(), 0, None, 1 if examples.is_long else 4)
    each(((name, (names, name)) for names, name in some), leads_to_no_other)


def leads_to_no_other(names, name):
    slips = {name[:i] + name[i + 1 :] for i in range(len(name))}
    slips |= {name[:i] + name[i + 1 : i + 2] + name[i : i + 1] + name[i + 2 :] for i in range(len(name) - 1)}
    slips |= {name[:i] + "z" + name[i:] for i in range(len(name) + 1)}
    for slip in slips - set(names):
        assert certain(slip, names) in (name, None), slip


# Whatever it is given -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(GALLERY.glob("*.xtrain")), ids=lambda path: path.stem)
def test_the_gallery_gets_better_or_stays(path, monkeypatch):
    """A second call has nothing left to do, and whatever was written has made the spec better."""
    monkeypatch.chdir(GALLERY)
    first = apply_fixes(lambda texts: check_from_spec(path.name, (), texts))
    second = apply_fixes(lambda texts: check_from_spec(path.name, (), {**first.texts, **texts}))
    assert not second.texts
    assert bool(first.texts) == bool(first.fixed)
    if first.fixed:
        before = check_from_spec(path.name)
        was, now = ([sum(d.code.startswith(k) for d in found) for k in ("X1", "X2", "X3", "X", "")] for found in
                    (before, first.diagnostics))  # fmt: skip
        assert now < was
