"""What an editor shows of a spec besides its text: hover, hints, outline, colours, corrections."""

import sys
from pathlib import Path

import pytest
from lsprotocol import types as t

from xtrain.cli.main import main
from xtrain.dsl.diagnostics.diagnostic import SourceText
from xtrain.dsl.reference.vocabulary import EVENTS
from xtrain.dsl.schema import blocks
from xtrain.lsp.analysis import Analysis, OpenSpecs, all_corrections, corrections, symbols
from xtrain.lsp.hover import FIGURES, FIGURES_OF, cost, hints, hover
from xtrain.lsp.names import KINDS, colored
from xtrain.lsp.spec_server import Positions

ROOT = Path(__file__).parents[2]
LLAMA = ROOT / "specs" / "llama_8b_64gpu.xtrain"
SPEC = """\
let width = 2 * 32
let rate = 1e-3
experiment e { budget = 10 * 4 steps }
model qwen3 { dim = width, layers = 1, heads = 1 }
tokenizer bytes
dataset web { source = synthetic(), holdout = 10% }  # made up
batch { sequence = 64, rows = 8 }
optimizer adamw { lr = rate }
parallel { fsdp auto }
every 10 steps eval web { batches = 2 } then log
on sigterm checkpoint then stop
"""


def analysis_of(text: str, path: str = str(ROOT / "specs" / "shown.xtrain")) -> Analysis:
    specs = OpenSpecs()
    specs.open(path, text)
    return specs.analysis(path)


def shown(text: str, word: str) -> str:
    found = analysis_of(text)
    over = hover(found, found.root, text.index(word) + 1, found.plan())
    return over.text if over is not None else ""


@pytest.mark.parametrize(("word", "expected"), [
    ("budget", "**experiment.budget: 40 steps** → 40 steps, 20.5k tokens"),
    ("rows", "**batch.rows: 8** → 512 tokens a step · "),
    ("rows", "global batch size"),
    ("8 }", "**batch.rows: 8**"),
    ("batch {", "Settings: `sequence`"),
    ("qwen3", "`model qwen3 { … }`"),
    ("width,", "`let width = 2 * 32` = **64**"),
    ("width,", "**model.dim: 64** → "),
    ("rate }", "`let rate = 1e-3`"),
    ("web {", "dataset **web**: synthetic · share of rows"),
    ("eval", "`eval DATASET { … }`"),
    ("sigterm", EVENTS["sigterm"][0]),
    ("auto", "**parallel.fsdp.size: 1** (the only rank)"),
    ("every", "actions that run periodically"),
    ("let", "a constant of this file"),
    ("synthetic", "`synthetic("),
    ("batches", "batches to evaluate"),
])  # fmt: skip
def test_a_word_is_explained_and_has_its_value(word: str, expected: str):
    assert expected in shown(SPEC, word)


def test_nothing_is_said_of_a_comment_or_a_sign():
    assert shown(SPEC, "# made") == "" and shown(SPEC, " = 2 *") == ""


def test_a_mistake_has_the_page_of_its_code_and_no_plan_is_needed():
    text = SPEC.replace("rows", "rosw")
    assert "# X203" in shown(text, "rosw") and "**batch.sequence**" in shown(text, "sequence")


def test_costs_are_of_blocks_that_there_are_and_none_is_empty():
    found = analysis_of(LLAMA.read_text(), str(LLAMA))
    plan = found.plan()
    assert plan is not None and FIGURES_OF.keys() <= blocks.KINDS.keys()
    assert all(figure(plan) for figure in FIGURES.values())
    assert FIGURES.keys() == {name for names in FIGURES_OF.values() for name in names}


# 8.03B parameters on 64 ranks: two moments 8.03B · 8 / 64, a checkpoint 8.03B · 12; a step 512 · 8,192 tokens; the
# largest rank and the time of a step as `xtrain plan` gives them, and 23,842 · 7.68 s.
@pytest.mark.parametrize(("block", "figures"), [
    ("experiment", "23,842 steps, 100B tokens · 2.15 d"),
    ("launch", "64 ranks · 7.80 s a step"),
    ("cluster", "44.8 GiB a rank · 7.80 s a step"),
    ("model", "8.03B parameters · 57.9 GF a token · 44.8 GiB a rank · 7.80 s a step"),
    ("batch", "4.19M tokens a step · 44.8 GiB a rank · 7.80 s a step"),
    ("optimizer", "957 MiB of optimizer state a rank · 44.8 GiB a rank"),
    ("parallel", "64 ranks · 44.8 GiB a rank · 463 GiB sent a step and rank · 7.80 s a step"),
    ("activation", "44.8 GiB a rank · 57.9 GF a token · 7.80 s a step"),
    ("scheduler", "23,842 steps, 100B tokens"),
    ("checkpoint", "89.7 GiB a checkpoint"),
    ("tokenizer", ""),
])  # fmt: skip
def test_figures_of_a_block_are_those_of_the_plan(block: str, figures: str):
    plan = analysis_of(LLAMA.read_text(), str(LLAMA)).plan()
    assert plan is not None and cost(plan, block) == figures


