"""Names of the user's own: where they are defined and used, and what renaming them writes."""

import time
from pathlib import Path

import pytest

from xtrain.lsp.analysis import Analysis, OpenSpecs
from xtrain.lsp.names import RenameRefused, definitions, occurrences, references, rename

ROOT = Path(__file__).parents[2]
BASE = """\
let width = 64  # of this file alone
param ranks = 2
model qwen3 { dim = width, layers = 1, heads = 2 }
dataset web { source = synthetic(), holdout = 10% }
dataset "old data" { source = synthetic(seed = 2), holdout = 10% }
"""
MAIN = """\
include "base.xtrain"
use "sums.py"
let width = 5
experiment e { budget = 2 * width * 1 step }
tokenizer bytes
dataset drills { source = sums(count = 100) }
mixture { web = 0.5, drills = 0.5 }
phase late { from = 5 steps, mix = { web: 0.1, "drills": 1 } }
batch { sequence = 64, rows = 2 * ranks }
optimizer adamw { lr = 1e-3 }
parallel { fsdp ranks }
every width * 1 step eval web then eval "old data"
checkpoint { best = eval.web.loss }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "base.xtrain").write_text(BASE)
    (tmp_path / "main.xtrain").write_text(MAIN)
    (tmp_path / "sums.py").write_bytes((ROOT / "specs" / "sums.py").read_bytes())
    return tmp_path


@pytest.fixture
def analysis(folder: Path) -> Analysis:
    found = OpenSpecs().analysis(str(folder / "main.xtrain"))
    assert not found.diagnostics.has_errors, found.diagnostics.render()
    return found


def places(found, folder: Path) -> list[str]:
    return [f"{Path(span.source.path).name}:{span.line}:{span.column} {span.text}" for span in found]


def at(text: str, word: str) -> int:
    return text.index(word) + 1


@pytest.mark.parametrize(("word", "expected"), [
    ("width * 1 step }", "main.xtrain:3:5 width"),
    ("ranks }\nopt", "base.xtrain:2:7 ranks"),
    ("ranks }\nevery", "base.xtrain:2:7 ranks"),  # the label of a block
    ("web = 0.5", "base.xtrain:4:9 web"),
    ("web: 0.1", "base.xtrain:4:9 web"),
    ("web then", "base.xtrain:4:9 web"),
    ("web.loss", "base.xtrain:4:9 web"),
    ('"old data"', 'base.xtrain:5:9 "old data"'),
    ('"drills"', "main.xtrain:6:9 drills"),
    ("sums(count", "sums.py:16:5 sums"),
    ('"base.xtrain"', "base.xtrain:1:1 "),
    ('"sums.py"', "sums.py:1:1 "),
])  # fmt: skip
def test_a_name_leads_to_its_definition(analysis: Analysis, folder: Path, word: str, expected: str):
    found = definitions(analysis, analysis.root, at(MAIN, word))
    assert places(found, folder) == [expected]


def test_a_constant_of_a_file_is_not_that_of_another(analysis: Analysis, folder: Path):
    base = str(folder / "base.xtrain")
    assert places(references(analysis, base, at(BASE, "width")), folder) == [
        "base.xtrain:1:5 width",
        "base.xtrain:3:21 width",
    ]
    assert len(references(analysis, analysis.root, at(MAIN, "width"))) == 3


@pytest.mark.parametrize(("old", "new"), [("web", "pages"), ("drills", "sums_of_two"), ("old data", "new data")])
def test_a_dataset_is_renamed_everywhere(folder: Path, old: str, new: str):
    (folder / "main.xtrain").write_text(MAIN.replace("checkpoint { best = eval.web.loss }\n", ""))
    found = OpenSpecs().analysis(str(folder / "main.xtrain"))
    (first, *_) = [each for each in occurrences(found) if each.name == old]
    after = applied(found, rename(found, first.span.source.path, first.span.start, new))
    assert after.spec is not None and found.spec is not None
    assert set(after.spec.datasets) == set(found.spec.datasets) - {old} | {new}
    assert list(after.diagnostics) == []
    again = [each for each in occurrences(after) if each.name == new]
    undone = applied(after, rename(after, again[0].span.source.path, again[0].span.start, old))
    assert undone.spec == found.spec


def applied(analysis: Analysis, edits) -> Analysis:
    texts = {source.path: source.text for source in analysis.loaded.sources}
    for span, text in sorted(edits, key=lambda edit: -edit[0].start):
        before = texts[span.source.path]
        texts[span.source.path] = before[: span.start] + text + before[span.end :]
    return Analysis.of(analysis.root, texts)


@pytest.mark.parametrize("word", ["width * 1 step }", "ranks }\nopt", "web.loss"])
def test_a_rename_changes_nothing_else(analysis: Analysis, word: str):
    edits = rename(analysis, analysis.root, at(MAIN, word), "another")
    after = applied(analysis, edits)
    assert len(edits) > 2 and not after.diagnostics.has_errors
    back = next(each for each in occurrences(after) if each.name == "another")
    undone = applied(
        after, rename(after, back.span.source.path, back.span.start, word[:5].strip(" .").partition(".")[0])
    )
    assert undone.spec == analysis.spec


@pytest.mark.parametrize(("word", "name", "why"), [
    ("width", "ranks", "`ranks` is defined twice"),
    ("width", "a name", "is not a name"),
    ("width", "none", "is not a name"),
    ("web", "drills", "`drills` already exists"),
    ("web", "my web", "is not allowed in"),  # of the metric
    ("old data", "a/b", "must not contain"),
    ("drills", "my drills", "an item begins with a name"),  # of the mixture
    ("sums(", "other", "only the names of"),
    ("adamw", "other", "only the names of"),
])  # fmt: skip
def test_a_rename_that_would_break_something_is_refused(analysis: Analysis, word: str, name: str, why: str):
    with pytest.raises(RenameRefused, match=why):
        rename(analysis, analysis.root, at(MAIN, word), name)


def test_what_a_sweep_varies_has_names_too(tmp_path: Path):
    path = tmp_path / "sweep.xtrain"
    text = (ROOT / "specs" / "sweep_cpu.xtrain").read_text(encoding="utf-8").partition("sweep {")[0]
    text = text.replace("ffn = 192", "ffn = wide") + (
        "let low = 3e-4\nparam wide = 192\nsweep {\n  optimizer.lr in log(low, 3e-2)\n  wide in [128, 192]\n"
        "  every.eval.stdlib in [6 steps, 12 steps]\n  dataset.stdlib.holdout in [4%, 5%]\n"
        "  objective = eval.stdlib.loss\n}\n"
    )
    path.write_text(text)
    found = OpenSpecs().analysis(str(path))
    assert not found.diagnostics.has_errors, found.diagnostics.render()
    for name, times in (("low", 2), ("wide", 3), ("stdlib", 5)):
        changed = rename(found, str(path), at(text, f"{name} "), "another")
        assert len(changed) == times == len(references(found, str(path), text.index(f"{name} in") + 1 if name == "wide"
                                                       else at(text, f"{name} ")))  # fmt: skip
        after = text
        for span, new in sorted(changed, key=lambda each: -each[0].start):
            after = after[: span.start] + new + after[span.end :]
        assert not OpenSpecs().analysis(str(path)).diagnostics.has_errors and after.count("another") == times
    with pytest.raises(RenameRefused, match="is not allowed in"):
        rename(found, str(path), at(text, "stdlib {"), "a b")


def test_a_text_of_blocks_without_end_has_no_names_and_no_outline(tmp_path: Path):
    from xtrain.lsp.analysis import symbols

    path = tmp_path / "deep.xtrain"
    path.write_text("model qwen3 {" * 2000)
    found = OpenSpecs().analysis(str(path))
    assert found.diagnostics.has_errors and occurrences(found) == [] and symbols(found, str(path)) == []


def test_a_text_of_many_empty_lines_is_looked_through_once(tmp_path: Path):
    specs, begun = OpenSpecs(), time.process_time()
    specs.open(str(tmp_path / "empty.xtrain"), "\n" * 60_000)
    specs.open(str(tmp_path / "other.xtrain"), "")
    assert len(specs.roots()) == 2
    assert time.process_time() - begun < 1