def test_hints_show_what_is_derived_where_it_is_not_written():
    found = analysis_of(SPEC)
    assert [(SPEC[: h.at].rpartition("\n")[2], h.text) for h in hints(found, found.root)] == [
        ("let width = 2 * 32", " = 64")
    ]
    assert found.plan() is not None
    labels = {SPEC[: hint.at].rpartition("\n")[2]: hint.text for hint in hints(found, found.root)}
    assert labels["parallel { fsdp auto"] == " = 1"
    assert labels["experiment e { budget = 10 * 4 steps"] == " = 40 steps"
    assert labels["model qwen3 { dim = width"] == " = 64"
    assert labels["model qwen3"] == "  kv_heads = 1, head_dim = 64, ffn = 192, vocab = 258, qk_norm = true"
    assert labels["optimizer adamw { lr = rate"] == " = 0.001"
    assert labels["every 10 steps"] == " (4 times)"
    assert "let rate = 1e-3" not in labels  # says its value itself


def test_the_outline_has_every_statement():
    found = symbols(analysis_of(SPEC), str(ROOT / "specs" / "shown.xtrain"))
    names = [each.name for each in found]
    assert names == [
        "width", "rate", "experiment e", "model qwen3", "tokenizer bytes", "dataset web", "batch", "optimizer adamw",
        "parallel", "every 10 steps", "on sigterm",
    ]  # fmt: skip
    assert [each.name for each in found[6].inner] == ["sequence", "rows"] and found[9].detail == "eval web then log"


def test_every_word_has_the_colour_of_what_it_is():
    found = analysis_of(SPEC)
    pieces = [(SPEC[each.start : each.end], each.kind) for each in colored(found, found.root)]
    assert {kind for _, kind in pieces} <= set(KINDS)
    expected = [
        ("let", "keyword"), ("width", "variable"), ("experiment", "class"), ("e", "enumMember"), ("budget", "property"),
        ("steps", "keyword"), ("qwen3", "enumMember"), ("web", "namespace"), ("synthetic", "function"),
        ("10%", "number"),
        ("# made up", "comment"), ("rate", "variable"), ("auto", "keyword"), ("eval", "function"), ("then", "keyword"),
        ("log", "function"), ("sigterm", "event"), ("stop", "function"), ("fsdp", "class"),
    ]  # fmt: skip
    assert [each for each in expected if each not in pieces] == []
    starts = [each.start for each in colored(found, found.root)]
    assert starts == sorted(starts)


def test_a_correction_is_that_of_check_fix():
    text = SPEC.replace("budget", "budgt").replace("batches", "batchs")
    found = analysis_of(text)
    (one,) = corrections(found, found.root, text.index("budgt"), text.index("budgt"))
    assert one.title == "Replace `budgt` with `budget`"
    whole = all_corrections(found)
    assert whole is not None and [new for _, new in whole.edits] == [SPEC]
    assert all_corrections(analysis_of(SPEC)) is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_positions_count_in_the_units_of_the_editor(encoding: str):
    source = SourceText("x", "a😀ü\n\nlast 😀")
    positions = Positions(encoding)
    for offset in range(len(source.text) + 1):
        assert positions.offset(source, positions.position(source, offset)) == offset
    behind = {"utf-8": 1 + 4 + 2, "utf-16": 1 + 2 + 1, "utf-32": 3}[encoding]
    assert positions.position(source, 3) == t.Position(0, behind)
    assert positions.offset(source, t.Position(0, 99)) == 3
    assert positions.offset(source, t.Position(9, 0)) == len(source.text)


def test_without_pygls_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(sys.modules, "lsprotocol", None)
    monkeypatch.delitem(sys.modules, "xtrain.lsp.server", raising=False)
    assert main(["lsp"]) == 2 and 'pip install "xtrain[lsp]"' in capsys.readouterr().err
